"""Random ops of the namespace ``dt``, whose numbers are the same under every placement.

    random_uniform(shape, dtype)          -> f[shape]         in [0, 1); also random_normal
    random_integers(shape, low, high, dtype) -> i[shape]      in low:high
    dropout(x[...], p)                    -> y[...], kept: bool[...]
    dropout_add(x[...], residual[...], p) -> dropout(x) + residual, kept: bool[...]
    dropout_backward(grad[...], kept[...], p) -> dx[...]      linear in grad

A number is a function of (at_seed, at_step, op, global index). Each run receives ``at_seed`` and
``at_step``, as i64[] on the device in a deferred program; ``op`` counts the random ops of the
captured forward. ``shape`` is the global shape.
``pieces`` is the rank's part: for each dim the number of intervals, then their starts and stops.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.ops.distributions import integers, keep_mask, normal, uniform
from dtensor.sharding.ops.library import LIBRARY, define, note_plain
from dtensor.sharding.ops.philox import Key, Place
from dtensor.sharding.spec.placements import Intervals

_KEY_ARGUMENTS = "*, int at_seed, int at_step, int op"
_PLACE_ARGUMENTS = "SymInt[]? shape=None, int[]? pieces=None"


def encode_pieces(pieces: Sequence[Intervals]) -> list[int]:
    """Return the intervals of each dim as the flat list ``pieces`` that the ops take."""
    flat: list[int] = []
    for dim in pieces:
        flat.append(len(dim))
        for start, stop in dim:
            flat += [start, stop]
    return flat


def _place_and_key(
    local: Sequence[int],
    *,
    at_seed: int | Tensor,
    at_step: int | Tensor,
    op: int,
    shape: Sequence[int] | None = None,
    pieces: Sequence[int] | None = None,
) -> tuple[Place, Key]:
    """Return the rank's part of the tensor and the key of its random numbers.

    ``local``: the local shape; ``at_seed``, ``at_step``, ``op``: the key; ``shape``: the global
    shape; ``pieces``: for each dim the number of local intervals, then their starts and stops.
    Without ``pieces`` the local tensor is the whole tensor. Raises ValueError if the pieces do not
    fit the local shape.
    """
    key = Key(at_seed, at_step, op)
    if shape is None or pieces is None:
        return Place.whole(local), key
    dims: list[tuple[tuple[int, int], ...]] = []
    at = 0
    for _ in shape:
        count = pieces[at]
        numbers = pieces[at + 1 : at + 1 + 2 * count]
        dims.append(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
        at += 1 + 2 * count
    place = Place(tuple(shape), tuple(dims))
    if place.local_shape != tuple(local):
        raise ValueError(f"the pieces hold {place.local_shape}, the local tensor is {tuple(local)}")
    return place, key


# -- numbers -------------------------------------------------------------------------------------


def _uniform(
    size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None, **at: Any
) -> Tensor:
    return uniform(*_place_and_key(size, **at), dtype, device or torch.device("cpu"))


def _normal(
    size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None, **at: Any
) -> Tensor:
    return normal(*_place_and_key(size, **at), dtype, device or torch.device("cpu"))


def _integers(
    size: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    **at: Any,
) -> Tensor:
    """Return the rank's random integers in low:high; ``at``: key, global shape and pieces."""
    place, key = _place_and_key(size, **at)
    return integers(place, key, low, high, dtype, device or torch.device("cpu"))


def _fake_factory(
    size: Sequence[int], *args: Any, device: torch.device | None = None, **_: Any
) -> Tensor:
    """Return an empty tensor of the local ``size``; dtype and device are among the arguments."""
    dtype = next(value for value in args if isinstance(value, torch.dtype))
    device = next((value for value in args if isinstance(value, torch.device)), device)
    return torch.empty(list(size), dtype=dtype, device=device)


def _define_factory(name: str, arguments: str, run: Any) -> None:
    """Register an op without tensor operands. torch cannot choose its implementation by a device,
    so there is one for all devices."""
    schema = (
        f"{name}(SymInt[] size, {arguments}ScalarType dtype, Device? device=None, "
        f"{_KEY_ARGUMENTS}, {_PLACE_ARGUMENTS}) -> Tensor"
    )
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dt::{name}", _fake_factory, lib=LIBRARY)
    note_plain(name, run)


_define_factory("random_uniform", "", _uniform)
_define_factory("random_normal", "", _normal)
_define_factory("random_integers", "int low, int high, ", _integers)


# -- dropout -------------------------------------------------------------------------------------


def _dropout(x: Tensor, p: float, **at: Any) -> tuple[Tensor, Tensor]:
    kept = keep_mask(*_place_and_key(x.shape, **at), p, x.device)
    return _mask_and_scale(x, kept, p), kept


def _dropout_add(x: Tensor, residual: Tensor, p: float, **at: Any) -> tuple[Tensor, Tensor]:
    if x.dtype != residual.dtype:
        raise TypeError(f"dropout_add takes one dtype, not {x.dtype} and {residual.dtype}")
    y, kept = _dropout(x, p, **at)
    return y.add_(residual), kept


def _mask_and_scale(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    """Return ``grad / (1 - p)`` where ``kept`` is True, else 0. A dropped infinity is 0, not NaN,
    as in torch's fused kernels."""
    scaled = grad * (1 / (1 - p) if p < 1 else 0.0)
    return torch.where(kept, scaled, torch.zeros((), dtype=grad.dtype, device=grad.device))


def _fake_dropout(x: Tensor, p: float, **_: Any) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(x.shape, dtype=torch.bool, device=x.device)


_ON_DEVICE = _KEY_ARGUMENTS.replace("int at_", "Tensor at_")
"""For the overloads ``on_device``, which kernels call with tensors as seed and step."""
for _overload, _key_arguments in (("", _KEY_ARGUMENTS), (".on_device", _ON_DEVICE)):
    _arguments = f"float p, {_key_arguments}, {_PLACE_ARGUMENTS}"
    define(
        f"dropout{_overload}(Tensor x, {_arguments}) -> (Tensor, Tensor)", _dropout, _fake_dropout
    )
    define(
        f"dropout_add{_overload}(Tensor x, Tensor residual, {_arguments}) -> (Tensor, Tensor)",
        _dropout_add,
        lambda x, _, p, **at: _fake_dropout(x, p, **at),
    )

define(
    "dropout_backward(Tensor grad, Tensor kept, float p) -> Tensor",
    _mask_and_scale,
    lambda grad, kept, p: torch.empty(grad.shape, dtype=grad.dtype, device=grad.device),
)


def _dropout_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    """Save p and the mask, the second result, which is not differentiable."""
    ctx.p = inputs[-1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _dropout_grad(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None
    (kept,) = ctx.saved_tensors
    return torch.ops.dt.dropout_backward(grad, kept, ctx.p), None


def _dropout_add_grad(ctx: Any, grad: Tensor | None, kept: Any) -> tuple[Any, ...]:
    dx, dp = _dropout_grad(ctx, grad, kept)
    return dx, grad, dp


for _name, _grad in (("dropout", _dropout_grad), ("dropout_add", _dropout_add_grad)):
    torch.library.register_autograd(
        f"dt::{_name}", _grad, setup_context=_dropout_setup, lib=LIBRARY
    )
