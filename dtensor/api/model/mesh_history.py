"""Which meshes a parallelized module has been on: what was made for one of them follows it.

    since = num_switches()                       # a function is compiled for mesh a
    restate(model, other)                        # a switch: the module is as `other`, on mesh b
    mesh_since(model, a, since)                  # b
    mesh_since(model, a, num_switches())         # a: who states a mesh now means that one

Not here: what becomes of the module's values (switch.py).
"""

from __future__ import annotations

import weakref

from dtensor.api.model.parallel import ParallelModule
from dtensor.sharding.spec.mesh import Mesh

_switches: list[tuple[weakref.ref[ParallelModule], Mesh]] = []
"""All, in their order: the module, and the mesh that it left."""


def num_switches() -> int:
    """So far, of all modules."""
    return len(_switches)


def restate(model: ParallelModule, other: ParallelModule) -> None:
    """From now on the module is placed as ``other``, which is of the same one."""
    _switches.append((weakref.ref(model), model.mesh))
    model.switches += 1
    model.mesh, model.placements, model.stage_plan = other.mesh, other.placements, other.stage_plan
    model.patterns, model.misaligned = other.patterns, other.misaligned
    model.zero, model.recompute = other.zero, other.recompute
    model.settled, model.settlement = other.settled, model.settlement + other.settlement + 1


def mesh_since(model: ParallelModule, mesh: Mesh, since: int) -> Mesh:
    """The mesh of a program that was made for ``mesh`` when there had been so many switches: where
    the module is now, if it has left that mesh since."""
    moved = any(left() is model and before == mesh for left, before in _switches[since:])
    return model.mesh if moved else mesh
