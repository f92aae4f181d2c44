"""The registry of rules: from an op's name to the builder that makes its rule for one call.

    rule_for(OpCall(aten.mm.default, ...))                 # m k, k n -> m n
    register("mylib.swiglu.default", pattern("..., ... -> ...", linear=((1,),)))

Invariants: an op has one builder; builders are pure; an op without one, or whose builder fails, is
an error that names it (`NoRule`), never replication. Equal calls get the same rule object: what is
found out from a rule is then found out once for all layers. The rules themselves stand in the
tables of this package.
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
    """No rule says how this op may be split."""


def register(names: str | Sequence[str], builder: Builder) -> None:
    """Give ops, by their full names ("aten.mm.default"), a rule; PlanningError if one has another.

    An equal builder changes nothing, so a line that states a rule may run twice.
    """
    several = (names,) if isinstance(names, str) else names
    for name in several:
        if name in _BUILDERS and _BUILDERS[name] != builder:
            raise PlanningError(
                f"{name} has a rule already; a rule is registered once.\n"
                f"fix: remove one of the two; dtensor.sharding.rules holds those of this library"
            )
    _BUILDERS.update(dict.fromkeys(several, builder))


def rule_for(call: OpCall) -> Rule:
    """The rule of this call; NoRule where the op has none or not for these arguments."""
    builder = _BUILDERS.get(call.name)
    if builder is None:
        raise no_rule(call, "it is not in the tables of dtensor.sharding.rules")
    return _built(_Exact(builder, call))


class _Exact:
    """A call and its builder, equal where the rule is: not, as tuples are, for 1, 1.0 and True."""

    __slots__ = ("builder", "call", "key")

    def __init__(self, builder: Builder, call: OpCall) -> None:
        self.builder, self.call = builder, call
        literals = (_exact(call.args), _exact(call.kwargs))
        self.key = (builder, call.target, literals, call.operands, call.results, call.multiple)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Exact) and self.key == other.key


@lru_cache(maxsize=1 << 11)
def _built(asked: _Exact) -> Rule:
    """What a builder did not expect is no rule for this call, which says why and has the cause."""
    try:
        rule = asked.builder(asked.call)
    except NoRule:
        raise
    except PlanningError as error:  # of a pattern, which names itself
        raise no_rule(asked.call, str(error).partition("\n")[0].rstrip(".")) from error
    except Exception as error:
        reason = f"its rule fails with {type(error).__name__}: {error}"
        raise no_rule(asked.call, reason) from error
    target = asked.call.target
    is_view = isinstance(target, OpOverload) and target.is_view
    return replace(rule, kind="view") if is_view else rule


def _exact(value: object) -> object:
    match value:
        case tuple() | list():
            return tuple(map(_exact, cast(Iterable[object], value)))
        case RunNumber():
            return (RunNumber, value.name, value.hex())
        case float():  # 0.0 and -0.0 are equal, nan is not
            return (float, value.hex())
        case complex():
            return (complex, value.real.hex(), value.imag.hex())
        case _:
            return (type(value), value)


def no_rule(call: OpCall, reason: str) -> NoRule:
    """The error for a call that has no rule, naming the operands and how to add a rule."""
    operands = ", ".join(str(meta) for meta in call.operands) or "no tensors"
    op = call.name
    if not op.startswith("aten."):
        namespace, _, rest = op.removesuffix(".default").partition(".")
        op = f"{namespace}::{rest}"
    lines = [f"no rule says how {call.name}({operands}) may be split: {reason}."]
    if call.name in _BUILDERS:  # one that leaves this call out: an op has no second
        lines.append("fix: write it with other ops, or as an op of your own that has its dt.rule")
        return NoRule("\n".join(lines))
    lead = "fix: "
    if _broadcasts(call):
        terms = ", ".join("..." for _ in call.operands)
        outs = ", ".join("..." for _ in call.results)
        lines.append(f'fix: dt.rule("{op}", "{terms} -> {outs}") if it works element by element;')
        lead = "     "
    lines.append(f'{lead}dt.rule("{op}", "{_undivided(call)}")')
    lines.append('     is right for any op and splits nothing: remove the "!" of dims that may be')
    lines.append(f'     split, and dt.testing.certify("{op}", *arguments) says whether they may')
    return NoRule("\n".join(lines))


def _broadcasts(call: OpCall) -> bool:
    """Whether the shapes are those of an op that works element by element."""
    if not call.operands or not call.results:
        return False
    try:
        shape = np.broadcast_shapes(*(meta.shape for meta in call.operands))
    except ValueError:
        return False
    return all(meta is not None and meta.shape == shape for meta in call.results)


def _undivided(call: OpCall) -> str:
    """The pattern of these tensors with every dim whole."""
    count = itertools.count()
    several = [
        " ".join(f"{_letter(next(count))}!" for _ in meta.shape) if meta is not None else ""
        for meta in (*call.operands, *call.results)
    ]
    split = len(call.operands)
    return f"{', '.join(several[:split])} -> {', '.join(several[split:])}".strip()


def _letter(index: int) -> str:
    letter = chr(ord("a") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"


def registered() -> tuple[str, ...]:
    """The names of all ops that have a rule, sorted."""
    return tuple(sorted(_BUILDERS))


def builders() -> Mapping[str, Builder]:
    """Every op that has a rule, with what builds it."""
    return dict(_BUILDERS)
