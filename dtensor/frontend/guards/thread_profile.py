"""Which code one thread runs, from Python 3.12 on.

    profile = ThreadProfile()
    profile.enable(); f(x); profile.disable()
    profile.getstats()      # for f's code, and all code that it ran: what that called

From Python 3.12 on `cProfile` sees all threads: it would take what a data loader's thread runs for
the program's. This one leaves out the other threads. Its entries have what `CodeRecorder` reads of
cProfile's: `code`, `callcount` and `calls`, with cProfile's texts for functions of C. Two things
differ: what a function of C calls is called by the code that called that function, and a caller is
known after a pause, too.

Not here: what the entries mean (executed_code.py).
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from threading import get_ident
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, ModuleType
from typing import Any

_OF_C = (BuiltinFunctionType, MethodDescriptorType)


@dataclass(frozen=True, slots=True)
class Call:
    """What some code called, and how often: code, or the text of a function of C."""

    code: CodeType | str
    callcount: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Code that ran, or the text of a function of C; how often, and what it called."""

    code: CodeType | str
    callcount: int
    calls: tuple[Call, ...]


class ThreadProfile:
    """Of the thread that enables it. Not beside another one, nor beside cProfile."""

    def __init__(self) -> None:
        self._calls: defaultdict[CodeType | None, Counter[Any]] = defaultdict(Counter)
        self._thread = 0

    def enable(self, subcalls: bool = True, builtins: bool = True) -> None:
        """ValueError where another profiler runs."""
        if sys.version_info >= (3, 12):
            own, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
            sys.monitoring.use_tool_id(own, "dtensor")
            self._thread = get_ident()
            for event in (events.PY_START, events.PY_RESUME):
                sys.monitoring.register_callback(own, event, self._started)
            sys.monitoring.register_callback(own, events.CALL, self._called)
            sys.monitoring.set_events(own, events.PY_START | events.PY_RESUME | events.CALL)

    def disable(self) -> None:
        if sys.version_info >= (3, 12):
            own, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
            sys.monitoring.set_events(own, events.NO_EVENTS)
            for event in (events.PY_START, events.PY_RESUME, events.CALL):
                sys.monitoring.register_callback(own, event, None)
            sys.monitoring.free_tool_id(own)

    def getstats(self) -> list[Entry]:
        """Of all code that ran, and all functions of C that were called."""
        total: Counter[CodeType | str] = Counter()
        by_caller: dict[CodeType | None, Counter[CodeType | str]] = {}
        for caller, called in self._calls.items():
            own = by_caller[caller] = Counter()
            for key, count in called.items():
                own[_text(key)] += count
            total += own
        return [
            Entry(code, count, tuple(Call(*call) for call in by_caller.get(code, {}).items()))
            if isinstance(code, CodeType)
            else Entry(code, count, ())
            for code, count in total.items()
        ]

    def _started(self, code: CodeType, offset: int) -> None:
        if get_ident() == self._thread:
            caller = sys._getframe(1).f_back
            self._calls[None if caller is None else caller.f_code][code] += 1

    def _called(self, code: CodeType, offset: int, called: Any, first: object) -> None:
        if type(called) in _OF_C and get_ident() == self._thread:
            own = getattr(called, "__self__", None)
            bound = own is not None and type(own) is not ModuleType  # objects are not kept alive
            self._calls[code][(type(own), called.__name__) if bound else called] += 1


def _text(key: Any) -> CodeType | str:
    """As cProfile names a function of C; code as it is."""
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
