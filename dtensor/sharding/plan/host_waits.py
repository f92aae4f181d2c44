"""Finds where the host of a GPU must wait for a value in a step, and renders the plan's lines.

    waits_of(plan)      # (HostWait("2 times, for the counts of rows of experts", defers=False),)

A program for GPUs is deferred if the host reads no value of the GPU before the step has ended. A
plan whose waits include one that does not defer has a program whose host reads the votes, as on
CPUs. An op of the user's may read a value: then the host waits there, and the program is deferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Compute, Redistribute, updates_of
from dtensor.sharding.plan.text.words import collapse, op_text, wrapped
from dtensor.showing import WIDTH

_NAMESPACES = ("aten", "dt", "prims")


@dataclass(frozen=True, slots=True)
class HostWait:
    """Why the host waits in a step. ``defers``: whether the program can be deferred all the
    same."""

    text: str
    defers: bool


def waits_of(plan: PlanRecord) -> tuple[HostWait, ...]:
    """Return the waits of a step besides the wait for its results."""
    return (*_counts(plan), *_owners(plan), *_user_ops(plan))


def may_defer(plan: PlanRecord) -> bool:
    """Return whether the host can leave the votes of a step to the GPU."""
    return all(wait.defers for wait in waits_of(plan))


def wait_lines(plan: PlanRecord) -> list[str]:
    """Return the lines about waits of a GPU's host; [] for most plans."""
    texts = [f"on GPUs, the host {wait.text}" for wait in waits_of(plan)]
    return [line for text in texts for line in wrapped(text, "  ", WIDTH)]


def _counts(plan: PlanRecord) -> Iterator[HostWait]:
    """Yield the waits for counts of rows: one for each dispatch on the stage with the most."""
    times = max(
        sum(
            step_times(plan, step)
            for step in plan.steps
            if isinstance(step, Redistribute) and step.moves[0].gathers_counts
            if step.stage == stage
        )
        for stage in range(plan.num_stages)
    )
    if times:
        text = "once" if times == 1 else f"{times} times"
        yield HostWait(f"waits {text}, for the counts of rows of experts", defers=False)


def _owners(plan: PlanRecord) -> Iterator[HostWait]:
    """Yield the waits of optimizers that update whole parameters on their owners."""
    names = dict.fromkeys(u.optimizer for u in updates_of(plan.steps) if u.owner is not None)
    if names:
        text = f"waits for the votes, because {', '.join(names)} on owners may read values"
        yield HostWait(text, defers=False)


def _user_ops(plan: PlanRecord) -> Iterator[HostWait]:
    """Yield the calls of ops of the user's, which may read a value."""
    calls = dict.fromkeys(
        op_text(step.op.call) + f" at {step.op.source}" * bool(step.op.source)
        for step in plan.steps
        if isinstance(step, Compute)
        and getattr(step.op.call.target, "namespace", "dt") not in _NAMESPACES
    )
    if calls:
        yield HostWait(f"waits where {', '.join(collapse(calls))} reads a value", defers=True)
