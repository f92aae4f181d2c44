"""Rules of ops that cut dims apart and put them together: slices, splits, cat, padding.

    split     [8,30] -> 10, 20     "d0 (s0 + s1) -> d0 s0, d0 s1"
    slice     [8,30][:, 10:]       "d0 (a + s) -> d0 s"
    cat       [8,10], [8,20]       "d0 s0, d0 s1 -> d0 (s0 + s1)"

A dim that is a sum of factors splits only all parts together: each rank gets its part of each.
Invariants: linear (pieces of a sum are sums of pieces); offsets are made local from the intervals
that the rank holds. A step other than 1 and an index keep their dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtensor.sharding.call import Local, OpCall, Operand
from dtensor.sharding.rule import Rule
from dtensor.sharding.rules.build import Groups, make, names, retarget, share
from dtensor.sharding.rules.registry import Builder, no_rule

aten = torch.ops.aten
_LINEAR: Groups = ((0,),)


def _sum_text(parts: Sequence[tuple[str, int]]) -> str:
    """``(a + s + c)`` of the parts that are not empty."""
    kept = [name for name, size in parts if size]
    return f"({' + '.join(kept)})" if len(kept) > 1 else (kept or ["z!"])[0]


def _replaced(dims: list[str], at: int, *texts: str) -> str:
    return " ".join([*dims[:at], *texts, *dims[at + 1 :]])


# -- slices ------------------------------------------------------------------------------------


def _bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """``start:stop`` of a dim, resolved as Python resolves it."""
    lo, hi, _ = slice(start, stop).indices(size)
    return lo, max(lo, hi)


def _slice_arguments(call: OpCall, offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """(dim, start, stop, step) of slice (offset 0) and slice_backward (offset 1)."""
    dim: int = call.arg(1 + offset, "dim", 0) % len(shape)
    lo, hi = _bounds(shape[dim], call.arg(2 + offset, "start"), call.arg(3 + offset, "end"))
    return dim, lo, hi, call.arg(4 + offset, "step", 1)


def _slice_texts(shape: tuple[int, ...], dim: int, lo: int, hi: int, step: int) -> tuple[str, str]:
    """The whole tensor's dims and the slice's."""
    dims = names(len(shape))
    if step != 1:
        return _replaced(dims, dim, "w!"), _replaced(dims, dim, "v!")
    parts = [("a", lo), ("s", hi - lo), ("c", shape[dim] - hi)]
    piece = "s" if hi > lo else "y!"
    return _replaced(dims, dim, _sum_text(parts)), _replaced(dims, dim, piece)


def _slice_sizes(shape: tuple[int, ...], dim: int, lo: int, hi: int) -> dict[str, int]:
    return {"a": lo, "s": hi - lo, "c": shape[dim] - hi}


def _slice(call: OpCall) -> Rule:
    shape = call.operands[0].shape
    dim, lo, hi, step = _slice_arguments(call, 0, shape)

    def localize(call: OpCall, local: Local) -> OpCall:
        if step != 1:
            return call
        held = local.operand_intervals(0, dim)
        start = share(held, 0, lo)
        args = (call.args[0], dim, start, start + share(held, lo, hi))
        return retarget(call, aten.slice.Tensor, *args)

    whole, piece = _slice_texts(shape, dim, lo, hi, step)
    sizes = _slice_sizes(shape, dim, lo, hi)
    return make(call, f"{whole} -> {piece}", linear=_LINEAR, localize=localize, sizes=sizes)


def _slice_backward(call: OpCall) -> Rule:
    shape: tuple[int, ...] = tuple(call.args[1])
    dim, lo, hi, step = _slice_arguments(call, 1, shape)

    def localize(call: OpCall, local: Local) -> OpCall:
        start, stop = lo, hi
        if step == 1:
            held = local.result_intervals(0, dim)
            start = share(held, 0, lo)
            stop = start + share(held, lo, hi)
        args = (call.args[0], list(local.result_shape()), dim, start, stop, step)
        return retarget(call, aten.slice_backward.default, *args)

    whole, piece = _slice_texts(shape, dim, lo, hi, step)
    sizes = _slice_sizes(shape, dim, lo, hi)
    return make(call, f"{piece} -> {whole}", linear=_LINEAR, localize=localize, sizes=sizes)


def _select(call: OpCall) -> Rule:
    dims = names(len(call.operands[0].shape))
    dim: int = call.args[1] % len(dims)
    return make(call, f"{_replaced(dims, dim, 'w!')} -> {_replaced(dims, dim)}", linear=_LINEAR)


def _select_backward(call: OpCall) -> Rule:
    dims = names(len(call.args[1]))
    dim: int = call.args[2] % len(dims)
    text = f"{_replaced(dims, dim)} -> {_replaced(dims, dim, 'w!')}"
    return make(call, text, linear=_LINEAR, localize=_local_sizes)


def _local_sizes(call: OpCall, local: Local) -> OpCall:
    return call.with_arg(1, list(local.result_shape()))


# -- apart and together -------------------------------------------------------------------------


def _split(call: OpCall) -> Rule:
    dims = names(len(call.operands[0].shape))
    dim: int = call.arg(2, "dim", 0) % len(dims)
    parts = [(f"s{i}", m.shape[dim]) for i, m in enumerate(call.results) if m is not None]
    results = ", ".join(_replaced(dims, dim, name if size else "y!") for name, size in parts)

    def localize(call: OpCall, local: Local) -> OpCall:
        sizes = [local.result_shape(i)[dim] for i in range(len(call.results))]
        return retarget(call, aten.split_with_sizes.default, call.args[0], sizes, dim)

    text = f"{_replaced(dims, dim, _sum_text(parts))} -> {results}"
    return make(call, text, linear=_LINEAR, localize=localize, sizes=dict(parts))


def _unbind(call: OpCall) -> Rule:
    dims = names(len(call.operands[0].shape))
    dim: int = call.arg(1, "dim", 0) % len(dims)
    results = ", ".join(_replaced(dims, dim) for _ in call.results)
    return make(call, f"{_replaced(dims, dim, 'w!')} -> {results}", linear=_LINEAR)


def _cat(call: OpCall) -> Rule:
    rank = max(len(meta.shape) for meta in call.operands)
    if any(len(meta.shape) != rank for meta in call.operands):
        raise no_rule(call, "its tensors differ in their number of dims")
    dims = names(rank)
    dim: int = call.arg(1, "dim", 0) % rank
    parts = [(f"s{i}", meta.shape[dim]) for i, meta in enumerate(call.operands)]
    sources = ", ".join(_replaced(dims, dim, name if size else "y!") for name, size in parts)
    text = f"{sources} -> {_replaced(dims, dim, _sum_text(parts))}"
    return make(call, text, linear=_all(call), sizes=dict(parts))


def _stack(call: OpCall) -> Rule:
    dims = names(len(call.operands[0].shape))
    at = call.arg(1, "dim", 0) % (len(dims) + 1)
    sources = ", ".join(" ".join(dims) for _ in call.operands)
    text = f"{sources} -> {' '.join([*dims[:at], 'w!', *dims[at:]])}"
    return make(call, text, linear=_all(call))


def _all(call: OpCall) -> Groups:
    return (tuple(range(len(call.operands))),)


def _pad(call: OpCall) -> Rule:
    shape = call.operands[0].shape
    pad: list[int] = list(call.args[1])
    value: Any = call.arg(2, "value", 0)
    sizes: dict[str, int] = {}
    source, result = names(len(shape)), names(len(shape))
    edges: dict[int, tuple[int, int]] = {}
    for i, (before, after) in _pairs(pad):
        dim = len(shape) - 1 - i
        if min(before, after) < 0:
            source[dim], result[dim] = f"d{dim}!", f"n{dim}!"
            continue
        edges[dim] = (before, before + shape[dim])
        parts = [(f"a{dim}", before), (f"d{dim}", shape[dim]), (f"c{dim}", after)]
        sizes.update(parts)
        result[dim] = _sum_text(parts)

    def localize(call: OpCall, local: Local) -> OpCall:
        widths = list(pad)
        for dim, (lo, hi) in edges.items():
            held = local.result_intervals(0, dim)
            at = 2 * (len(shape) - 1 - dim)
            total = local.result_shape()[dim]
            widths[at] = share(held, 0, lo)
            widths[at + 1] = total - widths[at] - share(held, lo, hi)
        return call.with_arg(1, widths)

    text = f"{' '.join(source)} -> {' '.join(result)}"
    linear = _LINEAR if value == 0 else ()
    return make(call, text, linear=linear, localize=localize, sizes=sizes)


def _pairs(pad: list[int]) -> list[tuple[int, tuple[int, int]]]:
    return [(i // 2, (pad[i], pad[i + 1])) for i in range(0, len(pad), 2)]


# -- indexing -----------------------------------------------------------------------------------


def _indexed(call: OpCall) -> tuple[int, Operand]:
    """The one dim that is indexed, and by which operand."""
    found = [(i, item) for i, item in enumerate(call.args[1]) if isinstance(item, Operand)]
    if len(found) != 1 or call.operands[found[0][1].index].dtype != torch.int64:
        raise no_rule(call, "it has a rule for one index tensor of int64")
    return found[0]


def _index(call: OpCall) -> Rule:
    dim, index = _indexed(call)
    dims = names(len(call.operands[0].shape))
    places = [f"i{d}" for d in range(len(call.operands[index.index].shape))]
    text = f"{_replaced(dims, dim, 'w!')}, {' '.join(places)} -> {_replaced(dims, dim, *places)}"
    return make(call, text, linear=_LINEAR)


def _index_select(call: OpCall) -> Rule:
    dims = names(len(call.operands[0].shape))
    dim: int = call.args[1] % len(dims)
    text = f"{_replaced(dims, dim, 'w!')}, i -> {_replaced(dims, dim, 'i')}"
    return make(call, text, linear=_LINEAR)


def _index_put(call: OpCall) -> Rule:
    dim, index = _indexed(call)
    dims = names(len(call.operands[0].shape))
    places = [f"i{d}!" for d in range(len(call.operands[index.index].shape))]
    x, values = _replaced(dims, dim, "w!"), _replaced(dims, dim, *places)
    if len(call.operands[2].shape) != len(values.split()):
        raise no_rule(call, "its values are broadcast")
    # The index is whole: were it split, the tensor that is added to would have to be pending.
    return make(call, f"{x}, {' '.join(places)}, {values} -> {x}", linear=((0, 2),))


RULES: dict[str, Builder] = {
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
    "aten.index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.index_put.default": _index_put,
}
