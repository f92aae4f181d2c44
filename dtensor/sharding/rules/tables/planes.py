"""What the tables of layers share: planes of images, and ranks that hold no element at all.

    planes(2, "x -> y, y")                  "... x0! x1! -> ... y0! y1!, ... y0! y1!"
    localize=unless_empty(local_sizes)      kernels reject a batch of 0: zeros take their place

Invariants: batch and channel split freely and the planes are whole. Names no op.
"""

from __future__ import annotations

from typing import Any, cast

from torch._ops import OpOverload

from dtensor.sharding.local import layers
from dtensor.sharding.ops.call import Local, Localizer, OpCall, Operand
from dtensor.sharding.rules.build import Groups, make, retarget
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule


def planes(
    rank: int, form: str, *, linear: Groups = (), localize: Localizer | None = None
) -> Builder:
    """``form`` names the tensors by their planes: those of one letter have planes of one size."""
    left, _, right = form.partition("->")
    terms = [
        ", ".join(_plane(letter.strip(), rank) for letter in side.split(","))
        for side in (left, right)
    ]
    text = " -> ".join(terms)

    def build(call: OpCall) -> Rule:
        return make(call, text, linear=linear, localize=unless_empty(localize))

    return build


def _plane(letter: str, rank: int) -> str:
    return " ".join(["...", *(f"{letter}{i}!" for i in range(rank))])


def unless_empty(localize: Localizer | None = None) -> Localizer:
    """``localize``, but zeros on a rank that holds nothing of a dim that is not empty as a whole.

    Its results are empty, or its parts of sums over the split factor.
    """

    def guarded(call: OpCall, local: Local) -> OpCall:
        for i, meta in enumerate(call.operands):
            sizes = zip(meta.shape, local.operand_shape(i), strict=True)
            if any(whole and not held for whole, held in sizes):
                return _zeros(call, local)
        return call if localize is None else localize(call, local)

    return guarded


def contiguous(localize: Localizer | None = None) -> Localizer:
    """``localize``, then the op on contiguous tensors: shards may be strided pieces."""

    def localized(call: OpCall, local: Local) -> OpCall:
        here = call if localize is None else localize(call, local)
        if here.target is not call.target:
            return here
        named = dict(here.kwargs)
        return retarget(here, layers.contiguously, call.target, *here.args, **named)

    return localized


def _zeros(call: OpCall, local: Local) -> OpCall:
    if not call.multiple:
        (meta,) = call.results
        assert meta is not None
        shape = local.result_shape()
        return retarget(call, layers.zeros, Operand(0), list(shape), meta.dtype)
    shapes = [None if m is None else local.result_shape(i) for i, m in enumerate(call.results)]
    dtypes = [None if m is None else m.dtype for m in call.results]
    return retarget(call, layers.many_zeros, Operand(0), shapes, dtypes)


def positional(call: OpCall) -> list[Any]:
    """All positional arguments by the op's schema, defaults and named ones filled in."""
    schema = cast(OpOverload, call.target)._schema  # pyright: ignore[reportPrivateUsage]
    named = dict(call.kwargs)
    return [
        call.arg(i, argument.name, named.get(argument.name, argument.default_value))
        for i, argument in enumerate(schema.arguments)
        if not argument.kwarg_only
    ]


def is_split(call: OpCall, local: Local) -> bool:
    """Whether a rank's operands are smaller than the global ones."""
    return any(local.operand_shape(i) != m.shape for i, m in enumerate(call.operands))
