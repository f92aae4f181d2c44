"""One call of ours at a time, and which threads capture: what they see is for them alone.

    with CALL_LOCK:                      # a step, a plan, a load, a touch of what is away
        with capturing():
            is_capturing()               # True in this thread and in those that the program starts

`CALL_LOCK` orders calls of ours. It is taken before a cluster's lock, may be taken again by the
thread that has it, and is held neither over a `yield` nor while somebody waits for results, saves
or a starting launch. ``turn`` tells whether another thread has had it since.

While it captures, a thread sees fake parameters and a changed torch. Each such replacement asks
`is_capturing` and else does what the plain one does, so that no other thread notices. `PerThread`
is that for the dict of a module's parameters.

Invariants: no thread waits for one that waits for it. A program that is captured may start threads
and join them: a call of ours in one of those raises. Not here: what is replaced
(capture/patches.py).
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

_captures: list[int] = []  # the thread that captures, once for each capture within another
_started: WeakSet[threading.Thread] = WeakSet()  # by the program that is captured


def is_capturing() -> bool:
    """Whether this thread captures, or was started by the program that is captured."""
    return bool(_captures) and (
        threading.get_ident() == _captures[0] or threading.current_thread() in _started
    )


@contextmanager
def capturing() -> Iterator[None]:
    """Within, this thread captures. Entered by `capture` alone, with CALL_LOCK."""
    _captures.append(threading.get_ident())
    try:
        yield
    finally:
        _captures.pop()
        if not _captures:
            _started.clear()


def started(thread: threading.Thread) -> None:
    """The program that is captured starts this thread."""
    _started.add(thread)


def has_started() -> bool:
    """Whether the program that is captured has started threads."""
    return bool(_started)


class CallLock(Lock):
    """A lock that a thread may take again."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted: Any = None  # the lock that the thread which has this one waits for

    @contextmanager
    def and_then(self, lock: Any) -> Iterator[None]:
        """With another lock, whose holder may want this one: that raises there then."""
        if not lock.acquire(blocking=False):
            self._wanted = lock
            try:
                while not lock.acquire(timeout=LOOK_S):
                    act()
            finally:
                self._wanted = None
        try:
            yield
        finally:
            lock.release()

    def waited_for(self) -> None:
        """Raises where the thread that has it waits for this one."""
        if is_capturing() or _is_waited_for(sys._current_frames().get(self._last)):
            raise PlanningError(
                "A call of dtensor in a thread that the program being captured waits for: the call "
                "would wait for the capture, and the capture for it.\n"
                f"  thread {threading.current_thread().name}\n"
                "fix: make the call before or after, not within the functions that dt.compile and "
                "dt.train_step take"
            )
        wanted = self._wanted
        if wanted is not None and wanted._is_owned():
            raise RuntimeError(
                "A function that torch.compile compiles reads a value that is on the ranks, while "
                "another thread captures a program and waits for torch.compile to end.\n"
                "fix: module.state_dict() before the compiled call, which fetches all"
            )


CALL_LOCK = CallLock()
"""Held by a call of ours while it captures, plans, loads or runs: others wait meanwhile."""


def _is_waited_for(frame: FrameType | None) -> bool:
    """Whether what runs there joins this thread, or waits for the task that a pool has it do."""
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


# -- a dict that is another one for threads that capture -------------------------------------------


class PerThread(dict[str, Any]):
    """``plain`` for all threads but those that capture, which read and write a copy of their own.

    What C reads of it, past its methods, is ``plain`` as well.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self._own = dict(plain)

    @property
    def here(self) -> dict[str, Any]:
        return self._own if is_capturing() else self.plain

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return type(self.plain), (dict(self.here),)


def _read(name: str) -> Callable[..., Any]:
    def read(self: PerThread, *args: Any) -> Any:
        return getattr(self.here, name)(*args)

    return read


def _write(name: str) -> Callable[..., Any]:
    def write(self: PerThread, *args: Any, **kwargs: Any) -> Any:
        here = self.here
        try:
            result = getattr(here, name)(*args, **kwargs)
        finally:
            if here is self.plain:
                dict.clear(self)
                dict.update(self, here)
        return self if result is here else result  # of |=

    return write


_READS = "contains eq ge gt iter le len lt ne getitem or repr reversed ror"
for _name in (*(f"__{n}__" for n in _READS.split()), "copy", "get", "items", "keys", "values"):
    setattr(PerThread, _name, _read(_name))
for _name in [
    "__delitem__",
    "__ior__",
    "__setitem__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
]:
    setattr(PerThread, _name, _write(_name))
