"""The program counter of a host, in a small file that outlives the host.

    counter = ProgramCounter.make(path)        # in the controller
    counter = ProgramCounter(path)             # in the host, which maps the file
    counter.start(); counter.begin(7, 42)      # run 42 of program 7
    counter.view[0] = 3                        # instruction 3 of its list
    progress_of(path.read_bytes()).position    # 3, in any process that may read the file

A thread of the host writes a heartbeat every quarter of a second, and since when the host is at its
instruction. Invariants: recording an instruction is one store into shared memory. Fields are int64,
times in monotonic ns; each field has one writer. The file of a host on another machine is not
shared.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from dtensor.daft.diagnosis.observation import Progress as Progress  # read from a counter

_FIELDS = (
    "position",  # of the present instruction in the host's list; -1 between calls
    "program",  # of the present or last run; -1 before the first, and for a task
    "run",  # the number of the present or last run
    "beat",  # the time of the last heartbeat
    "pid",
    "thread",  # the thread that runs instructions
    "began",  # when the run began
    "usual",  # the median duration of the program's runs; 0 before the first
    "since",  # when the heartbeat first saw `seen_position` and `seen_run`
    "seen_position",
    "seen_run",
    "peer",  # the rank that the host waited for, at `peer_position` in `peer_run`
    "peer_position",
    "peer_run",
    "asked",  # written by the controller: the last run that it has called this host for
    "answered",  # written by the controller: 1 if the host has ever answered
    "device_program",  # where the host's GPU waits for a message; -1 if it does not
    "device_run",
    "device_position",
)
_AT = {name: number for number, name in enumerate(_FIELDS)}
_BEAT, _PID, _THREAD = _AT["beat"], _AT["pid"], _AT["thread"]
_BEGAN, _USUAL, _SINCE, _SEEN = _AT["began"], _AT["usual"], _AT["since"], _AT["seen_position"]
_DEVICE = _AT["device_program"]
_PEER, _ASKED, _ANSWERED = _AT["peer"], _AT["asked"], _AT["answered"]
_NONE_YET = (
    *("position", "program", "run", "seen_position", "seen_run", "peer", "asked"),
    *("device_program", "device_run", "device_position"),
)
_BYTES = 8 * len(_FIELDS)
_BEAT_S = 0.25
MEASURED = 9  # how many of a program's last runs the median is of
MAX_PROGRAMS = 256  # how many programs' runs are measured


class BegunRun(NamedTuple):
    """A run that has begun. ``began``: when, in monotonic ns."""

    program: int
    run: int
    began: int


class ProgramCounter:
    """The program counter of a host. `view[0]` is the position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        if path.exists():
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _BYTES)
        self.view: memoryview = memoryview(self._memory).cast("q")
        self._beats = False
        self._durations: dict[int, deque[int]] = {}  # by program, ns
        self._lock = threading.Lock()  # a run on a GPU ends while another one may begin

    # -- in the host ----------------------------------------------------------------------------
    def start(self) -> None:
        """Start the heartbeat. Called by the thread that will run instructions."""
        self.view[_THREAD] = threading.get_native_id()
        self.view[_SINCE] = time.monotonic_ns()
        self.view[_PID] = os.getpid()
        self._beats = True
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._beats = False

    def begin(self, program: int, run: int) -> BegunRun:
        """Record that a run begins. `program`: -1 for a task of a spawned actor."""
        view = self.view
        with self._lock:
            durations = self._durations.get(program)
            view[_USUAL] = sorted(durations)[len(durations) // 2] if durations else 0
            view[1], view[2] = program, run
            began = view[_BEGAN] = time.monotonic_ns()
            view[0] = 0
        return BegunRun(program, run, began)

    def end(self, measured: BegunRun | None = None) -> None:
        """Record that the current run has ended, or the run ``measured``, whose duration counts for
        its program's median. If another run has begun meanwhile, the host stays in that run."""
        view = self.view
        with self._lock:
            if measured is None:
                view[0] = -1
                return
            if view[2] == measured.run:
                view[0] = -1
            durations = self._durations.get(measured.program)
            if durations is None:
                durations = self._durations[measured.program] = deque(maxlen=MEASURED)
                if len(self._durations) > MAX_PROGRAMS:
                    del self._durations[next(iter(self._durations))]
            durations.append(time.monotonic_ns() - measured.began)

    def start_over(self) -> None:
        """Reset the counter, before runs are repeated."""
        self.view[0] = self.view[1] = self.view[2] = -1

    def record_wait(self, rank: int) -> None:
        """Record that the host waits for a message of this rank at its present instruction."""
        view = self.view
        view[_PEER], view[_PEER + 1], view[_PEER + 2] = rank, view[0], view[2]

    def device_waits(self, position_of_wait: tuple[int, int, int] | None) -> None:
        """Record where the host's GPU waits for a message (program, run, position)."""
        program, run, position = position_of_wait or (-1, -1, -1)
        view = self.view
        view[_DEVICE + 2] = -1  # so that no reader mixes the old and new place
        view[_DEVICE], view[_DEVICE + 1], view[_DEVICE + 2] = program, run, position

    def _beat(self) -> None:
        """Record the time, and when the position last changed, every `_BEAT_S`; this is the
        heartbeat thread's function."""
        view = self.view
        while self._beats:
            now = time.monotonic_ns()
            if view[_SEEN] != view[0] or view[_SEEN + 1] != view[2]:
                view[_SINCE] = now
                view[_SEEN], view[_SEEN + 1] = view[0], view[2]
            view[_BEAT] = now
            time.sleep(_BEAT_S)

    # -- in the controller ----------------------------------------------------------------------
    @staticmethod
    def make(path: Path) -> ProgramCounter:
        """Create the file of a host's counter."""
        fields = [-1 if name in _NONE_YET else 0 for name in _FIELDS]
        path.write_bytes(struct.pack(f"{len(_FIELDS)}q", *fields))
        return ProgramCounter(path)

    def read(self) -> Progress:
        return progress_of(self._memory)

    @property
    def pid(self) -> int:
        """The pid of the host, 0 if it has not started or is on another machine."""
        return self.view[_PID]

    @property
    def answered(self) -> bool:
        return bool(self.view[_ANSWERED])

    @answered.setter
    def answered(self, answered: bool) -> None:
        self.view[_ANSWERED] = answered

    def asks(self, run: int) -> None:
        """Record that the host was called for a run."""
        self.view[_ASKED] = run

    def close(self) -> None:
        self.view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        self.path.unlink(missing_ok=True)


def progress_of(data: bytes | bytearray | mmap.mmap) -> Progress:
    """Return the progress of a host, given the bytes of its counter's file."""
    values = struct.unpack_from(f"{len(_FIELDS)}q", data)
    field = dict(zip(_FIELDS, values, strict=True))
    now = time.monotonic_ns()
    position, run, beat = field["position"], field["run"], field["beat"]
    current = (position, run)
    beat_s = max(0.0, (now - beat) / 1e9) if beat else None
    # a position that the heartbeat has not seen was reached after the last heartbeat
    was_seen = current == (field["seen_position"], field["seen_run"])
    standing_s = max(0.0, (now - field["since"]) / 1e9) if was_seen and beat else beat_s
    device = field["device_program"], field["device_run"], field["device_position"]
    running = position >= 0 and field["began"]
    return Progress(
        position=position,
        program=field["program"],
        run=run,
        beat_s=beat_s,
        pid=field["pid"],
        thread=field["thread"],
        running_s=max(0.0, (now - field["began"]) / 1e9) if running else None,
        usual_s=field["usual"] / 1e9 if field["usual"] else None,
        standing_s=standing_s,
        peer=field["peer"] if current == (field["peer_position"], field["peer_run"]) else None,
        asked=field["asked"],
        answered=bool(field["answered"]),
        device=device if device[2] >= 0 else None,
    )


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on (state, parent, ..., see `man 5
    proc`); "X" and zeros if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", *"0" * 14]
    return text.rpartition(")")[2].split()
