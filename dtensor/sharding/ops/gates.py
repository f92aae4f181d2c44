"""Fused activations: each forward and each backward is one op.

    gated(a[..], b[..], kind) -> act(a) * b
    gated_backward(grad[..], a[..], b[..], kind) -> da[..], db[..]
    bias_gelu(x[.. k], bias[k], kind) -> act(x + bias)
    bias_gelu_backward(grad[.. k], x[.. k], bias[k], kind) -> dx[.. k], dbias[k]

``kind``: "silu", "gelu" (by the error function), "gelu_tanh" (torch's approximation) or "gelu_new"
(that approximation as transformers computes it). Invariants: as in attention.py; the forward has
the same bits as the separate ops, rounded after each; the backward computes in float32 and rounds
once.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import LIBRARY, define, laid_as, sum_rows

aten: Any = torch.ops.aten

KINDS = ("silu", "gelu", "gelu_tanh", "gelu_new")
SLOPE, CUBIC = math.sqrt(2.0 / math.pi), 0.044715
"""The constants of gelu's approximation, tanh(SLOPE * (x + CUBIC * x**3))."""


def activation(x: Tensor, kind: str) -> Tensor:
    """Return the activation, by the same ops as the programs that gated and bias_gelu replace."""
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu_new":
            return 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + CUBIC * torch.pow(x, 3.0))))
        case _:
            raise ValueError(f"an activation is one of {', '.join(KINDS)}; got {kind!r}")


def _activation_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return the gradient of `activation` at x."""
    if kind == "silu":
        return aten.silu_backward(grad, x)
    approximate = "none" if kind == "gelu" else "tanh"
    return aten.gelu_backward(grad, x, approximate=approximate)


def gated(a: Tensor, b: Tensor, kind: str) -> Tensor:
    return activation(a, kind) * b


def gated_backward(grad: Tensor, a: Tensor, b: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(a.dtype)
    wide_a, grad = a.to(dtype), grad.to(dtype)
    da = _activation_backward(grad * b.to(dtype), wide_a, kind)
    return da.to(a.dtype), (grad * activation(wide_a, kind)).to(b.dtype)


def bias_gelu(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return activation(x + bias, kind)


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    dx = _activation_backward(grad, x + bias, kind)
    return dx, sum_rows(dx)


def _run_gated(a: Tensor, b: Tensor, kind: str) -> Tensor:
    return laid_as(a, gated(a, b, kind))


def _run_bias(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return laid_as(x, bias_gelu(x, bias, kind))


def _run_gated_backward(grad: Tensor, a: Tensor, b: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    da, db = gated_backward(grad, a, b, kind)
    return laid_as(a, da), laid_as(b, db)


def _run_bias_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    dx, dbias = bias_gelu_backward(grad, x, bias, kind)
    return laid_as(x, dx), laid_as(bias, dbias)


for _name, _run, _backward in (
    ("gated(Tensor a, Tensor b", _run_gated, _run_gated_backward),
    ("bias_gelu(Tensor x, Tensor bias", _run_bias, _run_bias_backward),
):
    define(f"{_name}, str kind) -> Tensor", _run, lambda x, other, kind: torch.empty_like(x))
    define(
        f"{_name.replace('(', '_backward(Tensor grad, ')}, str kind) -> (Tensor, Tensor)",
        _backward,
        lambda grad, a, b, kind: (torch.empty_like(a), torch.empty_like(b)),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors)


def _gated_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*torch.ops.dt.gated_backward(grad, *ctx.saved_tensors, ctx.kind), None)


def _bias_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*torch.ops.dt.bias_gelu_backward(grad, *ctx.saved_tensors, ctx.kind), None)


torch.library.register_autograd("dt::gated", _gated_grad, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("dt::bias_gelu", _bias_grad, setup_context=_setup, lib=LIBRARY)
