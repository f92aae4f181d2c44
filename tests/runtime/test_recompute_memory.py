"""Recomputation on a GPT of 12 layers: the memory that it saves, predicted beside measured; the
same gradients to the bit; the same collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.sharding.plan.plan import Plan
from tests.models import GPT, batch, loss_fn
from tests.runtime.test_memory import measure
from tests.training import MEGATRON, Run, assert_same_bits

HALVES = {
    "pp": [
        ["embed*", "positions*", "blocks.{0..5}.*"],
        ["blocks.{6..11}.*", "norm*", "head*"],
    ]
}
CASES: dict[str, dict[str, Any]] = {
    "tp2": dict(mesh=dt.Mesh(tp=2), pins=MEGATRON),
    "dp2": dict(mesh=dt.Mesh(dp=2)),
    "pp2_1f1b": dict(mesh=dt.Mesh(pp=2), stages=HALVES, schedule=dt.OneFOneB(4)),
    "zero3": dict(mesh=dt.Mesh(dp=2), zero={"dp": 3}),
}


def run_of(case: str, recompute: list[str] | None) -> Run:
    given = {"pins": {}, "stages": None, "zero": None, "schedule": dt.GPipe(1), **CASES[case]}
    torch.manual_seed(0)
    module = GPT(vocab=64, width=32, positions=32, layers=12, tied=False)
    mesh = given["mesh"]
    model = dt.parallelize(module, mesh, given["pins"], stages=given["stages"], zero=given["zero"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = dt.train_step(
        model,
        loss_fn,
        optimizer,
        inputs=dict(dp=dt.Row()) if "dp" in mesh.axes else None,
        schedule=given["schedule"],
        recompute=recompute,
    )
    return Run(mesh=mesh, module=module, model=model, optimizer=optimizer, step=step)


def sent(plan: Plan, zero3: bool) -> list[tuple[object, ...]]:
    """The collectives in order. Of ZeRO-3's gathers not the bytes: a block that runs again reads
    its biases too, which go with its other parameters."""
    return [
        (c.kind, c.axis, c.phase, c.stage, c.times, c.source, None if zero3 else c.bytes_sent)
        for c in plan.collectives
    ]


def gradients(run: Run, one: Any) -> dict[str, torch.Tensor]:
    with dt.launch(run.mesh):
        return run.step.gradients(*one)


@pytest.mark.slow
@pytest.mark.sample("tp2", "dp2")
@pytest.mark.parametrize("case", CASES)
def test_memory_saved_is_predicted_and_gradients_are_the_same(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = batch(size=16, length=32, vocab=64)
    kept, again = run_of(case, None), run_of(case, ["blocks.*"])
    plans = kept.step.plan(*one), again.step.plan(*one)
    plans[1].verify()
    assert plans[1].plain == plans[0]
    assert sent(plans[1], case == "zero3") == sent(plans[0], case == "zero3")
    assert_same_bits(gradients(again, one), gradients(kept, one))
    peaks = [measure(run, one, monkeypatch)[0].peak for run in (kept, again)]
    for rank, (before, after) in enumerate(zip(*peaks, strict=True)):
        stage = again.mesh.coordinates(rank).get("pp", 0)
        memory = [plan.memory[stage] for plan in plans]
        saved = memory[0].activations - memory[1].activations
        assert saved > 0.6 * memory[0].activations
        assert before - after == pytest.approx(saved, rel=0.1), rank
        assert memory[1].total == pytest.approx(after, rel=0.15), rank
