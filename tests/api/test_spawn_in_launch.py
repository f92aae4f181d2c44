"""The user's actors inside a launch, and DTensors as their arguments."""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor import daft
from dtensor.api.store.session import launched
from dtensor.daft.tasks import actors
from tests.chaos.actors import wait_for_file

TRAIN, PLAY = dt.Mesh(dp=2), dt.Mesh(tp=2, name="play")
BACKENDS = ["inprocess", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


class Reward:
    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def score(self, tokens: Tensor) -> Tensor:
        assert type(tokens) is Tensor
        return (tokens.sum(1) - self.least).clone()

    def add_one(self, x: Tensor) -> Tensor:
        return x.add_(1)

    def are_one(self, pair: dict[str, Tensor]) -> bool:
        return pair["a"] is pair["b"]

    def fail(self) -> None:
        raise ValueError("no reward")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def slow(self, path: str) -> None:
        wait_for_file(path)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    assert actors.sessions == []


# -- where actors live -----------------------------------------------------------------------------


def test_actor_session_is_created_at_first_spawn() -> None:
    with dt.launch(TRAIN):
        (place,) = actors.sessions
        assert not isinstance(place, daft.Session)
        reward = daft.spawn(Reward)
        assert actors.sessions == [actors.info_of(reward).session]


def test_spawned_actor_belongs_to_innermost_launch() -> None:
    with daft.launch() as outer:
        with dt.launch(TRAIN):
            assert actors.info_of(daft.spawn(Reward)).session is not outer
        assert actors.info_of(daft.spawn(Reward)).session is outer
    with dt.launch(TRAIN), daft.launch() as inner:
        assert actors.info_of(daft.spawn(Reward)).session is inner


def test_actors_end_with_launch(backend: Any) -> None:
    with dt.launch(TRAIN, backend=backend):
        found = daft.spawn(Reward, 1.0).score(torch.ones(2, 3))
        assert found.get().tolist() == [2.0, 2.0]
    with pytest.raises(daft.ClusterClosed):
        found.get()


def test_unread_actor_failure_raises_at_end_of_launch(backend: Any) -> None:
    linear = torch.nn.Linear(2, 2)
    model = dt.parallelize(linear, TRAIN, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, lambda model, x: model(x).square().sum(), optimizer)
    before = linear.weight.detach().clone()
    with pytest.raises(daft.TaskError, match="no reward"), dt.launch(TRAIN, backend=backend):
        step(torch.ones(2, 2))
        daft.spawn(Reward).fail()
    assert not torch.equal(linear.weight, before)  # it came home


def test_users_exception_leaves_launch_without_waiting_for_actor() -> None:
    with pytest.raises(KeyError), dt.launch(TRAIN):
        daft.spawn(Reward).fail()
        raise KeyError("mine")


@pytest.mark.parametrize("inside", [False, True], ids=["at the end", "in the block"])
def test_ranks_end_even_if_stopping_actors_fails(
    monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    def broken(session: object) -> None:
        raise OSError("not stopped")

    monkeypatch.setattr("dtensor.daft.tasks.local_session.LocalSession.stop", broken)
    with pytest.raises(OSError, match="not stopped"), dt.launch(TRAIN) as session:
        daft.spawn(Reward)
        if inside:
            raise KeyError("mine")
    assert session.closed and launched() is None


def test_threads_spawn_actors_in_one_session() -> None:
    with dt.launch(TRAIN):
        made: list[Any] = []
        threads = [
            threading.Thread(target=lambda: made.append(daft.spawn(Reward))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(actors.info_of(one).session) for one in made}) == 1


# -- DTensors --------------------------------------------------------------------------------------


def test_dtensor_argument_arrives_at_actor_as_full_tensor(backend: Any) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    with dt.launch(TRAIN, PLAY, backend=backend), dt.implicit_redistribution("allow"):
        reward = daft.spawn(Reward)
        split = dt.distribute(x, PLAY, tp=dt.Row())
        for given in (
            split,
            dt.distribute(x, TRAIN),
            dt.distribute(x, PLAY, tp=dt.Column()),
            dt.distribute(x, TRAIN, dp=dt.Partial()),
            dt.compile(lambda t: t * 1, PLAY)(split),
            dt.distribute(x.t().contiguous(), PLAY, tp=dt.Row()).t(),
        ):
            assert torch.equal(reward.score(given).get(), x.sum(1))
        assert torch.equal(reward.add_one(split).get(), x + 1)
        assert torch.equal(split.full_tensor(), x)  # what the actor changed was a copy
        assert reward.are_one({"a": split, "b": split}).get()
        step = daft.compile(lambda t: reward.score(t))
        assert torch.equal(step(split).get(), x.sum(1))
        split.mul_(2)  # the next call sees it
        assert torch.equal(step(split).get(), 2 * x.sum(1))
        rewards = dt.distribute(reward.score(split).get(), TRAIN, dp=dt.Row())
        assert torch.equal(rewards.full_tensor(), 2 * x.sum(1))


def test_dtensor_argument_arrives_without_autograd_history() -> None:
    with dt.launch(TRAIN):
        reward = daft.spawn(Reward)
        x = dt.distribute(torch.ones(2, 3), TRAIN).requires_grad_()
        found = reward.score(x * 2).get()
        assert not found.requires_grad and found.tolist() == [6.0, 6.0]
        assert reward.score(torch.nn.Parameter(x.detach())).get().tolist() == [3.0, 3.0]


def test_controller_fetches_each_shard_of_argument_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    asked: list[Any] = []
    with dt.launch(mesh) as session, dt.implicit_redistribution("allow"):
        reward = daft.spawn(Reward)
        store = session.launch.store
        fetch = store.fetch

        def noted(values: Any) -> Any:
            asked.extend(one.at for one in values)
            return fetch(values)

        monkeypatch.setattr(store, "fetch", noted)
        reward.score(dt.distribute(torch.ones(4, 4), mesh)).get()
        reward.score(dt.distribute(torch.ones(4, 4), mesh, tp=dt.Row())).get()
    assert asked == [(0,), (0, 1)]


def test_split_dtensor_argument_warns_once_or_is_refused_by_policy() -> None:
    with dt.launch(TRAIN), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reward = daft.spawn(Reward)
        split = dt.distribute(torch.ones(4, 3), TRAIN, dp=dt.Row())
        for _ in range(2):
            reward.score(split)
        reward.score(dt.distribute(torch.ones(4, 3), TRAIN))
    (warning,) = caught
    assert str(warning.message).startswith(
        "implicit redistribution in an argument of an actor\n"
        "  f32[4@dp,3] -> f32[4,3]: 2 shards gathered by the controller, 48 B\n"
    )
    with dt.launch(TRAIN), dt.implicit_redistribution("error"):
        reward = daft.spawn(Reward)
        split = dt.distribute(torch.ones(4, 3), TRAIN, dp=dt.Row())
        for given in (split, split[1:].t()):
            with pytest.raises(dt.PlanningError, match="would redistribute implicitly"):
                reward.score(given)
        reward.score(split.redistribute(dp=dt.Replicate()))


def test_dtensor_of_ended_launch_is_refused_as_argument() -> None:
    with dt.launch(TRAIN):
        left = dt.distribute(torch.ones(2, 3), TRAIN)
    with dt.launch(TRAIN), pytest.raises(RuntimeError, match="has ended"):
        daft.spawn(Reward).score(left)


def test_failed_dtensor_argument_raises_its_failure() -> None:
    with dt.launch(TRAIN, PLAY):
        reward = daft.spawn(Reward)
        look_up = dt.compile(lambda table, i: table[i], PLAY)
        with pytest.raises(daft.TaskError, match="rank 2, rank 0 of mesh"):
            reward.score(look_up(torch.ones(3, 2), torch.tensor([7]))).get()
        assert reward.score(torch.ones(1, 2)).get().tolist() == [2.0]


def test_future_in_place_of_value_is_refused_with_get_fix() -> None:
    with dt.launch(TRAIN):
        future = daft.spawn(Reward).score(torch.ones(2, 3))
        several = daft.WorkerGroup(Reward, 2).score(torch.ones(2, 3))
        for given in (future, several):
            with pytest.raises(dt.PlanningError, match=r"fix: future\.get\(\)"):
                dt.distribute(given, TRAIN)  # type: ignore[arg-type]
            for args in (given, [given]):
                with pytest.raises(dt.PlanningError, match=r"not here yet[\s\S]*future\.get\(\)"):
                    dt.compile(lambda t: t, TRAIN)(args)
        with pytest.raises(TypeError, match=r"\.get\(\)"):
            dt.distribute(torch.ones(2), TRAIN) + future  # type: ignore[operator]


@pytest.mark.ray
@pytest.mark.slow
def test_slow_actor_does_not_stop_ranks(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a read of the actor's result waits for the actor."""
    monkeypatch.setattr(
        "dtensor.daft.ray.diagnosis.failure_detector.SILENT_S", math.inf
    )  # all are alive
    with dt.launch(TRAIN, PLAY, backend="ray"):
        reward = daft.spawn(Reward)
        double = dt.compile(lambda t: t * 2, PLAY)
        y = double(torch.ones(2, 3))
        reward.score(y).get()  # it has started
        waiting = reward.slow(str(tmp_path / "go"))
        scored = reward.score(y)  # behind it
        for _ in range(20):
            y = double(y)
        assert y.full_tensor()[0, 0] == 2.0**21
        watch = actors.info_of(reward).session.watch  # type: ignore[attr-defined]
        watch.deadline_s = 1.0
        with pytest.raises(TimeoutError):
            waiting.get(timeout=4.0)  # longer than deadline_s: a method may
        (tmp_path / "go").touch()
        assert scored.get().tolist() == [6.0, 6.0]


@pytest.mark.ray
@pytest.mark.slow
def test_lost_actor_does_not_affect_ranks_or_other_actors(ray_session: None) -> None:
    with dt.launch(TRAIN, PLAY, backend="ray"):
        lost, other = daft.spawn(Reward), daft.spawn(Reward)
        lost.die()
        x = dt.distribute(torch.ones(2, 3), PLAY)
        with pytest.raises(daft.ActorLost, match="Reward-0"):
            lost.score(x).get()
        assert other.score(x + 1).get().tolist() == [6.0, 6.0]
