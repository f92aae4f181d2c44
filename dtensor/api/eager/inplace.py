"""In-place ops as functional ones: what is computed, and how it is written back through views.

    x[1:].mul_(2)     mul(slice(x), 2)  then  slice_scatter(x, new)
    x.t().zero_()     full(sizes, 0)    then  permute(new)

`functional` gives the value that the operand is to have; `write_back` the value of the whole that
the operand is a view of. Both write calls into the graph that is being built.

Invariant: an in-place op or a view that is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dtensor.errors import PlanningError
from dtensor.sharding.spec.placements import Shard

if TYPE_CHECKING:
    from dtensor.api.eager.graph import OneOp
    from dtensor.api.eager.values import View

aten = torch.ops.aten
Call = Callable[..., fx.Node]
CPU = torch.device("cpu")


def functional(
    call: Call, target: Any, self: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """The new value of ``self``, in its own shape and dtype."""
    val = self.meta["val"]
    shape, dtype = list(val.shape), val.dtype
    match target:
        case aten.zero_.default:
            return call(aten.full.default, shape, 0, dtype=dtype, device=CPU)
        case aten.fill_.Scalar:
            return call(aten.full.default, shape, args[1], dtype=dtype, device=CPU)
        case aten.copy_.default | aten.fill_.Tensor:
            new = args[1]
        case _:
            new = call(functional_form(target), *args, **kwargs)
            found = new.meta["val"].dtype
            if not torch.can_cast(found, dtype):
                raise RuntimeError(
                    f"result type {found} can't be cast to the desired output type {dtype}"
                )
    if new.meta["val"].dtype != dtype:
        new = call(aten._to_copy.default, new, dtype=dtype)
    if list(new.meta["val"].shape) != shape:
        new = call(aten.expand.default, new, shape)
    return new


@cache
def functional_form(target: Any) -> Any:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``. PlanningError where torch has none."""
    space, name = target._schema.name.split("::")
    twin = name.removesuffix("_")
    taken = [(a.name, a.type) for a in target._schema.arguments]
    for schema in torch._C._jit_get_schemas_for_operator(f"{space}::{twin}"):
        if not schema.is_mutable and [(a.name, a.type) for a in schema.arguments] == taken:
            packet = getattr(getattr(torch.ops, space), twin)
            return getattr(packet, schema.overload_name or "default")
    raise refused(name, "it has no out-of-place form", "compute a new tensor instead")


def refused(name: str, why: str, fix: str) -> PlanningError:
    return PlanningError(f"{name} is not supported on a DTensor: {why}.\nfix: {fix}")


def write_back(call: Call, op: OneOp, chain: tuple[fx.Node, ...], new: fx.Node) -> fx.Node:
    """The whole, once ``new`` is written where the last of the views looks at it."""
    assert op.write is not None
    layout, view = op.operands[op.write]
    split = any(isinstance(p, Shard) for p in layout.spec.placements)
    steps = view.steps() if view is not None else ()
    for step, base in zip(reversed(steps), reversed(chain[:-1]), strict=True):
        new = _inverse(call, step, base, new, split)
    return new


def _inverse(call: Call, step: View, base: fx.Node, new: fx.Node, split: bool) -> fx.Node:
    shape = list(base.meta["val"].shape)
    match step.target:
        case (
            aten.view.default
            | aten._unsafe_view.default
            | aten.reshape.default
            | aten._reshape_alias.default
            | aten.unsqueeze.default
            | aten.squeeze.default
            | aten.squeeze.dim
            | aten.squeeze.dims
        ):
            return call(aten.reshape.default, new, shape)
        case aten.t.default:
            return call(aten.t.default, new)
        case aten.transpose.int:
            return call(aten.transpose.int, new, *step.args)
        case aten.permute.default:
            order = [d % len(shape) for d in step.args[0]]
            return call(aten.permute.default, new, [order.index(d) for d in range(len(order))])
        case aten.slice.Tensor:
            return call(aten.slice_scatter.default, base, new, *step.args)
        case aten.select.int if split:  # no rank need have the dim whole for this
            dim, index = step.args[0] % len(shape), step.args[1] % shape[step.args[0]]
            place = call(aten.arange.default, shape[dim], device=CPU)
            ones = [-1 if d == dim else 1 for d in range(len(shape))]
            here = call(aten.view.default, call(aten.eq.Scalar, place, index), ones)
            return call(aten.where.self, here, call(aten.unsqueeze.default, new, dim), base)
        case aten.select.int:
            return call(aten.select_scatter.default, base, new, *step.args)
        case aten.diagonal.default:
            return call(aten.diagonal_scatter.default, base, new, *step.args)
        case aten.expand.default if list(new.meta["val"].shape) == shape:
            return new
        case aten.expand.default if new.meta["val"].numel() == base.meta["val"].numel():
            return call(aten.reshape.default, new, shape)
        case aten.expand.default:
            raise PlanningError(
                "an in-place op on an expanded tensor writes one element several times.\n"
                "fix: write to x.clone(), or to the tensor before expand"
            )
        case _:
            name = step.target._schema.name.split("::")[1]
            raise refused(
                f"an in-place op on {name}(...)",
                "it is not known how to write back",
                "x = x.clone() first",
            )
