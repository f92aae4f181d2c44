"""Match RMS norms that a program writes out, around their rsqrt, and sums before norms.

    wide = x.float()                                                 dt.rms_norm(x, weight, eps,
    normed = wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)      0.0, bf16, bf16)[0]
    weight * normed.to(x.dtype)

    (normed * (1.0 + weight.float())).type_as(x)                     ..., 1.0, f32, bf16)[0]

    norm(residual + x)                      total, y, _ = dt.add_rms_norm(x, residual, weight, ...)

Invariants: the dt op runs the replaced ops in the same order and dtypes, so it rounds equally. No
intermediate value is used elsewhere. A sum is fused only with a norm of the same layer.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.layers import layer_of
from dtensor.frontend.capture.recognise.constants import Writes
from dtensor.frontend.capture.recognise.matching import (
    CASTS,
    NoMatch,
    check_same_checkpoint,
    dtype,
    is_op,
    is_plain,
    is_tensor,
    other_operand,
    replace_node,
    shape,
    sole_user,
    uncast,
    users,
)
from dtensor.frontend.graph import Writer, bound
from dtensor.numerics import accumulation_dtype

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt

_ADDS = (aten.add.Tensor, aten.add.Scalar)
_USED_ELSEWHERE = "an intermediate value is used elsewhere"


def rewrite_rms_norm(graph: fx.Graph, rsqrt: fx.Node, writes: Writes) -> tuple[str, fx.Node]:
    """Rewrite an RMS norm; return the op's name and the last replaced node. Raises NoMatch."""
    wide, eps, nodes = _match_rsqrt(rsqrt)
    source = uncast(wide)
    if accumulation_dtype(dtype(source)) != dtype(wide):
        source = wide
    if accumulation_dtype(dtype(wide)) != dtype(wide):
        raise NoMatch(f"its squares are computed in {_dtype_name(dtype(wide))}")
    normed = sole_user(rsqrt, aten.mul.Tensor)
    if normed is None:
        raise NoMatch(_USED_ELSEWHERE if len(users(rsqrt)) > 1 else "")
    if other_operand(normed, rsqrt) not in (wide, source):
        raise NoMatch("it scales another value than it squares")
    rounded = sole_user(normed, *CASTS) or normed
    last = sole_user(rounded, aten.mul.Tensor)
    if last is None or not is_tensor(other_operand(last, rounded)):
        raise NoMatch("it has no weight, or more than one reads it")
    weight, offset, scaling = _match_weight(other_operand(last, rounded), wide)
    if shape(weight) != shape(wide)[-1:] or shape(last) != shape(wide):
        raise NoMatch("its weight has another shape than its rows")
    narrowed = sole_user(last, *CASTS)
    nodes = [*nodes, rsqrt, normed, rounded, *scaling, last]
    if narrowed is not None and dtype(last) == dtype(wide):
        last = narrowed
        nodes.append(last)
    check_same_checkpoint(nodes)
    if writes.between(wide, last):
        raise NoMatch("an op changes a value in place within it")
    options = (eps, offset, dtype(rounded), dtype(last))
    total = _fusable_sum(source, last, (weight,), writes)
    if total is None:
        call = Writer(graph, last)
        pair = call(dt.rms_norm.default, source, weight, *options)
        replace_node(graph, last, call(operator.getitem, pair, 0))
        return "dt.rms_norm", last
    _add_and_norm(graph, total, last, dt.add_rms_norm.default, weight, *options)
    return "dt.add_rms_norm", last


def rewrite_layer_norm(graph: fx.Graph, node: fx.Node, writes: Writes) -> tuple[str, fx.Node]:
    """Fuse a layer norm with the sum that it reads, in place; return the op's name and the norm.
    The norm stays unchanged if it reads no sum of its layer."""
    a = bound(node)
    x, weight, bias = a["input"], a["weight"], a["bias"]
    # Under CUDA autocast the result is float32, whatever the dtypes of the operands.
    same_dtypes = [w is not None and dtype(w) == dtype(x) == dtype(node) for w in (weight, bias)]
    total = _fusable_sum(x, node, (weight, bias), writes) if all(same_dtypes) else None
    if total is None or len(a["normalized_shape"]) != 1:
        return "native_layer_norm", node
    _add_and_norm(graph, total, node, dt.add_layer_norm.default, weight, bias, a["eps"])
    return "dt.add_layer_norm", node


