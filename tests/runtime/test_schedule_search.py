"""Tests schedule search: never worse than the published schedules, and the best where all orders
were tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.errors import PlanningError
from dtensor.runtime.schedule import (
    ZBH1,
    Action,
    Costs,
    Grid,
    Interleaved1F1B,
    OneFOneB,
    Searched,
    SearchedGrid,
    place,
    timeline,
    validate,
)
from dtensor.runtime.schedule.grid import Kind
from dtensor.runtime.schedule.measure import EQUAL


def search(
    num_stages: int,
    num_ranks: int,
    microbatches: int,
    costs: Costs = EQUAL,
    most_held: int | None = None,
    halves: bool = True,
) -> SearchedGrid:
    schedule = Searched(microbatches=microbatches, costs=costs, most_held=most_held, halves=halves)
    return schedule.search(num_stages, num_ranks)


def time_of(grid: Grid, costs: Costs) -> float:
    return max(end for _, end in timeline(grid, costs).values())


def orders(stage: int, microbatches: int, most_held: int | None) -> Iterator[tuple[Action, ...]]:
    """Yield every order of one stage's actions that keeps microbatches in order."""
    each: tuple[Kind, ...] = ("F", "I", "W")
    for kinds in sorted(set(itertools.permutations(each * microbatches))):
        counts = {"F": 0, "I": 0, "W": 0}
        row: list[Action] = []
        for kind in kinds:
            row.append(Action(kind, counts[kind], stage))
            counts[kind] += 1
            if not counts["W"] <= counts["I"] <= counts["F"]:
                break
            if most_held is not None and counts["F"] - counts["W"] > most_held:
                break
        else:
            yield tuple(row)


@pytest.mark.parametrize("most_held", [1, 2, None])
@pytest.mark.parametrize(
    "costs", [Costs(), Costs(forward=(1.0, 2.0), input=(2.0, 1.0), weight=(0.5, 3.0))]
)
def test_schedule_search_is_optimal_for_small_problems(costs: Costs, most_held: int | None) -> None:
    times: list[float] = []
    for rows in itertools.product(*(orders(stage, 2, most_held) for stage in range(2))):
        try:
            times.append(time_of(place(rows), costs))
        except PlanningError:
            continue  # the ranks wait for each other
    found = search(2, 2, 2, costs=costs, most_held=most_held)
    assert found.bound <= min(times) == pytest.approx(found.time)
    assert found.time == time_of(found.grid, costs)


numbers = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 6), st.booleans())
def test_schedule_search_is_valid_and_never_worse_than_published(
    data: st.DataObject, p: int, v: int, m: int, halves: bool
) -> None:
    """Also covers numbers of microbatches, costs and memory for which no schedule is published."""
    stages = st.tuples(*[numbers] * (v * p))
    costs = Costs(forward=data.draw(stages), input=data.draw(stages), weight=data.draw(stages))
    most = data.draw(st.none() | st.integers(v, v * m + 1))
    found = search(v * p, p, m, costs=costs, most_held=most, halves=halves)
    validate(found.grid)
    assert found.grid.home() == tuple(s % p for s in range(v * p))
    assert found.time >= found.bound - 1e-9
    for rank in range(p):
        held = 0
        for action in found.grid.order(rank):
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            assert most is None or held <= most
    for schedule, stages_each in ((OneFOneB, 1), (Interleaved1F1B, v), (ZBH1, 1)):
        if most is not None or stages_each != v or (schedule is ZBH1 and not halves):
            continue
        try:
            known = schedule(m).grid(v * p, p)
        except PlanningError:
            continue
        assert found.time <= time_of(known, costs) + 1e-9


def test_searched_schedule_reports_gap_to_lower_bound() -> None:
    schedule = Searched(microbatches=5, most_held=4)
    found = schedule.search(4, 2)
    assert schedule.grid(4, 2) == found.grid
    assert str(found).endswith("above the lower bound 31")
    assert 0 <= found.gap < 0.1
    assert search(4, 4, 8, most_held=4).gap == 0  # ZB-H1 reaches the bound


def test_schedule_search_refuses_memory_too_small_for_one_microbatch() -> None:
    with pytest.raises(PlanningError, match="has 2 stages.*\nfix: most_held=2"):
        search(4, 2, 3, most_held=1)
