"""What a DTensor does with each ATen op that reaches it below autograd.

    view ops           another DTensor on the same cell
    in-place ops       a new value for the cell, computed as the functional op
    factories          zeros_like and its kin: placed like their operand
    reads              item(), bool(), torch.equal: wait, and give a number
    all others         one planned op (run.py)

Random ops, and ops whose sizes depend on values, are refused. `_foreach_` ops run as torch's own
loops over single ops.

Invariant: an op that is not known to alias or to write gives a new cell; one that writes in a way
not known here is refused, never run on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dtensor.api.eager.errors import op_name
from dtensor.api.eager.graph import fake, fakes
from dtensor.api.eager.inplace import refused
from dtensor.api.eager.refused import (
    refuse_dynamic,
    refuse_fused,
    refuse_metadata,
    refuse_random,
    refuse_writes,
)
from dtensor.api.eager.run import Call, cells_of, execute
from dtensor.api.eager.values import Cell, layout_of
from dtensor.api.eager.views import alias, split, unbind, view
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.api.eager.tensor import DTensor

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]


def dispatch(target: Any, args: Args, kwargs: Kwargs) -> Any:
    handler = _handlers.get(target)
    if handler is None:
        handler = _handlers[target] = _handler_of(target)
    return handler(target, args, kwargs)


def _handler_of(target: Any) -> Handler:
    schema = target._schema
    name = schema.name.split("::")[1]
    if torch.Tag.nondeterministic_seeded in target.tags:
        return refuse_random
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
        return refuse_dynamic
    if name.startswith("_foreach_"):
        return _loop
    if torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), torch.DispatchKey.CompositeImplicitAutograd
    ):  # autograd takes it apart, but is off: inference_mode, or we are below it already
        return _take_apart
    if name.startswith("_fused_"):
        return refuse_fused
    if torch.Tag.inplace_view in target.tags or name in ("resize_", "set_", "resize_as_"):
        return refuse_metadata
    if target.is_view:
        return view
    if schema.is_mutable:
        written = [
            a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        if any(a.is_out for a in written):
            return _out
        if len(written) == 1 and written[0].name == schema.arguments[0].name:
            return _in_place
        return refuse_writes
    return _compute


# -- computing ---------------------------------------------------------------------------------


def _compute(target: Any, args: Args, kwargs: Kwargs) -> Any:
    ran = execute(target, args, kwargs)
    cells = cells_of(ran)
    if ran.planned.structure is torch.Tensor:
        assert cells[0] is not None
        return whole(cells[0])
    return ran.planned.structure(None if cell is None else whole(cell) for cell in cells)


def whole(cell: Cell) -> DTensor:
    """The DTensor that is all of a cell."""
    from dtensor.api.eager.tensor import DTensor

    return DTensor.of(cell)


def _in_place(target: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    _require_dtensor(target, x, args)
    ran = execute(target, args, kwargs, write=x)
    assert ran.values[0] is not None
    x._cell.set(ran.values[0])
    return x


def _require_dtensor(target: Any, x: Any, args: Args) -> None:
    from dtensor.api.eager.tensor import DTensor

    if not isinstance(x, DTensor):  # a plain tensor that is to take a DTensor's value
        call = Call()
        for value in args:
            call.key(value)
        raise refused(
            op_name(target),
            "it would write a DTensor's value into a plain tensor",
            "x.full_tensor() for the value",
        )


def _out(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.add(a, b, out=c)``: the functional op, then c takes its value."""
    outs = [a.name for a in target._schema.arguments if a.is_out]
    taken = [a.type for a in target._schema.arguments if not a.is_out]
    packet = target._overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        if not other._schema.is_mutable and [a.type for a in other._schema.arguments] == taken:
            given = {k: v for k, v in kwargs.items() if k not in outs}
            made = other(*args, **given)
            made = made if isinstance(made, (tuple, list)) else (made,)
            for name, value in zip(outs, made, strict=True):
                kwargs[name].copy_(value)
            return kwargs[outs[0]] if len(outs) == 1 else tuple(kwargs[n] for n in outs)
    raise refused(op_name(target), "its out= form has no functional twin", "leave out= away")


