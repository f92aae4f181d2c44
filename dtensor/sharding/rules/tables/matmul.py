"""Rules of products and distances: matrix multiplication, attention, bilinear forms, cdist.

    mm          "m k, k n -> m n"           linear in {a}, {b}; k split: the results are summed
    addmm       "n, m k, k n -> m n"        k split: x must be pending too, to be added once
    attention   "b (g r) t e, b g s e, b g s f -> b (g r) t f, b (g r) t"
    attention_masked   "b (g r) t e, b g s e, b g s e, b 1 t s -> b (g r) t e, b (g r) t"
    pick_heads  "b c! s d -> b h s d"    c is split where it has a copy for each rank
    flash attention (CPU)   "b h t e!, b h s! e!, b h s! e!, 1 h t s! -> b h t e!, b h t"
    _trilinear              "a o1 i, o i j, a o1 j -> a o"       linear in {a}, {b}, {c}
    _cdist_forward          "... p m!, ... r m! -> ... p r"
    _grouped_mm             "m! k, g k n, o! -> m! n"    g, the experts, split: the rows are summed

Causal attention has its queries whole, as their position counts; under a mask they split freely,
and the mask with them where it has such a dim.

Invariants: `flops` is 2 for each multiply and add of the global call; causal attention counts as
full. A contraction is the one thing here that makes a pending sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dtensor.sharding.ops.attention_masked  # noqa: F401  # pyright: ignore[reportUnusedImport]
from dtensor.errors import PlanningError
from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.ops.heads import copies_for, positions_of
from dtensor.sharding.rules.build import (
    Groups,
    broadcast,
    make,
    of_kind,
    operand_index,
    pattern,
    retarget,
)
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.rules.tables.localizers import contiguous, positional, unless_empty
from dtensor.sharding.rules.tables.unsplittable import Unsplittable
from dtensor.sharding.spec.placements import Shard, index_sets, simplest

_PRODUCT: Groups = ((0,), (1,))


def _added(product: str, result: str, flops: str) -> Builder:
    """``beta * x + alpha * a b``: x, broadcast to the result, is pending where k is split."""

    def build(call: OpCall) -> Rule:
        shape = call.operands[0].shape
        if result == "m" and shape != call.operands[1].shape[:1]:
            raise no_rule(call, "its first tensor is broadcast: torch then errs on empty shards")
        addend = broadcast(result.split(), shape, call.result.shape)
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
    """The rule of an attention op, from the terms of its query heads and of its key heads.

    Groups of heads are split, with their keys and values. A split of query heads that cuts a group
    leaves keys and values whole: each rank takes the heads that its queries use. ``q`` is the index
    of the queries; keys and values follow them.
    """

    def by_heads(call: OpCall) -> Rule:
        if call.operands[q].shape[1] == call.operands[q + 1].shape[1]:
            return build(call, "g", "g")
        grouped, cut = build(call, "(g r)", "g"), build(call, "h", "g!")
        return replace(grouped, fallback=cut, localize=_of_used_heads(q))

    return of_kind("attention", by_heads)


def _attention(call: OpCall, h: str, g: str) -> Rule:
    text = f"b {h} t! e!, b {g} s! e!, b {g} s! f! -> b {h} t! f!, b {h} t!"
    rule = make(call, text, sizes=_groups(call, 0, 1))
    return replace(rule, flops=_attention_flops(rule))


def _attention_backward(call: OpCall, h: str, g: str) -> Rule:
    text = (
        f"b {h} t! f!, b {h} t! e!, b {g} s! e!, b {g} s! f!, b {h} t! f!, b {h} t! "
        f"-> b {h} t! e!, b {g} s! e!, b {g} s! f!"
    )
    rule = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),))
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _attention_masked(call: OpCall, h: str, g: str) -> Rule:
    mask = _mask_term(call, 3, h)
    text = f"b {h} t e!, b {g} s! e!, b {g} s! e!, {mask} -> b {h} t e!, b {h} t"
    rule = make(call, text, sizes=_groups(call, 0, 1))
    return replace(rule, flops=_attention_flops(rule))


def _attention_masked_backward(call: OpCall, h: str, g: str) -> Rule:
    """Each rank's queries give a part of the gradients of keys and values."""
    q, kv, stats = f"b {h} t e!", f"b {g} s! e!", f"b {h} t"
    text = f"{q}, {q}, {kv}, {kv}, {_mask_term(call, 4, h)}, {q}, {stats} -> {q}, {kv}, {kv}"
    rule = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),))
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _mask_term(call: OpCall, mask: int, heads: str) -> str:
    """Its dims, from the right: those of the scores, or 1."""
    shape = call.operands[mask].shape
    named = ["b", heads, "t", "s!"][4 - len(shape) :]
    return " ".join("1" if n == 1 else f for f, n in zip(named, shape, strict=True))


