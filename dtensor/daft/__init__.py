"""daft: distributed actors, futures and tasks. Knows nothing of sharding; useful alone.

    with daft.launch(backend="ray"):
        a, b = daft.spawn(ModelA), daft.spawn(ModelB)
        b.execute(a.execute(x)).get()

Below that, ranks that run programs, which the rest of dtensor stands on:

    with launch_cluster(2) as cluster:
        handle = cluster.load(program)
        results = cluster.run(handle, [{"x": x}, {}]).get()

`ir/program.py` says what a program is, `verify/verifier.py` what is refused, `cluster/cluster.py`
what runs it.
"""

from __future__ import annotations

from typing import assert_never

import torch

from dtensor.daft.cluster.cluster import Backend, Cluster, Future, Handle, Mode, Stored
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.daft.errors import (
    ActorLost,
    ClusterClosed,
    CommunicationError,
    DaftError,
    Failure,
    ProgramError,
    TaskError,
)
from dtensor.daft.ir.program import (
    Buffer,
    Call,
    Collective,
    Free,
    Function,
    Instruction,
    Program,
    RankProgram,
    Recv,
    Send,
    Wait,
    parse_instructions,
)
from dtensor.daft.tasks.actor_session import Session
from dtensor.daft.tasks.actors import ActorHandle
from dtensor.daft.tasks.futures import TaskFuture
from dtensor.daft.tasks.groups import (
    GroupFuture,
    Scatter,
    WorkerGroup,
    all_gather,
    all_reduce,
    broadcast,
)
from dtensor.daft.tasks.launching import launch, spawn
from dtensor.daft.tasks.recording import Compiled, compile
from dtensor.daft.tasks.task import returns
from dtensor.daft.verification.interference import Bound, Conflict, Interference, interference
from dtensor.daft.verification.merge import merge
from dtensor.daft.verification.verifier import Report, verify

__all__ = [
    "ActorHandle",
    "ActorLost",
    "Backend",
    "Bound",
    "Buffer",
    "Call",
    "Cluster",
    "ClusterClosed",
    "Collective",
    "CommunicationError",
    "Compiled",
    "Conflict",
    "DaftError",
    "Failure",
    "Free",
    "Function",
    "Future",
    "GroupFuture",
    "Handle",
    "Instruction",
    "Interference",
    "Mode",
    "Program",
    "ProgramError",
    "RankProgram",
    "Recv",
    "Report",
    "Scatter",
    "Send",
    "Session",
    "Stored",
    "TaskError",
    "TaskFuture",
    "Wait",
    "WorkerGroup",
    "all_gather",
    "all_reduce",
    "broadcast",
    "compile",
    "interference",
    "launch",
    "launch_cluster",
    "merge",
    "parse_instructions",
    "returns",
    "spawn",
    "verify",
]


def launch_cluster(
    size: int,
    *,
    backend: Backend = "inprocess",
    device: str = "cpu",
    address: str | None = None,
    deadline_s: float = 60.0,
    ranks_per_actor: int | None = None,
    seed: int = 0,
) -> Cluster:
    """Start `size` ranks.

    `address` joins a Ray cluster that runs already. `deadline_s`: how long a rank may wait for
    another, or make no progress, before it counts as lost (Ray only; nothing waits in-process).
    `ranks_per_actor`: by default 1; on Ray's GPUs, where there are fewer than ranks, all of them.
    `seed` picks one of the legal orders in which the ranks of a host run.
    """
    match backend:
        case "inprocess":
            per_actor = 1 if ranks_per_actor is None else ranks_per_actor
            return InProcessCluster(
                size, torch.device(device), ranks_per_actor=per_actor, seed=seed
            )
        case "ray":
            # Not at the top: Ray is an extra, and takes a second to import.
            from dtensor.daft.ray.cluster import RayCluster

            return RayCluster(
                size,
                torch.device(device),
                address=address,
                deadline_s=deadline_s,
                ranks_per_actor=ranks_per_actor,
                seed=seed,
            )
        case _:
            assert_never(backend)
