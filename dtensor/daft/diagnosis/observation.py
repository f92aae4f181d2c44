"""What can be seen of a host from outside, at one moment: where it is in its list, and its thread.

    before = look(0, progress)                # of host 0
    ...                                       # 0.3 s later
    after = look(0, progress)
    cpu_share(before, after)                  # 0.97: it computes

Invariants: nothing of a host's is touched, and nothing is asked of it: it may be stopped, or hold
its interpreter's lock. Times are seconds. Linux; elsewhere a thread is not seen, and counts as one
that uses no CPU.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """What a host says of itself: the position in its list (-1: between runs), the program and the
    number of its run, or of the last one (-1: none yet).

    `beat_s`: the age of its last heartbeat; None before the first. `pid`, `thread`: 0 if it has not
    started, or is on another machine. `running_s`: since its run began; `usual_s`: the median of
    what earlier runs of the program took it. `standing_s`: since it came to the position. `peer`:
    the rank whose message it was last seen to wait for, where it stands. `asked`: the last run that
    the controller has called it for; `answered`: whether it has ever answered a call. `device`:
    the program, run and position at which its GPU waits for a message of a peer's, while the host
    may be further on.
    """

    position: int
    program: int
    run: int
    beat_s: float | None
    pid: int = 0
    thread: int = 0
    running_s: float | None = None
    usual_s: float | None = None
    standing_s: float | None = None
    peer: int | None = None
    asked: int = -1
    answered: bool = False
    device: tuple[int, int, int] | None = None

    @property
    def moving(self) -> tuple[object, ...]:
        return (self.run, self.program, self.position, self.device)

    @property
    def of_device(self) -> Progress:
        """Where its GPU waits; where the host is, if it does not."""
        if self.device is None:
            return self
        program, run, position = self.device
        return replace(self, program=program, run=run, position=position)

    def has_ended(self, run: int) -> bool:
        """Whether the host is done with a run, which is one of its own."""
        return self.run > run or (self.run == run and self.position < 0)

    def has_passed(self, run: int, position: int) -> bool:
        """Whether it is past a position of its list in a run."""
        return self.has_ended(run) or (self.run == run and self.position > position)


@dataclass(frozen=True, slots=True)
class ThreadSeen:
    """`state`: a letter, as `man 5 proc` has them; "" if there is no such thread. `cpu_s`: what it
    has used."""

    state: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """A host at a moment, by the monotonic clock."""

    host: int
    progress: Progress
    thread: ThreadSeen
    moment: float


def look(host: int, progress: Progress) -> Observation:
    return Observation(host, progress, thread(progress.pid, progress.thread), time.monotonic())


def thread(pid: int, number: int) -> ThreadSeen:
    if sys.platform != "linux":
        return ThreadSeen("S" if pid else "", 0.0)
    folder = Path(f"/proc/{pid}/task/{number}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        try:  # nanoseconds, which not all kernels count
            cpu_s = int((folder / "schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (FileNotFoundError, ProcessLookupError):
        return ThreadSeen("", 0.0)
    return ThreadSeen(fields[0], cpu_s)


def cpu_share(before: Observation, after: Observation) -> float:
    """Of a core, in between."""
    seconds = max(after.moment - before.moment, 1e-9)
    return max(0.0, after.thread.cpu_s - before.thread.cpu_s) / seconds
