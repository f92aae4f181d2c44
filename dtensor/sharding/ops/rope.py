"""Rotary position embedding as one op, which rotates the two halves of each row.

    rope(x[.. d], cos[.. d], sin[.. d]) -> x * cos + cat(-x[.. d/2:], x[.. :d/2]) * sin
    rope_backward(grad[.. d], cos[.. d], sin[.. d], dtype) -> dx[.. d]

cos and sin are broadcast against x: [t d] or [b 1 t d] for x[b h t d]. Invariants: as in
attention.py; the forward has the bits of the ops above, rounded after each; the backward rounds
once.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import LIBRARY, define, laid_as


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_half(x) * sin


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x: grad * cos + the inverse half rotation of grad * sin."""
    grad = grad.to(accumulation_dtype(grad.dtype))
    product, half = grad * sin, grad.shape[-1] // 2
    rotated = torch.cat((product[..., half:], -product[..., :half]), dim=-1)
    return (grad * cos + rotated).to(dtype)


def _run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return laid_as(x, rope(x, cos, sin))


def _run_backward(grad: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    return laid_as(grad, rope_backward(grad, cos, sin, dtype))


define(
    "rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    _run,
    lambda x, cos, _: torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype)),
)
define(
    "rope_backward(Tensor grad, Tensor cos, Tensor sin, ScalarType dtype) -> Tensor",
    _run_backward,
    lambda grad, cos, sin, dtype: torch.empty_like(grad, dtype=dtype),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin = inputs
    ctx.dtype = x.dtype
    needs_x = any(ctx.needs_input_grad[1:])
    ctx.save_for_backward(cos, sin, *([x] if needs_x else []))


def _grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, cos and sin; None for cos and sin if they need none."""
    cos, sin, *saved_x = ctx.saved_tensors
    dx = torch.ops.dt.rope_backward(grad, cos, sin, ctx.dtype)
    if not saved_x:
        return dx, None, None
    (x,) = saved_x
    return (
        dx,
        (grad * x).sum_to_size(cos.shape).to(cos.dtype),
        (grad * _rotate_half(x)).sum_to_size(sin.shape).to(sin.dtype),
    )


torch.library.register_autograd("dt::rope", _grad, setup_context=_setup, lib=LIBRARY)
