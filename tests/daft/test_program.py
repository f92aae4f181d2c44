"""Tests the text form of programs and instructions, and functions as data."""

from __future__ import annotations

import pickle
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
    Free,
    Function,
    Instruction,
    Label,
    ProgramError,
    Recv,
    Send,
    Sizes,
    TaskError,
    Wait,
    launch_cluster,
    parse_instructions,
    verify,
)
from dtensor.daft.ir.instructions import values_read
from dtensor.daft.ir.text import excerpt, format_instruction
from dtensor.numerics import DTYPES
from tests.daft.programs import Collectives, function, pipeline, program

names = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_.:/%-]{0,6}", fullmatch=True),
    st.sampled_from(
        ["call", "wait", "to", "x[1,2]", "a b", 'quo"te', "", "=", "@", "grad@w", "é\n"]
    ),
)
lists = st.lists(names, max_size=3).map(tuple)
buffers = st.builds(
    Buffer, st.lists(st.integers(0, 99), max_size=3).map(tuple), st.sampled_from([*DTYPES.values()])
)


def _labelled(of: tuple[str, int, int]) -> Label:
    return Label(*of)


labels = st.one_of(
    st.none(),
    st.builds(Label.parse, st.text(max_size=8)),
    st.tuples(st.sampled_from("FBIW"), st.integers(0, 9), st.integers(0, 9)).map(_labelled),
    st.builds(Label("F", 0, 1).doing, st.just("all_reduce"), st.just("mm_3"), st.just("over tp")),
    st.builds(Label("update").doing, st.sampled_from(["vote", "sent", "relu [triton relu]"])),
)
extras = dict(label=labels, source=st.none() | st.text(max_size=8))


@st.composite
def collectives(draw: st.DrawFn) -> Collective:
    kind = draw(st.sampled_from(["all_reduce", "all_gather", "broadcast"]))
    ins, outs = draw(lists), draw(lists)
    return Collective(
        kind,  # type: ignore[arg-type]
        draw(st.lists(st.integers(0, 9), max_size=3).map(tuple)),
        ins,
        outs,
        tuple(draw(buffers) for _ in ins),
        tuple(draw(buffers) for _ in outs),
        draw(st.sampled_from(["sum", "max", "min"])) if kind == "all_reduce" else None,  # type: ignore[arg-type]
        draw(names),
        label=draw(extras["label"]),
        source=draw(extras["source"]),
    )


@st.composite
def sized_exchanges(draw: st.DrawFn) -> Collective:
    num = draw(st.integers(1, 3))
    values = st.lists(names, min_size=num, max_size=num).map(tuple)
    part = st.lists(st.integers(0, 9), max_size=6).map(tuple)
    shapes = st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)
    bounded = st.builds(Buffer, shapes, st.just(torch.float32), bounded=st.just(True))
    several = st.lists(bounded, min_size=num, max_size=num).map(tuple)
    parts = draw(st.lists(part, min_size=num, max_size=num).map(tuple))
    limit = draw(st.none() | st.integers(0, 99))
    return Collective(
        *("all_to_all", tuple(range(num)), draw(values), draw(values)),
        *(draw(several), draw(several), None, draw(names)),
        sizes=Sizes(draw(values), parts, draw(st.booleans()), limit),
        **{name: draw(each) for name, each in extras.items()},
    )


instructions = st.one_of(
    st.builds(Call, names, lists, lists, lists, **extras),
    st.builds(Send, names, st.integers(0, 99), names, buffers, **extras),
    st.builds(Recv, names, st.integers(0, 99), names, buffers, lent=st.booleans(), **extras),
    collectives(),
    sized_exchanges(),
    st.builds(Wait, lists, **extras),
    st.builds(Free, lists, **extras),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.lists(instructions, max_size=4))
