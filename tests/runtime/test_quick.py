"""Every function of the table gives what the op gives that it stands for, and can be shipped."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dtensor.runtime.lower.code import QUICK, quick
from dtensor.sharding.ops.call import Meta, OpCall, Operand

aten: Any = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(4, 6)
M, ROW = torch.randn(6, 4), torch.rand(6)
IDS = torch.tensor([2, 0, 2])

# op: arguments as captured graphs have them, positional and by keyword
CASES: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten._softmax.default: ((X, -1, False), {}),
    aten._softmax_backward_data.default: ((X, Y, -1, torch.float32), {}),
    aten._log_softmax.default: ((X, 1, False), {}),
    aten.add.Tensor: ((X, Y), {"alpha": 2}),
    aten.amax.default: ((X, [1], True), {}),
    aten.arange.default: ((6,), {"device": torch.device("cpu")}),
    aten.bmm.default: ((X[None], M[None]), {}),
    aten.cat.default: (([X, Y], 1), {}),
    aten.clamp.default: ((X, None, 0.5), {}),
    aten.clone.default: ((X.t(),), {"memory_format": torch.contiguous_format}),
    aten.cos.default: ((X,), {}),
    aten.div.Tensor: ((X, 3.0), {}),
    aten.embedding.default: ((X, IDS, 1), {}),
    aten.exp.default: ((X,), {}),
    aten.expand.default: ((ROW, [4, 6]), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.index_copy_.default: ((torch.zeros(4, 6), 0, IDS[:2], Y[:2]), {}),
    aten.le.Tensor: ((X, Y), {}),
    aten.mean.dim: ((X, [0], True), {}),
    aten.mm.default: ((X, M), {}),
    aten.mul.Tensor: ((X, 0.5), {}),
    aten.native_layer_norm.default: ((X, [6], ROW, None, 1e-5), {}),
    aten.neg.default: ((X,), {}),
    aten.permute.default: ((X, [1, 0]), {}),
    aten.pow.Tensor_Scalar: ((X, 2), {}),
    aten.relu.default: ((X,), {}),
    aten.reshape.default: ((X.t(), [3, -1]), {}),
    aten.rsqrt.default: ((ROW,), {}),
    aten.scatter_.src: ((torch.zeros(4, 6), 1, IDS[None], X), {}),
    aten.select.int: ((X, 1, -1), {}),
    aten.sigmoid.default: ((X,), {}),
    aten.silu.default: ((X,), {}),
    aten.sin.default: ((X,), {}),
    aten.split_with_sizes.default: ((X, [1, 2, 3], -1), {}),
    aten.squeeze.dim: ((X[:1], 0), {}),
    aten.stack.default: (([X, Y], 1), {}),
    aten.sub.Tensor: ((X, Y), {}),
    aten.sum.dim_IntList: ((X, [0], True), {"dtype": torch.float64}),
    aten.t.default: ((X,), {}),
    aten.tanh.default: ((X,), {}),
    aten.transpose.int: ((X, -1, 0), {}),
    aten.unsqueeze.default: ((X, -1), {}),
    aten.view.default: ((X, [2, 12]), {}),
    aten.where.self: ((X > 0, X, Y), {}),
}


def test_every_function_has_a_case() -> None:
    assert QUICK.keys() == CASES.keys()


@pytest.mark.parametrize("op", CASES, ids=str)
def test_the_same_values_in_the_same_layout(op: Any) -> None:
    args, kwargs = CASES[op]
    function = pickle.loads(pickle.dumps(QUICK[op]))  # as it goes to an actor
    made, wanted = tree_leaves(function(*args, **kwargs)), tree_leaves(op(*args, **kwargs))
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)


def test_a_number_in_place_of_a_tensor_keeps_the_overload() -> None:
    x = Meta((4, 6), torch.float32)
    for args, quickly in (((Operand(0), 2.0), True), ((2.0, Operand(0)), False)):
        call = OpCall(target=aten.mul.Tensor, args=args, operands=(x,), results=(x,))
        assert (quick(call, torch.device("cpu")) is torch.mul) == quickly
