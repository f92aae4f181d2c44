"""Rules of diagonals, sliding windows, rolls and as_strided.

    diagonal(0, 1)     "d0! d1! d2 -> d2 k!"
    unfold(1, 3, 1)    "d0 w! d2 -> d0 v! d2 u!"
    roll(2, 0)         "d0! d1 -> d0! d1"

The dims that these ops rearrange are whole; the other dims split freely. All are linear.
Invariant: as_strided refers to a contiguous tensor, which ranks make first. Capture refuses a
program that uses as_strided on a tensor with other strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import (
    Groups,
    dim_names,
    local_sizes,
    make,
    pattern,
    resolve_dims,
    retarget,
    whole_dims,
)
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule

_LINEAR: Groups = ((0,),)


# -- diagonals --------------------------------------------------------------------------------


def _diagonal_texts(
    call: OpCall, rank: int, at: int, default: tuple[int, int] = (0, 1)
) -> tuple[str, str]:
    """Return the terms of a tensor of this rank and of its diagonal, ``d0! d1! d2`` and ``d2 k!``.
    ``at``: the position of the argument ``offset``, which dim1 and dim2 follow."""
    dim1: int = call.arg(at + 1, "dim1", default[0]) % rank
    dim2: int = call.arg(at + 2, "dim2", default[1]) % rank
    dims = dim_names(rank, (dim1, dim2))
    other_dims = [f for d, f in enumerate(dims) if d not in (dim1, dim2)]
    return " ".join(dims), " ".join([*other_dims, "k!"])


def _diagonal(call: OpCall) -> Rule:
    x, diagonal = _diagonal_texts(call, len(call.operands[0].shape), 1)
    return make(call, f"{x} -> {diagonal}", linear=_LINEAR)


def _diagonal_backward(call: OpCall) -> Rule:
    x, diagonal = _diagonal_texts(call, len(call.args[1]), 2)
    return make(call, f"{diagonal} -> {x}", linear=_LINEAR, localize=local_sizes(1))


def _diagonal_scatter(call: OpCall) -> Rule:
    x, diagonal = _diagonal_texts(call, len(call.operands[0].shape), 2)
    return make(call, f"{x}, {diagonal} -> {x}", linear=((0, 1),))


def _diag_embed(call: OpCall) -> Rule:
    x, diagonal = _diagonal_texts(call, len(call.operands[0].shape) + 1, 1, (-2, -1))
    return make(call, f"{diagonal} -> {x}", linear=_LINEAR)


# -- windows, rolls ------------------------------------------------------------------------------


def _window_texts(rank: int, dim: int) -> tuple[str, str]:
    """Return the terms of a tensor of this rank and of its windows along ``dim``: ``d0 w! d2`` and
    ``d0 v! d2 u!``, where v numbers the windows and u is the position in a window."""
    if rank == 0:
        return "", "u!"
    dims = dim_names(rank, (dim % rank,))
    windows = [f.replace("!", "") if d != dim % rank else "v!" for d, f in enumerate(dims)]
    return " ".join(dims), " ".join([*windows, "u!"])


def _unfold(call: OpCall) -> Rule:
    x, windows = _window_texts(len(call.operands[0].shape), call.args[1])
    return make(call, f"{x} -> {windows}", linear=_LINEAR)


def _unfold_backward(call: OpCall) -> Rule:
    x, windows = _window_texts(len(call.args[1]), call.args[2])
    return make(call, f"{windows} -> {x}", linear=_LINEAR, localize=local_sizes(1))


def _roll(call: OpCall) -> Rule:
    rank = len(call.operands[0].shape)
    rolled: int | Sequence[int] = call.arg(2, "dims", ())
    dims = " ".join(dim_names(rank, resolve_dims(rolled, rank)))
    return make(call, f"{dims} -> {dims}", linear=_LINEAR)


# -- strides --------------------------------------------------------------------------------------


def _as_strided(call: OpCall) -> Rule:
    _check_strides(call, 1)
    x, out = whole_dims("x", len(call.operands[0].shape)), whole_dims("y", len(call.result.shape))
    return make(call, f"{x} -> {out}", linear=_LINEAR, localize=_local_as_strided)


def _local_as_strided(call: OpCall, local: Local) -> OpCall:
    size, stride, offset = call.args[1], call.args[2], call.arg(3, "storage_offset") or 0
    return retarget(call, local_forms.strided, call.args[0], size, stride, offset)


def _strided_scatter(call: OpCall) -> Rule:
    _check_strides(call, 2)
    x, src = (whole_dims(f, len(m.shape)) for f, m in zip("xy", call.operands, strict=True))
    return make(call, f"{x}, {src} -> {x}", linear=((0, 1),), localize=_local_strided_scatter)


def _local_strided_scatter(call: OpCall, local: Local) -> OpCall:
    size, stride, offset = call.args[2], call.args[3], call.arg(4, "storage_offset") or 0
    return retarget(call, local_forms.strided_scatter, *call.args[:2], size, stride, offset)


def _resize(call: OpCall) -> Rule:
    """Return the rule of resize, which takes the first elements in memory. Raises NoRule if the
    result has more elements than the tensor."""
    shape = call.result.shape
    if math.prod(shape) > math.prod(call.operands[0].shape):
        raise no_rule(call, "the elements beyond the tensor's own have no value")
    x, out = whole_dims("x", len(call.operands[0].shape)), whole_dims("y", len(shape))

    def localize(call: OpCall, local: Local) -> OpCall:
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        return retarget(call, local_forms.strided, call.args[0], shape, strides, 0)

    return make(call, f"{x} -> {out}", linear=_LINEAR, localize=localize)


def _check_strides(call: OpCall, at: int) -> None:
    """Raise NoRule if the strides reach memory beyond the tensor, which ranks do not have. ``at``:
    the position of the argument ``size``."""
    size, stride = call.args[at], call.args[at + 1]
    offset: int = call.arg(at + 2, "storage_offset") or 0
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 not in size and last >= math.prod(call.operands[0].shape):
        raise no_rule(call, "its strides reach memory that is not the tensor's own")


RULES: dict[str, Builder] = {
    "aten.diagonal.default": _diagonal,
    "aten.diagonal_copy.default": _diagonal,
    "aten.diagonal_backward.default": _diagonal_backward,
    "aten.diagonal_scatter.default": _diagonal_scatter,
    "aten.diag_embed.default": _diag_embed,
    "aten.trace.default": pattern("a! b! -> ", linear=_LINEAR),
    "aten.unfold.default": _unfold,
    "aten.unfold_copy.default": _unfold,
    "aten.unfold_backward.default": _unfold_backward,
    "aten.roll.default": _roll,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_copy.default": _as_strided,
    "aten.as_strided_scatter.default": _strided_scatter,
    "aten.resize.default": _resize,
}
