"""`launch`: starts the ranks of meshes for the duration of a `with` block.

    with launch(Mesh(dp=4), backend="ray") as run:      # default: in-process
        step(x, y)
        run.switch(model, opt, Mesh(dp=2), {})          # f32[64@dp,16]: [16,16] to [32,16]
    run = launch(train, play)                           # without a block, as in a notebook
    run.start(); run.close()

If an exception ends the block, its notes name values that could not be copied back. Invariants: one
launch runs at a time, and each starts once. A step raises while a launch is made and not started.
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
from dtensor.api.move.switch import SwitchTarget, switch_of
from dtensor.api.step.compiled_code import no_compiler
from dtensor.api.step.wrapped_optimizers import Optimizers
from dtensor.api.store.session import (
    Launch,
    LocalKind,
    MeshSession,
    launched,
    launches,
)
from dtensor.api.store.unstarted import forget_unstarted, record_unstarted
from dtensor.daft import Backend, DaftError, Mode
from dtensor.daft.diagnosis.diagnosis import ranks_text
from dtensor.daft.launch_options import LaunchOptions
from dtensor.daft.launching import DeferredLaunch, start_cluster
from dtensor.errors import PlanningError, check_kind, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.source import lines_text, source_here
from dtensor.runtime.lower.pieces import compiler_problem
from dtensor.runtime.schedule import Schedule
from dtensor.sharding.redistribute.sync_plan import SyncPlan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.signals import defer_signals, held_back, waits_handle_signals

_State = Literal["never started", "given up", "running", "ended"]
_NO_RANKS: tuple[_State, ...] = ("never started", "given up")
_NEW_LAUNCH = "run = dt.launch(...), and start that one"


class LaunchSession(MeshSession):
    """The result of `launch`: the session of its first mesh, with `switch` for use between two
    steps. It prints its meshes and the ranks on each machine. The attributes of a `MeshSession`
    exist from `start` on.
    """

    def __init__(
        self,
        places: Mapping[Mesh, tuple[int, ...] | None],
        ranks: Callable[[], Launch],
        actors: Callable[[], DeferredLaunch],
        bring_home: bool,
    ) -> None:
        """Record a launch that is not started yet. ``ranks`` starts its ranks; ``actors`` lets
        `daft.spawn` start actors in it."""
        self.mesh = next(iter(places))
        self.source = source_here()
        self._places = places
        self._start_ranks, self._offer_actors = ranks, actors
        self._bring_home = bring_home
        self._state: _State = "never started"
        self._entered = False
        record_unstarted(self, self.source)

    if not TYPE_CHECKING:  # for a type checker all attributes exist

        def __getattr__(self, name: str) -> Any:
            if name in ("launch", "cluster", "_ranks") and self._state in _NO_RANKS:
                fix = _NEW_LAUNCH if self._state == "given up" else "run.start(), or `with run:`"
                raise self._state_error(f"was {self._state}, and has no ranks", fix)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        meshes = self._places if self._state in _NO_RANKS else self.launch.places
        lines = [f"launch of {', '.join(map(str, meshes))}: {self._state}"]
        if self._state == "running":
            for machine, ranks in self.launch.cluster.machines.items():
                lines.append(f"  {ranks_text(ranks)} on {machine}")
        return "\n".join(lines)

    # -- start and end ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the ranks, on which programs run until `close`. Return the launch itself.

        Does nothing if the launch is running. A launch whose start has failed may be started again.
        Raises PlanningError if another launch is running, or if this one has ended.
        """
        with defer_signals():
            with CALL_LOCK:
                if self._state == "running":
                    return self
                if self._state != "never started":
                    state_text = "has ended" if self._state == "ended" else "was given up"
                    raise self._state_error(f"{state_text}, and none starts again", _NEW_LAUNCH)
                _check_none_runs()
                _starting.append(self)
            try:  # without the lock: other calls continue meanwhile
                with waits_handle_signals():
                    running = self._start_ranks()
                (first, ranks), *other_meshes = self._places.items()
                super().__init__(first, running.part(first, ranks), running)
                running.sessions[first] = self
                for other, other_ranks in other_meshes:
                    running.add(other, other_ranks)
                with CALL_LOCK:
                    self._actors = self._offer_actors()
                    launches.append(running)
                    self._state = "running"
                    forget_unstarted(self)
            finally:
                _starting.clear()
                if self._state == "never started":
                    record_unstarted(self, self.source, tried=True)
        return self

    def close(self) -> None:
        """Wait for calls in flight, copy the values back and end the ranks, as at the end of the
        `with` block. Raises a failure that was not read.

        Does nothing if the launch has ended. A launch that was never started cannot be started any
        more.
        """
        with defer_signals():
            if not self._mark_ended():
                return
            try:
                with waits_handle_signals():
                    self.launch.settle()
                    self._actors.end()
            except BaseException as error:
                self._end_after_error(error)
                raise
            self._end()

    def __enter__(self) -> Self:
        if self._entered and self._state == "running":
            raise self._state_error("is entered already", "leave the inner `with run:` out")
        self._entered = True
        try:
            return self.start()
        except BaseException:
            self.close()  # the user has no name for it
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
            if self._mark_ended():
                self._end_after_error(error)

    def end_with_process(self) -> None:
        """Close the launch at the end of the process, which reports the failures of saves itself
        (async_save.py)."""
        with defer_signals():
            if self._mark_ended():
                try:
                    with waits_handle_signals():
                        self.launch.settle(saves=False)
                        self._actors.end()
                finally:
                    self._end()

    def _state_error(self, why: str, fix: str) -> PlanningError:
        lines = lines_text(launch=self.source, call=source_here())
        return PlanningError(f"the launch {why}.\n{lines}fix: {fix}")

    def _mark_ended(self) -> bool:
        """Mark the launch as ended, or given up if it never ran. Return whether it was running."""
        with CALL_LOCK:
            before = self._state
            self._state = "ended" if before in ("running", "ended") else "given up"
            forget_unstarted(self)
            atexit.unregister(_close_at_exit)
        return before == "running"

    def _end_after_error(self, error: BaseException) -> None:
        """End the launch because of an error, with notes on the error about unread failures of
        saves and about values that were lost."""
        note_unread(error, self.launch.saves)
        try:
            self._end()
        except (DaftError, PlanningError) as values_error:  # reading the weights raises it too
            error.add_note(f"and not all weights came home: {values_error}")

    def _end(self) -> None:
        """End the actors and the ranks, after copying the values back."""
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
        optimizer: Optimizers | None,
        mesh: Mesh,
        placements: Mapping[str, StatedRoles] | None = None,
        *,
        stages: Stages | None = None,
        zero: Mapping[str, int | str] | None = None,
        recompute: Sequence[str] | None = None,
        misaligned: str = "redistribute",
        attention: Mapping[str, str] | None = None,
        inputs: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        ranks: Sequence[int] | None = None,
        topology: Topology | None = None,
    ) -> SyncPlan:
        """Return the plan of a ``switch`` with the same arguments: each value's pieces, the bytes
        between each pair of ranks, the messages and the price. Waits for calls in flight. Moves and
        changes nothing.

        Args:
            topology: the hardware for which the price is computed.
        """
        options: Any = dict(stages=stages, zero=zero, recompute=recompute)
        options |= dict(misaligned=misaligned, attention=attention)
        target = SwitchTarget(placements or {}, options, inputs, schedule, ranks, topology)
        with CALL_LOCK:
            return switch_of(self.launch, model, optimizer, mesh, target).plan

    def switch(
        self,
        model: ParallelModule,
        optimizer: Optimizers | None,
        mesh: Mesh,
        placements: Mapping[str, StatedRoles] | None = None,
        *,
        stages: Stages | None = None,
        zero: Mapping[str, int | str] | None = None,
        recompute: Sequence[str] | None = None,
        misaligned: str = "redistribute",
        attention: Mapping[str, str] | None = None,
        inputs: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        ranks: Sequence[int] | None = None,
    ) -> SyncPlan:
        """Between two steps, move the model, its optimizer and the steps over them to ``mesh`` and
        ``placements``. Return the plan of the transfers.

        Waits for calls in flight, and raises their unread failures. Raises PlanningError as
        `parallelize`, `train_step` and a step's first call do, and daft's errors if moving fails;
        nothing has changed then.

        Args:
            optimizer: the model's optimizer, whose state moves; a list if it has several; None if
                none has taken a step.
            mesh, placements, stages, zero, recompute, misaligned, attention: as for `parallelize`;
                an omitted argument has its default there, not its earlier value.
            inputs, schedule: replace those of the model's steps, if they do not suit the mesh.
            ranks: the launch's numbers of the mesh's ranks, if the mesh is not in the launch yet.
        """
        options: Any = dict(stages=stages, zero=zero, recompute=recompute)
        options |= dict(misaligned=misaligned, attention=attention)
        target = SwitchTarget(placements or {}, options, inputs, schedule, ranks, None)
        with CALL_LOCK:
            switching = switch_of(self.launch, model, optimizer, mesh, target)
            switching.execute()
            return switching.plan


