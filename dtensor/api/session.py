"""A session: a launched cluster, and what of the controller's state lives on it.

    with launch(mesh, backend="ray"):        # default: in-process
        ...
Outside a launch there is an implicit in-process session per mesh.

A parallelized module becomes resident at first use: the controller's values are cut into shards
and put on the ranks; from then on the cluster's values count, until the launch ends, which discards
them (one warning if they changed and were neither gathered nor loaded elsewhere).
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from dtensor.api.initial import init_program
from dtensor.api.parallel import ParallelModule
from dtensor.api.randomness import Counter
from dtensor.api.stating.stages import StagePlan
from dtensor.daft import Cluster, DaftError, Future, Handle, Mode, launch_cluster
from dtensor.daft.cluster.part import Part
from dtensor.daft.run.worker import Counted
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.graph import named_tensors
from dtensor.frontend.initial.recipe import Recipe
from dtensor.runtime.lower.program import holders, on_mesh
from dtensor.runtime.shard_optimizer import NAMES, ShardOptimizer, hyperparameters
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.ops.philox import Pieces
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec

Backend = Literal["inprocess", "ray"]

MOST_GARBAGE = 32
MOST_GARBAGE_BYTES = 2**26
"""How many values that nobody refers to, and bytes of them all, may wait to be dropped: dropping
them is a call to every actor."""


@dataclass(slots=True)
class OptimizerHome:
    """One torch optimizer, the table's name of its shards, whether they hold masters, and the
    names by group that the ranks know."""

    optimizer: torch.optim.Optimizer
    name: str
    masters: bool
    groups: tuple[tuple[str, ...], ...]
    unsure: object = None  # of the last step that was given names, which may yet be undone

    def options(self, groups: tuple[tuple[str, ...], ...]) -> tuple[dict[str, Any], ...]:
        """What a step is fed: each group's options, and its names where the groups changed, until a
        step that was given them has ended well."""
        found = hyperparameters(self.optimizer)
        if groups == self.groups and self.unsure is None:
            return found
        self.groups, self.unsure = groups, object()
        return tuple({**given, NAMES: names} for given, names in zip(found, groups, strict=True))

    def ended(self, unsure: object) -> None:
        """A step has ended well; ``unsure`` as it was when that was given its options."""
        if unsure is self.unsure:
            self.unsure = None


@dataclass(slots=True)
class Resident:
    """A model's state on the cluster: table names begin with ``prefix``."""

    model: ParallelModule
    prefix: str
    version: int
    specs: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    states: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])  # of optimizers
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    optimizers: dict[int, OptimizerHome] = field(default_factory=dict)  # by id(optimizer)
    placed: Plan | None = None  # the last that `place` was given: nothing of it is missing
    changed: bool = False
    saved: tuple[str, int] = ("", 0)  # the last state that is elsewhere too, and its step

    def name(self, label: str) -> str:
        return f"{self.prefix}{label}"


