"""What recognition met in a program: a pattern, the op that it became or why it did not.

    Recognised("attention", "dt.attention", "", "layers.0.attn", "model.py:14")
    Recognised("attention", "", "it is written with matmul and softmax", "layers.0.attn", ...)

Not here: what is recognised (frontend/capture/recognise), how it is printed (text/recognised.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recognised:
    """What of the user's program was looked at as a pattern, and became one op or did not.

    ``what``: "attention"; ``op``: "dt.attention", "" where it stays as it is; ``reason``: why then;
    ``module``: the user's, by its path; ``source``: "mlp.py:14".
    """

    what: str
    op: str
    reason: str
    module: str
    source: str
