"""Exceptions of code on a host, as the controller gets them: always as text, and as the exception
itself where it can be carried.

    try:
        kernel(x)
    except BaseException as error:          # a host's SystemExit ends no user's program
        if interrupts(error):               # Ctrl-C, or a handler of a signal: this process's own
            raise
        failure = Failure(rank=1, reason=reason_of(error), raised=RemoteException(error))
    TaskError(failure).__cause__            # the exception; or its printed text, if not carried

An exception is carried as its class, its arguments and its attributes, and is put together without
a call of its `__init__` or its `__reduce__`: neither usually accepts pickle's arguments, and either
may have side effects. The values in it are pickled. All of it is tried on the host first, so that
an exception which ends a process when it is unpickled ends the host's and not the controller's.

Invariants: errors of the exception's own code (`__str__`, `__reduce__`) are not raised here, and
the carried form has a bounded size. Not here: the choice of daft's error for it (`errors.py`).
"""

from __future__ import annotations

import inspect
import io
import opcode
import os
import pickle
import sys
import sysconfig
import traceback
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from torch import Tensor

MOST_LINES = 4
"""Most lines of an exception's own text in a failure."""
MOST_IN_LINE = 1000
MOST_IN_TRACE = 20_000
"""Most characters of a traceback that leaves a process."""
MOST_BYTES = 1 << 18
"""Most bytes of a pickled exception that leaves a process: a larger one is sent as text."""


T = TypeVar("T")


# The parts of an exception, read without its class, whose `__getattribute__` may raise.
_space: Any = vars(BaseException)
traceback_of: Callable[[BaseException], TracebackType | None] = _space["__traceback__"].__get__
_cause: Callable[[BaseException], BaseException | None] = _space["__cause__"].__get__
_context: Callable[[BaseException], BaseException | None] = _space["__context__"].__get__
_suppresses: Callable[[BaseException], bool] = _space["__suppress_context__"].__get__


class RemoteTraceback(Exception):
    """The traceback of a host's exception as text: it replaces an exception that cannot be
    carried."""


class RemoteException:
    """An exception; `error`: in another process, an equal one or a `RemoteTraceback`."""

    __slots__ = ("_sent", "error")

    def __init__(self, error: BaseException, sent: tuple[str, bytes | None] | None = None) -> None:
        self.error: BaseException = error
        self._sent = sent  # as text and, if it can be, pickled

    def __reduce__(self) -> tuple[Any, ...]:
        if self._sent is None:
            self._sent = trace_of(self.error), _carried(self.error)
        return _arrived, self._sent

    def detached(self) -> RemoteException:
        """The form that another process gets: it holds no frames, and so none of their values."""
        make, sent = self.__reduce__()
        return make(*sent)


def _arrived(text: str, data: bytes | None) -> RemoteException:
    error = None if data is None else _guarded(lambda: pickle.loads(data))
    if isinstance(error, BaseException):
        return RemoteException(error, (text, data))
    return RemoteException(RemoteTraceback(text), (text, None))


# -- as text ---------------------------------------------------------------------------------------


def reason_of(error: BaseException) -> str:
    """Its class and the first lines of its own text."""
    name = type(error).__name__
    text = _guarded(lambda: first_lines(str(error)))
    if text is None:
        return f"{name} (its own text could not be had)"
    return f"{name}: {text}" if text else name


def first_lines(text: str) -> str:
    lines = text.splitlines()
    more = f"... ({len(lines) - MOST_LINES} more lines)" if len(lines) > MOST_LINES else ""
    kept = (_shortened(line, MOST_IN_LINE) for line in lines[:MOST_LINES])
    return "\n".join((*kept, more) if more else kept)


def trace_of(error: BaseException, trace: TracebackType | None = None) -> str:
    """Its traceback with those of its causes, as Python prints them. `trace`: replaces its own."""
    trace = traceback_of(error) if trace is None else trace
    text = _guarded(lambda: "".join(traceback.format_exception(type(error), error, trace)))
    return reason_of(error) if text is None else _shortened(text, MOST_IN_TRACE)


