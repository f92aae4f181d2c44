"""The errors of daft: the party at fault, the place, and the fix.

`ProgramError` is a fault of the program's author and is found before anything runs. The others
happen while a program runs; each carries a `Failure`, the facts of its text.

Example: `TaskError: rank 1 (stage 0), instruction 3 'y = call f(x)': ZeroDivisionError: ...`.

Invariant: an error survives pickling, so that an actor can raise it and a controller show it. It
does not decide which of several failures is the root cause: `ray/diagnosis/failure_detector.py`
does.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import Any

from dtensor.daft.remote_exceptions import RemoteException, reason_of, traceback_of

MOST_FRAMES = 4
"""Most characters of a cause's traceback that leave a process with the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The facts of a failure on one rank; `index` counts the instructions of that rank's own
    program. `known_as`: the rank's number for users, if it differs.

    For a spawned actor: its name, its task (`text`), and `issued`, the place where the controller
    issued the task: lines of "file:line in function", innermost first.

    `raised`: the exception, if code that ran there has raised one.
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
    """A program that is malformed, could hang, or leaks: the fault of its author."""


class DaftError(RuntimeError):
    """A failure while a program ran; `failure` has the facts.

    If code on a host has raised, `__cause__` is its exception, even a `SystemExit`: in another
    process, one of the same class with the same arguments and attributes. If it does not pickle, or
    takes more than 256 KiB, it is an exception whose text is the traceback.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        if failure.raised is not None:
            self.__cause__ = failure.raised.error

    def locate(self, line: str) -> None:
        """Add the user's line, if the instruction has none of its own, such as an optimizer's
        update."""
        if self.failure.line is None:
            self.failure: Failure = replace(self.failure, line=line)
            self.args = (str(self.failure),)

    def __reduce__(self) -> tuple[Any, ...]:
        """The cause becomes text, too."""
        failure, cause = self.failure, self.__cause__
        if cause is not None and failure.raised is None:
            failure = replace(failure, raised=RemoteException(cause))
        if cause is not None and not failure.traceback:
            frames = traceback.format_tb(traceback_of(cause))[-MOST_FRAMES:]
            name = type(cause).__name__
            failure = replace(failure, traceback="".join((*frames, name)))
        return (type(self), (failure,))


class TaskError(DaftError):
    """A `Call` raised: a fault of the user's code, whose exception is `__cause__`.

    Its run is undone, and the ranks continue, unless they had begun to write state and there are no
    snapshots of it: then this error is the cluster's `failure`.
    """


class RunInterrupted(TaskError):
    """A signal's handler has raised between two instructions. The run is undone; the exception
    itself is raised at the end of our call during which the signal came."""


class ActorLost(DaftError):
    """An actor died or stopped: a fault of the infrastructure."""


class CommunicationError(DaftError):
    """A transfer failed: the peer was lost or did not answer in time, or a value had the wrong
    shape."""


class HostError(DaftError):
    """A host raised outside an instruction, for example while it unpickled a value; the launch
    continues."""


class ClusterClosed(RuntimeError):
    """The cluster was used after `close()`."""


def as_sent(error: BaseException, rank: int | None = None) -> Exception:
    """The error that a host sends for one that it has caught: daft's own errors, and the
    LookupError of a missing name, unchanged; any other as the cause of a `HostError`."""
    if isinstance(error, DaftError | ProgramError | ClusterClosed):
        return error
    if type(error) is LookupError and all(isinstance(arg, str) for arg in error.args):
        return error
    return HostError(Failure(rank=rank, reason=reason_of(error), raised=RemoteException(error)))
