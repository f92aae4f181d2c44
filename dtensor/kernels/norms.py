"""RMSNorm in Triton, forward and backward, and RMSNorm and LayerNorm of a residual sum.

    y, rstd = rms_norm(x[... k], weight[k], eps, offset, inner, out)
    dx, dweight = rms_norm_backward(grad, x, rstd, weight, offset)
    total, y, rstd = add_rms_norm(x, residual, weight, eps, offset, inner, out)
    total, y, mean, rstd = add_layer_norm(x, residual, weight, bias, eps)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU. A
program reads each row once; in the backward it writes its part of dweight as a row of a float32
matrix, which is summed afterwards. The kernels compute in float32, and round and lay out results as
the op does. Float64, empty tensors and rows longer than 16,384 elements (8,192 if 8 does not divide
them) go to the op.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import rows_of, sum_rows, takes, triton_type
from dtensor.kernels.launches import (
    LAYER_NORM_ROW,
    NORM_ROW,
    NORM_ROWS_BACKWARD,
    in_groups,
    max_row,
    parts_of,
    within,
)
from dtensor.kernels.strides import laid_as


def _is_supported(x: Tensor, *others: Tensor) -> bool:
    if not takes(x, *others) or x.numel() == 0 or x.dim() == 0:
        return False
    length = x.shape[-1]
    return length <= max_row(in_groups(length)) and within(x.numel() // length)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, inner: torch.dtype, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y[... k] of dtype ``out`` and rstd[... 1] in float32, for x[... k] and weight[k]."""
    if not _is_supported(x, weight):
        return torch.ops.dt.rms_norm(x, weight, eps, offset, inner, out)
    _, y, rstd = _rms_norm(x, None, weight, eps, offset, inner, out)
    return y, rstd


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    inner: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return total[... k] = x + residual, y[... k] of dtype ``out``, and rstd[... 1]."""
    if not _is_supported(x, residual, weight):
        return torch.ops.dt.add_rms_norm(x, residual, weight, eps, offset, inner, out)
    return _rms_norm(x, residual, weight, eps, offset, inner, out)


def _rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    inner: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, stride = rows_of(x)
    others, other_stride = (rows, 0) if residual is None else rows_of(residual)
    total = rows if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=out, device=x.device)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    product = inner if offset == 0 else torch.float32
    product = torch.promote_types(product, weight.dtype)
    length = x.shape[-1]
    at = NORM_ROW.at(rows.shape[0], length, in_groups(length, stride, other_stride))
    _rms_norm_row[at.grid](
        rows, others, weight.contiguous(), total, y, rstd, stride, other_stride, length, eps,
        offset, HAS_RESIDUAL=residual is not None, INNER=triton_type(inner),
        PRODUCT=triton_type(product), **at.options,
    )  # fmt: skip
    return laid_as(x, total) if residual is not None else total, laid_as(x, y), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return dx[... k] of x's dtype and dweight[k]; grad[... k], x[... k], rstd[... 1],
    weight[k]."""
    if not _is_supported(x, grad, weight, rstd):
        return torch.ops.dt.rms_norm_backward(grad, x, rstd, weight, offset)
    (grads, grad_stride), (rows, stride) = rows_of(grad), rows_of(x)
    programs, each = parts_of(rows.shape[0])
    length = x.shape[-1]
    at = NORM_ROWS_BACKWARD.at(rows.shape[0], length, in_groups(length, stride, grad_stride))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty((programs, length), dtype=torch.float32, device=x.device)
    _rms_norm_backward_rows[at.grid](
        grads, rows, rstd.contiguous(), weight.contiguous(), dx, parts, grad_stride, stride,
        rows.shape[0], length, each, offset, **at.options,
    )  # fmt: skip
    return laid_as(x, dx), sum_rows(parts, weight.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return total = x + residual, y, mean[... 1] and rstd[... 1] in float32; x, residual[...
    k]."""
    if not _is_supported(x, residual, weight, bias):
        return torch.ops.dt.add_layer_norm(x, residual, weight, bias, eps)
    (rows, stride), (others, other_stride) = rows_of(x), rows_of(residual)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty_like(total)
    mean = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    length = x.shape[-1]
    at = LAYER_NORM_ROW.at(rows.shape[0], length, in_groups(length, stride, other_stride))
    _layer_norm_row[at.grid](
        rows, others, weight.contiguous(), bias.contiguous(), total, y, mean, rstd, stride,
        other_stride, length, eps, **at.options,
    )  # fmt: skip
    return laid_as(x, total), y, mean, rstd


# -- in Triton -------------------------------------------------------------------------------------


@triton.jit
def _row(X, at, inside):
    return tl.load(X + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm_row(
    X, RESIDUAL, WEIGHT, TOTAL, Y, RSTD, stride, residual_stride, length, eps, offset,
    HAS_RESIDUAL: tl.constexpr, INNER: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < length
    x = _row(X, row * stride + c, inside)
    if HAS_RESIDUAL:
        total = (x + _row(RESIDUAL, row * residual_stride + c, inside)).to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + row * length + c, total, mask=inside)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / length + eps)
    n = (x * rstd).to(INNER).to(tl.float32)
    y = (n * (_row(WEIGHT, c, inside) + offset)).to(PRODUCT)
    tl.store(Y + row * length + c, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(RSTD + row, rstd)


@triton.jit
def _rms_norm_backward_rows(
    GRAD, X, RSTD, WEIGHT, DX, PARTS, grad_stride, stride, num_rows, length, rows_each, offset,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``KEPT``: the weight stays in registers, which is possible only for short rows."""
    part = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < length
    if KEPT:
        weight = _row(WEIGHT, c, inside) + offset
    dweight = tl.zeros([BLOCK], tl.float32)
    first = part * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        rstd = tl.load(RSTD + row)
        n = _row(X, row * stride + c, inside) * rstd
        grad = _row(GRAD, row * grad_stride + c, inside)
        dweight += grad * n
        if not KEPT:
            weight = _row(WEIGHT, c, inside) + offset
        grad *= weight
        dx = rstd * (grad - n * (tl.sum(grad * n, 0) / length))
        tl.store(DX + row * length + c, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTS + part * length + c, dweight, mask=inside)


@triton.jit
def _layer_norm_row(
    X, RESIDUAL, WEIGHT, BIAS, TOTAL, Y, MEAN, RSTD, stride, residual_stride, length, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < length
    x = _row(X, row * stride + c, inside) + _row(RESIDUAL, row * residual_stride + c, inside)
    total = x.to(TOTAL.dtype.element_ty)
    tl.store(TOTAL + row * length + c, total, mask=inside)
    x = total.to(tl.float32)
    mean = tl.sum(x, 0) / length
    x = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / length + eps)
    y = x * rstd * _row(WEIGHT, c, inside) + _row(BIAS, c, inside)
    tl.store(Y + row * length + c, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)
