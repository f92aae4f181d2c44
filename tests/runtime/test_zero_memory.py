"""Memory per rank under ZeRO-0 to -3 on dp=4: predicted beside measured, and the paper's ratios."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft.run.worker import Worker
from dtensor.sharding.plan.cost.memory import waiting_gradients
from tests.models import GPT, batch, loss_fn
from tests.runtime.test_memory import measure
from tests.training import Run, adamw

RANKS = 4


def run_of(level: int, schedule: dt.Schedule) -> Run:
    torch.manual_seed(0)
    module = GPT(vocab=64, width=32, positions=32, layers=1, tied=False)
    mesh = dt.Mesh(dp=RANKS)
    model = dt.parallelize(module, mesh, {}, zero={"dp": level})
    optimizer = adamw(module)
    step = dt.train_step(model, loss_fn, optimizer, inputs=dict(dp=dt.Row()), schedule=schedule)
    return Run(mesh=mesh, module=module, model=model, optimizer=optimizer, step=step)


def gradients_held(run: Run, one: Any) -> list[int]:
    """Bytes of the gradients that each rank holds when its last backward is over."""
    names = waiting_gradients(run.step.plan(*one), 0)
    held: dict[int, int] = {}
    with dt.launch(run.mesh, mode="interpreted"):
        float(run.step(*one))
        plain = Worker.step

        def step(worker: Worker, handle: int, position: int) -> None:
            engine = worker.engines[handle]
            rank, index = engine.sites[position]
            label = engine.program.ranks[rank].instructions[index].label
            if rank not in held and label and label.action in ("optimizer", "update"):
                values = [engine.values[rank, name] for name in names]
                held[rank] = sum(v.numel() * v.element_size() for v in values)
            plain(worker, handle, position)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "step", step)
            float(run.step(*one))
        run.state()
    return [held[rank] for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "schedule"), [*((n, dt.GPipe(1)) for n in range(4)), (2, dt.OneFOneB(4))], ids=str
)
def test_predicted_is_measured(
    level: int, schedule: dt.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = batch(size=16, length=32, vocab=64)
    expected = run_of(level, schedule).step.plan(*one).memory[0]
    gradients = gradients_held(run_of(level, schedule), one)
    meter, held = measure(run_of(level, schedule), one, monkeypatch)
    whole = sum(p.numel() for p in run_of(0, schedule).module.parameters()) * 4
    for rank in range(RANKS):
        found = (held[rank]["parameters"], gradients[rank], held[rank]["optimizer"])
        predicted = (expected.parameters, expected.gradients, expected.optimizer)
        paper = (
            whole / RANKS if level == 3 else whole,
            whole / RANKS if level >= 2 else whole,
            2 * whole / RANKS if level >= 1 else 2 * whole,
        )
        assert found == pytest.approx(predicted, rel=0.05), rank
        assert found == pytest.approx(paper, rel=0.05), rank
        assert expected.total == pytest.approx(meter.peak[rank], rel=0.15), rank
