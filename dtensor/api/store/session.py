"""A session: a mesh on ranks of a launched cluster, and the state of the controller's models there.

    session = session_for(mesh)              # of the running launch, else in-process
    session.place(models, plan, stages)      # f32[64@tp,16] at tp=2: [32,16] to each rank
    session.run(handle, inputs, keep={"output 0": "value 3"})
    session.launch.store.fetch([session.stored("value 3", spec)])

A `Launch` has a session for each of its meshes and for each mesh that a transfer has put values on.
Outside a launch, each mesh has an implicit in-process session; but while a launch was made and not
started, `session_for` raises, because the program was meant for the ranks of the launch. A module's
values are put on the ranks at first use, and return when the launch ends (home.py).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from dtensor.api.model.models import Models
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.stating.stages import StagePlan
from dtensor.api.store.default_home import move_to_planned_homes
from dtensor.api.store.home import ModelHome, OptimizerHome
from dtensor.api.store.store import Source as TensorSource
from dtensor.api.store.store import TensorStore
from dtensor.api.store.unstarted import check_started
from dtensor.api.values.randomness import Counter
from dtensor.daft import Cluster, DaftError, Future, Handle, Mode, launch_cluster
from dtensor.daft.cluster.cluster import RunRequest
from dtensor.daft.cluster.subcluster import SubCluster
from dtensor.daft.run.worker import Counted
from dtensor.errors import PlanningError, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import caller_level
from dtensor.runtime.lower.program import holders, on_mesh
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import on_forced_signal

if TYPE_CHECKING:
    from dtensor.daft.cluster.call_log import Recovered


@dataclass(frozen=True, slots=True)
class Returned:
    """An output of a run that is returned to the controller, and also stays on the ranks."""

    run: Future
    output: str


LocalKind = Literal["auto", "generated", "inductor"]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run within `recording_run`. ``called``, ``returned``: when the call began and returned, by
    the monotonic clock; ``settling``: the seconds for which the call first waited for earlier
    calls."""

    handle: Handle
    future: Future
    called: float
    settling: float
    returned: float


