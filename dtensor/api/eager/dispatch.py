"""The handler of each ATen op that reaches a DTensor below autograd.

    view ops           another tensor on the same cell (`Alias`); split, unbind: slices, selections
    in-place ops       a new value for the cell, computed by the functional op
    factories          zeros_like and similar: placed like their operand
    random ops         counter-based (random_ops.py)
    reads              item(), bool(), torch.equal: wait, and return a number
    all others         one planned op (execute_op.py), whose results are new cells

Handlers return cells and aliases, which tensor.py wraps as DTensors. Invariant: an op that writes
in a way that is not known here, or whose result size depends on values, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from dtensor.api.eager.errors import op_name, unsupported
from dtensor.api.eager.execute_op import execute, fill, own_value
from dtensor.api.eager.op_program import fake, fake_tensors
from dtensor.api.eager.random_ops import draw
from dtensor.api.eager.values import Alias, Cell, CellTensor
from dtensor.api.eager.views import functional_form, view_step
from dtensor.api.store.handle import layout_of
from dtensor.frontend.capture.random_ops import MULTINOMIAL_FIX
from dtensor.private_torch import dispatch_has_kernel_for_dispatch_key, no_dispatch, pytree
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.spec import TensorSpec

aten: Any = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]


def dispatch(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an op. Return cells and aliases for new tensors, in the structure of torch's result."""
    handler = _handlers.get(target)
    if handler is None:
        handler = _handlers[target] = _handler_of(target)
    return handler(target, args, kwargs)