def _groups(call: OpCall, q: int, k: int) -> dict[str, int]:
    heads, groups = call.operands[q].shape[1], call.operands[k].shape[1]
    return {"h": heads, "g": groups, "r": heads // max(1, groups)}


def _of_used_heads(q: int) -> Localizer:
    """Call the op with the key and value heads that the query heads of the rank use."""

    def localize(call: OpCall, local: Local) -> OpCall:
        group = call.operands[q].shape[1] // max(1, call.operands[q + 1].shape[1])
        held = [i for lo, hi in local.operand_intervals(q + 1, 1) for i in range(lo, hi)]
        heads = [i for lo, hi in local.operand_intervals(q, 1) for i in range(lo, hi)]
        used = [held.index(head // group) for head in heads]
        distinct = sorted(set(used))
        if used == [i for i in distinct for _ in range(len(used) // len(distinct))]:
            used = distinct  # the op repeats each for as many query heads
        if used == list(range(len(held))):
            return call
        run = local_forms.attention_of_heads if q == 0 else local_forms.attention_of_heads_backward
        return retarget(call, run, call.target, used, *call.args, **dict(call.kwargs))

    return localize


def _attention_flops(rule: Rule) -> int:
    size = rule.size
    pairs = math.prod(size.get(factor, 1) for factor in ("b", "h", "t", "s"))
    return 2 * (size["e"] + size.get("f", size["e"])) * pairs


def _pick_heads(call: OpCall) -> Rule:
    """A split of the result leaves the operand whole, unless it has the copies for that split."""
    have, heads = list(call.args[1]), list(call.args[2])

    def narrow(strategy: Strategy, num: int) -> Strategy:
        (placed,) = strategy.results
        if not isinstance(placed, Shard) or placed.dim != 1:
            return strategy
        spans = index_sets(placed, len(heads), num)
        used = [sorted({heads[i] for lo, hi in span for i in range(lo, hi)}) for span in spans]
        copies, blocks = copies_for(used)
        if copies != have:
            return strategy
        cut = simplest(Shard(1, blocks), call.operands[0].shape, num)
        return replace(strategy, operands=(cut,))

    def localize(call: OpCall, local: Local) -> OpCall:
        held = [have[i] for lo, hi in local.operand_intervals(0, 1) for i in range(lo, hi)]
        asked = [heads[i] for lo, hi in local.result_intervals(0, 1) for i in range(lo, hi)]
        if not set(asked) <= set(held):
            raise PlanningError(
                "two axes split the heads of keys that a cache copies for one of them.\n"
                "fix: split the query heads over one axis"
            )
        return retarget(call, local_forms.heads_at, call.args[0], positions_of(held, asked))

    rule = make(call, "b c! s d -> b h s d", linear=((0,),), localize=localize)
    return replace(rule, narrow=narrow)


# -- the CPU's kernel, which takes a mask ----------------------------------------------------------


def _masked_terms(call: OpCall, q: int, dropout_at: int) -> tuple[str, str, str, str]:
    """Dims of the queries, of keys and values, of the statistics, and of the mask."""
    args = positional(call)
    if args[dropout_at]:
        raise no_rule(call, "it draws random numbers: dropout_p is not 0")
    t = "t!" if args[dropout_at + 1] else "t"
    if call.operands[q + 1].shape[1] != call.operands[q].shape[1]:
        raise no_rule(call, "its keys have another number of heads than its queries")
    mask = ""
    where = operand_index(call, len(call.args), "attn_mask")
    if where is not None:
        shape = call.operands[where].shape
        named = ["b", "h", t, "s!"][4 - len(shape) :]
        mask = ", " + " ".join("1" if n == 1 else f for f, n in zip(named, shape, strict=True))
    return f"b h {t} e!", "b h s! e!", f"b h {t}", mask


def _masked(call: OpCall) -> Rule:
    q, k, lse, mask = _masked_terms(call, 0, dropout_at=3)
    run = unless_empty(_run_masked(local_forms.flash_attention, dropout_at=3))
    rule = make(call, f"{q}, {k}, {k}{mask} -> {q}, {lse}", localize=run)
    return replace(rule, flops=_attention_flops(rule))


def _masked_backward(call: OpCall) -> Rule:
    q, k, lse, mask = _masked_terms(call, 1, dropout_at=6)
    text = f"{q}, {q}, {k}, {k}, {q}, {lse}{mask} -> {q}, {k}, {k}"
    run = unless_empty(_run_masked(local_forms.flash_attention_backward, dropout_at=6))
    rule = make(call, text, linear=((0,),), localize=run)
    return replace(rule, flops=_attention_flops(rule) * 5 // 2)


def _run_masked(function: Callable[..., Any], dropout_at: int) -> Localizer:
    """The tensors stand before dropout_p, is_causal after it."""

    def localize(call: OpCall, local: Local) -> OpCall:
        args, named = positional(call), dict(call.kwargs)
        rest = (args[dropout_at + 1], named.get("attn_mask"), named.get("scale"))
        return retarget(call, function, *args[:dropout_at], *rest)

    return localize


# -- other products, distances -------------------------------------------------------------------


def _trilinear(call: OpCall) -> Rule:
    """The product of three tensors, each without the dims of its expand list, summed over some."""
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
    """A sum over the columns where no root is taken of it, the greatest difference for inf."""
    p: float = call.args[2]
    m = "m" if p in (0, 1, math.inf) else "m!"
    text = f"... p {m}, ... r {m} -> ... p r"
    return make(call, text, reduce="max" if p == math.inf else "sum", localize=unless_empty())


def _grouped_mm(call: OpCall) -> Rule:
    """Split groups are summed where each gives some rows (or columns): the others are zero."""
    a, b = (len(meta.shape) for meta in call.operands[:2])
    if len(call.operands) > 3:
        raise no_rule(call, "it has a bias")
    offsets = ", o!" if len(call.operands) > 2 else ""
    match a, b:
        case 2, 3:
            text, groups = f"m! k, g k n{offsets} -> m! n", 1
        case 3, 2:
            text, groups = f"g m k, k n!{offsets} -> m n!", 0
        case 2, 2:
            text, groups = f"m k!, k! n{offsets} -> g m n", None
        case _:
            text, groups = f"g m k, g k n{offsets} -> g m n", 0

    def localize(call: OpCall, local: Local) -> OpCall:
        from dtensor.sharding.local.grouped_matmul import grouped_mm

        given = [*positional(call)[:3], None][:3]
        return retarget(call, grouped_mm, *given, _held_groups(call, local, groups))

    return make(call, text, linear=((0,), (1,)), flops="m k n", localize=localize)


def _held_groups(call: OpCall, local: Local, operand: int | None) -> list[int] | None:
    """The groups in dim 0 of this operand, None: of the result; None where they are all."""
    if operand is None:
        total, held = call.result.shape[0], local.result_intervals(0, 0)
    else:
        total, held = call.operands[operand].shape[0], local.operand_intervals(operand, 0)
    groups = [g for start, stop in held for g in range(start, stop)]
    return None if len(groups) == total else groups


def _experts_backward(call: OpCall) -> Rule:
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
    "aten.addmm.default": _added("m k, k n", "m n", "m k n"),
    "aten.baddbmm.default": _added("b m k, b k n", "b m n", "b m k n"),
    "aten.addbmm.default": _added("b m k, b k n", "m n", "b m k n"),
    "aten.addmv.default": _added("m k, k", "m", "m k"),
    "aten.addr.default": _added("m, n", "m n", "m n"),
    "aten.linear.default": _linear,
    "dt.attention.default": _by_heads(_attention, 0),
    "dt.attention_backward.default": _by_heads(_attention_backward, 1),
    "dt.attention_masked.default": _by_heads(_attention_masked, 0),
    "dt.attention_masked_backward.default": _by_heads(_attention_masked_backward, 1),
    "dt.pick_heads.default": of_kind("view", _pick_heads),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _masked,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _masked_backward,
    "aten._trilinear.default": _trilinear,
    "aten._grouped_mm.default": _grouped_mm,
    # of transformers, there once it is imported: the product of its mixtures of experts
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
