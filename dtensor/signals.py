"""While state changes, signal handlers are deferred to a place where no state is lost.

    with defer_signals():          # in the main thread: no handler of the program runs in here
        for instruction in program:
            act()                  # but here: pending signals are handled, and may raise
            instruction()
    # signals that came since are handled here

Within, our handler replaces every Python handler, and notes the signal. `act` calls the program's
handlers for noted signals; so does the end of the outermost block. Code that must not let an
exception pass keeps it (`keep`): the end of that block raises it. Under `held_back` no handler runs
before its end. In `as_set`, where no state of ours can be lost, handlers run when signals come, but
for those that come in torch's own Python: torch may be between two changes of its modes there.

A handler that `act` calls, within a block, is cut off where it calls a function of ours: it runs
again, from its beginning, at the end of the block, where all calls work.

After `SAY_AFTER_S` of waiting, a message says that a signal is held back. A second signal after
that is handled when it comes: if its handler raises, the current change is half done, and
`when_forced` are called as the exception leaves the outermost block.

Invariants: a signal is handled by the handler that is installed then; if it comes twice before
that, it is handled once. If an exception leaves our handler installed after a block, it calls the
program's. One that came in a block within a finalizer, where Python drops exceptions, is sent again
(`_send`). Threads other than the main one are not affected: Python runs handlers only in the main
thread. Within a block only a `Lock` may be waited for, for in a plain one no signal would act.
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
LOOK_S = 0.05
"""How often a thread that waits for a lock polls."""
RESEND_S = 0.02
"""When a signal that came in a finalizer comes again."""
_HERE = os.path.dirname(__file__) + os.sep
_PASSED = (_HERE, os.path.dirname(os.__file__) + os.sep, "<")
"""Where files begin that are neither torch's nor the user's."""

# Without the conversions of `signal` to enums, which take ten times as long.
_c: Any = importlib.import_module("_signal")
_NUMBERS = [int(s) for s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}]

noted: list[int] = []
"""Pending signals. Usually empty: check it before `act`."""
when_forced: list[Callable[[], None]] = []
"""Called when a second signal has interrupted a change of state half-way."""

_main = threading.main_thread().ident
_depth = 0  # number of open blocks
_holding = 0  # number of open `held_back`
_waiting = 0  # number of open `waits_may_act`
_handlers: dict[int, Any] = {}  # that our handler replaces, or has replaced
_seen: tuple[tuple[Any, ...], list[tuple[int, Any]]] = (), []  # all, and the Python ones
_after: list[int] = []  # whose handlers call a function of ours
_kept: list[BaseException] = []
_plain = False  # in `as_set`
_raised = False  # a handler raised there
_acting = False
_cut = False
_waits: dict[int, list[bool]] = {}  # signals in `noted` and `_after`; whether a message said so
_forced = False


class CutOff(BaseException):
    """Ends a handler that calls a function of ours within a block; it runs again at the block's
    end."""


def _forked() -> None:
    global _main
    _main = threading.get_ident()


os.register_at_fork(after_in_child=_forked)


# -- blocks ----------------------------------------------------------------------------------------


class DeferredSignals:
    """A block in which signals wait. It may be entered within itself."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _depth
        if threading.get_ident() == _main:
            if not _depth:
                _stand_in()
            _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if threading.get_ident() == _main:
            _depth = max(0, _depth - 1)
            if not _depth and not _raised:
                if not _plain:
                    _put_back()
                if noted or _after or _kept or _forced:
                    _end()


_BLOCK = DeferredSignals()


def defer_signals() -> DeferredSignals:
    """A block in which signals wait, in the main thread; elsewhere nothing."""
    return _BLOCK


@contextmanager
def held_back() -> Iterator[None]:
    """A block in which no handler runs."""
    global _holding
    if threading.get_ident() != _main:
        yield
        return
    with _BLOCK:
        _holding += 1
        try:
            yield
        finally:
            _holding -= 1


@contextmanager
def waits_may_act() -> Iterator[None]:
    """A block in which `wait` acts: its result may be abandoned."""
    global _waiting
    if threading.get_ident() != _main:
        yield
        return
    with _BLOCK:
        _waiting += 1
        try:
            yield
        finally:
            _waiting -= 1


@contextmanager
def as_set() -> Iterator[None]:
    """A part of a block in which no state of ours can be lost: handlers run when signals come, as
    without this module, until one raises; signals during that exception wait. Those that come in
    torch's Python wait for `act` or the end of the block."""
    global _depth, _plain, _raised
    if threading.get_ident() != _main or not _depth or _holding or _acting:
        yield
        return
    before = _depth, _plain, _raised
    try:
        _depth, _plain, _raised = 0, True, False
        _handle()
        yield
    finally:
        _depth, _plain, _raised = before
        _stand_in()


# -- safe places -----------------------------------------------------------------------------------


def act() -> None:
    """Handle pending signals here, which may raise; does nothing under `held_back`."""
    global _acting, _cut, _raised
    if not noted or _holding or _acting or threading.get_ident() != _main:
        return
    _acting = True
    try:
        while noted:
            number, _cut = noted.pop(0), False
            waits = _waits[number]
            try:
                _call(number)
            except BaseException:
                if not _cut:
                    _raised = _raised or (_plain and not _depth)
                    raise
            if _cut:
                _after.append(number)
                _waits[number] = waits
    finally:
        _acting = False


