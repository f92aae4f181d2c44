"""What rewrites of the exported forward graph are written with: `bound` and `Writer`.

    call = Writer(graph, node)
    call.replace(call(aten.mul.Tensor, call(aten.neg.default, x), 2))

Invariants: new nodes carry the line and module of the node that they replace, and the one that
takes its place its "val". Not here: any rewrite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

META = ("stack_trace", "nn_module_stack", "custom")


def bound(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the schema's names, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    values = {a.name: a.default_value for a in node.target._schema.arguments}
    return {**values, **dict(zip(names, node.args, strict=False)), **node.kwargs}


class Writer:
    """Inserts calls before a node, each with the node's line and module, then replaces it."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta.update({k: self.node.meta[k] for k in META if k in self.node.meta})
        return new

    def cast(self, x: fx.Node, source: torch.dtype, target: torch.dtype) -> fx.Node:
        return x if source == target else self(torch.ops.aten.to.dtype, x, target)

    def replace(self, new: fx.Node) -> None:
        if "val" in self.node.meta:  # later rewrites of the same pass read it
            new.meta.setdefault("val", self.node.meta["val"])
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
