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
from dtensor.api.compiled import compile
from dtensor.api.parallel import ParallelModule, parallelize
from dtensor.api.session import launch
from dtensor.api.state import gather_state_dict, load_state_dict
from dtensor.api.tensor import DTensor, distribute, spec
from dtensor.api.training import Loss, TrainStep, train_step
from dtensor.errors import PlanningError
from dtensor.frontend.marks import annotate
from dtensor.runtime.schedule import Custom, GPipe, OneFOneB, Schedule
from dtensor.sharding.cost import Topology
from dtensor.sharding.mesh import Mesh
from dtensor.sharding.placements import Column, Partial, Placement, Replicate, Row, Shard
from dtensor.sharding.plan import Plan
from dtensor.sharding.spec import TensorSpec

__all__ = [
    "Column",
    "Custom",
    "DTensor",
    "GPipe",
    "Loss",
    "Mesh",
    "OneFOneB",
    "ParallelModule",
    "Partial",
    "Placement",
    "Plan",
    "PlanningError",
    "Replicate",
    "Row",
    "Schedule",
    "Shard",
    "TensorSpec",
    "Topology",
    "TrainStep",
    "annotate",
    "compile",
    "daft",
    "distribute",
    "gather_state_dict",
    "launch",
    "load_state_dict",
    "parallelize",
    "spec",
    "testing",
    "train_step",
]
