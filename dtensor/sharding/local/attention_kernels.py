"""Attention of local tensors by the kernel of the device, and by plain ops.

    attention(q[b h t e], k[b g s e], v[b g s f], is_causal, scale)      -> out[b h t f], lse[b h t]
    attention_masked(q, k, v, mask[b h t s], scale)                      -> the same     h = g * r
    attention_math(q, k, v, mask[b h t s], scale, softcap)               -> the same, by plain ops

A CPU runs torch's flash kernel, CUDA the memory-efficient kernel, and plain ops for dtypes and head
sizes that this kernel does not take. The strides of the results are those of the kernel.

Invariants: the backward takes the log-sum-exp over all keys of a query, so that the gradients of
parts of the keys add up. The lse of a query that sees no key is 0 in `attention_masked` and -inf in
`attention_math`; its output is 0.
"""

# Torch leaves the types of `torch.ops` open.
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

aten: Any = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


def is_empty(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp by the kernel of the device and head sizes."""
    lse_dtype = accumulation_dtype(q.dtype)
    if is_empty(q, k):
        return _nothing(q, v), q.new_zeros(q.shape[:3], dtype=lse_dtype)
    if q.device.type == "cpu":  # its kernel takes grouped heads
        out, lse = flash_attention(q, k, v, is_causal, None, scale)
    elif efficient_on_cuda(q, v):
        k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            aligned(q), aligned(k), aligned(v), None, True, 0.0, is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads the row dim
    else:
        out, lse = attention_math(q, k, v, causal_mask(q, k) if is_causal else None, scale)
    return out, lse.to(lse_dtype).contiguous()


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float,
) -> Gradients:  # fmt: skip
    """Return the gradients of `attention` with respect to q, k and v."""
    if is_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type == "cpu":
        return flash_attention_backward(grad, q, k, v, out, lse, is_causal, None, scale)
    if efficient_on_cuda(q, v):
        ks, vs = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
        dq, dk, dv = efficient_backward(grad, q, ks, vs, None, out, lse, is_causal, scale)
        return dq, sum_groups(dk, k.shape[1]), sum_groups(dv, k.shape[1])
    mask = causal_mask(q, k) if is_causal else None
    return attention_math_backward(grad, q, k, v, out, lse, mask, scale)


def _nothing(q: Tensor, v: Tensor) -> Tensor:
    """Return the output of attention without keys or queries: zeros, as `like_output`."""
    return torch.zeros_like(like_output(q, v))


def like_output(q: Tensor, v: Tensor) -> Tensor:
    """Return an empty tensor with the shape and strides of the output. The output has the shape and
    strides of q if values are as wide as keys, else the shape [b h t f] in the memory order
    (b t h f)."""
    b, h, t, e = q.shape
    f = v.shape[3]
    return torch.empty_like(q) if e == f else q.new_empty((b, t, h, f)).transpose(1, 2)


def attention_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp by the kernel of the device and head sizes. Each dim of
    the mask may be 1, and leading dims may be missing. A bool mask is True for keys that the query
    sees; a float mask is added to the scores."""
    lse_dtype = accumulation_dtype(q.dtype)
    if is_empty(q, k):
        return _nothing(q, v), q.new_zeros(q.shape[:3], dtype=lse_dtype)
    if q.device.type == "cpu":
        out, lse = flash_attention(q, k, v, False, _bias(mask, q), scale)
    elif efficient_on_cuda(q, v):
        k, v, bias = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1]), _bias(mask, q)
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            aligned(q), aligned(k), aligned(v), _pad_bias(bias, q, k), True, 0.0, False, scale=scale
        )
        lse, sees_nothing = lse[..., : q.shape[2]], _sees_nothing(bias)  # the kernel pads the rows
        out = torch.where(sees_nothing[..., None], 0, out)
        lse = torch.where(sees_nothing, 0, lse)
    else:
        out, lse = written_out(q, k, v, mask, scale)
    return out, lse.to(lse_dtype).contiguous()


def attention_masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> Gradients:
    """Return the gradients of `attention_masked` with respect to q, k and v."""
    if is_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type == "cpu":
        bias = _bias(mask, q)
        return flash_attention_backward(grad, q, k, v, out, lse, False, bias, scale)
    if efficient_on_cuda(q, v):
        ks, vs, bias = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1]), _bias(mask, q)
        lse = torch.where(_sees_nothing(bias), math.inf, lse)
        bias = _pad_bias(bias, q, ks)
        dq, dk, dv = efficient_backward(grad, q, ks, vs, bias, out, lse, False, scale)
        return dq, sum_groups(dk, k.shape[1]), sum_groups(dv, k.shape[1])
    return written_out_backward(grad, q, k, v, mask, out, lse, scale)


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


# -- heads and memory ---------------------------------------------------------------------------


def repeat_groups(x: Tensor, num_heads: int) -> Tensor:
    """Return k or v [b g s d] with each group repeated for its query heads, [b h s d]."""
    groups = x.shape[1]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=1)


