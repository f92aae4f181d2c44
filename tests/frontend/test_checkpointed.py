"""Tests that ops captured inside `torch.utils.checkpoint` carry the checkpoint's number, and that
gradients equal torch's.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph
from tests.frontend.eager import check
from tests.models import MLP


class Two(nn.Module):
    """A model with a checkpoint of a module, a checkpoint of a method that calls another module,
    and one inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = MLP(), MLP(), MLP()
        self.again = functools.partial(checkpoint, use_reentrant=reentrant)

    def part(self, x: Tensor, scale: float) -> Tensor:
        with torch.no_grad():
            shift = x.mean() + scale
        return F.gelu(self.again(self.second, x)) * shift

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first, torch.sin(x))
        x = self.again(self.part, x, 0.5)
        return self.last(x)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def numbers(graph: Graph) -> dict[int | None, set[str]]:
    """Return, for each checkpoint number, the outermost modules of its forward ops ("" for ops
    in none)."""
    found: dict[int | None, set[str]] = {}
    for node in graph.nodes:
        if node.meta["phase"] == "forward":
            calls = node.meta["calls"]
            found.setdefault(node.meta["checkpoint"], set()).add(calls[0] if calls else "")
    return found


@pytest.mark.default("False")
@pytest.mark.parametrize("reentrant", [False, True])
def test_ops_carry_number_of_outermost_checkpoint(reentrant: bool) -> None:
    x = torch.randn(3, 16, requires_grad=True)
    graph = capture(loss, (Two(reentrant), x), grads="loss")
    assert numbers(graph) == {None: {"", "last"}, 0: {"first"}, 1: {"", "second"}}


def test_gradients_through_checkpoint_equal_torch() -> None:
    """use_reentrant=True gives the same graph; for it torch itself has no `autograd.grad` to
    compare with."""
    x = torch.randn(3, 16, requires_grad=True)
    graph = check(loss, (Two(reentrant=False), x), grads="loss")
    assert str(graph) == str(capture(loss, (Two(reentrant=True), x), grads="loss"))


def test_calls_of_shared_module_in_checkpoints_have_distinct_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = MLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    graph = capture(loss, (Shared(), torch.randn(2, 16)), grads="loss")
    assert numbers(graph) == {None: {"", "block", "block@1"}}
    assert {n.meta["module"].split(".")[0] for n in graph.nodes} == {"", "block"}


def test_checkpoint_sequential_numbers_ops_by_segment() -> None:
    model = nn.Sequential(*(MLP() for _ in range(4)))

    def fn(model: Any, x: Tensor) -> Tensor:
        return checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean()

    graph = capture(fn, (model, torch.randn(2, 16)), grads="loss")
    # torch does not checkpoint the last segment
    assert numbers(graph) == {0: {"0", "1"}, None: {"", "2", "3"}}
