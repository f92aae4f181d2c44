"""A host's program counter, in a small file that outlives it: who died, and doing what.

The controller makes one file per host in the launch's folder; the host maps it and writes the
position in its list before each instruction, and every quarter of a second, from a thread, a
heartbeat. A dead or stopped host is then named by its last instruction, and anybody who may read
the file sees where the host stands, and since when.

Invariants: writing costs one store into shared memory, no system call. `_FIELDS` int64, times in
monotonic ns, the same clock in all processes of a machine; each is written by one side alone, and a
reader sees each whole, if not all of one moment. Since when a host stands where it is, the
heartbeat notes, and no instruction. A host on another machine, where the file is not, counts in
vain: it can be named, but not its instruction.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from pathlib import Path

from dtensor.daft.diagnosis.observation import Progress as Progress  # what is read of it

_FIELDS = (
    "position",  # in the host's list; -1: between calls
    "program",  # of the run or task, between calls of the last; -1: none yet, or a task
    "run",  # its number
    "beat",
    "pid",
    "thread",  # that runs instructions
    "began",  # the run
    "usual",  # ns, the median of what runs of the program took; 0: none yet
    "since",  # when the heartbeat first saw the next two
    "seen_position",
    "seen_run",
    "peer",  # the rank whose message was awaited, when the next two were
    "peer_position",
    "peer_run",
    "asked",  # the controller's: the last run that it has called this host for
    "answered",  # the controller's: 1 if the host has ever answered
    "device_program",  # where the host's GPU waits for a message; -1: nowhere
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
MEASURED = 9  # the last runs of a program, of which the median is taken
MOST_PROGRAMS = 256  # of which runs are measured


class ProgramCounter:
    """Either side's. `view[0]` is the position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        if path.exists():
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _BYTES)
        self.view: memoryview = memoryview(self._memory).cast("q")
        self._beats = False
        self._took: dict[int, deque[int]] = {}  # by program, ns

    # -- the host's -----------------------------------------------------------------------------
    def start(self) -> None:
        """By the thread that will run instructions."""
        self.view[_THREAD] = threading.get_native_id()
        self.view[_SINCE] = time.monotonic_ns()
        self.view[_PID] = os.getpid()
        self._beats = True
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._beats = False

    def begin(self, program: int, run: int) -> None:
        """`program` -1: a task of a spawned actor."""
        view = self.view
        took = self._took.get(program)
        view[_USUAL] = sorted(took)[len(took) // 2] if took else 0
        view[1], view[2] = program, run
        view[_BEGAN] = time.monotonic_ns()
        view[0] = 0

    def end(self, *, measured: bool = False) -> None:
        """`measured`: what the run took counts for later ones of its program."""
        view = self.view
        view[0] = -1
        if measured:
            took = self._took.get(view[1])
            if took is None:
                took = self._took[view[1]] = deque(maxlen=MEASURED)
                if len(self._took) > MOST_PROGRAMS:
                    del self._took[next(iter(self._took))]
            took.append(time.monotonic_ns() - view[_BEGAN])

    def start_over(self) -> None:
        """Runs come again that have been here before."""
        self.view[0] = self.view[1] = self.view[2] = -1

    def awaits(self, rank: int) -> None:
        """Where the host stands it has waited for a message of this rank's for a while."""
        view = self.view
        view[_PEER], view[_PEER + 1], view[_PEER + 2] = rank, view[0], view[2]

    def device_waits(self, place: tuple[int, int, int] | None) -> None:
        """Where the host's GPU waits for a message of a peer's: program, run and position."""
        program, run, position = place or (-1, -1, -1)
        view = self.view
        view[_DEVICE + 2] = -1  # no reader takes a half of it
        view[_DEVICE], view[_DEVICE + 1], view[_DEVICE + 2] = program, run, position

    def _beat(self) -> None:
        view = self.view
        while self._beats:
            now = time.monotonic_ns()
            if view[_SEEN] != view[0] or view[_SEEN + 1] != view[2]:
                view[_SINCE] = now
                view[_SEEN], view[_SEEN + 1] = view[0], view[2]
            view[_BEAT] = now
            time.sleep(_BEAT_S)

    # -- the controller's -----------------------------------------------------------------------
    @staticmethod
    def make(path: Path) -> ProgramCounter:
        fields = [-1 if name in _NONE_YET else 0 for name in _FIELDS]
        path.write_bytes(struct.pack(f"{len(_FIELDS)}q", *fields))
        return ProgramCounter(path)

    def read(self) -> Progress:
        return progress_of(self._memory)

    @property
    def pid(self) -> int:
        """The host's process, 0 if it has not started or is on another machine."""
        return self.view[_PID]

    @property
    def answered(self) -> bool:
        return bool(self.view[_ANSWERED])

    @answered.setter
    def answered(self, answered: bool) -> None:
        self.view[_ANSWERED] = answered

    def asks(self, run: int) -> None:
        """The host was called for a run."""
        self.view[_ASKED] = run

    def close(self) -> None:
        self.view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        self.path.unlink(missing_ok=True)


def progress_of(data: bytes | bytearray | mmap.mmap) -> Progress:
    """What the bytes of a counter's file say."""
    values = struct.unpack_from(f"{len(_FIELDS)}q", data)
    field = dict(zip(_FIELDS, values, strict=True))
    now = time.monotonic_ns()
    position, run, beat = field["position"], field["run"], field["beat"]
    here = (position, run)
    beat_s = max(0.0, (now - beat) / 1e9) if beat else None
    # what it has come to after its last heartbeat, it has come to since then
    noticed = here == (field["seen_position"], field["seen_run"])
    standing_s = max(0.0, (now - field["since"]) / 1e9) if noticed and beat else beat_s
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
        peer=field["peer"] if here == (field["peer_position"], field["peer_run"]) else None,
        asked=field["asked"],
        answered=bool(field["answered"]),
        device=device if device[2] >= 0 else None,
    )


def process_stat(pid: int) -> list[str]:
    """State, parent, ... of a process, as `man 5 proc` has them from the third on; "X" and zeros
    where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", *"0" * 14]
    return text.rpartition(")")[2].split()
