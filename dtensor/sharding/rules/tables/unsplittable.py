"""`Unsplittable`: the rule of an op that every rank deliberately runs on whole tensors.

    "aten.nonzero_static.default": Unsplittable("which places are not zero depends on all values")
    reasons()["aten.nonzero_static.default"]      # "which places are ..."

The rule offers no split. If the op is linear, pending sums pass through it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.sharding.ops.call import Localizer, Meta, OpCall
from dtensor.sharding.rules.build import Groups, make, whole_dims
from dtensor.sharding.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Unsplittable:
    """A builder of rules in which every dim of every tensor is whole. ``reason``: why nothing can
    be split, without a full stop."""

    reason: str
    linear: Groups = ()
    localize: Localizer | None = None

    def __call__(self, call: OpCall) -> Rule:
        left = ", ".join(_dims(f"t{i}", meta) for i, meta in enumerate(call.operands))
        right = ", ".join(_dims(f"r{i}", meta) for i, meta in enumerate(call.results))
        return make(call, f"{left} -> {right}", linear=self.linear, localize=self.localize)


def _dims(prefix: str, meta: Meta | None) -> str:
    """Return the term of a tensor whose dims are all whole, ``t0d0! t0d1!``."""
    return "" if meta is None else whole_dims(f"{prefix}d", len(meta.shape))
