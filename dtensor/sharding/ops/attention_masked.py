"""Attention with an explicit mask, without dropout.

    attention_masked(q[b h t d], k[b g s d], v[b g s d], mask[b h t s], scale)
        -> out[b h t d], lse[b h t]                                                 h = g * r

Each dim of the mask may be 1, and leading dims may be missing. A bool mask is True for keys that
the query sees; a float mask is added to the scores. The gradient of a mask holds all scores.

Invariants: as in attention.py. The result of a query that sees no key is 0, and its lse is 0. A row
of the batch has the same bits whatever the other rows are. Finite values of masked keys do not
change the result; a NaN or inf there makes it NaN, as in torch.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.local.local_forms import flash_attention, flash_attention_backward
from dtensor.sharding.ops.attention import (
    aligned,
    check_heads,
    efficient_backward,
    efficient_on_cuda,
    is_empty,
    repeat_groups,
    sum_groups,
)
from dtensor.sharding.ops.library import LIBRARY, define, laid_as

aten: Any = torch.ops.aten


# -- as plain ops ----------------------------------------------------------------------------------


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of attention_masked by plain ops, whose rules can split
    the keys. Rows without a visible key give 0."""
    k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
    scores = _scores(q, k, mask, scale)
    maximum = scores.amax(-1, keepdim=True)
    maximum = torch.where(maximum == -math.inf, 0, maximum)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1, total)
    return (weights / total).to(v.dtype) @ v, (maximum + total.log()).squeeze(-1)


def written_out_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by plain ops, whose rules can split the keys."""
    groups = k.shape[1]
    k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
    p, ds = _weights_and_grad(grad, q, k, v, mask, out, lse, scale)
    ds = (ds * scale).to(q.dtype)
    dk, dv = ds.mT @ q, p.to(grad.dtype).mT @ grad
    return ds @ k, sum_groups(dk, groups), sum_groups(dv, groups)


def _weights_and_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the softmax [b h t s] and the gradient of the scores. k and v have q's heads."""
    p = (_scores(q, k, mask, scale) - lse[..., None]).exp()
    row_sums = (grad.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True)
    return p, p * ((grad @ v.mT).to(p.dtype) - row_sums)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return q k^T * scale [b h t s] plus the mask; -inf where a bool mask is False."""
    scores = ((q @ k.mT) * scale).to(accumulation_dtype(q.dtype))
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, -math.inf)
    return scores + mask.to(scores.dtype)


# -- the ops ---------------------------------------------------------------------------------------


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """Return the mask as a float bias with 4 dims, in a dtype that the kernel takes: the dtype of
    q, and on a CPU also float32 for 16-bit queries."""
    if mask.dim() < 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.bool:
        zero, minus_infinity = _zero_and_minus_infinity(q.dtype, q.device)
        return torch.where(mask, zero, minus_infinity)
    is_supported = q.device.type == "cpu" and mask.dtype == accumulation_dtype(q.dtype)
    return mask if is_supported else mask.to(q.dtype)


@cache
def _zero_and_minus_infinity(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 0, the bias of a visible key, and -inf, the bias of a masked key, as tensors. They are
    cached because creating them would take a tenth of the time of attention in a decode step."""
    return (
        torch.tensor(0.0, dtype=dtype, device=device),
        torch.tensor(-math.inf, dtype=dtype, device=device),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Run the kernel of the device and head dim; return the output and its log-sum-exp."""
    lse_dtype = accumulation_dtype(q.dtype)
    if is_empty(q, k):
        return torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=lse_dtype, device=q.device)
    if q.device.type == "cpu":
        out, lse = flash_attention(q, k, v, False, _bias(mask, q), scale)
    elif efficient_on_cuda(q):
        k, v, bias = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1]), _bias(mask, q)
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            aligned(q), aligned(k), aligned(v), _pad_bias(bias, q, k), True, 0.0, False, scale=scale
        )
        lse, sees_nothing = lse[..., : q.shape[2]], _sees_nothing(bias)  # the kernel pads the rows
        out = torch.where(sees_nothing[..., None], 0, out)
        lse = torch.where(sees_nothing, 0, lse)
    else:
        out, lse = written_out(q, k, v, mask, scale)
    # the kernels return dense results: if the strides are q's, they are also empty_like(q)'s
    out = out if out.stride() == q.stride() else laid_as(q, out)
    return out, lse.to(lse_dtype).contiguous()


def _attention_masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with the strides of q, k and v."""
    if is_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type == "cpu":
        bias = _bias(mask, q)
        grads = flash_attention_backward(grad, q, k, v, out, lse, False, bias, scale)
    elif efficient_on_cuda(q):
        ks, vs, bias = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1]), _bias(mask, q)
        lse = torch.where(_sees_nothing(bias), math.inf, lse)
        bias = _pad_bias(bias, q, ks)
        dq, dk, dv = efficient_backward(grad, q, ks, vs, bias, out, lse, False, scale)
        grads = dq, sum_groups(dk, k.shape[1]), sum_groups(dv, k.shape[1])
    else:
        grads = written_out_backward(grad, q, k, v, mask, out, lse, scale)
    dq, dk, dv = (laid_as(x, dx.to(x.dtype)) for x, dx in zip((q, k, v), grads, strict=True))
    return dq, dk, dv


def _sees_nothing(bias: Tensor) -> Tensor:
    """Return whether each query sees no key [b h t]; CUDA's kernel leaves its result open."""
    return (bias == -math.inf).all(-1)


def _pad_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the bias expanded to [b h t s]. If its rows do not start on multiples of 16 elements,
    as CUDA's kernel needs, it is a view of a copy with padded rows."""
    s = k.shape[2]
    bias = bias.expand(*bias.shape[:3], s)
    starts = (bias.data_ptr(), *bias.stride()[:-1])
    if bias.stride(-1) != 1 or any(start % 16 for start in starts):
        bias = F.pad(bias.contiguous(), (0, -s % 16))[..., :s]
    return bias.expand(*q.shape[:3], s)


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the output and its log-sum-exp. Raises ValueError if the mask does
    not broadcast to [b h t s]."""
    check_heads(q, k, v)
    full = (*q.shape[:3], k.shape[2])
    fits = mask.dim() <= 4 and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise ValueError(
            f"attention_masked takes a bool or float mask that broadcasts to {list(full)}; got "
            f"{mask.dtype} {list(mask.shape)}"
        )
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


define(
    "attention_masked(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> (Tensor, Tensor)",
    attend,
    _fake,
)
define(
    "attention_masked_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor out, "
    "Tensor lse, float scale) -> (Tensor, Tensor, Tensor)",
    _attention_masked_backward,
    lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)


# -- gradients -------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors of the backward; the log-sum-exp is not differentiable."""
    q, k, v, mask, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, out, lse)


def _grad(ctx: Any, grad: Tensor | None, _lse: None) -> tuple[Any, ...]:
    """Return the gradients of the inputs; the mask's gradient only if it is needed."""
    if grad is None:
        return (None,) * 5
    saved = ctx.saved_tensors
    grads = torch.ops.dt.attention_masked_backward(grad, *saved, ctx.scale)
    if not ctx.needs_input_grad[3]:
        return (*grads, None, None)
    q, k, v, mask, out, lse = saved
    k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
    _, scores_grad = _weights_and_grad(grad, q, k, v, mask, out, lse, ctx.scale)
    return (*grads, scores_grad.sum_to_size(mask.shape).to(mask.dtype), None)


torch.library.register_autograd("dt::attention_masked", _grad, setup_context=_setup, lib=LIBRARY)
