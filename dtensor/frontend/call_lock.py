"""`CALL_LOCK` serializes dtensor's entry points; `capturing` marks the threads that capture.

    with CALL_LOCK:              # a step, a plan, a load, an access to a remote parameter
        with capturing():
            is_capturing()       # True in this thread and in threads that the program starts

`CALL_LOCK` is reentrant, and is taken before a cluster's lock. It is not held over a `yield`, nor
while a thread waits for results, saves or a starting launch. A call of dtensor in a thread that a
captured program started raises, because it would deadlock. Only threads that capture see fake
parameters (`CaptureLocalDict`) and a patched torch: each patch checks `is_capturing`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

from dtensor.errors import PlanningError
from dtensor.signals import LOOK_S, Lock, act

_captures: list[int] = []  # the id of the capturing thread, once for each nested capture
_started: WeakSet[threading.Thread] = WeakSet()  # threads that the captured program has started


def is_capturing() -> bool:
    """Return whether this thread captures, or was started by the program that is captured."""
    return bool(_captures) and (
        threading.get_ident() == _captures[0] or threading.current_thread() in _started
    )


@contextmanager
def capturing() -> Iterator[None]:
    """Mark this thread as capturing within the block. Only `capture` calls it, with CALL_LOCK."""
    _captures.append(threading.get_ident())
    try:
        yield
    finally:
        _captures.pop()
        if not _captures:
            _started.clear()


def started(thread: threading.Thread) -> None:
    """Record that the captured program starts a thread."""
    _started.add(thread)


def has_started_threads() -> bool:
    """Return whether the program that is captured has started threads."""
    return bool(_started)


class CallLock(Lock):
    """The lock of dtensor's entry points, which detects deadlocks with captured programs."""

    def __init__(self) -> None:
        super().__init__()
        self._awaited_lock: Any = None  # the lock for which the holder of this lock waits

    @contextmanager
    def also_holding(self, lock: Any) -> Iterator[None]:
        """Hold another lock within the block. To be called with this lock held. If the holder of
        ``lock`` waits for this lock meanwhile, RuntimeError is raised in its thread."""
        if not lock.acquire(blocking=False):
            self._awaited_lock = lock
            try:
                while not lock.acquire(timeout=LOOK_S):
                    act()
            finally:
                self._awaited_lock = None
        try:
            yield
        finally:
            lock.release()

    def check_deadlock(self) -> None:
        """Raise if the thread that holds the lock waits for this thread."""
        if is_capturing() or _waits_for_this_thread(sys._current_frames().get(self._last)):
            raise PlanningError(
                "A call of dtensor in a thread that the program being captured waits for: the call "
                "would wait for the capture, and the capture for it.\n"
                f"  thread {threading.current_thread().name}\n"
                "fix: make the call before or after, not within the functions that dt.compile and "
                "dt.train_step take"
            )
        lock = self._awaited_lock
        if lock is not None and lock._is_owned():
            raise RuntimeError(
                "A function that torch.compile compiles reads a value that is on the ranks, while "
                "another thread captures a program and waits for torch.compile to end.\n"
                "fix: module.state_dict() before the compiled call, which fetches all"
            )


CALL_LOCK = CallLock()
"""Held by an entry point of dtensor while it captures, plans, loads or starts a run."""


def _waits_for_this_thread(frame: FrameType | None) -> bool:
    """Return whether the thread of ``frame`` joins this thread, or waits for the result of a task
    that this thread runs for a thread pool."""
    tasks = {id(f.f_locals["self"].future) for f in _frames(sys._getframe()) if f.f_code is _RUN}
    for outer in _frames(frame):
        match outer.f_code:
            case code if code is _JOIN and outer.f_locals["self"] is threading.current_thread():
                return True
            case code if code is _RESULT and id(outer.f_locals.get("self")) in tasks:
                return True
            case _:
                pass
    return False


_JOIN = threading.Thread.join.__code__
_RESULT = Future.result.__code__
_RUN = _WorkItem.run.__code__


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# -- a dict with other contents in threads that capture --------------------------------------------


class CaptureLocalDict(dict[str, Any]):
    """A dict that threads which capture read and write as a private copy of ``plain``; all other
    threads use ``plain`` itself.

    Code in C that bypasses the methods reads the contents of ``plain``.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self._capture_copy = dict(plain)

    @property
    def current(self) -> dict[str, Any]:
        return self._capture_copy if is_capturing() else self.plain

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return type(self.plain), (dict(self.current),)


def _reading_method(name: str) -> Callable[..., Any]:
    """Return the method of `CaptureLocalDict` that calls a method of the current dict."""

    def read(self: CaptureLocalDict, *args: Any) -> Any:
        return getattr(self.current, name)(*args)

    return read


def _writing_method(name: str) -> Callable[..., Any]:
    """Return such a method which also copies changes of the plain dict to this object, for C."""

    def write(self: CaptureLocalDict, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        try:
            result = getattr(current, name)(*args, **kwargs)
        finally:
            if current is self.plain:
                dict.clear(self)
                dict.update(self, current)
        return self if result is current else result  # __ior__ returns the dict itself

    return write


_READS = "contains eq ge gt iter le len lt ne getitem or repr reversed ror"
for _name in (*(f"__{n}__" for n in _READS.split()), "copy", "get", "items", "keys", "values"):
    setattr(CaptureLocalDict, _name, _reading_method(_name))
for _name in [
    *("__delitem__", "__ior__", "__setitem__"),
    *("clear", "pop", "popitem", "setdefault", "update"),
]:
    setattr(CaptureLocalDict, _name, _writing_method(_name))
