"""Ops that act without a result, made ops on values, so that the graph is one of values alone.

    token = with_effects(token, _linalg_check_errors, info, "linalg.inv")
        ->   every use of the inverse reads  dt.linalg_checked(inverse, info, "linalg.inv", False)

Torch's joint export threads a token through such ops to keep their order; the token goes, with its
input and its output. Invariants: the check comes before every use of what it checks, so an error
is raised where torch raises it. Effects of other ops stay and are refused (`detect`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as aot

import dtensor.sharding.ops.checks  # noqa: F401  (registers the op)

aten = torch.ops.aten
dt = torch.ops.dt


def settle_effects(graph: fx.Graph) -> None:
    """In place, on torch's joint graph with its descriptors."""
    for node in list(graph.nodes):
        is_effect = node.target is torch.ops.higher_order.with_effects
        if is_effect and node.args[1] is aten._linalg_check_errors.default:
            _check(graph, node)
    if not graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        _drop_tokens(graph)


def _check(graph: fx.Graph, node: fx.Node) -> None:
    values: Any = node.args
    token, _, info, api_name = values
    assert isinstance(info, fx.Node) and info.target is operator.getitem
    maker: Any = info.args[0]
    parts = [u for u in maker.users if u.target is operator.getitem and u is not info]
    last = [n for n in graph.nodes if n is info or n in parts][-1]
    for part in parts:
        with graph.inserting_after(last):
            checked = graph.call_function(
                dt.linalg_checked.default,
                (part, info, api_name, bool(node.kwargs.get("is_matrix", False))),
            )
        checked.meta.update(part.meta)
        part.replace_all_uses_with(checked, delete_user_cb=lambda u, own=checked: u is not own)
    for user in list(node.users):
        user.replace_all_uses_with(token)
        graph.erase_node(user)
    graph.erase_node(node)


_TOKENS_IN = (aot.ForwardTokenAOTInput, aot.BackwardTokenAOTInput)
_TOKENS_OUT = (aot.ForwardTokenAOTOutput, aot.BackwardTokenAOTOutput)


def _drop_tokens(graph: fx.Graph) -> None:
    output = graph.output_node()
    values: Any = output.args[0]
    pairs = list(zip(values, output.meta["desc"], strict=True))
    kept = [(v, d) for v, d in pairs if not isinstance(d, _TOKENS_OUT)]
    output.args = (tuple(v for v, _ in kept),)
    output.meta["desc"] = [d for _, d in kept]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], _TOKENS_IN) and not node.users:
            graph.erase_node(node)
