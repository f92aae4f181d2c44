"""Attention as `dt.attention`: which masks it needs no mask for, and which heads are grouped.

    sdpa(q[b h t d], k, v, i[None] <= i[:, None])   ->  dt.attention(q, k, v, True, scale)[0]
    k[b g s d] repeated to [b h s d]                ->  dt.attention takes k[b g s d]

Libraries pass a mask where they could say `is_causal`. One that is the same at every call
(constants.py) is looked at: where it hides nothing it is dropped, and where it hides what comes
later, counted from the first position as torch counts, it is `is_causal`. So is a sliding window
that is no shorter than the sequence. Keys and values that are repeated for their query heads, by
`repeat_interleave` or by expanding, are taken as they were before.

Invariants: the same numbers up to the rounding of another kernel. What depends on an argument (a
padding mask), a parameter or a buffer stays a mask. Not here: attention that the program writes
itself, with matmul and softmax.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from dtensor.frontend.capture.recognise.constants import Constants, NotConstant, Writes
from dtensor.frontend.graph import Writer, bound

aten = torch.ops.aten
dt = torch.ops.dt

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default)


def settle_mask(node: fx.Node, constants: Constants) -> str:
    """In place: a mask that hides nothing, or only what comes later, is said by `is_causal`.

    Returns why a mask is left, "" where there is none.
    """
    a = bound(node)
    mask = a["attn_mask"]
    if mask is None:
        return ""
    if a["is_causal"]:
        return "it has a mask and is_causal"  # torch raises where it runs
    try:
        seen = _seen(constants.value(mask))
    except NotConstant as reason:
        return f"its mask is no constant: {reason}"
    scores = (*a["query"].meta["val"].shape[-2:-1], *a["key"].meta["val"].shape[-2:-1])
    if seen is None or 0 in seen.shape or len(seen.shape) < 2:
        return "its mask is a constant that adds to the scores"
    if bool(seen.all()):
        is_causal = False
    elif tuple(seen.shape[-2:]) == scores and bool((seen == _causal(*scores)).all()):
        is_causal = True
    else:
        return "its mask is a constant, but neither causal nor all true"
    a.update(attn_mask=None, is_causal=is_causal)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    node.args = tuple(a.pop(name) for name in names)
    node.kwargs = a
    return ""


def _causal(queries: int, keys: int) -> Tensor:
    """As torch has it, also where there are more of the ones than of the others."""
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def _seen(mask: Tensor) -> Tensor | None:
    """Which keys a query sees; None where the mask does more than to hide keys."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    # The lowest number of a dtype hides as -inf does where a query sees any key at all.
    hidden = (mask == -math.inf) | (mask == torch.finfo(mask.dtype).min)
    return seen if bool((seen | hidden).all()) and bool(seen.any(-1).all()) else None


def attention(graph: fx.Graph, node: fx.Node, writes: Writes) -> str:
    """In place: one `dt.attention`, and ""; or why not. Its mask is settled."""
    a = bound(node)
    q, k, v = (a[name].meta["val"] for name in ("query", "key", "value"))
    out = node.meta["val"]
    if a["attn_mask"] is not None:
        return "it has a mask"
    if a["dropout_p"] != 0:
        return "it drops weights, each by a number of its own"
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"its queries have {q.dim()} dims and not 4"
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or k.shape != v.shape:
        return "its queries, keys and values are of other sizes"
    if q.shape[1] != k.shape[1] and not (a["enable_gqa"] and q.shape[1] % k.shape[1] == 0):
        return "its queries and keys have other numbers of heads"
    keys, values = _grouped(node, a["key"], a["value"], writes)
    call = Writer(graph, node)
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    tensors = [
        call.cast(x, val.dtype, out.dtype) for x, val in ((a["query"], q), (keys, k), (values, v))
    ]
    pair = call(dt.attention.default, *tensors, a["is_causal"], scale)
    call.replace(call(operator.getitem, pair, 0))
    return ""


def _grouped(node: fx.Node, key: fx.Node, value: fx.Node, writes: Writes) -> tuple[Any, Any]:
    """Keys and values before they were repeated alike; themselves where they were not."""
    if key.meta["val"].shape[1] != node.meta["val"].shape[1]:
        return key, value
    keys, values = _unrepeated(key), _unrepeated(value)
    if keys is None or values is None:
        return key, value
    changed = writes.between(key, node) or writes.between(value, node)
    alike = keys.meta["val"].shape == values.meta["val"].shape
    return (keys, values) if alike and not changed else (key, value)


def _unrepeated(x: fx.Node) -> fx.Node | None:
    """b g s d of b (g r) s d in which each of g stands r times in a row; None for others."""
    while x.target in _COPIES:
        x = _first(x)
    if x.target is aten.repeat_interleave.self_int:
        a = bound(x)
        source = a["self"]
        plain = a["output_size"] is None or a["output_size"] == x.meta["val"].shape[1]
        return source if plain and a["dim"] in (1, -3) else None
    if x.target not in _RESHAPES:
        return None
    spread = _first(x)
    while spread.target in _COPIES:
        spread = _first(spread)
    if spread.target is not aten.expand.default:
        return None
    column = _first(spread)
    if column.target is not aten.unsqueeze.default or column.args[1] not in (2, -3):
        return None
    source = _first(column)
    if source.meta["val"].dim() != 4:
        return None
    b, g, s, d = source.meta["val"].shape
    times = spread.meta["val"].shape[2]
    shapes = (tuple(spread.meta["val"].shape), tuple(x.meta["val"].shape))
    return source if shapes == ((b, g, times, s, d), (b, g * times, s, d)) else None


def _first(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