def sum_groups(grad: Tensor, num_groups: int) -> Tensor:
    """Return the gradient of `repeat_groups`: [b h s d] -> [b g s d], summed over query heads."""
    b, h, s, d = grad.shape
    if h == num_groups:
        return grad
    return grad.reshape(b, num_groups, h // num_groups, s, d).sum(2)


def efficient_on_cuda(q: Tensor, v: Tensor) -> bool:
    """Return whether CUDA's memory-efficient kernel takes these head sizes, rows of 16 bytes, and
    the user's settings allow the kernel."""
    rows = (x.shape[-1] * x.element_size() for x in (q, v))
    is_taken = q.dtype != torch.float64 and all(size % 16 == 0 for size in rows)
    return is_taken and torch.backends.cuda.mem_efficient_sdp_enabled()


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if its rows do not start on multiples of 16 bytes or have a
    stride other than 1, which CUDA's kernel does not take."""
    starts = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    is_aligned = x.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def rows_first(out: Tensor) -> Tensor:
    """Return out[b h t d] with the memory of a [b t h d], as CUDA's backward kernel assumes."""
    return aligned(out.transpose(1, 2).contiguous()).transpose(1, 2)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float,
) -> Gradients:  # fmt: skip
    """Call the backward of CUDA's memory-efficient kernel. k and v have as many heads as q."""
    padded_lse = lse.new_full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), math.inf)
    padded_lse[..., : lse.shape[2]] = lse  # the weights of a row with an lse of inf are 0
    no_seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        aligned(grad), aligned(q), aligned(k), aligned(v), bias, rows_first(out), padded_lse,
        no_seed, no_seed, 0.0, (True, True, True, False), is_causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


# -- by plain ops ----------------------------------------------------------------------------------


def attention_math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp by plain ops. ``mask``: [b h t s], in which each dim may
    be 1, or [t s]; True for the keys that a query sees, or numbers that are added. ``softcap``:
    scores x become softcap * tanh(x / softcap); 0: not."""
    scores, _ = _capped_scores(q, k, mask, scale, softcap)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -math.inf, 0, lse)[..., None]).exp()
    out = (weights.to(v.dtype).flatten(2, 3) @ v).reshape(*q.shape[:3], v.shape[3])
    return out, lse.reshape(q.shape[:3])


def attention_math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    scale: float, softcap: float = 0.0,
) -> Gradients:  # fmt: skip
    """Return the gradients of `attention_math` with respect to q, k and v. The lse is finite."""
    # dS = P * (grad v^T - sum(grad * out)); dq = scale dS k; dk = scale dS^T q; dv = P^T grad
    scores, slope = _capped_scores(q, k, mask, scale, softcap)
    b, g, r, t, s = scores.shape
    p = (scores - lse.reshape(b, g, r, t, 1)).exp()
    row_sums = (grad.to(p.dtype) * out.to(p.dtype)).sum(-1).reshape(b, g, r, t, 1)
    rows = grad.reshape(b, g, r * t, -1)
    ds = p * ((rows @ v.mT).to(p.dtype).view(p.shape) - row_sums) * scale
    ds = (ds if slope is None else ds * slope).to(q.dtype).view(b, g, r * t, s)
    dk, dv = ds.mT @ q.reshape(b, g, r * t, -1), p.to(grad.dtype).view(b, g, r * t, s).mT @ rows
    return (ds @ k).reshape(q.shape), dk, dv


def _capped_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Return the scores [b g r t s], in float32 for 16-bit dtypes, with -inf for hidden keys, and
    their derivative with respect to the scores without the cap; None if there is no cap."""
    b, h, t, e = q.shape
    g, s = k.shape[1:3]
    scores = (q.reshape(b, g, h // g * t, e) @ k.mT).to(accumulation_dtype(q.dtype)) * scale
    scores, slope = scores.view(b, g, h // g, t, s), None
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, 1 - capped * capped
    if mask is not None:
        if mask.dim() == 4:
            mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (g, h // g))
        scores = _with_mask(scores, mask)
    return scores, slope


def _with_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the scores plus a float mask; -inf where a bool mask is False."""
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, -math.inf)
    return scores + mask.to(scores.dtype)


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Return the mask [t s] of the keys at or before each query."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of masked attention by plain ops, whose rules can split
    the keys. Rows without a visible key give 0."""
    k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
    scores = _masked_scores(q, k, mask, scale)
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
) -> Gradients:
    """Return the gradients of q, k and v by plain ops, whose rules can split the keys."""
    groups = k.shape[1]
    k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
    p, ds = weights_and_grad(grad, q, k, v, mask, out, lse, scale)
    ds = (ds * scale).to(q.dtype)
    dk, dv = ds.mT @ q, p.to(grad.dtype).mT @ grad
    return ds @ k, sum_groups(dk, groups), sum_groups(dv, groups)


def weights_and_grad(
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
    p = (_masked_scores(q, k, mask, scale) - lse[..., None]).exp()
    row_sums = (grad.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True)
    return p, p * ((grad @ v.mT).to(p.dtype) - row_sums)


def _masked_scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return q k^T * scale [b h t s] with the mask."""
    return _with_mask(((q @ k.mT) * scale).to(accumulation_dtype(q.dtype)), mask)
