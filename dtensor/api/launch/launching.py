"""`launch`: starts the ranks of meshes, which end with a block; `run.switch` between two steps.

    with launch(Mesh(dp=4), backend="ray") as run:      # default: in-process
        step(x, y)
        run.switch(model, opt, Mesh(dp=2), {})          # f32[64@dp,16]: [16,16] to [32,16]
    with launch(train, play):                           # train has ranks 0..n-1, play those after
        ...
    run = launch(Mesh(dp=4))                            # the same over the cells of a notebook
    run.start()
    run.close()

Arguments are checked before anything starts. Leaving the block by an exception brings home the
values that can come, and notes the others on it. One launch runs at a time, and each starts once.
While the last launch is made and not started, a step is an error: it would run in this process.

Not here: values on the ranks (session.py), the work of a switch (switch.py).
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch

from dtensor.api.checkpoint.async_save import note_unread
from dtensor.api.checkpoint.exit_status import not_zero
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.stating.roles_of_weights import StatedRoles
from dtensor.api.model.stating.stages import Stages
from dtensor.api.move.switch import Optimizers, SwitchTarget, switch_of
from dtensor.api.store.session import (
    Launch,
    LocalKind,
    MeshSession,
    forget,
    launched,
    launches,
    remember,
)
from dtensor.daft import Backend, DaftError, Mode
from dtensor.daft.diagnosis.diagnosis import ranks_text
from dtensor.daft.launch_options import LaunchOptions
from dtensor.daft.launching import DeferredLaunch, start_cluster
from dtensor.errors import PlanningError, check_kind, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.source import lines_text, source_here
from dtensor.private_torch import cpp_compiler
from dtensor.runtime.schedule import Schedule
from dtensor.sharding.redistribute.sync_plan import SyncPlan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.signals import defer_signals, held_back, waits_may_act

_State = Literal["never started", "given up", "running", "ended"]
_NO_RANKS: tuple[_State, ...] = ("never started", "given up")
_ANEW = "run = dt.launch(...), and start that one"


class LaunchSession(MeshSession):
    """The result of `launch`: the session of its first mesh, with `switch` for use between two
    steps. It prints its meshes and, where they are on several machines, the ranks of each.

    The attributes of a `MeshSession` exist from `start` on.
    """

    def __init__(
        self,
        places: Mapping[Mesh, tuple[int, ...] | None],
        ranks: Callable[[], Launch],
        actors: Callable[[], DeferredLaunch],
        bring_home: bool,
    ) -> None:
        self.mesh = next(iter(places))
        self.source = source_here()
        self._places = places
        self._start_ranks, self._offer_actors = ranks, actors
        self._bring_home = bring_home
        self._state: _State = "never started"
        self._entered = False
        remember(self, self.source)

    if not TYPE_CHECKING:  # for a type checker all attributes exist

        def __getattr__(self, name: str) -> Any:
            if name in ("launch", "cluster", "_ranks") and self._state in _NO_RANKS:
                fix = _ANEW if self._state == "given up" else "run.start(), or `with run:`"
                raise self._refused(f"was {self._state}, and has no ranks", fix)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        meshes = self._places if self._state in _NO_RANKS else self.launch.places
        lines = [f"launch of {', '.join(map(str, meshes))}: {self._state}"]
        if self._state == "running":
            for machine, ranks in self.launch.cluster.machines.items():
                lines.append(f"  {ranks_text(ranks)} on {machine}")
        return "\n".join(lines)

    # -- its begin and its end --------------------------------------------------------------------

    def start(self) -> Self:
        """Start the ranks: programs from here to `close` run there. Returns the launch itself.

        If it runs already, it does nothing. A launch whose start has failed may be started again.
        Raises PlanningError if another launch runs, or this one has ended.
        """
        with defer_signals():
            with CALL_LOCK:
                if self._state == "running":
                    return self
                if self._state != "never started":
                    was = "has ended" if self._state == "ended" else "was given up"
                    raise self._refused(f"{was}, and none starts again", _ANEW)
                _check_none_runs()
                _starting.append(self)
            try:  # without the lock: other calls continue meanwhile
                with waits_may_act():
                    running = self._start_ranks()
                (first, ranks), *others = self._places.items()
                super().__init__(first, running.part(first, ranks), running)
                running.sessions[first] = self
                for other, ranks_there in others:
                    running.add(other, ranks_there)
                with CALL_LOCK:
                    self._actors = self._offer_actors()
                    launches.append(running)
                    self._state = "running"
                    forget(self)
            finally:
                _starting.clear()
                if self._state == "never started":
                    remember(self, self.source, tried=True)
        return self

    def close(self) -> None:
        """Wait for calls in flight, bring the values home and end the ranks, as leaving the `with`
        block does. Raises a failure that was not read.

        If it has ended, it does nothing; if it was never started, it cannot be started any more.
        """
        with defer_signals():
            if not self._ends():
                return
            try:
                with waits_may_act():
                    self.launch.settle()
                    self._actors.end()
            except BaseException as error:
                self._leave_by(error)
                raise
            self._leave()

    def __enter__(self) -> Self:
        if self._entered and self._state == "running":
            raise self._refused("is entered already", "leave the inner `with run:` out")
        self._entered = True
        try:
            return self.start()
        except BaseException:
            self.close()  # no name refers to it: only the error is left
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with defer_signals():
            if self._ends():
                self._leave_by(error)

    def end_with_process(self) -> None:
        """As `close`, but the process's end reports the failures of saves (async_save.py)."""
        with defer_signals():
            if self._ends():
                try:
                    with waits_may_act():
                        self.launch.settle(saves=False)
                        self._actors.end()
                finally:
                    self._leave()

    def _refused(self, why: str, fix: str) -> PlanningError:
        lines = lines_text(launch=self.source, call=source_here())
        return PlanningError(f"the launch {why}.\n{lines}fix: {fix}")

    def _ends(self) -> bool:
        """Mark it as ended, or given up; returns whether it ran."""
        with CALL_LOCK:
            before = self._state
            self._state = "ended" if before in ("running", "ended") else "given up"
            forget(self)
            atexit.unregister(_end_last)
        return before == "running"

    def _leave_by(self, error: BaseException) -> None:
        """Add notes to the error about values that are lost with the launch."""
        note_unread(error, self.launch.saves)
        try:
            self._leave()
        except (DaftError, PlanningError) as lost:  # reading the weights raises it, too
            error.add_note(f"and not all weights came home: {lost}")

    def _leave(self) -> None:
        with held_back():
            with CALL_LOCK:
                launches.remove(self.launch)
            try:
                self._actors.end(quiet=True)
            finally:
                self.launch.close(bring_home=self._bring_home)

    # -- between two steps ------------------------------------------------------------------------

    def switch_plan(
        self,
        model: ParallelModule,
        optimizer: Optimizers,
        mesh: Mesh,
        placements: Mapping[str, StatedRoles] | None = None,
        *,
        stages: Stages | None = None,
        zero: Mapping[str, int] | None = None,
        recompute: Sequence[str] | None = None,
        misaligned: str = "redistribute",
        inputs: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        ranks: Sequence[int] | None = None,
        topology: Topology | None = None,
    ) -> SyncPlan:
        """The transfers of ``switch`` with the same arguments: each value's pieces, the bytes of
        each pair of ranks, the messages, the price. It waits for calls in flight, too; nothing is
        moved, and nothing changes.

        Args:
            topology: the hardware of the price.
        """
        given = dict(stages=stages, zero=zero, recompute=recompute, misaligned=misaligned)
        how = SwitchTarget(placements or {}, given, inputs, schedule, ranks, topology)
        with CALL_LOCK:
            return switch_of(self.launch, model, optimizer, mesh, how).plan

    def switch(
        self,
        model: ParallelModule,
        optimizer: Optimizers,
        mesh: Mesh,
        placements: Mapping[str, StatedRoles] | None = None,
        *,
        stages: Stages | None = None,
        zero: Mapping[str, int] | None = None,
        recompute: Sequence[str] | None = None,
        misaligned: str = "redistribute",
        inputs: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        ranks: Sequence[int] | None = None,
    ) -> SyncPlan:
        """Between two steps: move the model, its optimizer and the steps over them to ``mesh`` and
        ``placements``. Returns the transfers.

        It waits for calls in flight; an unread failure of one raises here. Raises PlanningError
        like `parallelize`, `train_step` and a step's first call, and then nothing has changed;
        daft's errors if moving fails, and then the model has not moved.

        Args:
            optimizer: the model's optimizer, whose state moves; a list, if it has several; None, if
                none has taken a step.
            mesh, placements, stages, zero, recompute, misaligned: as for `parallelize`; omitted
                ones
                have its defaults, not their earlier values.
            inputs, schedule: of later steps, where the present ones do not suit the mesh.
            ranks: the launch's numbers of the mesh's ranks, if the mesh is new there.
        """
        given = dict(stages=stages, zero=zero, recompute=recompute, misaligned=misaligned)
        how = SwitchTarget(placements or {}, given, inputs, schedule, ranks, None)
        with CALL_LOCK:
            switching = switch_of(self.launch, model, optimizer, mesh, how)
            switching.carry_out()
            return switching.plan


