"""Tests the verifier: what it refuses, the messages, and agreement with brute force."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    Program,
    ProgramError,
    Recv,
    Send,
    Sizes,
    Vote,
    Wait,
    merge,
    verify,
)
from tests.daft import sized
from tests.daft.explore import built, can_hang, disagreement, drawn, exhaustive
from tests.daft.programs import Collectives, function, pipeline, program

B = Buffer((2,), torch.float32)
ONE = function("one", "def forward():\n    return (0,)")
TAKE = function("take", "def forward(x):\n    return ()")


def reduce(value: str, result: str, group: tuple[int, ...] = (0, 1), b: Buffer = B) -> Collective:
    return Collective("all_reduce", group, (value,), (result,), (b,), (b,), "sum", "g")


def borrow(value: str, source: int = 1) -> Recv:
    return Recv(value, source, "c", B, lent=True)


def refusal(*lists: Sequence[Instruction], **words: object) -> str:
    made = program(*lists, functions=[ONE, TAKE], **words)  # type: ignore[arg-type]
    with pytest.raises(ProgramError) as caught:
        verify(made)
    return str(caught.value)


def test_verifier_accepts_correct_programs_and_reports_peak_memory() -> None:
    report = verify(pipeline(3))
    assert report.peak_bytes == (0, 16, 16)
    verify(Collectives(3).program(), ((0, 1, 2),))
    verify(Collectives(3).program(), ((0, 1), (2,)))


def test_verifier_refuses_crossed_sends_and_names_cycle() -> None:
    first = [
        Send("x", 1, "c", B, source="net.py:3: send(x)"),
        Wait(("x",)),
        Recv("y", 1, "c", B),
        Wait(("y",)),
    ]
    second = [Send("x", 0, "c", B), Wait(("x",)), Recv("y", 0, "c", B), Wait(("y",))]
    assert_expected_inline(
        refusal(first, second, inputs=[("x",), ("x",)], outputs=[("y",), ("y",)]),
        """\
Program 'test' can hang: 2 waits form a circle.
  (rank 0, instr 1 wait x) waits for (rank 1, instr 2 y = recv from 0)
  (rank 1, instr 1 wait x) waits for (rank 0, instr 2 y = recv from 1)
  Fix: move a start that is waited for before the wait that holds it up.""",
    )


def test_verifier_names_user_line_in_cycle_through_collective() -> None:
    first = [reduce("x", "s"), Wait(("s",)), Send("x", 1, "c", B, source="net.py:7"), Wait(("x",))]
    second = [Recv("y", 0, "c", B), Wait(("y",)), reduce("y", "s"), Wait(("s",)), Free(("s",))]
    assert_expected_inline(
        refusal(first, second, inputs=[("x",), ()], outputs=[("s",), ("y",)]),
        """\
