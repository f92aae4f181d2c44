"""A session: a mesh on ranks of a launched cluster, and the state of the controller's models there.

    session = session_for(mesh)              # of the running launch, else in-process
    session.place(models, plan, stages)      # f32[64@tp,16] at tp=2: [32,16] to each rank
    session.run(handle, inputs, keep={"output 0": "value 3"})
    session.launch.store.fetch([session.stored("value 3", spec)])

A `Launch` has a session for each mesh that it was started with, and for each mesh that a transfer
has put values on. Outside a launch there is an implicit in-process one per mesh. There is none
while a launch was made and is not started: programs meant for its ranks would run in this process.

A parallelized module becomes resident at first use: the controller's values are cut into shards and
put on the ranks, and the module's tensors are lazy (home.py). Leaving a launch brings them home in
place, by an exception too as long as the ranks live. With ``bring_home=False``, and where the
cluster has failed, changed values are lost, and reading them is an error.

Not here: how a launch begins and ends (launching.py), an optimizer's state (optimizer_state.py).
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from traceback import walk_stack
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch

from dtensor.api.model.models import Models
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.stating.stages import StagePlan
from dtensor.api.store.default_home import keep_as_planned
from dtensor.api.store.home import ModelHome, OptimizerHome
from dtensor.api.store.store import Source as TensorSource
from dtensor.api.store.store import TensorStore
from dtensor.api.values.randomness import Counter
from dtensor.daft import Cluster, DaftError, Future, Handle, Mode, launch_cluster
from dtensor.daft.cluster.cluster import RunRequest
from dtensor.daft.cluster.subcluster import SubCluster
from dtensor.daft.run.worker import Counted
from dtensor.errors import PlanningError, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import Source, caller_level, lines_text, source_here
from dtensor.runtime.lower.program import holders, on_mesh
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import when_forced

if TYPE_CHECKING:
    from dtensor.daft.cluster.call_log import Recovered


@dataclass(frozen=True, slots=True)
class Returned:
    """An output of a run that comes back with it, besides staying on the ranks."""

    run: Future
    output: str


LocalKind = Literal["generated", "inductor"]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run within `noting`. ``called``, ``returned``: times of the monotonic clock; ``settling``:
    the seconds for which the call first waited for earlier calls."""

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
        at = tuple(range(mesh.size))
        self._at = at
        self._ranks: tuple[int, ...] = cluster.ranks if isinstance(cluster, SubCluster) else at
        self.launch = launch
        self.mode: Mode = launch.mode
        self.noted: TimedRun | None = None  # the last run of those that are `noting`
        self._noting = False
        self.model_homes: dict[int, ModelHome] = {}
        self.loaded: dict[object, Any] = {}
        self.garbage: list[StoredTensor] = []
        self.settling: list[Callable[[], None]] = []  # wait for running calls
        self.undone: dict[str, int] = {}  # undone runs, by the name they count under
        self.left: set[int] = set()  # ids of models that a switch moved to another mesh

    @property
    def closed(self) -> bool:
        return self.launch.closed

    @property
    def recoveries(self) -> Sequence[Recovered]:
        """The losses of the launch's ranks that were recovered so far; empty in-process."""
        return self.cluster.recoveries

    @property
    def local(self) -> LocalKind:
        """The kind of local code."""
        return self.launch.local

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers that the launch has for the mesh's ranks."""
        return self._ranks

    def stored(self, label: str, spec: TensorSpec, at: Sequence[int] | None = None) -> StoredTensor:
        """A value that is, or will be, on these ranks of the mesh; by default on those of the
        spec."""
        if at is None and not spec.on:  # so is each result of an eager op
            return StoredTensor(label, spec, self._at, self._ranks)
        return StoredTensor.of(label, spec, holders_of(spec) if at is None else at, self.ranks)

    # -- values -----------------------------------------------------------------------------------

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(
                "the launch that this value belongs to has ended, and its shards with it; "
                "fix: read values inside the `with dt.launch(...)` block"
            )

    def put(self, values: Sequence[Mapping[str, object]], *, wait: bool = False) -> None:
        self.check()
        try:
            self.cluster.put(values, drop=self._garbage(), wait=wait)
        except DaftError as error:
            raise self.told(error) from error.__cause__

    def returned(self, of: Returned, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Shards of a run that came back with it, copies of them. Waits for that run alone."""
        self.check()
        try:
            if self.cluster.failure is not None:
                raise self.cluster.failure
            results = of.run.get()
        except DaftError as error:
            raise self.told(error) from error.__cause__
        return [results[r][of.output].clone() for r in ranks]

    def told(self, error: DaftError) -> DaftError:
        """The error; where the state is lost with it, its text names the last saved state."""
        launch = self.launch
        if error is self.cluster.failure and not launch.said_lost:
            launch.said_lost = True
            meshes = ""
            if len(launch.sessions) > 1:
                from dtensor.api.store.meshes import listed

                meshes = f", on all meshes of the launch: {listed(launch.places)}"
            parts = [f"the state on the ranks is lost{meshes}"]
            for home in launch.model_homes:
                where, step = home.saved
                back = home.model.steps.present() - step
                parts.append(f"{where}, of step {step}, {back} before this one")
            error.add_note("; ".join(parts))
        return error.with_traceback(None)  # of an earlier raise, which does not help the user

    def forget(self, stored: StoredTensor) -> None:
        """Called when a value is garbage: its shards are dropped with the next put or run."""
        if not self.closed:
            self.garbage.append(stored)

    def drop(self) -> None:
        """Delete unreferenced values, now."""
        garbage = self._garbage()
        if garbage:
            self.cluster.delete([garbage.get(rank, ()) for rank in range(self.mesh.size)])

    def _garbage(self) -> dict[int, list[str]]:
        """The names of unreferenced values, by rank; the caller must drop them."""
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
        counted: Counted | None = None,
        returned: Collection[str] = (),
    ) -> Future:
        """``returned``: those of ``keep`` that come back too."""
        self.check()
        begin = time.monotonic()
        if self._noting:
            self.cluster.get([()] * self.mesh.size).get()  # earlier calls have ended
        called = time.monotonic()
        try:
            future = self.cluster.submit(
                RunRequest(handle, inputs, self.mode, keep, counted, returned, self._garbage())
            )
        except DaftError as error:
            raise self.told(error) from error.__cause__
        if not self._noting:
            return future
        self.noted = TimedRun(handle, future, called, called - begin, time.monotonic())
        return future

    @property
    def at_once(self) -> bool:
        """Whether a run has ended when `run` returns, so that its failure can be raised there."""
        return self.cluster.immediate or self.mode == "interpreted"

    def counted(self, name: str, counter: Counter, *, takes: bool) -> Counted:
        """A run that ``counter`` counts, under a name of this session."""
        counter.present()
        key = f"{name} {counter.resets}"
        return Counted(key, self.undone.get(key, 0), STEP, takes)

    def give_back(self, counter: Counter, resets: int, counted: Counted) -> None:
        """The run, before which the counter had ``resets`` resets, was undone: the next run takes
        its number."""
        self.undone[counted.key] = self.undone.get(counted.key, 0) + 1
        counter.give_back(resets)

    @contextmanager
    def noting(self, mode: Mode) -> Iterator[None]:
        """Within: runs are in that mode, and the last of them is ``noted``."""
        before, self.mode, self.noted, self._noting = self.mode, mode, None, True
        try:
            yield
        finally:
            self.mode, self._noting = before, False

    # -- models -----------------------------------------------------------------------------------

    def model_home(self, model: ParallelModule) -> ModelHome:
        model_home = self.model_homes.get(id(model))
        if model_home is None:
            model_home = ModelHome(model, self.new_prefix(), self, model.loads)
            self.model_homes[id(model)] = model_home
            model_home.saved = (
                "the controller has the values that were put there",
                model.steps.present(),
            )
            model_home.looked = model.seen.number
        if model_home.loads != model.loads:  # other values were loaded for tensors on meta
            model_home.loads = model.loads
            brought = model.initial.loaded.keys() | model.initial.on_disk
            model_home.forget([label for label in model_home.stored if label in brought])
            model_home.saved = (
                "the controller has the values that were loaded",
                model.steps.present(),
            )
        return model_home

    def new_prefix(self) -> str:
        """The prefix of the labels of one more model's values."""
        self.launch.num_models += 1
        return f"model {self.launch.num_models - 1}: "

    def place(self, models: Models, plan: Plan, stages: StagePlan) -> None:
        """Put the parameters and buffers that a program needs where they are missing."""
        model_homes = [self.model_home(model) for model in models.parts.values()]
        for model_home in model_homes:
            model_home.settle()
        if all(model_home.placed is plan for model_home in model_homes):
            return
        models.settle(plan, stages)
        items = {i.label: i for i in plan.inputs if i.kind in ("parameter", "buffer")}
        for model, read in models.by_part(items):
            model_home = self.model_home(model)
            homes = homes_in(plan, read, model_home.prefix, self.ranks)
            keep_as_planned(model_home, homes)
            self.hold(model, homes)
            model_home.placed = plan

    def wrote(
        self,
        written: Iterable[tuple[ParallelModule, frozenset[str]]],
        optimizer: OptimizerHome | None = None,
    ) -> None:
        """A program that was called changes these of each module, by label, and an optimizer's
        state."""
        for model, labels in written:
            model_home = self.model_home(model)
            home = (
                optimizer if optimizer is not None and optimizer.model_home is model_home else None
            )
            if labels or home is not None:
                model_home.wrote(labels, home)

    def hold(self, model: ParallelModule, wanted: Mapping[str, StoredTensor]) -> None:
        """Put those of these values that are missing, by label."""
        model_home = self.model_home(model)
        given: dict[str, tuple[TensorSource, StoredTensor]] = {}
        for label, home in wanted.items():
            known = model_home.stored.get(label)
            if known is not None and known.spec != home.spec:
                raise PlanningError(
                    f"{model.seen.name(label)} is stored as {known.spec}, this program needs it "
                    f"stored as {home.spec}"
                )
            if known is None or not set(home.at) <= set(known.at):
                given[label] = _source(model, label, home.spec), home
        self.launch.store.put(model_home.owner, given)
        model_home.keep({label: model.seen.tensors[label] for label in given})


class Launch:
    """A cluster, and a session for each mesh on its ranks; ``mode`` and ``local`` hold for all.

    Meshes may share ranks: each has its own names there. With a lost rank the values of all meshes
    are lost; a call that fails affects only its run.
    """

    def __init__(self, cluster: Cluster, mode: Mode, local: LocalKind = "generated") -> None:
        self.cluster = cluster
        self.mode: Mode = mode
        self.local: LocalKind = local
        self.sessions: dict[Mesh, MeshSession] = {}
        self.store = TensorStore(self)
        self.num_models = 0  # models so far
        self.num_programs = 0  # programs with their own constants
        self.saves: list[Any] = []  # `Saved`s (checkpoint.py), the launch waits for their end
        self.closed: bool = False
        self.failure_was_read = False
        self.said_lost = False

    def add(self, mesh: Mesh, ranks: tuple[int, ...] | None = None) -> MeshSession:
        """The session of one more mesh, on these ranks; or of the only one, on all."""
        self.sessions[mesh] = MeshSession(mesh, self.part(mesh, ranks), self)
        return self.sessions[mesh]

    def part(self, mesh: Mesh, ranks: tuple[int, ...] | None) -> Cluster:
        """These ranks, or all, for one more mesh."""
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
        """Wait for everything in flight; raises a failure that was not read, of a save too."""
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
        for saved in self.saves if saves else ():
            saved.settle()

    def close(self, *, bring_home: bool = True) -> None:
        """Bring changed values home, unless ``bring_home`` is False or it is impossible; then end
        the ranks."""
        if self.closed:
            return
        for saved in self.saves:
            saved.join()
        with CALL_LOCK:
            try:
                self._end_residents(bring_home)
                if bring_home and self.cluster.failure is None:
                    self._tell_of_unsaved()
            finally:
                self.closed = True
                self.cluster.close()

    def _end_residents(self, bring_home: bool) -> None:
        failed: list[Exception] = []
        for model_home in self.model_homes:
            try:
                model_home.end(bring_home)
            except (DaftError, PlanningError) as error:  # of this model
                failed.append(error)
            except BaseException:  # a second signal: the rest is lost
                self.cluster.interrupted()
                for left in self.model_homes:
                    if not left.lost:
                        left.end(bring_home)
                raise
        for error in failed[:1]:
            raise error

    def _tell_of_unsaved(self) -> None:
        own = (model_home for model_home in self.model_homes if model_home.model.source is None)
        count = sum(1 for model_home in own if model_home.on_meta and model_home.unsaved)
        if count:
            warnings.warn(
                f"the launch ended with changed state of {count} model(s) on the meta device that "
                f"was not gathered: it is gone. fix: state = dt.gather_state_dict(model, opt) "
                f"inside the launch",
                stacklevel=caller_level(),
            )


def homes_in(
    plan: Plan, read: Mapping[str, PlannedInput], prefix: str, numbers: Sequence[int]
) -> dict[str, StoredTensor]:
    """By label, the homes of the parameters and buffers that a plan reads."""
    return {
        label: StoredTensor.of(f"{prefix}{label}", on_mesh(plan, i.held), holders(plan, i), numbers)
        for label, i in read.items()
    }


def _source(model: ParallelModule, label: str, spec: TensorSpec) -> TensorSource:
    """The source of a parameter or buffer for the ranks; checked as soon as its value is here."""
    tensor, name = model.seen.tensors[label].detach(), model.seen.name(label)
    source = model.initial.source(label)
    if source is not None:
        return source
    if not tensor.is_meta:
        _check_as_planned(name, tensor, spec)

    def whole() -> torch.Tensor:
        value = model.initial.value(label, tensor)
        _check_as_planned(name, value, spec)
        return value

    return whole


def _check_as_planned(label: str, value: torch.Tensor, spec: TensorSpec) -> None:
    if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
        raise PlanningError(
            f"{label} is {type_text(value)} now, and the program was planned for {spec}.\n"
            f"fix: change the model before its first step, or make the step anew"
        )


# -- which session ---------------------------------------------------------------------------------

launches: list[Launch] = []
"""The running session, if there is one."""
_implicit: dict[Mesh, MeshSession] = {}
_unstarted: list[_Unstarted] = []
"""The latest launch, until it is started or closed."""


@dataclass(frozen=True, slots=True)
class _Unstarted:
    """A launch that was not started yet. ``stack``: the running lines when it was made."""

    session: weakref.ref[MeshSession]
    source: Source | None
    stack: list[tuple[CodeType, int]]


def remember(session: MeshSession, source: Source | None, *, tried: bool = False) -> None:
    """Record the latest launch, which is not started yet, in place of an earlier one. ``tried``:
    its start has failed, so no warning is needed if it becomes garbage."""
    reference = weakref.ref(session, None if tried else _warn_never_started)
    _unstarted[:] = [_Unstarted(reference, source, _running_lines(sys._getframe(1)))]


def forget(session: MeshSession) -> None:
    """Remove the launch from the record of launches that were not started, if it is there."""
    _unstarted[:] = [launch for launch in _unstarted if launch.session() is not session]


def _warn_never_started(session: weakref.ref[MeshSession]) -> None:
    """Warn of a launch that became garbage and was never started: ``dt.launch(mesh)`` in a line of
    its own, or a function that returned without starting it.

    If an exception, such as a signal's, ended the code that would have started the launch, there is
    no warning. The launch becomes garbage where the exception was handled, which is another line
    than the one that made the launch or called the function that made it.
    """
    for launch in list(_unstarted):
        if launch.session is session and not sys.is_finalizing():
            _unstarted.clear()
            running = _running_lines(sys._getframe(1))
            if not running or launch.stack[: len(running)] != running:
                continue
            warnings.warn(
                f"a launch was made and never started, and nothing refers to it any more: the "
                f"code after it runs without it.\n"
                f"{lines_text(launch=launch.source)}"
                f"fix: with dt.launch(...): ...; or run = dt.launch(...) and run.start()",
                RuntimeWarning,
                stacklevel=caller_level(),
            )


def _running_lines(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return the line that each function on the stack is running, outermost first, down to
    ``frame``."""
    return [(caller.f_code, line) for caller, line in walk_stack(frame)][::-1]


def check_started() -> None:
    """Raises PlanningError if the latest launch was never started. A launch without references does
    not count."""
    for launch in _unstarted:
        if launch.session() is not None:
            raise PlanningError(
                f"a launch was made and never started, and this would run without it.\n"
                f"{lines_text(launch=launch.source, call=source_here())}"
                f"fix: `with run:` around the call or run.start() before it, where run is the "
                f"result of dt.launch; run.close() discards the launch"
            )


def _lose() -> None:
    """The running session was ended half-way by a second signal."""
    for launch in (*launches, *(session.launch for session in _implicit.values())):
        launch.cluster.interrupted()


when_forced.append(_lose)


def session_for(mesh: Mesh) -> MeshSession:
    """The session of the running launch, or the implicit in-process one of the mesh. PlanningError
    where a launch waits to be started."""
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


def session_at_hand(mesh: Mesh) -> MeshSession | None:
    """As `session_for`, or None where there is no session yet."""
    session = launches[-1].sessions.get(mesh) if launches else None
    return session or _implicit.get(mesh)


_planned_for: ContextVar[str | None] = ContextVar("planned_for", default=None)


@contextmanager
def planning_for(device: str | None) -> Iterator[None]:
    """Within, in this thread, programs are for a device of this type; None: for the launch's.

    PlanningError for a type that is none, and for another one than the running launch's.
    """
    if device is not None:
        check_word("device", device, ("cpu", "cuda"))
        if launches and device != _launched_device():
            raise PlanningError(
                f'device="{device}", and the running launch has "{_launched_device()}".\n'
                f"fix: leave device out: a plan within a launch is for its device"
            )
    before = _planned_for.set(device)
    try:
        yield
    finally:
        _planned_for.reset(before)


def program_device() -> str:
    """The type of the device that programs are for: "cuda" or "cpu"."""
    return _planned_for.get() or _launched_device()


def _launched_device() -> str:
    is_cuda = launches and launches[-1].cluster.device.type == "cuda"
    return "cuda" if is_cuda else "cpu"


def launched() -> MeshSession | None:
    """The session of the first mesh of the running launch."""
    return next(iter(launches[-1].sessions.values())) if launches else None
