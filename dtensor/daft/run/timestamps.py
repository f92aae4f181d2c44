"""Measure when each instruction of a run, and each line of the code it calls, begins and ends.

    stamps = Stamps(functions, device)                # for one engine
    steps = [stamps.timed(site, step) for ...]        # record begin and end of each step
    outputs[rank] |= stamps.outputs_of(rank)          # TIMES f64[3 n], LINES f64[m], in seconds
    times_of(outputs[rank])                           # [(index, begin, end), ...]

A function with the line `y = relu(x)` runs as `__0 = __now(); y = relu(x)` and so on: line numbers
stay, so errors still name the user's lines. A stamp costs about 50 ns, an instruction's about 400.
On a GPU each stamp first waits for the current stream, so a line lasts as long as its kernels. It
does not wait for other streams, where two hosts whose sends cross would wait for each other.
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
"""Output of a timed run: index, begin, end of each instruction, flattened, in seconds of the host's
monotonic clock."""
LINES = "daft.lines"
"""Output of a timed run: for each Call in turn, its begin and the end of each of its lines."""


def with_line_stamps(
    function: Function, now: Callable[[], float], note: Callable[[Iterable[float]], None]
) -> Built:
    """Build the function so that it reports its begin and the end of each line to ``note``. A
    function without `Function.body` is built unchanged."""
    body = function.body
    if body is None or not body.lines:
        return function.build()
    names = "".join(f"__{number}," for number in range(len(body.lines) + 1))
    lines = (
        *map(str, body.lines),
        f"__note(({names})); {body.returned}",
    )  # stamps precede lines, which may end in comments
    stamps = (f"__{index} = __now(); {line}" for index, line in enumerate(lines))
    twin = replace(
        function,
        source="\n    ".join([body.head, *stamps]) + "\n",
        bindings=(*function.bindings, ("__now", now), ("__note", note)),
    )
    return twin.build()


class Stamps:
    """The measured times of one engine's runs. ``functions``: the functions that it calls, by name.
    ``built``: these functions with a stamp after each line."""

    def __init__(self, functions: Mapping[str, Function], device: torch.device) -> None:
        self._clock = partial(time_when_idle, device) if device.type == "cuda" else time.monotonic
        self._line_times = array("d")  # of the current call
        self._times: dict[int, array[float]] = defaultdict(lambda: array("d"))
        self._lines: dict[int, array[float]] = defaultdict(lambda: array("d"))
        self.built = {
            name: with_line_stamps(function, self._clock, self._line_times.extend)
            for name, function in functions.items()
        }

    def begin(self) -> None:
        """Begin a run: forget the times of the last one."""
        for seconds in (self._line_times, *self._times.values(), *self._lines.values()):
            del seconds[:]

    def timed(self, site: Site, step: Callable[[], None]) -> Callable[[], None]:
        """Return a step that records when it begins and ends."""
        rank, index = site
        now, noted = self._clock, self._line_times
        times, lines = self._times[rank], self._lines[rank]

        def run() -> None:
            """Run the step between two time stamps, and collect the stamps of its lines."""
            begin = now()
            step()
            times.extend((index, begin, now()))
            if noted:
                lines.extend(noted)
                del noted[:]

        return run

    def outputs_of(self, rank: int) -> dict[str, object]:
        """Return the additional outputs of a rank: TIMES and LINES."""
        return {TIMES: _as_tensor(self._times[rank]), LINES: _as_tensor(self._lines[rank])}


Times: TypeAlias = list[tuple[int, float, float]]


def times_of(outputs: Mapping[str, object]) -> Times:
    """Return (index, begin, end) of each instruction from the outputs of a timed run's rank."""
    flat = iter(_as_list(outputs[TIMES]))
    return [(int(index), begin, end) for index, begin, end in zip(flat, flat, flat)]


def lines_of(outputs: Mapping[str, object]) -> list[float]:
    """Return the line stamps of a rank's calls, one call after the other."""
    return _as_list(outputs[LINES])


def _as_list(seconds: object) -> list[float]:
    return cast(list[float], cast(Any, seconds).tolist())


def _as_tensor(seconds: array[float]) -> torch.Tensor:
    if not seconds:
        return torch.empty(0, dtype=torch.float64)
    return torch.frombuffer(bytearray(seconds), dtype=torch.float64)


def time_when_idle(device: torch.device) -> float:
    """Wait for the GPU's current stream, and return the time."""
    torch.cuda.current_stream(device).synchronize()
    return time.monotonic()
