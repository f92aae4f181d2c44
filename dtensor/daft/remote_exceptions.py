"""Send an exception of code on a host to the controller: as text, and as an equal exception.

    try:
        kernel(x)
    except BaseException as error:          # includes SystemExit, which must not end the host
        if interrupts(error):               # Ctrl-C or a signal handler of this process
            raise
        failure = Failure(rank=1, reason=reason_of(error), raised=RemoteException(error))
    TaskError(failure).__cause__            # the exception, or its text if it cannot be pickled

An exception is pickled as class, arguments and attributes, and rebuilt without its `__init__` or
`__reduce__`, which may have side effects. The host first tries to unpickle it. Its size is bounded.
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

MAX_LINES = 4
"""Maximum number of lines of an exception's own text in a failure."""
MAX_LINE_CHARS = 1000
MAX_TRACEBACK_CHARS = 20_000
"""Maximum number of characters of a traceback that is sent."""
MAX_PICKLED_BYTES = 1 << 18
"""Maximum size of a pickled exception. A larger one is sent as text only."""


T = TypeVar("T")


# Getters of an exception's attributes that bypass the `__getattribute__` of its class.
_exception_attributes: Any = vars(BaseException)
traceback_of: Callable[[BaseException], TracebackType | None] = _exception_attributes[
    "__traceback__"
].__get__
_cause: Callable[[BaseException], BaseException | None] = _exception_attributes["__cause__"].__get__
_context: Callable[[BaseException], BaseException | None] = _exception_attributes[
    "__context__"
].__get__
_suppresses: Callable[[BaseException], bool] = _exception_attributes["__suppress_context__"].__get__


class RemoteTraceback(Exception):
    """The traceback of a host's exception as text, in place of one that cannot be pickled."""


class RemoteException:
    """An exception that can be pickled. `error`: the exception; in another process, an equal one or
    a `RemoteTraceback`."""

    __slots__ = ("_sent_form", "error")

    def __init__(self, error: BaseException, sent: tuple[str, bytes | None] | None = None) -> None:
        self.error: BaseException = error
        self._sent_form = sent  # (text, pickled exception or None)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._sent_form is None:
            self._sent_form = trace_of(self.error), _pickle_checked(self.error)
        return _rebuild, self._sent_form

    def detached(self) -> RemoteException:
        """Return the form that another process gets, which keeps no frames and their values."""
        make, sent = self.__reduce__()
        return make(*sent)


def _rebuild(text: str, data: bytes | None) -> RemoteException:
    error = None if data is None else _result_or_none(lambda: pickle.loads(data))
    if isinstance(error, BaseException):
        return RemoteException(error, (text, data))
    return RemoteException(RemoteTraceback(text), (text, None))


# -- as text ---------------------------------------------------------------------------------------


def reason_of(error: BaseException) -> str:
    """Return the exception's class and the first lines of its text."""
    name = type(error).__name__
    text = _result_or_none(lambda: first_lines(str(error)))
    if text is None:
        return f"{name} (its text could not be read)"
    return f"{name}: {text}" if text else name


def first_lines(text: str) -> str:
    lines = text.splitlines()
    more = f"... ({len(lines) - MAX_LINES} more lines)" if len(lines) > MAX_LINES else ""
    shown = (_cut_middle(line, MAX_LINE_CHARS) for line in lines[:MAX_LINES])
    return "\n".join((*shown, more) if more else shown)


def trace_of(error: BaseException, trace: TracebackType | None = None) -> str:
    """Return the traceback of an exception and its causes as Python prints it, shortened. `trace`:
    used in place of the exception's own traceback."""
    trace = traceback_of(error) if trace is None else trace
    text = _result_or_none(lambda: "".join(traceback.format_exception(type(error), error, trace)))
    return reason_of(error) if text is None else _cut_middle(text, MAX_TRACEBACK_CHARS)


def _cut_middle(text: str, max_chars: int) -> str:
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}"


