"""An exception raised by a signal handler loses nothing: at random lines of code that changes
state, the operation is either undone or completed, and the next step is right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dtensor as dt
from dtensor import signals
from dtensor.api.store.session import launched
from dtensor.daft import DaftError
from dtensor.frontend.call_lock import CALL_LOCK

TP, DP = dt.Mesh(tp=2), dt.Mesh(dp=2)
WAIT_S = 600.0  # far beyond what anything here takes


class Late(Exception):
    """The exception that a SIGALRM handler raises, as at a job's time limit."""


def ends(number: int, frame: FrameType | None) -> None:
    raise Late if number == signal.SIGALRM else SystemExit(3)


HANDLERS = {
    signal.SIGINT: (signal.default_int_handler, KeyboardInterrupt),
    signal.SIGTERM: (ends, SystemExit),
    signal.SIGALRM: (ends, Late),
}


@contextmanager
def handled(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with handled({number: handler for number, (handler, _) in HANDLERS.items()}):
        yield


@dataclass
class AtLine:
    """Within the block, raise the signal at the n-th executed line of Python; without a number,
    only count lines."""

    at: int | None = None
    number: int = signal.SIGINT
    lines: int = 0
    came: list[str] = field(default_factory=list[str])

    def __enter__(self) -> AtLine:
        sys.settrace(lambda *_: self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _look(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.came.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                handler: Any = signal.getsignal(self.number)
                handler(self.number, frame)  # as the interpreter does, which gives it this frame
        return self._look


class Net(nn.Module):
    """A model with everything that a step may change: weights, optimizer state, buffers, random
    numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Training:
    def __init__(self) -> None:
        dt.manual_seed(0)
        torch.manual_seed(0)
        self.model = dt.parallelize(Net(), TP, {})
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self._step = dt.train_step(
            self.model, lambda m, x, y: cross_entropy(m(x), y), self.opt, clip_grad_norm=1.0
        )

    def step(self, number: int) -> dt.Loss:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 8, generator=generator)
        return self._step(x, torch.randint(0, 4, (8,), generator=generator))

    def state(self) -> list[torch.Tensor]:
        state = dt.gather_state_dict(self.model, self.opt)
        moments = [own[key] for own in state["optimizer"]["state"].values() for key in sorted(own)]
        return [*state["model"].values(), *moments]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b))


Does = Callable[[Training, Any], object]
DOES: dict[str, Does] = {
    "first step": lambda training, run: training.step(0),
    "step": lambda training, run: training.step(1),
    "gather": lambda training, run: training.state(),
    "switch": lambda training, run: run.switch(training.model, training.opt, DP, {}),
    "home": lambda training, run: run.close(),
    "launch": lambda training, run: dt.launch(TP).start(),
}


@pytest.fixture(scope="module")
def after() -> list[list[torch.Tensor]]:
    return states()


def states(**launch: Any) -> list[list[torch.Tensor]]:
    """Return the expected state after each number of steps."""
    training, found = Training(), list[list[torch.Tensor]]()
    with dt.launch(TP, **launch):
        for number in range(3):
            found.append(training.state())
            training.step(number)
        found.append(training.state())
    return found


def tried(what: str, line: AtLine, after: list[list[torch.Tensor]], **launch: Any) -> None:
    training = Training()
    run = None if what == "launch" else dt.launch(TP, **launch).start()
    if what != "first step":
        training.step(0)
    try:
        with line:
            DOES[what](training, run)
    except HANDLERS[signal.Signals(line.number)][1]:
        assert line.came
    else:
        assert not line.came, "nobody heard of the signal"
    try:
        state, alike = training.state(), same
        done = next((n for n, each in enumerate(after) if same(state, each)), None)
        assert done in {"first step": (0, 1), "step": (1, 2)}.get(what, (1,)), done
        training.step(done)
        if what == "switch":  # sums are in another order then
            alike = close
        assert alike(training.state(), after[done + 1])
    finally:
        for left in filter(None, (run, launched())):
            left.close()


@pytest.mark.slow
@pytest.mark.parametrize("draws", [10, 400])
@pytest.mark.parametrize("what", DOES)
@pytest.mark.sample(*(f"{what}-10" for what in DOES))
def test_signal_at_any_line_undoes_or_completes_operation(
    what: str, draws: int, after: list[list[torch.Tensor]]
) -> None:
    counted, drawn = AtLine(), random.Random(what)
    tried(what, counted, after)
    for number in range(draws):
        line = AtLine(drawn.randint(1, counted.lines), list(HANDLERS)[number % len(HANDLERS)])
        try:
            tried(what, line, after)
        except BaseException as error:
            error.add_note(f"a signal at {line.came}, {what}, line {line.at} of {counted.lines}")
            raise


def test_signal_before_launch_starts_gives_no_warning() -> None:
    """A signal arrives at each line between the call of `launch` and the block of `start` in which
    signals are delayed."""
    with dt.launch(TP):  # what is imported or read once is not counted
        pass
    places: list[str] = []
    running: Any = None
    while running is None:
        line = AtLine(len(places) + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(KeyboardInterrupt), line:
                dt.launch(TP).start()
            running = launched()  # the signal waited for the end of the block
        places += line.came
    running.close()
    made = next(n for n, place in enumerate(places) if "unstarted.py" in place)
    begun = next(n for n, place in enumerate(places) if "signals.py" in place and n > made)
    assert made < begun < len(places) - 1


def test_signal_handler_without_exception_changes_nothing(after: list[list[torch.Tensor]]) -> None:
    seen: list[int] = []
    training, counted = Training(), AtLine()
    with dt.launch(TP), handled({signal.SIGUSR1: lambda number, frame: seen.append(number)}):
        training.step(0)
        with counted:
            training.step(1)
        with AtLine(counted.lines // 2, signal.SIGUSR1):
            training.step(2)
        assert seen == [signal.SIGUSR1]
        assert same(training.state(), after[3])


def test_signal_handler_may_save_checkpoint_during_step(
    tmp_path: Path, after: list[list[torch.Tensor]]
) -> None:
    """The handler runs at a point where all calls work, and the step continues after it."""
    training, counted = Training(), AtLine()
    with dt.launch(TP):
        training.step(0)
        with counted:
            training.step(1)
    for tenth in range(1, 10):
        training, path = Training(), str(tmp_path / str(tenth))

        def saves(number: int, frame: object) -> None:
            dt.save(path, training.model, training.opt).get()  # noqa: B023
            raise SystemExit(3)

        with dt.launch(TP), handled({signal.SIGTERM: saves}):
            training.step(0)
            with pytest.raises(SystemExit), AtLine(counted.lines * tenth // 10, signal.SIGTERM):
                training.step(1)
            loaded = Training()
            dt.load(path, loaded.model, loaded.opt)
            assert same(loaded.state(), training.state())
            done = next(n for n in (1, 2) if same(loaded.state(), after[n]))
            loaded.step(done)
            assert same(loaded.state(), after[done + 1])


DOES_HERE: list[Callable[[], object]] = [int]
"""What the op below does besides: the last of these."""


@torch.library.custom_op("test_interrupts::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    DOES_HERE[-1]()
    return x.clone()


op.register_fake(torch.empty_like)
op.register_autograd(lambda ctx, grad: grad)
dt.rule("test_interrupts::op", "... -> ...", linear="x")


class WithOp:
    def __init__(self) -> None:
        self.model = dt.parallelize(nn.Linear(4, 4), TP, {})
        opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._step = dt.train_step(self.model, lambda m, x: op(m(x)).sum(), opt)

    def step(self, does: Callable[[], object] = int) -> dt.Loss:
        DOES_HERE.append(does)
        try:
            return self._step(torch.ones(2, 4))
        finally:
            DOES_HERE.pop()

    def state(self) -> list[torch.Tensor]:
        return list(dt.gather_state_dict(self.model)["model"].values())


def test_interrupt_within_instruction_undoes_step() -> None:
    with dt.launch(TP):
        training = WithOp()
        training.step()
        before = training.state()
        with pytest.raises(KeyboardInterrupt):
            training.step(lambda: signal.raise_signal(signal.SIGINT))
        assert same(training.state(), before) and training.model.steps.present() == 1
        assert float(training.step()) == float(before[0].sum() * 2 + before[1].sum() * 2)


def test_second_interrupt_ends_launch_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error says which state is lost."""
    monkeypatch.setattr(signals, "SAY_AFTER_S", 0.0)

    def hangs() -> None:
        signal.raise_signal(signal.SIGINT)
        while not signals.was_announced():
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)
        while True:
            time.sleep(0.001)

    with dt.launch(TP):
        training = WithOp()
        training.step()
        with pytest.raises(KeyboardInterrupt):
            training.step(hangs)
        assert "SIGINT is held back" in capfd.readouterr().err
        with pytest.raises(DaftError, match="interrupted") as caught:
            training.step()
        assert "the state on the ranks is lost" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="is lost"):
        float(training.model.module.weight.sum())
    with dt.launch(TP):
        assert float(WithOp().step()) != 0.0


def test_thread_waiting_for_another_threads_call_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has, go = threading.Event(), threading.Event()

    def holds() -> None:
        with CALL_LOCK:
            has.set()
            assert go.wait(WAIT_S)

    waits = threading.Event()

    def check_deadlock(lock: object) -> None:  # what a thread does that waits, every now and then
        if not waits.is_set():
            waits.set()
            signal.raise_signal(signal.SIGINT)

    training = Training()
    other = threading.Thread(target=holds)
    other.start()
    assert has.wait(WAIT_S)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(CALL_LOCK), "check_deadlock", check_deadlock)
            training.step(0)
        assert waits.is_set() and not go.is_set()
    finally:
        go.set()
        other.join()
    training.step(0)


