"""Rules of products and distances: matrix multiplication, bilinear forms, cdist.

    mm          "m k, k n -> m n"           linear in {a}, {b}; k split: the results are summed
    addmm       "n, m k, k n -> m n"        k split: the addend must be pending, to be added once
    _grouped_mm "m! k, g k n, o! -> m! n"   g, the experts, split: the rows are summed

``flops`` counts 2 for each multiply-add of the global call.
"""

from __future__ import annotations

import math

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import (
    Groups,
    broadcast_term,
    make,
    operand_index,
    pattern,
    retarget,
)
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous, positional, unless_empty
from dtensor.sharding.rules.tables.unsplittable import Unsplittable

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
