"""Schedules: printed grids, closed forms of bubble and memory, and what `validate` refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.errors import PlanningError
from dtensor.runtime.schedule import (
    Action,
    Costs,
    Custom,
    GPipe,
    Grid,
    OneFOneB,
    bubble,
    in_flight,
    validate,
)
from dtensor.runtime.schedule.grid import KINDS

SIZES = [(p, m) for p in range(1, 5) for m in range(1, 9)]


def text(*rows: str) -> str:
    return "\n".join(rows)


def test_one_f_one_b_prints():
    assert str(OneFOneB(3).grid(2, 2)) == text(
        "F0 F1 .  B0 F2 B1 .  B2",
        ".  F0 B0 F1 B1 F2 B2 .",
    )


def test_gpipe_prints():
    assert str(GPipe(2).grid(2, 2)) == text(
        "F0 F1 .  .  B0 B1",
        ".  F0 F1 B0 B1 .",
    )


def test_several_stages_per_rank_print_with_their_stage():
    grid = GPipe(2).grid(4, 2)
    assert str(grid) == text(
        "0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1",
        ".   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .",
    )
    assert [grid.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", [GPipe, OneFOneB])
def test_closed_forms(schedule: type[GPipe] | type[OneFOneB], p: int, m: int):
    grid = schedule(m).grid(p, p)
    validate(grid)
    assert Grid.parse(str(grid)) == grid
    assert (grid.num_stages, grid.num_microbatches) == (p, m)
    # The closed form holds whatever a forward and a backward cost, as long as stages are equal.
    for backward in (2.0, 1.0, 3.0):
        costs = Costs(forward=1.0, input=backward / 2, weight=backward / 2)
        assert bubble(grid, costs) == pytest.approx((p - 1) / (m + p - 1))
    held = (m,) * p if schedule is GPipe else tuple(min(p - s, m) for s in range(p))
    assert in_flight(grid) == held


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 4, 3), (3, 5, 2), (4, 8, 2)])
def test_breadth_first_bubble(p: int, m: int, v: int):
    grid = GPipe(m).grid(v * p, p)
    validate(grid)
    assert bubble(grid) == pytest.approx((p - 1) / (v * m + p - 1))
    assert in_flight(grid) == (m,) * (v * p)


def test_bubble_of_a_sequential_schedule():
    # One microbatch at a time on two ranks: each idles half of the time.
    grid = Grid.parse("F0 .  .  B0 F1 .  .  B1\n.  F0 B0 .  .  F1 B1 .")
    validate(grid)
    assert bubble(grid) == pytest.approx(0.5)
    assert in_flight(grid) == (1, 1)


def test_schedules_agree_on_the_order_of_gradients():
    for schedule, p in itertools.product((GPipe(4), OneFOneB(4)), (1, 2, 4)):
        grid = schedule.grid(p, p)
        for rank in range(p):
            backwards = [a.microbatch for a in grid.order(rank) if a.kind == "B"]
            assert backwards == [0, 1, 2, 3]


numbers = st.integers(0, 12)
entries = st.one_of(st.none(), st.builds(Action, st.sampled_from(KINDS), numbers, numbers))


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[entries] * n), min_size=1)))
def test_any_grid_parses_back(rows: list[tuple[Action | None, ...]]):
    grid = Grid(tuple(rows))
    assert Grid.parse(str(grid)) == grid


def test_parse_fills_short_rows_and_takes_explicit_stages():
    assert Grid.parse("F0 F1 . B0 . B1\n. F0 B0 F1 B1\n") == OneFOneB(2).grid(2, 2)
    assert Grid.parse("0F0 0B0") == Grid.parse("F0 B0") == GPipe(1).grid(1, 1)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("F0 B0 .\n.  F0 B0", "0B0 is not after 1B0, whose result it needs: 1B0 at step 2 on"),
        ("F0 .  B0\nF0 B0 .", "1F0 is not after 0F0, whose result it needs: 0F0 at step 0 on"),
        ("B0 F0", "0B0 is not after 0F0"),
        ("F0 F0 B0", "0F0 stands twice: 0F0 at step 0 on rank 0, 0F0 at step 1 on rank 0"),
        ("F0 F1 B0", "0B1 is missing"),
        ("1F0 1B0", "0F0 is missing"),
        ("0F0 .\n. 0B0", r"Stage 0 runs on rank 0 and on rank 1 \(0B0 at step 1\)"),
    ],
)
def test_validate_names_what_is_wrong(grid: str, message: str):
    with pytest.raises(PlanningError, match=message):
        validate(Grid.parse(grid))
    with pytest.raises(PlanningError, match=message):
        Custom(grid)


@pytest.mark.parametrize("entry", ["F", "0", "X0", "F0.2", "-1F0", "f0"])
def test_parse_names_what_it_cannot_read(entry: str):
    with pytest.raises(PlanningError, match=f"'{entry}' on rank 1"):
        Grid.parse(f"F0\n{entry}")


@pytest.mark.parametrize("empty", ["", "\n \n"])
def test_an_empty_grid_is_refused(empty: str):
    with pytest.raises(PlanningError, match="at least one rank"):
        Grid.parse(empty)


def test_schedules_say_which_stages_they_take():
    with pytest.raises(PlanningError, match="4 stages for 2 ranks.*Interleaved1F1B"):
        OneFOneB(8).grid(4, 2)
    with pytest.raises(PlanningError, match="3 stages do not divide over 2 ranks"):
        GPipe(8).grid(3, 2)
    with pytest.raises(PlanningError, match="this one has 0"):
        OneFOneB(0)


def test_custom():
    grid = OneFOneB(3).grid(2, 2)
    custom = Custom(str(grid))
    assert custom.grid(2, 2) == grid
    assert custom.microbatches == 3
    with pytest.raises(PlanningError, match="for 2 stages on 2 ranks, and the model has 3 stages"):
        custom.grid(3, 3)
