"""When each instruction of a timed run began and ended, and each line of the code that it called.

    stamps = Stamps(functions, device)                # of one engine
    steps = [stamps.timed(site, step) for ...]        # notes begin and end of each
    stamps.built["mlp_F0"]                            # the function, with a stamp after each line
    outputs[rank] |= stamps.taken(rank)               # TIMES f64[3 n], LINES f64[m], seconds
    times_of(outputs[rank])                           # [(index, begin, end), ...]

A generated function `def forward(x): y = relu(x); return (y,)` is run as

    def forward(x):
        __0 = __now(); y = relu(x)
        __1 = __now(); __note((__0, __1,)); return (y,)

Invariants: lines keep their numbers, so that errors name the same of the user's; results are the
same objects. A stamp costs some 50 ns, one of an instruction some 400. On a GPU the current stream
is waited for before each stamp, so that a line lasts as long as its kernels, and a wait as long as
its message; no other stream, for two hosts whose sends cross would wait for each other there.
Functions that are not known line by line (`Function.body`) run as they are.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch

from dtensor.daft.ir.program import Built, Function
from dtensor.daft.verification.pairing import Site

TIMES = "daft.times"
"""Output of a timed run: for each instruction of the rank its index, begin and end, one after the
other, in seconds of the host's monotonic clock."""
LINES = "daft.lines"
"""The same of the lines of each Call in turn: its begin, and the end of each line."""


def stamped(
    function: Function, now: Callable[[], float], note: Callable[[Iterable[float]], None]
) -> Built:
    """The function built so that it notes when each line ended; as it is where none is stamped."""
    body = function.body
    if body is None or not body.lines:
        return function.build()
    names = "".join(f"__{number}," for number in range(len(body.lines) + 1))
    lines = (*map(str, body.lines), f"__note(({names})); {body.returned}")  # comments end lines
    stamps = (f"__{at} = __now(); {line}" for at, line in enumerate(lines))
    twin = replace(
        function,
        source="\n    ".join([body.head, *stamps]) + "\n",
        bindings=(*function.bindings, ("__now", now), ("__note", note)),
    )
    return twin.build()


class Stamps:
    """``functions``: what the engine calls, by name."""

    def __init__(self, functions: Mapping[str, Function], device: torch.device) -> None:
        self._now = partial(drained, device) if device.type == "cuda" else time.monotonic
        self._noted = array("d")  # by the call under way
        self._times: dict[int, array[float]] = defaultdict(lambda: array("d"))
        self._lines: dict[int, array[float]] = defaultdict(lambda: array("d"))
        self.built = {
            name: stamped(function, self._now, self._noted.extend)
            for name, function in functions.items()
        }

    def begin(self) -> None:
        """Forget the run before."""
        for seconds in (self._noted, *self._times.values(), *self._lines.values()):
            del seconds[:]

    def timed(self, site: Site, step: Callable[[], None]) -> Callable[[], None]:
        """A step that notes when it began and ended."""
        rank, index = site
        now, noted = self._now, self._noted
        times, lines = self._times[rank], self._lines[rank]

        def run() -> None:
            begin = now()
            step()
            times.extend((index, begin, now()))
            if noted:
                lines.extend(noted)
                del noted[:]

        return run

    def taken(self, rank: int) -> dict[str, object]:
        """What a rank of the run gives beside its outputs."""
        return {TIMES: _tensor(self._times[rank]), LINES: _tensor(self._lines[rank])}


Times: TypeAlias = list[tuple[int, float, float]]


def times_of(outputs: Mapping[str, object]) -> Times:
    """(index, begin, end) of the instructions of a rank, from what a timed run gave."""
    flat = iter(_numbers(outputs[TIMES]))
    return [(int(index), begin, end) for index, begin, end in zip(flat, flat, flat)]


def lines_of(outputs: Mapping[str, object]) -> list[float]:
    """The stamps of the lines of a rank's calls, one call after the other."""
    return _numbers(outputs[LINES])


def _numbers(seconds: object) -> list[float]:
    return cast(list[float], cast(Any, seconds).tolist())


def _tensor(seconds: array[float]) -> torch.Tensor:
    if not seconds:
        return torch.empty(0, dtype=torch.float64)
    return torch.frombuffer(bytearray(seconds), dtype=torch.float64)


def drained(device: torch.device) -> float:
    """The time when the work of a GPU's current stream is done."""
    torch.cuda.current_stream(device).synchronize()
    return time.monotonic()
