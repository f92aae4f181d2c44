"""Owners: the rank that updates each parameter whose optimizer needs whole parameters.

    owned_inputs(request, inputs)     # up.weight: owned f32[(64|0)@dp&(0|64)@tp,16]

Muon and Adafactor read a whole matrix to update one element. So each parameter has one owner among
the ranks of its stage: the gradient and the parameter are moved to the owner, the optimizer's code
runs there, and the new value returns to the placement of the parameter. The owner's spec cuts dim 0
on every axis so that one coordinate holds all of it. A parameter without elements on dim 0, or
without dims, stays replicated, and all its ranks update it.

Owners are dealt out by price: the most expensive update first, each to the rank that has the least
to do. Then updates are exchanged between the fullest rank and others as long as this helps. The
same request gives the same owners.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.plan.request import Request, UpdateCost
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import REPLICATE, Shard
from dtensor.sharding.spec.spec import TensorSpec

Coordinates = tuple[int, ...]
"""A rank of a stage: its coordinate on each axis of `_axes`."""
_LEAST_GAIN = 1e-3
"""The least part of the load of the fullest rank by which an exchange of updates must lower it."""


def owned_inputs(request: Request, inputs: Sequence[PlannedInput]) -> tuple[PlannedInput, ...]:
    """Return the inputs with the spec of the owner of each parameter that is updated whole."""
    training = request.training
    costs: dict[str, UpdateCost] = {}
    for updater in () if training is None else training.updaters:
        if updater.owned is not None:
            costs |= {label: updater.owned[label] for label in updater.trained}
    owned = [item for item in inputs if item.kind == "parameter" and item.label in costs]
    if not owned:
        return tuple(inputs)
    axes = _axes(owned[0].spec)
    ranks = list(itertools.product(*(range(owned[0].spec.mesh.axis_size(a)) for a in axes)))
    seconds = {
        item.label: update_seconds(request.topology, item.spec.nbytes, costs[item.label])
        for item in owned
    }
    stages = {item.label: item.stages for item in owned}
    whole = {item.label for item in owned if not item.spec.shape or not item.spec.shape[0]}
    dealt = deal({n: s for n, s in seconds.items() if n not in whole}, stages, ranks)
    specs = {
        item.label: item.spec.with_placements(**dict.fromkeys(axes, REPLICATE))
        if item.label in whole
        else owned_spec(item.spec, dict(zip(axes, dealt[item.label], strict=True)))
        for item in owned
    }
    return tuple(
        replace(item, owned=specs[item.label]) if item.label in specs else item for item in inputs
    )


def _axes(spec: TensorSpec) -> tuple[str, ...]:
    """Return the axes over which owners differ."""
    mesh = spec.mesh
    return tuple(a for a in mesh.axes if a != MICROBATCH_AXIS and mesh.axis_size(a) > 1)


def update_seconds(topology: Topology, nbytes: int, cost: UpdateCost) -> float:
    """Return the predicted seconds of the update of a parameter of ``nbytes`` on its owner."""
    moved = 3 * nbytes + 2 * cost.state_bytes
    return topology.compute_seconds(flops=cost.flops, bytes_moved=moved)


def owned_spec(spec: TensorSpec, owner: Mapping[str, int]) -> TensorSpec:
    """Return the spec of a tensor that only the rank at the coordinates ``owner`` holds."""
    size = spec.shape[0]
    placements = {
        axis: Shard(0, sizes=tuple(size * (i == at) for i in range(spec.mesh.axis_size(axis))))
        for axis, at in owner.items()
    }
    return spec.with_placements(**placements)


def owner_of(spec: TensorSpec) -> tuple[tuple[str, int], ...]:
    """Return (axis, coordinate) of the one rank that holds a tensor with this `owned_spec`."""
    return tuple(
        (axis, next(i for i, size in enumerate(placement.sizes) if size))
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Shard) and placement.sizes
    )


def deal(
    seconds: Mapping[str, float],
    stages: Mapping[str, Sequence[int]],
    ranks: Sequence[Coordinates],
) -> dict[str, Coordinates]:
    """Return the rank of each update, so that the fullest rank of each stage has little more than
    an even share. ``seconds``: of each update; ``stages``: the stages on which it runs, always on
    the same rank."""
    load = {(stage, rank): 0.0 for held in stages.values() for stage in held for rank in ranks}
    along: defaultdict[tuple[int, int, int], float] = defaultdict(float)  # stage, axis, coordinate
    owners: dict[str, Coordinates] = {}

    def preference(name: str, rank: Coordinates) -> tuple[float, float, Coordinates]:
        """Return the key of a rank: its load, then the loads of all ranks at each of its
        coordinates, so that the messages over each axis are even."""
        held = stages[name]
        near = sum(along[stage, axis, at] for stage in held for axis, at in enumerate(rank))
        return max(load[stage, rank] for stage in held), near, rank

    def assign(name: str, rank: Coordinates) -> None:
        for stage in stages[name]:
            if name in owners:
                load[stage, owners[name]] -= seconds[name]
            load[stage, rank] += seconds[name]
            for axis, at in enumerate(rank):
                along[stage, axis, at] += seconds[name]
        owners[name] = rank

    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        assign(name, min(ranks, key=lambda rank: preference(name, rank)))
    for _ in range(len(seconds)):
        exchange = _best_exchange(seconds, stages, owners, load)
        if not exchange:
            break
        for name, rank in exchange:
            assign(name, rank)
    return owners


def _best_exchange(
    seconds: Mapping[str, float],
    stages: Mapping[str, Sequence[int]],
    owners: Mapping[str, Coordinates],
    load: Mapping[tuple[int, Coordinates], float],
) -> list[tuple[str, Coordinates]]:
    """Return (update, new owner) of one update of the fullest rank, and of the update that it takes
    in exchange, if any. The exchange makes the larger load of the two ranks as small as possible.
    Return [] if no exchange makes it smaller by `_LEAST_GAIN`. Only updates that run on one stage
    are exchanged."""
    stage, full = max(load, key=lambda at: (load[at], at))
    held: dict[Coordinates, list[str]] = {rank: [] for at, rank in load if at == stage}
    for name, rank in owners.items():
        if tuple(stages[name]) == (stage,):
            held[rank].append(name)
    limit, best = load[stage, full] * (1 - _LEAST_GAIN), list[tuple[str, Coordinates]]()
    for name in held.pop(full):
        for rank, others in held.items():
            for other in (None, *others):
                given = seconds[name] - (0.0 if other is None else seconds[other])
                larger = max(load[stage, full] - given, load[stage, rank] + given)
                if given > 0 and larger < limit:
                    limit, best = larger, [(name, rank)]
                    best += [] if other is None else [(other, full)]
    return best