def _shortened(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def _guarded(make: Callable[[], T]) -> T | None:
    """The result of `make`; None if the exception's own code raises."""
    try:
        return make()
    except BaseException as error:
        if interrupts(error):
            raise
        return None


# -- signals -----------------------------------------------------------------------------------

_RAISE = opcode.opmap["RAISE_VARARGS"]
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep


def interrupts(error: BaseException) -> bool:
    """Whether it is meant for this process, and was not raised by the code that it passed through.

    Ranks in one process share it with the program that launched them: Ctrl-C while one computes
    belongs to the program, a `raise KeyboardInterrupt` in an op to the op. Python's own handler
    leaves no frame, so a KeyboardInterrupt comes from a signal unless its innermost frame is at a
    `raise`; and an exception raised under a handler that the program has set, which alone gets a
    frame, belongs to the handler. An exception that was raised because of such a one counts too.
    """
    if isinstance(error, Exception):
        return False
    if _by_signal(error):
        return True
    outside: set[FrameType] = set()
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        outside.add(frame)
        frame = frame.f_back
    # an exception that is handled outside existed before the call
    return any(
        _by_signal(each)
        for each in _behind(error)
        if (trace := traceback_of(each)) is not None and trace.tb_frame not in outside
    )


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The exceptions because of which it was raised, and those of a group."""
    seen, waiting = {id(error)}, [error]
    while waiting:
        each = waiting.pop()
        more = [e for e in (_cause(each), _context(each)) if e is not None]
        if isinstance(each, BaseExceptionGroup):
            more += cast("BaseExceptionGroup[BaseException]", each).exceptions
        for exception in more:
            if id(exception) not in seen:
                seen.add(id(exception))
                waiting.append(exception)
                yield exception


def _by_signal(error: BaseException) -> bool:
    trace = traceback_of(error)
    if trace is None or isinstance(error, Exception):
        return False
    while True:
        if _handles_signal(trace.tb_frame):
            return True
        if trace.tb_next is None:
            break
        trace = trace.tb_next
    if not isinstance(error, KeyboardInterrupt):
        return False
    code = trace.tb_frame.f_code
    if code.co_code[trace.tb_lasti] != _RAISE:
        return True
    # Python's library (such as asyncio.run) raises it only after a signal
    file = code.co_filename
    return file.startswith(_STDLIB) and not file.startswith(_PACKAGES)


def _handles_signal(frame: FrameType) -> bool:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    if len(names) < 2:
        return False
    given = frame.f_locals
    return any(
        inspect.isframe(given.get(second)) and isinstance(given.get(first), int)
        for first, second in pairwise(names)
    )


# -- as an exception
# -------------------------------------------------------------------------------------


def _carried(error: BaseException) -> bytes | None:
    """The pickled exception, if it survives unpickling; without its cause, if that is what
    fails."""
    for causes in (True, False):
        for pickler in PICKLERS:
            data = _guarded(partial(_pickled, error, pickler, causes))
            if data is not None:
                return data
    return None


def _pickled(error: BaseException, pickler: type[Any], causes: bool) -> bytes | None:
    file = _Bounded()
    writer = pickler(file)
    writer.causes = causes
    writer.dump(error)
    data = file.getvalue()
    return data if type(pickle.loads(data)) is type(error) else None


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise pickle.PicklingError(f"more than {MOST_BYTES} bytes")
        return super().write(data)


class ExceptionPickler(pickle.Pickler):
    causes = True

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and issubclass(obj, BaseException) and _is_inner(obj):
            _classes[id(obj)] = obj
            return _class_here, (_process(), id(obj))
        return reduced(obj, self.causes)


PICKLERS: list[type[Any]] = [ExceptionPickler]
"""Picklers in the order of their trials: a backend puts its own first."""


def reduced(obj: Any, causes: bool) -> Any:
    """The result of a pickler's `reducer_override` for an exception, and for the values in one."""
    if isinstance(obj, BaseException):
        reduce: Any = _base(type(obj)).__reduce__  # in C: not of a user's class
        args, *state = list[Any](reduce(obj))[1:]
        told = dict[str, Any](*state), _cause(obj) if causes else None, _suppresses(obj)
        return _empty, (type(obj), args), told, None, None, _fill
    if isinstance(obj, Tensor) and obj.nbytes > MOST_BYTES:  # before its bytes are copied
        raise pickle.PicklingError(f"a tensor of {obj.nbytes} bytes")
    return NotImplemented


def _base(cls: type[BaseException]) -> type[Any]:
    """The first of its bases that is written in C, which defines its memory layout."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9


def _empty(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    base = _base(cls)
    error = base.__new__(cls, *args)
    base.__init__(error, *args)
    return error


def _fill(error: BaseException, told: tuple[dict[str, Any], BaseException | None, bool]) -> None:
    state, cause, suppressed = told
    for name, value in state.items():
        BaseException.__setattr__(error, name, value)
    BaseException.__setattr__(error, "__cause__", cause)
    BaseException.__setattr__(error, "__suppress_context__", suppressed)


_classes: WeakValueDictionary[int, type[BaseException]] = WeakValueDictionary()
_started = uuid.uuid4().hex


def _is_inner(cls: type[BaseException]) -> bool:
    return "<locals>" in cls.__qualname__


def _process() -> tuple[str, int]:
    return _started, os.getpid()  # a fork inherits the first


def _class_here(process: tuple[str, int], number: int) -> type[BaseException]:
    """A class that was made inside a function, in the process that made it."""
    if process != _process():
        raise LookupError("the class is of another process")
    return _classes[number]
