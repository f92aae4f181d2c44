"""`Recognised`: a pattern in the user's program, and the op that replaced it or the reason why not.

    Recognised("attention", "dt.attention", "", "layers.0.attn", "model.py:14")
    Recognised("attention", "", "it is written with matmul and softmax", "layers.0.attn", ...)

The recognisers are in frontend/capture/recognise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recognised:
    """A pattern of the user's program that became one op, or stayed unchanged for a reason.

    ``what``: the kind of pattern, "attention"; ``op``: the op that replaced it, or ""; ``reason``:
    why it stayed unchanged, or ""; ``module``: the path of the user's module; ``source``: the
    user's line, "mlp.py:14".
    """

    what: str
    op: str
    reason: str
    module: str
    source: str
