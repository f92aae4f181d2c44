"""Expansions of composite ops into simpler ops, which the planner uses where they are cheaper.

    _softmax(x, -1)   ->   m = amax(x, -1); e = exp(x - m); e / sum(e, -1)

A fused op needs the dim that it normalises whole on each rank. In the expansion this dim may be
split, and ranks communicate one number per row instead of the row. The planner prices both
(sharding/plan/choose/choose_composites.py). An expansion has the op's results, up to rounding.

Batch norm in training is always expanded if the batch is split: sums over the batch are divided by
the global count. The forward becomes sum, bn_squares, bn_apply and ops on [c]; the backward becomes
bn_sums, bn_backward and ops on [c]. capture/decompose.py expands ops that have no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

import dtensor.sharding.ops.attention_masked
import dtensor.sharding.ops.batch_norm  # noqa: F401  (registers the ops)
import dtensor.sharding.ops.norms as norms
import dtensor.sharding.ops.rope as rope
from dtensor.frontend.capture.decompose import has_rule, table
from dtensor.frontend.capture.simplify import simplify
from dtensor.frontend.graph import op_call
from dtensor.private_torch import FakeTensorMode, pytree
from dtensor.sharding.local import attention_kernels
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.plan.dataflow import Expansion

aten: Any = torch.ops.aten


class _NoExpansion(Exception):
    pass


@lru_cache(maxsize=4096)
def expansion(call: OpCall) -> Expansion | None:
    """Return the expansion of a call into ops that all have rules; None if there is none."""
    decomposition: Any = _DECOMPOSITIONS.get(call.target) or table().get(call.target)
    return None if decomposition is None else traced(call, decomposition)


def traced(call: OpCall, decomposition: Callable[..., Any]) -> Expansion | None:
    """Return the expansion of a call by a function of its arguments; None if an op of the function
    has no rule, or the function returns None."""
    # Imported here because it loads torch's compiler, and triton if that is installed.
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(m.shape, dtype=m.dtype) for m in call.operands]

    def run(*tensors: Tensor) -> Any:
        """Run the decomposition on tensors in place of the call's operands."""

        def tensor_of(operand: Operand) -> Tensor:
            return tensors[operand.index]

        args, kwargs = pytree.tree_map_only(Operand, tensor_of, (call.args, dict(call.kwargs)))
        out = decomposition(*args, **kwargs)
        if out is None:  # these arguments have no expansion
            raise _NoExpansion
        return tuple(out) if isinstance(out, (tuple, list)) else out

    try:
        with mode, torch.no_grad():
            module = make_fx(run, decomposition_table=_DECOMPOSITIONS)(*fakes)
    except _NoExpansion:
        return None
    if module.graph.find_nodes(op="get_attr"):
        return None
    simplify(module.graph)
    return _expansion_of(module.graph, call)


def _expansion_of(graph: fx.Graph, call: OpCall) -> Expansion | None:
    """Return a traced graph as an `Expansion`, in which values are numbered: first the operands,
    then the results of each call. Return None if an op has no rule, or results do not match."""
    numbers: dict[fx.Node, int] = {}
    calls: list[OpCall] = []
    operands: list[tuple[int, ...]] = []
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = count
            count += 1
        elif node.op == "call_function":
            inner_call, nodes = op_call(node)
            if inner_call.multiple or not has_rule(inner_call):
                return None
            calls.append(inner_call)
            operands.append(tuple(numbers[n] for n in nodes))
            numbers[node] = count
            count += 1
    out: Any = graph.output_node().args[0]
    values: Sequence[Any] = out if isinstance(out, (tuple, list)) else (out,)
    results = tuple(numbers[v] if isinstance(v, fx.Node) else None for v in values)
    if len(results) != len(call.results):
        return None
    for index, meta in zip(results, call.results, strict=True):
        if meta is not None and (index is None or index < len(call.operands)):
            return None
    return Expansion(calls=tuple(calls), operands=tuple(operands), results=results)


