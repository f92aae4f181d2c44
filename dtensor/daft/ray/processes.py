"""The processes of a launch on Ray, as the controller sees them: who is alive, who was lost, how.

    processes = Processes(deadline_s=60.0)
    processes.all.append(Process(home.spawn((), "cpu", Host), time.monotonic()))
    processes.get(ref, timeout=None)          # Ray's value, or the root cause of its failure

Invariants: a process is lost once, and described by what it was doing then; every failure that
comes of it is that one `ActorLost`. A process that is silent for `deadline_s` is ended, so that
whatever waits for it fails. Waiting itself never fails because of a slow method.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
from torch._C._distributed_c10d import TCPStore

from dtensor.daft.errors import ActorLost, DaftError, Failure
from dtensor.daft.ir.program import format_instruction
from dtensor.daft.ray.compiled_step import StepFailed, lost_key
from dtensor.daft.ray.starting import START_S, ActorProcess
from dtensor.daft.tasks.frozen import Frozen
from dtensor.daft.verification.pairing import instruction_at

SETTLE_S = 5.0  # how long the controller looks for the root of a failed transfer
SLICE_S = 0.25  # how often a waiting controller looks at the processes
MAX_RECENT = 10_000  # tasks of which a process remembers what they were

_ray: Any = ray  # Ray's stubs leave most of its types unknown


@dataclass(slots=True)
class Process:
    """A process, since when, and what it was asked to do lately."""

    ray: ActorProcess
    started: float
    actors: list[str] = field(default_factory=list[str])
    recent: dict[int, tuple[str, tuple[str, ...]]] = field(
        default_factory=dict[int, tuple[str, tuple[str, ...]]]
    )
    lost: ActorLost | None = None

    def remember(self, number: int, title: str, issued: tuple[str, ...]) -> None:
        """What call `number` is."""
        self.recent[number] = (title, issued)
        if len(self.recent) > MAX_RECENT:
            del self.recent[next(iter(self.recent))]


class Processes:
    """`all` by their number; `loaded` are the programs that they have been sent, by theirs."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.all: list[Process] = []
        self.loaded: list[Frozen] = []
        self.store: TCPStore | None = None  # where the processes of a program find each other

    def get(self, ref: Any, timeout: float | None) -> Any:
        """Ray's value; `ActorLost` for the process that was lost, whichever task waited for it."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))
            try:
                return _ray.get(ref, timeout=left)
            except ray.exceptions.GetTimeoutError:
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError(
                        f"The result is not there after {timeout:g} s; ask again."
                    ) from None
                for process in self.all:
                    self._check_alive(process)
            except ray.exceptions.RayTaskError as error:
                if isinstance(cause := error.cause, StepFailed):
                    raise self._root(cause) from None
                if isinstance(cause, ray.exceptions.RayError):
                    raise self._lost(str(cause), self.all) from None
                raise
            except ray.exceptions.RayError as error:
                raise self._lost(str(error), self.all) from None

    def lost_of(self, frozen: Frozen) -> ActorLost | None:
        """The first process of a program that is lost, if any is."""
        taking_part = [self.all[number] for number in frozen.processes]
        if any(process.ray.gone for process in taking_part):
            self._lost("", taking_part)
        return next((p.lost for p in taking_part if p.lost is not None), None)

    def lose(self, process: Process, lost: ActorLost) -> None:
        """A process is lost; those that wait for it to join a program are told."""
        process.lost = lost
        if self.store is not None:
            self.store.set(lost_key(self.all.index(process)), "")

    def end(self, process: Process, reason: str) -> None:
        """End one that cannot go on, so that what waits for it fails."""
        self.lose(process, self._describe(process, reason))
        process.ray.kill()
        process.ray.end()

    def _root(self, error: StepFailed) -> DaftError:
        """A transfer fails because a process was lost; its death may show a moment later."""
        taking_part = [self.all[number] for number in self.loaded[error.program].processes]
        end = time.monotonic() + SETTLE_S
        while not any(process.ray.gone for process in taking_part):
            if time.monotonic() > end:
                return error
            time.sleep(0.05)
        return self._lost("", taking_part)

    def _lost(self, text: str, among: Sequence[Process]) -> ActorLost:
        """The process that an error of Ray's names, or else the first that may be meant."""
        line = text.strip().splitlines()[0] if text.strip() else ""
        for process in self.all:
            if process.lost is None and (process.ray.gone or process.ray.id in text):
                self.lose(process, self._describe(process, f"the process died. {line}".strip()))
        named = [process for process in self.all if process.ray.id in text]
        for process in (*named, *among):
            if process.lost is not None:
                return process.lost
        return ActorLost(Failure(rank=None, reason=line))

    def _check_alive(self, process: Process) -> None:
        """A process that has stopped is ended, so that what waits for it fails."""
        if process.lost is not None:
            return
        if process.ray.gone:
            self._lost("", (process,))
            return
        beat = process.ray.counter.read().beat_s
        silent = time.monotonic() - process.started if beat is None else beat
        if silent <= (max(START_S, self.deadline_s) if beat is None else self.deadline_s):
            return
        fact = "has not started" if beat is None else "has stopped: no heartbeat"
        self.end(process, f"the process {fact} for {silent:.1f} s.")

    def _describe(self, process: Process, reason: str) -> ActorLost:
        progress = process.ray.counter.read()
        title, issued = "", tuple[str, ...]()
        if progress.position >= 0:
            title, issued = process.recent.get(progress.run, (title, issued))
        if title and progress.handle >= 0:  # in a compiled function
            frozen = self.loaded[progress.handle]
            own = frozen.report.lists[frozen.processes.index(self.all.index(process))]
            instruction = instruction_at(frozen.program, own[progress.position])
            name = frozen.names[own[progress.position][0]]
            reason = f"{reason} It was in compiled function {title!r}."
            title = instruction.label or f"{name}.{format_instruction(instruction, brief=True)}"
            issued = (instruction.source, *issued) if instruction.source else issued
        actor, _, method = title.partition(".")
        if not title:
            actor, reason = ", ".join(process.actors), f"{reason} It was between tasks."
        return ActorLost(Failure(rank=None, actor=actor, text=method, reason=reason, issued=issued))
