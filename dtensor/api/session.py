"""A session: a mesh on ranks of a launched cluster, and what of the controller's state lives there.

    with launch(mesh, backend="ray"):        # default: in-process
        ...
    with launch(train, play):                # train has ranks 0..n-1, play those after
        ...
A `Launch` has a session for each mesh that it was started with, and for each that a transfer has
put values on. Outside a launch there is an implicit in-process one per mesh.

A parallelized module becomes resident at first use: the controller's values are cut into shards
and put on the ranks, and the module's tensors are away (resident.py). Leaving a launch brings them
home in place, by an exception too as long as the ranks live; with ``bring_home=False``, and where
the cluster has failed, what changed is gone, and reading it is an error.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from dtensor.api.away import AwayState, Entries
from dtensor.api.initial import OnDisk, Source, init_program
from dtensor.api.parallel import ParallelModule
from dtensor.api.randomness import Counter
from dtensor.api.resident import Named, OptimizerHome, Resident
from dtensor.api.stating.stages import StagePlan
from dtensor.api.together import Models
from dtensor.daft import Cluster, DaftError, Future, Mode, launch_cluster
from dtensor.daft.cluster.part import Part
from dtensor.daft.launching import Offer
from dtensor.daft.run.worker import Counted
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.graph import named_tensors, type_text
from dtensor.runtime.lower.program import holders, on_mesh
from dtensor.runtime.shard_optimizer import (
    MASTER,
    NUMBERS,
    ShardOptimizer,
    absent,
    keys_of,
    value_name,
)
from dtensor.runtime.simulate.trace import Noted
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.ops.philox import Pieces
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Update
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.shards import held as held_at
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec, alike

if TYPE_CHECKING:
    from dtensor.daft.cluster.log import Recovered


@dataclass(frozen=True, slots=True)
class Returned:
    """An output of a run that comes back with it, besides staying on the ranks."""

    run: Future
    output: str


Backend = Literal["inprocess", "ray"]
LocalKind = Literal["generated", "inductor"]


class UnderWay(Protocol):
    """A save (checkpoint.py), for whose end the launch waits."""

    def settle(self) -> None:
        """Wait; raises what failed, unless somebody has read it."""
        ...

    def over(self) -> bool:
        """Whether nobody need wait for it, or be told of it."""
        ...

    def told(self) -> str:
        """Wait; what failed, if nobody has read it, or ""."""
        ...


class MeshSession:
    """See the module docstring. ``cluster``: the mesh's ranks; ``mode``: how programs run, compiled
    or interpreted."""

    def __init__(self, mesh: Mesh, cluster: Cluster, launch: Launch) -> None:
        self.mesh = mesh
        self.cluster = cluster
        self.launch = launch
        self.mode: Mode = launch.mode
        self.noted: Noted | None = None  # the last run of those that are `noting`
        self._noting = False
        self.residents: dict[int, Resident] = {}
        self.loaded: dict[object, Any] = {}
        self.garbage: list[tuple[str, tuple[int, ...]]] = []
        self.settling: list[Callable[[], None]] = []  # wait for what is under way
        self.undone: dict[str, int] = {}  # of what is counted: runs that are known to be

    @property
    def closed(self) -> bool:
        return self.launch.closed

    @property
    def recoveries(self) -> Sequence[Recovered]:
        """What was lost of the launch's ranks, and replaced, so far; empty in-process."""
        return self.cluster.recoveries

    @property
    def local(self) -> LocalKind:
        """What local code is."""
        return self.launch.local

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers that the launch has for the mesh's ranks."""
        cluster = self.cluster
        return cluster.ranks if isinstance(cluster, Part) else tuple(range(cluster.size))

    # -- values -----------------------------------------------------------------------------------

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(
                "the launch that this value belongs to has ended, and its shards with it; "
                "fix: read values inside the `with dt.launch(...)` block"
            )

    def put(self, values: Sequence[Mapping[str, object]]) -> None:
        self.check()
        self.cluster.put(values, drop=self._garbage())

    def fetch(self, name: str, ranks: Sequence[int]) -> list[Any]:
        self.check()
        wanted = [[name] if r in ranks else [] for r in range(self.mesh.size)]
        try:
            found = self.cluster.get(wanted).get()
        except DaftError as error:
            raise self.told(error) from error.__cause__
        return [found[r][0] for r in ranks]

    def returned(self, of: Returned, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Shards of a run that came back with it, copies of them. Waits for that run alone."""
        self.check()
        try:
            if self.cluster.failure is not None:
                raise self.cluster.failure
            found = of.run.get()
        except DaftError as error:
            raise self.told(error) from error.__cause__
        return [found[r][of.output].clone() for r in ranks]

    def told(self, error: DaftError) -> DaftError:
        """The error; where the state is lost with it, it says which was saved last."""
        launch = self.launch
        if error is self.cluster.failure and not launch.said_lost:
            launch.said_lost = True
            meshes = ""
            if len(launch.sessions) > 1:
                from dtensor.api.several_meshes import listed

                meshes = f", on all meshes of the launch: {listed(launch.places)}"
            parts = [f"the state on the ranks is lost{meshes}"]
            for home in launch.residents:
                where, step = home.saved
                back = home.model.steps.present() - step
                parts.append(f"{where}, of step {step}, {back} before this one")
            error.add_note("; ".join(parts))
        return error.with_traceback(None)  # of where it was raised before: no news to the user

    def forget(self, name: str, ranks: tuple[int, ...]) -> None:
        """Called when a value is garbage: its shards are dropped with the next put or run."""
        if not self.closed:
            self.garbage.append((name, ranks))

    def _garbage(self) -> dict[int, list[str]]:
        """What nobody refers to, by rank; whoever asks has it dropped."""
        names: dict[int, list[str]] = {}
        if self.garbage:
            garbage, self.garbage = self.garbage, []
            for name, ranks in garbage:
                for rank in ranks:
                    names.setdefault(rank, []).append(name)
        return names

    def run(
        self,
        handle: Any,
        inputs: Sequence[Mapping[str, object]],
        keep: Mapping[str, str],
        counted: Counted | None = None,
        returned: Collection[str] = (),
    ) -> Future:
        """``returned``: those of ``keep`` that come back too."""
        self.check()
        begin = time.monotonic()
        if self._noting:
            self.cluster.get([()] * self.mesh.size).get()  # what was asked for before is done
        called = time.monotonic()
        future = self.cluster.run(
            handle,
            inputs,
            mode=self.mode,
            keep=keep,
            counted=counted,
            returned=returned,
            drop=self._garbage(),
        )
        if not self._noting:
            return future
        self.noted = Noted(handle, future, called, called - begin, time.monotonic())
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
    def noting(self, mode: Mode) -> Iterator[None]:
        """Within: runs are in that mode, and the last of them is ``noted``."""
        before, self.mode, self.noted, self._noting = self.mode, mode, None, True
        try:
            yield
        finally:
            self.mode, self._noting = before, False

    # -- models -----------------------------------------------------------------------------------

    def resident(self, model: ParallelModule) -> Resident:
        found = self.residents.get(id(model))
        if found is None:
            prefix = f"model {len(self.residents)}: "
            found = Resident(model, prefix, self.mesh, self.cluster, model.loads)
            self.residents[id(model)] = found
            found.saved = "the controller has what was put there", model.steps.present()
        if found.loads != model.loads:  # other values were loaded for what is on meta
            found.loads = model.loads
            brought = model.initial.loaded.keys() | model.initial.on_disk
            found.forget([label for label in found.specs if label in brought])
            found.saved = "the controller has what was loaded", model.steps.present()
        return found

    def place(self, models: Models, plan: Plan, stages: StagePlan) -> None:
        """Put the parameters and buffers that a program needs where they are missing."""
        residents = [self.resident(model) for model in models.parts.values()]
        for resident in residents:
            resident.settle()
        if all(resident.placed is plan for resident in residents):
            return
        models.settle(plan, stages)
        wanted = {
            i.label: (on_mesh(plan, i.held), holders(plan, i))
            for i in plan.inputs
            if i.kind in ("parameter", "buffer")
        }
        for model, own in models.by_part(wanted):
            resident = self.resident(model)
            if resident.specs.keys() - resident.planned:  # put before a program had said how
                from dtensor.api.kept import keep_as_planned

                keep_as_planned(resident, own)
            self.hold(model, own)
            resident.planned.update(own)
            resident.placed = plan

    def wrote(
        self,
        written: Iterable[tuple[ParallelModule, frozenset[str]]],
        optimizer: OptimizerHome | None = None,
    ) -> None:
        """A program that was called changes these of each module, and an optimizer's state."""
        for model, labels in written:
            resident = self.resident(model)
            home = optimizer if optimizer is not None and optimizer.resident is resident else None
            if labels or home is not None:
                resident.wrote(labels, home)

    def hold(
        self, model: ParallelModule, wanted: Mapping[str, tuple[TensorSpec, tuple[int, ...]]]
    ) -> None:
        """Put what is missing of these: by the module's own names, how which ranks keep them."""
        resident = self.resident(model)
        tensors = named_tensors(model.module)
        values: list[dict[str, object]] = [{} for _ in range(self.mesh.size)]
        made: list[dict[str, tuple[Source, Pieces]]] = [{} for _ in range(self.mesh.size)]
        put: dict[str, TensorSpec] = {}
        for name, (spec, ranks) in wanted.items():
            known = resident.specs.get(name)
            if known is not None and known != spec:
                raise PlanningError(
                    f"{name} is stored as {known}, this program wants it stored as {spec}"
                )
            missing = set(ranks) - set(resident.ranks.get(name, ()) if known else ())
            if not missing:
                continue
            source = model.initial.source(name)
            whole = None
            if source is None:
                whole = model.initial.value(name, tensors[name].detach())
                _check_as_planned(name, whole, spec)
            for rank in sorted(missing):
                here = self.mesh.coordinates(rank)
                if whole is not None:
                    values[rank][resident.name(name)] = shard_of(whole, spec, here)
                elif source is not None:
                    made[rank][name] = source, held_at(spec, here)
            had = set(resident.ranks.get(name, ())) if known else set[int]()
            resident.ranks[name] = tuple(sorted(had | set(ranks)))
            put[name] = spec
        if any(values):
            self.put(values)
        if any(made):
            self._make(made, {label: resident.name(label) for own in made for label in own})
        resident.specs.update(put)
        resident.keep({label: tensors[label] for label in put})

    def _make(
        self, made: Sequence[Mapping[str, tuple[Source, Pieces]]], names: Mapping[str, str]
    ) -> None:
        """The ranks make their own shards, or read them, and keep them under these names."""
        handle = self.cluster.load(init_program(made, self.cluster.device))
        self.run(handle, [{} for _ in made], names).get()

    def place_optimizer(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        groups: tuple[tuple[str, ...], ...],
        plan: Plan,
        stages: StagePlan,
        models: Models,
        *,
        masters: bool,
    ) -> OptimizerHome:
        """The values of the state that the plan's update reads go to the ranks' tables, and anew
        where somebody has looked at it since. A tensor of its parameter's shape is cut as the plan
        says that the state is stored, numbers are replicated; what there is not yet is absent
        (shard_optimizer.py). Beside them stands what updates.

        PlanningError where two steps share an optimizer and one of them wants masters; where a
        state has not what the class reads.
        """
        resident = self.resident(model)
        home = resident.optimizers.get(id(optimizer))
        if home is not None and home.masters != masters:
            raise PlanningError(
                f"two steps share a {type(optimizer).__name__}: one has "
                f"master_weights={home.masters}, this one master_weights={masters}.\n"
                f"fix: master_weights={home.masters} here too, or an optimizer of its own"
            )
        # the parameters first: what the program takes is checked there
        self.place(models, plan, stages)
        if home is None or home.moves != resident.moves:
            _check_own(model, optimizer)
        keys = tuple(keys_of(type(optimizer), group) for group in optimizer.param_groups)
        if home is not None and home.current and home.placed is plan and home.keys == keys:
            home.moves = resident.moves
            return home
        name = home.name if home else f"{resident.prefix}optimizer {len(resident.optimizers)}"
        updated = _updated(plan, dict(zip(groups, keys, strict=True)), name)
        known = {} if home is None else home.named
        if known:
            _check_as_before(known, updated)
        elsewhere = any(w in known and not set(updated[w][2]) <= set(known[w][2]) for w in updated)
        if home is None or not home.current or elsewhere:
            held: object = optimizer.state
            entries = held.to_place() if isinstance(held, AwayState) else dict(optimizer.state)
            new = {**known, **updated}
            kept_by = (optimizer, name, masters, keys, resident, entries, dict(entries))
            home = OptimizerHome(*kept_by)
            resident.optimizers[id(optimizer)] = home
            kind = type(optimizer)
            self.put([{name: ShardOptimizer(kind, masters)} for _ in range(self.mesh.size)])
        else:
            new = {which: updated[which] for which in updated if which not in known}
        self._put_state(home, model, new)
        home.named |= new
        home.keys, home.placed, home.moves = keys, plan, resident.moves
        home.updated = frozenset(updated)
        return home

    def _put_state(
        self, home: OptimizerHome, model: ParallelModule, new: dict[tuple[str, str], Named]
    ) -> None:
        """Put values of the state, those that there are out of ``home.rest``."""
        parameters, nothing = dict(model.module.named_parameters()), absent("cpu")
        values: list[dict[str, object]] = [{} for _ in range(self.mesh.size)]
        read: list[dict[str, tuple[Source, Pieces]]] = [{} for _ in range(self.mesh.size)]
        for (label, key), (name, spec, ranks) in list(new.items()):
            entries = home.rest.get(parameters[label], {})
            if entries:
                entries = _with_memory(entries, label, home.optimizer)
            value = entries.get(key)
            if value is None:
                if entries or home.made:
                    _check_made(home, label, key, entries)
            else:
                home.made |= {(label, key)}
                value = _as_stored(value, spec, key, label)
                spec = replace(spec, dtype=value.dtype)
                new[label, key] = name, spec, ranks
            for rank in ranks:
                here = self.mesh.coordinates(rank)
                if isinstance(value, OnDisk):
                    read[rank][name] = value, held_at(spec, here)
                else:
                    values[rank][name] = nothing if value is None else shard_of(value, spec, here)
        if any(values):
            self.put(values)
        if any(read):
            self._make(read, {name: name for own in read for name in own})
        if home.rest:
            home.rest = _left(home.rest, {(parameters[label], key) for label, key in new})


def _updated(
    plan: Plan, keys: Mapping[tuple[str, ...], tuple[str, ...]], optimizer: str
) -> dict[tuple[str, str], Named]:
    """The values of the state that the plan's update has; ``keys``: by the names of the groups."""
    keys_by_label = {label: own for group, own in keys.items() for label in group}
    items = {item.label: item for item in plan.inputs if item.kind == "parameter"}
    found: dict[tuple[str, str], Named] = {}
    for step in plan.steps:
        if not isinstance(step, Update):
            continue
        item, label, masters = items[step.parameter], step.parameter, bool(step.master_bytes)
        state = on_mesh(plan, item.state)
        wide = replace(state, dtype=torch.float32) if masters else state
        number = TensorSpec((), torch.float32, state.mesh, (REPLICATE,) * len(state.placements))
        for key in (*keys_by_label[label], *([MASTER] if masters else [])):
            name = value_name(optimizer, key, label)
            spec = number if key in NUMBERS else wide
            found[label, key] = name, spec, holders(plan, item)
    return found


def _check_as_before(known: Mapping[Any, Named], updated: Mapping[Any, Named]) -> None:
    for (label, key), (_, spec, _) in updated.items():
        _, before, _ = known.get((label, key), ("", spec, ()))
        if not alike(before, spec):
            raise PlanningError(
                f"{key} of {label} is stored as {before}, this program wants it stored as {spec}"
            )


def _left(rest: Entries, taken: Set[tuple[torch.Tensor, str]]) -> Entries:
    """What is not on the ranks; a master of a parameter without one any more is old."""
    old = {(parameter, MASTER) for parameter, _ in taken}
    found = {
        parameter: {k: v for k, v in entries.items() if (parameter, k) not in taken | old}
        for parameter, entries in rest.items()
    }
    return {parameter: entries for parameter, entries in found.items() if entries}


def _with_memory(
    entries: Mapping[str, Any], label: str, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """A parameter's state; on the meta device it has values only where it is what Adagrad begins
    with, the same number everywhere."""
    empty = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor) and v.is_meta}
    begins = optimizer.defaults.get("initial_accumulator_value")
    for key, value in empty.items():
        if key != "sum" or begins is None or value.is_complex() or float(entries["step"]) != 0:
            raise PlanningError(
                f"{key} of {label} is on the meta device and has no value.\n"
                f"fix: dt.load_state_dict(model, opt, state), which keeps the values"
            )
        whole = torch.full((), begins, dtype=value.dtype).expand(value.shape)
        entries = {**entries, key: whole}
    return entries


