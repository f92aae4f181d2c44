"""Which of several failures is the root cause: told from what each actor did, and its counter.

A run fails on many actors at once: one dies, and its peers' connections break. Example: actor 1
was killed, actor 0 says "Connection closed by peer": the root is `ActorLost` for actor 1, with
the instruction in its counter file, and actor 0's error as a note.

In order: a `Call` that raised; an actor that died; one whose heartbeat has stopped; a transfer
that failed for another reason; an actor that makes no progress. Within one sort, the lowest.

Pure: `backend.py` gathers the outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtensor.daft.cluster.cluster import Handle
from dtensor.daft.errors import ActorLost, CommunicationError, DaftError, Failure, TaskError
from dtensor.daft.ir.instructions import Call
from dtensor.daft.ray.progress import Progress
from dtensor.daft.run.engine import describe
from dtensor.daft.verification.pairing import instruction_at

STALE_S = 5.0
"""A heartbeat comes every 0.25 s, later on a loaded machine; one this old means that its process
has stopped, though no signal did that: a debugger, a frozen container, a machine that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the controller knows of one actor: its error, its death, its counter."""

    ranks: tuple[int, ...]
    progress: Progress
    error: DaftError | None = None
    died: str | None = None
    stopped_by_signal: bool = False
    waiting: bool = False  # its call has not come back

    @property
    def stopped(self) -> bool:
        beat = self.progress.beat_s
        stale = beat is not None and beat > STALE_S
        return self.died is None and (self.stopped_by_signal or stale)


def diagnose(
    outcomes: Sequence[Outcome], handles: Mapping[int, Handle], deadline_s: float
) -> DaftError:
    """The root cause; the other failures become its notes."""
    root = _root(outcomes, handles, deadline_s)
    for outcome in outcomes:
        if outcome.error is not None and outcome.error.failure != root.failure:
            root.add_note(f"then failed: {outcome.error}")
    return root


def _root(
    outcomes: Sequence[Outcome], handles: Mapping[int, Handle], deadline_s: float
) -> DaftError:
    for outcome in outcomes:
        if isinstance(outcome.error, TaskError):
            return outcome.error
    for outcome in outcomes:
        if outcome.died is not None:
            return ActorLost(where(outcome, handles, f"the actor died. {outcome.died}"))
    for outcome in outcomes:
        if outcome.stopped:
            silent_s = outcome.progress.beat_s or 0.0
            reason = f"the actor's process has stopped: no heartbeat for {silent_s:.1f} s"
            return ActorLost(where(outcome, handles, reason))
    for outcome in outcomes:
        if outcome.error is not None:
            return outcome.error
    waiting = [outcome for outcome in outcomes if outcome.waiting]
    # A rank in a Call is more likely to be at fault than one that waits for it.
    waiting.sort(key=lambda outcome: not _in_call(outcome, handles))
    reason = f"the actor made no progress for more than {deadline_s:g} s, though it is alive"
    if not waiting:
        return CommunicationError(Failure(rank=None, reason="a call failed without an error"))
    return ActorLost(where(waiting[0], handles, reason))


def where(outcome: Outcome, handles: Mapping[int, Handle], reason: str) -> Failure:
    """The instruction that an actor was last seen at."""
    host, progress = outcome.ranks, outcome.progress
    handle = handles.get(progress.handle)
    if progress.position < 0 or handle is None:
        return Failure(rank=host[0], reason=f"{reason} It was between runs.")
    site = _site(outcome, handle)
    failure = describe(handle.program, site, reason)
    return Failure(
        rank=failure.rank,
        stage=failure.stage,
        index=failure.index,
        text=failure.text,
        label=failure.label,
        line=failure.line,
        peers=failure.peers,
        step=progress.run,
        reason=reason,
    )


def _site(outcome: Outcome, handle: Handle) -> tuple[int, int]:
    for sites in handle.report.lists:
        if sites and sites[0][0] in outcome.ranks:
            return sites[outcome.progress.position]
    raise AssertionError(f"No list of program {handle.program.name!r} is of ranks {outcome.ranks}.")


def _in_call(outcome: Outcome, handles: Mapping[int, Handle]) -> bool:
    handle = handles.get(outcome.progress.handle)
    if outcome.progress.position < 0 or handle is None:
        return False
    return isinstance(instruction_at(handle.program, _site(outcome, handle)), Call)