def _loop(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Torch's own loop over the list, which comes back here with single ops."""
    return target._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _take_apart(target: Any, args: Args, kwargs: Kwargs) -> Any:
    return target.decompose(*args, **kwargs)


# -- views -------------------------------------------------------------------------------------


def _index(target: Any, args: Args, kwargs: Kwargs) -> Any:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        return refuse_dynamic(target, args, kwargs)
    return _compute(target, args, kwargs)


def _index_put_(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """``x[mask] = number`` has a size that is known."""
    x, indices, value = args[:3]
    masks = [t for t in indices if t is not None and t.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return _in_place(target, args, kwargs)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if len(indices) > 1 or value.numel() != 1 or accumulate:
        return refuse_dynamic(target, args, kwargs)
    mask = masks[0].bool()
    mask = mask.reshape((*mask.shape, *(1 for _ in range(x.dim() - mask.dim()))))
    return _copy_(aten.copy_.default, (x, torch.where(mask, value.reshape(()), x)), {})


# -- copies and factories -----------------------------------------------------------------------


def _clone(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """A value never changes, so a clone is another cell that holds the same."""
    x = args[0]
    with fakes():
        new = target(fake(tuple(x.shape), x.stride(), x.dtype), *args[1:], **kwargs)
    value = x.value()
    return whole(Cell(value.session, layout_of(value.spec, tuple(new.stride())), value))


def _to_copy(target: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise refused(
            f"moving to {device}",
            "its shards live where the launch put them",
            'dt.launch(mesh, device="cuda")',
        )
    kept = {k: kwargs[k] for k in ("memory_format",) if kwargs.get(k) is not None}
    if kwargs.get("dtype") in (None, x.dtype):
        return _clone(aten.clone.default, (x,), kept)
    return _compute(target, (x,), {"dtype": kwargs["dtype"], **kept})


def _copy_(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """The source's own value where nothing need change; so gradients are stored for nothing."""
    from dtensor.api.eager.tensor import DTensor

    x, source = args[0], args[1]
    _require_dtensor(target, x, args)
    cell = x._cell
    alike = isinstance(source, DTensor) and source.session is cell.session
    alike = alike and (source.shape, source.dtype, source.mesh) == (x.shape, x.dtype, x.mesh)
    if alike and x._view is None:
        value = source.value()
        if cell.value is None or value.spec == cell.layout.spec:
            cell.set(value)
            return x
    return _in_place(target, args, kwargs)


def like_spec(spec: TensorSpec) -> TensorSpec:
    """The placement of a new tensor that is like another: split alike, never pending."""
    done = tuple(REPLICATE if isinstance(p, Partial) else p for p in spec.placements)
    return TensorSpec(spec.shape, spec.dtype, spec.mesh, done)


_FILLS: dict[Any, Callable[[Args], Any]] = {
    aten.zeros_like.default: lambda a: 0,
    aten.ones_like.default: lambda a: 1,
    aten.full_like.default: lambda a: a[1],
    aten.new_zeros.default: lambda a: 0,
    aten.new_ones.default: lambda a: 1,
    aten.new_full.default: lambda a: a[2],
}
_EMPTY = (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default)


def _factory(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of x's shape is placed as x is; one of another shape is on every rank."""
    x = args[0]
    given = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    with fakes():
        new = target(fake(tuple(x.shape), x.stride(), x.dtype), *args[1:], **given)
    shape, strides = tuple(new.shape), tuple(new.stride())
    spec = like_spec(x.spec)
    if shape == spec.shape:
        spec = TensorSpec(shape, new.dtype, spec.mesh, spec.placements)
    else:
        spec = TensorSpec(shape, new.dtype, spec.mesh, (REPLICATE,) * len(spec.placements))
    cell = Cell(x.session, layout_of(spec, strides), None)
    made = whole(cell)
    if target not in _EMPTY:
        fill(made, _FILLS[target](args))
    return made


def fill(x: DTensor, number: Any) -> None:
    """The first value of a cell that has none."""
    cell = x._cell
    spec = cell.layout.spec
    ran = execute(
        aten.full.default,
        (list(spec.shape), number),
        {"dtype": spec.dtype, "device": torch.device("cpu")},
        pinned=spec.sharding,
        like=x,
    )
    assert ran.values[0] is not None
    cell.set(ran.values[0])


# -- reads -------------------------------------------------------------------------------------


def _item(target: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].full_value().item()


def _equal(target: Any, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    same = _compute(aten.eq.Tensor, (a, b), {})
    return bool(_compute(aten.all.default, (same,), {}).full_value())


def _allclose(target: Any, args: Args, kwargs: Kwargs) -> bool:
    same: Any = torch.isclose(*args, **kwargs).all()
    return bool(same.full_value())


def _sdp_choice(target: Any, args: Args, kwargs: Kwargs) -> int:
    return 0  # torch's plain math: what the fused op covers was taken above (functions.py)


def _attention(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Attention that a layer of torch's calls; what the user calls never comes here."""
    query, key, value, is_causal, scale = _attention_args(args, kwargs, 3)
    return _compute(torch.ops.dt.attention.default, (query, key, value, is_causal, scale), {})


def _attention_backward(target: Any, args: Args, kwargs: Kwargs) -> Any:
    *tensors, is_causal, scale = _attention_args(args, kwargs, 6)
    return _compute(torch.ops.dt.attention_backward.default, (*tensors, is_causal, scale), {})


def _attention_args(args: Args, kwargs: Kwargs, num_tensors: int) -> Args:
    dropout = args[num_tensors] if len(args) > num_tensors else 0.0
    is_causal = args[num_tensors + 1] if len(args) > num_tensors + 1 else False
    if dropout or kwargs.get("attn_mask") is not None:
        raise refused(
            "the fused attention of torch",
            "it takes no mask and no dropout here",
            "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ...",
        )
    query = args[0] if num_tensors == 3 else args[1]
    scale = kwargs.get("scale")
    return (
        *args[:num_tensors],
        is_causal,
        query.shape[-1] ** -0.5 if scale is None else scale,
    )


def _check_errors(target: Any, args: Args, kwargs: Kwargs) -> None:
    """What torch.linalg asks of its kernels, to raise at once: so it waits."""
    target(args[0].full_value(), *args[1:], **kwargs)


def _batch_norm(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """``native_batch_norm`` writes its running statistics, which its schema does not say."""
    mean, var, training = args[3:6]
    if not training or mean is None:
        return _compute(target, args, kwargs)
    form = aten._native_batch_norm_legit_functional.default
    out, saved_mean, rstd, new_mean, new_var = _compute(form, args, kwargs)
    for old, new in ((mean, new_mean), (var, new_var)):
        _copy_(aten.copy_.default, (old, new), {})
    return out, saved_mean, rstd


_handlers: dict[Any, Handler] = {
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.lift_fresh.default: alias,
    aten.lift.default: alias,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.unbind.int: unbind,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.index.Tensor: _index,
    aten.index_put_.default: _index_put_,
    aten.allclose.default: _allclose,
    aten._fused_sdp_choice.default: _sdp_choice,
    aten.native_batch_norm.default: _batch_norm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten._linalg_check_errors.default: _check_errors,
    **dict.fromkeys(_FILLS, _factory),
    **dict.fromkeys(_EMPTY, _factory),
}
