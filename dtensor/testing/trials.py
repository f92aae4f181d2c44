"""Chooses a variety of placements of some tensors on a mesh, for `assert_same`.

    enumerate_placements({"x": x, "w": w}, Mesh(a=2, b=2), 12)    # 12 dicts: name: axis: placement

The first trials place one tensor and leave the others to the planner; later trials place several.
A dim is sharded evenly or not, in two blocks, at units of two, and in a zigzag; two axes shard
different dims or one dim, in both orders. The same seed gives the same placements.
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
from dtensor.sharding.spec.placements import REPLICATE, Placement, Replicate, Shard, Zigzag
from dtensor.sharding.spec.spec import TensorSpec, make_spec

Pins = dict[str, Placement]


def choices(shape: tuple[int, ...]) -> list[Placement]:
    """Return the placements of a tensor to try on one axis. A dim of size 1 is not sharded."""
    placements: list[Placement] = [REPLICATE]
    for dim, size in enumerate(shape):
        if size > 1:
            placements.append(Shard(dim))
        if size >= 4:
            placements.append(Zigzag(dim))
        if size >= 4 and size % 2 == 0:
            placements += [Shard(dim, blocks=2), Shard(dim, unit=2)]
    return placements


def all_placements(shape: tuple[int, ...], mesh: Mesh) -> list[Pins]:
    """Return the placements of a tensor on all axes of a mesh, one dict for each distinct spec, the
    replicated tensor first. If two axes shard one dim, the dict has the major axis first."""
    pins_by_spec: dict[TensorSpec, Pins] = {}
    for combination in itertools.product(choices(shape), repeat=len(mesh.axes)):
        by_axis = dict(zip(mesh.axes, combination, strict=True))
        for order in itertools.permutations(mesh.axes):
            pins = {axis: by_axis[axis] for axis in order}
            spec = stated_spec(shape, mesh, pins)
            if spec is not None:
                pins_by_spec.setdefault(spec, pins)
    return list(pins_by_spec.values())


def stated_spec(shape: tuple[int, ...], mesh: Mesh, stated: Stated) -> TensorSpec | None:
    """Return the spec of stated placements. Return None for placements that users may not state, as
    two kinds of `Partial`, or blocks that do not fit the shards of the major axis."""
    try:
        check_fit("x", Meta(shape, torch.float32), stated, "a trial", mesh)
        return make_spec(shape, torch.float32, mesh, stated)
    except PlanningError:
        return None


def enumerate_placements(
    tensors: Mapping[str, torch.Tensor], mesh: Mesh, count: int, seed: int = 0
) -> list[dict[str, Pins]]:
    """Return at most ``count`` different placements of the tensors, by name."""
    rng = random.Random(seed)
    choices_by_name = {name: all_placements(tuple(t.shape), mesh) for name, t in tensors.items()}
    one_tensor = [
        {name: pins}
        for name, choices in choices_by_name.items()
        for pins in choices
        if _is_sharded(pins)
    ]
    rng.shuffle(one_tensor)
    trials = _take_in_turn(one_tensor, count - count // 3)
    for _ in range(4 * count):
        if len(trials) >= count:
            break
        several = {name: rng.choice(choices) for name, choices in choices_by_name.items()}
        if any(_is_sharded(pins) for pins in several.values()) and several not in trials:
            trials.append(several)
    return trials


def _take_in_turn(one_tensor: list[dict[str, Pins]], count: int) -> list[dict[str, Pins]]:
    """Return the first ``count`` trials, taking one for each tensor in turn."""
    by_name: dict[str, list[dict[str, Pins]]] = {}
    for trial in one_tensor:
        by_name.setdefault(next(iter(trial)), []).append(trial)
    rounds = itertools.zip_longest(*by_name.values())
    return [trial for each in rounds for trial in each if trial is not None][:count]


def _is_sharded(pins: Pins) -> bool:
    return any(not isinstance(p, Replicate) for p in pins.values())
