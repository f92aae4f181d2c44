"""Rules of reading and writing at indices: index, index_add, take, gather, scatter and similar ops.

    index         x[:, i]          "d0 w, i0 i1 -> d0 i0 i1"   w split: the results are summed
    index_add     (x, 1, i, y)     "d0 w, i, d0 i -> d0 w"     i split: x must be pending
    gather        (x, 1, i)        "d0 w, d0 i -> d0 i"        w split: the results are summed

A single indexed dim may be split: a rank reads zeros for rows of other ranks, and ignores writes to
them. Several indexed dims are whole. The index splits freely in a read. In an op that adds, it
splits if x is a pending sum (`addends`). In an op that overwrites, it is whole, because the last of
several writes to one row must win. gather and scatter split a dim only if all tensors have the same
size there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from dtensor.sharding.local import indexing
from dtensor.sharding.local.indexing import Write
from dtensor.sharding.ops.call import Local, Localizer, OpCall, Operand
from dtensor.sharding.rules.build import (
    Groups,
    broadcast_term,
    dim_names,
    make,
    replace_dim,
    retarget,
    whole_dims,
)
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.unsplittable import Unsplittable

_LINEAR: Groups = ((0,),)


def _localizer_at(at: int, kind: Write | Literal["index", "gather"]) -> Localizer:
    """Return a localizer for an op whose operand 1 is an index into dim ``at`` of operand 0, x."""

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return a call of the function in local/indexing.py that skips rows of other ranks; the
        call itself if dim ``at`` is not split."""
        size = call.operands[0].shape[at]
        if local.operand_size(0, at) == size:
            return call
        pieces = local.operand_intervals(0, at)
        x, index = Operand(0), Operand(1)
        if kind == "index":
            return retarget(call, indexing.index_shard, x, index, at, pieces, size)
        if kind == "gather":
            return retarget(call, indexing.gather_shard, x, at, index, pieces, size)
        source = Operand(2) if len(call.operands) > 2 else call.arg(3, "value")
        alpha = dict(call.kwargs).get("alpha", 1)
        args = (kind, x, at, index, source, pieces, size, alpha)
        return retarget(call, indexing.write_shard, *args)

    return localize


# -- x[i, :, j] -------------------------------------------------------------------------------


def _index_terms(call: OpCall, position: int = 1) -> tuple[str, list[str], list[str]]:
    """Return the term of x, the terms of the index tensors, and the dims of the result x[i, :, j].
    The dims of the index tensors, broadcast together, are i0, i1, ... They stand where the indexed
    dims were if these are adjacent, else first. The argument at ``position`` lists the indices."""
    shape = call.operands[0].shape
    indices: Sequence[object] = call.args[position]
    indexed = {d: item.index for d, item in enumerate(indices) if isinstance(item, Operand)}
    indexed_dims = list(indexed)
    metas = [call.operands[index] for index in indexed.values()]
    for meta in metas:
        if meta.dtype in (torch.bool, torch.uint8):
            raise no_rule(call, "how many places a mask names depends on its values")
    index_shape = np.broadcast_shapes(*(meta.shape for meta in metas))
    index_dims = [f"i{d}" for d in range(len(index_shape))]
    terms = [broadcast_term(index_dims, meta.shape, index_shape) for meta in metas]
    dims = dim_names(len(shape))
    other_dims = [f for d, f in enumerate(dims) if d not in indexed_dims]
    are_adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[0] + len(indexed_dims)))
    front = indexed_dims[0] if are_adjacent else 0
    result = [*other_dims[:front], *index_dims, *other_dims[front:]]
    x = " ".join(f"{f}!" if d in indexed_dims else f for d, f in enumerate(dims))
    return x, terms, result


def _index(call: OpCall) -> Rule:
    """Return the rule of x[i, :, j]; a single indexed dim may be split."""
    if not any(isinstance(item, Operand) for item in call.args[1]):
        dims = " ".join(dim_names(len(call.operands[0].shape)))
        return make(call, f"{dims} -> {dims}", linear=_LINEAR)
    x, terms, result = _index_terms(call)
    localize: Localizer | None = None
    if len(terms) == 1 and call.operands[0].dtype != torch.bool:
        x, localize = x.replace("!", ""), _localizer_at(_indexed_dim(call), "index")
    text = f"{', '.join([x, *terms])} -> {' '.join(result)}"
    return make(call, text, linear=_LINEAR, localize=localize)


