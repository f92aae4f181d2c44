"""A host's program counter, in a small file that outlives it: who died, and doing what.

The controller makes one file per host in a directory of its own; the host maps it and writes the
position in its list before each instruction, and every quarter of a second, from a thread, a
heartbeat. A dead or stopped host is then named by its last instruction.

Invariants: writing costs one store into shared memory, no system call. Five int64: position in
the host's list (-1: between calls), program and number of the run or task (-1: none yet; between
calls, those of the last), heartbeat (monotonic ns,
the same clock in all processes of a machine), process id. A host on another machine, where the file
is not, counts in vain: it can be named, but not its instruction.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_FIELDS = 5
_BEAT_S = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """What the file of a host says. `beat_s` is the age of its last heartbeat."""

    position: int
    program: int
    run: int
    beat_s: float | None

    @property
    def moving(self) -> tuple[int, int, int]:
        return (self.run, self.program, self.position)

    def has_ended(self, run: int) -> bool:
        """Whether the host is done with a run, which is one of its own."""
        return self.run > run or (self.run == run and self.position < 0)


class ProgramCounter:
    """Either side's. `view[0]` is the position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | bytearray = bytearray(8 * _FIELDS)
        if path.exists():
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 8 * _FIELDS)
        self.view = memoryview(self._memory).cast("q")
        self._beats = False

    # -- the host's -----------------------------------------------------------------------------
    def start(self) -> None:
        self.view[4] = os.getpid()
        self._beats = True
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._beats = False

    def begin(self, program: int, run: int) -> None:
        """`program` -1: a task of a spawned actor."""
        self.view[1], self.view[2] = program, run
        self.view[0] = 0

    def end(self) -> None:
        self.view[0] = -1

    def _beat(self) -> None:
        while self._beats:
            self.view[3] = time.monotonic_ns()
            time.sleep(_BEAT_S)

    # -- the controller's -----------------------------------------------------------------------
    @staticmethod
    def make(path: Path) -> ProgramCounter:
        path.write_bytes(b"\xff" * 24 + bytes(8 * (_FIELDS - 3)))
        return ProgramCounter(path)

    def read(self) -> Progress:
        position, program, run, beat, _ = self.view.tolist()
        age = (time.monotonic_ns() - beat) / 1e9 if beat else None
        return Progress(position, program, run, age)

    @property
    def pid(self) -> int:
        """The host's process, 0 if it has not started or is on another machine."""
        return self.view[4]

    def close(self) -> None:
        self.view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        self.path.unlink(missing_ok=True)
