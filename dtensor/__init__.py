"""dtensor: write a model once, for one device, and place it anywhere.

    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(MLP(), mesh, {"up.weight": dict(tp=dt.Row()), ...})
    step = dt.train_step(model, loss_fn, torch.optim.AdamW(model.parameters()))
    print(step.plan(x, y))                   # every collective and its price, before anything runs
    with dt.launch(mesh, backend="ray"):
        loss = step(x, y)

Public names are those below; what is not here is private.
"""

from dtensor import daft, testing
from dtensor.api.checkpoint.async_save import Saved
from dtensor.api.checkpoint.checkpoint import Loaded, load, resume, save
from dtensor.api.checkpoint.state_dict import gather_state_dict, load_state_dict
from dtensor.api.eager.compiled import compile
from dtensor.api.eager.policy import implicit_redistribution
from dtensor.api.eager.tensor import DTensor, distribute, spec
from dtensor.api.generation.generator import generator
from dtensor.api.generation.rollouts import Rollouts, rollouts
from dtensor.api.launch.launching import launch
from dtensor.api.launch.plan_page import save_plan
from dtensor.api.launch.profiling import profiled
from dtensor.api.launch.status import Status, status
from dtensor.api.launch.timing import calibrate, simulate, trace
from dtensor.api.model.parallel import ParallelModule, parallelize
from dtensor.api.model.stating.stages import Auto
from dtensor.api.move.replica import replica, sync, sync_plan
from dtensor.api.move.transfer import transfer, transfer_plan
from dtensor.api.rule import rule
from dtensor.api.search import placements
from dtensor.api.search.comparison import Compared, Comparison, compare
from dtensor.api.search.result import FoundStrategy, SearchResult
from dtensor.api.search.search import search
from dtensor.api.step.plan_call import PROFILER
from dtensor.api.step.training import Loss, TrainStep, train_step
from dtensor.api.values.randomness import manual_seed
from dtensor.errors import PlanningError
from dtensor.frontend.marks import annotate
from dtensor.frontend.reads.ran import constant
from dtensor.kernels.register import kernel
from dtensor.runtime.schedule import (
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
from dtensor.runtime.simulate.trace import Trace, compare_traces
from dtensor.sharding.plan.plan import PAGES, Plan
from dtensor.sharding.redistribute import topologies
from dtensor.sharding.redistribute.named_values import SyncPlan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import ColumnParallel, RowParallel
from dtensor.sharding.spec.placements import Column, Partial, Placement, Replicate, Row, Shard
from dtensor.sharding.spec.spec import TensorSpec

PAGES.use(save_plan)
PROFILER.use(profiled)

__version__ = "0.1.0"

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
    "Replicate",
    "Rollouts",
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
    "annotate",
    "calibrate",
    "compare",
    "compare_traces",
    "compile",
    "constant",
    "daft",
    "distribute",
    "gather_state_dict",
    "generator",
    "implicit_redistribution",
    "kernel",
    "launch",
    "load",
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
    "topologies",
    "trace",
    "train_step",
    "transfer",
    "transfer_plan",
]
