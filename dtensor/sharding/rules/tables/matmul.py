"""Rules of products and distances: matrix multiplication, attention, bilinear forms, cdist.

    mm          "m k, k n -> m n"           linear in {a}, {b}; k split: the results are summed
    addmm       "n, m k, k n -> m n"        k split: the addend must be pending, to be added once
    attention   "b (g r) t! e!, b g s! e!, b g s! f! -> b (g r) t! f!, b (g r) t!"
    pick_heads  "b c! s d -> b h s d"       c is split if it has copies for each rank
    cache_attention   "b h t e!, b g (m! p c!) e!, b g (m! p c!) f!, ... -> p b h t x!"
    _grouped_mm "m! k, g k n, o! -> m! n"   g, the experts, split: the rows are summed

The queries (t) of `dt.attention` are whole, because a causal mask depends on their positions. Under
an explicit mask they split freely, together with the mask. ``flops`` counts 2 for each multiply-add
of the global call, and causal attention as full attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dtensor.sharding.ops.attention_masked  # pyright: ignore[reportUnusedImport]
import dtensor.sharding.ops.cache_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]
from dtensor.errors import PlanningError
from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.ops.heads import copies_for, positions_of
from dtensor.sharding.rules.build import (
    Groups,
    broadcast_term,
    make,
    operand_index,
    pattern,
    retarget,
    with_kind,
)
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.rules.tables.localizers import contiguous, positional, unless_empty
from dtensor.sharding.rules.tables.unsplittable import Unsplittable
from dtensor.sharding.spec.placements import Shard, index_sets, simplest

_PRODUCT: Groups = ((0,), (1,))


def _with_addend(product: str, result: str, flops: str) -> Builder:
    """Return a builder for ``beta * x + alpha * a b``; x must be pending if k is split. The terms
    of a and b, of the result, and the factors of a multiply-add are written as in
    `pattern`: ``_with_addend("m k, k n", "m n", "m k n")``."""

    def build(call: OpCall) -> Rule:
        """Return the rule ``m n, m k, k n -> m n``, with 1 for a dim in which x is broadcast."""
        shape = call.operands[0].shape
        if result == "m" and shape != call.operands[1].shape[:1]:
            raise no_rule(call, "its first tensor is broadcast: torch then errs on empty shards")
        addend = broadcast_term(result.split(), shape, call.result.shape)
        return make(
            call,
            f"{addend}, {product} -> {result}",
            linear=((0, 1), (0, 2)),
            addends=(0,),
            flops=flops,
        )

    return build


def _linear(call: OpCall) -> Rule:
    if operand_index(call, 2, "bias") is None:
        return make(call, "... k, n k -> ... n", linear=_PRODUCT)
    return make(call, "... k, n k, n -> ... n", linear=((0, 2), (1, 2)), addends=(2,))


def _by_heads(build: Callable[[OpCall, str, str], Rule], q: int) -> Builder:
    """Return a builder for an attention op. ``build(call, h, g)`` returns its rule for the terms of
    query heads and key heads; ``q``: the operand of the queries, which keys and values follow.

    Groups of query heads split with their keys and values. If a split cuts a group, keys and values
    stay whole (``fallback``), and each rank uses the key heads that its query heads need.
    """

    def by_heads(call: OpCall) -> Rule:
        """Return the rule of an attention call. With grouped heads q has (g r) heads and k, v have
        g; the fallback splits q's heads and keeps k and v whole."""
        if call.operands[q].shape[1] == call.operands[q + 1].shape[1]:
            return build(call, "g", "g")
        grouped, cut = build(call, "(g r)", "g"), build(call, "h", "g!")
        return replace(grouped, fallback=cut, localize=_with_used_heads(q, grouped.localize))

    return with_kind("attention", by_heads)


