"""Localizers that several tables share.

localize=unless_empty(local_sizes)      return zeros on a rank that holds no elements
localize=contiguous()                   copy shards for kernels that ignore strides
"""

from __future__ import annotations

from typing import Any, cast

from dtensor.private_torch import OpOverload
from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall, Operand
from dtensor.sharding.rules.build import retarget


def unless_empty(localize: Localizer | None = None) -> Localizer:
    """Return a localizer that returns zeros on a rank whose shard is empty while the global tensor
    is not, and otherwise does what ``localize`` does. Kernels reject such shards. The zeros are
    right, as the results are empty too or are parts of a sum over the split factor."""

    def guarded(call: OpCall, local: Local) -> OpCall:
        """Return a call that creates zeros if a non-empty operand or result has an empty shard."""
        for i, meta in enumerate(call.operands):
            sizes = zip(meta.shape, local.operand_shape(i), strict=True)
            if any(size and not local_size for size, local_size in sizes):
                return _zeros(call, local)
        for i, meta in enumerate(call.results):
            if meta is not None and 0 not in meta.shape and 0 in local.result_shape(i):
                return _zeros(call, local)
        return call if localize is None else localize(call, local)

    return guarded


def contiguous(localize: Localizer | None = None) -> Localizer:
    """Return a localizer that applies ``localize``; if this does not replace the op, the op runs on
    contiguous copies of its operands, because a shard may be a strided view."""

    def localized(call: OpCall, local: Local) -> OpCall:
        # a call that ``localize`` replaced by a local form needs no contiguous operands
        local_call = call if localize is None else localize(call, local)
        if local_call.target is not call.target:
            return local_call
        args, named = local_call.args, dict(local_call.kwargs)
        return retarget(local_call, local_forms.contiguously, call.target, *args, **named)

    return localized


def _zeros(call: OpCall, local: Local) -> OpCall:
    """Return a call that creates zeros in place of the op's results."""
    if not call.multiple:
        (meta,) = call.results
        assert meta is not None
        shape = local.result_shape()
        return retarget(call, local_forms.zeros, Operand(0), list(shape), meta.dtype)
    shapes = [None if m is None else local.result_shape(i) for i, m in enumerate(call.results)]
    dtypes = [None if m is None else m.dtype for m in call.results]
    return retarget(call, local_forms.many_zeros, Operand(0), shapes, dtypes)


def positional(call: OpCall) -> list[Any]:
    """Return all positional arguments of the op's schema. Arguments that the call passes by name or
    leaves out are filled in."""
    schema = cast(OpOverload, call.target)._schema  # pyright: ignore[reportPrivateUsage]
    named = dict(call.kwargs)
    return [
        call.arg(i, argument.name, named.get(argument.name, argument.default_value))
        for i, argument in enumerate(schema.arguments)
        if not argument.kwarg_only
    ]


def is_split(call: OpCall, local: Local) -> bool:
    """Return whether an operand of the rank is smaller than the global operand."""
    return any(local.operand_shape(i) != m.shape for i, m in enumerate(call.operands))
