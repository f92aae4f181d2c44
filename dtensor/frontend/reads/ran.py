"""Which code a capture runs: the functions of the user's and of libraries, without torch's insides.

    ran = CodeRecorder()
    with ran: loss_fn(model, x)            # ran.codes() holds loss_fn's code, and each forward's
        with ran.paused(): torch.mm(a, b)      # what torch runs inside an op costs nothing

Python's own profiler sees every call at a few tens of nanoseconds; what runs while it is paused is
not seen. Where another profiler runs (two cannot) nothing is recorded, and `codes` is None: then
all functions that can be reached count as run.

A clock, a file or the system's random numbers that the user's own code reads are seen as well
(`outside`): what they give cannot be compared, so it is said.

Not here: what that code reads (walk.py).
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, TracebackType

from dtensor.frontend.reads.walk import RanCode, is_own

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_OUTSIDE: dict[object, str] = {
    **{f"<built-in method time.{name}{ns}>": "the clock" for name in _CLOCKS for ns in ("", "_ns")},
    "<built-in method now>": "the clock",
    "<built-in method today>": "the clock",
    "<built-in method utcnow>": "the clock",
    "<built-in method _io.open>": "a file",
    "<built-in method io.open>": "a file",
    "<built-in method posix.urandom>": "the system's random numbers",
}


class CodeRecorder:
    def __init__(self) -> None:
        self._profile: cProfile.Profile | None = cProfile.Profile()
        self._running = False

    def __enter__(self) -> CodeRecorder:
        if sys.getprofile() is not None:
            self._profile = None
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

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

    def codes(self) -> RanCode | None:
        """The code that counts; None where it was not to be seen."""
        if self._profile is None:
            return None
        entries = self._profile.getstats()
        return RanCode.of(e.code for e in entries if isinstance(e.code, CodeType))

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

    def outside(self) -> list[tuple[str, CodeType]]:
        """What the user's own code read that is not Python's state, and where."""
        if self._profile is None:
            return []
        return [
            (_OUTSIDE[call.code], entry.code)
            for entry in self._profile.getstats()
            if isinstance(entry.code, CodeType) and is_own(entry.code)
            for call in entry.calls or ()
            if call.code in _OUTSIDE
        ]
