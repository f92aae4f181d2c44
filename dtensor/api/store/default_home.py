"""How a module's values are kept on a mesh, each of them, before a program has said and after.

    kept(model, session.ranks, resident)    # {"up.weight": StoredTensor(... f32[64@tp,16] ...)}

A program keeps what it uses as its plan says. A sync moves all values, and may come before any
program: then a value is kept as other programs of the model have settled it, or as stated; whole
where nothing is, or a role whose dims a program shows. With ZeRO-3 a parameter is split over its
axis besides, and stages say which ranks have it. Where a plan then says something else,
`keep_as_planned` has the ranks cut the values anew among themselves.

Not here: putting values there (session.py), moving them to another mesh (replica.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from dtensor.api.model.parallel import ParallelModule
from dtensor.api.store.home import ModelHome
from dtensor.api.values.lazy_parameters import as_it_is
from dtensor.runtime.transfer.between_meshes import bucket_bytes
from dtensor.sharding.plan.storage import stored_spec
from dtensor.sharding.redistribute.sync_plan import plan_sync
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import make_spec
from dtensor.sharding.spec.stored import StoredTensor


def kept(
    model: ParallelModule, numbers: Sequence[int], model_home: ModelHome | None
) -> dict[str, StoredTensor]:
    """Every parameter and buffer, by label, as it is on a cluster, or would be put there now;
    ``numbers``: what each rank of the mesh is in the launch."""
    homes: dict[str, StoredTensor] = {}
    for label, tensor in model.seen.tensors.items():
        if model_home is not None and label in model_home.stored:
            homes[label] = model_home.stored[label]
        elif model_home is not None and label in model_home.owner.settled:
            homes[label] = model_home.owner.settled[label]
        else:
            called = label if model_home is None else model_home.name(label)
            homes[label] = _as_stated(model, label, tensor, called, numbers)
    return homes


def keep_as_planned(model_home: ModelHome, planned: Mapping[str, StoredTensor]) -> None:
    """A program has values there; those that are as none had said yet are moved."""
    name, most = type(model_home.model.module).__name__, bucket_bytes(model_home.cluster.device)
    plan = partial(plan_sync, name, bucket_bytes=most)
    model_home.store.settle(model_home.owner, planned, plan)


def _as_stated(
    model: ParallelModule, label: str, tensor: torch.Tensor, called: str, numbers: Sequence[int]
) -> StoredTensor:
    name, stated = model.seen.names[label], model.settled.get(label, {})
    if label not in model.settled:
        placements = next((p.placements for p in model.placements if p.name == name), {})
        stated = {axis: p for axis, p in placements.items() if isinstance(p, Placement)}
    with as_it_is():
        shape, dtype = tuple(tensor.shape), tensor.dtype
    spec = make_spec(shape, dtype, model.mesh, stated)
    if model.zero is not None and model.zero[1] == 3 and isinstance(tensor, nn.Parameter):
        spec = stored_spec(spec, model.zero[0]) or spec
    stages = model.stage_plan
    everyone = tuple(range(model.mesh.size))
    if not stages.axis or stages.waiting or name not in stages.held:
        return StoredTensor.of(called, spec, everyone, numbers)
    mine = {model.homes[stage] for stage in stages.held[name]}
    at = [r for r in everyone if model.mesh.coordinates(r)[stages.axis] in mine]
    return StoredTensor.of(called, spec, at, numbers)
