"""Launches on Ray in which ranks are lost and replaced: the run is delayed, a warning is given, and
the results are bitwise equal."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import ActorLost
from dtensor.daft.ray.cluster import RayCluster
from dtensor.errors import PlanningError
from tests.api.generation import placed
from tests.chaos.disturbance import drawn, steps_for
from tests.chaos.programs import CASES, SCENARIOS, batch, training
from tests.chaos.recover import disturbed, same, undisturbed
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))

FAULTS = {
    "tp2": ("SIGKILL", "exception", "SIGSTOP", "delay"),
    "pp2": ("line closed", "late exception", "memory closed", "SIGKILL"),
    "dp2 delay": ("SIGKILL", "exception", "late exception", "memory closed"),
    "dp2 zero3": ("delay", "memory closed", "line closed", "SIGSTOP"),
}

PROMPTS = [[5, 3, 9], [7], [11, 12, 13, 14, 15]]


def lose(session: Any, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
    cluster = session.launch.cluster
    assert isinstance(cluster, RayCluster)
    os.kill(cluster.membership.host(rank).counter.pid, how)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", FAULTS)
def test_training_with_lost_ranks_is_bitwise_equal_to_undisturbed_run(name: str) -> None:
    """Four faults per run, at random instructions; all kinds of fault occur."""
    faults = [
        replace(fault, kind=kind)
        for fault, kind in zip(drawn(4, 7, SCENARIOS[name], twice=0.0), FAULTS[name], strict=True)
    ]
    steps = steps_for(4, SCENARIOS[name].steps_per_fault)
    result, outcomes = disturbed(name, faults, steps)
    assert same(result, undisturbed(name, steps))
    assert [each.fault for each in outcomes] == faults
    for each in outcomes:
        connected_anew = each.by == "new connections"
        assert connected_anew == (each.fault.kind == "memory closed")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_recovery_gives_one_warning_and_one_record() -> None:
    model, _, step = training(CASES["tp2"])
    with dt.launch(model.mesh, "ray", snapshot_every=1) as run:
        float(step(*batch(0)))
        lose(run, 1)
        with pytest.warns(
            RuntimeWarning, match="recovered in .* replaced by a new process"
        ) as told:
            float(step(*batch(1)))
        assert len(told) == len(run.recoveries) == 1
        assert run.recoveries[0].runs == 1 and run.recoveries[0].seconds > 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.filterwarnings("ignore:recovered")
@pytest.mark.parametrize("where", ["tp2", "pp2"])
def test_generation_with_lost_ranks_gives_same_texts(where: str) -> None:
    gen = dt.generator(placed("llama", where), slots=2, length=48, buckets=(8,), ahead=1)
    how: dict[str, Any] = dict(max_new_tokens=12, temperature=[0, 1.0, 0.7], seed=3)
    with dt.launch(gen.model.mesh):
        want = gen(PROMPTS, **how)
    with dt.launch(gen.model.mesh, "ray", snapshot_every=1, spares=1) as run:
        assert gen(PROMPTS, **how) == want
        events = 0
        for event in gen.stream(PROMPTS, **how):
            events += 1
            assert (
                event.token
                == want[event.request].tokens[event.position - len(PROMPTS[event.request])]
            )
            if events in (3, 17):
                lose(run, events % 2)
        assert events == 36 and len(run.recoveries) == 2
        assert gen(PROMPTS, **how) == want


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.filterwarnings("ignore:recovered")
def test_lost_rank_of_one_mesh_is_replaced_and_other_mesh_keeps_values() -> None:
    """The record names the rank by its number in the launch and in its mesh."""
    play = dt.Mesh(tp=2, name="play")
    x = torch.arange(8.0).reshape(4, 2)
    model, optimizer, step = training(CASES["dp2 zero3"])
    losses = []
    with dt.launch(model.mesh, play, backend="ray", snapshot_every=1) as run:
        there: Any = dt.distribute(x, play, tp=dt.Row())
        for number in range(6):
            losses.append(float(step(*batch(number))))
            there = there * 2
            if number in (1, 3):
                lose(run, number)
        state = dt.gather_state_dict(model, optimizer)
        assert torch.equal(there.full_tensor(), x * 64)
        assert "rank 1 of mesh(tp=2" in str(run.recoveries[1])
    want = undisturbed("dp2 zero3", 6)
    assert losses == want.steps and same(state, want.state)


class Cached(torch.nn.Module):
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        self.kept.index_copy_(0, row, x)
        return self.kept.sum(1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.filterwarnings("ignore:recovered")
def test_state_missing_from_snapshots_raises_when_rank_is_lost() -> None:
    model = dt.parallelize(Cached(), dt.Mesh(tp=2), {"kept": dict(tp=dt.Row())})
    write: Any = dt.compile(lambda m, x, row: m(x, row), model.mesh)
    with dt.launch(model.mesh, "ray", snapshot_every=1, bring_home=False) as run:
        first = write(model, torch.ones(1, 3), torch.tensor([3])).full_tensor()
        assert first.tolist() == [0.0, 0.0, 0.0, 3.0]
        lose(run, 1)
        with pytest.raises(ActorLost, match="in no snapshot"):
            for _ in range(2):
                write(model, torch.ones(1, 3), torch.tensor([0])).full_tensor()
    dt.load_state_dict(model, None, {"model": {"kept": torch.ones(4, 3)}})
    with dt.launch(model.mesh):
        again = write(model, torch.zeros(1, 3), torch.tensor([0])).full_tensor()
        assert again.tolist() == [0.0, 3.0, 3.0, 3.0]


def test_recovery_and_order_options_of_launch_are_checked() -> None:
    mesh = dt.Mesh(tp=2)
    for options, text in [
        (dict(spares=-1), "spares=-1"),
        (dict(snapshot_every=0), "snapshot_every=0"),
        (dict(snapshot_every=True), "snapshot_every=True"),
        (dict(max_restarts=1.5), "max_restarts=1.5"),
        (dict(backend="ray", spares=1, mode="interpreted"), "compiled mode"),
        (dict(backend="ray", spares=1, device="cuda"), "on CPUs alone"),
        (dict(deterministic=True), 'the option is for "cuda". On CPUs,'),
        (dict(backend="ray", device="cuda", deterministic=1), "True or False"),
    ]:
        with pytest.raises(PlanningError, match=text), dt.launch(mesh, **options):  # type: ignore[arg-type]
            pass
    with dt.launch(mesh, spares=1, snapshot_every=2) as run:
        assert run.recoveries == ()
