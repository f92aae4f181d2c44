"""Where signals act: within a block at its safe places, else as without us."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest
import torch

from dtensor.signals import (
    Lock,
    act,
    as_set,
    defer_signals,
    held_back,
    keep,
    noted,
    wait,
    waits_may_act,
)

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


class Stop(BaseException):
    pass


class Handlers:
    """What came, in order; ``does``: what the handler does besides."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.does: Callable[[int], object] = int

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)
        self.does(number)

    def stops(self, number: int) -> None:
        raise Stop(number)


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    made = Handlers()
    before = [(n, signal.signal(n, made)) for n in (USR1, USR2)]
    yield made
    for number, handler in before:
        signal.signal(number, handler)
    assert not noted


def test_one_waits_for_the_end_of_the_outermost_block(handlers: Handlers) -> None:
    with defer_signals():
        with defer_signals():
            signal.raise_signal(USR1)
        assert handlers.came == []
    assert handlers.came == [USR1]
    assert signal.getsignal(USR1) is handlers


def test_each_is_handled_once_and_in_order(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with pytest.raises(Stop) as caught, defer_signals():
        for number in (USR2, USR1, USR2):
            signal.raise_signal(number)
    assert handlers.came == [USR2, USR1]
    assert str(caught.value.__context__) == str(USR2.value)


def test_it_acts_at_a_safe_place(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with defer_signals():
        signal.raise_signal(USR1)
        wait()  # nobody has said that it may
        assert handlers.came == []
        with pytest.raises(Stop):
            act()
        signal.raise_signal(USR2)
        with waits_may_act(), pytest.raises(Stop):
            wait()
    assert handlers.came == [USR1, USR2]


def in_del() -> object:
    class Dropped:
        def __del__(self) -> None:
            with defer_signals():
                signal.raise_signal(USR1)

    return Dropped()


def in_callback() -> object:
    dropped = Handlers()
    weakref.finalize(dropped, in_del)
    return dropped


@pytest.mark.parametrize("finalized", [in_del, in_callback])
def test_one_that_comes_in_a_finalizer_is_not_dropped(
    handlers: Handlers, finalized: Callable[[], object]
) -> None:
    """Python drops what is raised there."""
    handlers.does = handlers.stops
    with pytest.raises(Stop):
        finalized()
        assert handlers.came == []
        threading.Event().wait(60)


def test_held_back_nothing_acts(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    done: list[int] = []
    with pytest.raises(Stop), held_back(), waits_may_act():
        signal.raise_signal(USR1)
        act()
        wait()
        done.append(1)
    assert done


def test_what_is_kept_is_raised_at_the_end_as_itself(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with pytest.raises(Stop) as caught, defer_signals():
        signal.raise_signal(USR1)
        try:
            act()
        except Stop as error:
            keep(error)
        raise ValueError("of the run that it ended")
    assert caught.value.__context__ is None


def test_a_part_of_a_block_is_as_without_it(handlers: Handlers) -> None:
    """But what undoes that part is left alone."""
    handlers.does = handlers.stops
    ended: list[int] = []
    with pytest.raises(Stop), defer_signals():
        with pytest.raises(Stop), as_set():
            try:
                signal.raise_signal(USR1)
            finally:
                signal.raise_signal(USR2)
                with defer_signals():
                    pass
                ended.append(len(handlers.came))
        assert handlers.came == [USR1]
    assert ended == [1]
    assert handlers.came == [USR1, USR2]


def in_torch(statement: str, **names: object) -> None:
    """Runs it as if torch's Python had it."""
    file = str(Path(torch.__file__).with_name("made_up.py"))
    exec(compile(statement, file, "exec"), {"signal": signal, **names})


def test_in_torchs_python_they_wait_for_a_place_of_ours(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with pytest.raises(Stop), defer_signals(), as_set():
        in_torch(f"signal.raise_signal({USR1:d})")
        in_torch(f"with context: signal.raise_signal({USR1:d})", context=ExitStack())
        assert handlers.came == []
        act()
    assert handlers.came == [USR1]
    handlers.does = int
    with defer_signals(), as_set():
        in_torch(f"signal.raise_signal({USR1:d})")
        in_torch("calls()", calls=lambda: signal.raise_signal(USR1))  # as of the user's function
        assert handlers.came == [USR1, USR1]
        in_torch(f"signal.raise_signal({USR2:d})")
        assert handlers.came == [USR1, USR1]
    assert handlers.came == [USR1, USR1, USR2]
    in_torch(f"signal.raise_signal({USR1:d})")  # no block of ours
    assert handlers.came == [USR1, USR1, USR2, USR1]


def test_a_block_within_such_a_part_is_one(handlers: Handlers) -> None:
    with defer_signals(), as_set():
        with defer_signals():
            signal.raise_signal(USR1)
            assert handlers.came == []
        assert handlers.came == [USR1]
        signal.raise_signal(USR2)
        assert handlers.came == [USR1, USR2]


def test_what_is_kept_in_such_a_part_is_raised_though_a_handler_raised(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with defer_signals(), as_set(), pytest.raises(ValueError, match="kept"), defer_signals():
        signal.raise_signal(USR1)
        with pytest.raises(Stop):
            act()
        keep(ValueError("kept"))


def test_a_handler_that_calls_us_runs_again_at_the_end(handlers: Handlers) -> None:
    lock, had = Lock(), list[int]()

    def saves(number: int) -> None:
        try:
            with lock:
                had.append(number)
        finally:
            raise Stop

    handlers.does = saves
    with pytest.raises(Stop), lock:
        signal.raise_signal(USR1)
        act()
        assert had == []  # in the midst of what runs
    assert had == [USR1]
    assert handlers.came == [USR1, USR1]


def test_a_handler_that_is_set_within_stays(handlers: Handlers) -> None:
    other = Handlers()
    with defer_signals():
        signal.raise_signal(USR1)
        signal.signal(USR1, other)
    assert (handlers.came, other.came) == ([], [USR1])
    assert signal.getsignal(USR1) is other


def test_ours_that_is_left_standing_calls_the_programs(handlers: Handlers) -> None:
    with defer_signals():
        ours = signal.getsignal(USR1)
    signal.signal(USR1, ours)
    signal.raise_signal(USR1)
    assert handlers.came == [USR1]
    assert signal.getsignal(USR1) is handlers


def test_default_and_ignored_signals_stay(handlers: Handlers) -> None:
    signal.signal(USR1, signal.SIG_IGN)
    signal.signal(USR2, signal.SIG_DFL)
    with defer_signals():
        assert signal.getsignal(USR1) is signal.SIG_IGN
        assert signal.getsignal(USR2) is signal.SIG_DFL


def test_other_threads_have_no_part_in_it(handlers: Handlers) -> None:
    """Python calls handlers in the main thread, whatever another one is in the midst of."""
    inside, go = threading.Event(), threading.Event()

    def runs() -> None:
        with defer_signals(), held_back(), as_set():
            inside.set()
            go.wait()

    thread = threading.Thread(target=runs)
    thread.start()
    inside.wait()
    signal.raise_signal(USR1)
    assert handlers.came == [USR1]
    go.set()
    thread.join()


def test_a_lock_that_another_thread_has_is_waited_for_with_signals(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    has, go = threading.Event(), threading.Event()

    class Waited(Lock):
        def check_deadlock(self) -> None:
            signal.raise_signal(USR1)

    lock = Waited()

    def holds() -> None:
        with lock:
            has.set()
            go.wait()

    with ExitStack() as stack:
        thread = threading.Thread(target=holds)
        stack.callback(thread.join)
        stack.callback(go.set)
        thread.start()
        has.wait()
        with pytest.raises(Stop), lock:
            raise AssertionError("another has it")
    assert lock.acquire(blocking=False)
    lock.release()