Program 'test' can hang: 2 waits form a circle.
  (rank 0, instr 1 wait s) waits for (rank 1, instr 2 s = all_reduce.sum(y) over (0, 1))
  (rank 1, instr 1 wait y) waits for (rank 0, instr 2 send x to 1)  net.py:7
  Fix: move a start that is waited for before the wait that holds it up.""",
    )


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([Call("one", (), ("a",))], "are never freed"),
        ([Call("take", ("a",), ())], "is not defined here"),
        ([Call("none", (), ())], "there is no function 'none'"),
        ([Call("one", (), ("a",)), Free(("a",)), Call("take", ("a",), ())], "after its free"),
        ([Call("one", (), ("a",)), Call("one", (), ("a",)), Free(("a",))], "defined twice"),
        ([Call("one", (), ("a",)), Free(("a",)), Free(("a",))], "after its free"),
        ([Call("one", (), ("x",))], "defined twice"),
        ([Free(("w",))], "outlives the run"),
        ([Wait(("x",))], "nothing was started"),
        ([Call("take", ("x",), (), ("w",))], "is not an input"),
        ([Recv("a", 1, "c", B), Call("take", ("a",), ())], "before the wait for"),
        ([Recv("a", 1, "c", B), Free(("a",))], "before the wait for"),
        ([Send("x", 1, "c", B), Call("take", ("x",), (), ("x",))], "is written while"),
        ([Send("x", 1, "c", B), Free(("x",))], "is freed while"),
        ([Send("w", 1, "c", B), Call("one", (), ("w",))], "is overwritten while"),
        ([reduce("x", "s"), Free(("x",))], "is freed while"),
        ([borrow("a"), Wait(("a",)), borrow("b")], "is lent by the same key"),
        ([borrow("x"), Wait(("x",))], "defined twice"),
        ([Send("x", 1, "c", B)], "never waited for"),
        ([Recv("a", 1, "c", B)], "never waited for"),
        ([Send("x", 0, "c", B)], "not distinct ranks"),
        ([Send("x", 7, "c", B)], "not distinct ranks"),
        ([reduce("x", "s", (1, 2))], "rank 0 is not in"),
        ([Send("x", 1, "c", B), Wait(("x",))], "without a partner"),
        ([Recv("a", 1, "c", B), Wait(("a",)), Free(("a",))], "without a partner"),
        ([reduce("x", "s"), Wait(("s",)), Free(("s",))], "without a partner"),
    ],
)
def test_verifier_refuses_invalid_program_with_fix(
    items: Sequence[Instruction], words: str
) -> None:
    text = refusal(items, [], [], inputs=[("x",), (), ()], state=[("w",), (), ()])
    assert words in text and "Fix: " in text


def sharing(items: Sequence[Instruction], **own: object) -> Program:
    """Return a program of one rank with state k and input x; ``own`` overrides its fields."""
    made = program(items, functions=[ONE, TAKE], inputs=[("x",)], state=[("k",)])
    return replace(made, ranks=(replace(made.ranks[0], **own),))  # type: ignore[arg-type]


VIEW, WRITE = Call("one", ("k",), ("v",)), Call("take", ("k",), (), ("k",))


@pytest.mark.parametrize(
    ("items", "own", "words"),
    [
        ([VIEW, WRITE, Call("take", ("v",), ()), Free(("v",))], {}, "which has been written since"),
        ([VIEW, WRITE], dict(outputs=("v",)), "output 'v' shares the storage of 'k'"),
        ([WRITE, VIEW], dict(outputs=("v",)), "output 'v' shares the storage of 'k'"),
        (
            [VIEW, reduce("v", "s", (0,)), WRITE, Wait(("s",)), Free(("v", "s"))],
            {},
            "'v' is changed, by a write to 'k', while",
        ),
        ([WRITE], dict(shares=(("v", "w"),)), "'w', which is neither an input nor state"),
        ([WRITE], dict(replayable=("w",)), "['w'] are declared replayable or changed"),
        ([WRITE], dict(changed=("k",)), "['k'] are declared replayable or changed"),
        (
            [VIEW, WRITE, Vote("a"), Commit("a"), Free(("a", "v"))],
            {},
            "it writes state 'k' before the rank's commit point",
        ),
        (
            [Call("take", ("x",), (), ("x",)), Vote("a"), Commit("a"), Free(("a",))],
            dict(changed=("x",)),
            "it writes state 'x' before the rank's commit point",
        ),
    ],
)
def test_verifier_refuses_writes_visible_through_shared_memory(
    items: Sequence[Instruction], own: dict[str, object], words: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        verify(sharing(items, **{"shares": (("v", "k"),), **own}))
    assert words in str(caught.value)


def test_verifier_accepts_writes_that_no_reader_can_see() -> None:
    shares = (("v", "k"),)
    verify(sharing([VIEW, Call("take", ("v",), ()), WRITE, Free(("v",))], shares=shares))
    verify(sharing([VIEW, Free(("v",)), WRITE, VIEW, Free(("v",))], shares=shares))
    agreed = [Vote("a"), Commit("a"), Free(("a",))]
    verify(sharing([WRITE, *agreed], replayable=("k",)))
    verify(sharing([*agreed, WRITE]))
    write = Call("take", ("x",), (), ("x",))
    verify(sharing([write, *agreed], replayable=("x",), changed=("x",)))
    verify(sharing([VIEW, WRITE, Call("take", ("v",), ()), Free(("v",))]))  # `shares` is unstated


def test_verifier_requires_borrowed_values_to_be_returned() -> None:
    def refused(items: Sequence[Instruction], words: str) -> None:
        outputs = [(), ("a",)] if not any(isinstance(i, Free) for i in items) else [(), ()]
        send = [Send("x", 1, "c", B), Wait(("x",))]
        assert words in refusal(send, items, inputs=[("x",), ()], outputs=outputs)

    refused([borrow("a", 0), Wait(("a",))], "['a'] are lent and not given back")
    sized = Recv("a", 0, "c", Buffer((), B.dtype, variable=True), lent=True)
    refused([sized, Wait(("a",)), Free(("a",))], "lent, and of unknown size")
    # two under way; each is freed before the next start
    twice = [borrow("a", 0), borrow("b", 0), Wait(("a",)), Free(("a",)), borrow("a", 0)]
    twice += [Wait(("b",)), Free(("b",)), Wait(("a",)), Free(("a",))]
    send = [Send("x", 1, "c", B), Wait(("x",))] * 3
    verify(program(send, twice, inputs=[("x",), ()]))


def test_verifier_refuses_missing_outputs() -> None:
    assert "outputs ['y'] are not there" in refusal([], outputs=[("y",)])


def test_verifier_accepts_redefinition_of_freed_name() -> None:
    verify(program([Call("one", (), ("a",)), Free(("a",))] * 2, functions=[ONE]))


def test_wait_for_one_output_covers_whole_collective() -> None:
    bucket = Collective("all_reduce", (0,), ("x", "x"), ("s", "t"), (B, B), (B, B), "sum", "g")
    outputs = [("s", "t")]
    verify(program([bucket, Wait(("s",)), Wait(("t",))], inputs=[("x",)], outputs=outputs))


def _pair(first: Instruction, second: Instruction) -> str:
    lists = ([first, Wait(("s",))], [second, Wait(("s",))])
    return refusal(*lists, inputs=[("x",)] * 2, outputs=[("s",)] * 2)


@pytest.mark.parametrize(
    "other",
    [
        reduce("x", "s", b=Buffer((3,), torch.float32)),
        reduce("x", "s", b=Buffer((2,), torch.float16)),
        Collective("all_reduce", (0, 1), ("x",), ("s",), (B,), (B,), "max", "g"),
        Collective("all_gather", (0, 1), ("x",), ("s", "t"), (B,), (B, B), None, "g"),
        Collective("all_reduce", (0, 1), ("x", "x"), ("s", "t"), (B, B), (B, B), "sum", "g"),
    ],
)
def test_verifier_refuses_collective_whose_members_disagree(other: Collective) -> None:
    lists = ([reduce("x", "s"), Wait(("s",))], [other, Wait(("s",))])
    outputs = [("s",), other.outputs]
    text = refusal(*lists, inputs=[("x",)] * 2, outputs=outputs)
    assert "operations that meet" in text and "rank 0, instr 0" in text


def test_verifier_refuses_send_and_receive_of_different_buffers() -> None:
    wide = Buffer((3,), torch.float32)
    lists = ([Send("x", 1, "c", B), Wait(("x",))], [Recv("y", 0, "c", wide), Wait(("y",))])
    assert "different buffers" in refusal(*lists, inputs=[("x",), ()], outputs=[(), ("y",)])


def test_verifier_refuses_gather_of_mismatched_pieces() -> None:
    short = Buffer((1,), torch.float32)
    lists = [
        [Collective("all_gather", (0, 1), ("x",), ("s", "t"), (b,), outs, None, "g"), Wait(("s",))]
        for b, outs in ((B, (B, short)), (short, (B, B)))
    ]
    text = refusal(*lists, inputs=[("x",)] * 2, outputs=[("s", "t")] * 2)
    assert "do not fit together" in text


@pytest.mark.parametrize(
    ("second", "distances", "words"),
    [
        (((3,), (2,)), (1, 1), ""),
        (((3,), (3,)), (1, 1), "do not fit together"),
        (((2,), (3,)), (1, 1), "do not fit together"),
        (((3,), (2,)), (1, 3), "differ in kind, op or distance"),
    ],
)
def test_verifier_compares_each_member_of_shift_with_next_one(
    second: Sequence[tuple[int, ...]], distances: tuple[int, int], words: str
) -> None:
    """Rank 0 sends f32[2] and receives f32[3]; the second rank has the stated shapes."""
    lists = [
        [Collective("shift", (0, 1), ("x",), ("s",), *own, None, "g", distance=n), Wait(("s",))]
        for n, shapes in zip(distances, (((2,), (3,)), second), strict=True)
        for own in [[(Buffer(shape, torch.float32),) for shape in shapes]]
    ]
    stated = dict(inputs=[("x",)] * 2, outputs=[("s",)] * 2)
    if words:
        assert words in refusal(*lists, **stated)
    else:
        verify(program(*lists, **stated))


COUNTS = Buffer((4,), torch.int64)
ROWS = Buffer((8, 3), torch.float32, bounded=True)
GATHER = Collective(
    *("all_gather", (0, 1), ("n",), ("n.0", "n.1"), (COUNTS,), (COUNTS,) * 2, None, "g"),
    on_host=True,
)
EXCHANGE = Collective(
    *("all_to_all", (0, 1), ("x", "x"), ("r.0", "r.1"), (ROWS,) * 2, (ROWS,) * 2, None, "e"),
    sizes=Sizes(("n.0", "n.1"), ((0, 1), (2, 3))),
)


def exchanged(*more: Instruction, gather: Collective = GATHER, **changes: Any) -> list[Instruction]:
    """Return the list of a rank that gathers counts, runs ``more`` and exchanges rows."""
    sizes = replace(EXCHANGE.sizes, **changes.pop("sizes", {}))  # type: ignore[type-var]
    exchange = replace(EXCHANGE, sizes=sizes, **changes)
    return [gather, Wait(("n.0",)), *more, exchange, Wait(("r.0",))]


def exchange_refusal(first: Sequence[Instruction], second: Sequence[Instruction]) -> str:
    return refusal(first, second, **SIZED)


SIZED: dict[str, Any] = dict(inputs=[("x", "n")] * 2, outputs=[("r.0", "r.1", "n.0", "n.1")] * 2)


def test_verifier_accepts_sized_exchange_with_other_bounds_on_each_rank() -> None:
    few = Buffer((2, 3), torch.float32, bounded=True)
    other = exchanged(in_buffers=(few,) * 2, out_buffers=(ROWS, few))
    report = verify(program(exchanged(), other, **SIZED))
    counts = 2 * COUNTS.nbytes
    assert report.peak_bytes == (counts + 2 * ROWS.nbytes, counts + ROWS.nbytes + few.nbytes)
    # the lengths are computed at the start, so that the counts may be freed at once
    frees = exchanged()
    frees.insert(-1, Free(("n.0", "n.1")))
    outputs = [("r.0", "r.1")] * 2
    verify(program(frees, frees, inputs=SIZED["inputs"], outputs=outputs))


WIDE = Buffer((8, 4), torch.float32, bounded=True)
SHORT = Buffer((4,), torch.int32)
AGAIN = [Free(("n.0", "n.1")), GATHER, Wait(("n.0",))]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (exchanged(sizes=dict(parts=((0,), (2, 3)))), "differ in parts, direction or limit"),
        (exchanged(sizes=dict(returned=True)), "differ in parts, direction or limit"),
        (exchanged(sizes=dict(limit=3)), "differ in parts, direction or limit"),
        (exchanged(in_buffers=(WIDE,) * 2, out_buffers=(WIDE,) * 2), "do not fit together"),
        (exchanged(sizes=dict(counts=("n.1", "n.0"))), "in order, of one all_gather over (0, 1)"),
        (exchanged(sizes=dict(counts=("n.0", "x"))), "of one all_gather over (0, 1)"),
        (exchanged(sizes=dict(counts=("n", "n"))), "n, n are made by no instruction"),
        (exchanged(Call("take", ("n.1",), (), ("n.1",))), "of one all_gather over (0, 1)"),
        (exchanged(Free(("n.1",))), "'n.1' is used after its free"),
        ([GATHER, EXCHANGE, Wait(("n.0", "r.0"))], "'n.0' is used before the wait"),
        (exchanged(gather=replace(GATHER, on_host=False)), "deliver on the host"),
    ],
)
def test_verifier_refuses_exchange_that_is_sized_otherwise_on_one_rank(
    other: Sequence[Instruction], words: str
) -> None:
    text = exchange_refusal(exchanged(), other)
    assert words in text and "\n  Fix: " in text


@pytest.mark.parametrize(
    ("both", "words"),
    [
        (exchanged(gather=replace(GATHER, on_host=False)), "i64[4], not vectors of i64 on the"),
        (
            exchanged(
                gather=replace(GATHER, in_buffers=(SHORT,), out_buffers=(SHORT,) * 2),
            ),
            "i32[4] on host, not vectors of i64",
        ),
        (exchanged(sizes=dict(parts=((0,), (4,)))), "position 4 of parts is outside the counts"),
        ([Send("x", 1, "c", ROWS), Wait(("x",))], "a message of f32[<=8,3] has no length"),
    ],
)
def test_verifier_refuses_exchange_with_unsuitable_counts(
    both: Sequence[Instruction], words: str
) -> None:
    text = exchange_refusal(both, both)
    assert words in text and "\n  Fix: " in text


def test_verifier_names_different_gathers_of_counts() -> None:
    """The second gather would give rank 1 other lengths than rank 0."""
    early = [*exchanged()[:3], *AGAIN, exchanged()[3]]
    assert_expected_inline(
        exchange_refusal(early, exchanged(*AGAIN)),
        """\
