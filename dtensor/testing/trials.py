"""Placements to try: a variety for some tensors on a mesh, the same for the same seed.

    enumerated({"x": x, "w": w}, Mesh(a=2, b=2), 12)      # 12 times: name -> axis -> placement

First each tensor alone, the others left to the planner; then several at once. A tensor is split
on each dim: plainly, whether it divides or not, in two blocks, and at units of two where the dim is
even; on two axes, also both on one dim, in both orders.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import torch

from dtensor.api.model.stating.stated_placements import Stated, check_fit
from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement, Replicate, Shard
from dtensor.sharding.spec.spec import TensorSpec, make_spec

Pins = dict[str, Placement]


def choices(shape: tuple[int, ...]) -> list[Placement]:
    """What a tensor may be on one axis. A dim of size 1 is not split."""
    placements: list[Placement] = [REPLICATE]
    for dim, size in enumerate(shape):
        if size > 1:
            placements.append(Shard(dim))
        if size >= 4 and size % 2 == 0:
            placements += [Shard(dim, blocks=2), Shard(dim, unit=2)]
    return placements


def placed(shape: tuple[int, ...], mesh: Mesh) -> list[Pins]:
    """All placements of a tensor on a mesh, one for each distinct spec; the whole one first.

    The axes of a dict are in the order in which they are to be stated: majors first.
    """
    pins_by_spec: dict[TensorSpec, Pins] = {}
    for each in itertools.product(choices(shape), repeat=len(mesh.axes)):
        together = dict(zip(mesh.axes, each, strict=True))
        for order in itertools.permutations(mesh.axes):
            pins = {axis: together[axis] for axis in order}
            spec = stated_spec(shape, mesh, pins)
            if spec is not None:
                pins_by_spec.setdefault(spec, pins)
    return list(pins_by_spec.values())


def stated_spec(shape: tuple[int, ...], mesh: Mesh, stated: Stated) -> TensorSpec | None:
    """The spec of what users may state; None for what they may not: two kinds of pending, units or
    blocks that do not fit the pieces of the major axis."""
    try:
        check_fit("x", Meta(shape, torch.float32), stated, "a trial", mesh)
        return make_spec(shape, torch.float32, mesh, stated)
    except PlanningError:
        return None


def enumerated(
    tensors: Mapping[str, torch.Tensor], mesh: Mesh, count: int, seed: int = 0
) -> list[dict[str, Pins]]:
    """At most ``count`` placements of the tensors, different ones."""
    rng = random.Random(seed)
    every = {name: placed(tuple(t.shape), mesh) for name, t in tensors.items()}
    split = {name: [pins for pins in all_ if _splits(pins)] for name, all_ in every.items()}
    alone = [{name: pins} for name, each in split.items() for pins in each]
    rng.shuffle(alone)
    trials = _varied(alone, count - count // 3)
    for _ in range(4 * count):
        if len(trials) >= count:
            break
        together = {name: rng.choice(each) for name, each in every.items()}
        if any(_splits(pins) for pins in together.values()) and together not in trials:
            trials.append(together)
    return trials


def _varied(alone: list[dict[str, Pins]], count: int) -> list[dict[str, Pins]]:
    """Some of them, round robin over the tensors."""
    by_name: dict[str, list[dict[str, Pins]]] = {}
    for trial in alone:
        by_name.setdefault(next(iter(trial)), []).append(trial)
    rounds = itertools.zip_longest(*by_name.values())
    return [trial for each in rounds for trial in each if trial is not None][:count]


def _splits(pins: Pins) -> bool:
    return any(not isinstance(p, Replicate) for p in pins.values())
