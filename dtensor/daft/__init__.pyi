from .cluster.cluster import Backend, Cluster, Future, Handle, Mode
from .errors import (
    ActorLost,
    ClusterClosed,
    CommunicationError,
    DaftError,
    Failure,
    HostError,
    ProgramError,
    TaskError,
)
from .ir.instructions import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    Recv,
    Send,
    Sizes,
    Vote,
    Wait,
)
from .ir.label import Label
from .ir.program import Function, Program, RankProgram
from .ir.text import parse_instructions
from .launching import launch, launch_cluster, spawn
from .run.worker import Stored
from .tasks.actors import ActorHandle, Session, end
from .tasks.futures import TaskFuture, wait
from .tasks.groups import (
    GroupFuture,
    Scatter,
    WorkerGroup,
    all_gather,
    all_reduce,
    broadcast,
)
from .tasks.interference import Bound, Conflict, Interference, interference
from .tasks.recording import Compiled, compile
from .tasks.streams import TaskStream
from .tasks.task import returns
from .verification.pairing import merge
from .verification.verifier import Report, verify

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
    "Sizes",
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
