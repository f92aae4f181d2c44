"""Every schedule gives the same gradients: bitwise equal to one rank that runs the microbatches in
order, and within rounding of one full batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.runtime.lower.actions import Actions, stage_costs
from dtensor.runtime.schedule import bubble, timeline
from dtensor.sharding.plan.steps import Compute

WIDTH, ROWS = 6, 840  # the rows divide by 1 to 8


class Chain(nn.Module):
    """One layer for each stage, with a norm whose weight gradient is computed together with its
    input gradient."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, WIDTH, generator=generator),
    )


def model_of(layers: int) -> Chain:
    torch.manual_seed(0)
    return Chain(layers)


def step_of(layers: int, mesh: dt.Mesh, schedule: dt.Schedule, **options: Any) -> dt.TrainStep:
    module = model_of(layers)
    stages = {"pp": [[f"layers.{n}.*"] for n in range(layers)]}
    model = dt.parallelize(module, mesh, {}, stages=stages)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return dt.train_step(model, loss_fn, optimizer, schedule=schedule, **options)


def gradients(layers: int, mesh: dt.Mesh, schedule: dt.Schedule) -> dict[str, Tensor]:
    with dt.launch(mesh):
        return step_of(layers, mesh, schedule).gradients(*data())


@functools.cache
def in_order(layers: int, microbatches: int) -> dict[str, Tensor]:
    """Run all stages on one rank, one microbatch after the other."""
    return gradients(layers, dt.Mesh(pp=1), dt.GPipe(microbatches))


@functools.cache
def full_batch(layers: int) -> dict[str, Tensor]:
    model = model_of(layers)
    loss_fn(model, *data()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(make: Callable[[int], dt.Schedule], v: int, p: int, m: int) -> None:
    found = gradients(v * p, dt.Mesh(pp=p), make(m))
    expected, exact = full_batch(v * p), in_order(v * p, m)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, exact[name]), name
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * largest)


SCHEDULES: list[tuple[Callable[[int], dt.Schedule], int]] = [
    (dt.GPipe, 1),
    (dt.LoopedBFS, 2),
    (dt.OneFOneB, 1),
    (dt.Interleaved1F1B, 2),
    (dt.ZBH1, 1),
    (dt.ZBH2, 1),
    (dt.ZBV, 2),
    (dt.DualPipeV, 2),
    (lambda m: dt.Searched(microbatches=m, most_held=3), 2),
]


@pytest.mark.default("GPipe-1-2-4")
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6)])
@pytest.mark.parametrize(("schedule", "v"), SCHEDULES)
def test_gradients_of_schedule_match_one_rank_and_full_batch(
    schedule: Callable[[int], dt.Schedule], v: int, p: int, m: int
) -> None:
    check(schedule, v, p, m)


def test_backward_splits_into_input_and_weight_gradient_actions() -> None:
    """I contains the chain of input gradients, W the products with activations."""
    step = step_of(2, dt.Mesh(pp=2), dt.ZBH1(2))
    plan = step.plan(*data())
    actions = Actions(plan, dt.ZBH1(2).grid(2, 2))
    names = {
        kind: [s.op.call.name for s in actions.steps(kind, 1) if isinstance(s, Compute)]
        for kind in ("B", "I", "W")
    }
    assert sorted(names["B"]) == sorted(names["I"] + names["W"])
    assert names["I"].count("aten.mm.default") == names["W"].count("aten.mm.default") == 1
    assert "aten.sum.dim_IntList" in names["W"]  # of the bias
    assert "aten.native_layer_norm_backward.default" in names["I"]


def test_stages_are_placed_on_ranks_by_schedule() -> None:
    """ZBV places them as a V, for evaluation too. A later schedule with another placement is
    refused."""
    mesh = dt.Mesh(pp=2)
    step = step_of(4, mesh, dt.ZBV(4))
    x, y = data()
    with dt.launch(mesh):
        before = float(step(x, y))
        evaluate = dt.compile(loss_fn, mesh)
        assert evaluate.plan(step.model, x, y).stage_ranks == (0, 1, 1, 0)
        assert float(evaluate(step.model, x, y).full_tensor()) < before
        dt.gather_state_dict(step.model, step.optimizer)
    with pytest.raises(dt.PlanningError, match=r"ranks \[0, 1, 0, 1\] of pp.*\[0, 1, 1, 0\]"):
        dt.train_step(step.model, loss_fn, step.optimizer, schedule=dt.Interleaved1F1B(4))


def test_stage_costs_equal_costs_of_plan() -> None:
    """Each op of a stage is counted once. A schedule found by search with these costs is never
    slower than 1F1B."""
    step = step_of(3, dt.Mesh(pp=3), dt.OneFOneB(4))
    plan = step.plan(*data())
    plan = replace(plan, topology=dt.Topology(launch_latency=0.0))
    costs = stage_costs(plan)
    assert isinstance(costs.forward, tuple) and isinstance(costs.weight, tuple)
    assert isinstance(costs.input, tuple)
    for stage in range(3):
        each = costs.forward[stage] + costs.input[stage] + costs.weight[stage]
        assert min(costs.forward[stage], costs.input[stage], costs.weight[stage]) > 0
        assert 4 * each == pytest.approx(plan.totals.stages[stage].seconds, rel=0.05)  # no update
    # the printed bubble is about that of these costs, and not that of equal stages
    alone = replace(plan, topology=dt.Topology(latency=0.0, bandwidth=1e30, launch_latency=0.0))
    expected = bubble(step.grid, stage_costs(alone))
    assert alone.cost.bubble == pytest.approx(expected, rel=0.01)
    assert abs(expected - bubble(step.grid)) > 0.005
    found = dt.Searched(microbatches=4, costs=costs).search(3, 3)
    known = timeline(dt.OneFOneB(4).grid(3, 3), costs)
    assert found.time <= max(end for _, end in known.values())


if __name__ == "__main__":  # all of them: python -m tests.api.test_schedules
    number = 0
    for schedule, v in SCHEDULES:
        for p in (2, 3, 4):
            for m in range(1, 9):
                try:
                    schedule(m).grid(v * p, p)
                except dt.PlanningError:
                    continue  # not in its domain
                check(schedule, v, p, m)
                number += 1
    print(f"{number} schedules: bitwise those of microbatches in order, 1e-5 of the full batch")
