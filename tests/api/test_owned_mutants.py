"""Faults in updates of whole parameters are found by comparing with torch, or by a failed step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.runtime.lower import updates
from dtensor.runtime.optimizer.owned.owned_optimizer import OwnedOptimizer
from dtensor.sharding.plan.steps import Update
from tests.training import assert_same_bits

DP2 = dt.Mesh(dp=2)
COMPUTE, COMPUTE_OWNED = OwnedOptimizer.compute, updates.compute_owned


class Orthogonal(torch.optim.Optimizer):
    """A small Muon in the parameter's dtype, with momentum. It raises for a NaN."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            u, _, v = torch.linalg.svd(momentum, full_matrices=False)
            p.sub_(u @ v, alpha=0.01)


def loss_fn(model: nn.Sequential, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """A ``scale`` of NaN makes the gradient of the last matrix NaN, and no other."""
    last: Any = model[2]
    return ((model(x) - y) ** 2).mean() + (last.weight * 0 * scale).sum()


def check() -> None:
    """Compare three steps with torch, and the state before and after a step that fails."""

    def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False)
        module = nn.Sequential(*layers).double()
        return module, Orthogonal(module.parameters(), {})

    (module, optimizer), (plain, expected) = build(), build()
    data = [torch.randn(2, 8, 6, dtype=torch.float64).unbind() for _ in range(3)]
    one = torch.ones((), dtype=torch.float64)
    model = dt.parallelize(module, DP2)
    step = dt.train_step(
        model, loss_fn, optimizer, inputs=dict(x=dict(dp=dt.Row()), y=dict(dp=dt.Row()))
    )
    with dt.launch(DP2):
        for x, y in data:
            float(step(x, y, one))
            expected.zero_grad()
            loss_fn(plain, x, y, one).backward()
            expected.step()
        state = dt.gather_state_dict(model, optimizer)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state["model"][name], value, rtol=1e-9, atol=1e-12)
        for key, entries in expected.state_dict()["state"].items():
            own = state["optimizer"]["state"][key]["momentum"]
            torch.testing.assert_close(own, entries["momentum"], rtol=1e-9, atol=1e-12)
        with pytest.raises(TaskError, match="svd"):
            float(step(*data[0], one * torch.nan))
        assert_same_bits(dt.gather_state_dict(model, optimizer), state)


def by_shard(optimizer: OwnedOptimizer, *args: Any) -> Any:
    """Update each half of a matrix as a matrix of its own."""
    halves = [COMPUTE(optimizer, *_half(args, n)) for n in range(2)]
    values, blobs = COMPUTE(optimizer, *args)
    return {k: torch.cat([h[0][k] for h in halves]) for k in values}, blobs


def _half(args: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    updated, parameters, options, gradients, states, clip, *_ = args
    cut = [{k: x.chunk(2)[number].clone() for k, x in d.items()} for d in (parameters, gradients)]
    fresh = {k: torch.empty(0, dtype=torch.bool) for k in states}
    return updated, cut[0], options, cut[1], fresh, clip


def never(optimizer: OwnedOptimizer, *args: Any) -> Any:
    values, blobs = COMPUTE(optimizer, *args)
    return {k: args[1][k].clone() for k in values}, blobs


def early(
    optimizer: Any, updated: Any, options: Any, values: Any, gradients: Any, *more: Any
) -> Any:
    """Write the new values before the vote."""
    results = COMPUTE_OWNED(optimizer, updated, options, values, gradients, *more)
    for value, new in zip(values, results, strict=False):
        value.copy_(new)
    return results


def elsewhere(update: Update, coordinates: Any) -> bool:
    """Update on the rank that does not own the parameter, where its state would lie."""
    owner = tuple((axis, 1 - coordinate) for axis, coordinate in update.owner or ())
    return IS_ON_RANK(replace(update, owner=owner), coordinates)


IS_ON_RANK = Update.is_on_rank
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "an update per shard": (OwnedOptimizer, "compute", by_shard),
    "no update": (OwnedOptimizer, "compute", never),
    "state on another rank": (Update, "is_on_rank", elsewhere),
    "values written before the vote": (updates, "compute_owned", early),
}


def test_unchanged_code_passes() -> None:
    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError, match=r"are not close|state.model.0.weight differs"):
        check()
