"""What `parallelize(..., zero=...)` states, checked.

    zero_of({"dp": 3}, mesh, None)       # ("dp", 3)
    zero_of({"dp": 3}, Mesh(dp=1), None) # None: one rank has nothing to split over

What it means stands in sharding/plan/passes/gather_stored.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh


def zero_of(
    zero: Mapping[str, int] | None, mesh: Mesh, stage_axis: str | None
) -> tuple[str, int] | None:
    """The axis and the level. PlanningError for what is neither."""
    if not zero:
        return None
    if not isinstance(zero, Mapping):
        raise PlanningError(f'zero={zero!r} is not a mapping; fix: zero={{"dp": 3}}')
    if len(zero) > 1:
        raise PlanningError(
            f"zero={dict(zero)} names {len(zero)} axes, and state is stored split over one.\n"
            f"fix: zero={dict([next(iter(zero.items()))])}"
        )
    axis, level = next(iter(zero.items()))
    size = mesh.axis_size(axis)
    if type(level) is not int or level not in (0, 1, 2, 3):
        raise PlanningError(
            f"zero={dict(zero)}: the level is 1 (optimizer state), 2 (gradients too) or "
            f"3 (parameters too), not {level!r}; fix: zero={{{axis!r}: 1}}"
        )
    if axis == stage_axis:
        others = [a for a, n in mesh.shape.items() if a != axis and n > 1]
        fix = f"zero={{{others[0]!r}: {level}}}" if others else "leave zero= out"
        raise PlanningError(
            f"zero={dict(zero)}: the axis {axis!r} holds the pipeline's stages, whose parameters "
            f"differ; fix: {fix}"
        )
    return (axis, level) if level and size > 1 else None
