"""Ops on the rows of experts: which ops a model may apply to rows whose number is data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

import dtensor as dt

T, D, F, E = 12, 8, 12, 4
EXPERTS: dict[str, Any] = {"w_*": dict(ep=dt.Shard(0))}


class Experts(nn.Module):
    """A router and experts, with ``between`` applied to rows[T k, 2 F] between two products."""

    def __init__(self, between: Callable[[Tensor, dt.Route], Tensor]) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.randn(D, E, generator=drawn))
        self.w_up = nn.Parameter(torch.randn(E, D, 2 * F, generator=drawn) * 0.3)
        self.w_down = nn.Parameter(torch.randn(E, F, D, generator=drawn) * 0.3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(2, -1)
        rows, route = dt.to_experts(x, ids, E)
        rows = self.between(dt.expert_linear(rows, self.w_up, route), route)
        return dt.from_experts(dt.expert_linear(rows, self.w_down, route), route, weights)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sizes(h: Tensor, route: dt.Route) -> Tensor:
    """Apply ops whose arguments or gradients state the number of rows."""
    gate, up = h[..., ::2], h[..., 1::2].clamp(-1, 1)
    h = silu(gate) * up + layer_norm(h.view(-1, 2, F), (F,)).select(1, 1)
    h = h * h.mean(1, keepdim=True) + h.softmax(-1) * route.expert[:, None]
    first, second = h.view(h.shape[0], 2, F // 2).unbind(1)
    h = torch.stack([first.tanh(), second], 1).flatten(1)
    return torch.cat([h[:, :4], h[:, :1].expand(-1, 4), h[:, -4:]], -1)


@pytest.mark.parametrize("inputs", [{}, dict(ep=dt.Row())], ids=["tokens whole", "tokens split"])
def test_row_wise_ops_on_rows_whose_number_is_data_match_torch(inputs: dict[str, Any]) -> None:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    model, plain = Experts(sizes), Experts(sizes)
    wanted = loss_fn(plain, x)
    wanted.backward()
    placed = dt.parallelize(model, dt.Mesh(ep=2), EXPERTS)
    step = dt.train_step(placed, loss_fn, torch.optim.SGD(model.parameters(), 1.0), inputs=inputs)
    with dt.launch(placed.mesh):
        assert float(step(x)) == pytest.approx(wanted.item(), rel=1e-5)
        state = dt.gather_state_dict(placed)["model"]
    for name, weight in plain.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(state[name], (weight - weight.grad).detach())


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda h, _: h[:, : F // 2].repeat(1, 2), "aten.repeat.default reduces over rows"),
        (lambda h, _: h[:, :F] + h.new_zeros(len(h), 1), "no strategy of aten.add.Tensor"),
    ],
    ids=["repeat", "new rows"],
)
def test_ops_that_do_not_know_number_of_rows_are_refused(
    between: Callable[[Tensor, dt.Route], Tensor], message: str
) -> None:
    placed = dt.parallelize(Experts(between), dt.Mesh(ep=2), EXPERTS)
    step = dt.train_step(placed, loss_fn, torch.optim.SGD(placed.parameters(), 1.0))
    with pytest.raises(dt.PlanningError, match=message):
        step.plan(torch.randn(T, D))
