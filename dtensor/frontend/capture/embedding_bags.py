"""Rewrite `nn.EmbeddingBag` of a matrix of ids as an embedding and a reduction.

    embedding_bag(w [v d], reshape(ids [b k]), arange(0, b k, k), mode="sum")
        ->   sum(embedding(w, ids) [b k d], 1)

The bag sizes are then part of the shape. Invariants: values and gradients equal the original
op's: padding ids are ignored, a bag of padding is 0, the first of equal maxima gets the gradient.
Bags with other offsets, empty bags and scale_grad_by_freq=True are not rewritten.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from dtensor.frontend.graph import Writer, bound
from dtensor.numerics import is_narrow

aten: Any = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


def lower_bag(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite an `embedding_bag` whose bags have one size, in place; leave any other unchanged."""
    a = bound(node)
    bag_size, items = _bag_size(a), list(node.users)
    read_items = [u for u in items if u.users]
    is_supported = not a["scale_grad_by_freq"] and not a["include_last_offset"]
    if not bag_size or not is_supported or any(u.args[1] != 0 for u in read_items):
        return
    call = Writer(graph, node)
    pad, mode = a.get("padding_idx"), a["mode"]
    ids = call(aten.reshape.default, a["indices"], [-1, bag_size])
    options = (-1 if pad is None else pad, False, a["sparse"])
    rows = call(aten.embedding.default, a["weight"], ids, *options)
    if a["per_sample_weights"] is not None:
        weights = call(aten.reshape.default, a["per_sample_weights"], [-1, bag_size, 1])
        rows = call(aten.mul.Tensor, rows, weights)
    valid = None if pad is None else call(aten.ne.Scalar, ids, pad)
    row_mask = None if valid is None else call(aten.unsqueeze.default, valid, -1)
    if mode == _MAX:
        if row_mask is not None:
            rows = call(aten.where.ScalarOther, row_mask, rows, -math.inf)
        out = call(operator.getitem, call(aten.max.dim, rows, 1), 0)
        if row_mask is not None:
            out = call(aten.where.ScalarOther, call(aten.any.dim, row_mask, 1), out, 0.0)
    else:
        if row_mask is not None:
            rows = call(aten.where.ScalarOther, row_mask, rows, 0.0)
        out = call(aten.sum.dim_IntList, rows, [1])
        if mode == _MEAN and valid is None:
            out = call(aten.div.Tensor, out, bag_size)
        elif mode == _MEAN:
            count = call(aten.clamp.default, call(aten.sum.dim_IntList, valid, [1], True), 1)
            out = call(aten.div.Tensor, out, count)
    dtype = a["weight"].meta["val"].dtype
    if is_narrow(dtype):  # CUDA autocast would return a float32 sum, but not a float32 bag
        out = call(aten.to.dtype, out, dtype)
    for user in items:
        if user in read_items:
            out.meta["val"] = user.meta["val"]
            user.replace_all_uses_with(out)
        graph.erase_node(user)
    graph.erase_node(node)


def _bag_size(a: dict[str, Any]) -> int:
    """Return the number of ids per bag; 0 if bags differ or the offsets are unknown."""
    offsets, count = a["offsets"], a["indices"].meta["val"].numel()
    if offsets.target is not aten.arange.start_step:
        return 0
    offsets_args = bound(offsets)
    start, end, step = offsets_args["start"], offsets_args["end"], offsets_args["step"]
    is_uniform = start == 0 and end == count and step > 0 and count % step == 0
    return step if is_uniform and isinstance(step, int) else 0
