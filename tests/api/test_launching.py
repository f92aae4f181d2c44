"""The launch object: before its start, across notebook cells, after its end; only one launch runs
at a time."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor import daft
from dtensor.api.launch import launching
from dtensor.daft import TaskError

MESH = dt.Mesh(dp=2)
X = torch.arange(32.0).reshape(8, 4) / 32


class Trained:
    """A linear layer and its training on two ranks."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module = nn.Linear(4, 4)
        self.model = dt.parallelize(self.module, MESH, {})
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.step = dt.train_step(self.model, squares, self.optimizer, inputs=dict(dp=dt.Row()))

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight.detach().clone()


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def trained() -> Trained:
    return Trained()


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    gc.collect()
    dt.distribute(X, MESH)  # no launch waits, and none runs: that of a test is closed
    assert not launching.launches


# -- started and closed ----------------------------------------------------------------------------


def test_start_and_close_equal_with_block(trained: Trained) -> None:
    other = Trained()
    with dt.launch(MESH) as run:
        assert isinstance(run, launching.LaunchSession)
        expected = [float(other.step(X)) for _ in range(3)]
    run = dt.launch(MESH)
    assert repr(run) == "launch of mesh(dp=2): never started"
    assert run.start() is run
    assert repr(run).splitlines()[0] == "launch of mesh(dp=2): running"
    losses = [float(trained.step(X)) for _ in range(2)]
    run.start()  # a cell that is run again
    losses.append(float(trained.step(X)))
    assert run.ranks == (0, 1) and not run.recoveries and not run.closed
    run.close()
    assert run.closed and repr(run) == "launch of mesh(dp=2): ended"
    run.close()
    assert losses == expected
    assert torch.equal(trained.weight, other.weight)


def test_started_launch_can_be_entered_as_block(trained: Trained) -> None:
    with dt.launch(MESH).start() as run:
        trained.step(X)
        run.switch(trained.model, trained.optimizer, dt.Mesh(dp=1), {})
        run.start()
    assert run.closed
    run = dt.launch(MESH)
    run.start()
    with pytest.raises(KeyError), run:
        raise KeyError
    assert run.closed


def test_launch_can_be_closed_inside_its_block(trained: Trained) -> None:
    with dt.launch(MESH) as run:
        trained.step(X)
        run.close()
        assert not launching.launches
    with pytest.raises(KeyError), dt.launch(MESH) as run:
        run.close()
        raise KeyError


def test_close_raises_unread_failure_once_and_brings_weights_home(trained: Trained) -> None:
    before = trained.weight
    run = dt.launch(MESH).start()
    trained.step(X)
    daft.spawn(Raising).fail()
    with pytest.raises(TaskError, match="on purpose"):
        run.close()
    assert run.closed and not torch.equal(trained.weight, before)
    run.close()


class Raising:
    def fail(self) -> None:
        raise RuntimeError("on purpose")


# -- never started ---------------------------------------------------------------------------------


def distribute(_: Trained) -> object:
    return dt.distribute(X, MESH)


def compiled(trained: Trained) -> object:
    return dt.compile(trained.model, MESH)(X)


def steps(trained: Trained) -> object:
    return trained.step(X)


def calibrate(_: Trained) -> object:
    return dt.calibrate(MESH)


def trace(trained: Trained) -> object:
    return dt.trace(trained.step, X)


@pytest.mark.parametrize("call", [steps, compiled, distribute, calibrate, trace])
def test_call_before_start_of_launch_is_refused(
    trained: Trained, call: Callable[[Trained], object]
) -> None:
    before = trained.weight
    run = dt.launch(MESH)
    with pytest.raises(dt.PlanningError) as caught:
        call(trained)
    text = str(caught.value)
    assert text.startswith("a launch was made and never started")
    assert "  launch  test_launching.py:" in text and "run = dt.launch(MESH)\n" in text
    assert "  call    test_launching.py:" in text
    assert "run.start()" in text
    assert torch.equal(trained.weight, before)
    run.close()
    assert repr(run) == "launch of mesh(dp=2): given up"
    if call is not calibrate:  # which takes a second
        call(trained)


def test_planning_and_loading_state_work_before_launch_starts(trained: Trained) -> None:
    state = dt.gather_state_dict(trained.model, trained.optimizer)
    run = dt.launch(MESH)
    assert trained.step.plan(X).cost.seconds > 0
    dt.load_state_dict(trained.model, trained.optimizer, state)
    run.close()


def test_newer_launch_replaces_unstarted_launch(trained: Trained) -> None:
    """As when a notebook cell runs again while ``Out[1]`` still refers to the first launch."""
    first = dt.launch(MESH)
    second = dt.launch(MESH)
    with second:
        trained.step(X)
    trained.step(X)
    assert "never started" in repr(first)
    with first:  # it may be, still
        trained.step(X)


def test_closing_older_launch_does_not_start_newer_one(trained: Trained) -> None:
    first, second = dt.launch(MESH), dt.launch(MESH)
    first.close()
    with pytest.raises(dt.PlanningError, match="never started"):
        trained.step(X)
    second.close()
    trained.step(X)


def test_deleted_unstarted_launch_warns_and_is_ignored(trained: Trained) -> None:
    """The warning names the line that made the launch."""
    with pytest.warns(
        RuntimeWarning, match=r"(?s)nothing refers to it .*: dt.launch\(MESH\)\n"
    ) as c:
        dt.launch(MESH)
    assert [warning.filename for warning in c] == [__file__]
    trained.step(X)
    run = dt.launch(MESH)
    run = dt.launch(MESH)  # the one before is replaced
    run.close()
    del run


