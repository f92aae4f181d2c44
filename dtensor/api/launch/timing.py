"""`simulate`, `trace` and `calibrate`: the time of a step, simulated or measured.

print(simulate(step, tokens, targets))      # a step on a virtual clock; nothing is launched
print(trace(step, tokens, targets))         # one real step, with the times of its instructions
train_step(..., topology=calibrate())       # the measured `Topology` of a cluster
with trace() as recording: ...              # all runs: recording.timeline()
"""

from __future__ import annotations

import time
from typing import Any, overload

import torch

from dtensor.api.eager.compiled import CompiledFunction
from dtensor.api.launch.launching import launch
from dtensor.api.step.bound_call import BoundCall
from dtensor.api.step.loss import Loss
from dtensor.api.step.training import TrainStep
from dtensor.api.store.session import Launch, launched, session_for
from dtensor.api.store.unstarted import check_started
from dtensor.daft.cluster.cluster import Backend, RecordedRun
from dtensor.errors import PlanningError
from dtensor.runtime.simulate.calibration import calibrate as measured_topology
from dtensor.runtime.simulate.simulator import simulate as simulated
from dtensor.runtime.simulate.timeline import Note, Timeline, timeline_of
from dtensor.runtime.simulate.trace import Trace, measured
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh


def simulate(
    step: TrainStep | CompiledFunction,
    *batch: Any,
    topology: Topology | None = None,
    **kwargs: Any,
) -> Trace:
    """Return the predicted timeline of one call of ``step`` on a batch. Launches nothing.

    The program runs against a virtual clock: the time of an op follows the roofline model, the time
    of a message the alpha-beta model of ``topology`` (by default the step's). Equal ranks are
    simulated once, so the mesh may have thousands of ranks.

    Args:
        batch, kwargs: the arguments of the call, tensors (meta too) or specs, as for `plan`; a
            `Topology` may come last. By default the arguments of the last plan or call of ``step``.

    The `Trace` has ``seconds``, ``bubble``, peak memory by rank, and ``save("trace.json")``. Raises
    PlanningError as `plan` does.
    """
    if batch and isinstance(batch[-1], Topology) and topology is None:
        batch, topology = batch[:-1], batch[-1]
    _check_step("simulate", step)
    check_topology(topology)
    if step.plans.latest is None or batch or kwargs:
        step.plan(*batch, **kwargs)
    planned = step.plans.latest
    assert planned is not None, "the latest plan exists"
    return simulated(planned.plan, planned.grid, topology)