def _add_and_norm(graph: fx.Graph, total: fx.Node, norm: fx.Node, op: Any, *norm_args: Any) -> None:
    """Replace a sum and its norm by ``op``, which is named after the line of the sum."""
    call = Writer(graph, total)
    parts = call(op, *total.args, *norm_args)
    y = call(operator.getitem, parts, 1)
    replace_node(graph, total, call(operator.getitem, parts, 0))
    replace_node(graph, norm, y)


def _match_rsqrt(rsqrt: fx.Node) -> tuple[fx.Node, float, list[fx.Node]]:
    """Match rsqrt(mean(x * x) + eps); return x, eps and the nodes between. Raises NoMatch."""
    shifted = rsqrt.args[0]
    if not is_op(shifted, *_ADDS) or not is_plain(shifted):
        raise NoMatch("")
    mean, eps = shifted.args[:2]
    if not is_op(mean, aten.mean.dim) or not isinstance(eps, (int, float)):
        raise NoMatch("")  # not a mean of squares with a fixed eps
    a = bound(mean)
    squared = a["self"]
    if list(a["dim"]) not in ([-1], [squared.meta["val"].dim() - 1]) or not a["keepdim"]:
        raise NoMatch("its mean is not over the last dim alone")
    if a["dtype"] is not None or isinstance(eps, bool):
        raise NoMatch("its mean sets another dtype")
    is_product = is_op(squared, aten.mul.Tensor) and squared.args[0] is squared.args[1]
    is_power = is_op(squared, aten.pow.Tensor_Scalar) and squared.args[1] == 2
    is_square = is_product or is_power or is_op(squared, aten.square.default)
    wide: Any = squared.args[0] if is_square else None
    if not isinstance(wide, fx.Node):
        raise NoMatch("")
    if any(len(users(node)) > 1 for node in (squared, mean, shifted)):
        raise NoMatch(_USED_ELSEWHERE)
    return wide, float(eps), [squared, mean, shifted]


def _match_weight(scale: fx.Node, wide: fx.Node) -> tuple[fx.Node, float, list[fx.Node]]:
    """Match weight or weight + offset; return the weight, the offset and the nodes that add it."""
    offset, nodes = 0.0, []
    if is_op(scale, *_ADDS) and isinstance(scale.args[1], (int, float)) and scale.args[1]:
        offset, weight = float(scale.args[1]), scale.args[0]
        if not is_plain(scale) or dtype(scale) != dtype(wide) or not is_tensor(weight):
            raise NoMatch(f"the offset of its weight is added in {_dtype_name(dtype(scale))}")
        nodes, scale = [scale], weight
    return (uncast(scale) if dtype(scale) == dtype(wide) else scale), offset, nodes


def _fusable_sum(
    source: fx.Node, last: fx.Node, weights: Sequence[fx.Node], writes: Writes
) -> fx.Node | None:
    """Return ``source`` if it is a sum that can be fused with the norm, else None."""
    if not is_op(source, aten.add.Tensor) or not is_plain(source):
        return None
    if not all(
        is_tensor(x) and shape(x) == shape(source) and dtype(x) == dtype(source)
        for x in source.args
    ):
        return None
    try:
        check_same_checkpoint((source, last))
    except NoMatch:
        return None
    fits = all(weight.op == "get_attr" for weight in weights) and not writes.between(source, last)
    # A sum of another layer would couple two layers that are differentiated separately.
    return source if fits and layer_of(source) == layer_of(last) else None


def _dtype_name(torch_dtype: torch.dtype) -> str:
    return str(torch_dtype).removeprefix("torch.")
