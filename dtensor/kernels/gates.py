"""Gates and activations in Triton, forward and backward, each in one pass over its operands.

    y = gated(a[... k], b[... k], kind)                    act(a) * b
    da, db = gated_backward(grad, a, b, kind)
    y = bias_gelu(x[... k], bias[k], kind)                 act(x + bias)
    dx, dbias = bias_gelu_backward(grad, x, bias, kind)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU.
``kind``: "silu", "gelu", "gelu_tanh", or "gelu_new" (gelu_tanh as separate steps). Contiguous
operands are one row. The kernels compute in float32, and round and lay out results as the op does.
Float64 and empty tensors go to the op.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import rows_of, sum_rows, takes
from dtensor.kernels.launches import (
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    GATED,
    GATED_BACKWARD,
    GROUP,
    parts_of,
    within,
)
from dtensor.kernels.strides import laid_as

_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "gelu_new": 2}


def _as_rows(*tensors: Tensor) -> tuple[list[Tensor], list[int], int, int]:
    """Return (matrices, the row stride of each and of the result, rows, columns).

    If all tensors are contiguous, they are one row with stride 0.
    """
    x = tensors[0]
    if all(t.is_contiguous() for t in tensors):
        return [t.reshape(-1) for t in tensors], [0] * (len(tensors) + 1), 1, x.numel()
    rows = [rows_of(t) for t in tensors]
    count = x.shape[-1]
    return [m for m, _ in rows], [*(s for _, s in rows), count], x.numel() // count, count


def gated(a: Tensor, b: Tensor, kind: str) -> Tensor:
    """Return act(a) * b for a[...] and b[...] of one shape and dtype."""
    if not takes(a, b) or a.numel() == 0:
        return torch.ops.dt.gated(a, b, kind)
    matrices, strides, num_rows, columns = _as_rows(a, b)
    at = GATED.at(num_rows, columns)
    if not within(at.grid[0]):
        return torch.ops.dt.gated(a, b, kind)
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    _gated[at.grid](
        *matrices, y, *strides, columns, at.blocks, KIND=_KINDS[kind], EDGES=columns % GROUP != 0,
        **at.options,
    )  # fmt: skip
    return laid_as(a, y)


def gated_backward(grad: Tensor, a: Tensor, b: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return da and db for grad[...], a[...] and b[...] of one shape."""
    if not takes(grad, a, b) or a.numel() == 0:
        return torch.ops.dt.gated_backward(grad, a, b, kind)
    matrices, strides, num_rows, columns = _as_rows(grad, a, b)
    at = GATED_BACKWARD.at(num_rows, columns)
    if not within(at.grid[0]):
        return torch.ops.dt.gated_backward(grad, a, b, kind)
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    _gated_backward[at.grid](
        *matrices, da, db, *strides, columns, at.blocks, KIND=_KINDS[kind],
        EDGES=columns % GROUP != 0, **at.options,
    )  # fmt: skip
    return laid_as(a, da), laid_as(b, db)


def _is_supported(x: Tensor, *others: Tensor) -> bool:
    if not takes(x, *others) or x.numel() == 0:
        return False
    columns = x.shape[-1]
    num_rows = x.numel() // columns
    return within(num_rows * BIAS_GELU.at(1, columns).blocks, columns)


