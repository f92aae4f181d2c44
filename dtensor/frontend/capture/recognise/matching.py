"""Helpers for matching patterns in an exported graph.

    is_op(node, aten.rsqrt.default)    uncast(node)    sole_user(node, aten.mul.Tensor)

The checks that torch's export adds (`_assert_tensor_metadata`) do not count as users of a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx

from dtensor.frontend.capture.patches import CHECKPOINT

aten: Any = torch.ops.aten

CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)
_METADATA_CHECK = aten._assert_tensor_metadata.default


class PatternMatch(NamedTuple):
    """A pattern that was found. ``op``: the op that replaced it, or ""; ``reason``: why it was not
    replaced, or ""; ``meta``: the meta of its last node."""

    what: str
    op: str
    reason: str
    meta: dict[str, Any]


class NoMatch(Exception):
    """The nodes around an anchor do not match the pattern. The message is the reason for the
    report, or "" if it should not be reported."""


def is_op(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is not _METADATA_CHECK]


def sole_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    """Return the user of a value if there is only one and it is one of these ops; else None."""
    readers = users(node)
    return readers[0] if len(readers) == 1 and is_op(readers[0], *targets) else None


def other_operand(node: fx.Node, operand: fx.Node) -> Any:
    """Return the other operand of a binary op, which may be the same one."""
    a, b = node.args[:2]
    return b if a is operand else a


def dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_plain(node: fx.Node) -> bool:
    """Return whether the op has no keywords, such as alpha= or dtype=."""
    return not node.kwargs


def uncast(node: fx.Node) -> fx.Node:
    """Return the value before all casts to a wider or the same dtype."""
    while is_op(node, *CASTS) and is_tensor(node.args[0]):
        source = node.args[0]
        is_float = dtype(source).is_floating_point
        if not is_float or torch.promote_types(dtype(source), dtype(node)) != dtype(node):
            break
        node = source
    return node


def check_same_checkpoint(nodes: Iterable[fx.Node]) -> None:
    """Raise NoMatch if the nodes are not all in the same checkpoint (or all in none)."""
    regions = {(node.meta.get("custom") or {}).get(CHECKPOINT) for node in nodes}
    if len(regions) > 1:
        raise NoMatch("a checkpoint begins or ends within it")


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node without users, and then the operands that have no other users."""
    if node.op != "call_function" or users(node):
        return
    for check in list(node.users):
        graph.erase_node(check)
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        erase_unused(graph, operand)


def replace_node(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Replace all uses of ``old`` by ``new``; erase ``old`` and the nodes that only it used."""
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)
    erase_unused(graph, old)
