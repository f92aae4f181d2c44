"""Ops that every rank runs on whole tensors on purpose, each with its reason in one line.

    "aten.linalg_eig.default": whole("eigenvalues come in no order that parts could agree on")
    reasons()["aten.linalg_eig.default"]          # "eigenvalues come in ..."

Invariants: such a rule offers no split; where the op is linear it may still be told so, and a
pending sum passes. Ops that need only *some* dims whole are not here: their rules say `k!`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.sharding.ops.call import Localizer, Meta, OpCall
from dtensor.sharding.rules.build import Groups, make
from dtensor.sharding.rules.registry import builders
from dtensor.sharding.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Whole:
    """A builder: every dim of every tensor is whole; ``reason`` says why, without a full stop."""

    reason: str
    linear: Groups = ()
    localize: Localizer | None = None

    def __call__(self, call: OpCall) -> Rule:
        left = ", ".join(_dims(f"t{i}", meta) for i, meta in enumerate(call.operands))
        right = ", ".join(_dims(f"r{i}", meta) for i, meta in enumerate(call.results))
        return make(call, f"{left} -> {right}", linear=self.linear, localize=self.localize)


def whole(reason: str, *, linear: Groups = (), localize: Localizer | None = None) -> Whole:
    """A builder for ops of which nothing can be split, and why that is so."""
    return Whole(reason, linear, localize)


def reasons() -> dict[str, str]:
    """The reason of each registered op that is whole on every rank on purpose, by its name."""
    return {
        name: builder.reason
        for name, builder in sorted(builders().items())
        if isinstance(builder, Whole)
    }


def _dims(prefix: str, meta: Meta | None) -> str:
    return "" if meta is None else " ".join(f"{prefix}d{i}!" for i in range(len(meta.shape)))
