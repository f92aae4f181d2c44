"""Ops that every rank runs on whole tensors on purpose, each with its reason in one line.

    "aten.nonzero_static.default": Unsplittable("which places are not zero depends on all values")
    reasons()["aten.nonzero_static.default"]      # "which places are ..."

Invariants: such a rule offers no split; where the op is linear it may still be told so, and a
pending sum passes. Ops that need only *some* dims whole are not here: their rules say `k!`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.sharding.ops.call import Localizer, Meta, OpCall
from dtensor.sharding.rules.build import Groups, make, whole_dims
from dtensor.sharding.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Unsplittable:
    """A builder for ops of which nothing can be split: every dim of every tensor is whole.

    ``reason`` says why, without a full stop.
    """

    reason: str
    linear: Groups = ()
    localize: Localizer | None = None

    def __call__(self, call: OpCall) -> Rule:
        left = ", ".join(_dims(f"t{i}", meta) for i, meta in enumerate(call.operands))
        right = ", ".join(_dims(f"r{i}", meta) for i, meta in enumerate(call.results))
        return make(call, f"{left} -> {right}", linear=self.linear, localize=self.localize)


def _dims(prefix: str, meta: Meta | None) -> str:
    return "" if meta is None else whole_dims(f"{prefix}d", len(meta.shape))