def bias_gelu(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return act(x + bias) for x[... k] and bias[k]."""
    if not _is_supported(x, bias):
        return torch.ops.dt.bias_gelu(x, bias, kind)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, stride = rows_of(x)
    columns = x.shape[-1]
    at = BIAS_GELU.at(rows.shape[0], columns)
    _bias_gelu[at.grid](
        rows, bias.contiguous(), y, stride, columns, at.blocks, KIND=_KINDS[kind], **at.options
    )
    return laid_as(x, y)


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return dx[... k] and dbias[k] for grad[... k], x[... k] and bias[k]."""
    if not _is_supported(x, grad, bias):
        return torch.ops.dt.bias_gelu_backward(grad, x, bias, kind)
    (grads, grad_stride), (rows, stride) = rows_of(grad), rows_of(x)
    programs, each = parts_of(rows.shape[0])
    columns = x.shape[-1]
    at = BIAS_GELU_BACKWARD.at(rows.shape[0], columns)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    _bias_gelu_backward[at.grid](
        grads, rows, bias.contiguous(), dx, parts, grad_stride, stride, rows.shape[0], columns,
        each, KIND=_KINDS[kind], **at.options,
    )  # fmt: skip
    return laid_as(x, dx), sum_rows(parts, bias.dtype)


# -- in Triton -------------------------------------------------------------------------------------


@triton.jit
def _act(x, KIND: tl.constexpr):
    """Return silu(x), gelu(x), or gelu(x) by tanh, with tanh(z) = 2 * sigmoid(2 z) - 1."""
    if KIND == 0:
        return x * tl.sigmoid(x)
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _act_and_slope(x, KIND: tl.constexpr):
    """Return the activation of x and its derivative."""
    if KIND == 0:
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif KIND == 1:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * s, s + x * s * (1.0 - s) * inner


@triton.jit
def _gated_lanes(A, B, Y, c, inside, KIND: tl.constexpr):
    a = tl.load(A + c, mask=inside, other=0.0)
    b = tl.load(B + c, mask=inside, other=0.0).to(tl.float32)
    act = _act(a.to(tl.float32), KIND).to(a.dtype).to(tl.float32)
    tl.store(Y + c, (act * b).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _gated(
    A, B, Y, a_stride, b_stride, y_stride, columns, blocks,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // blocks
    block = tl.program_id(0).to(tl.int64) % blocks
    A += row * a_stride
    B += row * b_stride
    Y += row * y_stride
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    c = group[:, None] * GROUP + e
    _gated_lanes(A, B, Y, c, ((group + 1) * GROUP <= columns)[:, None] & (e >= 0), KIND)
    if EDGES:
        last = columns // GROUP * GROUP + tl.arange(0, GROUP)
        _gated_lanes(A, B, Y, last, (last < columns) & (last // BLOCK == block), KIND)


@triton.jit
def _gated_backward_lanes(G, A, B, DA, DB, c, inside, KIND: tl.constexpr):
    g = tl.load(G + c, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(A + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + c, mask=inside, other=0.0).to(tl.float32)
    act, slope = _act_and_slope(a, KIND)
    tl.store(DA + c, (g * b * slope).to(DA.dtype.element_ty), mask=inside)
    tl.store(DB + c, (g * act).to(DB.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    G, A, B, DA, DB, g_stride, a_stride, b_stride, d_stride, columns, blocks,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // blocks
    block = tl.program_id(0).to(tl.int64) % blocks
    G += row * g_stride
    A += row * a_stride
    B += row * b_stride
    DA += row * d_stride
    DB += row * d_stride
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    c = group[:, None] * GROUP + e
    inside = ((group + 1) * GROUP <= columns)[:, None] & (e >= 0)
    _gated_backward_lanes(G, A, B, DA, DB, c, inside, KIND)
    if EDGES:
        last = columns // GROUP * GROUP + tl.arange(0, GROUP)
        inside = (last < columns) & (last // BLOCK == block)
        _gated_backward_lanes(G, A, B, DA, DB, last, inside, KIND)


@triton.jit
def _bias_gelu(
    X, BIAS, Y, stride, columns, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // blocks
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    x = tl.load(X + row * stride + c, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(BIAS + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * columns + c, _act(x, KIND).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _bias_gelu_backward(
    G, X, BIAS, DX, PARTS, grad_stride, stride, num_rows, columns, rows_each,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    bias = tl.load(BIAS + c, mask=inside, other=0.0).to(tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    first = part * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        x = tl.load(X + row * stride + c, mask=inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(G + row * grad_stride + c, mask=inside, other=0.0).to(tl.float32)
        _, slope = _act_and_slope(x, KIND)
        dx = grad * slope
        dbias += dx
        tl.store(DX + row * columns + c, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTS + part * columns + c, dbias, mask=inside)