Program 'test': operations that meet take their counts from different all_gathers.
  rank 0, instr 0: n.0, n.1 = all_gather(n) over (0, 1) on g on host : i64[4] => i64[4], i64[4]
  rank 1, instr 3: n.0, n.1 = all_gather(n) over (0, 1) on g on host : i64[4] => i64[4], i64[4]
  rank 0, instr 2: r.0, r.1 = all_to_all(x, x) over (0, 1) on e sized by (n.0, n.1) parts (0 1, 2 3) : f32[<=8,3], f32[<=8,3] => f32[<=8,3], f32[<=8,3]
  rank 1, instr 5: r.0, r.1 = all_to_all(x, x) over (0, 1) on e sized by (n.0, n.1) parts (0 1, 2 3) : f32[<=8,3], f32[<=8,3] => f32[<=8,3], f32[<=8,3]
  Fix: size the collective on all members by the same all_gather.""",  # noqa: E501
    )


HALF = Buffer((2,), torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "given", "made", "fits"),
    [
        ("sum", HALF, B, True),  # in which it is accumulated
        ("max", HALF, B, False),
        ("sum", B, HALF, True),  # rounded once
        ("max", B, HALF, False),
        ("sum", B, Buffer((2,), torch.float64), False),
        ("sum", HALF, Buffer((2,), torch.float16), False),
    ],
)
def test_only_sum_may_have_accumulation_dtype_or_rounded_result(
    op: str, given: Buffer, made: Buffer, fits: bool
) -> None:
    reduced = Collective("all_reduce", (0, 1), ("x",), ("s",), (given,), (made,), op, "g")  # type: ignore[arg-type]
    names = ("x", "y")
    scattered = Collective("reduce_scatter", (0, 1), names, ("s",), (given,) * 2, (made,), op, "g")  # type: ignore[arg-type]
    for one in (reduced, scattered):
        lists = [[one, Wait(("s",))]] * 2
        words = dict(inputs=[one.inputs] * 2, outputs=[("s",)] * 2)
        if fits:
            verify(program(*lists, **words))  # type: ignore[arg-type]
        else:
            assert "do not fit together" in refusal(*lists, **words)


def test_merged_instruction_list_of_one_host_never_blocks() -> None:
    lists = merge(pipeline(3), ((0, 1, 2),))
    assert len(lists) == 1
    done: set[int] = set()
    for rank, item in lists[0]:
        if isinstance(item, Send):
            done.add(rank)
        if isinstance(item, Wait) and item.values == ("x",):
            assert rank - 1 in done
    assert merge(pipeline(3), ((0, 1, 2),), 5) != lists


def test_verifier_refuses_hosts_that_do_not_cover_ranks() -> None:
    with pytest.raises(ProgramError, match="Every rank has one host"):
        verify(pipeline(3), ((0, 1),))


# -- against brute force: `python -m tests.daft.explore` tries more ------------------------------


def test_verifier_agrees_with_brute_force_on_all_two_transfer_programs() -> None:
    found = list(exhaustive(2, 2, "cd"))
    assert len(found) == 1008
    assert sum(can_hang(*each, buffered=False) for each in found) == 42
    for each in found:
        assert disagreement(*each) is None, each


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_verifier_agrees_with_brute_force_on_random_programs(seed: int) -> None:
    transfers, orders = drawn(random.Random(seed))
    assert disagreement(transfers, orders) is None
    made = built(transfers, orders)
    if not can_hang(transfers, orders, buffered=False):
        verify(made, (tuple(range(made.size)),), seed=3)  # one host: never blocks


def test_verifier_agrees_with_runs_of_sized_exchanges_in_which_calls_fail() -> None:
    draw = random.Random(0)
    programs = [*(sized.drawn(draw) for _ in range(12)), *list(sized.exhaustive("c"))[::1999]]
    sized.tried.clear()
    assert [found for each in programs if (found := sized.disagreement(each)) is not None] == []
    assert min(sized.tried[what] for what in ("accepted", "refused", "failing calls")) > 5
