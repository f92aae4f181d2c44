"""What a grid costs: how long it takes, how much of that is idle, what it holds.

    costs = Costs(forward=1.0, input=1.0, weight=1.0)
    bubble(OneFOneB(8).grid(4, 4), costs)       # 3 / 11
    timeline(grid, costs)[Action("F", 0, 1)]    # (1.0, 2.0): when it begins and ends

Each rank runs its actions in the grid's order, each as soon as its inputs are there. A transfer
takes no time here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtensor.errors import PlanningError
from dtensor.runtime.schedule.grid import Action, Grid, replay

__all__ = ["Costs", "bubble", "held_at_once", "in_flight", "timeline", "waits"]

PerStage = float | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The time of a stage's ``forward`` and of the two halves of its backward, in any unit: that of
    its ``input`` (I), for which the stage before waits, and that of its ``weight`` (W).

    A number holds for every stage, a tuple has one number per stage. B lasts as long as I and W.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight"):
            given = getattr(self, name)
            for cost in given if isinstance(given, tuple) else (given,):
                if not (isinstance(cost, int | float) and cost >= 0):
                    raise PlanningError(f"A cost is 0 or more, and {name} is {given!r}.")

    def of(self, action: Action) -> float:
        """The time of one action."""
        match action.kind:
            case "F":
                return _at(self.forward, action.stage)
            case "I":
                return _at(self.input, action.stage)
            case "W":
                return _at(self.weight, action.stage)
            case "B":
                return _at(self.input, action.stage) + _at(self.weight, action.stage)


def _at(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost


EQUAL = Costs()


def timeline(grid: Grid, costs: Costs = EQUAL) -> Mapping[Action, tuple[float, float]]:
    """When each action begins and ends."""
    orders = [grid.order(rank) for rank in range(grid.num_ranks)]
    times = replay(orders, costs.of)
    return dict(zip(itertools.chain(*orders), itertools.chain(*times), strict=True))


def bubble(grid: Grid, costs: Costs = EQUAL) -> float:
    """The fraction of the ranks' time in which they wait for other stages, from the first action of
    all to the last."""
    span, waited = waits(grid, costs)
    return sum(waited) / (span * grid.num_ranks) if span else 0.0


def waits(grid: Grid, costs: Costs = EQUAL) -> tuple[float, tuple[float, ...]]:
    """The time from the first action of all to the last, and how much of it each rank is idle."""
    times = timeline(grid, costs)
    span = max((end for _, end in times.values()), default=0.0)
    ranks = (grid.order(rank) for rank in range(grid.num_ranks))
    return span, tuple(span - sum(costs.of(action) for action in order) for order in ranks)


def in_flight(grid: Grid) -> tuple[int, ...]:
    """Per stage, the most microbatches whose activations it holds at once.

    An activation lives from its forward to the end of its backward, which is that of its W where
    the backward stands in halves.
    """
    held = [0] * grid.num_stages
    most = [0] * grid.num_stages
    for _, _, action in grid.actions():
        held[action.stage] += action.held
        most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)


def held_at_once(grid: Grid, stages: Sequence[int]) -> set[tuple[int, tuple[int, ...]]]:
    """While each action of the rank of these stages runs, the index of its stage, and by stage the
    microbatches whose activations are held besides its own."""
    held = dict.fromkeys(stages, 0)
    pairs: set[tuple[int, tuple[int, ...]]] = set()
    for _, _, action in grid.actions():
        if action.stage in held:
            others = held | {action.stage: held[action.stage] - (action.kind != "F")}
            pairs.add((stages.index(action.stage), tuple(others.values())))
            held[action.stage] += action.held
    return pairs
