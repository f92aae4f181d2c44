"""The same ops by a shorter way: torch's own Python functions in place of `torch.ops` overloads.

    quick(OpCall(target=aten.mm.default, ...))      # torch.mm

Calling an overload costs 3 to 5 us, as its arguments are parsed by schema; the function that torch
generates for the same op costs 1 to 2, and dispatches to the same kernel. A layer of width 64 runs
in 100 such calls, so local code binds these where there is one with the same arguments in the same
order (a test compares them, op by op). Ops that are not in the table are called as captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtensor.sharding.ops.call import OpCall, Operand

_aten: Any = torch.ops.aten
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_torch: Any = torch

QUICK: Mapping[object, Callable[..., Any]] = {
    _aten._softmax.default: _torch._softmax,
    _aten._softmax_backward_data.default: _torch._softmax_backward_data,
    _aten._log_softmax.default: _torch._log_softmax,
    _aten.add.Tensor: torch.add,
    _aten.amax.default: torch.amax,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.div.Tensor: torch.div,
    _aten.embedding.default: torch.embedding,
    _aten.exp.default: torch.exp,
    _aten.expand.default: torch.Tensor.expand,
    _aten.gelu.default: _C._nn.gelu,
    _aten.mean.dim: torch.mean,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.neg.default: torch.neg,
    _aten.permute.default: torch.permute,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.relu.default: torch.relu,
    _aten.reshape.default: torch.reshape,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.select.int: torch.select,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.silu.default: _C._nn.silu,
    _aten.split_with_sizes.default: torch.split_with_sizes,
    _aten.squeeze.dim: torch.squeeze,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
    _aten.where.self: torch.where,
}


def quick(call: OpCall) -> Callable[..., Any]:
    """What local code calls for ``call``: its target, or another function that is the same."""
    # a function of torch's refuses a number where an overload takes it for a tensor
    first = call.args[0] if call.args else None
    taken = isinstance(first, Operand | tuple | list)
    return QUICK.get(call.target, call.target) if taken else call.target
