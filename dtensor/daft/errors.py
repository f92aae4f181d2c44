"""Define the errors of daft: where a run failed, and whose fault it is.

`ProgramError` is raised before anything runs, for a malformed program. The other errors are raised
while a program runs, and carry a `Failure` with the facts, for example

    TaskError: rank 1 (stage 0), instruction 3 'y = call f(x)': ZeroDivisionError: ...

Every error can be pickled, so that an actor can raise it and the controller show it. The root cause
among several failures is found in `ray/diagnosis/failure_detector.py`.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import Any

from dtensor.daft.remote_exceptions import RemoteException, reason_of, traceback_of

MAX_FRAMES = 4
"""Number of innermost frames of the cause's traceback that are pickled with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The facts of a failure on one rank, or in one spawned actor.

    `index`: the position of the instruction in the rank's list. `known_as`: the rank's number for
    users, if it differs. `step`: the number of the run. `issued`: for an actor's task, where the
    controller issued it ("file:line in function", innermost first). `raised`: the exception of the
    user's code, or None.
    """

    rank: int | None
    known_as: str = ""
    actor: str = ""
    stage: int | None = None
    index: int | None = None
    text: str = ""
    label: str = ""
    line: str | None = None
    peers: tuple[int, ...] = ()
    step: int | None = None
    reason: str
    traceback: str = ""
    issued: tuple[str, ...] = ()
    raised: RemoteException | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return the facts as text: where it failed and why, then the peers, the user's line and
        traceback."""
        where = "a rank" if self.rank is None else f"rank {self.rank}"
        if self.known_as:
            where += f", {self.known_as}"
        if self.actor:
            where = f"actor {self.actor!r}" + (f", {self.text}" if self.text else "")
        if self.stage is not None:
            where += f" (stage {self.stage})"
        if self.index is not None:
            label = f" [{self.label}]" if self.label else ""
            where += f", instruction {self.index} '{self.text}'{label}"
        if self.step is not None:
            where += f", run {self.step}"
        lines = [f"{where}: {self.reason}"]
        if self.peers:
            lines.append("  peer: " + ", ".join(f"rank {peer}" for peer in self.peers))
        if self.line is not None:
            lines.append(f"  at {self.line}")
        if self.issued:
            lines.append("  issued by the controller at:")
            lines += [f"    {place}" for place in self.issued]
        if self.traceback:
            lines.append("  traceback where it failed:")
            lines += ["    " + line for line in self.traceback.rstrip().splitlines()]
        return "\n".join(lines)


class ProgramError(ValueError):
    """A program is malformed, could hang, or leaks values: the fault of its author."""


class DaftError(RuntimeError):
    """A program failed while it ran. `failure` has the facts.

    If code on a host raised, `__cause__` is its exception (or `SystemExit`); from another process,
    a copy with the same class, arguments and attributes. If the exception cannot be pickled, or
    takes more than 256 KiB, `__cause__` is an exception whose text is the traceback.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        if failure.raised is not None:
            self.__cause__ = failure.raised.error

    def locate(self, line: str) -> None:
        """Add the user's line if the failed instruction has none, as an optimizer's update."""
        if self.failure.line is None:
            self.failure: Failure = replace(self.failure, line=line)
            self.args = (str(self.failure),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the cause and its traceback as text within the failure."""
        failure, cause = self.failure, self.__cause__
        if cause is not None and failure.raised is None:
            failure = replace(failure, raised=RemoteException(cause))
        if cause is not None and not failure.traceback:
            frames = traceback.format_tb(traceback_of(cause))[-MAX_FRAMES:]
            name = type(cause).__name__
            failure = replace(failure, traceback="".join((*frames, name)))
        return (type(self), (failure,))


class TaskError(DaftError):
    """The user's code raised in a `Call`; `__cause__` is its exception.

    The run is undone and the ranks continue. If they had begun to write state without a snapshot,
    the cluster fails with this error as its `failure`.
    """


class RunInterrupted(TaskError):
    """A signal handler raised between two instructions. The run is undone; the handler's exception
    is raised at the end of the dtensor call that the signal interrupted."""


class ActorLost(DaftError):
    """An actor died or was stopped: a fault of the infrastructure."""


class CommunicationError(DaftError):
    """A transfer failed: the peer was lost, did not answer in time, or sent a wrong shape."""


class HostError(DaftError):
    """A host raised outside an instruction, for example while unpickling. The launch goes on."""


class ClusterClosed(RuntimeError):
    """The cluster was used after `close()`."""


def error_to_send(error: BaseException, rank: int | None = None) -> Exception:
    """Return the error that a host sends to the controller for an error that it caught.

    daft's errors and the LookupError of a missing name are unchanged. Any other error becomes the
    cause of a `HostError`.
    """
    if isinstance(error, DaftError | ProgramError | ClusterClosed):
        return error
    if type(error) is LookupError and all(isinstance(arg, str) for arg in error.args):
        return error
    return HostError(Failure(rank=rank, reason=reason_of(error), raised=RemoteException(error)))
