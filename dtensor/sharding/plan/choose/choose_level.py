"""Chooses the level of ZeRO for ``zero={"dp": "auto"}``, by plans of all levels.

    0  2.31 ms, 9.1 GiB    1  2.10 ms, 6.1 GiB    2  2.25 ms, 5.0 GiB    3  2.60 ms, 4.1 GiB   -> 1

Of the levels that fit in the memory of the topology, the level with the least predicted seconds is
taken. If no level fits, the level with the least memory is taken. Of equal levels the lowest is
taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dtensor.sharding.plan.cost.totals import PlanTotals, index_of_best
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.sequence import Alternative
from dtensor.sharding.plan.storage import LEVELS, LevelChoice, Zero


def choose_level(request: Request, plan_of: Callable[[Request], PlanRecord]) -> PlanRecord:
    """Return the plan of the request, at the chosen level if none is stated."""
    zero = request.zero
    if zero is None or not zero.is_auto:
        return plan_of(request)
    stated = (None, *(Zero(zero.axes, level) for level in LEVELS))
    totals = [PlanTotals(plan_of(replace(request, zero=level))) for level in stated]
    best = index_of_best(totals)
    choice = LevelChoice(
        zero.axes,
        best,
        tuple(
            Alternative(str(level), each.cost.seconds, each.memory.total)
            for level, each in enumerate(totals)
        ),
        totals[best].fits,
    )
    return replace(totals[best].plan, level_choice=choice)
