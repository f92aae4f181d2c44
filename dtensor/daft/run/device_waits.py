"""Where a GPU waits for a peer, which its host need not see: a `Wait` makes the stream wait alone.

    waits = DeviceWaits()
    step = waits.noted(position, pending.wait)      # the step of a Wait
    waits.begin(program=0, run=7); step()           # the host goes on, and blocks in a later Call
    waits.standing()                                # (0, 7, 5): the GPU is in that Wait; or None

A host that reads a value of its GPU spins, as one that computes does. So what it waits for is told
by two events of the stream, before and after each `Wait`: where the first has come and the second
has not, the GPU waits for a message. `watch` looks from a thread of its own, as a query may block
where the driver does, and the heartbeat must not.
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
"""A program, its run, and the position in the host's list."""
LOOK_S = 0.25
MOST = 4096
"""Waits that are remembered: the GPU of a host that is ahead by more is not seen to wait."""


@dataclass(frozen=True, slots=True)
class _Seen:
    place: DevicePlace
    before: torch.cuda.Event
    after: torch.cuda.Event


class DeviceWaits:
    """The waits of a host's GPU. One thread notes them, another one looks."""

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque(maxlen=MOST)
        self._of: tuple[int, int] = -1, -1

    def begin(self, program: int, run: int) -> None:
        self._of = program, run

    def noted(self, position: int, wait: Callable[[], None]) -> Callable[[], None]:
        """``wait``, which makes the current stream wait, with an event on each side."""

        def noted_wait() -> None:
            before, after = torch.cuda.Event(), torch.cuda.Event()
            before.record()
            wait()
            after.record()
            self._seen.append(_Seen((*self._of, position), before, after))

        return noted_wait

    def standing(self) -> DevicePlace | None:
        """The wait that the GPU is in; None where it computes or has nothing to do."""
        seen = self._seen
        while seen:
            first = seen[0]
            if not first.after.query():
                return first.place if first.before.query() else None
            if seen and seen[0] is first:  # a full deque drops its first
                seen.popleft()
        return None

    def watch(self, tell: Callable[[DevicePlace | None], None]) -> None:
        """Tell again and again, from a thread, until the GPU cannot be asked any more."""

        def look() -> None:
            while True:
                try:
                    tell(self.standing())
                except RuntimeError:  # CUDA's context is lost, which the run raises
                    tell(None)
                    return
                time.sleep(LOOK_S)

        threading.Thread(target=look, name="device waits", daemon=True).start()