def test_instruction_text_parses_back(items: list[Instruction]) -> None:
    text = "\n".join(map(format_instruction, items))
    assert parse_instructions(text) == tuple(items)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.one_of(st.text(), st.from_regex(r"\A(F0 stage 1|\w*)(: \w+ .*( over| from stage)? \w+)?\Z"))
)
def test_label_text_parses_back(text: str) -> None:
    assert str(Label.parse(text)) == text


def test_program_text_lists_ranks_and_functions() -> None:
    assert_expected_inline(
        pipeline(2).text(),
        """\
program test
rank 0 (stage 0)    inputs x    state w, n
  y = call step(x, w, n) writes n # "F0 stage 0"
  send y to 1 on fwd : f32[4]
  wait y
  free y
rank 1 (stage 1)    outputs y    state w, n
  x = recv from 0 on fwd : f32[4]
  wait x
  y = call step(x, w, n) writes n # "F0 stage 1"
  free x""",
    )


def test_program_prints_ranks_as_columns() -> None:
    assert_expected_inline(
        str(pipeline(2)),
        """\
program test    2 ranks
     rank 0 (stage 0)                | rank 1 (stage 1)
   0 y = call step(x, w, n) writes n | x = recv from 0
   1 send y to 1                     | wait x
   2 wait y                          | y = call step(x, w, n) writes n
   3 free y                          | free x""",
    )


def test_program_columns_fit_100_characters() -> None:
    text = str(Collectives(5).program())
    assert max(map(len, text.splitlines())) <= 100
    assert [f"rank {rank} (stage {rank})" in text for rank in range(5)] == [True] * 5


@pytest.mark.parametrize(
    "line",
    [
        "send x to 1",
        "y = call f",
        "y = nothing(x)",
        "call f() x",
        "wait x #",
        "x = recv from 0 on c : q7[1]",
        "r = all_to_all(s) over (0) on c sized by (n) parts () returned : f32[<=2] => f32[<=2]",
        "r = all_to_all(s) over (0) on c sized by (n) parts (0) : f32[2] => f32[2]",
        "r = all_gather(s) over (0) on c on card : f32[2] => f32[2]",
    ],
)
def test_malformed_instruction_text_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="instruction|Expected|Nothing may|dtype|one part|sized"):
        parse_instructions(line)


def test_buffer_has_text_and_bytes_and_refuses_negative_sizes() -> None:
    assert str(Buffer((2, 3), torch.bfloat16)) == "bf16[2,3]"
    assert Buffer((2, 3), torch.bfloat16).nbytes == 12
    assert Buffer((), torch.int64).nbytes == 8
    with pytest.raises(ValueError, match="sizes are 0 or more"):
        Buffer((-1,), torch.float32)


def test_bounded_buffer_accepts_at_most_its_rows() -> None:
    bounded = Buffer((3, 2), torch.float32, bounded=True)
    assert str(bounded) == "f32[<=3,2]" and bounded.nbytes == 24
    assert bounded.with_rows(1) == Buffer((1, 2), torch.float32)
    shapes = [(3, 2), (0, 2), (4, 2), (3, 1), (3,), ()]
    accepted = [bounded.accepts(torch.zeros(shape)) for shape in shapes]
    assert accepted == [True, True, False, False, False, False]
    assert not bounded.accepts(torch.zeros(3, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="at least one dim"):
        Buffer((), torch.float32, bounded=True)


COUNTS = [[1, 2, 0, 4], [0, 1, 5, 0]]


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        (dict(), [[3, 4], [1, 5]]),
        (dict(returned=True), [[3, 1], [4, 5]]),
        (dict(limit=9), [[3, 4], [1, 5]]),
        (dict(limit=8), [[0, 0], [0, 0]]),
        (dict(limit=8, returned=True), [[0, 0], [0, 0]]),
        (dict(parts=((3, 0), ())), [[5, 0], [0, 0]]),
    ],
)
def test_lengths_of_sized_exchange_follow_from_counts(
    sizes: dict[str, Any], lengths: list[list[int]]
) -> None:
    found = Sizes(("c", "d"), **{"parts": ((0, 1), (2, 3)), **sizes}).lengths(COUNTS)
    assert [list(row) for row in found] == lengths


