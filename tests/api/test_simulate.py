"""The simulator: closed forms of schedules, the plan's bytes, meshes that do not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

import dtensor as dt
from dtensor.runtime.schedule import bubble
from tests.api.test_schedules import Chain, data, loss_fn, step_of

# compute alone: messages cost nothing
COMPUTE = dt.Topology(latency=0.0, bandwidth=float("inf"), flops=1e9, memory_bandwidth=1e9)
# messages alone
MESSAGES = dt.Topology(latency=1e-3, bandwidth=1e6, flops=1e30, memory_bandwidth=1e30)


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
    ],
)
def test_a_schedules_bubble(schedule: Callable[[int], dt.Schedule], v: int, p: int) -> None:
    """That of the grid with the costs that the actions of these stages have."""
    step = step_of(v * p, dt.Mesh(pp=p), schedule(6))
    trace = dt.simulate(step, *data(), topology=COMPUTE)
    lasts: dict[tuple[str, int], dict[str, float]] = {}
    for span in trace.spans:
        label = span.name.split(":")[0]
        if span.track == "compute" and " stage " in label:
            action, _, stage = label.partition(" stage ")
            actions = lasts.setdefault((action[0], int(stage)), {})
            actions[action] = actions.get(action, 0.0) + span.end - span.begin

    def mean(kind: str, stage: int) -> float:
        each = lasts.get((kind, stage), {"": 0.0}).values()
        return sum(each) / len(each)

    stages = range(v * p)
    costs = dt.Costs(
        forward=tuple(mean("F", s) for s in stages),
        input=tuple(mean("I" if ("I", s) in lasts else "B", s) for s in stages),
        weight=tuple(mean("W", s) for s in stages),
    )
    inside = [s for s in trace.spans if s.track == "compute" and " stage " in s.name]
    lasting = max(s.end for s in inside) - min(s.begin for s in inside)
    busy = sum(s.end - s.begin for s in inside)
    found = 1 - busy / (lasting * p)
    # an action sends before it ends: gradients are added up after
    assert bubble(step.grid, costs) - 2e-3 < found <= bubble(step.grid, costs)


def test_the_last_batch_and_a_topology() -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.OneFOneB(2))
    expected = dt.simulate(step, *data(), topology=COMPUTE)
    assert dt.simulate(step, COMPUTE) == dt.simulate(step, *data(), COMPUTE) == expected
    assert dt.simulate(step) == dt.simulate(step, *data()) != expected


def test_messages_are_those_of_the_plan() -> None:
    mesh = dt.Mesh(pp=2, dp=2)
    step = step_of(2, mesh, dt.OneFOneB(2), inputs=dict(dp=dt.Row()), clip_grad_norm=1.0)
    plan = step.plan(*data())
    trace = dt.simulate(step, *data(), topology=MESSAGES)
    spent = sum(s.end - s.begin for s in trace.spans if s.track == "communication")
    expected = 0.0
    for c in plan.collectives:
        num = mesh.axis_size(c.axis)
        kind = "transfer" if c.kind in ("send", "transfer", "send_recv") else c.kind
        each = MESSAGES.collective_seconds(kind, c.axis, num=num, bytes_sent=c.bytes_sent)
        sides = 2 if kind == "transfer" else 1  # a transfer is drawn at both ends
        expected += each * c.times * sides
    assert spent == pytest.approx(expected, rel=0.02)


def test_a_mesh_of_4096_ranks() -> None:
    mesh = dt.Mesh(pp=16, dp=32, tp=8)
    module = Chain(16)
    model = dt.parallelize(
        module, mesh, {}, stages={"pp": [[f"layers.{n}.*"] for n in range(16)]}, zero={"dp": 1}
    )
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters()),
        schedule=dt.OneFOneB(16),
        inputs=dict(dp=dt.Row()),
    )
    x = torch.empty(16 * 32, 6, device="meta")
    trace = dt.simulate(step, x, x)
    assert (len(trace.ranks), trace.alike) == (16, 256)
    assert 0 < trace.bubble < 1
    # the first stage holds 16 microbatches, the last one
    assert trace.peak_bytes[0] > trace.peak_bytes[-2]


def test_a_trace_is_saved_printed_and_drawn(tmp_path: Path) -> None:
    trace = dt.simulate(step_of(2, dt.Mesh(pp=2), dt.ZBH1(2)), *data())
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == len(trace.spans)
    assert {e["pid"] for e in drawn} == {0, 1}
    assert any("test_schedules.py" in e["args"]["source"] for e in drawn)
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(trace.seconds * 1e6)
    text = str(trace).splitlines()
    assert text[0].startswith("trace loss_fn    ") and text[0].endswith("2 ranks")
    assert [line.split("  ")[0] for line in text[2:]] == ["rank 0", "rank 1"]
    drawing = trace._repr_svg_()
    assert drawing.count("<rect") >= 12 and "W1 stage 0" in drawing


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(dt.PlanningError, match="not function"):
        dt.simulate(loss_fn, torch.empty(2, 2))  # type: ignore[arg-type]


def check_measured(backend: Literal["inprocess", "ray"]) -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.ZBH1(2), clip_grad_norm=1.0)
    predicted = dt.simulate(step, *data())
    with dt.launch(dt.Mesh(pp=2), backend=backend):
        first = float(step(*data()))
        found = dt.trace(step, *data())
        third = float(step(*data()))
        dt.gather_state_dict(step.model, step.optimizer)
    again = step_of(2, dt.Mesh(pp=2), dt.ZBH1(2), clip_grad_norm=1.0)
    with dt.launch(dt.Mesh(pp=2)):
        losses = [float(again(*data())) for _ in range(3)]
        dt.gather_state_dict(again.model, again.optimizer)
    assert (first, third) == (losses[0], losses[2])  # a traced step is a step
    for track in ("compute", "communication"):
        named = [
            sorted((s.rank, s.name) for s in t.spans if s.track == track)
            for t in (predicted, found)
        ]
        assert set(named[0]) <= set(named[1])  # predicted: without those that take no time
    assert 0 < found.seconds < 60
    table = str(dt.compare_traces(predicted, found)).splitlines()
    assert table[0].split() == ["predicted", "measured", "ratio"]
    assert any("W stage 1" in line for line in table)
    assert any("send from stage 0 to 1" in line for line in table)
    assert table[-1].startswith("step")


def test_a_measured_trace_has_the_names_of_the_simulated_one() -> None:
    check_measured("inprocess")


@pytest.mark.ray
def test_a_measured_trace_on_ray(ray_session: None) -> None:
    check_measured("ray")
