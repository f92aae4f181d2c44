"""Spawned actors on Ray: the bits of in-process, no tensor at the controller, and every failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor import daft
from tests.daft.actor_classes import Model, Unborn, same
from tests.daft.test_compiled_tasks import run_everything
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
pytestmark = pytest.mark.ray

X = torch.arange(8.0).reshape(2, 4) / 10


@pytest.fixture(scope="module")
def two(ray_session: None) -> Iterator[tuple[daft.Session, Any, Any]]:
    with daft.launch("ray", deadline_s=120.0) as session:
        yield session, daft.spawn(Model, 1), daft.spawn(Model, 2, name="b")


def test_the_bits_of_inprocess_and_one_call_per_process(ray_session: None):
    assert same(run_everything(True, "ray"), run_everything(False))


def test_tensors_do_not_pass_the_controller(two: tuple[daft.Session, Any, Any]):
    session, a, b = two
    x = torch.ones(256, 64)  # 64 KiB there, 4 MiB from a to b, a few bytes back

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return b.total(a.grow(x, 64))[0], a.execute(y)

    for run in (fn, daft.compile(fn)):
        sent, received = session.bytes_sent, session.bytes_received
        total, small = run(x, X)
        assert total.get() == 64.0 * x.numel()
        assert session.bytes_sent - sent < 1.1 * x.nbytes + 10_000
        assert session.bytes_received - received < 1_000
        assert same(b.execute(small).get(), X @ Model(1).weight.detach() @ Model(2).weight.detach())


def test_the_controller_runs_ahead(two: tuple[daft.Session, Any, Any], tmp_path: Path):
    """b in step i waits until a has come to step i + 1: they would wait for ever in turns."""
    _, a, b = two
    for actor in (a, b):
        actor.meet_in(str(tmp_path)).get()
    step = daft.compile(lambda x, n: (b.add([a.execute(x), x]), b.await_mark(a.mark(n))))
    futures = [step(X + i, float(i)) for i in range(3)]
    assert futures[1][1].get() == 2.0
    with pytest.raises(TimeoutError, match="ask again"):
        futures[2][1].get(timeout=0.05)
    assert not futures[2][1].done()
    (tmp_path / "3").touch()
    assert futures[2][1].get() == 3.0
    assert all(f.done() for pair in futures for f in pair)
    b.keep(a.await_mark(9.0))  # a task that waits for its arguments keeps its place
    step(X, 0.0)
    kept = b.get_kept()
    b.keep(X)
    assert not kept.done()
    (tmp_path / "9").touch()
    assert kept.get() == 9.0
    wa, wb = Model(1).weight.detach(), Model(2).weight.detach()
    for i, (y, _) in enumerate(futures):
        assert same(y.get(), torch.stack([(X + i) @ wa, X + i]).sum(0) + wb[0])


def test_a_failure_is_a_value(two: tuple[daft.Session, Any, Any]):
    _, a, b = two
    fn = lambda x: (b.execute(a.fail(x)), b.execute(x))  # noqa: E731
    for run in (fn, daft.compile(fn)):
        failed, fine = run(X)
        with pytest.raises(daft.TaskError, match="actor 'Model-0', fail: ValueError") as caught:
            failed.get()
        assert "test_ray_tasks.py" in str(caught.value).split("traceback")[0]
        assert "actor_classes.py" in str(caught.value).split("traceback")[1]
        assert same(fine.get(), X @ Model(2).weight.detach())
    with pytest.raises(daft.TaskError, match="__init__: RuntimeError: no weights on this disk"):
        b.execute(daft.spawn(Unborn, host=a).execute(X)).get()


def test_actors_of_any_class_share_a_process_if_asked(two: tuple[daft.Session, Any, Any]):
    session, a, b = two

    class Local:  # a class that no actor can import
        def __init__(self, model: dict[str, Any]) -> None:
            self.weight = model["weight"]

        def process(self) -> int:
            return os.getpid()

        def execute(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    local = daft.spawn(Local, b.weights(), host=a)
    assert local.process().get() == a.process().get() != b.process().get()
    step = daft.compile(lambda x: local.execute(a.execute(local.execute(b.execute(x)))))
    wa, wb = Model(1).weight.detach(), Model(2).weight.detach()
    calls = session.calls
    assert same(step(X).get(), X @ wb @ wb @ wa @ wb)
    assert session.calls - calls == 2 + 2  # load and run; three actors on two processes
    message = r"asks for \{'GPU': 1000\}, and Ray has .*\n  at .*test_ray_tasks.py:\d+ in test_"
    with pytest.raises(ValueError, match=message):
        daft.spawn(Model, resources={"GPU": 1000})
