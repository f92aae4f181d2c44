"""A plan with the schedule that it runs under: the grid, what waits, what is held at a time.

    scheduled(plan, timetable).bubble     # with the plan's own stages: how long each takes

Stages of a plan are rarely equal (one has the head), so the bubble is that of the grid whose
actions last as long as the plan says; transfers count at their sender, as in `stage_seconds`.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.request import Timetable


def scheduled(plan: PlanRecord, timetable: Timetable | None) -> PlanRecord:
    if timetable is None:
        return plan
    span, waiting = timetable.waits(plan) if plan.num_stages > 1 else (0.0, ())
    return replace(
        plan,
        bubble=sum(waiting) / (span * len(waiting)) if span else 0.0,
        waiting=waiting,
        in_flight=timetable.in_flight,
        schedule=timetable.text if plan.num_microbatches > 1 else "",
    )