def _indexed_dim(call: OpCall) -> int:
    """Return the first dim that is indexed."""
    return next(d for d, item in enumerate(call.args[1]) if isinstance(item, Operand))


def _index_put(call: OpCall) -> Rule:
    """Return the rule of x[i, :, j] = y, or of += with ``accumulate``."""
    if not any(isinstance(item, Operand) for item in call.args[1]):
        raise no_rule(call, "it names no index tensor")
    x, terms, result = _index_terms(call)
    last = len(call.operands) - 1
    adds = bool(call.arg(3, "accumulate", False)) and call.operands[0].dtype != torch.bool
    values = _broadcast(result, call, last)
    if not adds:
        terms, values = [_with_whole_places(t) for t in terms], _with_whole_places(values)
    localize: Localizer | None = None
    if len(terms) == 1:
        kind: Write = "index_put_add" if call.arg(3, "accumulate", False) else "index_put"
        x, localize = x.replace("!", ""), _localizer_at(_indexed_dim(call), kind)
    text = f"{', '.join([x, *terms, values])} -> {x}"
    return make(call, text, linear=((0, last),), addends=(0,), localize=localize)


def _masked_index(call: OpCall) -> Rule:
    """Return the rule of x at the indices where the mask is true, and a number elsewhere."""
    x, terms, result = _index_terms(call, 2)
    mask = _broadcast(result, call, 1)
    linear = _LINEAR if call.args[3] == 0 else ()
    return make(call, f"{', '.join([x, mask, *terms])} -> {' '.join(result)}", linear=linear)


def _masked_index_put(call: OpCall) -> Rule:
    """Return the rule of adding values at the indices where the mask is true."""
    x, terms, result = _index_terms(call, 2)
    last = len(call.operands) - 1
    mask, values = _broadcast(result, call, 1), _broadcast(result, call, last)
    text = f"{', '.join([x, mask, *terms, values])} -> {x}"
    return make(call, text, linear=((0, last),), addends=(0,))


def _broadcast(dims: list[str], call: OpCall, operand: int) -> str:
    """Return the term of an operand that is broadcast to ``dims``: 1 for a dim of size 1."""
    shape = call.operands[operand].shape
    if len(shape) > len(dims):
        raise no_rule(call, "its values have more dims than the places")
    sizes = [1] * (len(dims) - len(shape)) + list(shape)
    # 1 is also right for a dim that is not broadcast: a factor of size 1 is never split.
    term = ["1" if size == 1 else f for f, size in zip(dims, sizes, strict=True)]
    return " ".join(term[len(dims) - len(shape) :])


def _with_whole_places(text: str) -> str:
    """Return a term with the dims of the index whole: ``i0 i1 d2`` -> ``i0! i1! d2``."""
    return " ".join(f"{f}!" if f.startswith("i") else f for f in text.split())


# -- one index along a dim ----------------------------------------------------------------------


def _terms_along(call: OpCall, index: str, *, source: bool, row: str = "w") -> str:
    """Return the terms ``x, i`` or ``x, i, y`` of an op that indexes one dim of x. The dim is named
    ``row`` in x, and named as the index in the ``source`` y."""
    shapes = [meta.shape for meta in call.operands]
    rank = len(shapes[0])
    if rank == 0:
        terms = ["", *(index if shape else "" for shape in shapes[1 : 2 + source])]
        return ", ".join(terms)
    dims = dim_names(rank)
    dim: int = call.args[1] % rank
    places = index if shapes[1] else ""
    terms = [replace_dim(dims, dim, row if places else "w!"), places]
    if source:
        terms.append(replace_dim(dims, dim, places or "1") if shapes[2] else "")
    return ", ".join(terms)


def _localizer_along(call: OpCall, kind: Write | Literal["index"]) -> Localizer | None:
    """Return the localizer for an index along one dim; None if x or the index is a scalar."""
    rank = len(call.operands[0].shape)
    return _localizer_at(call.args[1] % rank, kind) if rank and call.operands[1].shape else None


