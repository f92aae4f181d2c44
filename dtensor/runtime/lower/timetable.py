"""A schedule's grid as the planner asks it: what is in flight, and who waits for how long.

    plan(Request(..., timetable=GridTimetable(OneFOneB(microbatches=4).grid(2, 2))))

Not here: schedules (runtime/schedule), which steps an action runs (actions.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.schedule import Costs, Grid, Kind, in_flight, waits
from dtensor.sharding.plan.cost.seconds import step_seconds
from dtensor.sharding.plan.record import PlanRecord


@dataclass(frozen=True, slots=True)
class GridTimetable:
    """The planner's `Timetable` of a grid."""

    grid: Grid

    @property
    def text(self) -> str:
        return str(self.grid)

    @property
    def in_flight(self) -> tuple[int, ...]:
        return in_flight(self.grid)

    def waits(self, plan: PlanRecord) -> tuple[float, tuple[float, ...]]:
        return waits(self.grid, stage_costs(plan))


def stage_costs(plan: PlanRecord) -> Costs:
    """Predicted seconds of each stage's F, I and W, as `Searched` takes them."""
    actions = Actions(plan, None)

    def seconds(kind: Kind) -> tuple[float, ...]:
        return tuple(
            sum(sum(step_seconds(plan, step, stage)) for step in actions.steps(kind, stage))
            for stage in range(plan.num_stages)
        )

    return Costs(forward=seconds("F"), input=seconds("I"), weight=seconds("W"))
