"""`dt.calibrate` measures a cluster and returns a `Topology`; the simulator and the planner use its
numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.runtime.simulate import calibration
from dtensor.runtime.simulate.calibration import NUM_EMPTY
from tests.api.test_schedules import data, step_of

KNOWN = dt.Topology(
    latency={"pp": 1e-4},
    bandwidth={"pp": 1e9},
    flops=1e10,
    memory_bandwidth=1e10,
    op_latency=1e-5,
    launch_latency=0.0,
    step_latency=1e-3,
    attention_flops=5e9,
    update_bandwidth=2e9,
)


def check_figures(found: dt.Topology, axes: set[str]) -> None:
    assert isinstance(found.latency, dict) and isinstance(found.bandwidth, dict)
    assert set(found.latency) == set(found.bandwidth) == axes
    assert found.attention_flops is not None and found.update_bandwidth is not None
    numbers = [found.flops, found.memory_bandwidth, found.op_latency, found.step_latency]
    numbers += [found.attention_flops, found.update_bandwidth]
    numbers += [*found.latency.values(), *found.bandwidth.values()]
    assert all(0 < number < math.inf for number in numbers)


def test_calibrate_in_process_returns_topology_that_repr_round_trips() -> None:
    found = dt.calibrate(dt.Mesh(tp=2, dp=1))
    check_figures(found, {"tp"})
    pasted = eval(repr(found), {"Topology": dt.Topology})
    assert pasted == found and hash(pasted) == hash(found) and repr(pasted) == repr(found)
    with pytest.raises(dt.PlanningError, match="no latency for axis 'dp'"):
        found.latency_of("dp")  # one rank sends nothing: the axis was not measured


def test_calibrate_inside_launch_measures_running_cluster_and_leaves_it_usable() -> None:
    with dt.launch(dt.Mesh(tp=2)) as session:
        runs = session.cluster.runs
        found = dt.calibrate(dtype=torch.bfloat16)
        # one of computation, one of messages along the axis, and empty ones: it is soon done
        assert session.cluster.runs - runs == 2 + NUM_EMPTY
        check_figures(found, {"tp"})
        x = dt.distribute(torch.ones(4), dt.Mesh(tp=2), tp=dt.Row())  # and is as it was
        assert x.full_tensor().sum() == 4


@pytest.mark.ray
def test_calibrate_on_ray_gives_latencies_that_simulate_uses(ray_session: None) -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.OneFOneB(2))
    with dt.launch(dt.Mesh(pp=2), backend="ray"):
        found = dt.calibrate()
    check_figures(found, {"pp"})
    assert found.latency_of("pp") > 1e-5  # between processes
    predicted = dt.simulate(step, *data(), topology=found)
    assert found.step_latency < predicted.seconds < math.inf


def test_simulator_uses_calibrated_bandwidths_and_latencies() -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.OneFOneB(2))

    def seconds(topology: dt.Topology) -> dict[str, float]:
        trace = dt.simulate(step, *data(), topology=topology)
        spent = {track: trace.spent(0, track) for track in ("compute", "communication")}
        return {**spent, "step": trace.seconds}

    base = seconds(KNOWN)
    slow = dt.Topology(
        latency={"pp": 1e-3},
        bandwidth={"pp": 1e8},
        flops=1e9,
        memory_bandwidth=1e9,
        op_latency=1e-4,
        launch_latency=0.0,
        step_latency=1e-2,
        attention_flops=5e8,
        update_bandwidth=2e8,
    )
    for name, value in seconds(slow).items():
        assert value == pytest.approx(10 * base[name])
    called = seconds(replace(KNOWN, step_latency=0.0))
    assert base["step"] == pytest.approx(called["step"] + 1e-3)
    assert base["compute"] == pytest.approx(called["compute"])
    # each op costs its latency beside its work, and messages do not
    free = seconds(replace(KNOWN, op_latency=0.0))
    ops = (base["compute"] - free["compute"]) / 1e-5
    assert ops == pytest.approx(round(ops)) and ops > 20
    assert base["communication"] == pytest.approx(free["communication"])


def test_plan_cost_includes_op_latency() -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.OneFOneB(2))
    plan = step.plan(*data())
    free = replace(plan, topology=replace(KNOWN, op_latency=0.0)).cost
    paid = replace(plan, topology=KNOWN).cost
    assert paid.compute_seconds > free.compute_seconds + 20e-5
    assert paid.communication_seconds <= free.communication_seconds  # more of it is hidden
    assert paid.seconds > free.seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(mesh={"tp": 2}),
            r"takes a mesh, not dict(.|\n)*fix: dt.calibrate\(dt.Mesh\(tp=2\)\)",
        ),
        (dict(dtype=torch.int64), r"torch.int64(.|\n)*fix: dt.calibrate\(dtype=torch.bfloat16\)"),
        (dict(backend="mpi"), r"backend='mpi': it is \"inprocess\" or \"ray\""),
    ],
)
def test_calibrate_rejects_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(dt.PlanningError, match=message):
        dt.calibrate(**arguments)


def test_calibrate_inside_launch_rejects_other_backend_or_mesh() -> None:
    with dt.launch(dt.Mesh(tp=2)):
        with pytest.raises(dt.PlanningError, match=r"backend='ray'\) inside a launch"):
            dt.calibrate(backend="ray")
        with pytest.raises(dt.PlanningError, match="the running launch is on"):
            dt.calibrate(dt.Mesh(tp=4))


def test_attention_and_optimizer_updates_have_separate_rates() -> None:
    work: Any = dict(flops=1e10, bytes_moved=1e3)
    assert KNOWN.compute_seconds(**work) == pytest.approx(1 + 1e-5)
    assert KNOWN.compute_seconds(**work, attention=True) == pytest.approx(2 + 1e-5)
    assert KNOWN.update_seconds(bytes_moved=1e9) == pytest.approx(0.5 + 1e-5)
    unknown = replace(KNOWN, attention_flops=None, update_bandwidth=None)
    assert unknown.compute_seconds(**work, attention=True) == unknown.compute_seconds(**work)
    assert unknown.update_seconds(bytes_moved=1e9) == pytest.approx(0.1 + 1e-5)
    step = step_of(2, dt.Mesh(pp=2), dt.OneFOneB(2))

    def updates(topology: dt.Topology) -> float:
        spans = dt.simulate(step, *data(), topology=topology).spans
        return sum(s.end - s.begin for s in spans if s.name == "update")

    faster = replace(KNOWN, update_bandwidth=1e10)
    assert updates(faster) == updates(unknown) < updates(KNOWN)


def test_timed_gpu_call_waits_for_its_stream_but_not_for_whole_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    def whole_device(*_: object) -> None:
        raise AssertionError("it waits for messages that others must receive")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", whole_device)
    gpu = torch.device("cuda")
    body = calibration._body(("x",), "x = add(x, 1)", outputs=("x",))
    built = calibration._function("tiny", body, torch.float32, gpu).build()
    assert built(torch.ones(1))[0].item() == 2 and waited == [gpu]
