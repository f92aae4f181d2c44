"""Replace random ops of the exported forward graph by counter-based dt ops.

    dropout(x, 0.1, True)          ->  dt.dropout(x, 0.1, op=0)[0]
    randn_like(x)                  ->  dt.random_normal([4, 8], f32, op=1)
    bernoulli(q)                   ->  dt.random_uniform([4, 8], f32, op=2) < q
    scaled_dot_product_attention(q, k, v, dropout_p=0.1)
                                   ->  dropout(softmax(q @ k.T * scale), 0.1, op=3) @ v

``op`` numbers the random ops in program order, so it does not depend on the batch size. Seed and
step are 0 here; a program gets the real ones at run time (`with_run_numbers`). As in torch,
probabilities, means and deviations have no gradients. refusals.py refuses other random ops.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

import dtensor.sharding.ops.attention  # noqa: F401  (registers the dt ops)
from dtensor.frontend.graph import Writer, bound

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_ANY_DTYPE = {aten.randint, aten.randint_like, aten.bernoulli, aten.bernoulli_}
_ALPHA = 1.7580993408473766  # of self-normalising networks, as in torch

MULTINOMIAL_FIX = (
    "torch.argmax(p / torch.empty_like(p).exponential_(), -1) draws one of each row of p, and "
    ".topk(n, -1).indices of the quotient n without replacement"
)
"""The fix for torch.multinomial."""


def randomise(
    graph: fx.Graph, node: fx.Node, numbers: Iterator[int], *, forward_mode: bool = False
) -> bool:
    """Rewrite a call of one of `RANDOM_OPS` in place; return whether it was rewritten.

    forward_mode: the call may be differentiated in forward mode. `dt.dropout` has no such
    derivative, so a dropout becomes a product with a dropped tensor of ones.
    """
    target: Any = node.target
    if target is dt.dropout_add.default:
        node.update_kwarg("op", next(numbers))
    elif target is aten.native_dropout.default:
        _native_dropout(_RandomCall(graph, node, numbers, forward_mode))
    elif target is aten.scaled_dot_product_attention.default and bound(node)["dropout_p"] > 0:
        c = _RandomCall(graph, node, numbers, forward_mode)
        c.replace(_attention_with_dropout(c))
    elif target in _REWRITES and _is_supported(node):
        c = _RandomCall(graph, node, numbers, forward_mode)
        if not target._schema.is_mutable:
            c.replace(_REWRITES[target](c))
        else:
            c.replace(c(aten.copy_.default, c.x, _REWRITES[target](c)))
    else:
        return False
    return True


def _is_supported(node: fx.Node) -> bool:
    """Return whether dt ops can draw the numbers: without a user's generator, in a known dtype."""
    if bound(node).get("generator") is not None:
        return False
    target: Any = node.target
    return target.overloadpacket in _ANY_DTYPE or node.meta["val"].dtype in _FLOATS


class _RandomCall(Writer):
    """A `Writer` that replaces one random call.

    a: the call's arguments by name. out: its fake result. x: its first tensor argument. numbers:
    the numbers of later random ops."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, numbers: Iterator[int], forward_mode: bool
    ) -> None:
        super().__init__(graph, node)
        self.numbers = numbers
        self.forward_mode = forward_mode
        self.a = bound(node)
        self.x: Any = self.a.get("input", self.a.get("self"))
        val = node.meta["val"]
        self.out: torch.Tensor = val[0] if isinstance(val, (tuple, list)) else val

    def key(self) -> dict[str, int]:
        """Return the keywords of the next random op."""
        return {"at_seed": 0, "at_step": 0, "op": next(self.numbers)}

    def dropout(self, x: fx.Node, p: float) -> fx.Node:
        if self.forward_mode:
            self.forward_mode = False  # for the dropout of ones, which have no tangent
            return self(aten.mul.Tensor, x, self.dropout(self(aten.ones_like.default, x), p))
        return self(operator.getitem, self(dt.dropout.default, x, p, **self.key()), 0)

    def call_factory(self, op: Any, *args: Any, shape: Any = None, dtype: Any = None) -> fx.Node:
        """Call a dt factory, by default with the shape and dtype of the call's result."""
        size = list(self.out.shape if shape is None else shape)
        device = torch.device("cpu")
        node = self(op, size, *args, dtype or self.out.dtype, device=device, **self.key())
        node.meta["val"] = self.out.new_empty(size, dtype=dtype or self.out.dtype)
        return node

    def uniform(self, shape: Any = None, dtype: torch.dtype | None = None) -> fx.Node:
        return self.call_factory(dt.random_uniform.default, shape=shape, dtype=dtype)

    def normal(self) -> fx.Node:
        return self.call_factory(dt.random_normal.default)

    def scale_and_shift(self, x: fx.Node, factor: float, offset: float) -> fx.Node:
        """Return x * factor + offset."""
        x = x if factor == 1 else self(aten.mul.Tensor, x, factor)
        return x if offset == 0 else self(aten.add.Tensor, x, offset)

    def cast_mask(self, mask: fx.Node) -> fx.Node:
        """Cast a mask to the dtype of the call's result."""
        return self.cast(mask, torch.bool, self.out.dtype)


