"""A plan with the schedule that it runs under: the grid, what waits, what is held at a time.

    plan = scheduled(plan, OneFOneB(microbatches=4).grid(2, 2))
    plan.cost.bubble           # with the plan's own stages: how long each takes on a microbatch

Stages of a plan are rarely equal (one has the head), so the bubble is that of the grid whose
actions last as long as the plan says; transfers count at their sender, as in `stage_seconds`.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.runtime.lower.actions import stage_costs
from dtensor.runtime.schedule import Grid, in_flight, waits
from dtensor.sharding.plan.passes.gather_stored import gather_stored
from dtensor.sharding.plan.plan import Plan


def scheduled(plan: Plan, grid: Grid) -> Plan:
    """``plan`` under ``grid``; this is the last pass over its steps."""
    plan = gather_stored(plan)
    span, waiting = 0.0, ()
    if plan.num_stages > 1:
        span, waiting = waits(grid, stage_costs(plan))
    return replace(
        plan,
        bubble=sum(waiting) / (span * len(waiting)) if span else 0.0,
        waiting=waiting,
        in_flight=in_flight(grid),
        schedule=str(grid) if plan.num_microbatches > 1 else "",
        plain=None if plan.plain is None else scheduled(plan.plain, grid),
    )
