"""Marks: what the user says inside `forward` about a value's placement.

    x = annotate(x, "b@dp t d@tp")        # or annotate(x, tp=Shard(-1))

Outside a capture `annotate` returns x itself, at the cost of one question. While `capture`
runs it inserts one identity op, `dt::annotate(x, text)`, whose backward applies
`dt::annotate_backward(grad, text)`, so both values carry the mark; the result must be used, as in
`x = annotate(x, ...)`. The planner erases both ops.

Not here: the meaning of the text. It is stored as given and parsed where axes are known.
"""

from __future__ import annotations

import torch

import dtensor.sharding.ops.attention  # noqa: F401  (registers dt::annotate)
from dtensor.errors import check_kind
from dtensor.frontend.call_lock import is_capturing
from dtensor.sharding.spec.placements import Placement


def annotate(x: torch.Tensor, text: str | None = None, /, **placements: object) -> torch.Tensor:
    """Pins an activation's placement while planning; the identity on a plain tensor otherwise.

    Args:
        x: a value in forward; what is returned is to be used in its place.
        text: a name for each dim, with the axes that split it: "b@dp t d@tp".
        placements: instead of a text, by axis: ``tp=dt.Replicate()``.

    An axis that is named is stated for every dim; others are left to the planner. Raises TypeError
    for both or neither; PlanningError, at planning, for what does not fit the value.
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
