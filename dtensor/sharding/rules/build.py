"""What tables of rules are written with: `pattern` for a row, and what builders share.

    "aten.mm.default": pattern("m k, k n -> m n", linear=((0,), (1,)), flops="m k n")

Invariants: a linear group is dropped where it could not be pending: bool operands, and results of
another kind (a float made int is rounded, which is not linear). Names no op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dtensor.numerics import ReduceOp
from dtensor.sharding.ops.call import Localizer, Meta, OpCall, Operand
from dtensor.sharding.rules.dtypes import Dtypes
from dtensor.sharding.rules.notation import parse_rule
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Kind, Parts, Rule
from dtensor.sharding.spec.placements import Intervals, intersect, length

Groups = Sequence[Sequence[int]]


def pattern(
    text: str,
    *,
    linear: Groups = (),
    addends: Sequence[int] = (),
    reduce: ReduceOp = "sum",
    localize: Localizer | None = None,
    flops: str = "",
) -> Builder:
    """A builder for ops whose rule is the same text for all arguments.

    ``flops`` names the factors whose product, doubled, is the number of operations.
    """
    return lambda call: make(
        call, text, linear=linear, addends=addends, reduce=reduce, localize=localize, flops=flops
    )


def make(
    call: OpCall,
    text: str,
    *,
    linear: Groups = (),
    addends: Sequence[int] = (),
    reduce: ReduceOp = "sum",
    localize: Localizer | None = None,
    flops: str = "",
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """The rule that ``text`` denotes for this call."""
    rule = parse_rule(
        text,
        call.operands,
        call.results,
        linear=linear_groups(call, linear),
        addends=addends,
        reduce=reduce,
        localize=localize,
        sizes=sizes,
    )
    if not flops:
        return rule
    return replace(rule, flops=2 * math.prod(rule.size[factor] for factor in flops.split()))


def of_kind(kind: Kind, builder: Builder) -> Builder:
    """The builder of such rules, for ops of another kind than "compute"."""
    return lambda call: replace(builder(call), kind=kind)


def with_dtypes(dtypes: Dtypes, builder: Builder) -> Builder:
    """The builder of such rules, for ops that do not take operands of any dtypes together."""
    return lambda call: replace(builder(call), dtypes=dtypes)


def with_parts(parts_of: Callable[[OpCall], Parts], builder: Builder) -> Builder:
    """The builder of rules that say how parts of 16-bit sums are given in float32."""

    def build(call: OpCall) -> Rule:
        rule, parts = builder(call), parts_of(call)
        return rule if parts is None else replace(rule, parts=parts)

    return build


def linear_groups(call: OpCall, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """The groups that can be pending sums with these dtypes."""
    results = [meta for meta in call.results if meta is not None]
    return tuple(
        tuple(group)
        for group in groups
        if group and all(_keeps_sums(call.operands[i], r) for i in group for r in results)
    )


def _keeps_sums(operand: Meta, result: Meta) -> bool:
    if {operand.dtype, result.dtype} & {torch.bool, torch.complex32}:  # no sums; none to send
        return False
    return _inexact(result.dtype) or not _inexact(operand.dtype)


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def operand_index(call: OpCall, position: int, name: str) -> int | None:
    """Which operand stands at this argument; None for a literal or an argument left out."""
    value = call.arg(position, name)
    return value.index if isinstance(value, Operand) else None


def joint(call: OpCall, *arguments: tuple[int, str]) -> Groups:
    """One group of the operands at these arguments; none if a non-zero literal is among them."""
    group: list[int] = []
    for position, name in arguments:
        value = call.arg(position, name, 0)
        if isinstance(value, Operand):
            group.append(value.index)
        elif value != 0:
            return ()
    return (tuple(group),)


def full_names(text: str) -> list[str]:
    """``neg lerp.Scalar dt.dropout``: aten.neg.default, aten.lerp.Scalar, dt.dropout.default."""
    names_found: list[str] = []
    for op in text.split():
        own = op.startswith(("dt.", "transformers."))
        names_found.append(
            (op if own else f"aten.{op}") + (".default" if own or "." not in op else "")
        )
    return names_found


def names(count: int, whole: Iterable[int] = ()) -> list[str]:
    """``d0 d1! d2`` as a list: a factor for each dim, those of ``whole`` not to be split."""
    kept = set(whole)
    return [f"d{i}!" if i in kept else f"d{i}" for i in range(count)]


def whole_dims(prefix: str, rank: int) -> str:
    """``x0! x1!``: the dims of a tensor of which none is to be split."""
    return " ".join(f"{prefix}{i}!" for i in range(rank))


def broadcast(factors: Sequence[str], sizes: Sequence[int], wide: Sequence[int]) -> str:
    """``1 d1``: the last of the factors, for a tensor of these sizes; 1 where it is broadcast."""
    start = len(factors) - len(sizes)
    return " ".join(
        "1" if size == 1 and other != 1 else factor
        for factor, size, other in zip(factors[start:], sizes, wide[start:], strict=True)
    )


def replaced(dims: Sequence[str], at: int, *texts: str) -> str:
    """``dims`` as text, with the one at ``at`` replaced by ``texts``, none: left out."""
    return " ".join([*dims[:at], *texts, *dims[at + 1 :]])


def resolve_dims(value: Any, rank: int) -> tuple[int, ...]:
    """A ``dim`` argument (None or an empty list: all) as non-negative dims, ascending."""
    dims: list[int] = [value] if isinstance(value, int) else list(value or ())
    return tuple(sorted(dim % rank for dim in dims)) if dims and rank else tuple(range(rank))


def num_pairs(call: OpCall, first: int) -> int:
    """The number of elements of an operand and the next one, broadcast against each other."""
    a, b = call.operands[first : first + 2]
    return math.prod(np.broadcast_shapes(a.shape, b.shape))


def flat(intervals: Intervals) -> list[int]:
    """Intervals as the flat list that the project's own ops take."""
    return [point for interval in intervals for point in interval]


def share(intervals: Intervals, start: int, stop: int) -> int:
    """How many of the held indices lie in ``start:stop``."""
    return length(intersect(intervals, ((start, stop),))) if stop > start else 0


def sized(position: int) -> Localizer:
    """Makes the sizes at this argument those of the rank's result."""
    return lambda call, local: call.with_arg(position, list(local.result_shape()))


def retarget(call: OpCall, target: Callable[..., Any], *args: Any, **kwargs: Any) -> OpCall:
    """The same operands and results under another function."""
    return OpCall(
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
        operands=call.operands,
        results=call.results,
        multiple=call.multiple,
    )