_starting: list[LaunchSession] = []
"""The launch that is starting, if there is one."""


def launch(
    *meshes: Mesh | str,
    backend: Backend = "inprocess",
    device: str = "cpu",
    ranks: Mapping[Mesh, Sequence[int]] | None = None,
    address: str | None = None,
    deadline_s: float = 60.0,
    call_deadline_s: float = 3600.0,
    ranks_per_actor: int | None = None,
    mode: Mode = "compiled",
    bring_home: bool = True,
    local: LocalKind = "generated",
    spares: int = 0,
    snapshot_every: int | None = None,
    max_restarts: int = 100,
    warm: bool = True,
) -> LaunchSession:
    """The ranks of one or several meshes, for a `with` block: programs inside it run on them.
    ``run.start()`` and ``run.close()`` do the same without a block, for example over cells of a
    notebook.

    Several meshes are on ranks of one cluster, in order: the first has ranks 0, 1, ..., the next
    those after. Equal meshes are one: ``Mesh(tp=2, name="play")`` differs from ``Mesh(tp=2)``.
    Models and DTensors are on one mesh each; `transfer` moves values from one to another. A call
    that raises fails only its own run; with a lost rank, the values of all meshes of the launch are
    lost, and the error names the rank by both numbers.

    `daft.spawn` inside the block makes actors of the same launch, beside the ranks: on Ray with the
    same Ray and deadlines. They end with it, which raises their unread failures.

    At its end the values of models and the state of their optimizers come home, in place: the
    controller's module and optimizer are current again. Models on the meta device stay remote.

    Returns the session of the first mesh; nothing is started yet. A step is an error while the last
    launch is not started; ``run.close()``, or another launch, discards it. A launch starts once; if
    it still runs when the process ends, it is closed then.

    Args:
        meshes: backend and device may follow them, as in ``launch(mesh, "ray")``.
        ranks: mesh to numbers of ranks of the launch, in the mesh's order; meshes may share ranks:
            ``launch(train, play, ranks={play: (0, 1)})``. A mesh that is not named gets new ranks,
            after those of the meshes before it.
        backend: "inprocess": all ranks in this process, deterministic; "ray": an actor per rank,
            or per ``ranks_per_actor`` of them.
        device: "cpu" or "cuda". On "cuda", "inprocess" puts all ranks on this GPU; "ray" gives
            each actor its own GPU, and refuses to start if too few are free.
        address: of a Ray cluster to join; otherwise one is started here, and stopped at the end.
            If it spans machines, ranks are on all of them, in blocks in the mesh's order: those
            along the last axis are on one (docs/scale_out.md).
        deadline_s: seconds after which a rank that makes no progress counts as failed.
        call_deadline_s: seconds that one computation of a rank may take; after `deadline_s` it
            causes a warning.
        ranks_per_actor: how many consecutive ranks of the launch, of any mesh, share an actor: a
            process on Ray, which computes for one of them at a time and is lost with all of them,
            and on "cuda" a GPU. By default 1; in-process all share this process anyway. A mesh's
            ranks are all on one GPU with ``ranks_per_actor=mesh.size``; else, on GPUs, a
            collective's ranks must be on one actor, or each on its own.
        mode: "compiled": one call per actor and step; "interpreted": one instruction at a time.
        bring_home: False does not bring changed values home; reading them is a RuntimeError from
            then on, until `load_state_dict`, unless `gather_state_dict` has written them.
        local: "inductor": torch's compiler compiles chains of elementwise ops, norms and sums, on
            CPUs; a first call takes seconds longer. All backends and modes have the same bits, and
            agree with "generated" to a tolerance.
        spares: processes that wait to replace a lost rank, besides those of the ranks; with
            some, ``snapshot_every=1`` by default.
        snapshot_every: runs on all ranks after which each keeps a copy of the values it wrote, in
            memory that outlives its process. On Ray a rank that is lost, stopped or silent is then
            replaced, by a spare or a new process, and the runs since are repeated: a warning, and
            no error (docs/recovery.md). By default no copies are kept.
        max_restarts: how many ranks may be replaced before the loss of one is an error.
        warm: a Ray that is started here starts while this process goes on; the first call that
            needs ranks waits. It stays for a minute after the launch, so that the next one of this
            process finds it; at the latest it ends with the process. False: it ends with the
            launch, and so does one that has stayed.

    Raises PlanningError for invalid arguments and while another launch runs. Its start raises
    ValueError if Ray has too few GPUs; its end raises daft's errors: a failed rank, with its
    instruction and the model's source line.
    """
    if ranks is None and len(meshes) == 1 and isinstance(mesh := meshes[0], Mesh):
        places, size = {mesh: None}, mesh.size
    else:
        from dtensor.api.store.meshes import ranks_of_meshes, split_positional

        stated, backend, device = split_positional(meshes, backend, device)
        stated_ranks = ranks_of_meshes(stated, ranks)
        size = 1 + max(map(max, stated_ranks.values()))
        alone = ranks is None and len(stated) == 1
        places = dict.fromkeys(stated) if alone else stated_ranks
    try:
        options = LaunchOptions(
            backend=backend,
            device=device,
            address=address,
            deadline_s=deadline_s,
            call_deadline_s=call_deadline_s,
            ranks_per_actor=ranks_per_actor,
            spares=spares,
            snapshot_every=snapshot_every,
            max_restarts=max_restarts,
            warm=warm,
        )
    except ValueError as error:
        raise PlanningError(str(error)) from None
    check_word("mode", mode, ("compiled", "interpreted"))
    # "meta" computes nothing: it shows a step's results, and their places
    if not isinstance(device, str) or not re.fullmatch(r"cpu|meta|cuda(:\d+)?", device):
        raise PlanningError(f'device={device!r}: it is "cpu" or "cuda"')
    fix = 'address="127.0.0.1:6379", or leave it out'
    check_kind("address", address, str | None, "that of a Ray cluster", fix)
    if backend == "inprocess" and address is not None:
        raise PlanningError(
            f'address={address!r} is of a Ray cluster, and backend="inprocess" joins none.\n'
            f'fix: backend="ray", or leave address out'
        )
    if backend == "inprocess" and device.startswith("cuda") and not torch.cuda.is_available():
        raise PlanningError(f'device="{device}", and this process sees no GPU; fix: device="cpu"')
    if backend == "inprocess" and device.startswith("cuda:"):
        _check_current(int(device.removeprefix("cuda:")))
    check_word("local", local, get_args(LocalKind))
    if local == "inductor":
        _check_inductor(device)
    check_kind("bring_home", bring_home, bool, "True or False", "bring_home=False")
    check_kind("warm", warm, bool, "True or False", "warm=False")
    recovers = backend == "ray" and options.snapshot_every is not None
    if recovers and (mode != "compiled" or device != "cpu"):
        what = f"mode={mode!r}" if mode != "compiled" else f"device={device!r}"
        raise PlanningError(
            f"{what} on Ray: ranks that are lost can be replaced in compiled mode on CPUs alone.\n"
            f"fix: leave spares and snapshot_every out, and dt.resume from a checkpoint"
        )
    with CALL_LOCK:
        _check_none_runs()

    def start_ranks() -> Launch:
        groups = () if backend == "inprocess" else together(places)
        cluster = start_cluster(size, options, groups)
        atexit.register(_end_last, os.getpid())  # after Ray's: so it runs before
        return Launch(cluster, mode, local)

    return LaunchSession(places, start_ranks, partial(DeferredLaunch, options), bring_home)


