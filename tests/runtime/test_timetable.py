"""Tests that the predicted time equals the time of the whole program on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import dtensor as dt
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.simulate.simulator import simulate
from dtensor.sharding.plan.plan import Plan
from tests.api.test_schedules import data, step_of
from tests.models import GPT, batch
from tests.plans import MLP_PINS
from tests.training import TWO_STAGES, Placed, Run

TOPOLOGIES = {
    "both": dt.Topology(),
    "compute": dt.Topology(
        latency=0.0, bandwidth=1e30, flops=1e9, memory_bandwidth=1e9, launch_latency=0.0
    ),
    "latency": dt.Topology(latency=1e-3, flops=1e15, memory_bandwidth=1e15, launch_latency=0.0),
    "bytes": dt.Topology(
        latency=0.0, bandwidth=1e6, flops=1e12, memory_bandwidth=1e12, launch_latency=0.0
    ),
    "ops": dt.Topology(
        latency=1e-5, bandwidth=1e9, flops=1e10, op_latency=1e-6, launch_latency=0.0
    ),
    "launches": dt.Topology(
        latency=1e-5, bandwidth=1e9, flops=1e10, memory_bandwidth=1e10, launch_latency=1e-6
    ),
}
"""At "both" the host takes longer than the device, at "launches" about as long."""


def check(plan: Plan) -> None:
    """Check the prediction for several ratios of computation and message prices."""
    assert isinstance(plan.timetable, GridTimetable)
    grid = plan.timetable.grid
    for name, topology in TOPOLOGIES.items():
        cost, trace = replace(plan, topology=topology).cost, simulate(plan, grid, topology)
        assert cost.seconds == pytest.approx(trace.seconds, rel=1e-9), name
        assert (cost.bubble > 0) == (plan.num_stages > 1), name
        slowest = max(trace.spent(rank, "compute") for rank in trace.ranks)
        assert cost.compute_seconds <= slowest + 1e-9 * trace.seconds, name


@pytest.mark.default("GPipe-1-2-1")
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
def test_predicted_time_of_schedules_equals_virtual_clock(
    schedule: Callable[[int], dt.Schedule], v: int, p: int, microbatches: int
) -> None:
    clip = 1.0 if microbatches > 1 else None
    rows = dict(inputs=dict(dp=dt.Row()), clip_grad_norm=clip)
    try:
        step = step_of(v * p, dt.Mesh(pp=p, dp=2), schedule(microbatches), **rows)
    except dt.PlanningError:
        return  # outside the schedule's domain
    check(step.plan(*data()))


def run_of(microbatches: int = 1, axes: dict[str, int] | None = None, **stated: Any) -> Run:
    axes = axes or {}
    placed = Placed(
        axes=axes,
        pins=MLP_PINS if "tp" in axes else {},
        inputs=dict(dp=dt.Row()) if "dp" in axes else None,
        stages=TWO_STAGES if "pp" in axes else None,
    )
    return Run.of(placed, schedule=dt.OneFOneB(microbatches), **{"clip": None, **stated})


@pytest.mark.default("stated0")
@pytest.mark.parametrize(
    "stated",
    [
        dict(),
        dict(axes=dict(tp=2), microbatches=4),
        dict(axes=dict(tp=3), clip=1.0),  # uneven
        dict(axes=dict(dp=2, tp=2), clip=1.0),
        dict(axes=dict(dp=4), zero={"dp": 1}),
        dict(axes=dict(dp=4), zero={"dp": 1}, delay=1),
        dict(axes=dict(pp=2, dp=2, tp=2), microbatches=2, clip=1.0, delay=1),  # tied
        dict(axes=dict(dp=4), zero={"dp": 2}, microbatches=2),
        dict(axes=dict(dp=2, tp=2), zero={"dp": 3}, recompute=["blocks.*"], microbatches=2),
        dict(axes=dict(pp=2, tp=2), microbatches=4, clip=1.0),  # tied
        dict(axes=dict(pp=2, dp=2), zero={"dp": 3}, microbatches=2),
        dict(axes=dict(pp=2, dp=2), module=GPT(tied=False)),
    ],
)
def test_predicted_time_of_programs_equals_virtual_clock(stated: dict[str, Any]) -> None:
    check(run_of(**stated).step.plan(*batch(size=8)))


def test_predicted_time_of_staged_forward_equals_virtual_clock() -> None:
    model = step_of(2, dt.Mesh(pp=2), dt.GPipe(1)).model
    plan = dt.compile(lambda model, x: model(x), model.mesh).plan(model, data()[0])
    assert plan.num_stages == 2
    check(plan)
