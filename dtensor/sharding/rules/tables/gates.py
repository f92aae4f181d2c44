"""Rules of fused activations (gated, bias and GELU) and of rotary positions.

    gated       "..., ... -> ..."                           linear in {b}
    bias_gelu   "... k, k -> ... k"                         its backward leaves dbias pending
    rope        "... d!, ... d!, ... d! -> ... d!"          linear in {x} and in {cos, sin}

Invariant: both halves of a row that rope rotates are on one rank.
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
