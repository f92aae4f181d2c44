"""The reasons that a page shows for placements and collectives.

    reasons = Reasons(plan)
    reasons.why("mm_1_reduced")       # the lines of plan.explain, without the first
    reasons.pins(step)                # ("*.up.weight",): pins that cause the collective
    reasons.nearby_pins(step)         # ("*.down.weight",): pins of parameters next to the value
    reasons.hints(kind, axis, ...)    # indices of the hints in plan.hints about the collective

Only hints in `plan.hints`, which are planned and priced, claim to remove a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Norm, Redistribute, Step, Transfer
from dtensor.sharding.plan.text.words import collapse

_MAX_DEPTH = 12
"""How many ops back from a collective's operand pins are searched."""


class Reasons:
    """The reasons for the placements and collectives of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.index = plan.index

    def why(self, name: str) -> str:
        """Return the text of plan.explain for a value, without its type."""
        return "\n".join(self.index.reasons(name))

    def operand_reason(self, step: Step) -> str:
        """Return why a conversion's operand has its placement on the axis; "" for other steps."""
        if not isinstance(step, Redistribute) or not step.is_alone:
            return ""
        operand, start = step.operands[0], f"on {step.axis}: "
        if operand not in self.index.producers:
            return ""
        lines = [line for line in self.index.reasons(operand) if line.startswith(start)]
        return f"{operand} {lines[0]}" if lines else ""

    def pins(self, step: Step) -> tuple[str, ...]:
        """Return the names of the pins that cause a redistribution: those that split its operands
        over its axis, or the values from which they are computed."""
        match step:
            case Redistribute() if not step.in_place and not step.tied:
                openers = [
                    by for name in step.operands[:4] for by in self._openers(step.axis, name)
                ]
            case _:
                openers = []
        return tuple(dict.fromkeys(openers))

    def nearby_pins(self, step: Step) -> tuple[str, ...]:
        """Return the pins on a conversion's axis of the parameters that are operands of the ops
        which produce or read the converted value; () for another step."""
        if not isinstance(step, Redistribute) or not step.is_alone:
            return ()
        producer = self.index.producers.get(step.operands[0])
        pins: list[str] = []
        for near in (producer, *self.index.readers.get(step.name, ())):
            # the parameters that an op next to the value reads, perhaps through views
            for name in near.reads if near is not None and near.op is not None else ():
                value = name
                while (producer := self.index.producers.get(value)) and (base := producer.viewed):
                    value = base
                pins.append(self.index.pinned.get((step.axis, value), ""))
        return tuple(dict.fromkeys(filter(None, pins)))

    def option(self, step: Step) -> str:
        """Return the user's option, such as ``zero=``, that causes a collective; "" if pins do."""
        match step:
            case Redistribute() if step.bucket:
                zero = self.plan.zero
                return str(zero) if zero is not None and step.axis in zero.axes else ""
            case Transfer() | Redistribute(tied=(_, *_)):
                option = "stages that are found" if self.plan.auto else "stages="
                return f"{option} on {self.plan.stage_axis}"
            case Norm():
                return "grad_scaler=" if step.max_norm == math.inf else "clip_grad_norm="
            case _:
                return ""

    def hints(
        self, kind: str, axis: str, phase: str, source: str, pins: Iterable[str]
    ) -> list[int]:
        """Return the indices of the hints that remove the collective, then of hints about pins."""
        about = [n for n, h in enumerate(self.plan.hints) if h.axis == axis and h.by in set(pins)]
        key = (kind, axis, phase, source)
        removing = [n for n, h in enumerate(self.plan.hints) if key in h.removed]
        return list(dict.fromkeys((*removing, *about)))

    def step_reason(self, step: Step) -> str:
        """Return the reason for a step without results: a norm, or a gather of updated slices."""
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
        """Return the pins that led the planner to split the value ``name`` over the axis; if there
        are none, the pins that split the nearest values from which it is computed."""
        level, visited = [name], {name}
        for _ in range(_MAX_DEPTH):
            openers = [by for n in level for by in self.index.opened.get((axis, n), {}).values()]
            if openers or not level:
                return list(dict.fromkeys(openers))
            level = [n for n in self._operands_of_producers(level) if n not in visited]
            visited.update(level)
        return []

    def _operands_of_producers(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if (step := self.index.producers.get(name)) is not None:
                yield from dict.fromkeys(step.reads)