# -- decompositions --------------------------------------------------------------------------------
# Torch's decompositions of these ops call each other or sum twice. Here each reduction becomes one
# collective of one number per row.


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    e = (wide - wide.amax(dim, keepdim=True)).exp()
    out = e / e.sum(dim, keepdim=True)
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    shifted = wide - wide.amax(dim, keepdim=True)
    out = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return out if half_to_float else out.to(x.dtype)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    product = grad * out
    return (product - out * product.sum(dim, keepdim=True)).to(dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (grad - out.exp() * grad.sum(dim, keepdim=True)).to(dtype)


def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    dims = [d % max(x.dim(), 1) for d in dim] if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    divisor = max(0.0, count - (1 if correction is None else correction))
    squares = (x - mean).square().sum(dims, keepdim=keepdim)
    var = squares / divisor if divisor else squares / 0.0
    return var, mean if keepdim else mean.squeeze(dims)


def _var(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var_mean(x, dim, **options)[0]


def _std(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var(x, dim, **options).sqrt()


def _std_mean(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, **options)
    return var.sqrt(), mean


# Torch's decompositions of batch norm have three sums and five copies of x.


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return mean, biased variance, 1 / standard deviation, and the number of elements, of each
    channel."""
    count = math.prod(x.shape) // x.shape[1]
    dims = [d for d in range(x.dim()) if d != 1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = aten.sum.dim_IntList(x, dims, dtype=dtype) / count
    var = torch.ops.dt.bn_squares(x, mean) / count
    return mean, var, (var + eps).rsqrt(), count


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    """Return the output of batch norm, given the statistics of each channel."""
    scale = invstd if weight is None else invstd * weight
    shift = torch.zeros_like(mean) if bias is None else bias
    return torch.ops.dt.bn_apply(x, mean, scale, shift)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...] | None:
    """Return y, mean, 1 / standard deviation and the new running statistics; None in evaluation,
    which has no statistics over the batch."""
    if not training:
        return None
    mean, var, invstd, count = _statistics(x, eps)
    y = _normalised(x, weight, bias, mean, invstd)
    unbiased = var * (count / max(count - 1, 1))
    decay = 1 - momentum
    return (
        y,
        mean,
        invstd,
        (running_mean * decay + mean * momentum).to(running_mean.dtype),
        (running_var * decay + unbiased * momentum).to(running_var.dtype),
    )


def _batch_norm_without_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...] | None:
    if not training:
        return None
    mean, _, invstd, _ = _statistics(x, eps)
    return _normalised(x, weight, bias, mean, invstd), mean, invstd


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    if not train:
        return None
    count = math.prod(x.shape) // x.shape[1]
    sums = torch.ops.dt.bn_sums(grad, x, mean)
    grad_sum, grad_x_sum = sums.select(0, 0), sums.select(0, 1)
    a = invstd if weight is None else invstd * weight
    b = a * invstd * invstd * grad_x_sum / count
    dx = None
    if output_mask[0]:
        dx = torch.ops.dt.bn_backward(grad, x, mean, a, b, a * grad_sum / count)
    dtype = x.dtype if weight is None else weight.dtype
    return (
        dx,
        (grad_x_sum * invstd).to(dtype) if output_mask[1] else None,
        grad_sum.to(dtype) if output_mask[2] else None,
    )


_BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_stats,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    total = x + residual
    layer_norm = table()[aten.native_layer_norm.default]
    return (total, *layer_norm(total, [x.shape[-1]], weight, bias, eps))


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.std.correction: _std,
    aten.std_mean.correction: _std_mean,
    torch.ops.dt.rms_norm.default: norms.rms_norm,
    torch.ops.dt.rms_norm_backward.default: norms.rms_norm_backward,
    torch.ops.dt.add_rms_norm.default: norms.add_rms_norm,
    torch.ops.dt.add_layer_norm.default: _add_layer_norm,
    torch.ops.dt.attention_masked.default: attention_kernels.written_out,
    torch.ops.dt.attention_masked_backward.default: attention_kernels.written_out_backward,
    torch.ops.dt.rope.default: rope.rope,
    torch.ops.dt.rope_backward.default: rope.rope_backward,
    **_BATCH_NORMS,
}
# Ops that torch's decompositions expand.
_TORCH_DECOMPOSITIONS = """
    _safe_softmax.default logsumexp.default linalg_vector_norm.default
    norm.Scalar norm.ScalarOpt_dim native_layer_norm.default
    native_layer_norm_backward.default _fused_rms_norm.default
    _fused_rms_norm_backward.default native_group_norm.default native_group_norm_backward.default
    batch_norm_backward.default _batch_norm_with_update_functional.default"""
COMPOSITES = frozenset(map(str, _DECOMPOSITIONS)) | {
    f"aten.{name}" for name in _TORCH_DECOMPOSITIONS.split()
}
"""The names of ops that may have an `expansion`."""
OVER_BATCH = frozenset(map(str, _BATCH_NORMS))
"""The names of ops with statistics over the batch, which are expanded if the batch is split."""
