"""The exit status of this process: not 0, where it ends and something that failed was not read.

    atexit.register(tell)      # it prints what failed, and calls `not_zero()`

An exception in an exit handler leaves the status as it is; `os._exit` in one skips the handlers
that were registered before it, and what open files still hold. But Python gives 120 where its last
flush of `sys.stderr` fails (`Py_FinalizeEx`, which does so since 3.6; tried in 3.11): after all
handlers, of whichever order, and with everything else ended as it should be. So that flush fails.

A status that is not 0 already stays: 120 would take its place, and no handler is told which it is,
since `SystemExit` passes no hook. It is therefore tried: a copy of the process, made by `os.fork`,
goes on to its end at once, and the status that it gets is this one's. Nobody notices the copy: it
runs no handler, prints nothing, and deletes nothing, as an object of a file or a folder would that
is deleted as Python ends. This happens only where a status has to be changed.

Where it cannot be tried the status is 120 in any case: without glibc's `on_exit`; on Python 3.14,
whose `atexit` goes through a list of its own; where a Python does not fork in exit handlers, as
3.12.0; and if the copy hangs or dies.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

STATUS = 120
"""Python's own for a flush that fails at its end."""
_COPY_S = 30.0  # that a copy may take: one that hangs has no status


def not_zero() -> None:
    """To be called last in an exit handler: the status is 120, or what it is if that is not 0."""
    if _status_of_copy() == 0:
        _fail_last_flush()


def _status_of_copy() -> int:
    """The status of a copy that ends at once, and 0 if it is not found out. In the copy, another:
    it goes on to its end then."""
    try:
        libc = ctypes.CDLL(None)
        # the copy is over as soon as its status is known: what C libraries do at exit is not for it
        on_exit, end_at_once = libc.on_exit, ctypes.cast(libc._exit, ctypes.c_void_p)
        clear_handlers: Any = vars(atexit)["_clear"]
    except (OSError, AttributeError, KeyError):
        return 0
    if sys.version_info >= (3, 14):  # it may run the handlers that were cleared
        return 0
    _flush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads beside a fork: none of them is needed
            copy = os.fork()
    except (OSError, RuntimeError):  # no memory for one; a Python that forks no more by now
        return 0
    if copy:
        return _status_of(copy)
    try:
        on_exit(end_at_once, None)
        clear_handlers()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        alive = gc.get_objects()
        alive += gc.get_referents(*alive)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive))  # so that nothing is ever deleted
    except BaseException:
        os._exit(0)
    return 1


def _status_of(process: int) -> int:
    """Of a child, when it has ended; 0 where it has none of its own."""
    end = time.monotonic() + _COPY_S
    try:
        while True:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                # Python sends itself an interrupt that nobody caught; other signals are a crash
                return code if code >= 0 or code == -signal.SIGINT else 0
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return 0
            time.sleep(0.01)
    except ChildProcessError:  # the program has all its children's status taken
        return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, a broken pipe, closed
            stream.flush()


class _Nowhere:
    """A `sys.stderr` for where there is none."""

    closed = False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        _check_not_the_last()


def _fail_last_flush() -> None:
    """Of `sys.stderr`; of the one that Python began with, too: a handler to come may put it back
    where another is now."""
    stderr: Any = sys.stderr
    if stderr is None or stderr.closed:
        stderr = sys.stderr = _Nowhere()
    for stream in (stderr, sys.__stderr__):
        if stream is not None:
            flush: Callable[[], None] = stream.flush
            try:
                stream.flush = _Flush(flush)
            except AttributeError:
                sys.stderr = _Nowhere()


class _Flush:
    """`flush` of a stream: as before, but that the last one of all fails."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def __call__(self) -> None:
        _check_not_the_last()
        self._before()


def _check_not_the_last() -> None:
    if sys.is_finalizing():  # all handlers have run
        raise OSError("what failed was not read, and the exit status says so")
