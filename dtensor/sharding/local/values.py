"""What ranks run in place of an op whose local form differs from its global one.

    mean_over(x_shard, (0,), False, 8, None)      # a shard of 4 of 8 rows: its sum over 8

Localizers name these functions; local graphs call them, so they are plain functions at module
level. Invariants: tensors in, tensors out, no communication; right for shards of size 0.
Not here: who calls what (the rules), or the project's own ops (ops/attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pieces = Sequence[tuple[int, int]]


def mean_over(
    x: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None
) -> Tensor:
    """The local sum over the global count: the ranks' results add up to the mean."""
    return torch.sum(x, tuple(dims), keepdim=keepdim, dtype=dtype) / count


def filled(
    x: Tensor, shape: Sequence[int], value: float | bool, dtype: torch.dtype | None = None
) -> Tensor:
    """A new tensor where x is: a reduction's identity, for ranks that hold nothing to reduce."""
    return x.new_full(tuple(shape), value, dtype=dtype)


def arange_pieces(
    pieces: Pieces,
    start: float,
    step: float,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """The elements of arange at these global positions."""
    parts = [torch.arange(lo, hi, dtype=torch.int64, device=device) for lo, hi in pieces]
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    where = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (where * step + start).to(dtype)


def triangle(x: Tensor, upper: bool, diagonal: int, rows: Pieces, columns: Pieces) -> Tensor:
    """tril or triu of a shard that holds these rows and columns of the global matrices."""
    i = arange_pieces(rows, 0, 1, dtype=torch.int64, device=x.device)[:, None]
    j = arange_pieces(columns, 0, 1, dtype=torch.int64, device=x.device)[None, :]
    keep = j - i >= diagonal if upper else j - i <= diagonal
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def mse_loss_over(x: Tensor, y: Tensor, count: int) -> Tensor:
    """The local part of mse_loss(reduction="mean") over ``count`` elements in all."""
    return (x - y).square().sum() / count


def mse_loss_backward_over(grad: Tensor, x: Tensor, y: Tensor, count: int) -> Tensor:
    """Its gradient for x: the global count divides, not the local one."""
    return (x - y) * (2.0 / max(count, 1)) * grad  # of no elements: empty


def strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """as_strided of a contiguous tensor, whatever strides x has here."""
    return x.contiguous().as_strided(size, stride, offset).clone()


def strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """as_strided_scatter into a contiguous tensor."""
    return torch.as_strided_scatter(x.contiguous(), source, size, stride, offset)
