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
    h = torch.cat([h[:, :4], h[:, :1].expand(-1, 4), h[:, -4:]], -1)
    h = h + torch.full_like(h, 0.5) + h.new_ones(len(h), 1) + torch.zeros(len(h), 1)
    h = h + h[:, :6].repeat(1, 2) + h.max(1, keepdim=True)[0] + h.sort(1)[0]
    return torch.where(h > 0, h - h.amax(1, keepdim=True), 0.1 * h)


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


def scaled_by_counts(h: Tensor, route: dt.Route) -> Tensor:
    """Scale rows by the number of rows of the whole batch for their expert, and for the fullest."""
    return h[:, :F] * (route.counts / route.counts.max())[route.expert][:, None]


def test_experts_on_one_of_two_axes_may_read_the_counts_of_the_whole_batch() -> None:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    model = Experts(scaled_by_counts)
    wanted = loss_fn(model, x).item()
    placed = dt.parallelize(model, dt.Mesh(dp=2, ep=2), EXPERTS)
    optimizer, inputs = torch.optim.SGD(model.parameters(), 1.0), dict(dp=dt.Row(), ep=dt.Row())
    step = dt.train_step(placed, loss_fn, optimizer, inputs=inputs)
    with dt.launch(placed.mesh):
        assert float(step(x)) == pytest.approx(wanted, rel=1e-5)


ROW_WISE = "fix: write it with ops that treat each row alone"
REFUSED: dict[str, tuple[Callable[[Tensor, dt.Route], Tensor], str, str]] = {
    "positions": (
        lambda h, _: h[:, :F] + torch.arange(len(h))[:, None],
        "aten.arange.default cannot run on a part of the rows: ",
        "fix: derive it from the rows",
    ),
    "dropout": (
        lambda h, _: nn.functional.dropout(h[:, :F], 0.5),
        "dt.dropout.default cannot run on a part of the rows: the number of rows is data",
        "fix: apply it to the tokens, before dt.to_experts or after dt.from_experts",
    ),
    "sum": (lambda h, _: h[:, :F] + h.sum(0)[:F], "aten.sum.dim_IntList reduces over", ROW_WISE),
    "norm": (
        lambda h, _: h[:, :F] / h.norm(),
        "aten.linalg_vector_norm.default mixes rows",
        ROW_WISE,
    ),
    "product": (lambda h, _: h[:, :F] @ (h.t() @ h)[:F, :F], "aten.mm.default red", ROW_WISE),
    "sort": (lambda h, _: h[:, :F].sort(0)[0], "aten.sort.default mixes rows", ROW_WISE),
    "cumsum": (lambda h, _: h[:, :F].cumsum(0), "aten.cumsum.default mixes rows", ROW_WISE),
    "softmax": (lambda h, _: h[:, :F].softmax(0), "aten._softmax.default mixes rows", ROW_WISE),
    "flip": (lambda h, _: h[:, :F].flip(0), "aten.flip.default mixes rows", ROW_WISE),
    "shift": (lambda h, _: h[:, :F].roll(1, 0), "aten.roll.default mixes rows", ROW_WISE),
    "index": (lambda h, r: h[:, :F][r.slot], "aten.index.Tensor", ROW_WISE),
    "view": (
        lambda h, _: (h + h.view(2, -1, 2 * F).flip(1).view(-1, 2 * F))[:, :F],
        "aten.reshape.default does not treat each row alone",
        ROW_WISE,
    ),
    "part": (lambda h, _: h[:4, :F].repeat(6, 1), "aten.slice.Tensor", ROW_WISE),
    "pairs": (lambda h, _: h[:, :F] + h[::2, :F].repeat(2, 1), "aten.slice.Tensor", ROW_WISE),
    "mean": (lambda h, _: h[:, :F] - h.mean(), "aten.(mean|sum).", ROW_WISE),
    "another order": (
        lambda h, _: h[:, :F] + torch.ones(2 * T, F).cumsum(0),
        "no strategy of ",
        "fix: rows have the order of experts, and other tensors have not",
    ),
    "outer": (lambda h, _: h[:, :F] + h @ h.t().mean(1, keepdim=True), "aten", ROW_WISE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_op_that_is_not_row_wise_is_refused_by_name(name: str) -> None:
    between, message, fix = REFUSED[name]
    model = Experts(between)
    model(torch.randn(T, D))
    placed = dt.parallelize(model, dt.Mesh(ep=2), EXPERTS)
    step = dt.train_step(placed, loss_fn, torch.optim.SGD(placed.parameters(), 1.0))
    with pytest.raises(
        dt.PlanningError, match=f"{message}(.|\n)*test_rows_of_experts.py(.|\n)*{fix}"
    ):
        step.plan(torch.randn(T, D))


def test_result_with_rows_of_split_experts_is_refused_with_a_fix() -> None:
    def products(model: nn.Module, x: Tensor) -> Tensor:
        rows, route = dt.to_experts(x, (x[:, :2] > 0).long(), E)
        return dt.expert_linear(rows, model.w_up, route)  # pyright: ignore[reportArgumentType]

    placed = dt.parallelize(Experts(sizes), dt.Mesh(ep=2), EXPERTS)
    with pytest.raises(dt.PlanningError, match="fix: return the tokens of dt.from_experts"):
        dt.compile(products, placed.mesh).plan(placed, torch.randn(T, D))
