"""Orders the sums in which gradients are accumulated: products of matrices come first.

    ((residual + dq) + dk) + dv     ->     residual + ((dq + dk) + dv)

A tensor that several layers read has one gradient from each. Where those layers' weights are split
by columns, each product is pending, and a sum of pending values alone may stay pending: so the
projections of one attention cost one reduction together and not one each, whatever order autograd
met them in (after a residual, in models that normalise last).

Invariants: the same terms are added, in another order, whatever the placement, so every placement
still computes the same sums. Sums of two, and sums whose products come first, stay as they are.
Not here: when a sum is reduced, which the planner decides.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_PASSING = (aten.reshape.default, aten.permute.default, aten._to_copy.default)


def order_sums(graph: fx.Graph) -> None:
    """In place, on the simplified joint graph; of the backward only."""
    for node in list(graph.nodes):
        if _is_sum(node) and not _goes_on(node):
            terms = _terms(node)
            products = [t for t in terms if _is_product(t)]
            if len(products) < 2 or terms[: len(products)] == products:
                continue
            others = [t for t in terms if not _is_product(t)]
            total = _left_fold(graph, node, products)
            if others:
                total = _add(graph, node, _left_fold(graph, node, others), total)
            node.replace_all_uses_with(total)
            _erase(graph, node)


def _is_sum(node: fx.Node) -> bool:
    """A plain sum of two tensors of one shape and dtype, in the backward."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    if node.meta.get("partitioner_tag") != "is_backward":
        return False
    val = node.meta["val"]
    return all(
        isinstance(x, fx.Node)
        and x.meta["val"].shape == val.shape
        and x.meta["val"].dtype == val.dtype
        for x in node.args
    )


def _goes_on(node: fx.Node) -> bool:
    """Whether the sum is but a term of a larger one."""
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _terms(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for term in node.args:
        assert isinstance(term, fx.Node)
        if _is_sum(term) and len(term.users) == 1:
            found += _terms(term)
        else:
            found.append(term)
    return found


def _is_product(node: fx.Node) -> bool:
    while node.target in _PASSING:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.target in _PRODUCTS


def _left_fold(graph: fx.Graph, at: fx.Node, terms: list[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        total = _add(graph, at, total, term)
    return total


def _add(graph: fx.Graph, at: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    with graph.inserting_before(at):
        new = graph.call_function(aten.add.Tensor, (a, b))
    new.meta.update(at.meta)
    return new


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """The sum and the partial sums that only it read."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        if not operand.users and _is_sum(operand):
            _erase(graph, operand)
