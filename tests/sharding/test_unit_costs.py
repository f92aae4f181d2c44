"""What is predicted of a cut before it is made is what its plan says afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.api.model.stating import auto_stages
from dtensor.sharding.plan.stages.cut_chain import Chain, Partition, partition
from dtensor.sharding.plan.stages.unit_costs import SECOND
from tests.models import GPT, batch, loss_fn
from tests.plans import MEGATRON

TOPOLOGY = dt.Topology(latency=1e-6, bandwidth=1e9, flops=1e9, memory_bandwidth=1e10)
ROWS = dict(inputs=dict(dp=dt.Row()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pins", "placed", "stepped", "within"),
    [
        (dt.Mesh(pp=2, tp=2), MEGATRON, {}, {}, 1e-6),
        # what ends a stage is not computed again
        (dt.Mesh(pp=2, tp=2), MEGATRON, dict(recompute=["blocks.*"]), {}, 1e-2),
        (dt.Mesh(pp=3, dp=2), {}, {}, ROWS, 1e-2),  # buckets are the stages' own
        (dt.Mesh(dp=2, pp=2), {}, dict(zero={"dp": 3}), ROWS, 1e-2),
    ],
)
def test_predicted_is_planned(
    mesh: dt.Mesh,
    pins: Any,
    placed: dict[str, Any],
    stepped: dict[str, Any],
    within: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Partition] = []

    def noted(chain: Chain, num_parts: int, **options: Any) -> Partition | None:
        made = partition(chain, num_parts, **options)
        assert made is not None
        found.append(made)
        return made

    monkeypatch.setattr(auto_stages, "partition", noted)
    module = GPT(layers=2, vocab=128)
    model = dt.parallelize(module, mesh, pins, stages="auto", **placed)
    optimizer = torch.optim.AdamW(module.parameters())
    step = dt.train_step(
        model, loss_fn, optimizer, schedule=dt.OneFOneB(2), topology=TOPOLOGY, **stepped
    )
    plan = step.plan(*batch(0, 8, 8))
    (predicted,) = found
    planned = [work.seconds for work in plan.totals.stages]
    assert [cost / SECOND for cost in predicted.costs] == pytest.approx(planned, rel=within)
