"""The registry of rules: the builder of each op, which returns the rule of one call.

    rule_for(OpCall(aten.mm.default, ...))                 # m k, k n -> m n
    register("mylib.swiglu.default", pattern("..., ... -> ...", linear=((1,),)))

Invariants: an op has one builder; builders are pure; if an op has no builder, or its builder fails,
`rule_for` raises `NoRule`, which names the op, and nothing is replicated silently. Equal calls get
the same rule object, so that results cached by rule serve all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np

from dtensor.errors import PlanningError
from dtensor.private_torch import OpOverload
from dtensor.sharding.ops.call import OpCall, RunNumber
from dtensor.sharding.rules.rule import Rule

Builder = Callable[[OpCall], Rule]

_BUILDERS: dict[str, Builder] = {}


class NoRule(PlanningError):
    """Raised for a call of an op that has no rule."""


def register(names: str | Sequence[str], builder: Builder) -> None:
    """Record the builder of ops, by their full names ("aten.mm.default"). Raises PlanningError if
    one of the ops has a different builder. Registering an equal builder again changes nothing, so a
    line that states a rule may run twice."""
    op_names = (names,) if isinstance(names, str) else names
    for name in op_names:
        if name in _BUILDERS and _BUILDERS[name] != builder:
            raise PlanningError(
                f"{name} has a rule already; a rule is registered once.\n"
                f"fix: remove one of the two; the library's own are in dtensor.sharding.rules"
            )
    _BUILDERS.update(dict.fromkeys(op_names, builder))


def rule_for(call: OpCall) -> Rule:
    """Return the rule of this call. Raises NoRule if its op or its arguments have none."""
    builder = _BUILDERS.get(call.name)
    if builder is None:
        raise no_rule(call, "it is not in the tables of dtensor.sharding.rules")
    return _build(_RuleKey(builder, call))


class _RuleKey:
    """A call and its builder, as a key of the cache of rules. Keys with the literals 1, 1.0 and
    True differ, although tuples of these literals are equal."""

    __slots__ = ("builder", "call", "key")

    def __init__(self, builder: Builder, call: OpCall) -> None:
        self.builder, self.call = builder, call
        literals = (_exact_literal(call.args), _exact_literal(call.kwargs))
        self.key = (builder, call.target, literals, call.operands, call.results, call.multiple)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RuleKey) and self.key == other.key


@lru_cache(maxsize=1 << 11)
def _build(request: _RuleKey) -> Rule:
    """Return the rule of the call. Raises NoRule, with the cause, if its builder fails."""
    try:
        rule = request.builder(request.call)
    except NoRule:
        raise
    except PlanningError as error:  # raised by parse_rule; the message names the pattern
        raise no_rule(request.call, str(error).partition("\n")[0].rstrip(".")) from error
    except Exception as error:
        reason = f"its rule fails with {type(error).__name__}: {error}"
        raise no_rule(request.call, reason) from error
    target = request.call.target
    is_view = isinstance(target, OpOverload) and target.is_view
    return replace(rule, kind="view") if is_view else rule


def _exact_literal(value: object) -> object:
    """Return a key that is equal for two literals only if their types and bits are equal."""
    match value:
        case tuple() | list():
            return tuple(map(_exact_literal, cast(Iterable[object], value)))
        case RunNumber():
            return (RunNumber, value.name, value.hex())
        case float():  # 0.0 and -0.0 are equal, nan is not
            return (float, value.hex())
        case complex():
            return (complex, value.real.hex(), value.imag.hex())
        case _:
            return (type(value), value)


def no_rule(call: OpCall, reason: str) -> NoRule:
    """Return the error for a call without a rule, which shows how to add one."""
    operands = ", ".join(str(meta) for meta in call.operands) or "no tensors"
    op = call.name
    if not op.startswith("aten."):
        namespace, _, short_name = op.removesuffix(".default").partition(".")
        op = f"{namespace}::{short_name}"
    lines = [f"no rule says how {call.name}({operands}) may be split: {reason}."]
    if call.name in _BUILDERS:  # its rule does not cover this call; an op cannot get a second rule
        lines.append("fix: write it with other ops, or as an op of your own that has its dt.rule")
        return NoRule("\n".join(lines))
    lead = "fix: "
    if _broadcasts(call):
        terms = ", ".join("..." for _ in call.operands)
        outs = ", ".join("..." for _ in call.results)
        lines.append(f'fix: dt.rule("{op}", "{terms} -> {outs}") if it works element by element;')
        lead = "     "
    lines.append(f'{lead}dt.rule("{op}", "{_whole_pattern(call)}")')
    lines.append('     is right for any op and splits nothing: remove the "!" of dims that may be')
    lines.append(f'     split, and dt.testing.certify("{op}", *arguments) says whether they may')
    return NoRule("\n".join(lines))


def _broadcasts(call: OpCall) -> bool:
    """Return whether the shapes fit an elementwise op: all results have the broadcast shape."""
    if not call.operands or not call.results:
        return False
    try:
        shape = np.broadcast_shapes(*(meta.shape for meta in call.operands))
    except ValueError:
        return False
    return all(meta is not None and meta.shape == shape for meta in call.results)


def _whole_pattern(call: OpCall) -> str:
    """Return a pattern for these tensors in which no dim may be split: ``a! b! -> c!``."""
    count = itertools.count()
    terms = [
        " ".join(f"{_letter(next(count))}!" for _ in meta.shape) if meta is not None else ""
        for meta in (*call.operands, *call.results)
    ]
    num_operands = len(call.operands)
    return f"{', '.join(terms[:num_operands])} -> {', '.join(terms[num_operands:])}".strip()


def _letter(index: int) -> str:
    letter = chr(ord("a") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"


def registered() -> tuple[str, ...]:
    """Return the names of all ops that have a rule, sorted."""
    return tuple(sorted(_BUILDERS))


def builders() -> Mapping[str, Builder]:
    """Return the builder of every op that has a rule, by the op's full name."""
    return dict(_BUILDERS)