def _attention(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (q, k, v) -> (out, log-sum-exp). ``h``, ``g``: the terms of the heads of q
    and of k and v; b: batch; t, s: queries and keys; e, f: the sizes of a head of k and of v."""
    text = f"b {h} t! e!, b {g} s! e!, b {g} s! f! -> b {h} t! f!, b {h} t!"
    rule = make(call, text, sizes=_groups(call, 0, 1))
    return replace(rule, flops=_attention_flops(rule))


def _attention_backward(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (grad, q, k, v, out, log-sum-exp) -> gradients of q, k, v, with the terms of
    `_attention`. The backward has 5 matrix products, the forward 2."""
    text = (
        f"b {h} t! f!, b {h} t! e!, b {g} s! e!, b {g} s! f!, b {h} t! f!, b {h} t! "
        f"-> b {h} t! e!, b {g} s! e!, b {g} s! f!"
    )
    rule = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),))
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _attention_masked(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (q, k, v, mask) -> (out, log-sum-exp), in which queries may be split."""
    mask = _mask_term(call, 3, h)
    text = f"b {h} t e!, b {g} s! e!, b {g} s! e!, {mask} -> b {h} t e!, b {h} t"
    rule = make(call, text, sizes=_groups(call, 0, 1))
    return replace(rule, flops=_attention_flops(rule))


def _attention_masked_backward(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule of the backward of masked attention. If the queries are split, the gradients
    of keys and values are pending sums."""
    q, kv, stats = f"b {h} t e!", f"b {g} s! e!", f"b {h} t"
    text = f"{q}, {q}, {kv}, {kv}, {_mask_term(call, 4, h)}, {q}, {stats} -> {q}, {kv}, {kv}"
    rule = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),))
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _mask_term(call: OpCall, mask: int, heads: str, queries: str = "t") -> str:
    """Return the term of a mask that is broadcast against the scores [b h t s]: ``1 t s!``."""
    shape = call.operands[mask].shape
    factors = ["b", heads, queries, "s!"][4 - len(shape) :]
    return " ".join("1" if n == 1 else f for f, n in zip(factors, shape, strict=True))


