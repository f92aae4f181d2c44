"""`ranks_per_actor`: ranks share an actor only if it says so, and the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import DaftError
from dtensor.errors import PlanningError
from tests.api.test_recovery import CASES, batch, lose, same, training, undisturbed
from tests.api.test_several_meshes import PLAY, TRAIN, together
from tests.extras import missing


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_ranks_per_actor_rejects_invalid_values(number: Any) -> None:
    with pytest.raises(PlanningError, match=r"ranks_per_actor=.* of at least 1\.\nfix: ranks_per_"):
        dt.launch(dt.Mesh(dp=2), ranks_per_actor=number).__enter__()


def test_ranks_per_actor_changes_nothing_in_process() -> None:
    assert same(together(None, ranks_per_actor=2), together(None))


@pytest.mark.ray
@pytest.mark.slow
def test_fewer_gpus_than_ranks_are_refused_without_ranks_per_actor() -> None:
    ray = pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.bootstrap.start_ray import end_ray

    mesh = dt.Mesh(dp=2, tp=2)
    end_ray()  # that of earlier tests, and its token; Ray believes what it is told about GPUs
    own: dict[str, Any] = dict(address="local", include_dashboard=False, log_to_driver=False)
    ray.init(num_gpus=3, num_cpus=1, **own)
    try:
        words = r"4 ranks in 4 actors .* need 4 free GPUs.* Ray has 3.*\n.*with ranks_per_actor=4"
        with pytest.raises(ValueError, match=words):
            dt.launch(mesh, backend="ray", device="cuda").__enter__()
        with pytest.raises(PlanningError, match="a launch is running already"), dt.launch(mesh):
            dt.launch(mesh).__enter__()  # so the one before has left nothing
        if not torch.cuda.is_available():  # as far as one gets without
            with pytest.raises(DaftError, match=r"actor of ranks \(0, 1, 2, 3\) has no CUDA"):
                dt.launch(mesh, backend="ray", device="cuda", ranks_per_actor=4).__enter__()
    finally:
        end_ray()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, {TRAIN: (0, 1), PLAY: (2, 0)}], ids=["apart", "shared"])
def test_actors_with_ranks_of_two_meshes_give_same_results(ray_session: None, ranks: Any) -> None:
    assert same(together(ranks, backend="ray", ranks_per_actor=3), together(None))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:recovered")
def test_all_ranks_of_a_lost_actor_are_replaced(ray_session: None) -> None:
    model, optimizer, step = training(CASES["dp2 zero3"])
    losses = []
    play = dt.Mesh(tp=1, name="play")
    with dt.launch(model.mesh, play, backend="ray", spares=1, ranks_per_actor=2) as run:
        cluster: Any = run.launch.cluster
        assert cluster.hosts == ((0, 1), (2,))
        there: Any = dt.distribute(torch.ones(2), play)
        for number in range(5):
            losses.append(float(step(*batch(number))))
            there = there * 2
            if number in (1, 3):
                lose(run, number // 2)
        assert run.recoveries[0].ranks == (0, 1)
        state = dt.gather_state_dict(model, optimizer)
        assert there.full_tensor().tolist() == [32.0, 32.0]
    want = undisturbed("dp2 zero3", 5)
    assert losses == want.steps and same(state, want.state)
