"""The exit status of this process: not 0, if it ends and a failure was not read.

    atexit.register(tell)      # it prints failures, and calls `not_zero()`

An exception in an exit handler does not change the status; `os._exit` in one skips the handlers
that were registered before it, and unflushed data of open files. But Python returns 120 if its last
flush of `sys.stderr` fails (`Py_FinalizeEx`, since 3.6; tried in 3.11): after all handlers, in any
order, and with everything else ended properly. So that flush is made to fail.

A status that is not 0 already must stay: 120 would replace it, and no handler can read it, since
`SystemExit` calls no hook. So it is tried: a copy of the process, made by `os.fork`, continues to
its end at once, and its status is this process's. The copy has no side effects: it runs no handler,
prints nothing, and deletes no object, whose finalizer might delete a file or a folder. This happens
only if a status must be changed.

If it cannot be tried the status is 120 in any case: without glibc's `on_exit`; on Python 3.14,
whose `atexit` has its own list; if a Python does not fork in exit handlers, like 3.12.0; and if the
copy hangs or dies.
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
"""Python's own status for a flush that fails at its end."""
_COPY_S = 30.0  # that a copy may take: one that hangs has no status


def not_zero() -> None:
    """Called last in an exit handler: the status becomes 120, unless it is not 0 already."""
    if _status_of_copy() == 0:
        _fail_last_flush()


def _status_of_copy() -> int:
    """The status of a copy that ends at once, and 0 if it is unknown. In the copy it returns
    another value, and the copy continues to its end."""
    try:
        libc = ctypes.CDLL(None)
        # the copy ends as soon as its status is known: it skips the exit code of C libraries
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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive))  # so that no object is ever deleted
    except BaseException:
        os._exit(0)
    return 1


def _status_of(process: int) -> int:
    """The status of a child, when it has ended; 0 if it has none of its own."""
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
    except ChildProcessError:  # the program has consumed the status of all its children
        return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, a broken pipe, closed
            stream.flush()


class _Nowhere:
    """A `sys.stderr` if there is none."""

    closed = False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        _check_not_the_last()


def _fail_last_flush() -> None:
    """Let the last flush of `sys.stderr` fail; of Python's original one, too: a later handler may
    restore it."""
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
    """`flush` of a stream: unchanged, but the last one of all fails."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def __call__(self) -> None:
        _check_not_the_last()
        self._before()


def _check_not_the_last() -> None:
    if sys.is_finalizing():  # all handlers have run
        raise OSError("an error was not read, so the exit status is not 0")
