"""Rules of attention, and of the choice of heads in a cache.

    attention       "b (g r) t e!, b g s! e!, b g s! f! -> b (g r) t f!, b (g r) t"
    attention_part  "b (g r) t e!, b g t e!, b g t f!, ... -> b (g r) t f!, b (g r) t"
    cache_attention "b h t e!, b g (m! p c!) e!, b g (m! p c!) f!, ... -> p b h t x!"
    pick_heads      "b c! s d -> b h s d"       c is split if it has copies for each rank

The queries (t) split freely: the rank's call is cut by the positions of its queries and keys
(local/attention_pieces.py). The gradients of keys and values are then pending sums. A part has one
factor for queries and keys, and the rank at r has the keys of rank r - shift. ``flops`` counts 2
for each multiply-add of the pairs that is_causal and the window leave; `Rule.imbalance` says how
many of these pairs the fullest rank has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch

import dtensor.sharding.ops.attention_masked  # pyright: ignore[reportUnusedImport]
import dtensor.sharding.ops.cache_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]
from dtensor.errors import PlanningError
from dtensor.private_torch import OpOverload
from dtensor.sharding.local import local_forms, split_attention
from dtensor.sharding.local.attention_pieces import Band, Span, band_of, visible_pairs
from dtensor.sharding.ops.call import Local, Localizer, OpCall, Operand
from dtensor.sharding.ops.heads import copies_for, positions_of
from dtensor.sharding.rules.build import make, operand_index, retarget, with_kind
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.rules.tables.localizers import positional, unless_empty
from dtensor.sharding.spec.placements import (
    Placement,
    Shard,
    index_sets,
    intersect,
    largest_part,
    simplest,
    with_shift,
)

_dt: Any = torch.ops.dt


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
        localize = _with_used_heads(q, grouped.localize)
        return replace(grouped, fallback=cut, localize=localize)

    return with_kind("attention", by_heads)


def _with_used_heads(q: int, inner: Localizer | None) -> Localizer:
    """Return a localizer that does what ``inner`` does, and passes only the key heads that the
    rank's query heads use."""

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return a call with, for each query head, the position of its key head among the key
        heads that the rank holds; without positions if the rank uses all of them in order."""
        local_call = call if inner is None else inner(call, local)
        group = call.operands[q].shape[1] // max(1, call.operands[q + 1].shape[1])
        key_heads = [i for lo, hi in local.operand_intervals(q + 1, 1) for i in range(lo, hi)]
        query_heads = [i for lo, hi in local.operand_intervals(q, 1) for i in range(lo, hi)]
        positions = [key_heads.index(head // group) for head in query_heads]
        distinct = sorted(set(positions))
        if positions == [i for i in distinct for _ in range(len(positions) // len(distinct))]:
            positions = distinct  # the op repeats each key head for an equal number of query heads
        if positions == list(range(len(key_heads))):
            return local_call
        run = local_forms.attention_of_heads if q == 0 else local_forms.attention_of_heads_backward
        args, named = local_call.args, dict(local_call.kwargs)
        return retarget(local_call, run, local_call.target, positions, *args, **named)

    return localize


def _groups(call: OpCall, q: int, k: int) -> dict[str, int]:
    """Return the sizes of h = g * r query heads: g key heads, each used by r query heads."""
    heads, groups = call.operands[q].shape[1], call.operands[k].shape[1]
    return {"h": heads, "g": groups, "r": heads // max(1, groups)}


# -- attention by positions ------------------------------------------------------------------------


def arguments_of(call: OpCall) -> dict[str, Any]:
    """Return the arguments of the call by the names of the schema, with defaults."""
    schema = cast(OpOverload, call.target)._schema  # pyright: ignore[reportPrivateUsage]
    return {a.name: value for a, value in zip(schema.arguments, positional(call), strict=True)}


def _queries(args: Mapping[str, Any]) -> int:
    """Return the operand of the queries, which keys and values follow."""
    return cast(Operand, args["q"]).index


def _left(call: OpCall, terms: Mapping[str, str]) -> str:
    """Return the left side of a rule, from the term of each argument. Values of tokens [1 t] are
    shared by the batch."""
    operands = [""] * len(call.operands)
    for name, value in arguments_of(call).items():
        for item in value if isinstance(value, (tuple, list)) else (value,):  # pyright: ignore
            if isinstance(item, Operand):
                is_shared = name.endswith("_values") and call.operands[item.index].shape[0] == 1
                operands[item.index] = terms[name].replace("b", "1") if is_shared else terms[name]
    return ", ".join(operands)


def _terms(h: str, g: str, s: str) -> dict[str, str]:
    """Return the term of each argument of the attention ops, for the terms of the heads of q and of
    k and v, and of the keys; b: batch; t: queries; e, f: the sizes of a head of k and of v."""
    q, k, v, out = f"b {h} t e!", f"b {g} {s} e!", f"b {g} {s} f!", f"b {h} t f!"
    values = {"query_values": "b t", "key_values": f"b {s}", "sinks": h, "lse": f"b {h} t"}
    return {"q": q, "k": k, "v": v, "out": out, "grad": out, "dq": q, **values}


def _attention(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (q, k, v, values of tokens, sinks) -> (out, log-sum-exp)."""
    terms = _terms(h, g, "s!")
    text = f"{_left(call, terms)} -> {terms['out']}, {terms['lse']}"
    rule = make(call, text, sizes=_groups(call, 0, 1), localize=_over)
    return _counted(call, rule, 0, 2)


