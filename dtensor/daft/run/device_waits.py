"""Observe where a GPU waits for a peer. A `Wait` blocks only the stream, so the host cannot tell.

    waits = DeviceWaits()
    step = waits.recorded(position, pending.wait)   # the step of a Wait
    waits.begin(program=0, run=7); step()           # the host goes on, and blocks in a later Call
    waits.current_wait()                            # (0, 7, 5): the GPU is in that Wait; or None

Two events of the stream enclose each `Wait`: if the first has completed and the second has not, the
GPU waits for a message. `watch` queries them from a separate thread, because a query may block in
the driver and the heartbeat must not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

DevicePlace: TypeAlias = tuple[int, int, int]
"""(program, run, position in the host's list)."""
POLL_S = 0.25
MAX_WAITS = 4096
"""Number of waits that are recorded. If the host is further ahead, its GPU's wait is not seen."""


@dataclass(frozen=True, slots=True)
class _RecordedWait:
    """A wait, with events of the stream before and after it."""

    place: DevicePlace
    before: torch.cuda.Event
    after: torch.cuda.Event


class DeviceWaits:
    """The waits of a host's GPU. One thread records them, another one queries them."""

    def __init__(self) -> None:
        self._recorded: deque[_RecordedWait] = deque(maxlen=MAX_WAITS)
        self._run: tuple[int, int] = -1, -1

    def begin(self, program: int, run: int) -> None:
        self._run = program, run

    def recorded(self, position: int, wait: Callable[[], None]) -> Callable[[], None]:
        """Return ``wait`` with an event of the current stream before and after it."""

        def recorded_wait() -> None:
            before, after = torch.cuda.Event(), torch.cuda.Event()
            before.record()
            wait()
            after.record()
            self._recorded.append(_RecordedWait((*self._run, position), before, after))

        return recorded_wait

    def current_wait(self) -> DevicePlace | None:
        """Return the wait that the GPU is in; None if it computes or is idle."""
        waits = self._recorded
        while waits:
            oldest = waits[0]
            if not oldest.after.query():
                return oldest.place if oldest.before.query() else None
            if waits and waits[0] is oldest:  # a full deque may have dropped it already
                waits.popleft()
        return None

    def watch(self, report: Callable[[DevicePlace | None], None]) -> None:
        """Start a thread that reports the current wait periodically, until the GPU is lost."""

        def look() -> None:
            """Report the current wait every `POLL_S`; this is the thread's function."""
            while True:
                try:
                    report(self.current_wait())
                except RuntimeError:  # CUDA's context is lost, which the run raises
                    report(None)
                    return
                time.sleep(POLL_S)

        threading.Thread(target=look, name="device waits", daemon=True).start()
