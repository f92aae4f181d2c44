"""`dt.simulate`: a step on a virtual clock, on a mesh that need not exist."""

from __future__ import annotations

from typing import Any

from dtensor.api.compiled import CompiledFunction
from dtensor.api.training import TrainStep
from dtensor.errors import PlanningError
from dtensor.runtime.simulate.clock import simulate as simulated
from dtensor.runtime.simulate.trace import Trace
from dtensor.sharding.redistribute.topology import Topology


def simulate(
    step: TrainStep | CompiledFunction,
    *batch: Any,
    topology: Topology | None = None,
    **kwargs: Any,
) -> Trace:
    """The predicted timeline of one call of ``step`` on such a batch; nothing is launched.

    The program that the actors would run is run against a virtual clock: ops last by the roofline,
    messages by the alpha-beta model of ``topology`` (default: that of the step). Ranks that do
    the same are simulated once, so the mesh may have thousands.

    Args:
        batch: tensors (meta too) or specs, as for `plan`; a `Topology` may stand last. Without
            a batch: that of the last plan or call of ``step``.

    Returns a `Trace`: ``seconds``, ``bubble``, peak memory by rank, ``save("trace.json")``.
    """
    if batch and isinstance(batch[-1], Topology) and topology is None:
        batch, topology = batch[:-1], batch[-1]
    match step:
        case TrainStep():
            grid = step.grid
        case CompiledFunction():
            grid = None
        case _:
            raise PlanningError(
                f"simulate takes what dt.train_step or dt.compile returns, not "
                f"{type(step).__name__}.\nfix: dt.simulate(step, *batch)"
            )
    if step.plans.latest is not None and not batch and not kwargs:
        return simulated(step.plans.latest.plan, grid, topology)
    return simulated(step.plan(*batch, **kwargs), grid, topology)
