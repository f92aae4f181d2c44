"""Rules of ops that slice, split, concatenate and pad tensors.

    split     [8,30] -> 10, 20     "d0 (s0 + s1) -> d0 s0, d0 s1"
    slice     [8,30][:, 10:]       "d0 (a + s) -> d0 s"
    cat       [8,10], [8,20]       "d0 s0, d0 s1 -> d0 (s0 + s1)"

The parts of a dim that is a sum of factors are split together: each rank holds a piece of each
part. All ops are linear. Localizers compute local offsets from the intervals that the rank holds.
Selecting an index, or slicing with a step other than 1, keeps the dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import (
    Groups,
    count_within,
    dim_names,
    local_sizes,
    make,
    replace_dim,
    retarget,
    sized_call,
)
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import Intervals, length

aten: Any = torch.ops.aten
_LINEAR: Groups = ((0,),)


def _sum_text(parts: Sequence[tuple[str, int]]) -> str:
    """Return a dim that consists of these parts, (name, size) each, as text without the empty
    parts: ``(a + s + c)``, or ``z!`` if all are empty."""
    present = [name for name, size in parts if size]
    return f"({' + '.join(present)})" if len(present) > 1 else (present or ["z!"])[0]


# -- slices ------------------------------------------------------------------------------------


def _bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Return ``start:stop`` of a dim of ``size``, resolved as Python resolves a slice."""
    lo, hi, _ = slice(start, stop).indices(size)
    return lo, max(lo, hi)


