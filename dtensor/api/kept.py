"""How a module's values are kept on a mesh, each of them, before a program has said and after.

    kept(model, resident)          # {"up.weight": (f32[64@tp,16], (0, 1)), ...}

A program keeps what it uses as its plan says. A sync moves all values, and may come before any
program: then a value is kept as other programs of the model have settled it, or as stated; whole
where nothing is, or a role whose dims a program shows. With ZeRO-3 a parameter is split over its
axis besides, and stages say which ranks have it. Where a plan then says something else,
`keep_as_planned` has the ranks cut the values anew among themselves.

An optimizer's state that is in a checkpoint's files is read by the ranks as a plan keeps it.

Not here: putting values there (session.py), moving them to another mesh (replica.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from dtensor.api.away import as_it_is
from dtensor.api.on_disk import OnDisk
from dtensor.api.parallel import ParallelModule
from dtensor.api.resident import Named, OptimizerHome, Resident
from dtensor.errors import PlanningError
from dtensor.runtime.between_meshes import bucket_bytes, sync_program
from dtensor.sharding.ops.philox import Pieces
from dtensor.sharding.plan.storage import stored_spec
from dtensor.sharding.redistribute.named_values import Side, plan_sync
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.shards import held
from dtensor.sharding.spec.spec import TensorSpec, make_spec

Keeping = Mapping[str, tuple[TensorSpec, tuple[int, ...]]]
"""By label: the spec under which a value is kept, and the ranks of its mesh that keep it."""


def kept(model: ParallelModule, resident: Resident | None) -> Keeping:
    """Every parameter and buffer, by label, as it is on a cluster, or would be put there now."""
    found: dict[str, tuple[TensorSpec, tuple[int, ...]]] = {}
    for label, tensor in model.seen.tensors.items():
        if resident is not None and label in resident.specs:
            found[label] = resident.specs[label], resident.ranks[label]
        elif resident is not None and label in resident.planned:
            found[label] = resident.planned[label]
        else:
            found[label] = _as_stated(model, label, tensor)
    return found


def keep_as_planned(resident: Resident, planned: Keeping) -> None:
    """Values that are on the mesh as no program has said yet are kept as this one says."""
    wanted = {
        label: now
        for label, now in planned.items()
        if label in resident.specs
        and label not in resident.planned
        and now != (resident.specs[label], resident.ranks[label])
    }
    if not wanted:
        return
    cluster = resident.cluster
    numbers = tuple(range(cluster.size))
    homes = {
        label: (Side(resident.specs[label], resident.ranks[label], numbers), Side(*now, numbers))
        for label, now in wanted.items()
    }
    name, most = type(resident.model.module).__name__, bucket_bytes(cluster.device)
    plan = plan_sync(name, homes, bucket_bytes=most)
    names = {label: (resident.name(label), resident.name(label)) for label in wanted}
    handle = cluster.load(sync_program(plan, cluster.size, cluster.device, names))
    cluster.run(handle, [{} for _ in numbers]).get()
    cluster.unload(handle)
    left: list[list[str]] = [[] for _ in numbers]
    for label, (spec, ranks) in wanted.items():
        for rank in set(resident.ranks[label]) - set(ranks):
            left[rank].append(resident.name(label))
        resident.specs[label], resident.ranks[label] = spec, ranks
    if any(left):
        cluster.delete(left)


def _as_stated(
    model: ParallelModule, label: str, tensor: torch.Tensor
) -> tuple[TensorSpec, tuple[int, ...]]:
    name, stated = model.seen.names[label], model.settled.get(label, {})
    if label not in model.settled:
        own = next((p.placements for p in model.placements if p.name == name), {})
        stated = {axis: p for axis, p in own.items() if isinstance(p, Placement)}
    with as_it_is():
        shape, dtype = tuple(tensor.shape), tensor.dtype
    spec = make_spec(shape, dtype, model.mesh, stated)
    if model.zero is not None and model.zero[1] == 3 and isinstance(tensor, nn.Parameter):
        spec = stored_spec(spec, model.zero[0]) or spec
    stages = model.stage_plan
    everyone = tuple(range(model.mesh.size))
    if not stages.axis or stages.waiting or name not in stages.held:
        return spec, everyone
    mine = {model.homes[stage] for stage in stages.held[name]}
    return spec, tuple(r for r in everyone if model.mesh.coordinates(r)[stages.axis] in mine)


def shards_on_disk(
    home: OptimizerHome,
    new: dict[tuple[str, str], Named],
) -> list[dict[str, tuple[OnDisk, Pieces]]]:
    """By rank, the shards that it is to read of an optimizer's state, by their names in its table:
    of ``new`` values those that are in files. They are noted as made."""
    mesh = home.resident.mesh
    read: list[dict[str, tuple[OnDisk, Pieces]]] = [{} for _ in range(mesh.size)]
    for (label, key), (name, spec, ranks) in list(new.items()):
        stored = home.rest.get(home.parameters[label], {}).get(key)
        if not isinstance(stored, OnDisk):
            continue
        if stored.shape != spec.shape:
            raise PlanningError(
                f"{key} of {label} has the shape {list(stored.shape)}, and is read as {spec}.\n"
                f"fix: load the state of the same optimizer and model"
            )
        if stored.dtype.is_floating_point and not home.rule.entry(key).number:
            stored = replace(stored, dtype=spec.dtype)
        new[label, key] = name, replace(spec, dtype=stored.dtype), ranks
        home.made |= {(label, key)}
        for rank in ranks:
            read[rank][name] = stored, held(spec, mesh.coordinates(rank))
    return read
