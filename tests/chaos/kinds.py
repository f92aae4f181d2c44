"""Ways in which a launch can end: kinds of cycles from launch to close, each with the error that it
must raise.

    place = Place("ray", scratch)
    kept = KINDS["killed rank"](place)      # launches, kills, reads the error, closes

A cycle returns what a user would still refer to after it: futures, tensors, models. No cycle waits
for a fixed time: a process is killed after it has reported that it is in the middle of a step.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from dtensor.daft import Call, Collective, Program, Wait
from dtensor.daft.cluster.cluster import Backend
from dtensor.daft.ir.instructions import Buffer
from dtensor.errors import PlanningError
from tests.chaos.actors import Layer, Pressed, go_on, interrupt, stay, wait_for_file
from tests.daft.programs import ctrl_c_interrupts, function, program

MESH = dt.Mesh(tp=2)


@dataclass(frozen=True, slots=True)
class Place:
    """A backend and a folder; actors report their progress in files of `scratch`."""

    backend: Backend
    scratch: Path


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.embed(ids)).relu())


def squares(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()


# -- that end well ---------------------------------------------------------------------------------


def trains(place: Place) -> object:
    model, step = _training()
    with dt.launch(MESH, place.backend):
        losses = [float(step(IDS)) for _ in range(3)]
        state = dt.gather_state_dict(model)
    assert losses[2] < losses[0]
    return model, step, state


def computes(place: Place) -> object:
    fn = dt.compile(lambda x, w: (x @ w).relu(), MESH)
    x, w = torch.randn(4, 6), torch.randn(6, 8)
    with dt.launch(MESH, place.backend):
        split = dt.distribute(w, MESH, tp=dt.Row())
        y = fn(dt.distribute(x, MESH, tp=dt.Column()), split)
        torch.testing.assert_close(y.full_tensor(), (x @ w).relu())
        z = (y * 2).redistribute(tp=dt.Row())
    return fn, split, y, z


def spawns(place: Place) -> object:
    with daft.launch(place.backend):
        a, b = daft.spawn(Layer), daft.spawn(Layer, 3.0)
        step = daft.compile(lambda x: b.times(a.times(x)))
        x = torch.ones(2, 3)
        assert torch.equal(step(x).get(), 6 * x) and torch.equal(a.times(x).get(), 2 * x)
    return a, b, step


# -- that fail -------------------------------------------------------------------------------------


def subgraph_raises(place: Place) -> object:
    model, step = _training()
    with dt.launch(MESH, place.backend):
        float(step(IDS))
        failing = step(IDS + 100)
        with pytest.raises(daft.TaskError, match="index out of range"):
            float(failing)
        with pytest.raises(daft.TaskError, match="index out of range"):
            float(failing)
        float(step(IDS))
        dt.gather_state_dict(model)
    return step, failing


def method_raises(place: Place) -> object:
    """An unread failure of a method is raised at the end of the launch."""
    with pytest.raises(daft.TaskError, match="on purpose"), daft.launch(place.backend):
        a, b = daft.spawn(Layer), daft.spawn(Layer)
        future = daft.compile(lambda x: b.times(a.fail(x)))(torch.ones(2))
    return future


def block_raises(place: Place) -> object:
    _, step = _training()
    with pytest.raises(Pressed), dt.launch(MESH, place.backend):
        futures = [step(IDS) for _ in range(2)]
        raise Pressed
    with pytest.raises(Pressed), daft.launch(place.backend):
        futures.append(daft.spawn(Layer).times(torch.ones(2)))
        raise Pressed
    return futures


def launch_fails(place: Place) -> object:
    with dt.launch(MESH), pytest.raises(PlanningError, match="a launch is running already"):
        dt.launch(MESH, place.backend).__enter__()
    with daft.launch(place.backend):
        unborn = daft.spawn(Layer, -1.0)
        with pytest.raises(daft.TaskError, match="no such scale"):
            unborn.times(torch.ones(2)).get()
        if place.backend == "ray":
            with pytest.raises(ValueError, match=r"asks for \{'GPU': 1000\}"):
                daft.spawn(Layer, resources={"GPU": 1000})
    if place.backend == "ray":
        with pytest.raises(ValueError, match="need 1000 free GPUs"):
            daft.launch_cluster(1000, backend="ray", device="cuda", ranks_per_actor=1)
    return unborn


def futures_unread(place: Place) -> object:
    model, step = _training()
    with dt.launch(MESH, place.backend) as session:
        found: list[Any] = [step(IDS), step(IDS)]
        handle = session.cluster.load(_program(go_on))
        found += [session.cluster.run(handle, _feed(Path())) for _ in range(2)]
        dt.gather_state_dict(model)
    with daft.launch(place.backend):
        found.append(daft.spawn(Layer).times(torch.ones(2)))
    return found


def interrupted(place: Place) -> object:
    """Ctrl-C: in-process in the middle of a step, on Ray at any moment of the launch."""
    if place.backend == "inprocess":
        with dt.launch(MESH) as session:
            handle = session.cluster.load(_program(interrupt))
            for _ in range(2):  # the launch goes on
                with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
                    session.cluster.run(handle, _feed(Path()))
        return handle
    with _pressed(next(_moments)), pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with dt.launch(MESH, "ray"):
            while True:
                time.sleep(0.01)
    return None


# -- that lose a process ---------------------------------------------------------------------------


def killed_rank(place: Place) -> object:
    return _lose_rank(place, signal.SIGKILL, "died")


def stopped_rank(place: Place) -> object:
    return _lose_rank(place, signal.SIGSTOP, "has stopped")


def killed_actor(place: Place) -> object:
    return _lose_actor(place, signal.SIGKILL, "died")


def stopped_actor(place: Place) -> object:
    return _lose_actor(place, signal.SIGSTOP, "has stopped")


def _lose_rank(place: Place, how: signal.Signals, what: str) -> object:
    begun = _new_file(place)
    with dt.launch(MESH, place.backend) as session:
        cluster = session.cluster
        handle = cluster.load(_program(stay))
        future = cluster.run(handle, _feed(begun))
        os.kill(_begun(begun), how)
        with _deadline(cluster.watch, how), pytest.raises(daft.ActorLost, match=what) as caught:  # type: ignore[attr-defined]
            future.get()
        assert caught.value.failure.rank == 1
        with pytest.raises(daft.ActorLost) as again:
            cluster.load(_program(go_on))
        assert again.value is caught.value
    return future


def _lose_actor(place: Place, how: signal.Signals, what: str) -> object:
    begun = _new_file(place)
    with daft.launch(place.backend) as session:
        a, b = daft.spawn(Layer, name="a"), daft.spawn(Layer, name="b")
        x = torch.ones(2)
        future = b.times(a.block(str(begun)))
        os.kill(_begun(begun), how)
        words = f"actor 'a', block: the process {what}"
        with _deadline(session.watch, how), pytest.raises(daft.ActorLost, match=words):  # type: ignore[attr-defined]
            future.get()
        assert torch.equal(b.times(x).get(), 2 * x)
    return future


KINDS: dict[str, Callable[[Place], object]] = {
    "clean training": trains,
    "clean compiled and eager": computes,
    "spawned actors": spawns,
    "exception in a subgraph": subgraph_raises,
    "exception in a method, unread": method_raises,
    "exception in the block": block_raises,
    "launch that fails": launch_fails,
    "futures never read": futures_unread,
    "interrupted": interrupted,
}
RAY_KINDS: dict[str, Callable[[Place], object]] = {
    "interrupted": interrupted,
    "rank killed in a step": killed_rank,
    "rank stopped in a step": stopped_rank,
    "actor killed in a task": killed_actor,
    "actor stopped in a task": stopped_actor,
    **KINDS,
}


# -- helpers ---------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2], [3, 4]])
_numbers = itertools.count()
_moments = itertools.cycle([0.3, 2.5, 1.2])  # seconds: before, while and after actors start


def _training() -> tuple[dt.ParallelModule, dt.TrainStep]:
    model = dt.parallelize(Tiny(), MESH, {"up.*": dict(tp=dt.Row())})
    step = dt.train_step(model, squares, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, step


def _program(act: Callable[[str], None]) -> Program:
    """Return a program of two ranks: rank 1 runs ``act``, then both sum their inputs."""
    acts = function("act", "def forward(x, begun):\n    act(begun)\n    return (x + 1,)", act=act)
    goes = function("go", "def forward(x, begun):\n    return (x + 1,)")
    buffer = (Buffer((2,), torch.float32),)
    sums = Collective("all_reduce", (0, 1), ("y",), ("s",), buffer, buffer, "sum", "c")
    return program(
        *[[Call(name, ("x", "begun"), ("y",)), sums, Wait(("s",))] for name in ("go", "act")],
        functions=[goes, acts],
        inputs=[("x", "begun")] * 2,
        outputs=[("s", "y")] * 2,
    )


def _feed(begun: Path) -> list[dict[str, object]]:
    return [{"x": torch.ones(2), "begun": str(begun)}] * 2


def _new_file(place: Place) -> Path:
    return place.scratch / f"begun{next(_numbers)}"


def _begun(file: Path) -> int:
    """Wait until a process has begun, and return its id."""
    wait_for_file(str(file))
    return int(file.read_text())


@contextmanager
def _deadline(watch: Any, how: signal.Signals) -> Iterator[None]:
    """Set a short deadline for a process stopped by a signal, but not for others, whose heartbeats
    may be late. A death needs no deadline."""
    before = watch.deadline_s
    with pytest.MonkeyPatch.context() as patch:
        if how == signal.SIGSTOP:
            patch.setattr("dtensor.daft.ray.diagnosis.failure_detector.SILENT_S", math.inf)
            watch.deadline_s = 1.0
        try:
            yield
        finally:
            watch.deadline_s = before


@contextmanager
def _pressed(after_s: float) -> Iterator[None]:
    """Raise Ctrl-C after some seconds."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    with ctrl_c_interrupts():
        timer.start()
        try:
            yield
        finally:
            timer.join()
