"""Rules of products: matrix multiplication and attention.

    mm          "m k, k n -> m n"           linear in {a}, {b}; k split: the results are summed
    addmm       "n, m k, k n -> m n"        k split: x must be pending too, to be added once
    attention   "b (g r) t e, b g s e, b g s f -> b (g r) t f, b (g r) t"

Invariants: `flops` is 2 for each multiply and add of the global call; causal attention counts as
full. A contraction is the one thing here that makes a pending sum.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import Groups, make, of_kind, operand_index, pattern
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule

_PRODUCT: Groups = ((0,), (1,))


def _added(product: str, result: str, flops: str) -> Builder:
    """``beta * x + alpha * a b``: x, broadcast to the result, is pending where k is split."""

    def build(call: OpCall) -> Rule:
        meta = call.results[0]
        assert meta is not None
        shape = call.operands[0].shape
        if result == "m" and shape != call.operands[1].shape[:1]:
            raise no_rule(call, "its first tensor is broadcast: torch then errs on empty shards")
        factors = result.split()
        start = len(factors) - len(shape)
        wide = zip(factors[start:], shape, meta.shape[start:], strict=True)
        addend = " ".join("1" if size == 1 and n != 1 else f for f, size, n in wide)
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


def _attention(call: OpCall) -> Rule:
    heads = _heads(call, 0, 1)
    text = f"b {heads} t! e!, b g s! e!, b g s! f! -> b {heads} t! f!, b {heads} t!"
    found = make(call, text, sizes=_groups(call, 0, 1))
    return replace(found, flops=_attention_flops(found))


def _attention_backward(call: OpCall) -> Rule:
    heads = _heads(call, 1, 2)
    text = (
        f"b {heads} t! f!, b {heads} t! e!, b g s! e!, b g s! f!, b {heads} t! f!, b {heads} t! "
        f"-> b {heads} t! e!, b g s! e!, b g s! f!"
    )
    found = make(call, text, sizes=_groups(call, 1, 2), linear=((0,),))
    return replace(found, flops=_attention_flops(found) * 5 // 2)


def _heads(call: OpCall, q: int, k: int) -> str:
    """Query heads: groups of r, or just the groups where each has one."""
    return "g" if call.operands[q].shape[1] == call.operands[k].shape[1] else "(g r)"


def _groups(call: OpCall, q: int, k: int) -> dict[str, int]:
    groups = call.operands[k].shape[1]
    return {"g": groups, "r": call.operands[q].shape[1] // max(1, groups)}


def _attention_flops(rule: Rule) -> int:
    size = rule.size
    pairs = size["b"] * size["g"] * size["r"] * size["t"] * size["s"]
    return 2 * (size["e"] + size["f"]) * pairs


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
    "dt.attention.default": of_kind("attention", _attention),
    "dt.attention_backward.default": of_kind("attention", _attention_backward),
}
