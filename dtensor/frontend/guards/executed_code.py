"""Record which code a capture runs: the functions of the user and of libraries.

    recorder = CodeRecorder()
    with recorder: loss_fn(model, x)           # codes() has the code of loss_fn and each forward
        with recorder.paused(): torch.mm(a, b)     # code inside an op is not recorded

Python's profiler adds a few tens of nanoseconds to each call. From Python 3.12 on it would record
other threads too, so `ThreadProfile` replaces it. If another profiler is active, nothing can be
recorded: `codes` returns None, and all functions that can be reached count as run.

Calls of other functions (in C, in Python's own modules) are recorded by name. After a pause
Python's profiler does not know which code was running: the next call has no caller.
"""

from __future__ import annotations

import cProfile
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar

from dtensor.frontend.guards.code_names import is_followed
from dtensor.frontend.guards.thread_profile import ThreadProfile
from dtensor.frontend.source import module_of_file

P = ParamSpec("P")
R = TypeVar("R")
_now = threading.local()


@dataclass(frozen=True, slots=True)
class ExecutedCode:
    """The followed code that a capture ran, by id. Holding it keeps the ids from being reused.

    ``calls``: each function outside of that code that was called, by name, with the code objects
    that called it; None stands for a caller that the profiler did not see.
    """

    codes: Mapping[int, CodeType]
    calls: Mapping[str, Sequence[CodeType | None]] = field(default_factory=dict)

    @staticmethod
    def of(codes: Iterable[CodeType]) -> ExecutedCode:
        return ExecutedCode({id(code): code for code in codes if is_followed(code)})


class CodeRecorder:
    """Records the code that the current thread runs, from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:
        profile_class = cProfile.Profile if sys.version_info < (3, 12) else ThreadProfile
        self._profile: cProfile.Profile | ThreadProfile | None = profile_class()
        self._is_enabled = False

    def __enter__(self) -> CodeRecorder:
        if sys.getprofile() is not None:
            self._profile = None
        self._outer = getattr(_now, "recorder", None)
        _now.recorder = self
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        _now.recorder = self._outer

    def _start(self) -> None:
        """Enable the profiler; without it (another profiler is active) nothing is recorded."""
        if self._profile is not None:
            try:
                self._profile.enable(subcalls=True, builtins=True)
                self._is_enabled = True
            except ValueError:  # from Python 3.12 on, if another profiler is active
                self._profile = None

    def _stop(self) -> None:
        if self._profile is not None and self._is_enabled:
            self._profile.disable()
            self._is_enabled = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_enabled, _ = self._is_enabled, self._stop()
        try:
            yield
        finally:
            if was_enabled:
                self._start()

    def codes(self) -> ExecutedCode | None:
        """Return the code objects that ran and whose reads are guarded, with their calls; None if
        another profiler was active."""
        if self._profile is None:
            return None
        entries = self._profile.getstats()
        codes = ExecutedCode.of(e.code for e in entries if isinstance(e.code, CodeType)).codes
        calls_with_caller: Counter[Any] = Counter()
        callers_by_name: dict[str, dict[CodeType | None, None]] = {}
        for entry in entries:
            caller = entry.code if id(entry.code) in codes else None
            for call in entry.calls or ():
                calls_with_caller[_key(call.code)] += call.callcount
                if isinstance(caller, CodeType) and (name := _name(call.code)):
                    callers_by_name.setdefault(name, {})[caller] = None
        for entry in entries:
            has_unknown_caller = entry.callcount > calls_with_caller[_key(entry.code)]
            if has_unknown_caller and (name := _name(entry.code)):
                callers_by_name.setdefault(name, {})[None] = None
        return ExecutedCode(
            codes, {name: tuple(callers) for name, callers in callers_by_name.items()}
        )

    def calls(self) -> dict[CodeType, list[CodeType | str]] | None:
        """Return all code that ran outside of ops, with its calls: code objects, or the profiler's
        texts for functions in C. Return None if another profiler was active."""
        if self._profile is None:
            return None
        return {
            entry.code: [call.code for call in entry.calls or ()]
            for entry in self._profile.getstats()
            if isinstance(entry.code, CodeType)
        }

    def c_functions_without_caller(self) -> set[str]:
        """Return the functions in C, as the profiler's texts, of which a call has no caller."""
        if self._profile is None:
            return set()
        entries = self._profile.getstats()
        calls_with_caller: Counter[Any] = Counter()
        for call in (call for entry in entries for call in entry.calls or ()):
            calls_with_caller[_key(call.code)] += call.callcount
        codes = (e.code for e in entries if e.callcount > calls_with_caller[_key(e.code)])
        return {code for code in codes if isinstance(code, str)}


def _key(code: CodeType | str) -> object:
    """Return a key of code by identity: equal code objects of two functions are two keys."""
    return code if isinstance(code, str) else id(code)


_C_FUNCTION_TEXTS = (
    re.compile(r"<(?:method|slot wrapper) '(?P<name>\w+)' of '(?P<class>[^']+)' objects>"),
    re.compile(r"<built-in method (?P<name>[\w.]+)(?: of .*)?>"),
)


def _name(code: CodeType | str) -> str:
    """Return the name of a function: "time.time", "pathlib.Path.read_text". Return "" for followed
    code, and for a function in C whose text has no name."""
    if isinstance(code, CodeType):
        return "" if is_followed(code) else _python_name(code.co_filename, code.co_qualname)
    return _c_name(code)


@cache
def _python_name(file: str, qualified_name: str) -> str:
    return f"{module_of_file(file)}.{qualified_name}"


@cache
def _c_name(text: str) -> str:
    """Return the name of a C function from its text in the profile; "" for another text."""
    for pattern in _C_FUNCTION_TEXTS:
        if (match := pattern.fullmatch(text)) is not None:
            class_name = match.groupdict().get("class")
            return f"{class_name}.{match['name']}" if class_name else match["name"]
    return ""


def constant(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``function(*args, **kwargs)``, stated to be the same at each call of a program.

    A captured step runs its Python once. The state that this Python reads is compared before each
    later call, or a warning names it. State that ``function`` reads is neither compared nor warned
    of: `table = dt.constant(Path("table.txt").read_text)`. Outside a capture this is a plain call.
    Tensors in the result are constants of the step.

    Raises:
        Exception: whatever ``function`` raises.
    """
    recorder: CodeRecorder | None = getattr(_now, "recorder", None)
    if recorder is None:
        return function(*args, **kwargs)
    with recorder.paused():
        return function(*args, **kwargs)
