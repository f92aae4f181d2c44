"""Weights computed from other parameters (torch.nn.utils.parametrize) match plain torch under any
placement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import dtensor as dt
from tests.training import train_torch


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full(s, 0.1)) for s in ((8, 2), (2, 8)))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.a @ self.b


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(torch.relu(self.up(x)))))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def cached(model: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return loss_fn(model, x) + loss_fn(model, x * 2)


WAYS: dict[str, Callable[[Net], object]] = {
    "weight_norm": lambda net: parametrizations.weight_norm(net.mid),
    "spectral_norm": lambda net: parametrizations.spectral_norm(net.mid),
    "symmetric": lambda net: parametrize.register_parametrization(net.mid, "weight", Symmetric()),
    "low rank": lambda net: parametrize.register_parametrization(net.mid, "weight", LowRank()),
}
PLACED: dict[str, tuple[dt.Mesh, dict[str, Any], dict[str, Any]]] = {
    "tp2": (dt.Mesh(tp=2), dict(placements={"up.weight": dict(tp=dt.Row())}), {}),
    "zero3": (
        dt.Mesh(dp=2),
        dict(placements={}, zero={"dp": 3}),
        dict(inputs=dict(dp=dt.Row())),
    ),
    "pp2": (
        dt.Mesh(pp=2),
        dict(placements={}, stages={"pp": [["up*"], ["mid*", "down*"]]}),
        dict(schedule=dt.OneFOneB(microbatches=2)),
    ),
}
Change = dict[int, Callable[[Net], object]]
"""By the number of a step, what is done before it."""


def compare(placed: str, change: Change, loss: Any = loss_fn, steps: int = 3) -> None:
    """Compare losses, parameters, buffers and optimizer state with plain torch."""
    net, plain = Net(), Net()
    if 0 in change:
        torch.manual_seed(1)
        change[0](net)
        plain = copy.deepcopy(net)
    mesh, how, schedule = PLACED[placed]
    model = dt.parallelize(net, mesh, **how)
    opts = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (net, plain)]
    step = dt.train_step(model, loss, opts[0], **schedule)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    for number in range(steps):
        if number in change and number:
            change[number](net)
            change[number](plain)
        (expected,) = train_torch(plain, opts[1], [(x,)], loss=loss)
        assert float(step(x)) == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(net.state_dict(), plain.state_dict())
    mine, theirs = (opt.state_dict()["state"] for opt in opts)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.default("low rank-pp2")
@pytest.mark.parametrize("placed", ["tp2", "zero3", "pp2"])
@pytest.mark.parametrize("way", WAYS)
def test_parametrization_before_first_step_matches_torch(way: str, placed: str) -> None:
    compare(placed, {0: WAYS[way]})


def test_parametrize_cached_within_step_matches_torch() -> None:
    compare("tp2", {0: WAYS["weight_norm"]}, cached)


def test_parametrize_cached_around_step_keeps_users_cached_weight() -> None:
    net = Net()
    parametrizations.weight_norm(net.mid)
    model = dt.parallelize(net, dt.Mesh(tp=2), {})
    step = dt.train_step(model, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0))
    with parametrize.cached():
        computed = net.mid.weight
        step(torch.ones(2, 4))
        assert net.mid.weight is computed


@pytest.mark.default("pp2")
@pytest.mark.parametrize("placed", PLACED)
def test_parametrized_layer_frozen_at_first_trains_later(placed: str) -> None:
    """Layers that are frozen later are tested with changing.py."""
    thaw = {2: lambda net: net.up.requires_grad_(True)}
    compare(placed, {0: lambda net: net.up.requires_grad_(False), **thaw}, steps=4)
