"""Builders of rules, and the helpers that the tables of rules share.

    "aten.mm.default": pattern("m k, k n -> m n", linear=((0,), (1,)), flops="m k n")

A *term* is the text of one tensor's dims in a pattern, such as ``m k``.
Invariant: a linear group is dropped if its operands cannot be pending sums: bools, and floats whose
result is an int (rounding is not linear).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dtensor.numerics import ReduceOp
from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, Meta, OpCall, Operand
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
    """Return a builder for ops whose rule is the same text for all arguments.

    ``linear``, ``addends``, ``reduce``, ``localize``: fields of `Rule`. ``flops``: the factors
    whose product, doubled, is the number of floating-point operations.
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
    """Return the rule that ``text``, a pattern such as "m k, k n -> m n", denotes for this call.

    ``linear``, ``addends``, ``reduce``, ``localize``: fields of `Rule`. ``flops``: the factors
    whose product, doubled, is the number of floating-point operations. ``sizes``: the sizes of
    factors that the shapes do not determine.
    """
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


def with_kind(kind: Kind, builder: Builder) -> Builder:
    """Return a builder of the same rules with this kind instead of "compute"."""
    return lambda call: replace(builder(call), kind=kind)


def with_dtypes(dtypes: Dtypes, builder: Builder) -> Builder:
    """Return a builder of the same rules for ops that take only these mixes of dtypes."""
    return lambda call: replace(builder(call), dtypes=dtypes)


def with_parts(parts_of: Callable[[OpCall], Parts], builder: Builder) -> Builder:
    """Return a builder of the same rules with the `Parts` that ``parts_of`` returns for a call."""

    def build(call: OpCall) -> Rule:
        rule, parts = builder(call), parts_of(call)
        return rule if parts is None else replace(rule, parts=parts)

    return build


def linear_groups(call: OpCall, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return the groups whose operands can be pending sums in the dtypes of this call."""
    results = [meta for meta in call.results if meta is not None]
    return tuple(
        tuple(group)
        for group in groups
        if group and all(_keeps_sums(call.operands[i], r) for i in group for r in results)
    )


def _keeps_sums(operand: Meta, result: Meta) -> bool:
    """Return whether a pending sum of the operand can become one of the result in these dtypes."""
    # bools have no sums; transports do not send complex32
    if {operand.dtype, result.dtype} & {torch.bool, torch.complex32}:
        return False
    return _inexact(result.dtype) or not _inexact(operand.dtype)


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def operand_index(call: OpCall, position: int, name: str) -> int | None:
    """Return the index of the operand that is this argument; None if it is not a tensor."""
    value = call.arg(position, name)
    return value.index if isinstance(value, Operand) else None


def joint_group(call: OpCall, *arguments: tuple[int, str]) -> Groups:
    """Return one linear group of the operands at these arguments; no group if one of the arguments
    is a literal other than 0."""
    group: list[int] = []
    for position, name in arguments:
        value = call.arg(position, name, 0)
        if isinstance(value, Operand):
            group.append(value.index)
        elif value != 0:
            return ()
    return (tuple(group),)


def full_names(text: str) -> list[str]:
    """Return the full names of ops: ``neg lerp.Scalar dt.dropout`` -> aten.neg.default,
    aten.lerp.Scalar, dt.dropout.default."""
    full: list[str] = []
    for op in text.split():
        has_namespace = op.startswith(("dt.", "transformers."))
        full.append(
            (op if has_namespace else f"aten.{op}")
            + (".default" if has_namespace or "." not in op else "")
        )
    return full


def dim_names(count: int, whole: Iterable[int] = ()) -> list[str]:
    """Return a factor for each dim, ``["d0", "d1!", "d2"]``; dims in ``whole`` may not be split."""
    whole_set = set(whole)
    return [f"d{i}!" if i in whole_set else f"d{i}" for i in range(count)]


def whole_dims(prefix: str, rank: int) -> str:
    """Return the dims of a tensor none of whose dims may be split: ``x0! x1!``."""
    return " ".join(f"{prefix}{i}!" for i in range(rank))


def broadcast_term(factors: Sequence[str], sizes: Sequence[int], wide: Sequence[int]) -> str:
    """Return the dims of a tensor of these ``sizes`` as text: the last ``len(sizes)`` factors, with
    1 for a dim that is broadcast to a larger size in ``wide``."""
    start = len(factors) - len(sizes)
    return " ".join(
        "1" if size == 1 and other != 1 else factor
        for factor, size, other in zip(factors[start:], sizes, wide[start:], strict=True)
    )


def replace_dim(dims: Sequence[str], at: int, *texts: str) -> str:
    """Return ``dims`` as text, with dim ``at`` replaced by ``texts``, or dropped without texts."""
    return " ".join([*dims[:at], *texts, *dims[at + 1 :]])


def resolve_dims(value: Any, rank: int) -> tuple[int, ...]:
    """Return a ``dim`` argument as non-negative dims, ascending; None and [] mean all dims."""
    dims: list[int] = [value] if isinstance(value, int) else list(value or ())
    return tuple(sorted(dim % rank for dim in dims)) if dims and rank else tuple(range(rank))


def num_pairs(call: OpCall, first: int) -> int:
    """Return the number of elements of operands ``first`` and ``first + 1``, broadcast together."""
    a, b = call.operands[first : first + 2]
    return math.prod(np.broadcast_shapes(a.shape, b.shape))


def flatten_intervals(intervals: Intervals) -> list[int]:
    """Return intervals as the flat list [start, stop, start, ...] that ops of ``dt`` take."""
    return [point for interval in intervals for point in interval]


def count_within(intervals: Intervals, start: int, stop: int) -> int:
    """Return how many indices of the intervals lie in ``start:stop``."""
    return length(intersect(intervals, ((start, stop),))) if stop > start else 0


def local_sizes(position: int) -> Localizer:
    """Return a localizer that replaces the sizes at this argument by the local result's sizes."""

    def localize(call: OpCall, local: Local) -> OpCall:
        target, kwargs = call.target, dict(call.kwargs)
        return sized_call(call, local, position, target, *call.args, **kwargs)

    return localize


def sized_call(
    call: OpCall, local: Local, position: int, target: Callable[..., Any], *args: Any, **kwargs: Any
) -> OpCall:
    """Return a call of ``target`` with these arguments and the tensors of ``call``, whose argument
    at ``position`` is replaced by the local sizes of the first result."""
    sizes = list(local.result_sizes())
    args = (*args[:position], sizes, *args[position + 1 :])
    if -1 not in sizes:
        return retarget(call, target, *args, **kwargs)
    operand, dim = local.rows_operand()
    rows = Operand(operand)
    return retarget(call, local_forms.sized_by, rows, dim, target, position, *args, **kwargs)


def retarget(call: OpCall, target: Callable[..., Any], *args: Any, **kwargs: Any) -> OpCall:
    """Return a call of ``target`` with these arguments and the tensors of ``call``."""
    return OpCall(
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
        operands=call.operands,
        results=call.results,
        multiple=call.multiple,
    )
