"""Tests published schedules: printed grids, closed forms of bubble and memory, PyTorch's own
tables, and refusals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from dtensor.errors import PlanningError
from dtensor.runtime.schedule import (
    ZBH1,
    ZBH2,
    ZBV,
    Costs,
    Custom,
    DualPipeV,
    GPipe,
    Grid,
    Interleaved1F1B,
    LoopedBFS,
    OneFOneB,
    Ordered,
    Schedule,
    bubble,
    in_flight,
    timeline,
    validate,
)

Make = Callable[[int], Schedule]

ALL: list[tuple[Make, int]] = [  # schedule, stages per rank
    (GPipe, 1),
    (GPipe, 2),
    (LoopedBFS, 2),
    (LoopedBFS, 3),
    (OneFOneB, 1),
    (Interleaved1F1B, 1),
    (Interleaved1F1B, 2),
    (Interleaved1F1B, 3),
    (ZBH1, 1),
    (ZBH2, 1),
    (ZBV, 2),
    (DualPipeV, 2),
]


def grid_of(schedule: Make, v: int, p: int, m: int) -> Grid | None:
    """Return the schedule's grid, or None outside its domain."""
    try:
        return schedule(m).grid(v * p, p)
    except PlanningError as error:
        assert schedule in (Interleaved1F1B, DualPipeV), error
        assert "fix: " in str(error)
        return None


@pytest.mark.parametrize(("schedule", "v"), ALL)
def test_schedule_grid_is_valid_and_parses_back(schedule: Make, v: int) -> None:
    found = 0
    for p in range(1, 6):
        for m in range(1, 13):
            grid = grid_of(schedule, v, p, m)
            if grid is None:
                continue
            found += 1
            validate(grid)
            assert Grid.parse(str(grid)) == grid
            assert (grid.num_ranks, grid.num_stages, grid.num_microbatches) == (p, v * p, m)
            for rank in range(p):  # gradients are added in the same order under every schedule
                for stage in grid.stages_of(rank):
                    own = [a for a in grid.order(rank) if a.stage == stage]
                    last = [a.microbatch for a in own if a.kind in ("B", "W")]
                    assert last == list(range(m))
    assert found >= 25


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "rows"),
    [
        (OneFOneB(3).grid(2, 2), ("F0 F1 .  B0 F2 B1 .  B2", ".  F0 B0 F1 B1 F2 B2 .")),
        (GPipe(2).grid(2, 2), ("F0 F1 .  .  B0 B1", ".  F0 F1 B0 B1 .")),
        (
            GPipe(2).grid(4, 2),
            (
                "0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1",
                ".   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .",
            ),
        ),
    ],
)
def test_schedule_grid_prints_as_rows_of_actions(grid: Grid, rows: tuple[str, ...]) -> None:
    assert str(grid) == "\n".join(rows)


def test_grid_parse_fills_short_rows_and_accepts_explicit_stages() -> None:
    assert Grid.parse("F0 F1 . B0 . B1\n. F0 B0 F1 B1\n") == OneFOneB(2).grid(2, 2)
    assert Grid.parse("0F0 0B0") == Grid.parse("F0 B0") == GPipe(1).grid(1, 1)


@pytest.mark.parametrize("entry", ["F", "0", "X0", "F0.2", "-1F0", "f0"])
def test_grid_parse_names_invalid_entry_and_rank(entry: str) -> None:
    with pytest.raises(PlanningError, match=f"'{entry}' on rank 1"):
        Grid.parse(f"F0\n{entry}")
    with pytest.raises(PlanningError, match="at least one rank"):
        Grid.parse("\n \n")


def test_grid_svg_has_one_rectangle_per_action() -> None:
    drawn = ZBV(2).grid(4, 2)._repr_svg_()
    assert drawn.count("<rect") == 2 * 4 * 3
    assert ">3W1</text>" in drawn and ">rank 1</text>" in drawn
    assert ">F0</text>" in OneFOneB(2).grid(2, 2)._repr_svg_()  # the stage equals the rank


# -- closed forms ----------------------------------------------------------------------------------


def span_bubble(grid: Grid) -> float:
    """Return the idle fraction of the rank that idles most between its own first and last
    action. This is the bubble if a rank starts its next step without waiting for the others, as
    the zero-bubble schedules assume (Qi et al. 2023, section 4)."""
    times = timeline(grid)
    worst = 0.0
    for rank in range(grid.num_ranks):
        mine = [times[action] for action in grid.order(rank)]
        span = max(end for _, end in mine) - min(begin for begin, _ in mine)
        worst = max(worst, 1.0 - sum(end - begin for begin, end in mine) / span)
    return worst