def _result_or_none(make: Callable[[], T]) -> T | None:
    """Return the result of `make`, or None if it raises (the exception's own code may)."""
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
    """Return whether a signal caused the exception, so that it belongs to this process and not to
    the code of the rank that was interrupted.

    A KeyboardInterrupt comes from a signal unless its innermost frame is at a `raise` statement,
    since Python's own handler has no frame. An exception raised below a signal handler's frame also
    counts, and so does an exception whose cause or context counts.
    """
    if isinstance(error, Exception):
        return False
    if _raised_by_signal(error):
        return True
    outside: set[FrameType] = set()
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        outside.add(frame)
        frame = frame.f_back
    # an exception whose frame is still running is handled by a caller: it existed before
    return any(
        _raised_by_signal(current)
        for current in _causes_of(error)
        if (trace := traceback_of(current)) is not None and trace.tb_frame not in outside
    )


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes and contexts of an exception, recursively, and the exceptions of groups."""
    visited_ids, unvisited = {id(error)}, [error]
    while unvisited:
        current = unvisited.pop()
        more = [e for e in (_cause(current), _context(current)) if e is not None]
        if isinstance(current, BaseExceptionGroup):
            more += cast("BaseExceptionGroup[BaseException]", current).exceptions
        for exception in more:
            if id(exception) not in visited_ids:
                visited_ids.add(id(exception))
                unvisited.append(exception)
                yield exception


def _raised_by_signal(error: BaseException) -> bool:
    """Return whether a signal caused the exception itself, by the rules of `interrupts`."""
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
    # the standard library (asyncio.run) raises KeyboardInterrupt only after a signal
    file = code.co_filename
    return file.startswith(_STDLIB) and not file.startswith(_PACKAGES)


def _handles_signal(frame: FrameType) -> bool:
    """Return whether the frame is of a signal handler: consecutive arguments are an int and a
    frame."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    if len(names) < 2:
        return False
    values = frame.f_locals
    return any(
        inspect.isframe(values.get(second)) and isinstance(values.get(first), int)
        for first, second in pairwise(names)
    )


# -- as an exception -------------------------------------------------------------------------------


def _pickle_checked(error: BaseException) -> bytes | None:
    """Return the pickled exception if it can be unpickled; without its cause if only that fails;
    else None."""
    for causes in (True, False):
        for pickler in PICKLERS:
            data = _result_or_none(partial(_try_pickle, error, pickler, causes))
            if data is not None:
                return data
    return None


def _try_pickle(error: BaseException, pickler: type[Any], causes: bool) -> bytes | None:
    """Pickle an exception, with its causes or not. None if another class is unpickled."""
    file = _BoundedFile()
    writer = pickler(file)
    writer.causes = causes
    writer.dump(error)
    data = file.getvalue()
    return data if type(pickle.loads(data)) is type(error) else None


class _BoundedFile(io.BytesIO):
    """A buffer that raises PicklingError above `MAX_PICKLED_BYTES`."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_PICKLED_BYTES:
            raise pickle.PicklingError(f"more than {MAX_PICKLED_BYTES} bytes")
        return super().write(data)


class ExceptionPickler(pickle.Pickler):
    """Pickles an exception without its class's `__reduce__`. A class that was defined inside a
    function can be unpickled only in this process."""

    causes = True

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a local exception class to a reference in this process; other objects by
        `reduced`."""
        if (
            isinstance(obj, type)
            and issubclass(obj, BaseException)
            and "<locals>" in obj.__qualname__
        ):
            _classes[id(obj)] = obj
            return _find_class, (_process_key(), id(obj))
        return reduced(obj, self.causes)


PICKLERS: list[type[Any]] = [ExceptionPickler]
"""The picklers to try, in order. A backend inserts its own first."""


def reduced(obj: Any, causes: bool) -> Any:
    """Return the result of a pickler's `reducer_override` for an exception or a value in one."""
    if isinstance(obj, BaseException):
        reduce: Any = _c_base(type(obj)).__reduce__  # not the method of a user's class
        args, *state = list[Any](reduce(obj))[1:]
        values = dict[str, Any](*state), _cause(obj) if causes else None, _suppresses(obj)
        return _make_empty, (type(obj), args), values, None, None, _set_state
    if isinstance(obj, Tensor) and obj.nbytes > MAX_PICKLED_BYTES:  # refuse before copying it
        raise pickle.PicklingError(f"a tensor of {obj.nbytes} bytes")
    return NotImplemented


def _c_base(cls: type[BaseException]) -> type[Any]:
    """Return the first base class that is written in C. It defines the memory layout."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9


def _make_empty(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    base = _c_base(cls)
    error = base.__new__(cls, *args)
    base.__init__(error, *args)
    return error


def _set_state(
    error: BaseException, values: tuple[dict[str, Any], BaseException | None, bool]
) -> None:
    """Set the attributes and the cause of an exception that was unpickled."""
    state, cause, suppressed = values
    for name, value in state.items():
        BaseException.__setattr__(error, name, value)
    BaseException.__setattr__(error, "__cause__", cause)
    BaseException.__setattr__(error, "__suppress_context__", suppressed)


_classes: WeakValueDictionary[int, type[BaseException]] = WeakValueDictionary()
_process_uuid = uuid.uuid4().hex


def _process_key() -> tuple[str, int]:
    return _process_uuid, os.getpid()  # a forked process has the same uuid


def _find_class(process: tuple[str, int], number: int) -> type[BaseException]:
    """Return a class that was defined inside a function of this process."""
    if process != _process_key():
        raise LookupError("the class is of another process")
    return _classes[number]
