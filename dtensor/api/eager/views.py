"""Views of a cell, and in-place ops on views, expressed as functional ops.

    x[1:].t()         the steps slice, then t
    x[1:].mul_(2)     mul(slice(x), 2)  then  slice_scatter(x, new)
    x.t().zero_()     full(sizes, 0)    then  permute(new)

`view_step` returns the shape of a view. `functional` and `write_back` add calls to the graph of an
op (op_program.py): for the new value of the written view, and for the new value of its cell.
Invariant: an unknown in-place op or view is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from dtensor.api.eager.errors import op_name, unsupported
from dtensor.api.eager.values import CellTensor, ViewStep
from dtensor.errors import PlanningError
from dtensor.private_torch import jit_get_schemas_for_operator

aten: Any = torch.ops.aten
Write = Callable[..., fx.Node]
CPU = torch.device("cpu")

_steps: dict[Any, ViewStep] = {}


def view_step(x: CellTensor, target: Any, args: tuple[Any, ...]) -> ViewStep:
    """Return ``target(x, *args)`` as a view of x's cell. Raises torch's own error if x has no such
    view."""
    parent = x._view
    layout = (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype)
    key = (layout if parent is None else parent, target, _hashable(args))
    step = _steps.get(key)
    if step is None:
        # a meta tensor, not a fake one: it raises the errors of torch's kernels
        last_index = sum(max(n - 1, 0) * s for n, s in zip(x.shape, x.stride(), strict=True))
        storage = torch.empty(x.storage_offset() + last_index + 1, dtype=x.dtype, device="meta")
        with torch.no_grad():
            new = target(storage.as_strided(x.shape, x.stride(), x.storage_offset()), *args)
        step = _steps[key] = ViewStep(
            parent,
            target,
            args,
            tuple(new.shape),
            tuple(new.stride()),
            int(new.storage_offset()),
            new.dtype,
        )
    return step


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def functional(
    call: Write, target: Any, self: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """Add calls that compute the new value of ``self`` after an in-place op, in the shape and dtype
    of ``self``."""
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
            form = functional_form(target)
            if form is None:
                raise unsupported(
                    op_name(target), "it has no out-of-place form", "compute a new tensor instead"
                )
            new = call(form, *args, **kwargs)
            result_dtype = new.meta["val"].dtype
            if not torch.can_cast(result_dtype, dtype):
                raise RuntimeError(
                    f"result type {result_dtype} can't be cast to the desired output type {dtype}"
                )
    if new.meta["val"].dtype != dtype:
        new = call(aten._to_copy.default, new, dtype=dtype)
    if list(new.meta["val"].shape) != shape:
        new = call(aten.expand.default, new, shape)
    return new


@cache
def functional_form(target: Any) -> Any:
    """Return the functional form of an op, as aten.add.Tensor for aten.add_.Tensor and
    aten.add.out; None if torch has none."""
    space, name = target._schema.name.split("::")
    twin = name if name.endswith("__") else name.removesuffix("_")
    parameters = [(a.name, a.type) for a in target._schema.arguments if not a.is_out]
    for schema in jit_get_schemas_for_operator(f"{space}::{twin}"):
        if not schema.is_mutable and [(a.name, a.type) for a in schema.arguments] == parameters:
            packet = getattr(getattr(torch.ops, space), twin)
            return getattr(packet, schema.overload_name or "default")
    return None


def write_back(
    call: Write, view: ViewStep | None, chain: tuple[fx.Node, ...], new: fx.Node, *, is_split: bool
) -> fx.Node:
    """Add calls that compute the cell's value after ``new`` is written through its views.

    ``chain``: the cell's value, then each view of it; ``is_split``: the cell is sharded.
    """
    steps = view.steps() if view is not None else ()
    for step, base in zip(reversed(steps), reversed(chain[:-1]), strict=True):
        new = _write_through(call, step, base, new, is_split)
    return new


def _write_through(
    call: Write, step: ViewStep, base: fx.Node, new: fx.Node, is_split: bool
) -> fx.Node:
    """Add calls that compute the value of ``base`` after ``new`` is written to one view of it."""
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
        case aten.select.int if is_split:  # select_scatter would need the dim unsplit
            dim, index = step.args[0] % len(shape), step.args[1] % shape[step.args[0]]
            positions = call(aten.arange.default, shape[dim], device=CPU)
            view_shape = [-1 if d == dim else 1 for d in range(len(shape))]
            is_selected = call(
                aten.view.default, call(aten.eq.Scalar, positions, index), view_shape
            )
            return call(aten.where.self, is_selected, call(aten.unsqueeze.default, new, dim), base)
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
            raise unsupported(
                f"an in-place op on {op_name(step.target)}(...)",
                "it is not known how to write back",
                "x = x.clone() first",
            )
