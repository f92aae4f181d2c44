"""Defer signal handlers, while state changes, to a place where no state can be lost.

    with defer_signals():          # in the main thread: no handler of the program runs in the block
        for instruction in program:
            act()                  # except here: pending signals are handled, which may raise
            instruction()
    # signals that came in the meantime are handled here

Within a block our handler replaces every Python handler and records the signal (`noted`). A signal
that comes twice is handled once, by the handler that is installed then. Only the main thread is
affected, because Python runs handlers only there. Within a block, wait only for a `Lock`: while a
thread waits for any other lock, no signal is handled. See docs/design/0035-signals.md.
"""

from __future__ import annotations

import _thread
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SAY_AFTER_S = 1.0
"""Seconds until a message says that a signal is held back."""
LOOK_S = 0.05
"""Seconds between two polls of a thread that waits for a lock."""
RESEND_S = 0.02
"""Seconds until a signal that came in a finalizer is sent again."""
_DTENSOR = os.path.dirname(__file__) + os.sep
_SKIPPED = (_DTENSOR, os.path.dirname(os.__file__) + os.sep, "<")
"""Prefixes of files that belong neither to torch nor to the user."""

# The functions of `signal` convert to enums, which takes ten times as long.
_c: Any = importlib.import_module("_signal")
_NUMBERS = [int(s) for s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}]

noted: list[int] = []
"""Pending signals. Usually empty: check it before `act`."""
on_forced_signal: list[Callable[[], None]] = []
"""Called if a second signal has interrupted a change of state half-way."""

_main = threading.main_thread().ident
_depth = 0  # number of open blocks
_num_held_back = 0  # number of open `held_back`
_num_waits_may_act = 0  # number of open `waits_handle_signals`
_handlers: dict[int, Any] = {}  # the program's, which our handler replaces or has replaced
_installed: tuple[tuple[Any, ...], list[tuple[int, Any]]] = (), []  # all; those in Python
_after_block: list[int] = []  # signals whose handlers were cut off (`CutOff`)
_kept: list[BaseException] = []
_in_as_set = False
_raised = False  # a handler raised in `immediate_handlers`
_acting = False  # `act` runs a handler
_was_cut_off = False
_waits: dict[int, list[bool]] = {}  # pending signal -> [whether a message has announced it]
_forced = False  # the handler of a second signal raised


class CutOff(BaseException):
    """Ends a handler, called by `act`, that calls a function of dtensor. The handler runs again
    from its beginning at the end of the block, where all functions can be called."""


def _update_main_thread() -> None:
    global _main
    _main = threading.get_ident()


os.register_at_fork(after_in_child=_update_main_thread)


# -- blocks ----------------------------------------------------------------------------------------


