"""The rule of `dt::linalg_checked`: a value passes, and with it the check of its matrices.

    linalg_checked    "... d0 d1, ... -> ... d0 d1"     linear in {x}

Each rank checks the matrices of which it holds a part.
"""

from __future__ import annotations

import dtensor.sharding.ops.checks  # noqa: F401  # pyright: ignore[reportUnusedImport] - the op
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import make, names
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule


def _checked(call: OpCall) -> Rule:
    x, info = call.operands[:2]
    inner = " ".join(names(len(x.shape) - len(info.shape)))
    return make(call, f"... {inner}, ... -> ... {inner}", linear=((0,),))


RULES: dict[str, Builder] = {"dt.linalg_checked.default": _checked}
