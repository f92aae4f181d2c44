"""The meshes that a parallelized module was on. A function compiled for one of them follows it.

since = num_switches()                       # a function is compiled for mesh a
restate(model, other)                        # a switch places the module as `other`, on mesh b
mesh_since(model, a, since)                  # b
mesh_since(model, a, num_switches())         # a: a function compiled after the switch
"""

from __future__ import annotations

import weakref

from dtensor.api.model.parallel import ParallelModule
from dtensor.sharding.spec.mesh import Mesh

_switches: list[tuple[weakref.ref[ParallelModule], Mesh]] = []
"""All switches in order: the module, and the mesh that it left."""


def num_switches() -> int:
    """Return the number of switches so far, of all modules."""
    return len(_switches)


def restate(model: ParallelModule, other: ParallelModule) -> None:
    """Give ``model`` the mesh and placements of ``other``, a wrapper of the same nn.Module."""
    _switches.append((weakref.ref(model), model.mesh))
    model.switches += 1
    model.mesh, model.placements, model.stage_plan = other.mesh, other.placements, other.stage_plan
    model.patterns, model.misaligned = other.patterns, other.misaligned
    model.zero, model.recompute = other.zero, other.recompute
    model.attention = other.attention
    model.settled, model.settlement = other.settled, model.settlement + other.settlement + 1


def mesh_since(model: ParallelModule, mesh: Mesh, since: int) -> Mesh:
    """Return the present mesh of the model if it has left ``mesh`` since the switch number
    ``since``, else ``mesh``."""
    has_left = any(ref() is model and old == mesh for ref, old in _switches[since:])
    return model.mesh if has_left else mesh
