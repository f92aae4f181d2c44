"""Schedules that a user writes, as a text or as a function of the rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtensor.errors import PlanningError, check_callable, check_kind
from dtensor.runtime.schedule.grid import Action, Grid, parse_action, place, validate
from dtensor.runtime.schedule.published import check_microbatches

Orders = Callable[[int, int, int, int], Sequence[str | Action]]
"""(rank, stages, ranks, microbatches) -> the rank's actions in order, as `2F0` or `Action`."""


@dataclass(frozen=True, slots=True)
class Custom:
    """A schedule written by hand. ``text`` has a line for each rank with its actions in order: F,
    B, or the halves I and W of a backward, followed by the microbatch. If a rank has several
    stages, the stage comes first, ``2F3``. A dot is an idle step.

        >>> by_hand = dt.Custom("F0 F1 .  B0 .  B1\\n.  F0 B0 F1 B1 .")
        >>> by_hand.microbatches
        2

    Raises PlanningError if an action is missing or comes before an action that it needs.
    """

    text: str

    def __post_init__(self) -> None:
        check_kind("Custom's schedule", self.text, str, "a text", 'dt.Custom("F0 B0")')
        validate(Grid.parse(self.text))

    @property
    def microbatches(self) -> int:
        """The number of microbatches in the grid."""
        return Grid.parse(self.text).num_microbatches

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        grid = Grid.parse(self.text)
        if (grid.num_stages, grid.num_ranks) != (num_stages, num_ranks):
            raise PlanningError(
                f"This schedule is for {grid.num_stages} stages on {grid.num_ranks} ranks, and the "
                f"model has {num_stages} stages on {num_ranks} ranks:\n{grid}"
            )
        return grid


@dataclass(frozen=True, slots=True)
class Ordered:
    """A schedule given by the order of each rank's actions. Each action runs as early as possible.

        >>> def one_by_one(rank, num_stages, num_ranks, microbatches):
        ...     return [f"{kind}{m}" for m in range(microbatches) for kind in "FB"]
        >>> print(dt.Ordered(one_by_one, microbatches=2).grid(num_stages=2, num_ranks=2))
        F0 .  .  B0 F1 .  .  B1
        .  F0 B0 .  .  F1 B1 .

    Args:
        orders: a function of (rank, num_stages, num_ranks, microbatches) that returns the rank's
            actions in order.
        microbatches: the number of microbatches.

    Raises PlanningError if the orders wait for each other or lack an action.
    """

    orders: Orders
    microbatches: int

    def __post_init__(self) -> None:
        check_microbatches(self.microbatches)
        fix = "dt.Ordered(lambda rank, stages, ranks, microbatches: [...], microbatches=4)"
        check_callable("Ordered's schedule", self.orders, fix)

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        rows = [
            [
                a if isinstance(a, Action) else parse_action(a, rank)
                for a in self.orders(rank, num_stages, num_ranks, self.microbatches)
            ]
            for rank in range(num_ranks)
        ]
        grid = place(rows)
        validate(grid)
        if (grid.num_stages, grid.num_microbatches) != (num_stages, self.microbatches):
            raise PlanningError(
                f"{self.orders.__name__} gives {grid.num_stages} stages and "
                f"{grid.num_microbatches} microbatches, and {num_stages} and {self.microbatches} "
                f"were asked for:\n{grid}"
            )
        return grid