class MeshSession:
    """See the module docstring. ``mode``: how programs run, compiled or interpreted."""

    def __init__(self, mesh: Mesh, cluster: Cluster, mode: Mode) -> None:
        self.mesh = mesh
        self.cluster = cluster
        self.mode: Mode = mode
        self.timed: tuple[Handle, Future, float] | None = None  # and when it was called
        self.closed = False
        self.residents: dict[int, Resident] = {}
        self.loaded: dict[object, Any] = {}
        self.garbage: list[tuple[str, tuple[int, ...]]] = []
        self.garbage_bytes = 0  # as if no rank held a part
        self.settling: list[Callable[[], None]] = []  # wait for what is under way
        self.failure_was_read = False
        self.said_lost = False
        self.undone: dict[str, int] = {}  # of what is counted: runs that are known to be
        self.parts: dict[Mesh, MeshSession] = {}  # other meshes on ranks of this cluster

    # -- values -----------------------------------------------------------------------------------

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(
                "the launch that this value belongs to has ended, and its shards with it; "
                "fix: read values inside the `with dt.launch(...)` block"
            )

    def put(self, values: Sequence[Mapping[str, object]]) -> None:
        self.check()
        self._collect()
        self.cluster.put(values)

    def fetch(self, name: str, ranks: Sequence[int]) -> list[Any]:
        self.check()
        wanted = [[name] if r in ranks else [] for r in range(self.mesh.size)]
        try:
            found = self.cluster.get(wanted).get()
        except DaftError as error:
            raise self.told(error) from error.__cause__
        return [found[r][0] for r in ranks]

    def told(self, error: DaftError) -> DaftError:
        """The error; where the state is lost with it, it says which was saved last."""
        if error is self.cluster.failure and not self.said_lost:
            self.said_lost = True
            parts = ["the state on the ranks is lost"]
            for home in self.residents.values():
                where, step = home.saved
                back = home.model.steps.present() - step
                parts.append(f"{where}, of step {step}, {back} before this one")
            error.add_note("; ".join(parts))
        return error.with_traceback(None)  # of where it was raised before: no news to the user

    def forget(self, name: str, ranks: tuple[int, ...], nbytes: int) -> None:
        """Called when a value is garbage: a later call drops its shards, many at once."""
        if not self.closed:
            self.garbage.append((name, ranks))
            self.garbage_bytes += nbytes

    def _collect(self) -> None:
        if not self.garbage or self.cluster.failure is not None:
            return
        names: list[list[str]] = [[] for _ in range(self.mesh.size)]
        for name, ranks in self.garbage:
            for rank in ranks:
                names[rank].append(name)
        self.garbage, self.garbage_bytes = [], 0
        self.cluster.delete(names)

    def run(
        self,
        handle: Any,
        inputs: Sequence[Mapping[str, object]],
        keep: Mapping[str, str],
        counted: Counted | None = None,
    ) -> Future:
        self.check()
        if len(self.garbage) >= MOST_GARBAGE or self.garbage_bytes >= MOST_GARBAGE_BYTES:
            self._collect()
        if self.mode == "timed":
            self.cluster.get([()] * self.mesh.size).get()  # what was asked for before is done
        called = time.monotonic()
        future = self.cluster.run(handle, inputs, mode=self.mode, keep=keep, counted=counted)
        if self.mode == "timed":
            self.timed = handle, future, called
        return future

    @property
    def at_once(self) -> bool:
        """Whether a run has ended when `run` returns, so that its failure can be raised there."""
        return self.cluster.immediate or self.mode == "interpreted"

    def counted(self, name: str, counter: Counter, *, takes: bool) -> Counted:
        """A run that is one of what ``counter`` counts, under a name of this session."""
        counter.present()
        key = f"{name} {counter.resets}"
        return Counted(key, self.undone.get(key, 0), STEP, takes)

    def give_back(self, counter: Counter, counted: Counted) -> None:
        """The run was undone: its number is the next one's."""
        self.undone[counted.key] = self.undone.get(counted.key, 0) + 1
        counter.give_back(int(counted.key.rpartition(" ")[2]))

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within: runs are timed, and the last of them is ``timed``."""
        before, self.mode = self.mode, "timed"
        try:
            yield
        finally:
            self.mode = before

    # -- models -----------------------------------------------------------------------------------

    def resident(self, model: ParallelModule) -> Resident:
        found = self.residents.get(id(model))
        if found is None:
            _warn_of_other_values(self, model)
            found = Resident(model, f"model {len(self.residents)}: ", model.version)
            self.residents[id(model)] = found
            found.saved = "the controller has what was put there", model.steps.present()
        if found.version != model.version:  # the controller loaded other values
            found.version = model.version
            found.specs.clear()
            found.placed = None
            found.optimizers.clear()
            found.changed = False
            found.saved = "the controller has what was loaded", model.steps.present()
        return found

    def place(self, model: ParallelModule, plan: Plan, stages: StagePlan) -> None:
        """Put the parameters and buffers that a program needs where they are missing."""
        resident = self.resident(model)
        if resident.placed is plan:
            return
        model.settle(plan, stages)
        tensors = named_tensors(model.module)
        values: list[dict[str, object]] = [{} for _ in range(self.mesh.size)]
        made: list[dict[str, tuple[Recipe, Pieces]]] = [{} for _ in range(self.mesh.size)]
        for item in plan.inputs:
            if item.kind not in ("parameter", "buffer"):
                continue
            spec = on_mesh(plan, item.held)
            resident.states[item.label] = on_mesh(plan, item.state)
            ranks = holders(plan, item)
            known = resident.specs.get(item.label)
            if known is not None and known != spec:
                raise PlanningError(
                    f"{item.label} is stored as {known}, this program wants it stored as {spec}"
                )
            missing = set(ranks) - set(resident.ranks.get(item.label, ()) if known else ())
            recipe = model.initial.recipe(item.label)
            for rank in sorted(missing):
                here = self.mesh.coordinates(rank)
                if recipe is not None:
                    pieces = tuple(spec.intervals(d, here) for d in range(len(spec.shape)))
                    made[rank][item.label] = (recipe, pieces)
                    continue
                value = model.initial.value(item.label, tensors[item.label].detach())
                values[rank][resident.name(item.label)] = shard_of(value, spec, here)
            if missing:
                had = set(resident.ranks.get(item.label, ())) if known else set[int]()
                resident.specs[item.label] = spec
                resident.ranks[item.label] = tuple(sorted(had | set(ranks)))
        if any(values):
            self.put(values)
        if any(made):  # the ranks make their own shards
            kept = {label: resident.name(label) for wanted in made for label in wanted}
            handle = self.cluster.load(init_program(made, self.cluster.device))
            self.run(handle, [{} for _ in made], kept).get()
        resident.placed = plan

    def place_optimizer(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        groups: tuple[tuple[str, ...], ...],
        plan: Plan,
        stages: StagePlan,
        *,
        masters: bool,
    ) -> OptimizerHome:
        """The optimizer's state goes to the cluster with its first step: each rank gets a
        `ShardOptimizer` of the parameters that it holds. A tensor of its parameter's shape is cut
        as the plan says that the state is stored; numbers are copied.

        PlanningError where two steps share an optimizer and one of them wants masters.
        """
        resident = self.resident(model)
        home = resident.optimizers.get(id(optimizer))
        if home is not None:
            if home.masters != masters:
                raise PlanningError(
                    f"two steps share a {type(optimizer).__name__}: one has "
                    f"master_weights={home.masters}, this one master_weights={masters}.\n"
                    f"fix: master_weights={home.masters} here too, or an optimizer of its own"
                )
            return home
        # the parameters first: their specs say how the state is cut
        self.place(model, plan, stages)
        name = f"{resident.prefix}optimizer {len(resident.optimizers)}"
        names = {id(p): label for label, p in model.module.named_parameters()}
        state = {names[id(p)]: kept for p, kept in optimizer.state.items() if id(p) in names}
        trained = {label for group in groups for label in group}
        cut: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.mesh.size)]
        for item in plan.inputs:
            if item.kind == "parameter" and item.label in trained and item.label in state:
                spec = resident.states[item.label]
                for rank in holders(plan, item):
                    kept = state[item.label].items()
                    cut[rank][item.label] = {k: self._cut(v, spec, rank) for k, v in kept}
        kind = type(optimizer)
        self.put([{name: ShardOptimizer(kind, groups, own, masters)} for own in cut])
        home = OptimizerHome(optimizer, name, masters, groups)
        resident.optimizers[id(optimizer)] = home
        return home

    def _cut(self, value: Any, spec: TensorSpec, rank: int) -> Any:
        """A state tensor of the parameter's shape is cut as the parameter is."""
        if isinstance(value, torch.Tensor) and tuple(value.shape) == spec.shape and spec.shape:
            local = TensorSpec(spec.shape, value.dtype, spec.mesh, spec.placements)
            return shard_of(value, local, self.mesh.coordinates(rank))
        return value

    def settle(self) -> None:
        """Wait for what is under way; a failure that nobody has read raises here."""
        if not self.failure_was_read:
            for wait in self.settling:
                wait()
            for part in self.parts.values():
                part.settle()
            if not isinstance(self.cluster, Part) and not self.cluster.immediate:
                self.cluster.check_undone()

    def part(self, mesh: Mesh, ranks: tuple[int, ...]) -> MeshSession:
        """The session of another mesh on ranks of this cluster, made at first use."""
        found = self.parts.get(mesh)
        if found is None:
            cluster = Part(self.cluster, ranks, f"part {len(self.parts)}: ")
            found = self.parts[mesh] = MeshSession(mesh, cluster, self.mode)
        return found

    # -- the end -----------------------------------------------------------------------------------

    def close(self, *, quiet: bool) -> None:
        if self.closed:
            return
        self.closed = True
        for part in self.parts.values():
            part.close(quiet=quiet)
        self.cluster.close()
        lost = [r.model for r in self.residents.values() if r.changed]
        if lost and not quiet:
            warnings.warn(
                f"the launch ended with changed state of {len(lost)} model(s) that was not "
                f"gathered; the controller's values are those from before. fix: "
                f"state = dt.gather_state_dict(model, opt) inside the launch",
                stacklevel=4,
            )