class MeshSession:
    """A mesh on ranks of a launched cluster. ``cluster``: the mesh's ranks; ``mode``: how programs
    run, compiled or interpreted."""

    def __init__(self, mesh: Mesh, cluster: Cluster, launch: Launch) -> None:
        self.mesh = mesh
        self.cluster = cluster
        all_ranks = tuple(range(mesh.size))
        self._all_ranks = all_ranks
        is_part = isinstance(cluster, SubCluster)
        self._ranks: tuple[int, ...] = cluster.ranks if is_part else all_ranks
        self.launch = launch
        self.mode: Mode = launch.mode
        self.recorded_run: TimedRun | None = None  # the last run within `recording_run`
        self._is_recording = False
        self.model_homes: dict[int, ModelHome] = {}
        self.loaded: dict[object, Any] = {}  # the owners of loaded programs, by kind
        self.garbage: list[StoredTensor] = []  # values to drop with the next put or run
        self.wait_functions: list[Callable[[], None]] = []  # functions that wait for running calls
        self.undone: dict[str, int] = {}  # the number of undone runs, by `Counted.key`
        self.moved_models: set[int] = set()  # ids of models that a switch moved to another mesh

    @property
    def closed(self) -> bool:
        return self.launch.closed

    @property
    def recoveries(self) -> Sequence[Recovered]:
        """The losses of ranks that the launch has recovered from; empty in-process."""
        return self.cluster.recoveries

    @property
    def ranks(self) -> tuple[int, ...]:
        """The launch's numbers of the mesh's ranks."""
        return self._ranks

    def stored(self, label: str, spec: TensorSpec, at: Sequence[int] | None = None) -> StoredTensor:
        """Return the record of a value on these ranks of the mesh; by default on the ranks that its
        spec names."""
        if at is None and not spec.on:  # the fast case: each result of an eager op
            return StoredTensor(label, spec, self._all_ranks, self._ranks)
        return StoredTensor.of(label, spec, holders_of(spec) if at is None else at, self.ranks)

    # -- values -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RuntimeError if the launch has ended."""
        if self.closed:
            raise RuntimeError(
                "the launch that this value belongs to has ended, and its shards with it; "
                "fix: read values inside the `with dt.launch(...)` block"
            )

    def put(self, values: Sequence[Mapping[str, object]], *, wait: bool = False) -> None:
        """Put values into each rank's table, by name, and drop garbage there. ``wait``: return when
        the ranks have the values."""
        self.check()
        try:
            self.cluster.put(values, drop=self._take_garbage(), wait=wait)
        except DaftError as error:
            raise self.with_loss_note(error) from error.__cause__

    def returned(self, output: Returned, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of the shards that a run returned. Waits for this run only."""
        self.check()
        try:
            if self.cluster.failure is not None:
                raise self.cluster.failure
            results = output.run.get()
        except DaftError as error:
            raise self.with_loss_note(error) from error.__cause__
        return [results[r][output.output].clone() for r in ranks]

    def with_loss_note(self, error: DaftError) -> DaftError:
        """Return the error. If it is the cluster's failure, add a note, once, that the state is
        lost and where its last copy is."""
        launch = self.launch
        if error is self.cluster.failure and not launch.loss_was_noted:
            launch.loss_was_noted = True
            meshes = ""
            if len(launch.sessions) > 1:
                from dtensor.api.store.meshes import meshes_text

                meshes = f", on all meshes of the launch: {meshes_text(launch.places)}"
            parts = [f"the state on the ranks is lost{meshes}"]
            for home in launch.model_homes:
                saved_note, step = home.saved
                age = home.model.steps.present() - step
                parts.append(f"{saved_note}, of step {step}, {age} before this one")
            error.add_note("; ".join(parts))
        return error.with_traceback(None)  # the traceback of an earlier raise does not help

    def forget(self, stored: StoredTensor) -> None:
        """Have the shards of a value that is garbage dropped with the next put or run."""
        if not self.closed:
            self.garbage.append(stored)

    def drop(self) -> None:
        """Delete the shards of garbage now."""
        garbage = self._take_garbage()
        if garbage:
            self.cluster.delete([garbage.get(rank, ()) for rank in range(self.mesh.size)])

    def _take_garbage(self) -> dict[int, list[str]]:
        """Remove and return the names of garbage by rank. The caller must drop them on the
        ranks."""
        names: dict[int, list[str]] = {}
        if self.garbage:
            garbage, self.garbage = self.garbage, []
            for stored in garbage:
                for rank in stored.at:
                    names.setdefault(rank, []).append(stored.label)
        return names

    def run(
        self,
        handle: Any,
        inputs: Sequence[Mapping[str, object]],
        keep: Mapping[str, str],
        numbering: Counted | None = None,
        returned: Collection[str] = (),
    ) -> Future:
        """Run a program once. ``keep``: {output: name under which it stays on the ranks};
        ``numbering``: how the ranks compute the run's number; ``returned``: the outputs in ``keep``
        that are also returned to the controller."""
        self.check()
        begin = time.monotonic()
        if self._is_recording:
            self.cluster.get([()] * self.mesh.size).get()  # wait for earlier calls
        called = time.monotonic()
        try:
            future = self.cluster.submit(
                RunRequest(
                    handle, inputs, self.mode, keep, numbering, returned, self._take_garbage()
                )
            )
        except DaftError as error:
            raise self.with_loss_note(error) from error.__cause__
        if not self._is_recording:
            return future
        self.recorded_run = TimedRun(handle, future, called, called - begin, time.monotonic())
        return future

    @property
    def at_once(self) -> bool:
        """Whether a run has ended when `run` returns, so that the caller can raise its failure."""
        return self.cluster.immediate or self.mode == "interpreted"

    def numbering(self, name: str, counter: Counter, *, takes: bool) -> Counted:
        """Return what ranks need to compute the number of a run that ``counter`` counts on the
        controller: runs may have been undone since. ``takes``: the run uses up its number."""
        counter.present()
        key = f"{name} {counter.resets}"
        return Counted(key, self.undone.get(key, 0), STEP, takes)

    def give_back(self, counter: Counter, resets: int, numbering: Counted) -> None:
        """Record that a run was undone, so that the next run takes its number. ``resets``: the
        counter's number of resets before the run."""
        self.undone[numbering.key] = self.undone.get(numbering.key, 0) + 1
        counter.give_back(resets)

    @contextmanager
    def recording_run(self, mode: Mode) -> Iterator[None]:
        """Within the block, run programs in ``mode``, and record the last in ``recorded_run``."""
        before, self.mode, self.recorded_run, self._is_recording = self.mode, mode, None, True
        try:
            yield
        finally:
            self.mode, self._is_recording = before, False

    # -- models -----------------------------------------------------------------------------------

    def model_home(self, model: ParallelModule) -> ModelHome:
        """Return the model's home on this mesh, which is made at first use. If new values were
        loaded for tensors on the meta device, drop their old shards, so that the new values are
        sent to the ranks."""
        model_home = self.model_homes.get(id(model))
        if model_home is None:
            model_home = ModelHome(model, self.new_prefix(), self, model.loads)
            self.model_homes[id(model)] = model_home
            model_home.saved = (
                "the controller has the values that were put there",
                model.steps.present(),
            )
            model_home.seen_number = model.seen.number
        if model_home.loads != model.loads:  # other values were loaded for tensors on meta
            model_home.loads = model.loads
            loaded = model.initial.loaded.keys() | model.initial.on_disk
            model_home.forget([label for label in model_home.stored if label in loaded])
            model_home.saved = (
                "the controller has the values that were loaded",
                model.steps.present(),
            )
        return model_home

    def new_prefix(self) -> str:
        """Return a new prefix for the names of a model's values."""
        self.launch.num_models += 1
        return f"model {self.launch.num_models - 1}: "

    def place(self, models: Models, plan: Plan, stages: StagePlan) -> None:
        """Put the parameters and buffers that a program reads on the ranks that lack them."""
        model_homes = [self.model_home(model) for model in models.parts.values()]
        for model_home in model_homes:
            model_home.settle()
        if all(model_home.placed is plan for model_home in model_homes):
            return
        waiting = [home for home in model_homes if home.model.zero_waits]
        models.settle(plan, stages)
        for model_home in waiting:
            if not model_home.model.zero_waits:  # values that were stored whole are moved
                self.launch.store.unsettle(model_home.owner, model_home.owner.settled)
        items = {i.label: i for i in plan.inputs if i.kind in ("parameter", "buffer")}
        for model, read in models.by_part(items):
            model_home = self.model_home(model)
            homes = planned_homes(plan, read, model_home.prefix, self.ranks)
            move_to_planned_homes(model_home, homes)
            self.put_missing(model, homes)
            model_home.placed = plan

    def record_write(
        self,
        written: Iterable[tuple[ParallelModule, frozenset[str]]],
        optimizers: Sequence[OptimizerHome] = (),
    ) -> None:
        """Mark values, by label, and the state of optimizers as changed by a submitted program."""
        for model, labels in written:
            model_home = self.model_home(model)
            homes = [home for home in optimizers if home.model_home is model_home]
            if labels or homes:
                model_home.record_write(labels, homes)

    def put_missing(self, model: ParallelModule, homes: Mapping[str, StoredTensor]) -> None:
        """Put the values that are missing in these homes, by label. Raises PlanningError if a value
        is stored with another spec."""
        model_home = self.model_home(model)
        missing: dict[str, tuple[TensorSource, StoredTensor]] = {}
        for label, home in homes.items():
            stored = model_home.stored.get(label)
            if stored is not None and stored.spec != home.spec:
                raise PlanningError(
                    f"{model.seen.name(label)} is stored as {stored.spec}, this program needs it "
                    f"stored as {home.spec}"
                )
            if stored is None or not set(home.at) <= set(stored.at):
                missing[label] = _source(model, label, home.spec), home
        self.launch.store.put(model_home.owner, missing)
        model_home.make_lazy({label: model.seen.tensors[label] for label in missing})


class Launch:
    """A cluster, and a session for each mesh on its ranks.

    Meshes may share ranks; each mesh has its own names there. If a rank is lost, the values of all
    meshes are lost. A call that fails affects only its own run.
    """

    def __init__(
        self, cluster: Cluster, mode: Mode, local: LocalKind = "auto", graphs: bool = False
    ) -> None:
        self.cluster = cluster
        self.graphs = graphs  # whether programs run as CUDA graphs
        self.mode: Mode = mode
        self.local: LocalKind = local
        self.has_compiler: bool | None = None  # whether its ranks can compile; None: not known
        self.sessions: dict[Mesh, MeshSession] = {}
        self.store = TensorStore(self)
        self.num_models = 0  # the number of prefixes given to models so far
        self.num_programs = 0  # the number of programs so far, for the names of constants
        self.saves: list[Any] = []  # `Saved`s (async_save.py), which the launch waits for
        self.closed: bool = False
        self.failure_was_read = False
        self.loss_was_noted = False

    def add(self, mesh: Mesh, ranks: tuple[int, ...] | None = None) -> MeshSession:
        """Add a session for a mesh on these ranks, by default on all ranks of the cluster."""
        self.sessions[mesh] = MeshSession(mesh, self.part(mesh, ranks), self)
        return self.sessions[mesh]

    def part(self, mesh: Mesh, ranks: tuple[int, ...] | None) -> Cluster:
        """Return the part of the cluster that has these ranks; None: the whole cluster."""
        if ranks is None:
            return self.cluster
        return SubCluster(self.cluster, ranks, f"part {len(self.sessions)}: ", str(mesh))

    @property
    def places(self) -> dict[Mesh, tuple[int, ...]]:
        """The ranks of each mesh."""
        return {mesh: session.ranks for mesh, session in self.sessions.items()}

    @property
    def model_homes(self) -> list[ModelHome]:
        return [r for session in self.sessions.values() for r in session.model_homes.values()]

    def settle(self, *, saves: bool = True) -> None:
        """Wait for everything in flight. Raises a failure that was not read, of a save too unless
        ``saves`` is False."""
        if not self.failure_was_read:
            for session in self.sessions.values():
                for wait in session.wait_functions:
                    wait()
            if not self.cluster.immediate and self.cluster.failure is None:
                try:
                    self.cluster.check_undone()
                except DaftError as error:
                    with_loss_note = next(iter(self.sessions.values())).with_loss_note
                    raise with_loss_note(error) from error.__cause__
        for saved in self.saves if saves else ():
            saved.settle()

    def close(self, *, bring_home: bool = True) -> None:
        """Copy changed values into the modules, if ``bring_home`` and if the cluster has not
        failed; then end the ranks."""
        if self.closed:
            return
        for saved in self.saves:
            saved.join()
        with CALL_LOCK:
            try:
                self._end_model_homes(bring_home)
                if bring_home and self.cluster.failure is None:
                    self._warn_of_unsaved()
            finally:
                self.closed = True
                self.cluster.close()

    def _end_model_homes(self, bring_home: bool) -> None:
        """End the home of each model, even if another one fails; then raise the first failure."""
        errors: list[Exception] = []
        for model_home in self.model_homes:
            try:
                model_home.end(bring_home)
            except (DaftError, PlanningError) as error:
                errors.append(error)
            except BaseException:  # a second signal: the values of the other models are lost
                self.cluster.interrupted()
                for other in self.model_homes:
                    if not other.lost:
                        other.end(bring_home)
                raise
        for error in errors[:1]:
            raise error

    def _warn_of_unsaved(self) -> None:
        """Warn of changed values of models on the meta device that were never gathered."""
        homes = [home for home in self.model_homes if home.model.source is None]  # no replicas
        count = sum(1 for home in homes if home.on_meta and home.unsaved)
        if count:
            warnings.warn(
                f"the launch ended with changed state of {count} model(s) on the meta device that "
                f"was not gathered: it is gone. fix: state = dt.gather_state_dict(model, opt) "
                f"inside the launch",
                stacklevel=caller_level(),
            )


def planned_homes(
    plan: Plan, read: Mapping[str, PlannedInput], prefix: str, numbers: Sequence[int]
) -> dict[str, StoredTensor]:
    """Return the homes of the parameters and buffers that a plan reads, by label."""
    return {
        label: StoredTensor.of(f"{prefix}{label}", on_mesh(plan, i.held), holders(plan, i), numbers)
        for label, i in read.items()
    }


def _source(model: ParallelModule, label: str, spec: TensorSpec) -> TensorSource:
    """Return the source of a parameter or buffer. Raises PlanningError, or the source does when it
    makes the value, if the value does not have the planned shape and dtype."""
    tensor, name = model.seen.tensors[label].detach(), model.seen.name(label)
    source = model.initial.source(label)
    if source is not None:
        return source
    if not tensor.is_meta:
        _check_as_planned(name, tensor, spec)

    def make() -> torch.Tensor:
        value = model.initial.value(label, tensor)
        _check_as_planned(name, value, spec)
        return value

    return make


def _check_as_planned(label: str, value: torch.Tensor, spec: TensorSpec) -> None:
    """Raises PlanningError if a value does not have the shape and dtype of its planned spec."""
    if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
        raise PlanningError(
            f"{label} is {type_text(value)} now, and the program was planned for {spec}.\n"
            f"fix: change the model before its first step, or make a new step"
        )


# -- which session ---------------------------------------------------------------------------------

launches: list[Launch] = []
"""The running launch, if there is one."""
_implicit: dict[Mesh, MeshSession] = {}


def _interrupt_clusters() -> None:
    """After a second signal has ended a call half-way, mark all clusters as failed."""
    for launch in (*launches, *(session.launch for session in _implicit.values())):
        launch.cluster.interrupted()


on_forced_signal.append(_interrupt_clusters)


def session_for(mesh: Mesh) -> MeshSession:
    """Return the mesh's session in the running launch, or else its implicit in-process session.
    Raises PlanningError if the running launch does not have the mesh, or if a launch was made and
    not started."""
    for launch in launches[-1:]:  # before CALL_LOCK is taken, as most callers hold it
        if (session := launch.sessions.get(mesh)) is not None:
            return session
    with CALL_LOCK:
        if launches:
            from dtensor.api.store.meshes import not_launched

            raise not_launched(mesh, launches[-1].places)
        check_started()
        if mesh in _implicit and _implicit[mesh].cluster.failure is not None:
            _implicit.pop(mesh).launch.close()
        if mesh not in _implicit:
            launch = Launch(launch_cluster(mesh.size), "compiled")
            _implicit[mesh] = launch.add(mesh)
        return _implicit[mesh]


def existing_session(mesh: Mesh) -> MeshSession | None:
    """Return the mesh's session as `session_for` does, or None if there is no session yet."""
    session = launches[-1].sessions.get(mesh) if launches else None
    return session or _implicit.get(mesh)


_stated_device: ContextVar[str | None] = ContextVar("planned_for", default=None)


@contextmanager
def planning_for(device: str | None) -> Iterator[None]:
    """Within the block, in this thread, plan programs for this type of device; None: the type of
    the running launch. Raises PlanningError for an unknown type, or if the running launch has
    another one."""
    if device is not None:
        check_word("device", device, ("cpu", "cuda"))
        if launches and device != _launched_device():
            raise PlanningError(
                f'device="{device}", and the running launch has "{_launched_device()}".\n'
                f"fix: leave device out: a plan within a launch is for its device"
            )
    before = _stated_device.set(device)
    try:
        yield
    finally:
        _stated_device.reset(before)


def program_device() -> str:
    """Return the type of device that programs are planned for: "cuda" or "cpu"."""
    return _stated_device.get() or _launched_device()


def _launched_device() -> str:
    is_cuda = launches and launches[-1].cluster.device.type == "cuda"
    return "cuda" if is_cuda else "cpu"


def launched() -> MeshSession | None:
    """Return the session of the running launch's first mesh; None if no launch is running."""
    return next(iter(launches[-1].sessions.values())) if launches else None
