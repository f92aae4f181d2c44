"""Observe a host from outside at one moment: its position in its list, and its thread.

    before = look(0, progress)                # of host 0
    ...                                       # 0.3 s later
    after = look(0, progress)
    cpu_share(before, after)                  # 0.97: it computes

The host itself is not asked, since it may be stopped or hold its GIL. All times are in seconds. On
systems other than Linux the thread is not observed, and counts as using no CPU.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a host reports, and what the controller knows of it.

    `position`: in the host's list; -1 between runs. `program`, `run`: of the current run or the
    last one; -1 if there was none. `beat_s`: the age of the last heartbeat; None before the first.
    `pid`, `thread`: 0 if the host has not started or is on another machine. `running_s`: since its
    run began. `usual_s`: median duration of earlier runs of the program. `standing_s`: since it
    reached the position. `peer`: the rank whose message it waits for, if known. `asked`: the last
    run that the controller has sent to it. `answered`: whether it has ever answered a call.
    `device`: (program, run, position) at which its GPU waits, which may be behind the host.
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
        """The progress of its GPU if that waits for a message, else of the host."""
        if self.device is None:
            return self
        program, run, position = self.device
        return replace(self, program=program, run=run, position=position)

    def has_ended(self, run: int) -> bool:
        """Return whether the host has ended a run in which it takes part."""
        return self.run > run or (self.run == run and self.position < 0)

    def has_passed(self, run: int, position: int) -> bool:
        """Return whether the host is past a position of its list in a run."""
        return self.has_ended(run) or (self.run == run and self.position > position)


@dataclass(frozen=True, slots=True)
class ThreadSeen:
    """A sample of a thread. `state`: the letter in /proc (`man 5 proc`), "" if the thread does not
    exist. `cpu_s`: the CPU time that it has used."""

    state: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """A sample of a host. `moment`: the time of the monotonic clock."""

    host: int
    progress: Progress
    thread: ThreadSeen
    moment: float


def look(host: int, progress: Progress) -> Observation:
    """Return a sample of a host, taken now."""
    return Observation(host, progress, thread(progress.pid, progress.thread), time.monotonic())


def thread(pid: int, number: int) -> ThreadSeen:
    """Read the state and CPU time of a thread from /proc. State "S" on other systems than Linux."""
    if sys.platform != "linux":
        return ThreadSeen("S" if pid else "", 0.0)
    folder = Path(f"/proc/{pid}/task/{number}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        try:  # nanoseconds; some kernels do not have this file
            cpu_s = int((folder / "schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (FileNotFoundError, ProcessLookupError):
        return ThreadSeen("", 0.0)
    return ThreadSeen(fields[0], cpu_s)


def cpu_share(before: Observation, after: Observation) -> float:
    """Return the share of a core that the host's thread used between two samples."""
    seconds = max(after.moment - before.moment, 1e-9)
    return max(0.0, after.thread.cpu_s - before.thread.cpu_s) / seconds
