"""Rules of layers that are of no other table: attention with a mask, bags, bilinear, distances.

    flash attention (CPU)   "b h t e!, b h s! e!, b h s! e!, 1 h t s! -> b h t e!, b h t"
    _trilinear              "a o1 i, o i j, a o1 j -> a o"       linear in {a}, {b}, {c}
    _cdist_forward          "... p m!, ... r m! -> ... p r"

Causal attention has its queries whole, as their position counts; else they split freely.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dtensor.sharding.local import layers
from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import make, operand_index, pattern, retarget
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.planes import contiguous, positional, unless_empty
from dtensor.sharding.rules.tables.whole import whole


def _attention_terms(call: OpCall, q: int, k: int, causal: bool) -> tuple[str, str, str, str]:
    """Dims of the queries, of keys and values, of the statistics, and of the mask."""
    t = "t!" if causal else "t"
    heads = call.operands[q].shape[1]
    if call.operands[k].shape[1] != heads:
        raise no_rule(call, "its keys have another number of heads than its queries")
    mask = ""
    where = operand_index(call, len(call.args), "attn_mask")
    if where is not None:
        shape = call.operands[where].shape
        named = ["b", "h", t, "s!"][4 - len(shape) :]
        mask = ", " + " ".join("1" if n == 1 else f for f, n in zip(named, shape, strict=True))
    return f"b h {t} e!", "b h s! e!", f"b h {t}", mask


def _attention(call: OpCall) -> Rule:
    args = positional(call)
    if args[3]:
        raise no_rule(call, "it draws random numbers: dropout_p is not 0")
    q, k, lse, mask = _attention_terms(call, 0, 1, args[4])
    found = make(call, f"{q}, {k}, {k}{mask} -> {q}, {lse}", localize=unless_empty(_run_attention))
    return replace(found, flops=_attention_flops(found))


def _run_attention(call: OpCall, local: Local) -> OpCall:
    args = positional(call)
    named = dict(call.kwargs)
    rest = (args[4], named.get("attn_mask"), named.get("scale"))
    return retarget(call, layers.flash_attention, *args[:3], *rest)


def _attention_backward(call: OpCall) -> Rule:
    args = positional(call)
    if args[6]:
        raise no_rule(call, "it draws random numbers: dropout_p is not 0")
    q, k, lse, mask = _attention_terms(call, 1, 2, args[7])
    text = f"{q}, {q}, {k}, {k}, {q}, {lse}{mask} -> {q}, {k}, {k}"
    found = make(call, text, linear=((0,),), localize=unless_empty(_run_attention_backward))
    return replace(found, flops=_attention_flops(found) * 5 // 2)


def _run_attention_backward(call: OpCall, local: Local) -> OpCall:
    args = positional(call)
    named = dict(call.kwargs)
    rest = (args[7], named.get("attn_mask"), named.get("scale"))
    return retarget(call, layers.flash_attention_backward, *args[:6], *rest)


def _attention_flops(rule: Rule) -> int:
    size = rule.size
    return 4 * size["b"] * size["h"] * size["t"] * size["s"] * size["e"]


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


def _bag(call: OpCall) -> Rule:
    """Columns split; counts and offsets are of the indices alone."""
    if call.args[5] if len(call.args) > 5 else False:
        raise no_rule(call, "sparse gradients")
    weights = ", i!" if len(call.operands) > 3 else ""
    right = ["b! d"]
    for i, meta in enumerate(call.results[1:]):
        assert meta is not None
        dims = [f"r{i}!"] if len(meta.shape) < 2 else ["b!", "d"]
        right.append(" ".join([*dims, *(["~d"] if "d" not in dims else [])]))
    return make(call, f"v! d, i!, o!{weights} -> {', '.join(right)}", localize=contiguous())


def _bag_backward(call: OpCall) -> Rule:
    """(grad, indices, offsets, bag of each index, bag sizes, maxima, ..., weights?) -> [v d]."""
    left = ["b! d", "i!", "o!", "f!", "s!"]
    left.append("b! d" if len(call.operands[5].shape) > 1 else "m!")
    left += ["i!" for _ in call.operands[6:]]
    return make(call, f"{', '.join(left)} -> v! d", linear=((0,),), localize=contiguous())


def _cdist(call: OpCall) -> Rule:
    """A sum over the columns where no root is taken of it, the greatest difference for inf."""
    p: float = call.args[2]
    m = "m" if p in (0, 1, math.inf) else "m!"
    text = f"... p {m}, ... r {m} -> ... p r"
    return make(call, text, reduce="max" if p == math.inf else "sum", localize=unless_empty())


def _grouped_mm(call: OpCall) -> Rule:
    a, b = (len(meta.shape) for meta in call.operands[:2])
    if len(call.operands) > 3:
        raise no_rule(call, "it has a bias")
    offsets = ", g!" if len(call.operands) > 2 else ""
    match a, b:
        case 2, 3:
            text = f"m! k, g! k n{offsets} -> m! n"
        case 3, 2:
            text = f"g! m k, k n!{offsets} -> m n!"
        case 2, 2:
            text = f"m k!, k! n{offsets} -> g! m n"
        case _:
            text = f"g m k, g k n{offsets} -> g m n"
    return make(call, text, linear=((0,), (1,)), flops="m k n", localize=_local_grouped_mm)


def _local_grouped_mm(call: OpCall, local: Local) -> OpCall:
    args = positional(call)
    return retarget(call, layers.grouped_mm, *args[:3])


RULES: dict[str, Builder] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten._trilinear.default": _trilinear,
    "aten._embedding_bag.default": _bag,
    "aten._embedding_bag_forward_only.default": _bag,
    "aten._embedding_bag_backward.default": _bag_backward,
    "aten._embedding_bag_per_sample_weights_backward.default": pattern(
        "b! d, v! d, i!, o!, f! -> i!", linear=((0,), (1,)), localize=unless_empty(contiguous())
    ),
    "aten._grouped_mm.default": _grouped_mm,
    "aten._cdist_forward.default": _cdist,
    "aten._cdist_backward.default": pattern(
        "... p r, ... p m, ... r m, ... p r -> ... p m", linear=((0,),), localize=unless_empty()
    ),
    "aten._pdist_forward.default": whole(
        "its results are pairs of rows, in one triangular order", localize=contiguous()
    ),
    "aten._pdist_backward.default": pattern(
        "q!, n! m, q! -> n! m", linear=((0,),), localize=unless_empty(contiguous())
    ),
}
