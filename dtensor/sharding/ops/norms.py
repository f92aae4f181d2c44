"""RMS norms as one op, and norms fused with the addition of a residual.

    rms_norm(x[.. k], weight[k], eps, offset, inner, out) -> y[.. k], rstd[.. 1]
    rms_norm_backward(grad[.. k], x[.. k], rstd[.. 1], weight[k], offset) -> dx[.. k], dweight[k]
    add_rms_norm(x[.. k], residual[.. k], weight[k], ..) -> x + residual, y, rstd
    add_layer_norm(x[.. k], residual[.. k], weight[k], bias[k], eps) -> x + residual, y, mean, rstd

    wide = x.float(); rstd = rsqrt(mean(wide ** 2, -1) + eps)
    y = ((wide * rstd).to(inner) * (weight + offset)).to(out)

Llama rounds to 16 bits before the weight (``inner``); Gemma rounds after it and has 1 + weight
(``offset``). The forward has the bits of the ops above in this order; the backward rounds once.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import LIBRARY, define, laid_as, sum_rows

aten: Any = torch.ops.aten

_OPTION_ARGUMENTS = "float eps, float offset, ScalarType inner, ScalarType out"


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, inner: torch.dtype, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y and rstd, by the same ops as the programs that rms_norm replaces."""
    wide = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scale = weight.to(wide.dtype) + offset if offset else weight
    return ((wide * rstd).to(inner) * scale).to(out), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [.. k] and of the weight [k]; ``offset``: added to the weight. With
    g = grad (weight + offset) and n = x rstd: dx = rstd (g - n mean(g n))."""
    dtype = rstd.dtype
    grad, normed = grad.to(dtype), x.to(dtype) * rstd
    scaled = grad * (weight.to(dtype) + offset)
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), sum_rows(grad * normed).to(weight.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    return (total, *rms_norm(total, weight, *options))


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x + residual
    return (total, *torch.native_layer_norm(total, [x.shape[-1]], weight, bias, eps))


def _run_rms(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    y, rstd = rms_norm(x, *args)
    return laid_as(x, y), rstd.contiguous()


def _run_rms_backward(grad: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    dx, dweight = rms_norm_backward(grad, x, *args)
    return laid_as(x, dx), dweight.contiguous()


def _run_add_rms(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    total, y, rstd = add_rms_norm(x, *args)
    return laid_as(x, total), laid_as(x, y), rstd.contiguous()


def _run_add_layer(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, y, mean, rstd = add_layer_norm(x, *args)
    return laid_as(x, total), y, mean, rstd


def _fake_rms(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))
    return torch.empty_like(x, dtype=args[-1]), rstd


def _fake_add_layer(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, bias, eps = args[1:]
    total = torch.empty_like(x)
    return (total, *aten.native_layer_norm(total, [x.shape[-1]], weight, bias, eps))


define(
    f"rms_norm(Tensor x, Tensor weight, {_OPTION_ARGUMENTS}) -> (Tensor, Tensor)",
    _run_rms,
    _fake_rms,
)
define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor weight, float offset) "
    "-> (Tensor, Tensor)",
    _run_rms_backward,
    lambda grad, x, rstd, weight, offset: (torch.empty_like(x), weight.new_empty(weight.shape)),
)
define(
    f"add_rms_norm(Tensor x, Tensor residual, Tensor weight, {_OPTION_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor)",
    _run_add_rms,
    lambda x, residual, *args: (torch.empty_like(x), *_fake_rms(x, *args)),
)
define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run_add_layer,
    _fake_add_layer,
)


# -- gradients -------------------------------------------------------------------------------------


def _rms_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, ctx.offset, *_ = inputs
    _save(ctx, x, weight, output[-1])


def _rms_grad(ctx: Any, grad: Tensor | None, _rstd: None) -> tuple[Any, ...]:
    """Return the gradients of x and weight, and None for the four options."""
    if grad is None:
        return (None,) * 6
    x, weight, rstd = ctx.saved_tensors
    pair = torch.ops.dt.rms_norm_backward(grad, x, rstd, weight, ctx.offset)
    return (*pair, None, None, None, None)


def _add_rms_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, ctx.offset, *_ = inputs
    total, _, rstd = output
    _save(ctx, total, weight, rstd)


def _add_rms_grad(
    ctx: Any, total_grad: Tensor | None, grad: Tensor | None, _rstd: None
) -> tuple[Any, ...]:
    """Return the input gradients. ``total_grad``, the gradient of x + residual, and ``grad``, the
    gradient of the normed result, may be None."""
    dx, dweight = total_grad, None
    if grad is not None:
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.dt.rms_norm_backward(grad, total, rstd, weight, ctx.offset)
        dx = dx if total_grad is None else total_grad + dx
    return (dx, dx, dweight, None, None, None, None)


def _add_layer_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean)
    _save(ctx, total, weight, bias, mean, rstd)


def _add_layer_grad(
    ctx: Any, total_grad: Tensor | None, grad: Tensor | None, _mean: None, _rstd: None
) -> tuple[Any, ...]:
    """Return the input gradients. ``total_grad``, the gradient of x + residual, and ``grad``, the
    gradient of the normed result, may be None."""
    dx, dweight, dbias = total_grad, None, None
    if grad is not None:
        total, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = aten.native_layer_norm_backward(
            grad, total, [total.shape[-1]], mean, rstd, weight, bias, [True, True, True]
        )
        dx = dx if total_grad is None else total_grad + dx
    return (dx, dx, dweight, dbias, None)


def _save(ctx: Any, *tensors: Tensor) -> None:
    """Save tensors for the backward. The last tensor is rstd, which has no gradient."""
    ctx.mark_non_differentiable(tensors[-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


for _name, _setup, _grad in (
    ("rms_norm", _rms_setup, _rms_grad),
    ("add_rms_norm", _add_rms_setup, _add_rms_grad),
    ("add_layer_norm", _add_layer_setup, _add_layer_grad),
):
    torch.library.register_autograd(f"dt::{_name}", _grad, setup_context=_setup, lib=LIBRARY)
