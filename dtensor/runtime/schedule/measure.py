"""The cost of a grid: its time, its idle time, and the activations that it holds.

    costs = Costs(forward=1.0, input=1.0, weight=1.0)
    bubble(OneFOneB(8).grid(4, 4), costs)       # 3 / 11
    timeline(grid, costs)[Action("F", 0, 1)]    # (1.0, 2.0): when it begins and ends

Each rank runs its actions in the grid's order, each as soon as its inputs exist. Transfers are
assumed to take no time.
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
    """The times of a stage's actions, in any unit: ``forward`` of F, ``input`` of I (the gradients
    of its inputs), ``weight`` of W (the gradients of its weights). B takes as long as I and W.

    A number applies to every stage; a tuple has one number per stage.
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
        """Return the time of one action."""
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
    """Return when each action begins and ends."""
    orders = [grid.order(rank) for rank in range(grid.num_ranks)]
    times = replay(orders, costs.of)
    return dict(zip(itertools.chain(*orders), itertools.chain(*times), strict=True))


def bubble(grid: Grid, costs: Costs = EQUAL) -> float:
    """Return the fraction of the ranks' time in which they wait for other stages, from the first
    action of all ranks to the last."""
    span, waited = waits(grid, costs)
    return sum(waited) / (span * grid.num_ranks) if span else 0.0


def waits(grid: Grid, costs: Costs = EQUAL) -> tuple[float, tuple[float, ...]]:
    """Return the time from the first action of all ranks to the last, and each rank's idle time."""
    times = timeline(grid, costs)
    span = max((end for _, end in times.values()), default=0.0)
    ranks = (grid.order(rank) for rank in range(grid.num_ranks))
    return span, tuple(span - sum(costs.of(action) for action in order) for order in ranks)


def in_flight(grid: Grid) -> tuple[int, ...]:
    """Return, by stage, the most microbatches whose activations it holds at once.

    An activation lives from its forward to the end of its backward: of its B, or of its W.
    """
    held = [0] * grid.num_stages
    most = [0] * grid.num_stages
    for _, _, action in grid.actions():
        held[action.stage] += action.held
        most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)


def held_at_once(grid: Grid, stages: Sequence[int]) -> set[tuple[int, tuple[int, ...]]]:
    """Return what a rank with these stages holds while each of its actions runs: the set of (index
    of the action's stage, number of microbatches held by each stage, without the action's own)."""
    held = dict.fromkeys(stages, 0)
    pairs: set[tuple[int, tuple[int, ...]]] = set()
    for _, _, action in grid.actions():
        if action.stage in held:
            others = held | {action.stage: held[action.stage] - (action.kind != "F")}
            pairs.add((stages.index(action.stage), tuple(others.values())))
            held[action.stage] += action.held
    return pairs