# -- dropout -------------------------------------------------------------------------------------


def _dropout(c: _RandomCall) -> fx.Node:
    return c.dropout(c.x, c.a["p"])


def _feature_dropout(c: _RandomCall) -> fx.Node:
    """Drop whole channels: draw one number for each channel of each sample."""
    ones = c(
        aten.full.default, _channel_shape(c), 1.0, dtype=c.out.dtype, device=torch.device("cpu")
    )
    return c(aten.mul.Tensor, c.x, c.dropout(ones, c.a["p"]))


def _channel_shape(c: _RandomCall) -> list[int]:
    return [*c.out.shape[:2], *[1] * (c.out.dim() - 2)]


def _alpha_dropout(c: _RandomCall, shape: list[int] | None) -> fx.Node:
    """Alpha dropout: set dropped elements to the limit of SELU for -inf, and scale and shift the
    result so that mean and variance stay the same."""
    p = c.a["p"]
    if p == 1:
        return c(aten.mul.Tensor, c.x, 0.0)
    a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    mask = c.cast_mask(c(aten.ge.Scalar, c.uniform(shape, torch.float32), p))
    offset = c.scale_and_shift(mask, _ALPHA * a, _ALPHA * a * (p - 1))
    noise = c(aten.mul.Tensor, mask, a)
    return c(aten.add.Tensor, c(aten.mul.Tensor, c.x, noise), offset)


