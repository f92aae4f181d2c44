"""daft: distributed actors, futures and tasks. Knows nothing of sharding; useful alone.

    with daft.launch(backend="ray"):
        a, b = daft.spawn(ModelA), daft.spawn(ModelB)
        b.execute(a.execute(x)).get()

Below that, ranks that run programs, which the rest of dtensor stands on:

    with launch_cluster(2) as cluster:
        handle = cluster.load(program)
        results = cluster.run(handle, [{"x": x}, {}]).get()

`ir/program.py` says what a program is, `verification/verifier.py` what is refused,
`cluster/cluster.py` what runs it. Rooms, each of which imports only those before it: `ir`,
`verification`, `run` (one host's part of a program), `cluster` (of ranks), `tasks` (of spawned
actors), `ray` (both, in processes).
"""

from __future__ import annotations

from dtensor.daft.cluster.cluster import Backend, Cluster, Future, Handle, Mode
from dtensor.daft.errors import (
    ActorLost,
    ClusterClosed,
    CommunicationError,
    DaftError,
    Failure,
    HostError,
    ProgramError,
    TaskError,
)
from dtensor.daft.ir.instructions import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.ir.label import Label
from dtensor.daft.ir.program import Function, Program, RankProgram
from dtensor.daft.ir.text import parse_instructions
from dtensor.daft.launching import launch, launch_cluster, spawn
from dtensor.daft.run.worker import Stored
from dtensor.daft.tasks.actors import ActorHandle, Session, end
from dtensor.daft.tasks.futures import TaskFuture, wait
from dtensor.daft.tasks.groups import (
    GroupFuture,
    Scatter,
    WorkerGroup,
    all_gather,
    all_reduce,
    broadcast,
)
from dtensor.daft.tasks.interference import Bound, Conflict, Interference, interference
from dtensor.daft.tasks.recording import Compiled, compile
from dtensor.daft.tasks.streams import TaskStream
from dtensor.daft.tasks.task import returns
from dtensor.daft.verification.pairing import merge
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
    "Commit",
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
    "HostError",
    "Instruction",
    "Interference",
    "Label",
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
    "TaskStream",
    "Vote",
    "Wait",
    "WorkerGroup",
    "all_gather",
    "all_reduce",
    "broadcast",
    "compile",
    "end",
    "interference",
    "launch",
    "launch_cluster",
    "merge",
    "parse_instructions",
    "returns",
    "spawn",
    "verify",
    "wait",
]
