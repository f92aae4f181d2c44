"""What patterns are matched with: ops under their names, past casts; who uses a value.

    is_op(node, aten.rsqrt.default)    uncast(node)    sole_user(node, aten.mul.Tensor)

Checks that torch's export leaves beside a value (`_assert_tensor_metadata`) are no users.
Invariant: nothing is changed but by `erase`, which takes what nothing uses any more. Not here:
patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import fx

from dtensor.frontend.capture.patches import CHECKPOINT

aten: Any = torch.ops.aten

CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)
_CHECK = aten._assert_tensor_metadata.default


class NoMatch(Exception):
    """Why an anchor's surroundings are not the pattern, as a sentence; "" where it is nothing that
    should be told."""


def is_op(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is not _CHECK]


def sole_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    """The one that uses the value, if it is alone and one of these ops."""
    readers = users(node)
    return readers[0] if len(readers) == 1 and is_op(readers[0], *targets) else None


def other(node: fx.Node, operand: fx.Node) -> Any:
    """What a commutative op has beside an operand, which it may have twice."""
    a, b = node.args[:2]
    return b if a is operand else a


def dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_plain(node: fx.Node) -> bool:
    """No alpha, no dtype, nothing but operands."""
    return not node.kwargs


def uncast(node: fx.Node) -> fx.Node:
    """The value before it was cast to a wider dtype, or to its own; itself where it was not."""
    while is_op(node, *CASTS) and is_tensor(node.args[0]):
        source = node.args[0]
        is_float = dtype(source).is_floating_point
        if not is_float or torch.promote_types(dtype(source), dtype(node)) != dtype(node):
            break
        node = source
    return node


def check_together(nodes: Iterable[fx.Node]) -> None:
    """Raises NoMatch where some of the nodes run again in the backward and others do not."""
    regions = {(node.meta.get("custom") or {}).get(CHECKPOINT) for node in nodes}
    if len(regions) > 1:
        raise NoMatch("a checkpoint begins or ends within it")


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """The node, where nothing uses it, and then what it alone used."""
    if node.op != "call_function" or users(node):
        return
    for check in list(node.users):
        graph.erase_node(check)
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        erase(graph, operand)


def take_place(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """The new node is used where the old one was, which goes with all that it alone used."""
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)
    erase(graph, old)