def _attention_backward(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (grad, q, k, v, out, log-sum-exp, values of tokens) -> gradients of q, k, v.
    The backward has 5 matrix products, the forward 2."""
    terms = _terms(h, g, "s!")
    text = f"{_left(call, terms)} -> {terms['q']}, {terms['k']}, {terms['v']}"
    rule = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),), localize=_over)
    return _counted(call, rule, 1, 5)


def _part(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (q, k, v, out?, lse?, values of tokens, sinks?) -> (out, log-sum-exp)."""
    terms = _terms(h, g, "t")
    text = f"{_left(call, terms)} -> {terms['out']}, {terms['lse']}"
    rule = make(call, text, sizes=_groups(call, 0, 1), localize=_over)
    return replace(_counted(call, rule, 0, 2), narrow=_with_shift(call, ()))


def _part_backward(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (grad, q, k, v, out, log-sum-exp, dq?, values of tokens) -> (dq, gradients of
    k and v)."""
    terms = _terms(h, g, "t")
    text = f"{_left(call, terms)} -> {terms['q']}, {terms['k']}, {terms['v']}"
    rule = make(call, text, sizes=_groups(call, 1, 2), localize=_over)
    return replace(_counted(call, rule, 1, 5), narrow=_with_shift(call, (1, 2)))


def _with_shift(call: OpCall, results: Sequence[int]) -> Callable[[Strategy, int], Strategy]:
    """Return the field ``narrow`` of a part: if the tokens are split, keys, values and values of
    keys are shifted, and so are these ``results``."""
    args = arguments_of(call)
    keys = [x.index for x in (args["k"], args["v"], *(args["key_values"] or ()))]
    moving = {*keys, *(len(call.operands) + result for result in results)}

    def narrow(strategy: Strategy, num: int) -> Strategy:
        def moved(index: int, placement: Placement) -> Placement:
            """Return the placement with the shift of the call, if it splits moving tokens."""
            tokens = 1 if index < len(call.operands) and len(call.operands[index].shape) == 2 else 2
            if index in moving and isinstance(placement, Shard) and placement.dim == tokens:
                return with_shift(placement, placement.shift + args["shift"], num)
            return placement

        both = [moved(i, p) for i, p in enumerate((*strategy.operands, *strategy.results))]
        num_operands = len(strategy.operands)
        return replace(
            strategy, operands=tuple(both[:num_operands]), results=tuple(both[num_operands:])
        )

    return narrow


_FORMS: dict[object, tuple[Callable[..., Any], Any]] = {
    _dt.attention.default: (split_attention.attention_over, _dt.attention.default),
    _dt.attention_backward.default: (
        split_attention.attention_over_backward,
        _dt.attention_backward.default,
    ),
    _dt.attention_part.default: (split_attention.attention_part, _dt.attention.default),
    _dt.attention_part_backward.default: (
        split_attention.attention_part_backward,
        _dt.attention_backward.default,
    ),
}
"""The local form of each op, and the op that the local form calls without options."""


def _over(call: OpCall, local: Local) -> OpCall:
    """Return a call of the local form with the positions of the rank's queries and keys; the call
    itself if they are all positions and it has no options."""
    args = arguments_of(call)
    q = _queries(args)
    queries, keys = local.operand_intervals(q, 2), local.operand_intervals(q + 1, 2)
    options = [args.pop(name) for name in OPTIONS]
    sinks, shift = args.pop("sinks", None), args.pop("shift", None)
    given = [sinks, *options] if "grad" not in args else options
    while given and not given[-1]:
        given.pop()
    whole = all(local.operand_shape(i)[2] == call.operands[i].shape[2] for i in (q, q + 1))
    if whole and not given and shift is None:
        return call
    form, run = _FORMS[call.target]
    tensors = [args.pop(name) for name in ("grad", "q", "k", "v") if name in args]
    return retarget(call, form, *tensors, run, queries, keys, *args.values(), *given)


OPTIONS = ("window", "softcap", "query_values", "key_values", "comparisons")
"""The options of all attention ops, which say what a query sees."""


# -- counts ----------------------------------------------------------------------------------------


def _counted(call: OpCall, rule: Rule, q: int, products: int) -> Rule:
    """Return the rule with the FLOP of this many products of queries and keys (alternately of head
    size e and f), for the pairs that positions leave, and with the imbalance of these pairs."""
    args, sizes = arguments_of(call), rule.size
    band = band_of(args["is_causal"], args["window"])
    num_queries, num_keys = (call.operands[i].shape[2] for i in (q, q + 1))
    pairs = visible_pairs(((0, num_queries),), ((0, num_keys),), band)
    heads = math.prod(call.operands[q].shape[:2])

    def imbalance(strategies: Sequence[tuple[Strategy, int]]) -> float:
        """See `Rule.imbalance`."""
        cuts = [_cuts_of(strategies, i) for i in (q, q + 1)]
        return _imbalance(*cuts, num_queries, num_keys, band) if cuts[0] else 1.0

    return replace(
        rule,
        flops=products * (sizes["e"] + sizes["f"]) * heads * pairs,
        imbalance=imbalance,
    )


Cuts = tuple[tuple[Placement, int], ...]


def _cuts_of(strategies: Sequence[tuple[Strategy, int]], operand: int) -> Cuts:
    """Return the placements of an operand and the sizes of the axes that split its queries."""
    cuts = [(s.operands[operand], num) for s, num in strategies if _splits_tokens(s)]
    return tuple(cuts)


def _splits_tokens(strategy: Strategy) -> bool:
    return "t" in strategy.factors


@lru_cache(maxsize=1024)
def _imbalance(queries: Cuts, keys: Cuts, num_queries: int, num_keys: int, band: Band) -> float:
    """Return the visible pairs of the fullest rank over its share of the queries, as a fraction of
    all pairs."""
    total = visible_pairs(((0, num_queries),), ((0, num_keys),), band)
    share = largest_part([(p, n) for p, n in queries if isinstance(p, Shard)], num_queries)
    if not total:
        return 1.0
    most = max(
        visible_pairs(_held(queries, at, num_queries), _held(keys, at, num_keys), band)
        for at in itertools.product(*(range(num) for _, num in queries))
    )
    return most / (total * share)


def _held(cuts: Cuts, at: Sequence[int], size: int) -> tuple[Span, ...]:
    """Return the positions that the rank at these coordinates of the axes holds."""
    held: tuple[Span, ...] = ((0, size),)
    for (placement, num), coordinate in zip(cuts, at, strict=True):
        if isinstance(placement, Shard):
            held = intersect(held, index_sets(placement, size, num)[coordinate])
    return held


def imbalance_of(call: OpCall, shard: Shard, num: int) -> float:
    """Return the visible pairs of the fullest rank over the mean of ``num`` ranks, under is_causal
    and the window of the attention ``call``. ``shard``: how dim 2 of the queries is split."""
    args = arguments_of(call)
    band = band_of(args["is_causal"], args["window"])
    num_queries, num_keys = (call.operands[_queries(args) + i].shape[2] for i in (0, 1))
    sets = index_sets(shard, num_queries, num)
    pairs = [visible_pairs(held, ((0, num_keys),), band) for held in sets]
    return max(pairs) * num / sum(pairs) if any(pairs) else 1.0


def visible_shifts(call: OpCall, shard: Shard, num: int) -> tuple[int, ...]:
    """Return the shifts i for which a rank r of ``num`` sees keys of rank r - i, under is_causal
    and the window of the attention ``call``. ``shard``: how dim 2 of queries and keys is split."""
    args = arguments_of(call)
    band = band_of(args["is_causal"], args["window"])
    sets = index_sets(shard, call.operands[_queries(args)].shape[2], num)
    return tuple(
        i
        for i in range(num)
        if any(visible_pairs(sets[r], sets[(r - i) % num], band) for r in range(num))
    )


# -- attention with any mask -----------------------------------------------------------------------


def _attention_masked(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule (q, k, v, mask) -> (out, log-sum-exp), in which queries may be split."""
    mask = _mask_term(call, 3, h)
    text = f"b {h} t e!, b {g} s! e!, b {g} s! f!, {mask} -> b {h} t f!, b {h} t"
    rule = make(call, text, sizes=_groups(call, 0, 1))
    return replace(rule, flops=_attention_flops(rule))


def _attention_masked_backward(call: OpCall, h: str, g: str) -> Rule:
    """Return the rule of the backward of masked attention. If the queries are split, the gradients
    of keys and values are pending sums."""
    q, k, v, out = f"b {h} t e!", f"b {g} s! e!", f"b {g} s! f!", f"b {h} t f!"
    mask = _mask_term(call, 4, h)
    text = f"{out}, {q}, {k}, {v}, {mask}, {out}, b {h} t -> {q}, {k}, {v}"
    rule = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),))
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _mask_term(call: OpCall, mask: int, heads: str, queries: str = "t") -> str:
    """Return the term of a mask that is broadcast against the scores [b h t s]: ``1 t s!``."""
    shape = call.operands[mask].shape
    factors = ["b", heads, queries, "s!"][4 - len(shape) :]
    return " ".join("1" if n == 1 else f for f, n in zip(factors, shape, strict=True))


def _attention_flops(rule: Rule) -> int:
    """Return 2 FLOPs for each multiply-add of q k^T (head size e) and of its product with v (f)."""
    size = rule.size
    pairs = math.prod(size.get(factor, 1) for factor in ("b", "h", "t", "s"))
    return 2 * (size["e"] + size.get("f", size["e"])) * pairs


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


# -- caches ------------------------------------------------------------------------------


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


RULES: dict[str, Builder] = {
    "dt.attention.default": _by_heads(_attention, 0),
    "dt.attention_backward.default": _by_heads(_attention_backward, 1),
    "dt.attention_part.default": _by_heads(_part, 0),
    "dt.attention_part_backward.default": _by_heads(_part_backward, 1),
    "dt.attention_masked.default": _by_heads(_attention_masked, 0),
    "dt.attention_masked_backward.default": _by_heads(_attention_masked_backward, 1),
    "dt.cache_attention.default": _by_heads(_cache_attention, 0),
    "dt.cache_attention_fold.default": _cache_attention_fold,
    "dt.pick_heads.default": with_kind("view", _pick_heads),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _flash_attention_backward,
}
