"""Tests that differentiating repeated layers once gives the same graph, node by node, as
differentiating the whole program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtensor.frontend.capture import capture as capture_module
from dtensor.frontend.capture import layers, stitch
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Graph
from tests.models import GPT, MLP, DropoutGPT, loss_fn


class Chain(nn.Module):
    """A chain of layers. ``forward`` of a layer is given, with the values that it may store."""

    def __init__(self, layer: Callable[[MLP, Tensor, Tensor], Tensor], layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(MLP() for _ in range(layers))
        self.layer = layer

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for block in self.blocks:
            assert isinstance(block, MLP)
            x = self.layer(block, x, first)
        return self.head(x)


def _frozen(model: nn.Module) -> nn.Module:
    """Freeze the first two blocks and the tables of a GPT."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "blocks.3", "blocks.4", "norm")))
    return model


def _written(block: MLP, x: Tensor, first: Tensor) -> Tensor:
    y = block(x)
    y.mul_(2.0)
    return y


def _conjugated(block: MLP, x: Tensor, first: Tensor) -> Tensor:
    """Return a conjugated view, which strides do not reveal."""
    size = x.abs()
    return torch.complex(block(size), size).conj()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(_conjugated)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.chain.embed(tokens)
        for block in self.chain.blocks:
            x = _conjugated(block, x, x)  # type: ignore[arg-type]
        return self.chain.head(x.abs())


# Model and number of exports: 1 for the whole; else one before, one after, one per kind of layer.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tied": (lambda: GPT(layers=4), 3),
    "dropout": (lambda: DropoutGPT(layers=4), 3),
    "frozen": (lambda: _frozen(GPT(layers=5, tied=False)), 5),
    "checkpointed": (
        lambda: Chain(lambda block, x, _: checkpoint(block, x, use_reentrant=False)),
        3,
    ),
    "constant": (lambda: Chain(lambda block, x, _: x + block(x) * torch.tensor(0.5)), 3),
    "view": (lambda: Chain(lambda block, x, _: block(x).transpose(0, 1)), 5),
    "skip": (lambda: Chain(lambda block, x, first: block(x) + first), 2),  # then the whole
    "in place": (lambda: Chain(_written), 1),
    "conjugated": (Complex, 3),  # then the whole
}


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the exports in order; small layers count as worth exporting."""
    export, found = capture_module.export_joint, []

    def counted(module: Any, tensors: Any) -> Any:
        found.append(module)
        return export(module, tensors)

    for module in (capture_module, stitch):
        monkeypatch.setattr(module, "export_joint", counted)
    monkeypatch.setattr(layers, "EXPORT_COST_NODES", 0)
    return found


def _captured(model: nn.Module, grads: Any) -> Graph:
    tokens = torch.zeros(4, 8, dtype=torch.long)
    return capture(loss_fn, (model, tokens, tokens), grads=grads)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_graph_of_repeated_layers_equals_graph_differentiated_as_whole(
    case: str, exports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, num_exports = CASES[case]
    model = make()
    found = _captured(model, "loss")
    assert len(exports) == num_exports
    monkeypatch.setattr(capture_module, "segments_of", lambda _: ())
    whole = _captured(model, "loss")
    assert str(found) == str(whole)
    assert dataflow(found) == dataflow(whole)
