"""Rules of activations with what is multiplied or added beside them, and of rotary positions.

    gated       "..., ... -> ..."                           linear in {b}, what is let through
    bias_gelu   "... k, k -> ... k"                         its backward leaves dbias pending
    rope        "... d!, ... d!, ... d! -> ... d!"          linear in {x} and in {cos, sin}

Invariants: the halves of a row that rope turns against each other are on one rank. Not here: the
parts of these by themselves (pointwise.py, slice_and_cat.py).
"""

from __future__ import annotations

import dtensor.sharding.ops.gates  # pyright: ignore[reportUnusedImport] - the ops
import dtensor.sharding.ops.rope  # noqa: F401  # pyright: ignore[reportUnusedImport] - the ops
from dtensor.sharding.rules.build import pattern
from dtensor.sharding.rules.registry import Builder

_ROPE = pattern("... d!, ... d!, ... d! -> ... d!", linear=((0,), (1, 2)))

RULES: dict[str, Builder] = {
    "dt.gated.default": pattern("..., ... -> ...", linear=((1,),)),
    "dt.gated_backward.default": pattern("..., ..., ... -> ..., ...", linear=((0,),)),
    "dt.bias_gelu.default": pattern("... k, k -> ... k"),
    "dt.bias_gelu_backward.default": pattern("... k, ... k, k -> ... k, k", linear=((0,),)),
    "dt.rope.default": _ROPE,
    "dt.rope_backward.default": _ROPE,
}