class DeferredSignals:
    """A block in which signals wait. Blocks may be nested."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _depth
        if threading.get_ident() == _main:
            if not _depth:
                _install_handler()
            _depth += 1

    def __exit__(self, *_: object) -> None:
        """End the block; at the outermost block, restore handlers and act on noted signals."""
        global _depth
        if threading.get_ident() == _main:
            _depth = max(0, _depth - 1)
            if not _depth and not _raised:
                if not _in_as_set:
                    _restore_handlers()
                if noted or _after_block or _kept or _forced:
                    _end()


_BLOCK = DeferredSignals()


def defer_signals() -> DeferredSignals:
    """Return a block in which signals wait. It has no effect outside of the main thread."""
    return _BLOCK


@contextmanager
def held_back() -> Iterator[None]:
    """Defer all handlers to the end of the outermost block: `act` does nothing."""
    global _num_held_back
    if threading.get_ident() != _main:
        yield
        return
    with _BLOCK:
        _num_held_back += 1
        try:
            yield
        finally:
            _num_held_back -= 1


@contextmanager
def waits_handle_signals() -> Iterator[None]:
    """Let `wait` handle signals within the block, because the awaited result can be abandoned."""
    global _num_waits_may_act
    if threading.get_ident() != _main:
        yield
        return
    with _BLOCK:
        _num_waits_may_act += 1
        try:
            yield
        finally:
            _num_waits_may_act -= 1


@contextmanager
def immediate_handlers() -> Iterator[None]:
    """Let the program's handlers run as soon as signals come: no state can be lost in this part of
    a block.

    A signal that comes within torch's Python code waits for `act` or the end of the block, because
    torch may be changing its modes. So does a signal that comes after a handler has raised.
    """
    global _depth, _in_as_set, _raised
    if threading.get_ident() != _main or not _depth or _num_held_back or _acting:
        yield
        return
    before = _depth, _in_as_set, _raised
    try:
        _depth, _in_as_set, _raised = 0, True, False
        _handle()
        yield
    finally:
        _depth, _in_as_set, _raised = before
        _install_handler()


# -- safe places -----------------------------------------------------------------------------------


def act() -> None:
    """Handle pending signals here, which may raise. Do nothing under `held_back`."""
    global _acting, _was_cut_off, _raised
    if not noted or _num_held_back or _acting or threading.get_ident() != _main:
        return
    _acting = True
    try:
        while noted:
            number, _was_cut_off = noted.pop(0), False
            waits = _waits[number]
            try:
                _call_handler(number)
            except BaseException:
                if not _was_cut_off:
                    _raised = _raised or (_in_as_set and not _depth)
                    raise
            if _was_cut_off:
                _after_block.append(number)
                _waits[number] = waits
    finally:
        _acting = False


def wait() -> None:
    """Do what `act` does, if `waits_handle_signals`. To be called while waiting for a result."""
    if noted and _num_waits_may_act:
        act()


def was_announced() -> bool:
    """Return whether a message said that a signal is held back. Then the next signal is handled as
    soon as it comes."""
    return any(waits[0] for waits in _waits.values())


def keep(error: BaseException) -> None:
    """Let the end of the outermost block raise an exception of `act`, because the current work must
    finish first."""
    _kept.append(error)


class Lock:
    """A reentrant lock, and a block in which signals wait.

    A thread that waits for the lock handles signals, unless it is inside another block. ``turn``
    counts how often the lock has passed from one thread to another.
    """

    def __init__(self) -> None:
        self.turn: int = 0
        self._last = 0  # the thread that holds the lock, or held it last
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        self._lock.release()

    def check_deadlock(self) -> None:
        """Raise if the thread that holds the lock waits for this one. A thread that waits for the
        lock calls this at each poll."""

    def __enter__(self) -> None:
        global _depth
        me = threading.get_ident()
        if me == _main:  # `_BLOCK.__enter__`, inlined because a step takes many locks
            if not _depth:
                _install_handler()
            _depth += 1
        if _acting or not self._lock.acquire(False):
            self._wait(me)
        if me != self._last:
            self._last = me
            self.turn += 1

    def _wait(self, me: int) -> None:
        """Wait for the lock and handle signals. Raises `CutOff` in a handler that `act` calls."""
        global _was_cut_off
        try:
            if _acting and me == _main:
                _was_cut_off = True
                raise CutOff
            while not self._lock.acquire(timeout=LOOK_S):
                if noted and _depth == 1 and me == _main:
                    _handle()
                self.check_deadlock()
        except BaseException:
            _BLOCK.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Release the lock; the outermost exit on the main thread also acts on noted signals."""
        global _depth
        self._lock.release()
        if _depth > 1 and threading.get_ident() == _main:
            _depth -= 1
        else:
            _BLOCK.__exit__()


# -- replacing handlers ----------------------------------------------------------------------------


def _install_handler() -> None:
    """Replace every Python handler by ours."""
    global _installed
    handlers = tuple(map(_c.getsignal, _NUMBERS))
    if handlers != _installed[0]:
        in_python = [(n, h) for n, h in zip(_NUMBERS, handlers, strict=True) if callable(h)]
        _installed = handlers, in_python
    for number, handler in _installed[1]:
        if handler is not _note:  # an exception may have left our handler installed
            _handlers[number] = handler
            _c.signal(number, _note)