def _handler_of(target: Any) -> Handler:
    """Return the handler of an op that `_handlers` does not list, by its schema and tags."""
    schema = target._schema
    name = schema.name.split("::")[1]
    if torch.Tag.nondeterministic_seeded in target.tags:
        return _run_random
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
        return _refuse_dynamic
    if name.startswith("_foreach_"):
        return _foreach
    if dispatch_has_kernel_for_dispatch_key(
        target.name(), torch.DispatchKey.CompositeImplicitAutograd
    ):  # autograd, which decomposes it, is off (inference_mode), or we are below it already
        return _decompose
    if name.startswith("_fused_"):
        return _refuse_fused
    if name in ("resize_", "set_", "resize_as_"):
        return _refuse_metadata
    if torch.Tag.inplace_view in target.tags:
        return _view_in_place
    if target.is_view:
        return _view
    if schema.is_mutable:
        written = [
            a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        if any(a.is_out for a in written):
            return _run_into_out
        if len(written) == 1 and written[0].name == schema.arguments[0].name:
            return _run_in_place
        return _refuse_writes
    return _compute


# -- computing ---------------------------------------------------------------------------------


def _compute(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an op as one planned op, and return its results in torch's structure."""
    result = execute(target, args, kwargs)
    structure = result.planned.structure
    return result.cells()[0] if structure is torch.Tensor else structure(result.cells())


def _run_in_place(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute the new value of ``args[0]``, and store it in the cell of this DTensor."""
    x = args[0]
    _require_dtensor(target, x)
    result = execute(target, args, kwargs, write=x)
    assert result.values[0] is not None
    x._cell.set(result.values[0])
    return x


def _require_dtensor(target: Any, x: Any) -> None:
    """Raise PlanningError for an op that would write into a plain tensor."""
    if not isinstance(x, CellTensor):  # a plain tensor, into which a DTensor would be written
        raise unsupported(
            op_name(target),
            "it would write a DTensor's value into a plain tensor",
            "x.full_tensor() for the value",
        )


def _run_into_out(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run ``torch.add(a, b, out=c)`` as the functional op, and copy its result into c."""
    outs = [a.name for a in target._schema.arguments if a.is_out]
    form = functional_form(target)
    if form is None:
        raise unsupported(
            op_name(target), "its out= form has no functional twin", "leave out= away"
        )
    form_kwargs = {k: v for k, v in kwargs.items() if k not in outs}
    if any(a.name == "dtype" and a.kwarg_only for a in target._schema.arguments):
        # as in torch, which sums in the dtype of out=
        form_kwargs["dtype"] = form_kwargs.get("dtype") or kwargs[outs[0]].dtype
    outputs = form(*args, **form_kwargs)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    pairs = list(zip([kwargs[name] for name in outs], outputs, strict=True))
    if any(out.shape != value.shape for out, value in pairs):
        raise unsupported(
            op_name(target), "out= has another shape than the result", "leave out= away"
        )
    if any(out.dtype != value.dtype for out, value in pairs):
        with fake_tensors():  # raises torch's error if torch does not cast
            target(*pytree.tree_map(_as_fake, args), **pytree.tree_map(_as_fake, dict(kwargs)))
    for out, value in pairs:
        out.copy_(value)
    return kwargs[outs[0]] if len(outs) == 1 else tuple(kwargs[n] for n in outs)


def _as_fake(x: Any) -> Any:
    return fake(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


def _foreach(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run torch's own loop over the list, which dispatches single ops."""
    return target._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _decompose(target: Any, args: Args, kwargs: Kwargs) -> Any:
    return target.decompose(*args, **kwargs)


# -- views -----------------------------------------------------------------------------------------


def _view(target: Any, args: Args, kwargs: Kwargs) -> Alias:
    x, *view_args = args
    names = [a.name for a in target._schema.arguments]
    view_args += [kwargs[name] for name in names[1 + len(view_args) :] if name in kwargs]
    return _view_alias(x, target, *view_args)


def _view_in_place(target: Any, args: Args, kwargs: Kwargs) -> CellTensor:
    """Run ``x.t_()``: make x the view that ``x.t()`` returns."""
    x = args[0]
    packet = getattr(aten, target._schema.name.split("::")[1].removesuffix("_"))
    overload = getattr(packet, target._overloadname, None) or packet.int  # transpose_.default
    view = _view(overload, args, kwargs).view
    with no_dispatch():  # changes the shape and strides of the wrapper tensor
        target(*args, **kwargs)
    x._view, x._cached_view = view, None
    return x


def _view_alias(x: CellTensor, target: Any, *args: Any) -> Alias:
    return Alias(x._cell, view_step(x, target, args))


def _alias_of(target: Any, args: Args, kwargs: Kwargs) -> Alias:
    return Alias(args[0]._cell, args[0]._view)


def _split(target: Any, args: Args, kwargs: Kwargs) -> list[Alias]:
    """Return the slices of x along a dim. ``args[1]``: the size of all, or a list of sizes."""
    x, size = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % max(x.dim(), 1)
    length = x.shape[dim]
    if isinstance(size, (list, tuple)):
        sizes = list(size)
    elif length == 0 or size == 0:
        sizes = [length]
    else:
        sizes = [min(size, length - start) for start in range(0, length, size)]
    if sum(sizes) != length:
        raise RuntimeError(f"split sizes {sizes} do not add up to {length}, dim {dim} of {x.spec}")
    parts: list[Alias] = []
    start = 0
    for part_size in sizes:
        parts.append(_view_alias(x, aten.slice.Tensor, dim, start, start + part_size, 1))
        start += part_size
    return parts


def _unbind(target: Any, args: Args, kwargs: Kwargs) -> list[Alias]:
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    return [_view_alias(x, aten.select.int, dim, i) for i in range(x.shape[dim])]


def _index(target: Any, args: Args, kwargs: Kwargs) -> Any:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        return _refuse_dynamic(target, args, kwargs)
    return _compute(target, args, kwargs)


def _index_put_(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run ``x[indices] = value``; a mask is allowed if the value is one number."""
    x, indices, value = args[:3]
    masks = [t for t in indices if t is not None and t.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return _run_in_place(target, args, kwargs)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if len(indices) > 1 or value.numel() != 1 or accumulate:
        return _refuse_dynamic(target, args, kwargs)
    mask = masks[0]
    if mask.dtype == torch.uint8:  # with torch's message
        raise RuntimeError(
            "masked_fill_ only supports boolean masks, but got mask with dtype unsigned char"
        )
    mask = mask.reshape((*mask.shape, *(1 for _ in range(x.dim() - mask.dim()))))
    return _copy_(aten.copy_.default, (x, torch.where(mask, value.reshape(()), x)), {})


def _run_random(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a random op in its counter-based form. Raises PlanningError if it has none."""
    drawn = draw(target, args, kwargs)
    if drawn is None:
        name = op_name(target)
        raise unsupported(name, _NO_FORM, MULTINOMIAL_FIX if name == "multinomial" else _FORMS)
    return drawn


# -- copies and factories -----------------------------------------------------------------------


def _clone(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return a new cell that holds the same value, which never changes."""
    x = args[0]
    with fake_tensors():
        new = target(fake(tuple(x.shape), x.stride(), x.dtype), *args[1:], **kwargs)
    value = own_value(x)
    return Cell(value.session, layout_of(value.stored.spec, tuple(new.stride())), value)


def _to_copy(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Convert the dtype. Moving to another device raises PlanningError."""
    x = args[0]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise unsupported(
            f"moving to {device}",
            "its shards live where the launch put them",
            'dt.launch(mesh, device="cuda")',
        )
    clone_kwargs = {k: kwargs[k] for k in ("memory_format",) if kwargs.get(k) is not None}
    if kwargs.get("dtype") in (None, x.dtype):
        return _clone(aten.clone.default, (x,), clone_kwargs)
    return _compute(target, (x,), {"dtype": kwargs["dtype"], **clone_kwargs})


def _copy_(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run ``x.copy_(source)``. If the shape, dtype, mesh and placement are the same, x takes over
    the source's value, so that storing a gradient costs nothing."""
    x, source = args[0], args[1]
    _require_dtensor(target, x)
    cell = x._cell
    same = isinstance(source, CellTensor) and source.session is cell.session
    same = same and (source.shape, source.dtype, source.mesh) == (x.shape, x.dtype, x.mesh)
    if same and x._view is None:
        value = own_value(source)
        if cell.value is None or value.stored.spec == cell.layout.spec:
            cell.set(value)
            return x
    return _run_in_place(target, args, kwargs)


def like_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec for a new tensor of the shape, dtype and placement of another, but with
    Replicate in place of pending sums."""
    placements = tuple(REPLICATE if isinstance(p, Partial) else p for p in spec.placements)
    return TensorSpec(spec.shape, spec.dtype, spec.mesh, placements)


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
    """Return a new cell for `zeros_like` and similar: placed like x, or replicated if its shape is
    another."""
    x = args[0]
    factory_kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    with fake_tensors():
        new = target(fake(tuple(x.shape), x.stride(), x.dtype), *args[1:], **factory_kwargs)
    shape, strides = tuple(new.shape), tuple(new.stride())
    spec = like_spec(x.spec)
    if shape == spec.shape:
        spec = TensorSpec(shape, new.dtype, spec.mesh, spec.placements)
    else:
        spec = TensorSpec(shape, new.dtype, spec.mesh, (REPLICATE,) * len(spec.placements))
    cell = Cell(x.session, layout_of(spec, strides), None)
    if target not in _EMPTY:
        fill(cell, _FILLS[target](args))
    return cell


# -- reads -------------------------------------------------------------------------------------


def _item(target: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].full_value().item()


def _equal(target: Any, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    same: Any = (a == b).all()
    return bool(same.full_value())


def _allclose(target: Any, args: Args, kwargs: Kwargs) -> bool:
    same: Any = torch.isclose(*args, **kwargs).all()
    return bool(same.full_value())


def _sdp_choice(target: Any, args: Args, kwargs: Kwargs) -> int:
    return 0  # the math kernel: functions.py has already rewritten what dt.attention covers


def _attention(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the fused attention that torch's own layers call. functions.py rewrites user's calls."""
    query, key, value, is_causal, scale = _attention_args(args, kwargs, 3)
    return _compute(torch.ops.dt.attention.default, (query, key, value, is_causal, scale), {})


def _attention_backward(target: Any, args: Args, kwargs: Kwargs) -> Any:
    *tensors, is_causal, scale = _attention_args(args, kwargs, 6)
    return _compute(torch.ops.dt.attention_backward.default, (*tensors, is_causal, scale), {})


def _attention_args(args: Args, kwargs: Kwargs, num_tensors: int) -> Args:
    """Return the arguments of `dt.attention` or its backward for torch's fused attention. Raises
    PlanningError for a mask or dropout."""
    dropout = args[num_tensors] if len(args) > num_tensors else 0.0
    is_causal = args[num_tensors + 1] if len(args) > num_tensors + 1 else False
    if dropout or kwargs.get("attn_mask") is not None:
        raise unsupported(
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
    """Wait for the error codes of torch.linalg's kernels, and raise their errors."""
    target(args[0].full_value(), *args[1:], **kwargs)


def _batch_norm(target: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run ``native_batch_norm``, which writes running statistics, against its schema."""
    mean, var, training = args[3:6]
    if not training or mean is None:
        return _compute(target, args, kwargs)
    form = aten._native_batch_norm_legit_functional.default
    *results, new_mean, new_var = form(*args, **kwargs)  # dispatches to `_compute`
    for old, new in ((mean, new_mean), (var, new_var)):
        old.copy_(new)
    return tuple(results)


# -- refused ---------------------------------------------------------------------------------------


def _refusing(why: str, fix: str) -> Callable[[Any, Args, Kwargs], NoReturn]:
    """Return a handler that raises the error of an unsupported op."""

    def refuse(target: Any, args: Args, kwargs: Kwargs) -> NoReturn:
        raise unsupported(op_name(target), why, fix)

    return refuse


_NO_FORM = "this random op has no form by counter, so its numbers would depend on the placement"
_FORMS = (
    "rand_like, randn_like, randint_like, bernoulli, dropout, normal_, uniform_ or exponential_ "
    "without a generator; or dt.distribute(...) torch's draws"
)
_refuse_dynamic = _refusing(
    "its result is a number, or has a size, that depends on values, which only ranks know",
    "torch.where(mask, x, 0) with three arguments, or x.full_tensor() and the plain op",
)
_refuse_fused = _refusing("fused optimizers write many tensors", "fused=False")
_refuse_metadata = _refusing(
    "it changes a tensor's shape or storage in place", "the out-of-place op (x = x.t())"
)
_refuse_writes = _refusing("it writes several of its operands", "dt.compile")

_handlers: dict[Any, Handler] = {
    aten.detach.default: _alias_of,
    aten.alias.default: _alias_of,
    aten.lift_fresh.default: _alias_of,
    aten.lift.default: _alias_of,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
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
