"""The prediction is what the whole program takes on the virtual clock, and the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.commands.json_data import row_data
from dtensor.explorer.contents import contents
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.simulate.simulator import simulate
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import seconds_text
from tests.api.test_schedules import data, model_of, step_of
from tests.api.test_schedules import loss_fn as mse
from tests.models import GPT, batch, loss_fn

TOPOLOGIES = {
    "both": dt.Topology(),
    "compute": dt.Topology(latency=0.0, bandwidth=1e30, flops=1e9, memory_bandwidth=1e9),
    "latency": dt.Topology(latency=1e-3, flops=1e15, memory_bandwidth=1e15),
    "bytes": dt.Topology(latency=0.0, bandwidth=1e6, flops=1e12, memory_bandwidth=1e12),
    "ops": dt.Topology(latency=1e-5, bandwidth=1e9, flops=1e10, op_latency=1e-6, step_latency=1e-4),
}
PLACEMENTS: dict[str, Any] = {
    "*.up.*": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}


def check(plan: Plan) -> None:
    """With what is priced at any proportion of work and messages."""
    assert isinstance(plan.timetable, GridTimetable)
    grid = plan.timetable.grid
    for name, topology in TOPOLOGIES.items():
        cost, trace = replace(plan, topology=topology).cost, simulate(plan, grid, topology)
        assert cost.seconds == pytest.approx(trace.seconds, rel=1e-9), name
        assert (cost.bubble > 0) == (plan.num_stages > 1), name
        slowest = max(trace.spent(rank, "compute") for rank in trace.ranks)
        assert cost.compute_seconds <= slowest + 1e-9 * trace.seconds, name


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 6])
@pytest.mark.parametrize(
    ("schedule", "v", "p"),
    [
        (dt.GPipe, 1, 2),
        (dt.LoopedBFS, 2, 2),
        (dt.OneFOneB, 1, 3),
        (dt.Interleaved1F1B, 2, 2),
        (dt.ZBH1, 1, 3),
        (dt.ZBH2, 1, 2),
        (dt.ZBV, 2, 2),
        (dt.DualPipeV, 2, 2),
        (lambda m: dt.Searched(microbatches=m, most_held=3), 2, 2),
    ],
)
def test_schedules(
    schedule: Callable[[int], dt.Schedule], v: int, p: int, microbatches: int
) -> None:
    try:
        step = step_of(
            v * p,
            dt.Mesh(pp=p, dp=2),
            schedule(microbatches),
            inputs=dict(dp=dt.Row()),
            clip_grad_norm=1.0 if microbatches > 1 else None,
        )
    except dt.PlanningError:
        return  # not in its domain
    check(step.plan(*data()))


def gpt_step(mesh: dt.Mesh, microbatches: int = 1, **stated: Any) -> dt.TrainStep:
    options = {k: stated.pop(k) for k in ("clip_grad_norm", "recompute") if k in stated}
    module = GPT(layers=2, **stated.pop("model", {}))
    if "pp" in mesh.axes:
        stages = [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]
        stated["stages"] = {"pp": stages}
    placements = PLACEMENTS if "tp" in mesh.axes else {}
    model = dt.parallelize(module, mesh, placements, **stated)
    return dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters()),
        inputs=dict(dp=dt.Row()) if "dp" in mesh.axes else None,
        schedule=dt.OneFOneB(microbatches),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "stated",
    [
        dict(mesh=dt.Mesh()),
        dict(mesh=dt.Mesh(tp=2), microbatches=4),
        dict(mesh=dt.Mesh(tp=3), clip_grad_norm=1.0),  # uneven
        dict(mesh=dt.Mesh(dp=2, tp=2), clip_grad_norm=1.0),
        dict(mesh=dt.Mesh(dp=4), zero={"dp": 1}),
        dict(mesh=dt.Mesh(dp=4), zero={"dp": 2}, microbatches=2),
        dict(mesh=dt.Mesh(dp=2, tp=2), zero={"dp": 3}, recompute=["blocks.*"], microbatches=2),
        dict(mesh=dt.Mesh(pp=2, tp=2), microbatches=4, clip_grad_norm=1.0),  # tied
        dict(mesh=dt.Mesh(pp=2, dp=2), zero={"dp": 3}, microbatches=2),
        dict(mesh=dt.Mesh(pp=2, dp=2, tp=2), model=dict(tied=False)),
    ],
)
def test_programs(stated: dict[str, Any]) -> None:
    check(gpt_step(**stated).plan(*batch(size=8)))


def test_a_forward_through_stages() -> None:
    model = step_of(2, dt.Mesh(pp=2), dt.GPipe(1)).model
    plan = dt.compile(lambda model, x: model(x), model.mesh).plan(model, data()[0])
    assert plan.num_stages == 2
    check(plan)


@pytest.mark.slow
def test_one_number_everywhere() -> None:
    """With one microbatch and a backward in halves, too."""
    mesh, stages = dt.Mesh(pp=2), {"pp": [["layers.0.*"], ["layers.1.*"]]}
    for microbatches in (1, 4):
        step = step_of(2, mesh, dt.ZBH1(microbatches))
        plan, seconds = step.plan(*data()), dt.simulate(step, *data()).seconds
        words = f"{seconds_text(seconds)} a step"
        assert words in str(plan) and words in plan.text(full=True) and words in plan.summary()
        page = contents(plan)
        strategy = mesh, {}, dict(stages=stages, schedule=dt.ZBH1(microbatches))
        strategies, sgd = {"one": strategy}, torch.optim.SGD
        (row,) = dt.compare(model_of(2), mse, strategies, *data(), optimizer=sgd).rows
        everywhere = {
            "plan": plan.cost.seconds,
            "head": page["head"]["seconds"],
            "timeline": page["timeline"]["seconds"],
            "compare": row.seconds,
            "json": row_data(row)["seconds"],
        }
        for where, found in everywhere.items():
            assert found == pytest.approx(seconds, rel=1e-9), where