def test_sized_exchange_text_parses_back() -> None:
    counts, buffer = Buffer((9,), torch.int64), Buffer((512, 64), torch.float32, bounded=True)
    sizes = Sizes(("n.0", "n.1"), ((0, 1, 2, 7), ()), True, 512)
    gather = Collective(
        *("all_gather", (0, 1), ("n",), ("n.0", "n.1"), (counts,), (counts,) * 2, None, "ep"),
        on_host=True,
    )
    exchange = Collective(
        *("all_to_all", (0, 1), ("s.0", "s.1"), ("r.0", "r.1"), (buffer,) * 2, (buffer,) * 2),
        *(None, "ep"),
        sizes=sizes,
    )
    text = "\n".join(map(format_instruction, (gather, exchange)))
    assert_expected_inline(
        text,
        """\
n.0, n.1 = all_gather(n) over (0, 1) on ep on host : i64[9] => i64[9], i64[9]
r.0, r.1 = all_to_all(s.0, s.1) over (0, 1) on ep sized by (n.0, n.1) parts (0-2 7, -) returned limit 512 : f32[<=512,64], f32[<=512,64] => f32[<=512,64], f32[<=512,64]""",  # noqa: E501
    )
    assert parse_instructions(text) == (gather, exchange)
    renamed = exchange.renamed({"n.0": "m", "s.0": "t"}, (5, 7))
    assert renamed.group == (5, 7) and renamed.sizes == replace(sizes, counts=("m", "n.1"))
    assert values_read(renamed) == ("t", "s.1", "m", "n.1")


