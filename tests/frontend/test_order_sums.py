"""Tests that gradient sums add the matrix products first, without changing the sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph

aten = torch.ops.aten


class Shared(nn.Module):
    """One tensor read by a residual and three layers; the flag decides which is met first."""

    def __init__(self, residual_last: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.residual_last = residual_last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (layer(x) for layer in self.layers)
        y = q * k * v
        return self.norm(x + y) if self.residual_last else self.norm(y) * x.sin()


def graph_of(model: nn.Module) -> Graph:
    return capture(lambda model, x: model(x).pow(2).sum(), (model, torch.zeros(2, 4)), grads="loss")


def sums(graph: Graph) -> list[list[str]]:
    """Return the operands of each sum of two tensors in the backward: "product", "sum" or
    "other"."""

    def kind(node: torch.fx.Node) -> str:
        while node.target in (aten.reshape.default, aten.permute.default):
            node = node.all_input_nodes[0]
        return {aten.mm.default: "product", aten.add.Tensor: "sum"}.get(node.target, "other")

    return [
        [kind(operand) for operand in node.all_input_nodes]
        for node in graph.fx.nodes
        if node.target is aten.add.Tensor
        and node.meta["phase"] == "backward"
        and len(node.all_input_nodes) == 2
    ]


def test_gradient_sum_adds_products_before_residual() -> None:
    found = sums(graph_of(Shared(residual_last=True)))
    assert found == [["product", "product"], ["sum", "product"], ["other", "sum"]]


def test_gradient_sum_that_starts_with_products_is_unchanged() -> None:
    found = sums(graph_of(Shared(residual_last=False)))
    assert found[-1] != ["other", "sum"] or found[0] == ["product", "product"]
    assert sum(kinds.count("product") for kinds in found) == 3