def _cache_attention(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (q, k, v, mask) -> parts, which are split with the positions."""
    num, block = call.args[5:7]
    s = "(m! p c!)"
    mask = _mask_term(call, 3, h).replace("s!", s)
    text = f"b {h} t e!, b {g} {s} e!, b {g} {s} f!, {mask} -> p b {h} t x!"
    positions = call.operands[1].shape[2]
    sizes = {**_groups(call, 0, 1), "m": positions // (num * block), "p": num, "c": block}

    def localize(call: OpCall, local: Local) -> OpCall:
        return call.with_arg(5, local.result_shape()[0])

    rule = make(call, text, sizes=sizes, localize=localize)
    return replace(rule, flops=_attention_flops(rule) * positions)


def _cache_attention_fold(call: OpCall) -> Rule:
    return make(call, f"p! b h t x!{', h' if len(call.operands) > 1 else ''} -> b h t x!")


def _groups(call: OpCall, q: int, k: int) -> dict[str, int]:
    """Return the sizes of h = g * r query heads: g key heads, each used by r query heads."""
    heads, groups = call.operands[q].shape[1], call.operands[k].shape[1]
    return {"h": heads, "g": groups, "r": heads // max(1, groups)}


def _with_used_heads(q: int, before: Localizer | None = None) -> Localizer:
    """Return a localizer that passes only the key heads that the rank's query heads use, after
    ``before``."""

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return a call with ``used``, for each query head the position of its key head among those
        that the rank holds; the call itself if it uses all of them in order."""
        call = call if before is None else before(call, local)
        group = call.operands[q].shape[1] // max(1, call.operands[q + 1].shape[1])
        key_heads = [i for lo, hi in local.operand_intervals(q + 1, 1) for i in range(lo, hi)]
        query_heads = [i for lo, hi in local.operand_intervals(q, 1) for i in range(lo, hi)]
        positions = [key_heads.index(head // group) for head in query_heads]
        distinct = sorted(set(positions))
        if positions == [i for i in distinct for _ in range(len(positions) // len(distinct))]:
            positions = distinct  # the op repeats each key head for an equal number of query heads
        if positions == list(range(len(key_heads))):
            return call
        run = local_forms.attention_of_heads if q == 0 else local_forms.attention_of_heads_backward
        return retarget(call, run, call.target, positions, *call.args, **dict(call.kwargs))

    return localize


def _attention_flops(rule: Rule) -> int:
    """Return 2 FLOPs for each multiply-add of q k^T (head size e) and of its product with v (f)."""
    size = rule.size
    pairs = math.prod(size.get(factor, 1) for factor in ("b", "h", "t", "s"))
    return 2 * (size["e"] + size.get("f", size["e"])) * pairs


def _pick_heads(call: OpCall) -> Rule:
    """Return the rule of pick_heads(x, source_heads, heads), which picks ``heads`` from x. Dim 1 of
    x holds ``source_heads``, perhaps with copies. If the result is split by heads, x is whole,
    unless it has the copies of heads that this split needs: then it is split too."""
    source_heads, heads = list(call.args[1]), list(call.args[2])

    def narrow(strategy: Strategy, num: int) -> Strategy:
        """Return the strategy with x split, if each rank's piece of x has the heads that its piece
        of the result needs; otherwise the strategy itself."""
        (placement,) = strategy.results
        if not isinstance(placement, Shard) or placement.dim != 1:
            return strategy
        index_sets_of_ranks = index_sets(placement, len(heads), num)
        heads_of_ranks = [
            sorted({heads[i] for lo, hi in span for i in range(lo, hi)})
            for span in index_sets_of_ranks
        ]
        copies, blocks = copies_for(heads_of_ranks)
        if copies != source_heads:
            return strategy
        sharded = simplest(Shard(1, blocks), call.operands[0].shape, num)
        return replace(strategy, operands=(sharded,))

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return a call with the positions, in the rank's piece of x, of the heads it needs."""
        local_heads = [
            source_heads[i] for lo, hi in local.operand_intervals(0, 1) for i in range(lo, hi)
        ]
        needed = [heads[i] for lo, hi in local.result_intervals(0, 1) for i in range(lo, hi)]
        if not set(needed) <= set(local_heads):
            raise PlanningError(
                "two axes split the heads of keys that a cache copies for one of them.\n"
                "fix: split the query heads over one axis"
            )
        return retarget(call, local_forms.heads_at, call.args[0], positions_of(local_heads, needed))

    rule = make(call, "b c! s d -> b h s d", linear=((0,),), localize=localize)
    return replace(rule, narrow=narrow)


# -- torch's attention kernel for CPUs, which takes a mask -----------------------------------------


def _flash_terms(call: OpCall, q: int, dropout_at: int) -> tuple[str, str, str, str]:
    """Return the terms of the queries, of keys and values, of the log-sum-exp, and of the mask
    (with its comma; empty if there is none). Raises NoRule for dropout and for grouped heads."""
    args = positional(call)
    if args[dropout_at]:
        raise no_rule(call, "it draws random numbers: dropout_p is not 0")
    t = "t!" if args[dropout_at + 1] else "t"
    if call.operands[q + 1].shape[1] != call.operands[q].shape[1]:
        raise no_rule(call, "its keys have another number of heads than its queries")
    index = operand_index(call, len(call.args), "attn_mask")
    mask = "" if index is None else f", {_mask_term(call, index, 'h', t)}"
    return f"b h {t} e!", "b h s! e!", f"b h {t}", mask


def _flash_attention(call: OpCall) -> Rule:
    q, k, lse, mask = _flash_terms(call, 0, dropout_at=3)
    run = unless_empty(_without_dropout(local_forms.flash_attention, dropout_at=3))
    rule = make(call, f"{q}, {k}, {k}{mask} -> {q}, {lse}", localize=run)
    return replace(rule, flops=_attention_flops(rule))


def _flash_attention_backward(call: OpCall) -> Rule:
    """Return the rule (grad, q, k, v, out, log-sum-exp, mask?) -> gradients of q, k, v. The
    backward has 5 matrix products, the forward 2."""
    q, k, lse, mask = _flash_terms(call, 1, dropout_at=6)
    text = f"{q}, {q}, {k}, {k}, {q}, {lse}{mask} -> {q}, {k}, {k}"
    run = unless_empty(_without_dropout(local_forms.flash_attention_backward, dropout_at=6))
    rule = make(call, text, linear=((0,),), localize=run)
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _without_dropout(function: Callable[..., Any], dropout_at: int) -> Localizer:
    """Return a localizer that calls ``function`` without dropout_p, the argument ``dropout_at``
    between the tensors and is_causal."""

    def localize(call: OpCall, local: Local) -> OpCall:
        args, named = positional(call), dict(call.kwargs)
        options = (args[dropout_at + 1], named.get("attn_mask"), named.get("scale"))
        return retarget(call, function, *args[:dropout_at], *options)

    return localize


# -- other products, distances -------------------------------------------------------------------


def _trilinear(call: OpCall) -> Rule:
    """Return the rule of _trilinear, a product of three tensors that is summed over some dims:
    "d0 d1, d1 d2, d0 d2 -> d0". Each tensor lacks the dims in its ``expand`` argument."""
    expands = [set(dims) for dims in call.args[3:6]]
    rank = len(call.operands[0].shape) + len(expands[0])
    summed = set(call.args[6])
    shapes: list[dict[int, int]] = []
    for meta, absent in zip(call.operands, expands, strict=True):
        present = [d for d in range(rank) if d not in absent]
        shapes.append(dict(zip(present, meta.shape, strict=True)))
    sizes = {f"d{d}": next((s[d] for s in shapes if s.get(d, 1) != 1), 1) for d in range(rank)}

    def term(shape: dict[int, int]) -> str:
        return " ".join(f"d{d}" if n == sizes[f"d{d}"] else "1" for d, n in shape.items())

    right = " ".join(f"d{d}" for d in range(rank) if d not in summed)
    text = f"{', '.join(map(term, shapes))} -> {right}"
    flops = " ".join(sizes)
    return make(call, text, linear=((0,), (1,), (2,)), flops=flops, sizes=sizes)


def _cdist(call: OpCall) -> Rule:
    """Return the rule of cdist. Its columns (m) may be split for p of 0 and 1, which are plain
    sums, and for infinity, a maximum; other p take a root of the sum."""
    p: float = call.args[2]
    m = "m" if p in (0, 1, math.inf) else "m!"
    text = f"... p {m}, ... r {m} -> ... p r"
    return make(call, text, reduce="max" if p == math.inf else "sum", localize=unless_empty())


def _grouped_mm(call: OpCall) -> Rule:
    """Return the rule of a grouped product. If groups are split, each rank returns zeros for the
    rows (or columns) of other ranks' groups, and the results are summed."""
    a, b = (len(meta.shape) for meta in call.operands[:2])
    if len(call.operands) > 3:
        raise no_rule(call, "it has a bias")
    offsets = ", o!" if len(call.operands) > 2 else ""
    match a, b:
        case 2, 3:
            text, groups = f"m! k, g k n{offsets} -> m! n", 1  # groups: the operand with dim g
        case 3, 2:
            text, groups = f"g m k, k n!{offsets} -> m n!", 0
        case 2, 2:
            text, groups = f"m k!, k! n{offsets} -> g m n", None
        case _:
            text, groups = f"g m k, g k n{offsets} -> g m n", 0

    def localize(call: OpCall, local: Local) -> OpCall:
        from dtensor.sharding.local.grouped_matmul import grouped_mm

        args = [*positional(call)[:3], None][:3]  # a, b, and the offsets or None
        return retarget(call, grouped_mm, *args, _held_groups(call, local, groups))

    return make(call, text, linear=((0,), (1,)), flops="m k n", localize=localize)


def _held_groups(call: OpCall, local: Local, operand: int | None) -> list[int] | None:
    """Return the rank's groups in dim 0 of this operand (None: the result); None: all groups."""
    if operand is None:
        total, intervals = call.result.shape[0], local.result_intervals(0, 0)
    else:
        total, intervals = call.operands[operand].shape[0], local.operand_intervals(operand, 0)
    groups = [g for start, stop in intervals for g in range(start, stop)]
    return None if len(groups) == total else groups


def _experts_backward(call: OpCall) -> Rule:
    """Return the rule of the gradients of a grouped product's rows and matrices."""

    def localize(call: OpCall, local: Local) -> OpCall:
        from dtensor.sharding.local.grouped_matmul import grouped_mm_backward

        groups = _held_groups(call, local, 1)
        return retarget(call, grouped_mm_backward, *positional(call), groups)

    text = "m! k, g k n, o!, m! n -> m! k, g k n"
    return make(call, text, linear=((3,),), flops="m k n", localize=localize)


RULES: dict[str, Builder] = {
    "aten.mm.default": pattern("m k, k n -> m n", linear=_PRODUCT, flops="m k n"),
    "aten.bmm.default": pattern("b m k, b k n -> b m n", linear=_PRODUCT, flops="b m k n"),
    "aten.mv.default": pattern("m k, k -> m", linear=_PRODUCT, flops="m k"),
    "aten.dot.default": pattern("k, k -> ", linear=_PRODUCT, flops="k"),
    "aten.vdot.default": pattern("k, k -> ", linear=_PRODUCT, flops="k"),
    "aten.addmm.default": _with_addend("m k, k n", "m n", "m k n"),
    "aten.baddbmm.default": _with_addend("b m k, b k n", "b m n", "b m k n"),
    "aten.addbmm.default": _with_addend("b m k, b k n", "m n", "b m k n"),
    "aten.addmv.default": _with_addend("m k, k", "m", "m k"),
    "aten.addr.default": _with_addend("m, n", "m n", "m n"),
    "aten.linear.default": _linear,
    "dt.attention.default": _by_heads(_attention, 0),
    "dt.attention_backward.default": _by_heads(_attention_backward, 1),
    "dt.attention_masked.default": _by_heads(_attention_masked, 0),
    "dt.attention_masked_backward.default": _by_heads(_attention_masked_backward, 1),
    "dt.cache_attention.default": _by_heads(_cache_attention, 0),
    "dt.cache_attention_fold.default": _cache_attention_fold,
    "dt.pick_heads.default": with_kind("view", _pick_heads),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _flash_attention_backward,
    "aten._trilinear.default": _trilinear,
    "aten._grouped_mm.default": _grouped_mm,
    # ops of mixtures of experts in transformers, which exist once it is imported
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": _experts_backward,
    "aten._cdist_forward.default": _cdist,
    "aten._cdist_backward.default": pattern(
        "... p r, ... p m, ... r m, ... p r -> ... p m", linear=((0,),), localize=unless_empty()
    ),
    "aten._pdist_forward.default": Unsplittable(
        "its results are pairs of rows, in one triangular order", localize=contiguous()
    ),
    "aten._pdist_backward.default": pattern(
        "q!, n! m, q! -> n! m", linear=((0,),), localize=unless_empty(contiguous())
    ),
}
