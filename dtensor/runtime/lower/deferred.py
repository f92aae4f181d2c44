"""Decides whether the host leaves the votes of a run to the device.

    defers(shared, roles)       # True: no call of the program waits for the host to read a value

A deferred program is for a GPU, has a commit point, and needs no value on the host: no
`detect_nan`, no counts of rows, no updates on owners (sharding/plan/host_waits.py).
"""

from __future__ import annotations

from dtensor.runtime.lower.rank_builder import ProgramContext, Roles
from dtensor.sharding.plan.host_waits import host_waits


def defers(shared: ProgramContext, roles: Roles) -> bool:
    """Return whether a program is deferred. A program that writes no state, on one rank, is not: it
    can leave nothing behind, and its results often stay on the rank."""
    plan = shared.plan
    writes = bool(plan.state_writes) and not roles.gradients
    if shared.device.type != "cuda" or not (writes or shared.has_commit_point(roles)):
        return False
    waits = roles.detect_nan or any(role.host_reads for role in roles.updates)
    return not waits and not host_waits(plan)
