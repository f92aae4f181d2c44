"""Dropout in Triton, with or without a residual sum, by dtensor's random numbers.

    y, kept = dropout(x, p, at_seed=7, at_step=3, op=0, shape=[8, 512, 1024], pieces=[...])
    y, kept = dropout_add(x, residual, p, ...)
    dx = dropout_backward(grad, kept, p)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU.
Random words are Philox-4x32-10 with the counter (column // 4, row, step, op) and the seed as key;
row and column are global, so the mask does not depend on device or placement. Seed and step may be
numbers, or i64[] on the GPU.

Invariants: masks and values have the op's bits: the product is rounded before the sum. Float64 and
empty tensors go to the op.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import rows_of, takes
from dtensor.kernels.launches import DROPOUT, DROPOUT_BACKWARD, GROUP, within

_MASK = 0xFFFFFFFF

Dims = list[list[tuple[int, int]]]


def dropout(
    x: Tensor,
    p: float,
    *,
    at_seed: int | Tensor,
    at_step: int | Tensor,
    op: int,
    shape: Sequence[int] | None = None,
    pieces: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y[...] and the mask kept, bool[...], of x[...]."""
    at = {"at_seed": at_seed, "at_step": at_step, "op": op, "shape": shape, "pieces": pieces}
    if not _is_supported(x):
        return _op(torch.ops.dt.dropout, at_seed)(x, p, **at)
    return _run_dropout(x, None, p, **at)


