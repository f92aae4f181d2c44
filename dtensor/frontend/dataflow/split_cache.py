"""Rewrite attention to a KV cache whose positions are split, so that ranks exchange its results.

    out, lse = attention_masked(q, k, v, mask, scale)          k, v [b g s d]: the cache
    ->  parts = cache_attention(q, k, v, mask, scale, num, block)     [num b h 1 d+1]
        folded = cache_attention_fold(parts)                          parts are gathered here

Without the rewriting, ranks would gather keys and values, or exchange the statistics of a softmax
three times. Attention whose mask is stated by comparisons gets a mask of [b 1 1 s].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any

import torch
from torch import Tensor

import dtensor.sharding.ops.cache_attention  # noqa: F401  (registers the ops)
from dtensor.frontend.dataflow.composites import traced
from dtensor.sharding.local.split_attention import paired, visible_keys
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.plan.choose.choose_composites import expand_ops
from dtensor.sharding.plan.dataflow import Dataflow, Expansion, Op


@dataclass(frozen=True, slots=True)
class SplitCache:
    """KV caches of ``positions`` positions. Blocks of ``block`` positions are dealt in turn to
    ``num`` parts, the ranks of ``axes``."""

    positions: int
    num: int
    block: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        axes = ", ".join(self.axes)
        return f"{self.positions}, in blocks of {self.block} dealt in turn over {axes}"


def split_cache(flow: Dataflow, cache: SplitCache) -> Dataflow:
    """Return the program with attention of single queries to the caches as parts and a fold."""

    def expander(op: Op) -> Callable[[OpCall], Expansion | None] | None:
        if op.call.target not in _DECOMPOSITIONS:
            return None
        q, k = op.call.operands[:2]
        reads_cache = q.shape[2] == 1 and k.shape[2] == cache.positions
        return partial(_expansion, num=cache.num, block=cache.block) if reads_cache else None

    return expand_ops(flow, expander)


@lru_cache(maxsize=64)
def _expansion(call: OpCall, num: int, block: int) -> Expansion | None:
    return traced(call, partial(_DECOMPOSITIONS[call.target], num, block))


def _in_parts(
    num: int,
    block: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return the output and the log-sum-exp of masked attention; None if the mask is the same for
    all keys."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[3] != k.shape[2]:
        return None
    parts = torch.ops.dt.cache_attention(q, k, v, mask, scale, num, block, softcap)
    folded = torch.ops.dt.cache_attention_fold(parts, sinks)
    return folded[..., :-1].to(q.dtype), folded[..., -1]


def _compared_in_parts(
    num: int,
    block: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    window: Sequence[int] = (),
    softcap: float = 0.0,
    query_values: Sequence[Tensor] | None = None,
    key_values: Sequence[Tensor] | None = None,
    comparisons: Sequence[str] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return the output and the log-sum-exp of attention whose mask is stated by comparisons; None
    if the places of keys in the cache count, which are no places in a text."""
    if is_causal or window:
        return None
    masks = [visible_keys(*each) for each in paired(query_values, key_values, comparisons)]
    masks = masks or [torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=k.device)]
    return _in_parts(num, block, q, k, v, reduce(operator.and_, masks), scale, softcap, sinks)


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.dt.attention.default: _compared_in_parts,
    torch.ops.dt.attention_masked.default: _in_parts,
}