def _restore_handlers() -> None:
    for number, handler in list(_handlers.items()):
        if _c.getsignal(number) is _note:  # if not, the program has set another handler
            _c.signal(number, handler)


def _note(number: int, frame: FrameType | None) -> None:
    """Call the program's handler now if that is allowed, else record the signal as pending. This is
    our handler, which replaces the program's."""
    global _forced, _raised
    if (
        not _depth
        and not _raised
        and not (_in_as_set and _is_torchs(frame) and not was_announced())
    ):
        if not _in_as_set:  # an exception left our handler installed after a block
            _restore_handlers()
        elif number in noted:
            noted.remove(number)
            del _waits[number]
        try:
            _handlers[number](number, frame)
        except BaseException:
            _raised = _in_as_set
            raise
    elif was_announced():
        try:
            _handlers[number](number, frame)
        except BaseException:
            _forced = True
            raise
    elif number not in _waits:
        noted.append(number)
        _waits[number] = waits = [False]
        # Not `threading.Thread`, whose start takes a lock that this thread may hold.
        _thread.start_new_thread(_announce_later, (number, waits))


def _is_torchs(frame: FrameType | None) -> bool:
    """Return whether a frame runs torch's Python code, or code of dtensor or the standard library
    that torch calls.

    An exception between two statements of torch can leave a mode on torch's stack, and one in code
    that torch's C++ calls can end the process. Torch expects exceptions only in the user's code.
    """
    torch = sys.modules.get("torch")
    torch_folder = os.path.dirname(torch.__file__ or "") + os.sep if torch is not None else None
    while frame is not None and torch_folder is not None:
        file = frame.f_code.co_filename
        if file.startswith(torch_folder):
            return True
        if not file.startswith(_SKIPPED) or "site-packages" in file.removeprefix(_DTENSOR):
            return False
        frame = frame.f_back
    return False


def _call_handler(number: int) -> None:
    """Call the program's handler of a signal, if it still has one."""
    _waits.pop(number, None)
    handler = _c.getsignal(number)
    handler = _handlers[number] if handler is _note else handler
    if callable(handler):
        handler(number, sys._getframe(2))


def _handle() -> None:
    """Handle all pending signals, those whose handlers were cut off first. If a handler raises, the
    others still run."""
    if (noted or _after_block) and _is_in_finalizer():
        pending = [*_after_block, *noted]
        _after_block.clear()
        noted.clear()
        _waits.clear()
        _thread.start_new_thread(_resend, (pending,))
    numbers = _after_block or noted
    if numbers:
        try:
            _call_handler(numbers.pop(0))
        finally:
            _handle()


def _is_in_finalizer() -> bool:
    """Return whether the stack contains a `__del__` or a finalizer of `weakref`. Python drops an
    exception that leaves one."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def _resend(numbers: list[int]) -> None:
    """Send signals to the main thread again, from another thread, after `RESEND_S`."""
    time.sleep(RESEND_S)
    for number in numbers:  # pthread_kill also wakes the thread if it sleeps
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _end() -> None:
    """Handle all pending signals at the end of the outermost block, and raise a kept exception."""
    global _forced
    try:
        _handle()
    finally:
        kept, forced, _forced = _kept[:1], _forced, False
        _kept.clear()
        for function in on_forced_signal if forced else ():
            function()
        for error in kept:
            context = error.__context__
            try:
                raise error
            finally:
                error.__context__ = context  # not the exception of a handler that it replaces


def _announce_later(number: int, waits: list[bool]) -> None:
    """Print a message, after `SAY_AFTER_S`, if the signal is still held back."""
    time.sleep(SAY_AFTER_S)
    if _waits.get(number) is waits:
        print(
            f"{signal.Signals(number).name} is held back: it acts as soon as nothing can be lost "
            f"by it. A second one acts at once, and the values on the launch's ranks are lost.",
            file=sys.stderr,
            flush=True,
        )
        waits[0] = True
