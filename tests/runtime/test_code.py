"""Tests generated code of calls: an addend is added in the memory of the product if no other op
reads the product, and each quick function equals its op and can be pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dtensor.runtime.lower.code import QUICK, CodeBuilder, quick
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
    op: OpCall,
    operands: Sequence[str],
    more: str = "",
    outputs: Sequence[str] = ("z",),
    device: str = "cpu",
) -> Any:
    code = CodeBuilder(torch.device(device))
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
def test_add_to_product_runs_in_place_if_it_is_the_last_reader(op: OpCall, given: Any) -> None:
    built, inputs = made(op, ("y", "b"))
    assert "_(" in built.source.splitlines()[2]
    values = {"x": X, "w": W, "b": given}
    (got,) = built.build()(*(values[name] for name in inputs))
    assert torch.equal(got, op.target(X @ W, *(op.args[1:] if given is None else (given,))))


def test_add_to_product_with_other_readers_is_not_in_place() -> None:
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
def test_add_to_product_with_possibly_other_strides_is_not_in_place(
    op: OpCall, operands: Sequence[str]
) -> None:
    assert "_(" not in made(op, operands)[0].source.splitlines()[2]


def test_cuda_product_and_bias_become_one_addmm() -> None:
    """The operands stay alive until the addmm."""
    code = CodeBuilder(torch.device("cuda"))
    code.line("r = x + 0", ("x",), ("r",))
    code.call(call(aten.mm.default, X, W), ("r", "w"), ("y",), "net.py:1", list)
    code.call(call(aten.add.Tensor, X @ W, BIAS), ("y", "b"), ("z",), "net.py:2", list)
    built = code.function("f", ("z",))
    assert built.source == (
        "def forward(x, w, b):\n"
        "    r = x + 0\n"
        "    z = addmm(b, r, w); del r\n"
        "    return (z, )\n"
    )  # fmt: skip
    assert built.lines[2] == "net.py:2"
    found: Any = built.build()(X, W, BIAS)[0]
    assert torch.equal(found, torch.addmm(BIAS, X, W))
    torch.testing.assert_close(found, X @ W + BIAS)


@pytest.mark.parametrize(
    ("op", "more", "outputs"),
    [
        (call(aten.add.Tensor, X @ W, BIAS), "more = y + 1", ("z", "more")),
        (call(aten.add.Tensor, X @ W, BIAS), "", ("z", "y")),
        (call(aten.add.Tensor, X @ W, BIAS.double()), "", ("z",)),
        (call(aten.add.Tensor, X @ W, ROWS), "", ("z",)),
        (call(aten.sub.Tensor, X @ W, BIAS), "", ("z",)),
        (call(aten.mul.Tensor, X @ W, BIAS), "", ("z",)),
    ],
)
def test_cuda_product_that_addmm_cannot_replace_stays(
    op: OpCall, more: str, outputs: Sequence[str]
) -> None:
    built, _ = made(op, ("y", "b"), more, outputs, device="cuda")
    assert "y = aten_mm_default(x, w)" in built.source and "addmm" not in built.source


def test_cuda_addmm_is_not_used_if_operand_is_written_before_bias() -> None:
    code = CodeBuilder(torch.device("cuda"))
    code.call(call(aten.mm.default, X, W), ("x", "w"), ("y",), None, list)
    code.line("w.zero_()", ("w",), ())
    code.call(call(aten.add.Tensor, X @ W, BIAS), ("y", "b"), ("z",), None, list)
    found: Any = code.function("f", ("z",)).build()(X, W.clone(), BIAS)[0]
    assert torch.equal(found, X @ W + BIAS)


# -- quick functions -------------------------------------------------------------------------------

A, IDS = torch.randn(4, 6), torch.tensor([2, 0, 2])
# ops without a rule have no samples
IN_PLACE: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "aten.index_copy_.default": [((torch.zeros(4, 6), 0, IDS[:2], A[:2]), {})],
    "aten.scatter_.src": [((torch.zeros(4, 6), 1, IDS[None], A), {})],
}


def calls(op: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments of the op, positional and by keyword."""
    from tests.certify.samples import SAMPLES, Draw  # imports transformers

    name = str(op)
    return IN_PLACE.get(name) or [sample(Draw(0)) for sample in SAMPLES[name]]


@pytest.mark.parametrize("op", QUICK, ids=str)
def test_quick_function_gives_values_dtype_and_strides_of_its_op(op: Any) -> None:
    function = pickle.loads(pickle.dumps(QUICK[op]))  # as it goes to an actor
    for args, kwargs in calls(op):
        made, wanted = tree_leaves(function(*args, **kwargs)), tree_leaves(op(*args, **kwargs))
        assert len(made) == len(wanted)
        for one, other in zip(made, wanted, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(one, other)


def test_quick_function_is_not_used_for_scalar_first_operand() -> None:
    x = Meta((4, 6), torch.float32)
    for args, quickly in (((Operand(0), 2.0), True), ((2.0, Operand(0)), False)):
        call = OpCall(target=aten.mul.Tensor, args=args, operands=(x,), results=(x,))
        assert (quick(call, torch.device("cpu")) is torch.mul) == quickly
