"""The homes (spec and ranks) of a module's values on a mesh, before and after a program fixed them.

    homes = current_homes(model, session.ranks, model_home)
    homes["up.weight"]                                   # StoredTensor(... f32[64@tp,16] ...)

A plan fixes the homes of the values that its program uses. A sync moves all values and may precede
any program. It then uses a default home: the placement that another program of the model settled,
else the stated placement, else replicated (also for a role, whose dims only a program shows).
ZeRO-3 also splits a parameter over its axes, and a value of a stage is on the ranks of that stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from dtensor.api.model.parallel import ParallelModule
from dtensor.api.store.home import ModelHome
from dtensor.api.values.lazy_parameters import without_hook
from dtensor.runtime.transfer.between_meshes import bucket_bytes
from dtensor.sharding.plan.storage import stored_spec
from dtensor.sharding.redistribute.sync_plan import plan_sync
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import make_spec
from dtensor.sharding.spec.stored import StoredTensor


def current_homes(
    model: ParallelModule, numbers: Sequence[int], model_home: ModelHome | None
) -> dict[str, StoredTensor]:
    """Return the home of every parameter and buffer, by label: the present one, or the one where it
    would be put now. ``numbers``: the launch's number of each rank of the mesh; ``model_home``:
    None if no value of the model is on the ranks."""
    homes: dict[str, StoredTensor] = {}
    for label, tensor in model.seen.tensors.items():
        if model_home is not None and label in model_home.stored:
            homes[label] = model_home.stored[label]
        elif model_home is not None and label in model_home.owner.settled:
            homes[label] = model_home.owner.settled[label]
        else:
            name = label if model_home is None else model_home.name(label)
            homes[label] = _stated_home(model, label, tensor, name, numbers)
    return homes


def move_to_planned_homes(model_home: ModelHome, planned: Mapping[str, StoredTensor]) -> None:
    """Move values that are in another default home to the homes that a program's plan gives them,
    and record these homes as settled."""
    name = type(model_home.model.module).__name__
    plan = partial(plan_sync, name, bucket_bytes=bucket_bytes(model_home.cluster.device))
    model_home.store.settle(model_home.owner, planned, plan)


def _stated_home(
    model: ParallelModule,
    label: str,
    tensor: torch.Tensor,
    stored_name: str,
    numbers: Sequence[int],
) -> StoredTensor:
    """Return the default home of a value that no program has used: with the placement that a
    program has settled elsewhere, else the stated one; on the ranks of its stages."""
    name, stated = model.seen.names[label], model.settled.get(label, {})
    if label not in model.settled:
        placements = next((p.placements for p in model.placements if p.name == name), {})
        stated = {axis: p for axis, p in placements.items() if isinstance(p, Placement)}
    with without_hook():
        shape, dtype = tuple(tensor.shape), tensor.dtype
    spec = make_spec(shape, dtype, model.mesh, stated)
    if model.zero is not None and model.zero.level == 3 and isinstance(tensor, nn.Parameter):
        spec = stored_spec(spec, model.zero.axes) or spec
    stages = model.stage_plan
    everyone = tuple(range(model.mesh.size))
    if not stages.axis or stages.waiting or name not in stages.held:
        return StoredTensor.of(stored_name, spec, everyone, numbers)
    indices = {model.homes[stage] for stage in stages.held[name]}
    at = [r for r in everyone if model.mesh.coordinates(r)[stages.axis] in indices]
    return StoredTensor.of(stored_name, spec, at, numbers)
