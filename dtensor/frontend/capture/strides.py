"""Rewrite as_strided as reshape and permute, which have sharding rules.

    as_strided(x [n c 1 1], [n, c, 1, 1], [c, 1, c, c])   ->   x
    as_strided(x [a b], [b, a], [1, b])                   ->   permute(x, [1, 0])
    as_strided_scatter(x, src, ..)                        ->   reshape(permute(src, ..), sizes of x)

Global pooling of a channels-last tensor ends in the first; the gradient of such a view is the last.

Invariants: x is contiguous (`refusals.check_joint`). Only views that contain each element of x
exactly once are rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dtensor.frontend.graph import bound

aten: Any = torch.ops.aten


def as_permutation(node: fx.Node, call: Callable[..., fx.Node]) -> list[fx.Node]:
    """Return the new nodes in order, the last of which replaces ``node``; [] if it has no such
    form.

    ``call`` adds a node with the meta of ``node``.
    """
    a = bound(node)
    x, size = a["self"].meta["val"], a["size"]
    order = _memory_order(size, a["stride"])
    if order is None or a["storage_offset"] or not 0 < x.numel() == torch.Size(size).numel():
        return []
    if node.target is aten.as_strided_scatter.default:
        new = call(aten.permute.default, a["src"], order)
        new.meta["val"] = a["src"].meta["val"].permute(order)
        return [new, call(aten.reshape.default, new, list(x.shape))]
    sizes = [size[d] for d in order]
    new = call(aten.reshape.default, a["self"], sizes)
    new.meta["val"] = x.reshape(sizes)
    inverse = [order.index(d) for d in range(len(order))]
    return [new, call(aten.permute.default, new, inverse)]


def _memory_order(size: list[int], stride: list[int]) -> list[int] | None:
    """Return the dims by decreasing stride; None if the elements have gaps or overlap in memory."""
    order = sorted(range(len(size)), key=lambda d: (size[d] == 1, -stride[d]))
    count = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != count:  # the stride of a dim of size 1 is arbitrary
            return None
        count *= size[d]
    return order
