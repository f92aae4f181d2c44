"""Rules of gather and scatter: an index for each element.

    gather(x, 1, i)            "d0 w, d0 i -> d0 i"            w split: the results add up
    scatter_add(x, 1, i, y)    "d0 w, d0 i, d0 i -> d0 w"      i split: x must be pending

Dims in which all tensors agree split together, others are whole. What is said of rows in
indexing.py holds here too.
"""

from __future__ import annotations

import torch

from dtensor.sharding.local.indexing import Write
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import Groups, make
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.indexing import cut, whole_dims

_LINEAR: Groups = ((0,),)


def _gather(call: OpCall) -> Rule:
    """The index splits freely along the dim, and elsewhere with x."""
    x, index = call.operands[0].shape, call.operands[1].shape
    if not x or len(x) != len(index):
        left = ", ".join(whole_dims(f"t{n}", shape) for n, shape in enumerate((x, index)))
        return make(call, f"{left} -> {whole_dims('t1', index)}", linear=_LINEAR)
    at = call.args[1] % len(x)
    row = "w!" if call.operands[0].dtype == torch.bool else "w"
    source: list[str] = []
    places: list[str] = []
    for d, (size, count) in enumerate(zip(x, index, strict=True)):
        alike = size == count and d != at
        source.append(row if d == at else f"d{d}" if alike else f"x{d}!")
        places.append(f"i{d}" if d == at else f"d{d}" if alike else f"i{d}!")
    text = f"{' '.join(source)}, {' '.join(places)} -> {' '.join(places)}"
    return make(call, text, linear=_LINEAR, localize=cut(at, "gather"))


def _scatter(
    call: OpCall,
    places: str,
    linear: Groups,
    *,
    addends: tuple[int, ...] = (),
    kind: Write | None = None,
) -> Rule:
    """Dims in which x, index and source agree split together, and x's rows where ``kind`` says
    how they are written where they are split."""
    shapes = [meta.shape for meta in call.operands]
    if not all(len(s) == len(shapes[0]) for s in shapes) or not shapes[0]:
        left = ", ".join(whole_dims(f"t{n}", shape) for n, shape in enumerate(shapes))
        return make(call, f"{left} -> {whole_dims('t0', shapes[0])}", linear=linear)
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
    localize = None if kind is None else cut(at, kind)
    return make(call, text, linear=linear, addends=addends, localize=localize)


def _scatter_add(call: OpCall) -> Rule:
    places = "i!" if call.operands[0].dtype == torch.bool else "i"
    return _scatter(call, places, ((0, 2),), addends=(0,), kind="scatter_add")


def _scatter_src(call: OpCall) -> Rule:
    return _scatter(call, "i!", ((0, 2),), kind="scatter")


def _scatter_value(call: OpCall) -> Rule:
    return _scatter(call, "i!", ((0,),) if call.args[3] == 0 else (), kind="scatter")


def _scatter_multiply(call: OpCall) -> Rule:
    if dict(call.kwargs).get("reduce") == "add" and call.name == "aten.scatter.reduce":
        return _scatter_add(call)
    return _scatter(call, "i!", ())


def _scatter_reduce(call: OpCall) -> Rule:
    reduce = call.arg(4, "reduce")
    if reduce == "sum" and bool(call.arg(5, "include_self", True)):
        return _scatter_add(call)
    return _scatter(call, "i!", ((0, 2),) if reduce in ("sum", "mean") else ())


RULES: dict[str, Builder] = {
    "aten.gather.default": _gather,
    "aten.scatter_add.default": _scatter_add,
    "aten.scatter.src": _scatter_src,
    "aten.scatter.value": _scatter_value,
    "aten.scatter.reduce": _scatter_multiply,
    "aten.scatter.value_reduce": _scatter_multiply,
    "aten.scatter_reduce.two": _scatter_reduce,
}
