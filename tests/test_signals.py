"""Inside a `defer_signals` block, signal handlers run only at safe places; outside one, Python's
behaviour is unchanged."""

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
    defer_signals,
    held_back,
    immediate_handlers,
    keep,
    noted,
    wait,
    waits_handle_signals,
)

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


class Stop(BaseException):
    pass


class Handlers:
    """Records received signals in order; ``does``: what the handler does in addition."""

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


def test_signal_waits_for_end_of_outermost_block(handlers: Handlers) -> None:
    with defer_signals():
        with defer_signals():
            signal.raise_signal(USR1)
        assert handlers.came == []
    assert handlers.came == [USR1]
    assert signal.getsignal(USR1) is handlers


def test_pending_signals_are_handled_once_each_in_order(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with pytest.raises(Stop) as caught, defer_signals():
        for number in (USR2, USR1, USR2):
            signal.raise_signal(number)
    assert handlers.came == [USR2, USR1]
    assert str(caught.value.__context__) == str(USR2.value)


def test_signal_is_handled_at_safe_place_within_block(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with defer_signals():
        signal.raise_signal(USR1)
        wait()  # nobody has said that it may
        assert handlers.came == []
        with pytest.raises(Stop):
            act()
        signal.raise_signal(USR2)
        with waits_handle_signals(), pytest.raises(Stop):
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
def test_signal_during_finalizer_is_not_lost(
    handlers: Handlers, finalized: Callable[[], object]
) -> None:
    """Python drops exceptions raised in a finalizer."""
    handlers.does = handlers.stops
    with pytest.raises(Stop):
        finalized()
        assert handlers.came == []
        threading.Event().wait(60)


def test_held_back_signals_are_handled_after_the_block(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    done: list[int] = []
    with pytest.raises(Stop), held_back(), waits_handle_signals():
        signal.raise_signal(USR1)
        act()
        wait()
        done.append(1)
    assert done


def test_kept_exception_is_raised_at_end_of_block_without_context(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with pytest.raises(Stop) as caught, defer_signals():
        signal.raise_signal(USR1)
        try:
            act()
        except Stop as error:
            keep(error)
        raise ValueError("of the run that it ended")
    assert caught.value.__context__ is None


def test_as_set_part_of_block_handles_signals_at_once(handlers: Handlers) -> None:
    """Code that undoes that part is not interrupted."""
    handlers.does = handlers.stops
    ended: list[int] = []
    with pytest.raises(Stop), defer_signals():
        with pytest.raises(Stop), immediate_handlers():
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
    """Run the statement as if it were in torch's Python code."""
    file = str(Path(torch.__file__).with_name("made_up.py"))
    exec(compile(statement, file, "exec"), {"signal": signal, **names})


def test_signal_in_python_code_of_torch_waits_for_dtensor_code(handlers: Handlers) -> None:
    handlers.does = handlers.stops
    with pytest.raises(Stop), defer_signals(), immediate_handlers():
        in_torch(f"signal.raise_signal({USR1:d})")
        in_torch(f"with context: signal.raise_signal({USR1:d})", context=ExitStack())
        assert handlers.came == []
        act()
    assert handlers.came == [USR1]
    handlers.does = int
    with defer_signals(), immediate_handlers():
        in_torch(f"signal.raise_signal({USR1:d})")
        in_torch("calls()", calls=lambda: signal.raise_signal(USR1))  # as of the user's function
        assert handlers.came == [USR1, USR1]
        in_torch(f"signal.raise_signal({USR2:d})")
        assert handlers.came == [USR1, USR1]
    assert handlers.came == [USR1, USR1, USR2]
    in_torch(f"signal.raise_signal({USR1:d})")  # no block of ours
    assert handlers.came == [USR1, USR1, USR2, USR1]


def test_defer_signals_block_within_as_set_part_defers_again(handlers: Handlers) -> None:
    with defer_signals(), immediate_handlers():
        with defer_signals():
            signal.raise_signal(USR1)
            assert handlers.came == []
        assert handlers.came == [USR1]
        signal.raise_signal(USR2)
        assert handlers.came == [USR1, USR2]


def test_kept_exception_in_as_set_part_is_raised_after_handler_exception(
    handlers: Handlers,
) -> None:
    handlers.does = handlers.stops
    with (
        defer_signals(),
        immediate_handlers(),
        pytest.raises(ValueError, match="kept"),
        defer_signals(),
    ):
        signal.raise_signal(USR1)
        with pytest.raises(Stop):
            act()
        keep(ValueError("kept"))


def test_handler_that_calls_dtensor_runs_again_at_end_of_block(handlers: Handlers) -> None:
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


def test_handler_set_within_block_stays(handlers: Handlers) -> None:
    other = Handlers()
    with defer_signals():
        signal.raise_signal(USR1)
        signal.signal(USR1, other)
    assert (handlers.came, other.came) == ([], [USR1])
    assert signal.getsignal(USR1) is other


def test_dtensor_handler_left_installed_calls_users_handler(handlers: Handlers) -> None:
    with defer_signals():
        ours = signal.getsignal(USR1)
    signal.signal(USR1, ours)
    signal.raise_signal(USR1)
    assert handlers.came == [USR1]
    assert signal.getsignal(USR1) is handlers


def test_default_and_ignored_signals_are_not_replaced(handlers: Handlers) -> None:
    signal.signal(USR1, signal.SIG_IGN)
    signal.signal(USR2, signal.SIG_DFL)
    with defer_signals():
        assert signal.getsignal(USR1) is signal.SIG_IGN
        assert signal.getsignal(USR2) is signal.SIG_DFL


def test_defer_signals_in_other_thread_does_not_delay_main_thread(handlers: Handlers) -> None:
    """Python runs handlers in the main thread, whatever another thread is executing."""
    inside, go = threading.Event(), threading.Event()

    def runs() -> None:
        with defer_signals(), held_back(), immediate_handlers():
            inside.set()
            go.wait()

    thread = threading.Thread(target=runs)
    thread.start()
    inside.wait()
    signal.raise_signal(USR1)
    assert handlers.came == [USR1]
    go.set()
    thread.join()


def test_wait_for_lock_of_other_thread_is_interrupted_by_signal(handlers: Handlers) -> None:
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
