"""Search for a schedule, given the costs of the stages and the memory of the ranks.

    schedule = Searched(microbatches=6, costs=Costs(forward=(1, 3, 1, 1)), most_held=4)
    print(schedule.search(4, 2))    # the grid, and: 62 of time, 4.2% above the lower bound 59.5

The search is list scheduling (Graham 1966): a rank that is free starts the ready action with the
longest chain of later actions. It runs many times with randomly perturbed priorities, then swaps
neighbours in a rank's order where that takes no longer. The published schedules of the same shape
are candidates too, so the result is never worse than these.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from dtensor.errors import PlanningError, check_kind, check_number
from dtensor.runtime.schedule.grid import Action, Event, Grid, Kind, place, replay
from dtensor.runtime.schedule.measure import EQUAL, Costs, timeline
from dtensor.runtime.schedule.published import (
    Interleaved1F1B,
    LoopedBFS,
    OneFOneB,
    check_equal_stages,
    check_microbatches,
)
from dtensor.runtime.schedule.zero_bubble import ZBH1, ZBH2

Orders = tuple[tuple[Action, ...], ...]

_NUM_RUNS, _NUM_SWAPS = 48, 400


@dataclass(frozen=True, slots=True)
class SearchedGrid:
    """A grid, the time it takes, and a lower bound for the time of any grid."""

    grid: Grid
    time: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the time is above the lower bound: 0.1 is 10%."""
        return self.time / self.bound - 1.0 if self.bound else 0.0

    def __str__(self) -> str:
        return (
            f"{self.grid}\n"
            f"{self.time:.6g} of time, {100 * self.gap:.1f}% above the lower bound {self.bound:.6g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A schedule found by search, for any number of stages per rank, unequal costs and limited
    memory. Stage s is on rank s mod the number of ranks.

    Args:
        microbatches: the number of microbatches.
        costs: the costs of the stages; ``step.stage_costs(*batch)`` predicts them.
        most_held: the most activations, counted as (stage, microbatch), that a rank may hold at
            once; None: no limit.
        halves: whether backwards are split into I and W.
        seed: the seed of the search; the same seed gives the same schedule.

    Raises PlanningError for numbers out of range.
    """

    microbatches: int
    costs: Costs = EQUAL
    most_held: int | None = None
    halves: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_microbatches(self.microbatches)
        fix = "step.stage_costs(*batch), or dt.Costs(forward=1.0)"
        check_kind("Searched's costs", self.costs, Costs, "a Costs", fix)
        if self.most_held is not None:
            check_number("most_held", self.most_held, least=1, whole=True, fix="most_held=8")

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        return self.search(num_stages, num_ranks).grid

    def search(self, num_stages: int, num_ranks: int) -> SearchedGrid:
        """Return the fastest grid found for ``num_stages`` on ``num_ranks``, with its time and the
        lower bound. Raises PlanningError if no grid fits ``most_held``."""
        return _search(self, num_stages, num_ranks)


@lru_cache(maxsize=32)
def _search(schedule: Searched, num_stages: int, num_ranks: int) -> SearchedGrid:
    most_held, costs, halves = schedule.most_held, schedule.costs, schedule.halves
    check_equal_stages("Searched", num_stages, num_ranks)
    stages_per_rank = num_stages // num_ranks
    if most_held is not None and most_held < stages_per_rank:
        raise PlanningError(
            f"a rank may hold {most_held} activations and has {stages_per_rank} stages that each "
            "hold one while a microbatch is in flight.\n"
            f"fix: most_held={stages_per_rank}, or more"
        )
    problem = _Problem(num_stages, num_ranks, schedule.microbatches, costs, most_held, halves)
    draw = random.Random(schedule.seed)
    best: tuple[float, Orders] | None = None
    for orders in (*_published(problem), *(problem.list_orders(draw, n) for n in range(_NUM_RUNS))):
        if orders is not None and problem.fits(orders):
            time = problem.time(orders)
            if time is not None and (best is None or time < best[0]):
                best = time, orders
    assert best is not None  # one microbatch after the other fits; see `list_orders`
    best = _swap_neighbours(problem, best, draw)
    grid = place(best[1])
    return SearchedGrid(
        grid, max(end for _, end in timeline(grid, costs).values()), problem.bound()
    )


def _published(problem: _Problem) -> Iterator[Orders]:
    """Yield the orders of the published schedules that are defined for this shape."""
    m = problem.microbatches
    schedules = [LoopedBFS(m), OneFOneB(m), Interleaved1F1B(m)]
    for schedule in (*schedules, *((ZBH1(m), ZBH2(m)) if problem.halves else ())):
        with suppress(PlanningError):
            grid = schedule.grid(problem.num_stages, problem.num_ranks)
            yield tuple(grid.order(rank) for rank in range(problem.num_ranks))


@dataclass(frozen=True, slots=True)
class _Problem:
    """The schedule that is searched for. Orders of actions are its candidate solutions."""

    num_stages: int
    num_ranks: int
    microbatches: int
    costs: Costs
    most_held: int | None
    halves: bool

    def home(self, stage: int) -> int:
        return stage % self.num_ranks

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("F", "I", "W") if self.halves else ("F", "B")

    def actions(self) -> list[Action]:
        return [
            Action(kind, m, s)
            for m in range(self.microbatches)
            for s in range(self.num_stages)
            for kind in self.kinds
        ]

    def bound(self) -> float:
        """Return a lower bound for the time of any grid: the larger of the time of one microbatch
        through all stages, and of each rank's work with the least time before and after it."""
        of = self.costs.of
        back: Kind = "I" if self.halves else "B"
        down = [of(Action("F", 0, s)) for s in range(self.num_stages)]
        up = [of(Action(back, 0, s)) for s in range(self.num_stages)]
        work = [0.0] * self.num_ranks
        for action in self.actions():
            work[self.home(action.stage)] += of(action)
        ranks = [
            # the rank's first stage is the first to start and the last to end
            sum(down[:rank]) + work[rank] + (0.0 if self.halves else sum(up[:rank]))
            for rank in range(self.num_ranks)
        ]
        last = of(Action("W", 0, 0)) if self.halves else 0.0
        return max(sum(down) + sum(up) + last, *ranks)

    def fits(self, orders: Orders) -> bool:
        """Whether no rank holds more than ``most_held`` activations at once."""
        for order in orders:
            held = 0
            for action in order:
                held += action.held
                if self.most_held is not None and held > self.most_held:
                    return False
        return True

    def time(self, orders: Orders) -> float | None:
        """Return when the last action ends, or None if the orders wait for each other."""
        try:
            times = replay(orders, self.costs.of)
        except PlanningError:
            return None
        return max(end for row in times for _, end in row)

    def list_orders(self, draw: random.Random, run: int) -> Orders | None:
        """Return the orders of one run of list scheduling, or None if it found no action that fits
        the memory. Run 0 runs one microbatch after the other, which always fits."""
        if run == 0:
            return tuple(self._by_microbatch(rank) for rank in range(self.num_ranks))
        noise = 0.0 if run == 1 else draw.choice([0.02, 0.1, 0.3])
        lateness_weight = draw.random() * 2 if run > 1 else 1.0  # weight of a microbatch's number
        exact = self._priorities(lateness_weight)
        priorities = {a: p * (1 + noise * draw.uniform(-1, 1)) for a, p in exact.items()}
        waiting = {a: len(a.takes(self.num_stages)) for a in priorities}
        ready: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        readers: dict[Event, list[Action]] = {}
        for action in priorities:
            for event in action.takes(self.num_stages):
                readers.setdefault(event, []).append(action)
            if not waiting[action]:
                ready[self.home(action.stage)].append(action)
        orders: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        held, free = [0] * self.num_ranks, [0.0] * self.num_ranks
        ends: list[tuple[float, int, Action]] = []
        now, count = 0.0, 0
        while True:
            for rank in range(self.num_ranks):
                if free[rank] > now:
                    continue
                allowed = [a for a in ready[rank] if self._may_start(a, held[rank], orders[rank])]
                if not allowed:
                    continue
                action = max(allowed, key=lambda a: (priorities[a], -a.microbatch, a.kind))
                ready[rank].remove(action)
                orders[rank].append(action)
                held[rank] += action.held
                free[rank] = now + self.costs.of(action)
                count += 1
                heapq.heappush(ends, (free[rank], count, action))
            if not ends:
                break
            now, _, action = heapq.heappop(ends)
            for event in action.gives():
                for reader in readers.get(event, ()):
                    waiting[reader] -= 1
                    if not waiting[reader]:
                        ready[self.home(reader.stage)].append(reader)
        if sum(map(len, orders)) < len(priorities):
            return None
        return tuple(map(tuple, orders))

    def _by_microbatch(self, rank: int) -> tuple[Action, ...]:
        down = range(rank, self.num_stages, self.num_ranks)
        return tuple(
            Action(kind, m, s)
            for m in range(self.microbatches)
            for kind in self.kinds
            for s in (down if kind == "F" else reversed(down))
        )

    def _may_start(self, action: Action, held: int, order: Sequence[Action]) -> bool:
        """Whether a rank may start an action: the microbatches of a stage run in order, and a
        forward leaves memory for the rank's later stages on microbatches that have started."""
        last = -1
        for done in reversed(order):
            if done.stage == action.stage and done.kind == action.kind:
                last = done.microbatch
                break
        if action.microbatch != last + 1:
            return False
        if action.kind != "F" or self.most_held is None:
            return True
        stages = range(self.home(action.stage), self.num_stages, self.num_ranks)
        later = sum(1 for s in stages if s > action.stage)
        return held + 1 + later <= self.most_held or (later == 0 and held < self.most_held)

    def _priorities(self, lateness_weight: float) -> dict[Action, float]:
        """Return the time of the longest chain of actions that starts with each action. Later
        microbatches get less."""
        of = self.costs.of
        back: Kind = "I" if self.halves else "B"
        chain: dict[Action, float] = {}
        step = sum(of(Action(k, 0, s)) for s in range(self.num_stages) for k in self.kinds)
        step /= self.num_ranks
        for m in range(self.microbatches):
            after = 0.0
            for s in range(self.num_stages):
                if self.halves:
                    chain[Action("W", m, s)] = of(Action("W", m, s))
                after += of(Action(back, m, s))
                chain[Action(back, m, s)] = after
            for s in reversed(range(self.num_stages)):
                after += of(Action("F", m, s))
                chain[Action("F", m, s)] = after
        lowest = 1e-3
        return {
            a: value
            if a.kind == "W"
            else value + max(self.microbatches - a.microbatch, lowest) * (lateness_weight * step)
            for a, value in chain.items()
        }


def _swap_neighbours(
    problem: _Problem, best: tuple[float, Orders], draw: random.Random
) -> tuple[float, Orders]:
    """Return the best orders found by swapping neighbours in the order of a random rank, as long as
    the time does not grow."""
    time, orders = best
    bound = problem.bound()
    for _ in range(_NUM_SWAPS):
        if time <= bound * (1 + 1e-12):
            break
        rank = draw.randrange(problem.num_ranks)
        if len(orders[rank]) < 2:
            continue
        at = draw.randrange(len(orders[rank]) - 1)
        first, second = orders[rank][at : at + 2]
        if first.stage == second.stage and (
            first.kind == second.kind or first.microbatch == second.microbatch
        ):
            continue
        row = (*orders[rank][:at], second, first, *orders[rank][at + 2 :])
        trial = (*orders[:rank], row, *orders[rank + 1 :])
        if not problem.fits((row,)):
            continue
        trial_time = problem.time(trial)
        if trial_time is not None and trial_time <= time:
            time, orders = trial_time, trial
    return time, orders
