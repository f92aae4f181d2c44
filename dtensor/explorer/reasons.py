"""The reasons for a value's placement, the pins that opened a collective, and hints to remove it.

    reasons = Reasons(plan)
    reasons.why("mm_1_reduced")       # the lines of plan.explain, without the first
    reasons.pins(step)                # ("*.up.weight",): those that opened the collective's axis
    reasons.met(step)                 # ("*.down.weight",): of parameters beside the moved value
    reasons.hints(step)               # numbers of plan.hints about those pins

Invariant: only hints that `plan.hints` has planned and priced claim to remove a collective. Not
here: the words, which are those of plan/text/explain.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import (
    Norm,
    Redistribute,
    Step,
    Transfer,
)
from dtensor.sharding.plan.text.words import collapse

_DEEPEST = 12
"""How many ops back from a collective's operand a pin is searched."""


class Reasons:
    """The reasons of one plan; see the module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.index = plan.index

    def why(self, name: str) -> str:
        """The text of plan.explain for a value, without its type."""
        return "\n".join(self.index.reasons(name))

    def cause(self, step: Step) -> str:
        """The reason, for a conversion, why its operand has its placement on the conversion's
        axis."""
        if not isinstance(step, Redistribute) or not step.is_alone:
            return ""
        operand, start = step.operands[0], f"on {step.axis}: "
        if operand not in self.index.producers:
            return ""
        lines = [line for line in self.index.reasons(operand) if line.startswith(start)]
        return f"{operand} {lines[0]}" if lines else ""

    def pins(self, step: Step) -> tuple[str, ...]:
        """The names of the pins that opened the split of the step's axis; () if there are none."""
        match step:
            case Redistribute() if not step.in_place and not step.tied:
                openers = [
                    by for name in step.operands[:4] for by in self._openers(step.axis, name)
                ]
            case _:
                openers = []
        return tuple(dict.fromkeys(openers))

    def met(self, step: Step) -> tuple[str, ...]:
        """The pins on the axis of parameters that are operands where a conversion's value is made,
        and where it is used."""
        if not isinstance(step, Redistribute) or not step.is_alone:
            return ()
        near = [self.index.producers.get(step.operands[0]), *self.index.readers.get(step.name, ())]
        pins: list[str] = []
        for one in near:
            for name in one.reads if one is not None and one.op is not None else ():
                value = name
                while (maker := self.index.producers.get(value)) and (base := maker.viewed):
                    value = base
                pins.append(self.index.pinned.get((step.axis, value), ""))
        return tuple(dict.fromkeys(filter(None, pins)))

    def states(self, step: Step) -> str:
        """The user's statement, other than a pin, that causes a collective."""
        match step:
            case Redistribute() if step.bucket:
                axis, level = self.plan.zero or ("", 0)
                return f"zero={{{axis!r}: {level}}}" if axis == step.axis else ""
            case Transfer() | Redistribute(tied=(_, *_)):
                how = "stages that are found" if self.plan.auto else "stages="
                return f"{how} on {self.plan.stage_axis}"
            case Norm():
                return "grad_scaler=" if step.max_norm == math.inf else "clip_grad_norm="
            case _:
                return ""

    def hints(
        self, kind: str, axis: str, phase: str, source: str, pins: Iterable[str]
    ) -> list[int]:
        """The hints that remove such a collective, then those about its pins, by number."""
        about = [n for n, h in enumerate(self.plan.hints) if h.axis == axis and h.by in set(pins)]
        key = (kind, axis, phase, source)
        removing = [n for n, h in enumerate(self.plan.hints) if key in h.removed]
        return list(dict.fromkeys((*removing, *about)))

    def end(self, step: Step) -> str:
        """The reason for a step without a result that explain could name."""
        match step:
            case Norm():
                parts = ["the global norm of all gradients: each rank squares its own, ranks and "]
                parts.append("stages add up")
                if step.max_norm != math.inf:
                    parts.append(f"; gradients are scaled where it is above {step.max_norm:g}")
                if step.scaled:
                    parts.append("; gradients are divided by the scale of the loss")
                return "".join(parts)
            case Redistribute():
                of = ", ".join(collapse(step.of))
                return (
                    f"each rank along {step.axis} has updated its slice of {of}; "
                    "the slices are gathered"
                )
            case _:
                return ""

    def _openers(self, axis: str, name: str) -> list[str]:
        """The pins nearest to a value, going back from it through the ops that make it."""
        level, seen = [name], {name}
        for _ in range(_DEEPEST):
            openers = [by for n in level for by in self.index.opened.get((axis, n), {}).values()]
            if openers or not level:
                return list(dict.fromkeys(openers))
            level = [n for n in self._read_by_makers(level) if n not in seen]
            seen.update(level)
        return []

    def _read_by_makers(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if (step := self.index.producers.get(name)) is not None:
                yield from dict.fromkeys(step.reads)
