"""A profiler of one thread, which replaces cProfile from Python 3.12 on.

    profile = ThreadProfile()
    profile.enable(); f(x); profile.disable()
    profile.getstats()      # an entry for the code of f, and for all code and functions that it ran

From Python 3.12 on cProfile records all threads, so code of a data loader's thread would count as
the program's. Entries have those fields of cProfile's entries that `CodeRecorder` reads, and
cProfile's texts for functions in C. Two things differ: if a function in C calls code, the caller is
the code that called this function; and the caller is known after a pause, too.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from threading import get_ident
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, ModuleType
from typing import Any

_C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType)


@dataclass(frozen=True, slots=True)
class Call:
    """A function that some code called, and how often: its code, or the text of one in C."""

    code: CodeType | str
    callcount: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A function that ran: its code, or the text of one in C; how often it ran; its calls."""

    code: CodeType | str
    callcount: int
    calls: tuple[Call, ...]


class ThreadProfile:
    """Profiles the thread that calls `enable`. Only one profiler can be active in a process."""

    def __init__(self) -> None:
        self._calls: defaultdict[CodeType | None, Counter[Any]] = defaultdict(Counter)
        self._thread = 0

    def enable(self, subcalls: bool = True, builtins: bool = True) -> None:
        """Start to record. Raises ValueError if another profiler is active."""
        if sys.version_info >= (3, 12):
            tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
            sys.monitoring.use_tool_id(tool, "dtensor")
            self._thread = get_ident()
            for event in (events.PY_START, events.PY_RESUME):
                sys.monitoring.register_callback(tool, event, self._record_start)
            sys.monitoring.register_callback(tool, events.CALL, self._record_call)
            sys.monitoring.set_events(tool, events.PY_START | events.PY_RESUME | events.CALL)

    def disable(self) -> None:
        if sys.version_info >= (3, 12):
            tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
            sys.monitoring.set_events(tool, events.NO_EVENTS)
            for event in (events.PY_START, events.PY_RESUME, events.CALL):
                sys.monitoring.register_callback(tool, event, None)
            sys.monitoring.free_tool_id(tool)

    def getstats(self) -> list[Entry]:
        """Return an entry for each code object and each function in C that was called."""
        total: Counter[CodeType | str] = Counter()
        by_caller: dict[CodeType | None, Counter[CodeType | str]] = {}
        for caller, callees in self._calls.items():
            counts = by_caller[caller] = Counter()
            for key, count in callees.items():
                counts[_text(key)] += count
            total += counts
        return [
            Entry(code, count, tuple(Call(*call) for call in by_caller.get(code, {}).items()))
            if isinstance(code, CodeType)
            else Entry(code, count, ())
            for code, count in total.items()
        ]

    def _record_start(self, code: CodeType, offset: int) -> None:
        if get_ident() == self._thread:
            caller = sys._getframe(1).f_back
            self._calls[None if caller is None else caller.f_code][code] += 1

    def _record_call(self, code: CodeType, offset: int, callee: Any, argument: object) -> None:
        """Count a call of a C function on this thread, by the calling code."""
        if type(callee) in _C_FUNCTIONS and get_ident() == self._thread:
            owner = getattr(callee, "__self__", None)
            is_method = owner is not None and type(owner) is not ModuleType
            # A method is recorded by its class and name, so that its object is not kept alive.
            self._calls[code][(type(owner), callee.__name__) if is_method else callee] += 1


def _text(key: Any) -> CodeType | str:
    """Return cProfile's text for a function in C; return code unchanged."""
    if isinstance(key, CodeType):
        return key
    if isinstance(key, tuple):
        kind, name = key
        for base in kind.__mro__:
            if isinstance(method := vars(base).get(name), MethodDescriptorType):
                return repr(method)
        return f"<built-in method {name}>"
    if isinstance(key, MethodDescriptorType):
        return repr(key)
    return f"<built-in method {key.__module__}.{key.__name__}>"
