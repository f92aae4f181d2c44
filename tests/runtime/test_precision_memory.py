"""Memory per rank of 16-bit parameters with master weights: predicted beside measured."""

from __future__ import annotations

import pytest
import torch

import dtensor as dt
from tests.models import GPT, batch, loss_fn
from tests.runtime.test_memory import measure
from tests.training import Run, adamw


def run_of(level: int, schedule: dt.Schedule) -> Run:
    torch.manual_seed(0)
    module = GPT(vocab=64, width=32, positions=32, layers=1, tied=False).to(torch.bfloat16)
    mesh = dt.Mesh(dp=4)
    model = dt.parallelize(module, mesh, {}, zero={"dp": level})
    optimizer = adamw(module)
    step = dt.train_step(
        model,
        loss_fn,
        optimizer,
        inputs=dict(dp=dt.Row()),
        schedule=schedule,
        master_weights=True,
    )
    return Run(mesh=mesh, module=module, model=model, optimizer=optimizer, step=step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "schedule"), [(0, dt.GPipe(1)), (1, dt.OneFOneB(4)), (3, dt.GPipe(1))], ids=str
)
def test_predicted_is_measured(
    level: int, schedule: dt.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = batch(size=16, length=32, vocab=64)
    run = run_of(level, schedule)
    expected = run.step.plan(*one).memory[0]
    meter, held = measure(run, one, monkeypatch)
    for rank in range(4):
        found = (held[rank]["parameters"], held[rank]["optimizer"])
        predicted = (expected.parameters, expected.optimizer + expected.masters)
        assert found == pytest.approx(predicted, rel=0.05), rank
        assert expected.total == pytest.approx(meter.peak[rank], rel=0.15), rank
