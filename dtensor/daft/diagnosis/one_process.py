"""What ranks do that are all in this process, one after the other in the thread that has called.

    status_here(4, programs, where, seconds=0.3)      # in another thread than that

A step that hangs does so in a call of the user's thread, for there is nobody to wait for; so
another thread has to ask, and what it learns is the instruction, whose it is, and whether it
computes or sleeps.

Not here: since when the thread stands at an instruction, which nobody notes.
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
    where: Callable[[], tuple[int, Running | None]],
    seconds: float,
) -> Status:
    """`where`: the position in the list, and the run under way."""
    pid = os.getpid()

    def progress() -> Progress:
        position, running = where()
        if running is None:
            return Progress(-1, -1, -1, 0.0, pid, threading.main_thread().native_id or pid)
        program, run, thread, began = running
        took = time.monotonic() - began
        return Progress(position, program, run, 0.0, pid, thread, running_s=took)

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
