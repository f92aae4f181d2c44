"""Making the exit status of this process nonzero from an exit handler.

    atexit.register(report)    # it prints failures that were not read, and calls `not_zero()`

Python returns 120 if its last flush of `sys.stderr` fails (`Py_FinalizeEx`), so `not_zero` makes
this flush fail. (An exception in an exit handler does not change the status, and `os._exit` would
skip other handlers.) A status that is nonzero already must stay, and no handler can read it. So a
copy of the process, made by `os.fork`, ends at once without side effects, and its status is read.
The status is 120 in any case where this does not work: without glibc's `on_exit`, on Python 3.14,
on a Python that cannot fork in exit handlers, or if the copy hangs or dies.
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
"""Python's exit status if the last flush fails."""
_COPY_S = 30.0  # the longest time that the copy may take


def not_zero() -> None:
    """Make the exit status 120, unless it is nonzero already. Called at the end of an exit
    handler."""
    if _status_of_copy() == 0:
        _fail_last_flush()


def _status_of_copy() -> int:
    """Fork a copy of the process that ends at once, and return its exit status; 0 if it is unknown.
    In the copy, return 1, so that the copy continues to its end."""
    try:
        libc = ctypes.CDLL(None)
        # the copy ends as soon as its status is known: it skips the exit code of C libraries
        on_exit, end_at_once = libc.on_exit, ctypes.cast(libc._exit, ctypes.c_void_p)
        clear_handlers: Any = vars(atexit)["_clear"]
    except (OSError, AttributeError, KeyError):
        return 0
    if sys.version_info >= (3, 14):  # the copy might run the cleared handlers
        return 0
    _flush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads: the copy needs none of them
            copy = os.fork()
    except (OSError, RuntimeError):  # no memory, or a Python that does not fork at exit
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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive))  # so that no object is ever deleted
    except BaseException:
        os._exit(0)
    return 1


def _status_of(process: int) -> int:
    """Wait for a child and return its exit status; 0 if it crashed, hangs or is unknown."""
    end = time.monotonic() + _COPY_S
    try:
        while True:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                # Python sends itself an uncaught interrupt; other signals are a crash
                return code if code >= 0 or code == -signal.SIGINT else 0
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return 0
            time.sleep(0.01)
    except ChildProcessError:  # the program has read the statuses of all its children
        return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, a broken pipe, closed
            stream.flush()


class _Nowhere:
    """A `sys.stderr` that discards text, for a process without one."""

    closed = False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        _check_not_the_last()


def _fail_last_flush() -> None:
    """Make the last flush of `sys.stderr` fail, and of Python's original stderr, which a later
    handler may restore."""
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
    """A stream's `flush` that fails if Python is finalizing."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def __call__(self) -> None:
        _check_not_the_last()
        self._before()


def _check_not_the_last() -> None:
    if sys.is_finalizing():  # all handlers have run
        raise OSError("an error was not read, so the exit status is not 0")
