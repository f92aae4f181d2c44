"""`dt.trace`: one real step with the times of all its instructions; `dt.compare_traces`."""

from __future__ import annotations

import time
from typing import Any

from dtensor.api.compiled import CompiledFunction
from dtensor.api.session import session_for
from dtensor.api.training import TrainStep
from dtensor.errors import PlanningError
from dtensor.runtime.simulate.measured import measured
from dtensor.runtime.simulate.trace import Trace


def trace(step: TrainStep | CompiledFunction, *batch: Any, **kwargs: Any) -> Trace:
    """Run one call of ``step`` and return its measured timeline, of every rank.

    A training step is taken: state moves on. The names of spans are those of `simulate`; the first,
    "call", is what the controller's call takes beside the ranks' instructions. Times are of the
    host's monotonic clock, so of ranks on several hosts they are offset to one another. In
    one process all ranks share a thread: there each waits while others compute.
    """
    match step:
        case TrainStep():
            mesh = step.model.mesh
        case CompiledFunction():
            mesh = step.mesh
        case _:
            raise PlanningError(
                f"trace takes what dt.train_step or dt.compile returns, not "
                f"{type(step).__name__}.\nfix: dt.trace(step, *batch)"
            )
    session = session_for(mesh)
    with session.timing():
        step(*batch, **kwargs)
    assert session.timed is not None
    handle, future, called = session.timed
    session.timed = None
    outputs = future.get()
    return measured(handle, outputs, time.monotonic() - called)