def _slice_arguments(call: OpCall, offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return (dim, start, stop, step) of slice (offset 0) or slice_backward (offset 1)."""
    dim: int = call.arg(1 + offset, "dim", 0) % len(shape)
    lo, hi = _bounds(shape[dim], call.arg(2 + offset, "start"), call.arg(3 + offset, "end"))
    return dim, lo, hi, call.arg(4 + offset, "step", 1)


def _slice_texts(
    shape: tuple[int, ...], dim: int, lo: int, hi: int, step: int
) -> tuple[str, str, dict[str, int]]:
    """Return the terms of the whole tensor and of the slice ``lo:hi`` of ``dim``,
    ``d0 (a + s + c)`` and ``d0 s``, and the sizes of a, s and c. A slice with a step that takes one
    of each u elements, as ``::2``, has the terms ``d0 (s u!)`` and ``d0 s``. Both are whole if the
    step is another one."""
    dims = dim_names(len(shape))
    if step > 1 and lo < step and shape[dim] % step == 0 and hi > shape[dim] - step + lo:
        sizes = {"s": shape[dim] // step, "u": step}
        return replace_dim(dims, dim, "(s u!)"), replace_dim(dims, dim, "s"), sizes
    sizes = {"a": lo, "s": hi - lo, "c": shape[dim] - hi}
    if step != 1:
        return replace_dim(dims, dim, "w!"), replace_dim(dims, dim, "v!"), sizes
    piece = "s" if hi > lo else "y!"
    return replace_dim(dims, dim, _sum_text([*sizes.items()])), replace_dim(dims, dim, piece), sizes


def _local_bounds(intervals: Intervals, lo: int, hi: int, step: int) -> tuple[int, int]:
    """Return the local slice for the global slice ``lo:hi`` on a rank that holds these intervals of
    the dim. With a step other than 1 the rank holds whole steps, or the whole dim."""
    if step != 1:
        return lo, min(hi, length(intervals))
    start = count_within(intervals, 0, lo)
    return start, start + count_within(intervals, lo, hi)


def _slice(call: OpCall) -> Rule:
    """Return the rule of a slice, "d0 (a + s + c) -> d0 s" along dim 1."""
    shape = call.operands[0].shape
    dim, lo, hi, step = _slice_arguments(call, 0, shape)

    def localize(call: OpCall, local: Local) -> OpCall:
        bounds = _local_bounds(local.operand_intervals(0, dim), lo, hi, step)
        return retarget(call, aten.slice.Tensor, call.args[0], dim, *bounds, step)

    whole, piece, sizes = _slice_texts(shape, dim, lo, hi, step)
    return make(call, f"{whole} -> {piece}", linear=_LINEAR, localize=localize, sizes=sizes)


def _slice_backward(call: OpCall) -> Rule:
    """Return the rule of the gradient of a slice, "d0 s -> d0 (a + s + c)"."""
    shape: tuple[int, ...] = tuple(call.args[1])
    dim, lo, hi, step = _slice_arguments(call, 1, shape)

    def localize(call: OpCall, local: Local) -> OpCall:
        bounds = _local_bounds(local.result_intervals(0, dim), lo, hi, step)
        args = (call.args[0], (), dim, *bounds, step)
        return sized_call(call, local, 1, aten.slice_backward.default, *args)

    whole, piece, sizes = _slice_texts(shape, dim, lo, hi, step)
    return make(call, f"{piece} -> {whole}", linear=_LINEAR, localize=localize, sizes=sizes)


def _narrow(call: OpCall) -> Rule:
    """Return the rule of narrow_copy(x, dim, start, length), which is a slice."""
    x: object = call.args[0]
    dim: int = call.args[1]
    start: int = call.args[2]
    count: int = call.args[3]
    first = start % call.operands[0].shape[dim] if start < 0 else start
    return _slice(replace(call, args=(x, dim, first, first + count)))


def _slice_scatter(call: OpCall) -> Rule:
    """Return the rule of slice_scatter, "d0 (a + s + c), d0 s -> d0 (a + s + c)"."""
    shape = call.operands[0].shape
    dim, lo, hi, step = _slice_arguments(call, 1, shape)

    def localize(call: OpCall, local: Local) -> OpCall:
        bounds = _local_bounds(local.operand_intervals(0, dim), lo, hi, step)
        return retarget(call, aten.slice_scatter.default, *call.args[:2], dim, *bounds, step)

    whole, piece, sizes = _slice_texts(shape, dim, lo, hi, step)
    text = f"{whole}, {piece} -> {whole}"
    return make(call, text, linear=((0, 1),), localize=localize, sizes=sizes)


def _select_scatter(call: OpCall) -> Rule:
    dims = dim_names(len(call.operands[0].shape))
    dim: int = call.args[2] % len(dims)
    x = replace_dim(dims, dim, "w!")
    return make(call, f"{x}, {replace_dim(dims, dim)} -> {x}", linear=((0, 1),))


def _select(call: OpCall) -> Rule:
    dims = dim_names(len(call.operands[0].shape))
    dim: int = call.args[1] % len(dims)
    return make(call, f"{replace_dim(dims, dim, 'w!')} -> {replace_dim(dims, dim)}", linear=_LINEAR)


def _select_backward(call: OpCall) -> Rule:
    dims = dim_names(len(call.args[1]))
    dim: int = call.args[2] % len(dims)
    text = f"{replace_dim(dims, dim)} -> {replace_dim(dims, dim, 'w!')}"
    return make(call, text, linear=_LINEAR, localize=local_sizes(1))


# -- split, cat, pad -----------------------------------------------------------------------------


def _split(call: OpCall) -> Rule:
    """Return the rule of a split, "d0 (s0 + s1) -> d0 s0, d0 s1" along dim 1."""
    dims = dim_names(len(call.operands[0].shape))
    dim: int = call.arg(2, "dim", 0) % len(dims)
    parts = [(f"s{i}", m.shape[dim]) for i, m in enumerate(call.results) if m is not None]
    results = ", ".join(replace_dim(dims, dim, name if size else "y!") for name, size in parts)

    def localize(call: OpCall, local: Local) -> OpCall:
        sizes = [local.result_size(i, dim) for i in range(len(call.results))]
        return retarget(call, aten.split_with_sizes.default, call.args[0], sizes, dim)

    text = f"{replace_dim(dims, dim, _sum_text(parts))} -> {results}"
    return make(call, text, linear=_LINEAR, localize=localize, sizes=dict(parts))


def _unbind(call: OpCall) -> Rule:
    dims = dim_names(len(call.operands[0].shape))
    dim: int = call.arg(1, "dim", 0) % len(dims)
    results = ", ".join(replace_dim(dims, dim) for _ in call.results)
    return make(call, f"{replace_dim(dims, dim, 'w!')} -> {results}", linear=_LINEAR)


def _cat(call: OpCall) -> Rule:
    """Return the rule of cat, "d0 s0, d0 s1 -> d0 (s0 + s1)" along dim 1."""
    rank = len(call.result.shape)
    dims = dim_names(rank)
    dim: int = call.arg(1, "dim", 0) % rank
    # torch.cat ignores one-dimensional empty tensors among tensors of any number of dims.
    ignored = [len(meta.shape) != rank for meta in call.operands]
    shapes = [meta.shape for meta in call.operands]
    parts = [(f"s{i}", 0 if ignored[i] else shape[dim]) for i, shape in enumerate(shapes)]
    sources = ", ".join(
        "y!" if is_ignored else replace_dim(dims, dim, name if size else "y!")
        for is_ignored, (name, size) in zip(ignored, parts, strict=True)
    )
    text = f"{sources} -> {replace_dim(dims, dim, _sum_text(parts))}"
    return make(call, text, linear=_all_operands(call), sizes=dict(parts))


def _stack(call: OpCall) -> Rule:
    """Return the rule of stack, "d0, d0 -> w! d0" along dim 0."""
    dims = dim_names(len(call.operands[0].shape))
    at = call.arg(1, "dim", 0) % (len(dims) + 1)
    sources = ", ".join(" ".join(dims) for _ in call.operands)
    text = f"{sources} -> {' '.join([*dims[:at], 'w!', *dims[at:]])}"
    return make(call, text, linear=_all_operands(call))


def _all_operands(call: OpCall) -> Groups:
    """Return one linear group of all operands."""
    return (tuple(range(len(call.operands))),)


def _pad(call: OpCall) -> Rule:
    """Return the rule of padding, "d0 -> (a0 + d0 + c0)"; dims that are cropped are whole."""
    shape = call.operands[0].shape
    pad: list[int] = list(call.args[1])
    value: Any = call.arg(2, "value", 0)
    sizes: dict[str, int] = {}
    source, result = dim_names(len(shape)), dim_names(len(shape))
    edges: dict[int, tuple[int, int]] = {}  # dim -> the interval of x in the padded dim
    for i in range(0, len(pad), 2):
        before, after = pad[i], pad[i + 1]
        dim = len(shape) - 1 - i // 2
        if min(before, after) < 0:
            source[dim], result[dim] = f"d{dim}!", f"n{dim}!"
            continue
        edges[dim] = (before, before + shape[dim])
        parts = [(f"a{dim}", before), (f"d{dim}", shape[dim]), (f"c{dim}", after)]
        sizes.update(parts)
        result[dim] = _sum_text(parts)

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return the call with the rank's widths: how much padding its piece of the result has
        before and after the elements of x."""
        widths = list(pad)
        for dim, (lo, hi) in edges.items():
            intervals = local.result_intervals(0, dim)
            position = 2 * (len(shape) - 1 - dim)
            local_size = local.result_size(0, dim)
            widths[position] = count_within(intervals, 0, lo)
            widths[position + 1] = local_size - widths[position] - count_within(intervals, lo, hi)
        return call.with_arg(1, widths)

    text = f"{' '.join(source)} -> {' '.join(result)}"
    linear = _LINEAR if value == 0 else ()
    return make(call, text, linear=linear, localize=localize, sizes=sizes)


RULES: dict[str, Builder] = {
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.slice_copy.Tensor": _slice,
    "aten.narrow_copy.default": _narrow,
    "aten.select_copy.int": _select,
    "aten.split_copy.Tensor": _split,
    "aten.split_with_sizes_copy.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split,
    "aten.unbind_copy.int": _unbind,
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.select.int": _select,
    "aten.select_backward.default": _select_backward,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
}