def total(grid: Grid, costs: Costs) -> float:
    return max(end for _, end in timeline(grid, costs).values())


def held(grid: Grid) -> int:
    """Return the maximum number of (stage, microbatch) in flight at once on a rank."""
    most = 0
    for rank in range(grid.num_ranks):
        now = 0
        for action in grid.order(rank):
            now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            most = max(most, now)
    return most


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_schedule_time_and_memory_match_closed_forms(p: int) -> None:
    for f, i, w in ((1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0)):
        costs = Costs(forward=f, input=i, weight=w)
        for m in range(1, 9):
            for schedule in (GPipe, OneFOneB):
                grid = schedule(m).grid(p, p)
                assert bubble(grid, costs) == pytest.approx((p - 1) / (m + p - 1))
                few = tuple(min(p - s, m) for s in range(p))
                assert in_flight(grid) == ((m,) * p if schedule is GPipe else few)
        for m in (p, 2 * p, 3 * p):
            for v in (1, 2, 3):
                for schedule in (GPipe, LoopedBFS, Interleaved1F1B):
                    idle = total(schedule(m).grid(v * p, p), costs) - v * m * (f + i + w)
                    assert idle == pytest.approx((p - 1) * (f + i + w))
            h1 = ZBH1(m).grid(p, p)
            assert total(h1, costs) - m * (f + i + w) == pytest.approx((p - 1) * (f + i - w))
            assert max(in_flight(h1)) == min(p, m)
    for m in (2 * p - 1, 2 * p, 3 * p):
        h2 = ZBH2(m).grid(p, p)
        assert span_bubble(h2) == pytest.approx(0)
        assert total(h2, Costs()) == pytest.approx(3 * m + p - 1)
        assert max(in_flight(h2)) == 2 * p - 1
        zbv = ZBV(m).grid(2 * p, p)
        assert span_bubble(zbv) == pytest.approx(0)
        assert held(zbv) <= 2 * p
    for m in (2 * p, 3 * p):
        both = DualPipeV(m).grid(2 * p, p)
        assert total(both, Costs()) == pytest.approx(6 * m + p - 1)
        assert held(both) <= 2 * p + 1


def test_schedule_time_with_one_slow_stage_matches_closed_form() -> None:
    """The other stages wait for the slow one."""
    grid = OneFOneB(4).grid(2, 2)
    slow = Costs(forward=(1.0, 2.0), input=(1.0, 2.0), weight=(1.0, 2.0))
    assert total(grid, slow) == 1 + 4 * 6 + 2  # its forward, four slow microbatches, its backward
    assert bubble(grid, slow) == pytest.approx(1 - (4 * 3 + 4 * 6) / (2 * 27))
    with pytest.raises(PlanningError, match="0 or more"):
        Costs(forward=-1.0)


# -- PyTorch's tables ------------------------------------------------------------------------------