def test_collective_refuses_wrong_op_or_buffers() -> None:
    buffer = Buffer((1,), torch.float32)
    with pytest.raises(ValueError, match="all_reduce needs an op"):
        Collective("all_reduce", (0,), ("a",), ("b",), (buffer,), (buffer,), None, "c")
    with pytest.raises(ValueError, match="broadcast takes no op"):
        Collective("broadcast", (0,), ("a",), ("b",), (buffer,), (buffer,), "sum", "c")
    with pytest.raises(ValueError, match=r"buffers f32\[...,3\] or f64\[...,3\], got f32"):
        Collective("all_reduce", (0,), ("a",), ("b",), (buffer,), (buffer,), "softmax", "c")
    bounded = Buffer((1,), torch.float32, bounded=True)
    for kind, own, more, words in (
        ("all_to_all", bounded, {}, "bounded buffers if and only if it is sized"),
        ("all_to_all", buffer, dict(sizes=Sizes(("n",), ((0,),))), "if and only if it is sized"),
        ("broadcast", bounded, dict(sizes=Sizes(("n",), ((0,),))), "Only an all_to_all is sized"),
        ("all_to_all", bounded, dict(sizes=Sizes((), ())), "one vector of counts for each member"),
        ("broadcast", buffer, dict(on_host=True), "Only an all_gather of equal buffers"),
        ("broadcast", buffer, dict(distance=1), "The distance of broadcast is 0, got 1"),
        ("shift", buffer, {}, "The distance of shift is at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Collective(kind, (0,), ("a",), ("b",), (own,), (own,), None, "c", **more)  # type: ignore
    with pytest.raises(ValueError, match="2 vectors and 1 parts"):
        Sizes(("m", "n"), ((0,),))
    with pytest.raises(ValueError, match="one buffer per value"):
        Collective("broadcast", (0,), ("a",), ("b",), (), (buffer,), None, "c")


def test_shift_text_parses_back() -> None:
    sent, received = (Buffer((2, n), torch.float32) for n in (3, 5))
    group, values = (4, 0, 2), (("k", "v"), ("k1", "v1"))
    made = Collective(
        *("shift", group, *values, (sent, sent), (received, received), None, "cp"), distance=2
    )
    assert_expected_inline(
        text := format_instruction(made),
        """k1, v1 = shift(k, v) over (4, 0, 2) by 2 on cp : f32[2,3], f32[2,3] => f32[2,5], f32[2,5]""",  # noqa: E501
    )
    assert parse_instructions(text) == (made,)
    assert [made.given("kv", 0, to) for to in range(3)] == [(), (), "kv"]
    assert [made.got(0, of) for of in range(3)] == [(), (received, received), ()]


def test_softmax_all_reduce_text_parses_back() -> None:
    buffers = (Buffer((6, 3), torch.float32),)
    made = Collective("all_reduce", (0, 1), ("a",), ("b",), buffers, buffers, "softmax", "c")
    text = format_instruction(made)
    assert text == "b = all_reduce.softmax(a) over (0, 1) on c : f32[6,3] => f32[6,3]"
    assert parse_instructions(text) == (made,)


def test_function_with_torch_operators_pickles() -> None:
    square = function(
        "square",
        "def forward(x):\n    return (packet(mul(x, x), x),)",
        mul=torch.ops.aten.mul.Tensor,
        packet=torch.ops.aten.add,
    )
    again = pickle.loads(pickle.dumps(square))
    assert dict(again.bindings)["mul"] is torch.ops.aten.mul.Tensor
    assert dict(again.bindings)["packet"] is torch.ops.aten.add
    assert again.build()(torch.tensor(3.0)) == (torch.tensor(12.0),)


def test_program_pickles() -> None:
    assert pickle.loads(pickle.dumps(pipeline(3))) == pipeline(3)


def test_function_of_callable_pickles_and_runs() -> None:
    wrapped = Function.of(torch.unbind)
    assert pickle.loads(pickle.dumps(wrapped)).build()(torch.tensor([1, 2])) == (1, 2)


def test_user_line_of_error_is_that_of_innermost_generated_frame() -> None:
    fails = Function(
        name="fails",
        source="def forward(x):\n    y = x + 1\n    return (y / 0,)",
        lines=(None, "net.py:1: y = x + 1", "net.py:2: y / 0"),
    )
    with pytest.raises(ZeroDivisionError) as caught:
        fails.build()(1)
    assert fails.user_line(caught.value) == "net.py:2: y / 0"
    assert fails.user_line(ValueError()) is None


def test_function_source_without_forward_is_refused() -> None:
    with pytest.raises(ValueError, match="does not define `forward`"):
        function("nothing", "x = 1").build()


def test_long_instruction_is_shortened_in_error() -> None:
    """An optimizer's call has hundreds of names; the error must stay readable."""
    weights = tuple(f"blocks.{i}.mlp.up.weight" for i in range(60))
    adam = Call("adam", weights, tuple(f"new {name}" for name in weights), writes=weights)
    short = Call("adam", weights[:1], ("y",))
    assert excerpt(short) == format_instruction(short, brief=True)
    assert excerpt(adam) == (
        '"new blocks.0.mlp.up.weight", ... (59 more) = call adam(blocks.0.mlp.up.weight, ... '
        "(59 more)) writes blocks.0.mlp.up..."
    )
    raises = function("adam", "def forward(*xs):\n    raise ZeroDivisionError")
    made = program([adam], functions=[raises], inputs=[weights], outputs=[adam.outputs])
    with launch_cluster(1) as cluster, pytest.raises(TaskError) as caught:
        cluster.run(cluster.load(made), [dict.fromkeys(weights, 1)]).get()
    assert len(str(caught.value)) < 200 and "call adam(" in str(caught.value)
    with pytest.raises(ProgramError) as unknown:
        verify(program([adam], inputs=[weights], outputs=[adam.outputs]))
    assert "there is no function 'adam'" in str(unknown.value) and len(str(unknown.value)) < 250
