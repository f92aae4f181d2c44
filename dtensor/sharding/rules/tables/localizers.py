"""Localizers that several tables share: for ranks that hold no element, and strided pieces.

    localize=unless_empty(local_sizes)      kernels reject a batch of 0: zeros take their place
    localize=contiguous()                   kernels read storage in order, and shards have strides

Names no op.
"""

from __future__ import annotations

from typing import Any, cast

from dtensor.private_torch import OpOverload
from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall, Operand
from dtensor.sharding.rules.build import retarget


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
        return retarget(here, local_forms.contiguously, call.target, *here.args, **named)

    return localized


def _zeros(call: OpCall, local: Local) -> OpCall:
    if not call.multiple:
        (meta,) = call.results
        assert meta is not None
        shape = local.result_shape()
        return retarget(call, local_forms.zeros, Operand(0), list(shape), meta.dtype)
    shapes = [None if m is None else local.result_shape(i) for i, m in enumerate(call.results)]
    dtypes = [None if m is None else m.dtype for m in call.results]
    return retarget(call, local_forms.many_zeros, Operand(0), shapes, dtypes)


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