def _check_made(home: OptimizerHome, label: str, key: str, entries: Mapping[str, Any]) -> None:
    """PlanningError where a parameter has a state, and not this value of it: torch finds none."""
    there = {k for known, k in home.made if known == label} | set(entries)
    there = {k for k in there - {MASTER} if entries.get(k) is not None or (label, k) in home.made}
    if key == MASTER or type(home.optimizer) is torch.optim.SGD or not there:
        return
    raise PlanningError(
        f"{type(home.optimizer).__name__} reads {key} of {label}, whose state has only "
        f"{', '.join(sorted(there))}.\n"
        f"fix: the options with which the state was made, or an optimizer of its own"
    )


def _as_stored(value: Any, spec: TensorSpec, key: str, label: str) -> torch.Tensor | OnDisk:
    """A given value of a state, of the spec's shape and, but for a number, its dtype."""
    if not isinstance(value, torch.Tensor | OnDisk):
        value = torch.tensor(value)
    if tuple(value.shape) != spec.shape:
        raise PlanningError(
            f"{key} of {label} has the shape {list(value.shape)}, and is read as {spec}.\n"
            f"fix: load the state of the same optimizer and model"
        )
    keeps = key in NUMBERS or not value.dtype.is_floating_point
    if isinstance(value, OnDisk):
        return value if keeps else replace(value, dtype=spec.dtype)
    return value.detach() if keeps else value.detach().to(spec.dtype)


