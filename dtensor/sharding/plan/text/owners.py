"""The printed owners of parameters that are updated whole.

dp=0: up.weight    dp=1: down.weight    fullest 1.00 of even
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtensor.sharding.plan.owners import update_seconds
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.request import UpdateCost
from dtensor.sharding.plan.steps import Update
from dtensor.sharding.plan.text.words import collapse, wrapped
from dtensor.showing import WIDTH

_MAX_OWNERS = 16
"""The largest number of owners whose parameters are listed by owner."""


def owner_lines(plan: PlanRecord, updates: Sequence[Update]) -> tuple[str, ...]:
    """Return the lines that tell which rank of the stage owns which parameters, and how much more
    the fullest rank computes than an even share."""
    by_owner: dict[tuple[tuple[str, int], ...], list[Update]] = {}
    for step in updates:
        by_owner.setdefault(step.owner or (), []).append(step)
    parts: list[str] = []
    for owner, steps in sorted(by_owner.items()):
        where = ",".join(f"{axis}={at}" for axis, at in owner) or "each rank"
        parts.append(f"{where}: {', '.join(collapse([step.parameter for step in steps]))}")
    if len(parts) > _MAX_OWNERS:
        labels = ", ".join(collapse([step.parameter for step in updates]))
        parts = [f"{len(parts)} owners of {labels}"]
    loads = [sum(_seconds(plan, s) for s in steps) for owner, steps in by_owner.items() if owner]
    axes = [axis for axis, _ in max(by_owner, key=len)]
    if loads and axes:
        even = sum(loads) / math.prod(plan.inner.axis_size(axis) for axis in axes)
        parts.append(f"fullest {max(loads) / even:.2f} of even")
    return tuple(wrapped("   ".join(parts), "      ", WIDTH))


def _seconds(plan: PlanRecord, step: Update) -> float:
    cost = UpdateCost(step.flops, step.state_bytes)
    return update_seconds(plan.topology, step.spec.nbytes, cost)