def _warn_of_other_values(session: MeshSession, model: ParallelModule) -> None:
    """The implicit session's values of a model do not follow it into a launch."""
    for other in _implicit.values():
        home = other.residents.get(id(model))
        if other is not session and home is not None and home.changed:
            home.changed = False
            warnings.warn(
                "the model was changed outside this launch and not gathered; the launch starts "
                "from the controller's values, those from before. fix: before the launch, "
                "dt.load_state_dict(model, opt, dt.gather_state_dict(model, opt))",
                stacklevel=_outside(),
            )


def _outside() -> int:
    """How many frames up the first caller is that is not of this package: what a warning names."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("dtensor."):
        frame, level = frame.f_back, level + 1
    return level


# -- which session ---------------------------------------------------------------------------------

_launched: list[MeshSession] = []
_implicit: dict[Mesh, MeshSession] = {}


def session_for(mesh: Mesh) -> MeshSession:
    """The launched session, a part of it, or the implicit in-process one of the mesh."""
    if _launched:
        session = _launched[-1]
        if mesh in session.parts:  # a transfer put values of that mesh on ranks of this launch
            return session.parts[mesh]
        if session.mesh != mesh:
            raise PlanningError(
                f"the running launch is on {session.mesh}, this program is for {mesh}; "
                f"fix: dt.launch({mesh!r}), or leave the launch first"
            )
        return session
    if mesh not in _implicit or _implicit[mesh].cluster.failure is not None:
        _implicit[mesh] = MeshSession(mesh, launch_cluster(mesh.size), "compiled")
    return _implicit[mesh]


def launched() -> MeshSession | None:
    """The session of the running launch."""
    return _launched[-1] if _launched else None


@contextmanager
def launch(
    mesh: Mesh,
    backend: Backend = "inprocess",
    device: str = "cpu",
    *,
    address: str | None = None,
    deadline_s: float = 60.0,
    call_deadline_s: float = 3600.0,
    mode: Mode = "compiled",
) -> Iterator[MeshSession]:
    """Start the ranks of ``mesh``; what runs inside the block runs there.

    Args:
        backend: "inprocess": all ranks in this process, deterministic; "ray": an actor per rank.
        device: "cpu" or "cuda". On "cuda", "inprocess" puts all ranks on this GPU; "ray" gives
            each rank a GPU of its own where Ray has enough, else one actor hosts all on one GPU.
        address: of a Ray cluster to join; otherwise one is started here, and stopped at the end.
        deadline_s: seconds after which a rank that makes no progress counts as failed.
        call_deadline_s: seconds that one computation of a rank may take, for which a warning is
            given after `deadline_s`.
        mode: "compiled": one call per actor and step; "interpreted": one instruction at a time.

    Raises daft's errors: a failed rank, with its instruction and the model's source line.
    """
    check_mesh(mesh)
    check_word("backend", backend, get_args(Backend))
    check_word("mode", mode, ("compiled", "interpreted"))
    # "meta" computes nothing: it shows what a step makes, and where
    if not isinstance(device, str) or not re.fullmatch(r"cpu|meta|cuda(:\d+)?", device):
        raise PlanningError(f'device={device!r}: it is "cpu" or "cuda"')
    check_number("deadline_s", deadline_s, above=0, fix="deadline_s=60.0")
    check_number("call_deadline_s", call_deadline_s, above=0, fix="call_deadline_s=3600.0")
    fix = 'address="127.0.0.1:6379", or leave it out'
    check_kind("address", address, str | None, "that of a Ray cluster", fix)
    if backend == "inprocess" and address is not None:
        raise PlanningError(
            f'address={address!r} is of a Ray cluster, and backend="inprocess" joins none.\n'
            f'fix: backend="ray", or leave address out'
        )
    if backend == "inprocess" and device.startswith("cuda") and not torch.cuda.is_available():
        raise PlanningError(f'device="{device}", and this process sees no GPU; fix: device="cpu"')
    if _launched:
        raise PlanningError("a launch is running already; leave it before starting another")
    cluster = launch_cluster(
        mesh.size,
        backend=backend,
        device=device,
        address=address,
        deadline_s=deadline_s,
        call_deadline_s=call_deadline_s,
    )
    session = MeshSession(mesh, cluster, mode)
    _launched.append(session)
    failed = False
    try:
        yield session
        session.settle()
    except BaseException:
        failed = True
        raise
    finally:
        _launched.remove(session)
        session.close(quiet=failed or cluster.failure is not None)