class Launch:
    """A cluster, and a session for each mesh on its ranks; ``mode`` and ``local`` are of all.

    Meshes may share ranks: each has names of its own there. A rank that is lost takes the values of
    all meshes along; a call that fails is of its run alone.
    """

    def __init__(self, cluster: Cluster, mode: Mode, local: LocalKind = "generated") -> None:
        self.cluster = cluster
        self.mode: Mode = mode
        self.local: LocalKind = local
        self.sessions: dict[Mesh, MeshSession] = {}
        self.saves: list[UnderWay] = []
        self.closed = False
        self.failure_was_read = False
        self.said_lost = False

    def add(self, mesh: Mesh, ranks: tuple[int, ...] | None = None) -> MeshSession:
        """The session of one more mesh, on these ranks; or of the only one, on all."""
        cluster = self.cluster
        if ranks is not None:
            cluster = Part(cluster, ranks, f"part {len(self.sessions)}: ", str(mesh))
        self.sessions[mesh] = MeshSession(mesh, cluster, self)
        return self.sessions[mesh]

    @property
    def places(self) -> dict[Mesh, tuple[int, ...]]:
        """The ranks of each mesh."""
        return {mesh: session.ranks for mesh, session in self.sessions.items()}

    @property
    def residents(self) -> list[Resident]:
        return [r for session in self.sessions.values() for r in session.residents.values()]

    def settle(self) -> None:
        """Wait for what is under way; a failure that nobody has read raises here."""
        if not self.failure_was_read:
            for session in self.sessions.values():
                for wait in session.settling:
                    wait()
            if not self.cluster.immediate and self.cluster.failure is None:
                try:
                    self.cluster.check_undone()
                except DaftError as error:
                    told = next(iter(self.sessions.values())).told
                    raise told(error) from error.__cause__
        for saved in self.saves:
            saved.settle()

    def close(self, *, bring_home: bool = True) -> None:
        """What was changed comes home, unless it shall not or cannot; then the ranks end."""
        if self.closed:
            return
        for saved in self.saves:
            saved.told()
        try:
            for resident in self.residents:
                resident.end(bring_home)
            if bring_home and self.cluster.failure is None:
                self._tell_of_unsaved()
        finally:
            self.closed = True
            self.cluster.close()

    def _tell_of_unsaved(self) -> None:
        own = (resident for resident in self.residents if resident.model.source is None)
        count = sum(1 for resident in own if resident.on_meta and resident.unsaved)
        if count:
            warnings.warn(
                f"the launch ended with changed state of {count} model(s) on the meta device that "
                f"was not gathered: it is gone. fix: state = dt.gather_state_dict(model, opt) "
                f"inside the launch",
                stacklevel=6,
            )


