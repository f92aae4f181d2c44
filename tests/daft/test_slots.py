"""Tests where payloads lie in shared memory, and that no start overwrites a slot that is still
read.
"""

from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest
import torch

from dtensor.daft import Buffer, Collective, Instruction, Recv, Send, Wait
from dtensor.daft.ray.transports.slots import (
    LINE,
    MAX_PIECES,
    MAX_SLOT_BYTES,
    PIECE_BYTES,
    TOGETHER_BYTES,
    pieces_of,
)
from tests.daft.explore import B, exhaustive
from tests.daft.programs import Collectives, program
from tests.daft.slots import LENT, REAL, Rules, accepted, drawn_programs, laid_out, wrong


def reduce(
    *buffers: Buffer, size: int = 4, op: str = "sum", made: torch.dtype | None = None
) -> Collective:
    ins = tuple(f"x{i}" for i in range(len(buffers)))
    outs = tuple(f"y{i}" for i in range(len(buffers)))
    results = tuple(Buffer(b.shape, made or b.dtype) for b in buffers)
    group = tuple(range(size))
    return Collective("all_reduce", group, ins, outs, buffers, results, op, "c")  # type: ignore[arg-type]


def test_slot_count_is_number_of_concurrent_starts_plus_one() -> None:
    """Rank 0 has two starts under way at once, and rank 1 waits for each: 2 + 1."""
    first: list[Instruction] = [Send(f"x{n}", 1, "c", B) for n in range(4)]
    first[2:2] = [Wait(("x0",))]
    first[4:4] = [Wait(("x1",))]
    first += [Wait(("x2",)), Wait(("x3",))]
    other: list[Instruction] = []
    for n in range(4):
        other += [Recv(f"x{n}", 0, "c", B), Wait((f"x{n}",))]
    arena = laid_out(program(first, other))
    (lane,) = arena.lanes.values()
    assert (lane.slots, lane.slot_bytes, lane.begins) == (3, (LINE, 0), (LINE, LINE))
    assert arena.window_bytes == (4 * LINE, LINE)
    late = [*first[:2], Wait(("x1",)), *first[3:4], Wait(("x2",)), *first[5:6], Wait(("x3", "x0"))]
    (lane,) = laid_out(program(late, other)).lanes.values()
    assert lane.slots == 5  # x0 is under way from first to last


def test_unshared_too_large_and_variable_length_keys_get_no_slots() -> None:
    large = Buffer((MAX_SLOT_BYTES + 1,), torch.uint8)
    message = Buffer((), torch.uint8, variable=True)
    first: list[Instruction] = []
    other: list[Instruction] = []
    for name, buffer in (("a", B), ("b", large), ("c", message), ("d", B)):
        first += [Send(name, 1, name, buffer), Wait((name,))]
        other += [Recv(name, 0, name, buffer), Wait((name,))]
    made = program(first, other)
    arena = laid_out(made, lambda key: key[1] != "d")
    assert [key[1] for key in arena.lanes] == ["a"]
    assert sorted(arena.brings) == sorted(arena.ahead) == [(0, 0), (1, 0)]
    assert arena.window_bytes == (3 * LINE, LINE)
    assert laid_out(made, lambda key: key[1] in ("b", "c")).window_bytes == (0, 0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_memory_window_covers_all_lanes_without_overlap(size: int) -> None:
    arena = laid_out(Collectives(size, large=300_000).program())
    used: list[list[tuple[int, int]]] = [[(0, LINE)] for _ in range(size)]
    for lane in arena.lanes.values():
        for member, rank in enumerate(lane.key[0]):
            begin, nbytes = lane.begins[member], lane.slots * lane.slot_bytes[member]
            used[rank].append((begin, begin + nbytes))
            assert lane.slot_bytes[member] % LINE == 0
            if lane.pieces:
                used[rank].append((lane.done[member], lane.done[member] + lane.slots * LINE))
        first = used[lane.key[0][0]]
        first.append((lane.claims, lane.claims + lane.slots * lane.pieces * LINE))
        first.append((lane.results, lane.results + lane.slots * lane.result_bytes))
    assert any(lane.pieces for lane in arena.lanes.values()) == (size > 2)
    for own, window in zip(used, arena.window_bytes, strict=True):
        spans = sorted(span for span in own if span[0] < span[1])
        assert spans[0][0] == 0 and spans[-1][1] == window
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize("op", ["sum", "softmax"])
def test_pieces_of_bucket_cover_it_once_and_respect_unit_of_op(op: str) -> None:
    shapes = [(1001, 3), (0, 3), (70_001, 3), (1, 3), (3,)]
    buffers = [Buffer(shape, torch.float64) for shape in shapes]
    pieces = pieces_of(reduce(*buffers, op=op))
    assert 4 <= len(pieces) <= MAX_PIECES + 1
    found = sorted(cut for piece in pieces for cut in piece)
    for number, buffer in enumerate(buffers):
        own = [(begin, end) for n, begin, end in found if n == number]
        size = torch.Size(buffer.shape).numel()
        assert [0, *(end for _, end in own)] == [*(begin for begin, _ in own), size]
        assert op == "sum" or all(end % 3 == 0 for _, end in own)
    for piece in pieces:
        assert sum((end - begin) * 8 for _, begin, end in piece) <= PIECE_BYTES
    small = Buffer((TOGETHER_BYTES,), torch.uint8)
    assert pieces_of(reduce(small)) == () != pieces_of(reduce(small, Buffer((1,), torch.uint8)))
    assert pieces_of(reduce(*buffers, size=2)) == ()


# -- against brute force: `python -m tests.daft.explore --slots` tries all of them -----------------


@pytest.mark.slow
def test_accepted_programs_neither_overwrite_read_slots_nor_hang() -> None:
    for ranks, count, channels, runs, every in (
        (2, 1, "cd", 4, 1),
        (2, 2, "cd", 3, 7),
        (2, 3, "c", 2, 397),
        (3, 1, "c", 3, 1),
        (3, 2, "c", 2, 29),
    ):
        for made in accepted(islice(exhaustive(ranks, count, channels), 0, None, every)):
            for rules in (REAL, LENT):
                assert wrong([made], [0] * runs, rules) is None, made.text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_program_sequences_neither_overwrite_read_slots_nor_hang(seed: int) -> None:
    for programs, runs in islice(drawn_programs(random.Random(seed)), 60):
        found = [wrong(programs, runs, rules) for rules in (REAL, LENT)]
        assert found == [None, None], (runs, *(made.text() for made in programs))


@pytest.mark.default("rules0-writes over")
@pytest.mark.parametrize(
    ("rules", "fact"),
    [
        (Rules(fewer_slots=1), "writes over"),
        (Rules(senders_run_ahead=True), "writes over"),
        (Rules(waits_for_readers=True), "nobody can go on"),
        (Rules(lent=True, kept_longer=True), "writes over"),
    ],
)
def test_explorer_reports_wrong_slot_rules(rules: Rules, fact: str) -> None:
    """Each wrong rule must cause an overwrite or a hang that the explorer finds."""
    found = [
        problem
        for made in accepted(exhaustive(2, 2, "c"))
        if (problem := wrong([made], [0, 0, 0], rules)) is not None
    ]
    assert found and all(fact in problem for problem in found)
    if rules.fewer_slots:  # the number of slots is the least for most programs
        assert len(found) > 50
