"""Return the status of ranks that share this process and run in turn on the calling thread.

    status_here(4, programs, where, seconds=0.3)      # call it from another thread

No rank waits for another here, so a step can hang only inside a call. The status shows its
instruction and whether the thread computes or sleeps, but not since when.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from dtensor.daft.cluster.cluster import Handle
from dtensor.daft.cluster.inprocess import Running
from dtensor.daft.diagnosis.diagnosis import ObservedLaunch, diagnose
from dtensor.daft.diagnosis.observation import Progress, look
from dtensor.daft.diagnosis.program_lines import ProgramLines
from dtensor.daft.status import Status


def status_here(
    size: int,
    programs: Mapping[int, Handle],
    get_position: Callable[[], tuple[int, Running | None]],
    seconds: float,
) -> Status:
    """Return the status of `size` ranks. `programs`: by id. `get_position`: a function that returns
    the position in the list and the run in progress. `seconds`: between the two samples."""
    pid = os.getpid()

    def progress() -> Progress:
        """Return the progress of the only host, which is this process."""
        position, running = get_position()
        if running is None:
            return Progress(-1, -1, -1, 0.0, pid, threading.main_thread().native_id or pid)
        program, run, thread, began = running
        seconds_so_far = time.monotonic() - began
        return Progress(position, program, run, 0.0, pid, thread, running_s=seconds_so_far)

    def lines(program: int) -> ProgramLines | None:
        handle = programs.get(program)
        return None if handle is None else ProgramLines.of(handle.program, handle.report.lists)

    before = look(0, progress())
    time.sleep(seconds)
    launched = ObservedLaunch(
        title=f"Launch of process {pid}: {size} ranks, all in this process",
        pid=pid,
        hosts=(tuple(range(size)),),
        lines=lines,
    )
    return diagnose(launched, (before,), (look(0, progress()),))
