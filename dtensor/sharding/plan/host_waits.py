"""Finds why the host of a GPU must wait for a value in a step, for the plan's lines.

    host_waits(plan)      # ("waits 2 times, for the counts of rows of experts",)

A program for GPUs is deferred if the host reads no value of the GPU before the step has ended
(runtime/lower/deferred.py). The program of a plan with one of these waits is not: its host reads
the votes, as on CPUs. An op of the user's that reads a value waits where it is called, and its
program is deferred all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Redistribute, updates_of


def host_waits(plan: PlanRecord) -> tuple[str, ...]:
    """Return what the host does in a step besides the wait for its results; () for most plans."""
    return (*_counts(plan), *_updates(plan))


def _counts(plan: PlanRecord) -> Iterator[str]:
    """Yield the waits for counts of rows: one for each dispatch on the stage with the most."""
    dispatches = [
        step
        for step in plan.steps
        if isinstance(step, Redistribute) and step.moves[0].gathers_counts
    ]
    by_stage = [
        sum(step_times(plan, step) for step in dispatches if step.stage == stage)
        for stage in range(plan.num_stages)
    ]
    if waits := max(by_stage):
        times = "once" if waits == 1 else f"{waits} times"
        yield f"waits {times}, for the counts of rows of experts"


def _updates(plan: PlanRecord) -> Iterator[str]:
    """Yield the waits of optimizers that may read values."""
    reasons = dict.fromkeys(u.host_reads for u in updates_of(plan.steps) if u.host_reads)
    if reasons:
        yield f"waits for the votes, because {', and '.join(reasons)}"
