"""Ops that give an operand with some of its elements changed, and the same as a write in place.

    index_copy(k, 2, i, x)                    k with the rows i of dim 2 replaced by x
    writes_of(call)                           OpWrites(base=(0,), positions=(1,), overwrites=True)
    in_place(call, 0)                         index_copy_(k, 2, i, x)

`in_place` takes the call that a rank runs: the op itself, or what stands for it where the written
dim is split (local/indexing.py), which leaves out the rows of other ranks.

Invariants: an in-place call changes operand ``base`` alone, elements that the op would change, to
the bits that it would give. Not here: whether somebody still reads what was there before
(plan/passes/in_place.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtensor.private_torch import OpOverload, jit_get_schemas_for_operator
from dtensor.sharding.local import indexing
from dtensor.sharding.local.in_range import check_range
from dtensor.sharding.ops.call import OpCall, Operand

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpWrites:
    """What an op changes of an operand.

    base: the operands that may be what is changed; positions: those that say where; overwrites:
    whether what it writes depends on nothing that was there, so that twice is as once; partial:
    whether it touches but the elements that it changes.
    """

    base: tuple[int, ...]
    positions: tuple[int, ...] = ()
    overwrites: bool = True
    partial: bool = True


_ADDING: Mapping[Any, Any] = {
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_WRITING: Mapping[Any, Any] = {
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
    """What the op changes; None of one that is not known to be such."""
    target: Any = call.target
    match target:
        case aten.copy.default | aten.slice_scatter.default | aten.select_scatter.default:
            return OpWrites((0,))
        case aten.index_put.default:
            where = tuple(i.index for i in call.args[1] if isinstance(i, Operand))
            return OpWrites((0,), where, overwrites=not call.arg(3, "accumulate", False))
        case aten.where.self:
            return OpWrites((1, 2), (0,), partial=False)
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            return OpWrites((0,), (1,), partial=False)
        case aten.fill.Scalar | aten.fill.Tensor | aten.zero.default:
            return OpWrites((0,), partial=False)
        case _ if target in _WRITING:
            return OpWrites((0,), (1,))
        case _ if target in _ADDING:
            return OpWrites((0,), (1,), overwrites=False)
        case _ if call.args and call.args[0] == Operand(0) and _elementwise(target) is not None:
            return OpWrites((0,), overwrites=False, partial=False)
        case _:
            return None


def in_place(call: OpCall, base: int) -> OpCall:
    """The call of a rank as one that changes its operand ``base``; it returns nothing of use."""
    target: Any = call.target
    known = _WRITING.get(target) or _ADDING.get(target)
    if known is None:
        known = _elementwise(target)
    if known is not None:
        return replace(call, target=known)
    return replace(call, target=_FUNCTIONS[target, base])


@cache
def _elementwise(target: Any) -> Any:
    """``aten.add_.Tensor`` of ``aten.add.Tensor``; None of what torch has no such form of."""
    known: object = target
    if not isinstance(known, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    schema_of_op, jit = target._schema, jit_get_schemas_for_operator
    space, name = schema_of_op.name.split("::")
    for schema in jit(f"{schema_of_op.name}_"):
        types = [(a.name, a.type) for a in schema.arguments]
        same = types == [(a.name, a.type) for a in schema_of_op.arguments]
        if same and schema.is_mutable and schema.overload_name == schema_of_op.overload_name:
            packet: Any = getattr(getattr(torch.ops, space), f"{name}_")
            return getattr(packet, schema_of_op.overload_name or "default")
    return None


def check_of(call: OpCall) -> Callable[..., None] | None:
    """What raises where the call would, for indices that are out of range; called as it is."""
    from dtensor.sharding.local.device_asserts import CHECKS

    return _check_shard if call.target is indexing.write_shard else CHECKS.get(call.target)


def into_slice(x: Tensor, source: Tensor, *at: Any) -> None:
    aten.slice.Tensor(x, *at).copy_(source)


def into_select(x: Tensor, source: Tensor, dim: int, index: int) -> None:
    x.select(dim, index).copy_(source)


def where_else(mask: Tensor, source: Tensor, x: Tensor) -> None:
    """``source`` where the mask is true."""
    torch.where(mask, source, x, out=x)


def where_not(mask: Tensor, x: Tensor, source: Tensor) -> None:
    """``source`` where the mask is false."""
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
    check_range(index, size, -size)


_FUNCTIONS: Mapping[tuple[Any, int], Callable[..., None]] = {
    (aten.slice_scatter.default, 0): into_slice,
    (aten.select_scatter.default, 0): into_select,
    (aten.where.self, 1): where_not,
    (aten.where.self, 2): where_else,
    (indexing.write_shard, 0): indexing.write_shard_in_place,
}
