"""Batch norm in training as a short chain of ops, each with a rule of one line.

    mean = sum(x[n c ..]) / count                    [c]       the sum is aten's
    q    = bn_squares(x, mean)                       [c]       contracted: sum of (x - mean)^2
    y    = bn_apply(x, mean, scale, shift)           [n c ..]  elementwise: (x - mean) scale + shift
    s    = bn_sums(grad, x, mean)                    [2 c]     contracted: sums of grad, and of
                                                               grad (x - mean)
    d    = bn_backward(grad, x, mean, a, b, e)       [n c ..]  elementwise:
                                                               a grad - b (x - mean) - e

A batch that is split so costs two reductions of c numbers forward and one of 2c backward, as
SyncBatchNorm's does. The squares are of deviations from the whole batch's mean, not differences of
sums, which cancel.

Invariants: statistics are float32 for half dtypes; results have the dtype of x. The fused op of
torch stays where the batch is whole (plan/choose/choose_composites.py).
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import define


def _over(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(x: Tensor, vector: Tensor) -> Tensor:
    return vector.view(1, -1, *(1 for _ in range(x.dim() - 2)))


def _statistic(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty((*shape, x.shape[1]), dtype=accumulation_dtype(x.dtype))


def _bn_squares(x: Tensor, mean: Tensor) -> Tensor:
    return (x - _per_channel(x, mean)).square_().sum(_over(x))


def _bn_apply(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = (x - _per_channel(x, mean)).mul_(_per_channel(x, scale)).add_(_per_channel(x, shift))
    return y.to(x.dtype)


def _bn_sums(grad: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    deviation = x - _per_channel(x, mean)
    wide = grad.to(deviation.dtype)
    return torch.stack([wide.sum(_over(x)), deviation.mul_(wide).sum(_over(x))])


def _bn_backward(grad: Tensor, x: Tensor, mean: Tensor, a: Tensor, b: Tensor, e: Tensor) -> Tensor:
    deviation = (x - _per_channel(x, mean)).mul_(_per_channel(x, b)).add_(_per_channel(x, e))
    return (grad * _per_channel(x, a) - deviation).to(x.dtype)


define("bn_squares(Tensor x, Tensor mean) -> Tensor", _bn_squares, lambda x, mean: _statistic(x))
define(
    "bn_apply(Tensor x, Tensor mean, Tensor scale, Tensor shift) -> Tensor",
    _bn_apply,
    lambda x, mean, scale, shift: x.new_empty(x.shape),
)
define(
    "bn_sums(Tensor grad, Tensor x, Tensor mean) -> Tensor",
    _bn_sums,
    lambda grad, x, mean: _statistic(x, 2),
)
define(
    "bn_backward(Tensor grad, Tensor x, Tensor mean, Tensor a, Tensor b, Tensor e) -> Tensor",
    _bn_backward,
    lambda grad, x, mean, a, b, e: x.new_empty(x.shape),
)
