"""The two halves of a backward: what other stages wait for, and what nobody waits for.

    backward of a stage x -> mm(x, w) -> mm(., v):
      I    grad_h = mm(grad_y, v'), grad_x = mm(grad_h, w'), and its transfer
      W    grad_v = mm(h', grad_y), grad_w = mm(x', grad_h)

A step belongs to W where all that becomes of it are gradients of one module's parameters, and to I
otherwise: where a transfer, another output or the gradients of several modules hang from it. So the
first stage, which sends no gradient, has an I too. What an I needs is in I, so every W can run
after it; gradients that one op makes together with an input's (a norm's) are made in I.

Not here: when the halves run (the schedule).
"""

from __future__ import annotations

from collections import defaultdict

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Bucket,
    Norm,
    Step,
    Transfer,
    Update,
    operands_of,
    results_of,
)

_OTHER = "an output that is no gradient"


def weight_half(plan: PlanRecord) -> frozenset[str]:
    """The values that the W of the plan's stages make."""
    reached = _modules_reached(plan)
    steps = [s for s in plan.steps if s.phase == "backward" and not s.once]
    needed: set[str] = set()  # by I
    for step in reversed(steps):
        names = [name for name, _ in results_of(step)]
        modules = {module for name in names for module in reached[name]}
        if (
            isinstance(step, Transfer)
            or any(name in needed for name in names)
            or (not isinstance(step, Bucket) and (len(modules) > 1 or _OTHER in modules))
        ):
            needed.update(operands_of(step))
            needed.update(names)
    return frozenset(name for step in steps for name, _ in results_of(step) if name not in needed)


def in_weight_half(step: Step, weights: frozenset[str]) -> bool:
    """``weights``: of `weight_half`, which has all results of a step or none."""
    return any(name in weights for name, _ in results_of(step))


def _modules_reached(plan: PlanRecord) -> dict[str, set[str]]:
    """By value, the modules whose parameters' gradients it has a part in."""
    reached: dict[str, set[str]] = defaultdict(set)
    label_of = {item.name: item.label for item in plan.inputs}
    for output in plan.outputs:
        for _, name in output.values:
            known = output.kind == "gradient"
            reached[name].add(
                _module(label_of.get(str(output.of), str(output.of))) if known else _OTHER
            )
    for step in reversed(plan.steps):
        match step:
            case Update():
                reached[step.gradient].add(_module(step.parameter))
            case Norm():
                for _, value, parameter in step.operands:
                    reached[value].add(_module(parameter))
            case Bucket() if not step.in_place:
                for operand, result in zip(step.operands, step.results, strict=True):
                    reached[operand] |= reached[result]
            case _:
                found = {m for name, _ in results_of(step) for m in reached[name]}
                for name in operands_of(step):
                    reached[name] |= found
    return reached


def _module(label: str) -> str:
    return label.rpartition(".")[0]
