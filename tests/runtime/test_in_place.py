"""What is added to a product goes into its memory where nobody else reads that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dtensor.runtime.lower.code import CodeBuilder
from dtensor.sharding.ops.call import Meta, OpCall, Operand

aten: Any = torch.ops.aten
X, W = torch.randn(6, 4), torch.randn(4, 5)
BIAS, ROWS, WHOLE = torch.randn(5), torch.randn(6, 1), torch.randn(6, 5)


def call(target: Any, *args: Any, **kwargs: Any) -> OpCall:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    places = iter(range(len(tensors)))
    return OpCall(
        target=target,
        args=tuple(Operand(next(places)) if isinstance(a, torch.Tensor) else a for a in args),
        kwargs=tuple(kwargs.items()),
        operands=tuple(Meta(tuple(t.shape), t.dtype) for t in tensors),
        results=(Meta(tuple((out := target(*args, **kwargs)).shape), out.dtype),),
    )


def made(
    op: OpCall, operands: Sequence[str], more: str = "", outputs: Sequence[str] = ("z",)
) -> Any:
    code = CodeBuilder(torch.device("cpu"))
    code.call(call(aten.mm.default, X, W), ("x", "w"), ("y",), None, list)
    code.call(op, operands, ("z",), None, list)
    if more:
        code.line(more, ("y",), ("more",))
    return code.function("f", outputs), code.inputs


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (call(aten.add.Tensor, X @ W, BIAS), BIAS),
        (call(aten.sub.Tensor, X @ W, BIAS), BIAS),
        (call(aten.mul.Tensor, X @ W, 0.5), None),
        (call(aten.div.Tensor, X @ W, 3.0), None),
    ],
)
def test_the_last_that_reads_a_product_has_its_memory(op: OpCall, given: Any) -> None:
    built, inputs = made(op, ("y", "b"))
    assert "_(" in built.source.splitlines()[2]
    values = {"x": X, "w": W, "b": given}
    (got,) = built.build()(*(values[name] for name in inputs))
    assert torch.equal(got, op.target(X @ W, *(op.args[1:] if given is None else (given,))))


def test_one_that_others_read_is_left_as_it_is() -> None:
    op = call(aten.add.Tensor, X @ W, BIAS)
    assert "aten_add_Tensor(y, b)" in made(op, ("y", "b"), outputs=("y", "z"))[0].source
    more = made(op, ("y", "b"), "more = y.t()", ("z", "more"))
    assert "aten_add_Tensor(y, b)" in more[0].source


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        (call(aten.add.Tensor, X @ W, BIAS, alpha=2), ("y", "b")),
        (call(aten.add.Tensor, X @ W, WHOLE.t().contiguous().t()), ("y", "b")),
        (call(aten.add.Tensor, X @ W, BIAS.double()), ("y", "b")),
        (call(aten.add.Tensor, X @ W, X @ W), ("y", "y")),
        (call(aten.add.Tensor, BIAS, X @ W), ("b", "y")),
        (call(aten.mul.Tensor, X, 2.0), ("x",)),
    ],
)
def test_what_need_not_lie_as_the_product_does_is_made_anew(
    op: OpCall, operands: Sequence[str]
) -> None:
    assert "_(" not in made(op, operands)[0].source.splitlines()[2]