def torchs(name: str, p: int, m: int, v: int) -> list[list[str]] | None:
    """Return PyTorch's table by rank, without idle steps; pairs that PyTorch overlaps follow one
    another."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = get_schedule_ops(name, p, m, v if v > 1 else None)
    except ValueError:
        return None
    return [
        [
            f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}"
            for slot in row
            if slot is not None
            for a in (slot.sub_actions or (slot,))
            if a.computation_type.value in "FBIW"
        ]
        for row in rows
    ]


def breadth_first(action: str) -> tuple[bool, int, int]:
    stage, kind, microbatch = int(action[0]), action[1], int(action[2:])
    return kind == "B", -stage if kind == "B" else stage, microbatch


@pytest.mark.default("GPipe-GPipe-1")
@pytest.mark.parametrize(
    ("schedule", "name", "v"),
    [
        (GPipe, "GPipe", 1),
        (LoopedBFS, "LoopedBFS", 2),
        (OneFOneB, "1F1B", 1),
        (Interleaved1F1B, "Interleaved1F1B", 2),
        (Interleaved1F1B, "Interleaved1F1B", 3),
        (ZBV, "ZBVZeroBubble", 2),
        (DualPipeV, "DualPipeV", 2),
    ],
)
def test_schedule_tables_match_pytorch(schedule: Make, name: str, v: int) -> None:
    """Two differences are ignored: PyTorch runs the backwards of breadth-first from the last
    microbatch, and its 1F1B table numbers microbatches from p - 1 on the last ranks."""
    compared = 0
    for p in (2, 3, 4):
        for m in range(p if schedule is OneFOneB else 1, 13):
            theirs, grid = torchs(name, p, m, v), grid_of(schedule, v, p, m)
            assert (theirs is None) == (grid is None)
            if theirs is None or grid is None:
                continue
            ours = [[str(a) for a in grid.order(rank)] for rank in range(p)]
            if schedule is LoopedBFS:
                ours, theirs = ([sorted(r, key=breadth_first) for r in g] for g in (ours, theirs))
            if schedule is OneFOneB:
                ours, theirs = ([[a[:2] for a in row] for row in g] for g in (ours, theirs))
            assert ours == theirs
            compared += 1
    assert compared >= 18


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("F0 B0 .\n.  F0 B0", "0B0 is not after 1B0, whose result it needs: 1B0 at step 2 on"),
        ("F0 .  B0\nF0 B0 .", "1F0 is not after 0F0, whose result it needs: 0F0 at step 0 on"),
        ("B0 F0", "0B0 is not after 0F0"),
        ("F0 F0 B0", "0F0 occurs twice: 0F0 at step 0 on rank 0, 0F0 at step 1 on rank 0"),
        ("F0 F1 B0", "0B1 is missing"),
        ("1F0 1B0", "0F0 is missing"),
        ("0F0 .\n. 0B0", r"Stage 0 runs on rank 0 and on rank 1 \(0B0 at step 1\)"),
        ("F0 I0", "0W0 is missing"),
        ("F0 W0", "0I0 is missing"),
        ("F0 W0 I0", "0W0 is not after 0I0"),
        ("F0 B0 W0", "0W0 repeats a half of 0B0"),
        ("F0 .  I0 W0 \n.  F0 W0 I0", "is not after"),
    ],
)
def test_validate_refuses_invalid_grid_and_names_error(grid: str, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        validate(Grid.parse(grid))
    with pytest.raises(PlanningError, match=message):
        Custom(grid)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "message"),
    [
        (OneFOneB(8), 4, 2, "4 stages for 2 ranks.*Interleaved1F1B"),
        (GPipe(8), 3, 2, "3 stages do not divide over 2 ranks"),
        (ZBH1(4), 4, 2, "ZB-H1 holds one stage per rank"),
        (ZBH2(4), 4, 2, "ZB-H2 holds one stage per rank"),
        (ZBV(4), 2, 2, "ZBV holds two stages per rank, and there are 2 stages for 2 ranks"),
        (DualPipeV(4), 6, 2, r"DualPipeV holds two stages per rank.*\nfix: .*num_stages=4\)}$"),
        (
            ZBV(4),
            1,
            1,
            r"the mesh has no axis of stages.\nfix: .*num_stages=4\)} with dt.Mesh\(pp=2",
        ),
        (DualPipeV(3), 4, 2, "at least two microbatches for each rank.*\nfix: microbatches=4"),
        (Interleaved1F1B(5), 4, 2, "2 rounds, which do not divide.*\nfix: microbatches=4"),
        (LoopedBFS(5), 3, 2, "3 stages do not divide over 2 ranks"),
        (Custom("F0 B0"), 3, 3, "for 1 stages? on 1 ranks?, and the model has 3 stages"),
    ],
)
def test_schedule_refuses_unsupported_stages_or_ranks(
    schedule: Schedule, stages: int, ranks: int, message: str
) -> None:
    with pytest.raises(PlanningError, match=message):
        schedule.grid(stages, ranks)


def test_custom_and_ordered_schedules_accept_user_tables() -> None:
    grid = OneFOneB(3).grid(2, 2)
    custom = Custom(str(grid))
    assert (custom.grid(2, 2), custom.microbatches) == (grid, 3)
    with pytest.raises(PlanningError, match="this one has 0"):
        OneFOneB(0)

    def one_by_one(rank: int, stages: int, ranks: int, microbatches: int) -> list[str]:
        return [f"{kind}{m}" for m in range(microbatches) for kind in "FIW"]

    assert str(Ordered(one_by_one, 2).grid(2, 2)) == (
        "F0 .  .  I0 W0 F1 .  .  I1 W1\n.  F0 I0 W0 .  .  F1 I1 W1 ."
    )
    with pytest.raises(PlanningError, match="2 stages and 2 microbatches, and 4 and 2 were asked"):
        Ordered(one_by_one, 2).grid(4, 2)
    with pytest.raises(PlanningError, match="wait for each other: 0B0"):
        Ordered(lambda *_: ["0B0", "0F0"], 1).grid(1, 1)
    with pytest.raises(PlanningError, match="'Q0' on rank 0"):
        Ordered(lambda *_: ["Q0"], 1).grid(1, 1)
