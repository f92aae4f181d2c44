"""Attention to a cache whose positions are split: parts, and their fold.

    parts = cache_attention(q[b h t e], k[b g s e], v[b g s f], mask[b h t s], scale, num, block)
        -> [num b h t f+1]                                                          h = g * r
    cache_attention_fold(parts, sinks[h]?)  ->  [b h t f+1]

Blocks of ``block`` positions are dealt to the parts in turn: position p is in part
(p // block) % num. Each row of a part is attention to the part's positions, and its log-sum-exp,
-inf if the query sees no key there. The fold adds the parts in order; its rows are attention to all
positions, and its log-sum-exp, both 0 for a query that sees no key.

A rank computes its parts, and the ranks gather the parts. Invariants: as in attention.py; the bits
do not depend on how many parts a rank computes. There is no gradient.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.local.attention_kernels import attention_masked, attention_math
from dtensor.sharding.ops.library import define


def _cache_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    num: int,
    block: int,
    softcap: float = 0.0,
) -> Tensor:
    """Return attention to each of ``num`` parts of the positions, with its log-sum-exp."""
    if not num or q.numel() == 0:
        return _fake(q, k, v, mask, scale, num, block)
    parts: list[Tensor] = []
    for i in range(num):
        ki, vi, seen = (_positions_of_part(x, i, num, block) for x in (k, v, mask.mT))
        parts.append(_part(q, ki, vi, seen.mT, scale, softcap))
    return torch.stack(parts)


def _positions_of_part(x: Tensor, part: int, num: int, block: int) -> Tensor:
    """Return x[... s d] at the positions of one of ``num`` parts."""
    if num == 1:
        return x
    return x.unflatten(-2, (-1, num, block))[..., part, :, :].flatten(-3, -2)


def _part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Return [b h t f+1]: attention to these positions, and its log-sum-exp, -inf for a query that
    sees none of them."""
    dtype = accumulation_dtype(q.dtype)
    if softcap:
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out, lse = attention_math(q, k, v, mask, scale, softcap)
    else:
        out, lse = attention_masked(q, k, v, mask, scale)
        sees_key = (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1)
        lse = torch.where(sees_key, lse, -math.inf)
    return torch.cat([out.to(dtype), lse[..., None]], -1)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    num: int,
    block: int,
    softcap: float = 0.0,
) -> Tensor:
    """Return an empty tensor like the result. Raises ValueError if the parts are not equal."""
    if k.shape[2] % (num * block or 1):
        raise ValueError(f"{k.shape[2]} positions are not {num} parts of blocks of {block}")
    shape = (num, *q.shape[:3], v.shape[3] + 1)
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype))


def _fold(parts: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return [b h t f+1]: attention to the positions of all parts, and its log-sum-exp. ``sinks``:
    [h], a logit without a value for each query."""
    lse = parts[..., -1:]
    top = lse.amax(0)
    sink = None if sinks is None else sinks.to(lse.dtype)[:, None, None]
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top == -math.inf, 0, top)
    weights = (lse - top).exp()
    num, f = parts.shape[0], parts.shape[-1] - 1
    total, out = weights[0], parts[0, ..., :f] * weights[0]
    for i in range(1, num):
        total, out = total + weights[i], out + parts[i, ..., :f] * weights[i]
    if sink is not None:
        total = total + (sink - top).exp()
    total = torch.where(total == 0, 1, total)
    return torch.cat([out / total, top + total.log()], -1)


define(
    "cache_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, int num, int block, "
    "float softcap=0.0) -> Tensor",
    _cache_attention,
    _fake,
)
define(
    "cache_attention_fold(Tensor parts, Tensor? sinks=None) -> Tensor",
    _fold,
    lambda parts, sinks=None: parts.new_empty(parts.shape[1:]),
)
