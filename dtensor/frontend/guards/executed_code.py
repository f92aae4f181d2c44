"""Which code a capture runs: the functions of the user's and of libraries, without torch's insides.

    ran = CodeRecorder()
    with ran: loss_fn(model, x)            # ran.codes() holds loss_fn's code, and each forward's
        with ran.paused(): torch.mm(a, b)      # what torch runs inside an op costs nothing

Python's own profiler sees every call at a few tens of nanoseconds; what runs while it is paused is
not seen. From Python 3.12 on it sees other threads too, and ours takes its place
(thread_profile.py). Where another profiler runs (two cannot) nothing is recorded, and `codes` is
None: then all functions that can be reached count as run.

What that code calls and is not code that counts itself, as functions of C and of Python's own
modules, is noted by its name (`ExecutedCode.calls`); `known_functions.py` says what that means.
After a pause Python's profiler has forgotten who was running: then a call has no caller.

Not here: what that code reads (walk.py).
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
    def __init__(self) -> None:
        per_thread = cProfile.Profile if sys.version_info < (3, 12) else ThreadProfile
        self._profile: cProfile.Profile | ThreadProfile | None = per_thread()
        self._running = False

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
        if self._profile is not None:
            try:
                self._profile.enable(subcalls=True, builtins=True)
                self._running = True
            except ValueError:  # from Python 3.12 on, where another profiler runs
                self._profile = None

    def _stop(self) -> None:
        if self._profile is not None and self._running:
            self._profile.disable()
            self._running = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        was, _ = self._running, self._stop()
        try:
            yield
        finally:
            if was:
                self._start()

    def codes(self) -> ExecutedCode | None:
        """The code that counts; None where it was not to be seen."""
        if self._profile is None:
            return None
        entries = self._profile.getstats()
        ran = ExecutedCode.of(e.code for e in entries if isinstance(e.code, CodeType))
        with_caller: Counter[Any] = Counter()
        callers_by_name: dict[str, dict[CodeType | None, None]] = {}
        for entry in entries:
            caller = entry.code if id(entry.code) in ran.codes else None
            for call in entry.calls or ():
                with_caller[_key(call.code)] += call.callcount
                if isinstance(caller, CodeType) and (name := _name(call.code)):
                    callers_by_name.setdefault(name, {})[caller] = None
        for entry in entries:
            if entry.callcount > with_caller[_key(entry.code)] and (name := _name(entry.code)):
                callers_by_name.setdefault(name, {})[None] = None
        return ExecutedCode(
            ran.codes, {name: tuple(callers) for name, callers in callers_by_name.items()}
        )

    def calls(self) -> dict[CodeType, list[CodeType | str]] | None:
        """All code that ran, torch's too but for what runs inside an op, with what it called, of C
        by its text; None where it was not to be seen."""
        if self._profile is None:
            return None
        return {
            entry.code: [call.code for call in entry.calls or ()]
            for entry in self._profile.getstats()
            if isinstance(entry.code, CodeType)
        }

    def without_caller(self) -> set[str]:
        """The functions of C, by their text, that were called when the profiler had forgotten by
        whom."""
        if self._profile is None:
            return set()
        entries = self._profile.getstats()
        with_caller: Counter[Any] = Counter()
        for call in (call for entry in entries for call in entry.calls or ()):
            with_caller[_key(call.code)] += call.callcount
        missing = (e.code for e in entries if e.callcount > with_caller[_key(e.code)])
        return {code for code in missing if isinstance(code, str)}


def _key(code: CodeType | str) -> object:
    return code if isinstance(code, str) else id(code)


_OF_C = (
    re.compile(r"<(?:method|slot wrapper) '(?P<name>\w+)' of '(?P<of>[^']+)' objects>"),
    re.compile(r"<built-in method (?P<name>[\w.]+)(?: of .*)?>"),
)


def _name(code: CodeType | str) -> str:
    """Of what is called: "time.time", "pathlib.Path.read_text"; "" for code that counts."""
    if isinstance(code, CodeType):
        return "" if is_followed(code) else _name_of(code.co_filename, code.co_qualname)
    return _name_in_c(code)


@cache
def _name_of(file: str, words: str) -> str:
    return f"{module_of_file(file)}.{words}"


@cache
def _name_in_c(text: str) -> str:
    for pattern in _OF_C:
        if (match := pattern.fullmatch(text)) is not None:
            of = match.groupdict().get("of")
            return f"{of}.{match['name']}" if of else match["name"]
    return ""  # a function of a library that was given another one's methods


def constant(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``function(*args, **kwargs)`` gives, stated to be the same at each call of a program.

    A captured step runs this Python once, and what it reads is compared before each later call, or
    a warning says that it cannot be. What ``function`` reads, and all that it calls, is neither
    compared nor warned of: `table = dt.constant(Path("table.txt").read_text)`. Outside a capture it
    is a plain call. Its tensors are constants of the step.

    Raises:
        Exception: what ``function`` raises.
    """
    recorder: CodeRecorder | None = getattr(_now, "recorder", None)
    if recorder is None:
        return function(*args, **kwargs)
    with recorder.paused():
        return function(*args, **kwargs)