def _check_own(model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    """Whether the module still has the objects that the optimizer would update."""
    own = {id(p) for p in model.module.parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in own:
            raise PlanningError(
                f"the optimizer holds a parameter of shape {list(parameter.shape)} in whose place "
                f"the module has another object, which torch would not train.\n"
                f"fix: build the optimizer and the step anew, over model.parameters()"
            )


def _check_as_planned(label: str, value: torch.Tensor, spec: TensorSpec) -> None:
    if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
        raise PlanningError(
            f"{label} is {type_text(value)} now, and the program was planned for {spec}.\n"
            f"fix: change the model before its first step, or make the step anew"
        )


# -- which session ---------------------------------------------------------------------------------

_launched: list[Launch] = []
_implicit: dict[Mesh, MeshSession] = {}


def session_for(mesh: Mesh) -> MeshSession:
    """That of the running launch, or the implicit in-process one of the mesh."""
    if _launched:
        launch = _launched[-1]
        if (session := launch.sessions.get(mesh)) is not None:
            return session
        from dtensor.api.several_meshes import not_launched

        raise not_launched(mesh, launch.places)
    if mesh in _implicit and _implicit[mesh].cluster.failure is not None:
        _implicit.pop(mesh).launch.close()
    if mesh not in _implicit:
        launch = Launch(launch_cluster(mesh.size), "compiled")
        _implicit[mesh] = launch.add(mesh)
    return _implicit[mesh]


def session_at_hand(mesh: Mesh) -> MeshSession | None:
    """As `session_for`, where there is one: that of the running launch, or the implicit one."""
    found = _launched[-1].sessions.get(mesh) if _launched else None
    return found or _implicit.get(mesh)


def launched() -> MeshSession | None:
    """The session of the first mesh of the running launch."""
    return next(iter(_launched[-1].sessions.values())) if _launched else None


@contextmanager
def launch(
    *meshes: Mesh | str,
    backend: Backend = "inprocess",
    device: str = "cpu",
    ranks: Mapping[Mesh, Sequence[int]] | None = None,
    address: str | None = None,
    deadline_s: float = 60.0,
    call_deadline_s: float = 3600.0,
    mode: Mode = "compiled",
    bring_home: bool = True,
    local: LocalKind = "generated",
    spares: int = 0,
    snapshot_every: int | None = None,
    max_restarts: int = 100,
) -> Iterator[MeshSession]:
    """Start the ranks of one or several meshes; what runs inside the block runs there.

    Several meshes are on ranks of one cluster, in order: the first has ranks 0, 1, ..., the next
    those after. Equal meshes are one: ``Mesh(tp=2, name="play")`` is another than ``Mesh(tp=2)``.
    Models and DTensors are of one mesh each; `transfer` brings values from one to another. A call
    that raises fails its own run, and the other meshes go on; where a rank is lost, the values of
    all meshes of the launch are, and the error names the rank by both numbers.

    `daft.spawn` inside the block makes actors of the same launch, beside the ranks: on Ray with the
    same Ray and deadlines. They end with it; what failed in one and nobody has read raises then.

    At its end the values of models and the state of their optimizers come home, in place: what the
    controller's module and optimizer have is current again. Models on the meta device stay away.

    Gives the session of the first mesh.

    Args:
        meshes: after them backend and device may stand, as in ``launch(mesh, "ray")``.
        ranks: mesh to numbers of ranks of the launch, in the mesh's order; meshes may share ranks:
            ``launch(train, play, ranks={play: (0, 1)})``. A mesh that is not named gets ranks of
            its own, after those of the meshes before it.
        backend: "inprocess": all ranks in this process, deterministic; "ray": an actor per rank.
        device: "cpu" or "cuda". On "cuda", "inprocess" puts all ranks on this GPU; "ray" gives
            each rank a GPU of its own where Ray has enough, else one actor hosts all on one GPU.
        address: of a Ray cluster to join; otherwise one is started here, and stopped at the end.
        deadline_s: seconds after which a rank that makes no progress counts as failed.
        call_deadline_s: seconds that one computation of a rank may take, for which a warning is
            given after `deadline_s`.
        mode: "compiled": one call per actor and step; "interpreted": one instruction at a time.
        bring_home: False leaves what changed behind, unless `gather_state_dict` has written it;
            reading it is a RuntimeError from then on, until `load_state_dict`.
        local: "inductor": chains of elementwise ops, norms and sums are compiled by torch's
            compiler, on CPUs; a first call takes seconds longer. The same bits in all backends and
            modes, those of "generated" to a tolerance.
        spares: processes that wait to take a lost rank's place, besides those of the ranks; with
            some, ``snapshot_every=1`` unless it is stated.
        snapshot_every: runs on all ranks after which each keeps a copy of what they wrote, in
            memory that outlives its process. On Ray a rank that is lost, stopped or silent is then
            replaced, by a spare or a new process, and the runs since are done again: a warning, and
            no error (docs/recovery.md). By default nothing is kept.
        max_restarts: how many ranks may be replaced before the loss of one is an error.

    Raises daft's errors: a failed rank, with its instruction and the model's source line.
    """
    if ranks is None and len(meshes) == 1 and isinstance(mesh := meshes[0], Mesh):
        places, size = {mesh: None}, mesh.size
    else:
        from dtensor.api.several_meshes import by_position, ranks_of_meshes

        stated, backend, device = by_position(meshes, backend, device)
        stated_ranks = ranks_of_meshes(stated, ranks)
        size = 1 + max(map(max, stated_ranks.values()))
        alone = ranks is None and len(stated) == 1
        places = dict.fromkeys(stated) if alone else stated_ranks
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
    check_word("local", local, get_args(LocalKind))
    if local == "inductor":
        _check_inductor(device)
    check_kind("bring_home", bring_home, bool, "True or False", "bring_home=False")
    check_number("spares", spares, least=0, whole=True, fix="spares=1")
    if snapshot_every is not None:
        check_number("snapshot_every", snapshot_every, least=1, whole=True, fix="snapshot_every=1")
    check_number("max_restarts", max_restarts, least=0, whole=True, fix="max_restarts=100")
    recovers = backend == "ray" and (spares > 0 or snapshot_every is not None)
    if recovers and (mode != "compiled" or device != "cpu"):
        what = f"mode={mode!r}" if mode != "compiled" else f"device={device!r}"
        raise PlanningError(
            f"{what} on Ray: ranks that are lost can be replaced in compiled mode on CPUs alone.\n"
            f"fix: leave spares and snapshot_every out"
        )
    if _launched:
        raise PlanningError("a launch is running already; leave it before starting another")
    cluster = launch_cluster(
        size,
        backend=backend,
        device=device,
        address=address,
        deadline_s=deadline_s,
        call_deadline_s=call_deadline_s,
        spares=spares,
        snapshot_every=snapshot_every,
        max_restarts=max_restarts,
    )
    running = Launch(cluster, mode, local)
    sessions = [running.add(mesh, own) for mesh, own in places.items()]
    _launched.append(running)
    actors = Offer(backend, address, deadline_s, call_deadline_s)
    try:
        yield sessions[0]
        running.settle()
        actors.end()
    except BaseException as error:
        for lost in filter(None, [saved.told() for saved in running.saves]):
            error.add_note(lost)
        try:
            _leave(running, actors, bring_home)
        except (DaftError, PlanningError) as lost:  # which reading the weights says, too
            error.add_note(f"and not all weights came home: {lost}")
        raise
    _leave(running, actors, bring_home)


def _check_inductor(device: str) -> None:
    """PlanningError where torch's compiler has no C++ compiler, and on other devices than CPUs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device != "cpu":
        raise PlanningError(
            f'local="inductor" with device="{device}": it compiles for CPUs alone.\n'
            f'fix: device="cpu", or leave local out'
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise PlanningError(
            f'local="inductor" needs a C++ compiler, and there is none here: {error}\n'
            f"fix: install g++, or set CXX to a compiler; or leave local out"
        ) from error


def _leave(running: Launch, actors: Offer, bring_home: bool) -> None:
    _launched.remove(running)
    try:
        actors.end(quiet=True)
    finally:
        running.close(bring_home=bring_home)
