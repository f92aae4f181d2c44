"""`annotate`: state the placement of a value inside `forward`.

    x = annotate(x, "b@dp t d@tp")        # or annotate(x, tp=Shard(-1))

In a capture it inserts an identity op, `dt::annotate(x, text)`, whose backward is
`dt::annotate_backward(grad, text)`: the text applies to the value and to its gradient. The planner
parses the text, because the axes are known only there, and erases both ops. Outside a capture
`annotate` returns x itself.
"""

from __future__ import annotations

import torch

import dtensor.sharding.ops.attention  # noqa: F401  (registers dt::annotate)
from dtensor.errors import check_kind
from dtensor.frontend.call_lock import is_capturing
from dtensor.sharding.spec.placements import Placement


def annotate(x: torch.Tensor, text: str | None = None, /, **placements: object) -> torch.Tensor:
    """State the placement of an activation. Return ``x``, which is unchanged.

    Args:
        x: a value in forward. Use the returned value in its place: ``x = dt.annotate(x, ...)``.
        text: a name for each dim, with the axes that split it: "b@dp t d@tp", "b t@cp:zigzag d".
        placements: by axis, instead of a text: ``tp=dt.Replicate()``.

    The planner chooses the placement on axes that are not named. Raises TypeError unless either a
    text or placements are passed. Planning raises PlanningError if they do not match the value.
    """
    if not is_capturing():
        return x
    if (text is None) == (not placements):
        raise TypeError(
            f"annotate takes either a text or placements by axis; got text={text!r}, "
            f"placements={placements}. Write annotate(x, 'b@dp t d@tp') or annotate(x, tp=...)."
        )
    check_kind("annotate's text", text, str | None, "a text", 'dt.annotate(x, "b@dp t d@tp")')
    for axis, placement in placements.items():
        fix = f"{axis}=dt.Row(), dt.Column() or dt.Replicate()"
        check_kind(f"annotate's {axis}", placement, Placement, "a placement", fix)
    if text is None:
        text = ", ".join(f"{axis}={placements[axis]!r}" for axis in sorted(placements))
    return torch.ops.dt.annotate(x, text)