GROUP = """
import os
import sys
import time
import warnings
import dtensor as dt
from tests.api.test_interrupts import TP, Training, same

STEPS = 30
said = 0


def say(number):
    global said
    said += 1
    print(number, flush=True)


def wait_for_answer():
    # By then the signal for what was said has come, if there is one: none is on its way.
    while os.stat(sys.argv[1]).st_size < said:
        time.sleep(0.001)


def main():
    training, caught = Training(), 0
    with dt.launch(TP, backend="ray"):
        training.step(0)
        over = False
        while not over:
            try:
                wait_for_answer()
                while (number := training.model.steps.present()) < STEPS:
                    say(number)
                    float(training.step(number))
                    wait_for_answer()
                over = True
            except KeyboardInterrupt:
                caught += 1
    state, training = training.state(), Training()
    with dt.launch(TP):
        for number in range(STEPS):
            training.step(number)
        print("same" if same(state, training.state()) else "other", caught > 0, flush=True)


main()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_ctrl_c_to_all_processes_of_launch_loses_nothing(tmp_path: Path) -> None:
    """The signal goes to the whole process group, as from a terminal; the processes of ranks and of
    Ray are in the group or ignore it. The child prints each step before it begins; a signal, if
    any, has arrived before the child prints the next step."""
    (answers := tmp_path / "answers").touch()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", GROUP, str(answers)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    said: list[str] = []
    assert child.stdout is not None
    try:
        for line in child.stdout:
            said.append(line.strip())
            if said[-1].isdigit():
                number = int(said[-1])
                if number % 3 == 0 and number < 25 and said.count(said[-1]) == 1:
                    os.killpg(child.pid, signal.SIGINT)
                with answers.open("a") as file:
                    file.write(".")
    finally:
        child.kill()
        child.stdout.close()
    assert child.wait() == 0, said
    assert said[-1] == "same True"