def test_function_that_returns_without_starting_its_launch_warns() -> None:
    def make() -> None:
        run = dt.launch(MESH)
        assert run.mesh == MESH

    with pytest.warns(RuntimeWarning, match=r"(?s)never started.*: run = dt.launch\(MESH\)\n"):
        make()


def test_error_before_start_of_launch_gives_no_warning() -> None:
    def make() -> None:
        run = dt.launch(MESH)
        raise ValueError(run.mesh)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(ValueError):
            make()
        gc.collect()


def test_second_launch_cannot_start_while_first_runs(trained: Trained) -> None:
    """Both launches are made first. Calls inside the first block run in the first launch; calls
    after it are refused, because the second is not started."""
    first, second = dt.launch(MESH), dt.launch(MESH)
    with first:
        trained.step(X)
        with pytest.raises(dt.PlanningError, match="a launch is running already"):
            second.start()
    with pytest.raises(dt.PlanningError, match="never started"):
        trained.step(X)
    with second:
        trained.step(X)


def test_unstarted_launch_has_no_ranks_or_recoveries(trained: Trained) -> None:
    run = dt.launch(MESH)
    reads: list[Callable[[], Any]] = [
        lambda: run.recoveries,
        lambda: run.ranks,
        lambda: run.switch(trained.model, trained.optimizer, MESH, {}),
    ]
    for read in reads:
        with pytest.raises(dt.PlanningError, match=r"(?s)never started, .*\nfix: run.start\(\)"):
            read()
    assert run.mesh == MESH and not hasattr(run, "_repr_html_")
    run.close()
    with pytest.raises(dt.PlanningError, match=r"(?s)given up, .*\nfix: run = dt.launch"):
        reads[0]()


# -- one at a time, and each once ------------------------------------------------------------------


def test_making_second_launch_while_one_runs_is_refused(trained: Trained) -> None:
    """It is refused when it is made, so ``run`` in a notebook still refers to the first launch."""
    run = dt.launch(MESH).start()
    with pytest.raises(dt.PlanningError) as caught:
        run = dt.launch(dt.Mesh(tp=2))
    _, running, another, fix = str(caught.value).splitlines()
    assert running.startswith("  running  test_launching.py:") and "(MESH).start()" in running
    assert another.startswith("  another  test_launching.py:") and "(tp=2)" in another
    assert fix.startswith("fix: run.close()")
    trained.step(X)
    run.close()


def test_launch_cannot_be_started_twice(trained: Trained) -> None:
    with dt.launch(MESH) as run:
        with pytest.raises(dt.PlanningError, match="is entered already"), run:
            pass
        trained.step(X)
    for again in (run.start, run.__enter__):
        with pytest.raises(dt.PlanningError, match=r"(?s)has ended, .*fix: run = dt.launch"):
            again()
    given_up = dt.launch(MESH)
    given_up.close()
    given_up.close()
    with pytest.raises(dt.PlanningError, match=r"(?s)was given up, .*fix: run = dt.launch"):
        given_up.start()


def test_failed_start_can_be_retried_but_failed_block_cannot(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a retry succeeds, steps are refused."""
    run = dt.launch(MESH)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "start_cluster", too_few)
        with pytest.raises(ValueError, match="too few"):
            run.start()
        with pytest.raises(dt.PlanningError, match="never started"):
            trained.step(X)
    run.start()
    trained.step(X)
    run.close()
    block, given_up = dt.launch(MESH), dt.launch(MESH)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "start_cluster", too_few)
        with pytest.raises(ValueError, match="too few"), block:
            pass
        with pytest.raises(ValueError, match="too few"):
            given_up.start()
    with warnings.catch_warnings(record=True) as told:
        del given_up  # its error has said all
        gc.collect()
    assert told == []
    trained.step(X)


def too_few(*_: object, **__: object) -> None:
    raise ValueError("too few GPUs")


# -- never closed ----------------------------------------------------------------------------------

NEVER_CLOSED = """
import atexit, sys, torch, dtensor as dt

mesh = dt.Mesh(dp=2)
module = torch.nn.Embedding(4, 2)
before = module.weight.detach().clone()
atexit.register(lambda: print("trained:", not torch.equal(before, module.weight)))
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = dt.parallelize(module, mesh, {})
step = dt.train_step(model, lambda m, x: m(x).sum(), optimizer, inputs=dict(dp=dt.Row()))
run = dt.launch(mesh, backend=sys.argv[1]).start()
step(torch.tensor([0, 1]))
step(torch.tensor([0, int(sys.argv[2])]))  # nobody reads it
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "index"),
    [("inprocess", 1), ("inprocess", 77), pytest.param("ray", 77, marks=pytest.mark.ray)],
)
def test_launch_never_closed_ends_with_process(backend: str, index: int) -> None:
    """Its values come home; a failure is printed and makes the exit status nonzero."""
    words = [sys.executable, "-c", NEVER_CLOSED, backend, str(index)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.stdout == "trained: True\n"
    failed = index > 3
    assert (ended.returncode != 0) == failed
    assert ("a launch that was never closed has failed" in ended.stderr) == failed
    assert ("IndexError" in ended.stderr) == failed