def _index_select(call: OpCall) -> Rule:
    """Return the rule of index_select, "d0 w, i -> d0 i" along dim 1."""
    rank = len(call.operands[0].shape)
    row = "w!" if call.operands[0].dtype == torch.bool else "w"
    left = _terms_along(call, "i", source=False, row=row)
    if rank == 0:
        return make(call, f"{left} -> ", linear=_LINEAR)
    places = "i" if call.operands[1].shape else "1"
    right = replace_dim(dim_names(rank), call.args[1] % rank, places)
    return make(
        call, f"{left} -> {right}", linear=_LINEAR, localize=_localizer_along(call, "index")
    )


def _index_add(call: OpCall) -> Rule:
    """Return the rule of index_add, "d0 w, i, d0 i -> d0 w" along dim 1."""
    index = "i!" if call.operands[0].dtype == torch.bool else "i"
    left = _terms_along(call, index, source=True)
    text = f"{left} -> {left.split(',')[0]}"
    localize = _localizer_along(call, "index_add")
    return make(call, text, linear=((0, 2),), addends=(0,), localize=localize)


def _index_copy(call: OpCall) -> Rule:
    left = _terms_along(call, "i!", source=True)
    text = f"{left} -> {left.split(',')[0]}"
    return make(call, text, linear=((0, 2),), localize=_localizer_along(call, "index_copy"))


def _index_reduce(call: OpCall) -> Rule:
    left = _terms_along(call, "i!", source=True, row="w!")
    linear: Groups = ((0, 2),) if call.arg(4, "reduce") == "mean" else ()
    return make(call, f"{left} -> {left.split(',')[0]}", linear=linear)


def _index_fill(call: OpCall) -> Rule:
    """Return the rule of index_fill, whose value may be a number or a scalar tensor."""
    left = _terms_along(call, "i!", source=False)
    groups: Groups = ((0,),) if call.arg(3, "value") == 0 else ()
    if isinstance(call.arg(3, "value"), Operand):
        left, groups = f"{left}, ", ((0, 2),)
    text = f"{left} -> {left.split(',')[0]}"
    return make(call, text, linear=groups, localize=_localizer_along(call, "index_fill"))


# -- indices into the flattened tensor -------------------------------------------------------


def _take(call: OpCall) -> Rule:
    return make(
        call, f"{whole_dims('wd', len(call.operands[0].shape))}, ... -> ...", linear=_LINEAR
    )


def _put(call: OpCall) -> Rule:
    """Return the rule of put. The index splits only in an op that adds."""
    x, index, source = (meta.shape for meta in call.operands)
    adds = bool(call.arg(3, "accumulate", False)) and call.operands[0].dtype != torch.bool
    term = whole_dims("wd", len(x))
    if index != source or not adds:
        text = f"{term}, {whole_dims('id', len(index))}, {whole_dims('sd', len(source))} -> {term}"
        return make(call, text, linear=((0, 2),))
    return make(call, f"{term}, ..., ... -> {term}", linear=((0, 2),), addends=(0,))


# -- an index for each element -------------------------------------------------------------------


def _gather(call: OpCall) -> Rule:
    """Return the rule of gather. The index splits freely along the dim of the op, and with x along
    other dims of equal size. A split of x along the dim of the op leaves a sum, so a bool x must be
    whole along it."""
    x, index = call.operands[0].shape, call.operands[1].shape
    if not x or len(x) != len(index):
        left = ", ".join(whole_dims(f"t{n}d", len(shape)) for n, shape in enumerate((x, index)))
        return make(call, f"{left} -> {whole_dims('t1d', len(index))}", linear=_LINEAR)
    at = call.args[1] % len(x)
    row = "w!" if call.operands[0].dtype == torch.bool else "w"
    source: list[str] = []
    places: list[str] = []
    for d, (size, count) in enumerate(zip(x, index, strict=True)):
        is_shared = size == count and d != at
        source.append(row if d == at else f"d{d}" if is_shared else f"x{d}!")
        places.append(f"i{d}" if d == at else f"d{d}" if is_shared else f"i{d}!")
    text = f"{' '.join(source)}, {' '.join(places)} -> {' '.join(places)}"
    return make(call, text, linear=_LINEAR, localize=_localizer_at(at, "gather"))