def _native_dropout(c: _RandomCall) -> None:
    """Replace native_dropout, which also returns its mask. It is the identity unless ``train``."""
    x, p = c.x, c.a["p"]
    if c.a["train"] is False:
        ones = c(aten.ones_like.default, x, dtype=torch.bool)
        parts = [c(aten.clone.default, x), ones]
    else:
        pair = c(dt.dropout.default, x, p, **c.key())
        parts = [c(operator.getitem, pair, 0), c(operator.getitem, pair, 1)]
    for user in list(c.node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(parts[int(user.args[1])])  # type: ignore[arg-type]
        c.graph.erase_node(user)
    c.graph.erase_node(c.node)


def _attention_with_dropout(c: _RandomCall) -> fx.Node:
    """Return attention as matmul and softmax, because dropout is applied to the weights."""
    q, k, v, mask = (c.a[n] for n in ("query", "key", "value", "attn_mask"))
    dtype = c.out.dtype
    q, k, v = (c.cast(x, x.meta["val"].dtype, dtype) for x in (q, k, v))
    query_shape, key_shape = c.a["query"].meta["val"].shape, c.a["key"].meta["val"].shape
    if c.a["enable_gqa"] and query_shape[-3] != key_shape[-3]:
        repeats = query_shape[-3] // key_shape[-3]
        k, v = (c(aten.repeat_interleave.self_int, x, repeats, -3) for x in (k, v))
    scale = c.a["scale"] if c.a["scale"] is not None else 1 / math.sqrt(query_shape[-1])
    scores = c(aten.matmul.default, c(aten.mul.Tensor, q, scale), c(aten.transpose.int, k, -2, -1))
    if c.a["is_causal"]:
        size, device = [query_shape[-2], key_shape[-2]], torch.device("cpu")
        ones = c(aten.full.default, size, True, dtype=torch.bool, device=device)
        above = c(aten.triu.default, ones, 1)
        scores = c(aten.masked_fill.Scalar, scores, above, -math.inf)
    elif mask is not None and mask.meta["val"].dtype == torch.bool:
        hidden = c(aten.logical_not.default, mask)
        scores = c(aten.masked_fill.Scalar, scores, hidden, -math.inf)
    elif mask is not None:
        scores = c(aten.add.Tensor, scores, mask)
    half = dtype in (torch.float16, torch.bfloat16)
    softmax_dtype = torch.float32 if half else dtype
    weights = c(aten._safe_softmax.default, c.cast(scores, dtype, softmax_dtype), -1)
    dropped = c.dropout(c.cast(weights, softmax_dtype, dtype), c.a["dropout_p"])
    return c(aten.matmul.default, dropped, v)


# -- numbers -------------------------------------------------------------------------------------


def _integers(c: _RandomCall) -> fx.Node:
    low, high = c.a.get("low", 0), c.a["high"]
    return c.call_factory(dt.random_integers.default, low, high)


def _bernoulli(c: _RandomCall, p: Any) -> fx.Node:
    """Draw 1 with probability p, a number or a tensor; else 0."""
    if not isinstance(p, fx.Node):
        return c.cast_mask(c(aten.lt.Scalar, c.uniform(dtype=torch.float32), p))
    dtype = p.meta["val"].dtype
    uniform_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    p = c.cast(c(aten.detach.default, p), dtype, uniform_dtype)
    return c.cast_mask(c(aten.lt.Tensor, c.uniform(dtype=uniform_dtype), p))


def _normal(c: _RandomCall) -> fx.Node:
    """Draw mean + std * z."""
    z = c.normal()
    for op, value in ((aten.mul.Tensor, c.a["std"]), (aten.add.Tensor, c.a["mean"])):
        if isinstance(value, fx.Node):
            z = c(op, z, c(aten.detach.default, value))
        elif value != (1 if op is aten.mul.Tensor else 0):
            z = c(op, z, value)
    return z


def _uniform(c: _RandomCall) -> fx.Node:
    low, high = c.a["from"], c.a["to"]
    return c.scale_and_shift(c.uniform(), high - low, low)


def _exponential(c: _RandomCall) -> fx.Node:
    """Draw -log(1 - u) / rate, clamped above 0 so that the logarithm of the result is finite."""
    u = c(aten.neg.default, c.uniform())
    sample = c(aten.neg.default, c(aten.log1p.default, u))
    sample = c(aten.clamp.default, sample, torch.finfo(c.out.dtype).tiny)
    return c.scale_and_shift(sample, 1 / c.a["lambd"], 0)


def _cauchy(c: _RandomCall) -> fx.Node:
    sample = c(aten.tan.default, c.scale_and_shift(c.uniform(), math.pi, -math.pi / 2))
    return c.scale_and_shift(sample, c.a["sigma"], c.a["median"])


def _rrelu(c: _RandomCall) -> fx.Node:
    """Draw a slope for each element in training; else use the mean slope."""
    low, high = c.a["lower"], c.a["upper"]
    if not c.a["training"]:
        return c(aten.leaky_relu.default, c.x, (low + high) / 2)
    slopes = c.scale_and_shift(c.uniform(), high - low, low)
    negative_part = c(aten.mul.Tensor, c.x, slopes)
    return c(aten.where.self, c(aten.gt.Scalar, c.x, 0), c.x, negative_part)


_REWRITES: dict[Any, Callable[[_RandomCall], fx.Node]] = {
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout,
    aten.feature_dropout.default: _feature_dropout,
    aten.feature_dropout_.default: _feature_dropout,
    aten.alpha_dropout.default: lambda c: _alpha_dropout(c, None),
    aten.alpha_dropout_.default: lambda c: _alpha_dropout(c, None),
    aten.feature_alpha_dropout.default: lambda c: _alpha_dropout(c, _channel_shape(c)),
    aten.feature_alpha_dropout_.default: lambda c: _alpha_dropout(c, _channel_shape(c)),
    aten.cauchy.default: _cauchy,
    aten.cauchy_.default: _cauchy,
    aten.log_normal_.default: lambda c: c(aten.exp.default, _normal(c)),
    aten.rrelu.default: _rrelu,
    aten.rrelu_.default: _rrelu,
    aten.rand.default: lambda c: c.uniform(),
    aten.rand_like.default: lambda c: c.uniform(),
    aten.uniform_.default: _uniform,
    aten.randn.default: lambda c: c.normal(),
    aten.randn_like.default: lambda c: c.normal(),
    aten.normal.float_float: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal_.default: _normal,
    aten.exponential_.default: _exponential,
    aten.bernoulli.default: lambda c: _bernoulli(c, c.x),
    aten.bernoulli.p: lambda c: _bernoulli(c, c.a["p"]),
    aten.bernoulli_.float: lambda c: _bernoulli(c, c.a["p"]),
    aten.bernoulli_.Tensor: lambda c: _bernoulli(c, c.a["p"]),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
}
RANDOM_OPS = {
    *_REWRITES,
    aten.native_dropout.default,
    dt.dropout_add.default,
    aten.scaled_dot_product_attention.default,
}