def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    *,
    at_seed: int | Tensor,
    at_step: int | Tensor,
    op: int,
    shape: Sequence[int] | None = None,
    pieces: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y[...] = dropout(x[...]) + residual[...] and the mask kept, bool[...]."""
    at = {"at_seed": at_seed, "at_step": at_step, "op": op, "shape": shape, "pieces": pieces}
    if not _is_supported(x, residual):
        return _op(torch.ops.dt.dropout_add, at_seed)(x, residual, p, **at)
    return _run_dropout(x, residual, p, **at)


def _op(packet: Any, at_seed: int | Tensor) -> Any:
    """Return the overload that takes this kind of seed. Given a tensor for an int, torch would read
    the tensor."""
    return packet.on_device if isinstance(at_seed, Tensor) else packet.default


def _is_supported(x: Tensor, *others: Tensor) -> bool:
    if not takes(x, *others) or x.numel() == 0:
        return False
    columns = x.shape[-1] if x.dim() else 1
    return within(x.numel() // columns * DROPOUT.at(1, GROUP - 1, GROUP - 1 + columns).blocks)


def dropout_backward(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    """Return dx[...] of grad[...] and the mask kept, bool[...]."""
    if not takes(grad) or grad.numel() == 0:
        return torch.ops.dt.dropout_backward(grad, kept, p)
    dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    count = grad.numel()
    at = DROPOUT_BACKWARD.at(count)
    _dropout_backward[at.grid](
        grad.contiguous(), kept.contiguous(), dx, count, 1 / (1 - p) if p < 1 else 0.0,
        EDGES=count % GROUP != 0, **at.options,
    )  # fmt: skip
    return dx


def _run_dropout(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    *,
    at_seed: int | Tensor,
    at_step: int | Tensor,
    op: int,
    shape: Sequence[int] | None,
    pieces: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for each interval of columns that this rank has; return y and the mask."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    rows, stride = rows_of(x if x.dim() else x[None])
    others, other_stride = (rows, 0)
    if residual is not None:
        others, other_stride = rows_of(residual if residual.dim() else residual[None])
    sizes, dims = _global_intervals(tuple(x.shape), shape, pieces)
    first, row_table = _global_rows(sizes, dims, x.device)
    seed, step = (
        n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int64, device=x.device)
        for n in (at_seed, at_step)
    )
    column = 0  # the local one
    for start, stop in dims[-1] if dims else [(0, 1)]:
        at = DROPOUT.at(rows.shape[0], start, stop)
        _dropout[at.grid](
            rows, others, y, kept, kept if row_table is None else row_table, stride, other_stride,
            rows.shape[1], column, start, stop, at.blocks, first, seed, step, op & _MASK,
            round(p * 2**32), 1 / (1 - p) if p < 1 else 0.0, HAS_RESIDUAL=residual is not None,
            HAS_TABLE=row_table is not None, **at.options,
        )  # fmt: skip
        column += stop - start
    return y, kept


def _global_intervals(
    local: tuple[int, ...], shape: Sequence[int] | None, pieces: Sequence[int] | None
) -> tuple[Sequence[int], Dims]:
    """Return the global shape, and for each dim the intervals that this rank has."""
    if shape is None or pieces is None:
        return local, [[(0, n)] for n in local]
    dims: Dims = []
    at = 0
    for _ in shape:
        numbers = pieces[at + 1 : at + 1 + 2 * pieces[at]]
        dims.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
        at += 1 + len(numbers)
    local_sizes = tuple(sum(stop - start for start, stop in dim) for dim in dims)
    if local_sizes != local:
        raise ValueError(f"the pieces hold {local_sizes}, the local tensor is {local}")
    return shape, dims


def _global_rows(
    shape: Sequence[int], dims: Dims, device: torch.device
) -> tuple[int, Tensor | None]:
    """Return the global row of the first local row, and if the rows are not consecutive, a tensor
    with all global rows, else None."""
    if math.prod(shape[:-1]) > 1 << 32:
        raise ValueError(f"a tensor of shape {tuple(shape)} has more than 2**32 rows")
    first, count, adjacent = 0, 1, True
    for size, dim in zip(shape[:-1], dims[:-1], strict=True):
        whole = dim == [(0, size)]
        adjacent = len(dim) == 1 and (whole or count == 1) if adjacent else False
        first = first * size + dim[0][0]
        count *= sum(stop - start for start, stop in dim)
    if adjacent:
        return first, None
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, dim in zip(shape[:-1], dims[:-1], strict=True):
        index = torch.cat([torch.arange(a, b, device=device) for a, b in dim])
        rows = (rows[:, None] * size + index[None, :]).reshape(-1)
    return 0, rows


# -- in Triton -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_row", "SEED", "STEP", "op", "drop"])
def _dropout(
    X, RESIDUAL, Y, KEPT, ROWS, stride, residual_stride, length, column, start, stop, blocks,
    first_row, SEED, STEP, op, drop, scale,
    HAS_RESIDUAL: tl.constexpr, HAS_TABLE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute global columns start:stop of the rows; ``column``: the local column of ``start``."""
    row = tl.program_id(0).to(tl.int64) // blocks
    block = (tl.program_id(0) % blocks).to(tl.int64)
    first = start // GROUP * GROUP + block * BLOCK
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    if HAS_TABLE:
        c1 = zero + tl.load(ROWS + row).to(tl.uint32)
    else:
        c1 = zero + (first_row + row).to(tl.uint32)
    seed, step = tl.load(SEED), tl.load(STEP)
    w0, w1, w2, w3 = tl.philox_impl(
        c0, c1, zero + step.to(tl.uint32), zero + tl.cast(op, tl.uint32),
        zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK // GROUP, GROUP)
    keep = words.to(tl.int64) >= drop
    group = first + tl.arange(0, BLOCK // GROUP) * GROUP
    at = group[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (at >= start) & (at < stop)
    at += column - start
    x = tl.load(X + row * stride + at, mask=inside, other=0.0)
    y = (tl.where(keep, x.to(tl.float32) * scale, 0.0)).to(x.dtype)
    if HAS_RESIDUAL:
        other = tl.load(RESIDUAL + row * residual_stride + at, mask=inside, other=0.0)
        y = y.to(tl.float32) + other.to(tl.float32)
    tl.store(Y + row * length + at, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(KEPT + row * length + at, keep, mask=inside)


@triton.jit
def _dropout_backward_lanes(GRAD, KEPT, DX, c, inside, scale):
    grad = tl.load(GRAD + c, mask=inside, other=0.0).to(tl.float32)
    kept = tl.load(KEPT + c, mask=inside, other=0)
    tl.store(DX + c, tl.where(kept, grad * scale, 0.0).to(DX.dtype.element_ty), mask=inside)


@triton.jit
def _dropout_backward(
    GRAD, KEPT, DX, count, scale, GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    inside = ((group + 1) * GROUP <= count)[:, None] & (e >= 0)
    _dropout_backward_lanes(GRAD, KEPT, DX, group[:, None] * GROUP + e, inside, scale)
    if EDGES:
        last = count // GROUP * GROUP + tl.arange(0, GROUP)
        inside = (last < count) & (last // BLOCK == block)
        _dropout_backward_lanes(GRAD, KEPT, DX, last, inside, scale)
