"""The registry of rules: from an op's name to the builder that makes its rule for one call.

    rule_for(OpCall(aten.mm.default, ...))                 # m k, k n -> m n
    register("mylib.swiglu.default", pattern("..., ... -> ...", linear=((1,),)))

Invariants: an op has one builder; builders are pure; an op without one is an error that names it,
never replication. The rules themselves stand in the tables of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtensor.errors import PlanningError
from dtensor.sharding.call import OpCall
from dtensor.sharding.rule import Rule

Builder = Callable[[OpCall], Rule]

_BUILDERS: dict[str, Builder] = {}


class NoRule(PlanningError):
    """No rule says how this op may be split."""


def register(names: str | Sequence[str], builder: Builder) -> None:
    """Give ops, by their full names ("aten.mm.default"), a rule; PlanningError if one has one."""
    for name in (names,) if isinstance(names, str) else names:
        if name in _BUILDERS:
            raise PlanningError(f"{name} has a rule already; a rule is registered once")
        _BUILDERS[name] = builder


def rule_for(call: OpCall) -> Rule:
    """The rule of this call; NoRule where the op has none or not for these arguments."""
    builder = _BUILDERS.get(call.name)
    if builder is None:
        raise no_rule(call, "it is not in the tables of dtensor.sharding.rules")
    return builder(call)


def no_rule(call: OpCall, reason: str) -> NoRule:
    """The error for a call that has no rule, naming the operands and how to add a rule."""
    operands = ", ".join(str(meta) for meta in call.operands) or "no tensors"
    terms = ", ".join("..." for _ in call.operands)
    return NoRule(
        f"no rule says how {call.name}({operands}) may be split: {reason}.\n"
        f"If it works element by element, add one with\n"
        f'    register("{call.name}", pattern("{terms} -> ..."))\n'
        f"(from dtensor.sharding.rules import pattern, register); dims that must be whole on each "
        f'rank are written with "!", as in "... k! -> ... k!".'
    )


def registered() -> tuple[str, ...]:
    """The names of all ops that have a rule, sorted."""
    return tuple(sorted(_BUILDERS))