_starting: list[LaunchSession] = []
"""The launch that is starting, if any."""


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
    local: LocalKind = "auto",
    graphs: bool = False,
    spares: int = 0,
    snapshot_every: int | None = None,
    max_restarts: int = 100,
    warm: bool = True,
    deterministic: bool = False,
) -> LaunchSession:
    """Return a launch of the ranks of one or several meshes, for a `with` block: programs inside
    the block run on these ranks. ``run.start()`` and ``run.close()`` do the same without a block,
    as over several cells of a notebook.

    Several meshes are on ranks of one cluster, in order: the first has ranks 0, 1, ..., the next
    mesh the ranks after those. Equal meshes are one mesh: ``Mesh(tp=2, name="play")`` differs from
    ``Mesh(tp=2)``. Each model and DTensor is on one mesh; `transfer` moves values between meshes.
    A call that raises fails only its own run. If a rank is lost, the values of all meshes are lost,
    and the error names the rank by its numbers in the launch and in its mesh.

    `daft.spawn` inside the block starts actors of the same launch, on the same Ray and with the
    same deadlines. They end with the launch, which raises their unread failures.

    At the end of the launch, the values of models and the state of their optimizers are copied
    back, in place, into the controller's modules and optimizers. Models on the meta device are not.

    Nothing is started yet when this returns. A step raises while the latest launch is not started;
    ``run.close()``, or another launch, discards it. A launch starts once. If it still runs when the
    process ends, it is closed then.

    Args:
        meshes: the meshes; backend and device may follow them, as in ``launch(mesh, "ray")``.
        ranks: the launch's rank numbers of a mesh, in the mesh's order. Meshes may share ranks:
            ``launch(train, play, ranks={play: (0, 1)})``. A mesh without an entry gets the ranks
            after the ranks of the meshes before it.
        backend: "inprocess": all ranks in this process, deterministic; "ray": an actor for each
            rank, or for ``ranks_per_actor`` ranks.
        device: "cpu" or "cuda". On "cuda", "inprocess" puts all ranks on the current GPU; "ray"
            gives each actor its own GPU, and raises if too few are free.
        address: the address of a Ray cluster to join; by default one is started on this machine. If
            the cluster has several machines, ranks are on all of them, in blocks in the mesh's
            order, with the ranks along the last axis on one machine (docs/scale_out.md).
        deadline_s: seconds after which a rank that makes no progress counts as failed.
        call_deadline_s: seconds that one computation of a rank may take. It causes a warning after
            `deadline_s`.
        ranks_per_actor: the number of consecutive ranks of the launch that share an actor, by
            default 1. An actor is a process on Ray, and on "cuda" has one GPU; it computes for one
            of its ranks at a time, and all of them are lost together. With
            ``ranks_per_actor=mesh.size`` a mesh is on one GPU. Otherwise, on GPUs, the ranks of a
            collective must be on one actor, or each on its own actor.
        mode: "compiled": one call per actor and step; "interpreted": one instruction at a time.
        bring_home: False: changed values are not copied back. Reading them then raises
            RuntimeError until `load_state_dict`, unless `gather_state_dict` has copied them.
        local: "inductor": torch's compiler compiles the code between two communications, for each
            layer that differs; a first call takes seconds longer. Results are bitwise equal on all
            backends and in both modes, and agree with "generated" to a tolerance. "auto":
            "inductor" on "cuda", "generated" on "cpu".
        graphs: on "cuda", capture the work of a rank in a program as CUDA graphs in the second run
            of the program, and launch these in later runs: one graph, or one for each part between
            instructions on whose values the host waits (docs/performance.md). Graphs keep their
            memory. They have run on simulated GPUs only.
        spares: the number of processes that wait to replace a lost rank. With spares,
            ``snapshot_every`` is 1 by default.
        snapshot_every: the number of runs after which each rank copies the values that it wrote
            into memory that outlives its process. On Ray, a rank that is lost, stopped or silent is
            then replaced by a spare or a new process, and the runs since are repeated, with a
            warning (docs/recovery.md). By default no copies are kept.
        max_restarts: the number of ranks that may be replaced before the loss of a rank is an
            error.
        warm: True: a Ray cluster that is started here starts in the background, and stays for a
            minute after the launch, for the next launch of this process. False: it ends with the
            launch, as does one that stayed from an earlier launch.
        deterministic: True: sums between GPUs are added in the order of the ranks, and agree to
            the bit with ranks of one process on one GPU. By default NCCL adds them, in an order of
            its own. For "cuda" only: on CPUs, and in-process, it is always so.

    Raises PlanningError for invalid arguments, and while another launch runs. The start raises
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
    check_kind("deterministic", deterministic, bool, "True or False", "deterministic=True")
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
            deterministic=deterministic,
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
        _check_inductor(device, backend)
    check_kind("graphs", graphs, bool, "True or False", "graphs=True")
    if graphs and not device.startswith("cuda"):
        raise PlanningError(
            f'graphs=True with device="{device}": CUDA graphs run on GPUs alone.\n'
            f'fix: device="cuda", or leave graphs out'
        )
    if graphs and mode == "interpreted":
        raise PlanningError(
            'graphs=True with mode="interpreted", which launches one instruction at a time.\n'
            'fix: mode="compiled", or leave graphs out'
        )
    check_kind("bring_home", bring_home, bool, "True or False", "bring_home=False")
    check_kind("warm", warm, bool, "True or False", "warm=False")
    recovers = backend == "ray" and options.snapshot_every is not None
    if recovers and (mode != "compiled" or device != "cpu"):
        problem = f"mode={mode!r}" if mode != "compiled" else f"device={device!r}"
        raise PlanningError(
            f"{problem} on Ray: ranks that are lost can be replaced in compiled mode on CPUs "
            f"alone.\n"
            f"fix: leave spares and snapshot_every out, and dt.resume from a checkpoint"
        )
    with CALL_LOCK:
        _check_none_runs()

    def start_ranks() -> Launch:
        groups = () if backend == "inprocess" else together(places)
        cluster = start_cluster(size, options, groups)
        atexit.register(_close_at_exit, os.getpid())  # after Ray's: so it runs before
        return Launch(cluster, mode, local, graphs)

    return LaunchSession(places, start_ranks, partial(DeferredLaunch, options), bring_home)


def _check_none_runs() -> None:
    """Raises PlanningError if a launch is running or starting."""
    first = _starting[-1] if _starting else launched()
    if first is not None:
        assert isinstance(first, LaunchSession), "not an implicit session"
        raise PlanningError(
            f"a launch is running already, and only one can run at a time.\n"
            f"{lines_text(running=first.source, another=source_here())}"
            f"fix: run.close(), where run is the first launch; or leave its `with` block"
        )


def _close_at_exit(controller: int) -> None:
    """At the end of the process, close a launch that is still running, and print its failure.
    ``controller``: the process that made the launch; a forked child does nothing."""
    run = launched()
    if os.getpid() == controller and isinstance(run, LaunchSession):  # not in a forked child
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
    """Return groups of ranks that should be on one machine because they send each other most: the
    ranks along the last axis of each mesh. Axes of size 1 do not count."""
    groups: list[Sequence[int]] = []
    for mesh, stated in places.items():
        ranks = range(mesh.size) if stated is None else stated
        size = next((n for n in reversed(mesh.shape.values()) if n > 1), 1)
        groups += [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return groups


def _check_current(index: int) -> None:
    """Raises PlanningError unless this is the process's current GPU, on which kernels run."""
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


def _check_inductor(device: str, backend: str) -> None:
    """Raises PlanningError if torch's compiler compiles nothing for the device, or lacks a compiler
    in this process, and this process compiles."""
    if device == "meta":
        raise PlanningError(
            'local="inductor" with device="meta": it compiles for CPUs and GPUs.\n'
            'fix: device="cpu", or leave local out'
        )
    if device == "cpu" or backend == "inprocess":
        problem = compiler_problem("cpu" if device == "cpu" else "cuda")
        if problem is not None:
            raise no_compiler(*problem)
