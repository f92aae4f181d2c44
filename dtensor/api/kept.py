"""How a module's values are kept on a mesh, each of them, before a program has said and after.

    kept(model, session.ranks, resident)    # {"up.weight": StoredTensor(... f32[64@tp,16] ...)}

A program keeps what it uses as its plan says. A sync moves all values, and may come before any
program: then a value is kept as other programs of the model have settled it, or as stated; whole
where nothing is, or a role whose dims a program shows. With ZeRO-3 a parameter is split over its
axis besides, and stages say which ranks have it. Where a plan then says something else,
`keep_as_planned` has the ranks cut the values anew among themselves.

An optimizer's state that is in a checkpoint's files is read by the ranks as a plan keeps it.

Not here: putting values there (session.py), moving them to another mesh (replica.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dtensor.api.away import as_it_is
from dtensor.api.on_disk import OnDisk
from dtensor.api.parallel import ParallelModule
from dtensor.api.resident import OptimizerHome, Resident
from dtensor.errors import PlanningError
from dtensor.runtime.between_meshes import bucket_bytes, sync_program
from dtensor.sharding.ops.philox import Pieces
from dtensor.sharding.plan.storage import stored_spec
from dtensor.sharding.redistribute.named_values import plan_sync
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.sharding.spec.stored import StoredTensor


def kept(
    model: ParallelModule, numbers: Sequence[int], resident: Resident | None
) -> dict[str, StoredTensor]:
    """Every parameter and buffer, by label, as it is on a cluster, or would be put there now;
    ``numbers``: what each rank of the mesh is in the launch."""
    found: dict[str, StoredTensor] = {}
    for label, tensor in model.seen.tensors.items():
        if resident is not None and label in resident.stored:
            found[label] = resident.stored[label]
        elif resident is not None and label in resident.planned:
            found[label] = resident.planned[label]
        else:
            name = label if resident is None else resident.name(label)
            found[label] = StoredTensor.of(name, *_as_stated(model, label, tensor), numbers)
    return found


def keep_as_planned(resident: Resident, planned: Mapping[str, StoredTensor]) -> None:
    """Values that are on the mesh as no program has said yet are kept as this one says."""
    wanted = {
        label: now
        for label, now in planned.items()
        if label in resident.stored
        and label not in resident.planned
        and now != resident.stored[label]
    }
    if not wanted:
        return
    cluster = resident.cluster
    every = tuple(range(cluster.size))
    homes: dict[str, tuple[StoredTensor, StoredTensor]] = {}
    for label, now in wanted.items():
        here, there = (
            StoredTensor.of(one.label, one.spec, one.at, every)
            for one in (resident.stored[label], now)
        )
        homes[label] = here, there
    name, most = type(resident.model.module).__name__, bucket_bytes(cluster.device)
    plan = plan_sync(name, homes, bucket_bytes=most)
    names = {label: (now.label, now.label) for label, now in wanted.items()}
    handle = cluster.load(sync_program(plan, cluster.size, cluster.device, names))
    cluster.run(handle, [{} for _ in every]).get()
    cluster.unload(handle)
    left: list[list[str]] = [[] for _ in every]
    for label, now in wanted.items():
        for rank in set(resident.stored[label].at) - set(now.at):
            left[rank].append(now.label)
        resident.stored[label] = now
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
    new: dict[tuple[str, str], StoredTensor],
) -> list[dict[str, tuple[OnDisk, Pieces]]]:
    """By rank, the shards that it is to read of an optimizer's state, by their names in its table:
    of ``new`` values those that are in files. They are noted as made."""
    mesh = home.resident.mesh
    read: list[dict[str, tuple[OnDisk, Pieces]]] = [{} for _ in range(mesh.size)]
    for (label, key), wanted in list(new.items()):
        stored, spec = home.rest.get(home.parameters[label], {}).get(key), wanted.spec
        if not isinstance(stored, OnDisk):
            continue
        if stored.shape != spec.shape:
            raise PlanningError(
                f"{key} of {label} has the shape {list(stored.shape)}, and is read as {spec}.\n"
                f"fix: load the state of the same optimizer and model"
            )
        if stored.dtype.is_floating_point and not home.rule.entry(key).number:
            stored = replace(stored, dtype=spec.dtype)
        new[label, key] = replace(wanted, spec=replace(spec, dtype=stored.dtype))
        home.made |= {(label, key)}
        for rank in wanted.at:
            read[rank][wanted.label] = stored, wanted.where(rank)
    return read