def _scatter(
    call: OpCall,
    places: str,
    linear: Groups,
    *,
    addends: tuple[int, ...] = (),
    kind: Write | None = None,
) -> Rule:
    """Return the rule of a scatter. Dims in which x, index and source have equal sizes split
    together.

    ``places``: the factor of the index's dim along which the op scatters. ``kind``: how ranks write
    to a split dim of x; None if that dim must stay whole.
    """
    shapes = [meta.shape for meta in call.operands]
    if not all(len(s) == len(shapes[0]) for s in shapes) or not shapes[0]:
        left = ", ".join(whole_dims(f"t{n}d", len(shape)) for n, shape in enumerate(shapes))
        return make(call, f"{left} -> {whole_dims('t0d', len(shapes[0]))}", linear=linear)
    at = call.args[1] % len(shapes[0])
    terms: list[str] = []
    for n, shape in enumerate(shapes):
        dims = [
            f"d{d}" if all(s[d] == shape[d] for s in shapes) else f"t{n}d{d}!"
            for d in range(len(shape))
        ]
        if n == 0:
            dims[at] = "w!" if kind is None else "w"
        else:
            dims[at] = places if shapes[-1][at] == shapes[1][at] else f"t{n}!"
        terms.append(" ".join(dims))
    text = f"{', '.join(terms)} -> {terms[0]}"
    localize = None if kind is None else _localizer_at(at, kind)
    return make(call, text, linear=linear, addends=addends, localize=localize)


def _scatter_add(call: OpCall) -> Rule:
    places = "i!" if call.operands[0].dtype == torch.bool else "i"
    return _scatter(call, places, ((0, 2),), addends=(0,), kind="scatter_add")


def _scatter_src(call: OpCall) -> Rule:
    return _scatter(call, "i!", ((0, 2),), kind="scatter")


def _scatter_value(call: OpCall) -> Rule:
    return _scatter(call, "i!", ((0,),) if call.args[3] == 0 else (), kind="scatter")


def _scatter_multiply(call: OpCall) -> Rule:
    """Return the rule of scatter with ``reduce="add"`` or ``"multiply"``."""
    if dict(call.kwargs).get("reduce") == "add" and call.name == "aten.scatter.reduce":
        return _scatter_add(call)
    return _scatter(call, "i!", ())


def _scatter_reduce(call: OpCall) -> Rule:
    """Return the rule of scatter_reduce. A sum that includes x is scatter_add; for other reductions
    the index is whole."""
    reduce = call.arg(4, "reduce")
    if reduce == "sum" and bool(call.arg(5, "include_self", True)):
        return _scatter_add(call)
    return _scatter(call, "i!", ((0, 2),) if reduce in ("sum", "mean") else ())


_WHY_WHOLE = "the n-th place of the mask takes the n-th value: all of both are needed"

RULES: dict[str, Builder] = {
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten._unsafe_masked_index.default": _masked_index,
    "aten._unsafe_masked_index_put_accumulate.default": _masked_index_put,
    "aten.index_select.default": _index_select,
    "aten.index_add.default": _index_add,
    "aten.index_copy.default": _index_copy,
    "aten.index_reduce.default": _index_reduce,
    "aten.index_fill.int_Scalar": _index_fill,
    "aten.index_fill.int_Tensor": _index_fill,
    "aten.take.default": _take,
    "aten.put.default": _put,
    "aten.repeat_interleave.Tensor": Unsplittable(
        "where a row goes depends on all counts before it"
    ),
    "aten.masked_scatter.default": Unsplittable(_WHY_WHOLE, linear=((0, 2),)),
    "aten.masked_scatter_backward.default": Unsplittable(_WHY_WHOLE, linear=((0,),)),
    "aten.gather.default": _gather,
    "aten.scatter_add.default": _scatter_add,
    "aten.scatter.src": _scatter_src,
    "aten.scatter.value": _scatter_value,
    "aten.scatter.reduce": _scatter_multiply,
    "aten.scatter.value_reduce": _scatter_multiply,
    "aten.scatter_reduce.two": _scatter_reduce,
}
