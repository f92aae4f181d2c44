from . import daft, testing
from .api.checkpoint.async_save import Saved
from .api.checkpoint.checkpoint import Loaded, load, resume, save
from .api.checkpoint.equal_copies import ReplicasDiffer, check_replicas
from .api.checkpoint.state_dict import gather_state_dict, load_state_dict
from .api.eager.compiled import compile
from .api.eager.policy import implicit_redistribution
from .api.eager.tensor import DTensor, distribute, spec
from .api.generation.generator import generator
from .api.generation.rollouts import Rollouts, rollouts
from .api.launch.launching import launch
from .api.launch.status import Status, status
from .api.launch.timing import calibrate, simulate, trace
from .api.model.parallel import ParallelModule, parallelize
from .api.model.stating.stages import Auto
from .api.move.replica import replica, sync, sync_plan
from .api.move.transfer import transfer, transfer_plan
from .api.rule import rule
from .api.search import placements
from .api.search.comparison import Compared, Comparison, compare
from .api.search.result import FoundStrategy, SearchResult
from .api.search.search import search
from .api.step.expert_load import ExpertLoad, expert_load
from .api.step.loss import Loss
from .api.step.train_step import train_step
from .api.step.training import TrainStep
from .api.values.randomness import manual_seed
from .errors import PlanningError
from .frontend.annotate import annotate
from .frontend.experts import Route, drop_tokens, expert_linear, from_experts, to_experts
from .frontend.guards.executed_code import constant
from .kernels.register import kernel
from .runtime.schedule import (
    ZBH1,
    ZBH2,
    ZBV,
    Costs,
    Custom,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    OneFOneB,
    Ordered,
    Schedule,
    Searched,
)
from .runtime.simulate.trace import Trace, compare_traces
from .sharding.ops.load_balance import load_balancing_loss
from .sharding.plan.plan import Plan
from .sharding.redistribute import topologies
from .sharding.redistribute.sync_plan import SyncPlan
from .sharding.redistribute.topology import Topology
from .sharding.spec.mesh import Mesh
from .sharding.spec.module_roles import ColumnParallel, RowParallel
from .sharding.spec.placements import Column, Partial, Placement, Replicate, Row, Shard, Zigzag
from .sharding.spec.spec import TensorSpec

__version__: str

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Auto",
    "Column",
    "ColumnParallel",
    "Compared",
    "Comparison",
    "Costs",
    "Custom",
    "DTensor",
    "DualPipeV",
    "ExpertLoad",
    "FoundStrategy",
    "GPipe",
    "Interleaved1F1B",
    "Loaded",
    "LoopedBFS",
    "Loss",
    "Mesh",
    "OneFOneB",
    "Ordered",
    "ParallelModule",
    "Partial",
    "Placement",
    "Plan",
    "PlanningError",
    "ReplicasDiffer",
    "Replicate",
    "Rollouts",
    "Route",
    "Row",
    "RowParallel",
    "Saved",
    "Schedule",
    "SearchResult",
    "Searched",
    "Shard",
    "Status",
    "SyncPlan",
    "TensorSpec",
    "Topology",
    "Trace",
    "TrainStep",
    "Zigzag",
    "annotate",
    "calibrate",
    "check_replicas",
    "compare",
    "compare_traces",
    "compile",
    "constant",
    "daft",
    "distribute",
    "drop_tokens",
    "expert_linear",
    "expert_load",
    "from_experts",
    "gather_state_dict",
    "generator",
    "implicit_redistribution",
    "kernel",
    "launch",
    "load",
    "load_balancing_loss",
    "load_state_dict",
    "manual_seed",
    "parallelize",
    "placements",
    "replica",
    "resume",
    "rollouts",
    "rule",
    "save",
    "search",
    "simulate",
    "spec",
    "status",
    "sync",
    "sync_plan",
    "testing",
    "to_experts",
    "topologies",
    "trace",
    "train_step",
    "transfer",
    "transfer_plan",
]
