"""Pipeline schedules as data: which rank runs which stage on which microbatch, and when.

    print(OneFOneB(microbatches=3).grid(num_stages=2, num_ranks=2))

    F0 F1 .  B0 F2 B1 .  B2
    .  F0 B0 F1 B1 F2 B2 .

A schedule is a small frozen value that makes a `Grid` for a number of stages and ranks. Lowering
reads only the grid, and derives the communication from it.
"""

from typing import Protocol, runtime_checkable

from dtensor.runtime.schedule.custom import Custom, Ordered
from dtensor.runtime.schedule.grid import Action, Event, Grid, Kind, place, validate
from dtensor.runtime.schedule.measure import Costs, bubble, held_at_once, in_flight, timeline, waits
from dtensor.runtime.schedule.published import GPipe, Interleaved1F1B, LoopedBFS, OneFOneB
from dtensor.runtime.schedule.search import Searched, SearchedGrid
from dtensor.runtime.schedule.zero_bubble import ZBH1, ZBH2, ZBV, DualPipeV

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Action",
    "Costs",
    "Custom",
    "DualPipeV",
    "Event",
    "GPipe",
    "Grid",
    "Interleaved1F1B",
    "Kind",
    "LoopedBFS",
    "OneFOneB",
    "Ordered",
    "Published",
    "Schedule",
    "Searched",
    "SearchedGrid",
    "bubble",
    "held_at_once",
    "in_flight",
    "place",
    "timeline",
    "validate",
    "waits",
]

Published = GPipe | LoopedBFS | OneFOneB | Interleaved1F1B | ZBH1 | ZBH2 | ZBV | DualPipeV


@runtime_checkable
class Schedule(Protocol):
    """An object that makes a grid: a schedule of this package, or a user's value with an `__eq__`
    that compares by value."""

    @property
    def microbatches(self) -> int: ...

    def grid(self, num_stages: int, num_ranks: int) -> Grid: ...
