"""Batch norm in training as ops that a split batch takes: its form in `composite`.

    _native_batch_norm_legit_functional(x, w, b, ..)  ->  sum, bn_squares, bn_apply, a few of [c]
    native_batch_norm_backward(g, x, w, ..)           ->  bn_sums, bn_backward, a few of [c]

What is computed over the batch are sums over it, divided by the global count. Torch's own
decompositions sum three times and make five copies of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import dtensor.sharding.ops.batch_norm  # noqa: F401  (registers the ops)

aten = torch.ops.aten


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, int]:
    """Mean, biased variance, 1 / standard deviation, and the number of elements per channel."""
    count = math.prod(x.shape) // x.shape[1]
    over = [d for d in range(x.dim()) if d != 1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = aten.sum.dim_IntList(x, over, dtype=dtype) / count
    var = torch.ops.dt.bn_squares(x, mean) / count
    return mean, var, (var + eps).rsqrt(), count


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    scale = invstd if weight is None else invstd * weight
    shift = torch.zeros_like(mean) if bias is None else bias
    return torch.ops.dt.bn_apply(x, mean, scale, shift)


def _functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...] | None:
    if not training:
        return None
    mean, var, invstd, count = _statistics(x, eps)
    y = _normalised(x, weight, bias, mean, invstd)
    unbiased = var * (count / max(count - 1, 1))
    old = 1 - momentum
    return (
        y,
        mean,
        invstd,
        (running_mean * old + mean * momentum).to(running_mean.dtype),
        (running_var * old + unbiased * momentum).to(running_var.dtype),
    )


def _no_stats(
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


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    train: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    if not train:
        return None
    count = math.prod(x.shape) // x.shape[1]
    sums = torch.ops.dt.bn_sums(grad, x, mean)
    plain, against = sums.select(0, 0), sums.select(0, 1)
    a = invstd if weight is None else invstd * weight
    b = a * invstd * invstd * against / count
    dx = torch.ops.dt.bn_backward(grad, x, mean, a, b, a * plain / count) if wanted[0] else None
    narrow = x.dtype if weight is None else weight.dtype
    return (
        dx,
        (against * invstd).to(narrow) if wanted[1] else None,
        plain.to(narrow) if wanted[2] else None,
    )


FORMS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: _functional,
    aten._native_batch_norm_legit.no_stats: _no_stats,
    aten.native_batch_norm_backward.default: _backward,
}
