"""Stages that are split in different ways: tp=4 before dp=2 x tp=2, dp=4 before tp=4, and ZeRO.
What crosses is changed on the way, at its smallest, and gradients are those of plain torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from tests.training import assert_gradients_close, gradients_of

MESH = dt.Mesh(pp=2, dp=2, tp=2)
STAGES = {"pp": [["first*"], ["second*", "head*"]]}
BOTH = dict(dp=dt.Row(), tp=dt.Row())
TP4 = {"up.*": BOTH, "down.weight": dict(dp=dt.Column(), tp=dt.Column())}
TP2 = {"up.*": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
WHOLE: dict[str, dict[str, dt.Placement]] = {"*": dict(dp=dt.Replicate(), tp=dt.Replicate())}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = MLP(), MLP(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def placed(**stages: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{stage}.{name}": at for stage, where in stages.items() for name, at in where.items()}


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def trained(
    placements: dict[str, Any], inputs: dict[str, Any], **options: Any
) -> tuple[Model, dt.TrainStep]:
    torch.manual_seed(0)
    module = Model()
    model = dt.parallelize(module, MESH, placements, stages=STAGES, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step = dt.train_step(model, loss_fn, optimizer, schedule=dt.OneFOneB(2), inputs=inputs)
    return module, step


CASES = {
    "tp4, then dp2 tp2": (placed(first=TP4, second=TP2), dict(x={}, y=dict(dp=dt.Row()))),
    "dp4, then tp4": (placed(first=WHOLE, second=TP4), dict(x=BOTH, y={})),
    "tp4, then dp4": (
        placed(first=TP4, second=WHOLE, head={"*": dict(dp=dt.Replicate(), tp=dt.Replicate())}),
        dict(x={}, y=BOTH),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_plain_torchs(case: str) -> None:
    module, step = trained(*CASES[case])
    with dt.launch(MESH):
        found = step.gradients(*batch())
    assert_gradients_close(found, gradients_of(module, batch(), loss_fn))


def test_what_crosses_is_at_its_smallest() -> None:
    """The first stage needs the whole batch's gradient on each rank: a half of it crosses, and is
    gathered where it is needed."""
    _, step = trained(*CASES["tp4, then dp2 tp2"])
    crossing = [c for c in step.plan(*batch()).collectives if c.axis == "pp"]
    half_of_a_microbatch = 2 * 16 * 4  # rows, columns, bytes
    assert [(c.phase, c.bytes_sent) for c in crossing] == [
        ("forward", half_of_a_microbatch),
        ("backward", half_of_a_microbatch),
    ]
    gathers = [c for c in step.plan(*batch()).collectives if c.kind == "all_gather"]
    assert [(c.axis, c.phase, c.stage) for c in gathers] == [("dp", "backward", 0)]


def test_with_zero_on_both() -> None:
    """dp=2 x tp=2 beside tp=4, where the states of what dp does not split are split over it."""
    placements, inputs = CASES["tp4, then dp2 tp2"]
    _, step = trained(placements, inputs, zero={"dp": 2})
    torch.manual_seed(0)
    alone = Model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    with dt.launch(MESH):
        for _ in range(3):
            found = float(step(*batch()))
            optimizer.zero_grad()
            loss = loss_fn(alone, *batch())
            loss.backward()
            optimizer.step()
            assert found == pytest.approx(loss.item(), rel=2e-6)
        state = dt.gather_state_dict(step.model, step.optimizer)
    for name, parameter in alone.state_dict().items():
        torch.testing.assert_close(state["model"][name], parameter, rtol=0, atol=2e-6)
