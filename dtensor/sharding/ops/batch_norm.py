"""Batch norm of a split batch in training, as ops with short rules.

    mean = sum(x[n c ..]) / count                [c]
    q    = bn_squares(x, mean)                   [c]       sum of (x - mean)^2, not of x^2 - mean^2
    y    = bn_apply(x, mean, scale, shift)       [n c ..]  (x - mean) scale + shift
    s    = bn_sums(grad, x, mean)                [2 c]     sums of grad, and of grad (x - mean)
    d    = bn_backward(grad, x, mean, a, b, e)   [n c ..]  a grad - b (x - mean) - e

The ranks reduce c numbers twice in the forward and 2c numbers in the backward, as SyncBatchNorm
does. Statistics are float32 for 16-bit dtypes. If the batch is whole, the planner uses torch's
fused op (plan/choose/choose_composites.py).
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import define


def _reduced_dims(x: Tensor) -> list[int]:
    """Return all dims but the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(x: Tensor, vector: Tensor) -> Tensor:
    """Return a vector over the channels as a view that broadcasts against x."""
    return vector.view(1, -1, *(1 for _ in range(x.dim() - 2)))


def _empty_statistic(x: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor ``[*shape, c]`` in the dtype of statistics."""
    return x.new_empty((*shape, x.shape[1]), dtype=accumulation_dtype(x.dtype))


def _bn_squares(x: Tensor, mean: Tensor) -> Tensor:
    return (x - _per_channel(x, mean)).square_().sum(_reduced_dims(x))


def _bn_apply(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = (x - _per_channel(x, mean)).mul_(_per_channel(x, scale)).add_(_per_channel(x, shift))
    return y.to(x.dtype)


def _bn_sums(grad: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """Return [2, c]: the sums over the batch of grad, and of grad * (x - mean)."""
    deviation = x - _per_channel(x, mean)
    wide = grad.to(deviation.dtype)
    dims = _reduced_dims(x)
    return torch.stack([wide.sum(dims), deviation.mul_(wide).sum(dims)])


def _bn_backward(grad: Tensor, x: Tensor, mean: Tensor, a: Tensor, b: Tensor, e: Tensor) -> Tensor:
    """Return the gradient of x: a grad - (b (x - mean) + e)."""
    correction = (x - _per_channel(x, mean)).mul_(_per_channel(x, b)).add_(_per_channel(x, e))
    return (grad * _per_channel(x, a) - correction).to(x.dtype)


define(
    "bn_squares(Tensor x, Tensor mean) -> Tensor",
    _bn_squares,
    lambda x, mean: _empty_statistic(x),
)
define(
    "bn_apply(Tensor x, Tensor mean, Tensor scale, Tensor shift) -> Tensor",
    _bn_apply,
    lambda x, mean, scale, shift: x.new_empty(x.shape),
)
define(
    "bn_sums(Tensor grad, Tensor x, Tensor mean) -> Tensor",
    _bn_sums,
    lambda grad, x, mean: _empty_statistic(x, 2),
)
define(
    "bn_backward(Tensor grad, Tensor x, Tensor mean, Tensor a, Tensor b, Tensor e) -> Tensor",
    _bn_backward,
    lambda grad, x, mean, a, b, e: x.new_empty(x.shape),
)