class TraceRecording:
    """The result of `trace()`: a context manager that times the runs of the launch."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._recorded_runs: list[RecordedRun] = []
        self._notes: list[Note] = []
        self._timeline: Timeline | None = None
        self._launch: Launch | None = None

    def __enter__(self) -> TraceRecording:
        session = launched()
        launch = session and session.launch
        if launch is None or launch.cluster.recording is not None or self._launch is not None:
            raise PlanningError(
                "trace() without a step records the runs in a launch, one recording at a time.\n"
                "fix: with dt.launch(mesh): with dt.trace() as recording: ..."
            )
        self._launch, self._begin = launch, time.monotonic()
        launch.cluster.recording = self._recorded_runs
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._launch is not None, "it was entered"
        self._launch.cluster.recording = None
        if error is None:
            self._launch.settle()
            end = time.monotonic()
            self._timeline = timeline_of(self._recorded_runs, self._begin, end, self._notes)
        self._recorded_runs = []  # frees the results of the runs

    def note(self, row: str, name: str, begin: float, end: float) -> None:
        """Record an activity of the program. ``begin``, ``end``: seconds of `time.monotonic`."""
        self._notes.append(Note(row=row, name=name, begin=begin, end=end))

    def timeline(self) -> Timeline:
        """Return the timeline of the runs that were not undone. Raises RuntimeError within the
        block, and if the block has failed."""
        if self._timeline is None:
            raise RuntimeError("there is no timeline before the `with` block has ended well")
        return self._timeline


@overload
def trace() -> TraceRecording: ...
@overload
def trace(step: TrainStep | CompiledFunction, *batch: Any, **kwargs: Any) -> Trace: ...
def trace(
    step: TrainStep | CompiledFunction | None = None, *batch: Any, **kwargs: Any
) -> Trace | TraceRecording:
    """Run one call of ``step`` on ``batch`` and ``kwargs``, and return its measured timeline on
    every rank. Raises the errors of the call.

    Without arguments, return a `TraceRecording` of all runs of the launch, of any program and mesh:

        with dt.trace() as recording:
            ...
        recording.timeline().save("timeline.json")

    The call is a real one: a training step changes the state. Spans have the names that `simulate`
    uses; the first span, "call", is the controller's time in addition to the ranks' instructions.
    Times are read from each host's monotonic clock, so the clocks of several hosts are offset. In
    one process all ranks share a thread, and each waits while others compute.
    """
    if step is None and not batch and not kwargs:
        return TraceRecording()
    _check_step("trace", step)
    assert step is not None, "it was checked"
    if isinstance(step, TrainStep):
        session = session_for(step.model.mesh)
    else:
        session = session_for(step.mesh_of(BoundCall.of(step.fn, batch, kwargs)))
    with session.recording_run("timed"):
        result = step(*batch, **kwargs)
    if isinstance(result, Loss):
        result.tensor()  # raises its failure, so that the next step does not
    recorded, session.recorded_run = session.recorded_run, None
    assert recorded is not None
    outputs = recorded.future.get()
    return measured(recorded.handle, outputs, time.monotonic() - recorded.called, session.ranks)


def _check_step(verb: str, step: object) -> None:
    """Raise PlanningError if ``step`` is neither a training step nor a compiled function."""
    if not isinstance(step, TrainStep | CompiledFunction):
        raise PlanningError(
            f"{verb} takes a result of dt.train_step or dt.compile, not "
            f"{type(step).__name__}.\nfix: dt.{verb}(step, *batch)"
        )


def calibrate(
    mesh: Mesh | None = None,
    *,
    backend: Backend | None = None,
    device: str | None = None,
    address: str | None = None,
    deadline_s: float | None = None,
    ranks_per_actor: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Topology:
    """Measure the FLOP/s of the ranks of ``mesh`` and the bytes per second between them. This takes
    about a second.

    Inside a `launch`, its cluster is measured; ``mesh`` is one of its meshes, by default the first.
    Outside, ``backend``, ``device``, ``address``, ``deadline_s`` and ``ranks_per_actor`` are as for
    `launch`; the default is one rank in this process.

    Args:
        dtype: the dtype of the tensors that are multiplied, read and sent.

    The `Topology` has a latency and a bandwidth for each axis of more than one rank. Its repr can
    be pasted into a file. ``memory_bytes`` is not measured. Raises daft's errors if a rank fails or
    makes no progress for ``deadline_s``.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanningError(
            f"calibrate(dtype={dtype}): models do not multiply matrices of {dtype}.\n"
            f"fix: dt.calibrate(dtype=torch.bfloat16), or torch.float32"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanningError(
            f"calibrate takes a mesh, not {type(mesh).__name__}.\nfix: dt.calibrate(dt.Mesh(tp=2))"
        )
    running = launched()
    if running is None:
        check_started()
        all_ranks = mesh or Mesh()
        with launch(
            all_ranks,
            backend or "inprocess",
            device or "cpu",
            address=address,
            deadline_s=60.0 if deadline_s is None else deadline_s,
            ranks_per_actor=ranks_per_actor,
        ) as session:
            return measured_topology(session.cluster, all_ranks, dtype)
    launch_options = dict(backend=backend, device=device, address=address, deadline_s=deadline_s)
    launch_options |= dict(ranks_per_actor=ranks_per_actor)
    stated = [f"{name}={value!r}" for name, value in launch_options.items() if value is not None]
    if stated:
        raise PlanningError(
            f"calibrate({', '.join(stated)}) inside a launch: it measures the launch's "
            f"cluster.\nfix: dt.calibrate(), or call it outside the launch"
        )
    session = session_for(mesh or running.mesh)
    return measured_topology(session.cluster, session.mesh, dtype)
