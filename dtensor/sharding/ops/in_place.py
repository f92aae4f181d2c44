"""Ops that return a changed copy of an operand, and the same ops as writes in place.

    index_copy(k, 2, i, x)                    k with rows i of dim 2 replaced by x
    writes_of(call)                           OpWrites(base=(0,), positions=(1,), overwrites=True)
    in_place(call, 0)                         index_copy_(k, 2, i, x)

`in_place` takes the call of a rank: the op itself, or its local form if the written dim is split
(local/indexing.py). plan/passes/in_place.py decides when a write in place is safe.

Invariant: an in-place call changes only operand ``base``, to the bits that the op returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtensor.private_torch import OpOverload, jit_get_schemas_for_operator
from dtensor.sharding.local import indexing
from dtensor.sharding.local.in_range import check_range, record_check
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.spec.shards import copy, unless

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpWrites:
    """How an op changes an operand.

    base: the operands that the op may change in place.
    positions: the operands that state which elements change.
    overwrites: whether the written values do not depend on the old values, so that the op is
        idempotent.
    partial: whether the op accesses only the elements that it changes.
    """

    base: tuple[int, ...]
    positions: tuple[int, ...] = ()
    overwrites: bool = True
    partial: bool = True


_IN_PLACE_ADDS: Mapping[Any, Any] = {
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_IN_PLACE_WRITES: Mapping[Any, Any] = {
    aten.copy.default: aten.copy_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.zero.default: aten.zero_.default,
}


def writes_of(call: OpCall) -> OpWrites | None:
    """Return how the op changes an operand; None if it is not a known op of this kind."""
    target: Any = call.target
    match target:
        case aten.copy.default | aten.slice_scatter.default | aten.select_scatter.default:
            return OpWrites((0,))
        case aten.index_put.default:
            indices = tuple(i.index for i in call.args[1] if isinstance(i, Operand))
            return OpWrites((0,), indices, overwrites=not call.arg(3, "accumulate", False))
        case aten.where.self:
            return OpWrites((1, 2), (0,), partial=False)
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            return OpWrites((0,), (1,), partial=False)
        case aten.fill.Scalar | aten.fill.Tensor | aten.zero.default:
            return OpWrites((0,), partial=False)
        case _ if target in _IN_PLACE_WRITES:
            return OpWrites((0,), (1,))
        case _ if target in _IN_PLACE_ADDS:
            return OpWrites((0,), (1,), overwrites=False)
        case _ if call.args and call.args[0] == Operand(0) and _in_place_form(target) is not None:
            return OpWrites((0,), overwrites=False, partial=False)
        case _:
            return None


def in_place(call: OpCall, base: int) -> OpCall:
    """Return a call that changes operand ``base`` in place. Its result must not be used."""
    target: Any = call.target
    form = _IN_PLACE_WRITES.get(target) or _IN_PLACE_ADDS.get(target)
    if form is None:
        form = _in_place_form(target)
    if form is not None:
        return replace(call, target=form)
    return replace(call, target=_FUNCTIONS[target, base])


@cache
def _in_place_form(target: Any) -> Any:
    """Return the in-place overload of an elementwise op, ``aten.add_.Tensor`` for
    ``aten.add.Tensor``; None if the op is not elementwise or has no such overload."""
    untyped_target: object = target
    if not isinstance(untyped_target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    schema_of_op, jit = target._schema, jit_get_schemas_for_operator
    namespace, name = schema_of_op.name.split("::")
    for schema in jit(f"{schema_of_op.name}_"):
        types = [(a.name, a.type) for a in schema.arguments]
        equal_types = types == [(a.name, a.type) for a in schema_of_op.arguments]
        if equal_types and schema.is_mutable and schema.overload_name == schema_of_op.overload_name:
            packet: Any = getattr(getattr(torch.ops, namespace), f"{name}_")
            return getattr(packet, schema_of_op.overload_name or "default")
    return None


def write_unless(
    skip: Tensor, write: Callable[..., object], of: object, at: int, *args: Any, **kwargs: Any
) -> None:
    """Call ``write``, the call of the in-place op ``of`` on ``args``, which changes ``args[at]``.
    If ``skip``, a bool[], is True, all its bits stay. Where the op names the elements, they are
    written again; else the whole operand is copied."""
    given, x = list(args), args[at]
    match of:
        case aten.copy_.default:
            given[1] = unless(skip, x, args[1])
        case _ if of is into_slice:
            given[1] = unless(skip, aten.slice.Tensor(x, *args[2:]), args[1])
        case _ if of is into_select:
            given[1] = unless(skip, x.select(*args[2:]), args[1])
        case aten.index_copy_.default if x.dim():
            given[3] = unless(skip, x.index_select(*args[1:3]), args[3])
        case aten.index_put_.default if not (args[3:4] == (True,) or _has_mask(args[1])):
            given[2] = unless(skip, aten.index.Tensor(x, args[1]), args[2])
        case _ if of is indexing.write_shard_in_place:
            size = args[6]
            given[3] = torch.where(skip, size, args[3])  # a row of no rank
            record_check(given[3], (size, -size, None))
        case _:
            old = x.clone()
            write(*args, **kwargs)
            copy(x, old, ~skip)
            return
    write(*given, **kwargs)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def index_check(call: OpCall) -> Callable[..., None] | None:
    """Return the function that raises if an index of the call is out of range; it takes the call's
    arguments. Return None if the call has nothing to check."""
    from dtensor.sharding.local.device_asserts import CHECKS

    return _check_shard if call.target is indexing.write_shard else CHECKS.get(call.target)


def into_slice(x: Tensor, source: Tensor, *at: Any) -> None:
    aten.slice.Tensor(x, *at).copy_(source)


def into_select(x: Tensor, source: Tensor, dim: int, index: int) -> None:
    x.select(dim, index).copy_(source)


def where_else(mask: Tensor, source: Tensor, x: Tensor) -> None:
    """Write ``source`` into x where the mask is True."""
    torch.where(mask, source, x, out=x)


def where_not(mask: Tensor, x: Tensor, source: Tensor) -> None:
    """Write ``source`` into x where the mask is False."""
    torch.where(mask, x, source, out=x)


def _check_shard(
    kind: str,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: object,
    pieces: object,
    size: int,
    *_: Any,
) -> None:
    """Check the indices of a call of `indexing.write_shard`."""
    check_range(index, size, -size)


_FUNCTIONS: Mapping[tuple[Any, int], Callable[..., None]] = {
    (aten.slice_scatter.default, 0): into_slice,
    (aten.select_scatter.default, 0): into_select,
    (aten.where.self, 1): where_not,
    (aten.where.self, 2): where_else,
    (indexing.write_shard, 0): indexing.write_shard_in_place,
}
