"""Rotary position embedding in Triton, forward and backward, each in one pass.

    y = rope(x[b h t d], cos[t d], sin[t d])               x * cos + cat(-x2, x1) * sin
    dx = rope_backward(grad, cos, sin, dtype)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU.
Halves are rotated, as in Hugging Face's models. cos and sin broadcast against x by strides of 0.

Invariants: the forward rounds each product and the sum to the result's dtype, as the op does; the
backward computes in float32 and rounds once; results have x's layout. Float64, more than four dims,
and a last dim that is odd, broadcast or not contiguous go to the op.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import takes
from dtensor.kernels.launches import ROPE, in_groups, within


def _is_supported(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel supports the dtypes, shapes and strides of these operands."""
    if not takes(x, cos, sin) or x.numel() == 0 or x.dim() > 4:
        return False
    d = x.shape[-1]
    whole = all(t.shape[-1] == d and t.stride(-1) == 1 for t in (x, cos, sin))
    return whole and d % 2 == 0 and within(x.numel() // d, d)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return y[... d] for x[... d], and cos[... d] and sin[... d] that broadcast against x."""
    if not _is_supported(x, cos, sin):
        return torch.ops.dt.rope(x, cos, sin)
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)
    return _rotated(x, cos, sin, dtype, backward=False)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dx[... d] of ``dtype`` for grad[... d]."""
    if not _is_supported(grad, cos, sin) or dtype == torch.float64:
        return torch.ops.dt.rope_backward(grad, cos, sin, dtype)
    return _rotated(grad, cos, sin, dtype, backward=True)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, backward: bool) -> Tensor:
    """Return x with rotated halves, or for the backward the gradient of x."""
    rotated = torch.empty_like(x, dtype=dtype)
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    x, cos, sin, y = (t.expand(shape) for t in (x, cos, sin, rotated))
    half = shape[3] // 2
    strides = [step for t in (x, cos, sin, y) for step in t.stride()[:3]]
    num_rows = shape[0] * shape[1] * shape[2]
    at = ROPE.at(num_rows, half, in_groups(half, *strides))
    _rope[at.grid](
        x, cos, sin, y, num_rows, shape[1], shape[2], half, *strides, BACKWARD=backward,
        **at.options,
    )  # fmt: skip
    return rotated


@triton.jit
def _rope(
    X, COS, SIN, Y, num_rows, size1, size2, half, x0, x1, x2, c0, c1, c2, s0, s1, s2,
    y0, y1, y2,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i2 = row % size2
    i1 = row // size2 % size1
    i0 = row // size2 // size1
    c = tl.arange(0, LANES)[None, :]
    inside = (row < num_rows)[:, None] & (c < half)
    x_at = (i0 * x0 + i1 * x1 + i2 * x2)[:, None] + c
    c_at = (i0 * c0 + i1 * c1 + i2 * c2)[:, None] + c
    s_at = (i0 * s0 + i1 * s1 + i2 * s2)[:, None] + c
    y_at = (i0 * y0 + i1 * y1 + i2 * y2)[:, None] + c
    left = tl.load(X + x_at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(X + x_at + half, mask=inside, other=0.0).to(tl.float32)
    cos_left = tl.load(COS + c_at, mask=inside, other=0.0).to(tl.float32)
    cos_right = tl.load(COS + c_at + half, mask=inside, other=0.0).to(tl.float32)
    sin_left = tl.load(SIN + s_at, mask=inside, other=0.0).to(tl.float32)
    sin_right = tl.load(SIN + s_at + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y_left = left * cos_left + right * sin_right
        y_right = right * cos_right - left * sin_left
    else:
        kind = Y.dtype.element_ty
        y_left = (left * cos_left).to(kind).to(tl.float32)
        y_left -= (right * sin_left).to(kind).to(tl.float32)
        y_right = (right * cos_right).to(kind).to(tl.float32)
        y_right += (left * sin_right).to(kind).to(tl.float32)
    tl.store(Y + y_at, y_left.to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + y_at + half, y_right.to(Y.dtype.element_ty), mask=inside)