def wait() -> None:
    """As `act`, in a wait for results that may be abandoned."""
    if noted and _waiting:
        act()


def is_said() -> bool:
    """Whether a message said that a signal is held back: the next one acts when it comes."""
    return any(waits[0] for waits in _waits.values())


def keep(error: BaseException) -> None:
    """Let the end of the outermost block raise it: `act` raised it where the current work must
    finish."""
    _kept.append(error)


class Lock:
    """A lock that a thread may take again, and a block. While a thread waits for it, signals act
    unless other work has begun. ``turn`` tells whether another thread has had it since."""

    def __init__(self) -> None:
        self.turn: int = 0
        self._last = 0  # the thread that has it, or had it last
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        self._lock.release()

    def waited_for(self) -> None:
        """Called by a thread that waits, every now and then; may raise."""

    def __enter__(self) -> None:
        global _depth
        me = threading.get_ident()
        if me == _main:  # as a block: without a call, for a step takes many locks
            if not _depth:
                _stand_in()
            _depth += 1
        if _acting or not self._lock.acquire(False):
            self._wait(me)
        if me != self._last:
            self._last = me
            self.turn += 1

    def _wait(self, me: int) -> None:
        global _cut
        try:
            if _acting and me == _main:
                _cut = True
                raise CutOff
            while not self._lock.acquire(timeout=LOOK_S):
                if noted and _depth == 1 and me == _main:
                    _handle()
                self.waited_for()
        except BaseException:
            _BLOCK.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _depth
        self._lock.release()
        if _depth > 1 and threading.get_ident() == _main:
            _depth -= 1
        else:
            _BLOCK.__exit__()


# -- replacing handlers ----------------------------------------------------------------------------


def _stand_in() -> None:
    global _seen
    standing = tuple(map(_c.getsignal, _NUMBERS))
    if standing != _seen[0]:
        own = [(n, h) for n, h in zip(_NUMBERS, standing, strict=True) if callable(h)]
        _seen = standing, own
    for number, handler in _seen[1]:
        if handler is not _note:  # still installed
            _handlers[number] = handler
            _c.signal(number, _note)


def _put_back() -> None:
    for number, handler in list(_handlers.items()):
        if _c.getsignal(number) is _note:  # else the program has set another
            _c.signal(number, handler)


def _note(number: int, frame: FrameType | None) -> None:
    """Our handler, in place of the program's."""
    global _forced, _raised
    if not _depth and not _raised and not (_plain and _is_torchs(frame) and not is_said()):
        if not _plain:
            _put_back()
        elif number in noted:
            noted.remove(number)
            del _waits[number]
        try:
            _handlers[number](number, frame)
        except BaseException:
            _raised = _plain
            raise
    elif is_said():
        try:
            _handlers[number](number, frame)
        except BaseException:
            _forced = True
            raise
    elif number not in _waits:
        noted.append(number)
        _waits[number] = waits = [False]
        _thread.start_new_thread(_say_late, (number, waits))  # takes no lock: we may hold it


def _is_torchs(frame: FrameType | None) -> bool:
    """Whether torch's Python runs in it, or something of ours or the standard library's on behalf
    of torch. An exception between two of its statements can leave a mode on torch's stack, and one
    in what its C++ asks ends the process; from functions of the user's torch expects them."""
    torch = sys.modules.get("torch")
    home = os.path.dirname(torch.__file__ or "") + os.sep if torch is not None else None
    while frame is not None and home is not None:
        file = frame.f_code.co_filename
        if file.startswith(home):
            return True
        if not file.startswith(_PASSED) or "site-packages" in file.removeprefix(_HERE):
            return False
        frame = frame.f_back
    return False


def _call(number: int) -> None:
    """Call the program's handler, if it still has one."""
    _waits.pop(number, None)
    handler = _c.getsignal(number)
    handler = _handlers[number] if handler is _note else handler
    if callable(handler):
        handler(number, sys._getframe(2))


def _handle() -> None:
    """Handle noted signals, and handlers that were cut off; the next ones too if one raises."""
    if (noted or _after) and _is_in_finalizer():
        again = [*_after, *noted]
        _after.clear()
        noted.clear()
        _waits.clear()
        _thread.start_new_thread(_send, (again,))
    waiting = _after or noted
    if waiting:
        try:
            _call(waiting.pop(0))
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


def _send(numbers: list[int]) -> None:
    """Send signals to the main thread again, from another thread, after `RESEND_S`."""
    time.sleep(RESEND_S)
    for number in numbers:
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # wakes one that sleeps


def _end() -> None:
    """The end of the outermost block."""
    global _forced
    try:
        _handle()
    finally:
        kept, forced, _forced = _kept[:1], _forced, False
        _kept.clear()
        for lose in when_forced if forced else ():
            lose()
        for error in kept:
            context = error.__context__
            try:
                raise error
            finally:
                error.__context__ = context  # not the exception that it has ended


def _say_late(number: int, waits: list[bool]) -> None:
    time.sleep(SAY_AFTER_S)
    if _waits.get(number) is waits:
        print(
            f"{signal.Signals(number).name} is held back: it acts as soon as nothing can be lost "
            f"by it. A second one acts at once, and the values on the launch's ranks are lost.",
            file=sys.stderr,
            flush=True,
        )
        waits[0] = True