def _check_none_runs() -> None:
    """PlanningError where a launch runs, or starts."""
    first = _starting[-1] if _starting else launched()
    if first is not None:
        assert isinstance(first, LaunchSession), "an implicit one is none"
        raise PlanningError(
            f"a launch is running already, and only one can run at a time.\n"
            f"{lines_text(running=first.source, another=source_here())}"
            f"fix: run.close(), where run is the first launch; or leave its `with` block"
        )


def _end_last(controller: int) -> None:
    """Close a launch that is still open when the process ends, and print its failure."""
    run = launched()
    if os.getpid() == controller and isinstance(run, LaunchSession):  # and not in a fork
        try:
            run.end_with_process()
        except BaseException:
            lines = lines_text(launch=run.source)
            words = (
                "dtensor: a launch that was never closed has failed, and its error was not read."
            )
            print(f"{words}\n{lines}{traceback.format_exc()}", end="", file=sys.stderr)
            not_zero()


def together(places: Mapping[Mesh, Sequence[int] | None]) -> list[Sequence[int]]:
    """Ranks that send each other most, which should be inside a machine: for each mesh those along
    its last axis, for each place along the others. Axes of size 1 do not count."""
    groups: list[Sequence[int]] = []
    for mesh, stated in places.items():
        ranks = range(mesh.size) if stated is None else stated
        size = next((n for n in reversed(mesh.shape.values()) if n > 1), 1)
        groups += [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return groups


def _check_current(index: int) -> None:
    """PlanningError unless it is this process's current GPU, on which kernels are launched."""
    count, current = torch.cuda.device_count(), torch.cuda.current_device()
    if index >= count:
        raise PlanningError(
            f'device="cuda:{index}", and this process sees {count} GPUs; fix: device="cuda"'
        )
    if index != current:
        raise PlanningError(
            f'device="cuda:{index}", and this process\'s current GPU is cuda:{current}, where '
            f'ranks in process run.\nfix: torch.cuda.set_device({index}) before, or device="cuda"'
        )


def _check_inductor(device: str) -> None:
    """PlanningError if torch's compiler has no C++ compiler, and on other devices than CPUs."""
    if device != "cpu":
        raise PlanningError(
            f'local="inductor" with device="{device}": it compiles for CPUs alone.\n'
            f'fix: device="cpu", or leave local out'
        )
    get_cpp_compiler, missing = cpp_compiler()
    try:
        get_cpp_compiler()
    except missing as error:
        raise PlanningError(
            f'local="inductor" needs a C++ compiler, and there is none here: {error}\n'
            f"fix: install g++, or set CXX to a compiler; or leave local out"
        ) from error
