"""Why a value of a plan has its placement, and why each conversion of it is there.

    print(plan.explain("h"))              # a value's name, or a parameter's: "up.weight"
    h: f32[8,64@tp]
      h = add(mm, up_bias)    forward    mlp.py:14: h = self.up(x)
      on tp: factor e1 of add is split over 2 ranks; follows the pins, opened by *.up.weight
      read by a = gelu(h)    mlp.py:15

The reasons are read off the plan: the strategy that each axis chose for the op, the pins that
opened the factor, the conversions. Prices of what was not chosen are not kept, so not told here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dtensor.errors import PlanningError
from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.record import Opened, PlannedInput, PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
)
from dtensor.sharding.plan.text.words import call_text, op_text, size_text
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial, Placement, Replicate, Shard


def explain(plan: PlanRecord, name: str) -> str:
    """The reasons as lines. PlanningError, with near names, where there is no such value."""
    by_label = {item.label: item.name for item in plan.inputs}
    name = by_label.get(name, name)
    specs = plan.value_specs()
    if name not in specs:
        near = difflib.get_close_matches(name, specs, 3)
        raise PlanningError(
            f"the plan has no value {name!r}" + (f"; near: {', '.join(near)}" if near else "")
        )
    lines = [f"{name}: {specs[name]}"]
    item = next((i for i in plan.inputs if i.name == name), None)
    if item is not None:
        lines += _input(plan, item)
    for step in plan.steps:
        if name in step.gives:
            lines += _made_by(plan, step, name)
    lines += _repeated(plan, name)
    lines += _users(plan, name)
    return "\n".join(f"  {line}" if index else line for index, line in enumerate(lines))


# -- where a value comes from --------------------------------------------------------------------


def _input(plan: PlanRecord, item: PlannedInput) -> list[str]:
    where = f"    held by stage {' and '.join(map(str, item.stages))}"
    where = where if plan.num_stages > 1 else ""
    lines = [f"{item.kind} {item.label}{where}"]
    if item.stored is not None:
        what = {1: "its optimizer state", 2: "its gradient and optimizer state"}
        kept = what.get(item.zero, "it, its gradient and optimizer state")
        lines.append(f"zero {item.zero}: stores {kept} as {item.stored}")
    pinned = {axis: by for axis, value, by in plan.pinned if value == item.name}
    crooked = {pin.axis: pin for pin in item.misaligned}
    for axis, placement in item.spec.sharding.items():
        if pin := crooked.get(axis):
            lines.append(
                f"on {axis}: stored as {pin.placement!r}, pinned by {pin.by}, which does not line "
                f"up: {pin.why}; gathered before use{_from(pin.source)}"
            )
        elif axis in pinned:
            lines.append(f"on {axis}: {placement!r}, pinned by {pinned[axis]}")
        elif axis == MICROBATCH_AXIS:
            continue
        elif isinstance(placement, Shard):
            by = _openers(plan, axis, [item.name])
            lines.append(
                f"on {axis}: {placement!r}, no pin; chosen as cheapest: its uses are split, "
                f"opened by {by}"
            )
        else:
            reached = _openers(plan, axis, [item.name])
            why = "chosen as cheapest" if reached else "no pin on the axis reaches it"
            lines.append(f"on {axis}: {placement!r}, no pin; {why}")
    return lines


def _made_by(plan: PlanRecord, step: Step, name: str) -> list[str]:
    match step:
        case Compute(op=op):
            source = f"    {op.source}: {op.source_text}" if op.source else ""
            once = "    once a step" if step.once else ""
            text = f"{', '.join(step.gives)} = {call_text(op.call, step.operands)}"
            lines = [f"{text}    {_at(plan, step.stage)}{step.phase}{once}{source}"]
            return [*lines, *_per_axis(plan, step, name)]
        case Redistribute() if step.bucket:
            at = step.results.index(name)
            move = step.moves[at]
            why = "pending on" if step.noun == "gradient" else "stored split over"
            sent = f"{size_text(move.bytes_sent)} sent"
            return [
                f"{step.name}: {step.kind} of {len(step.of)} {step.noun}s on {step.axis} in one "
                "bucket",
                f"for {step.of[at]}: {sent}; {why} {step.axis}, wanted as {move.dst}",
            ]
        case Redistribute() if step.tied:
            return [
                f"the sum over stages {_stages(step)} of the gradients of {step.of[0]}, used on "
                "each"
            ]
        case Redistribute() | Transfer():
            return [f"{_conversion(plan, step)}: {step.why}{_from(step.source)}"]
        case Accumulate():
            return [f"the sum over microbatches of {step.operand}, which is for {step.of}"]
        case Norm() | Update():
            return []


def _per_axis(plan: PlanRecord, step: Compute, name: str) -> list[str]:
    strategies = dict(step.strategies)
    index = step.results.index(name)
    spec = step.result_specs[index]
    assert spec is not None
    return [
        f"on {axis}: {_reason(plan, step, axis, spec.placement(axis), strategies.get(axis))}"
        for axis in plan.inner.axes
        if plan.inner.axis_size(axis) > 1
    ]


def _reason(
    plan: PlanRecord, step: Compute, axis: str, placement: Placement, strategy: Strategy | None
) -> str:
    op = step.op
    kind = "replicate" if strategy is None else strategy.kind
    label = "+".join(strategy.factors) if strategy and strategy.factors else kind
    num = plan.inner.axis_size(axis)
    follows = _follows(plan, axis, op)
    ranks = f"{num} microbatches" if axis == MICROBATCH_AXIS else f"{num} ranks"
    match placement:
        case _ if kind == "stated":
            return f"{placement!r}, as the annotation states"
        case Shard():
            return f"factor {label} of {op_text(op.call)} is split over {ranks}; {follows}"
        case Partial(reduction) if kind == "linear":
            return (
                f"a pending {reduction}, passed on: {op_text(op.call)} is linear in its pending "
                f"operands, and to reduce later is cheaper"
            )
        case Partial(reduction):
            return (
                f"a pending {reduction}: {op_text(op.call)} contracts factor {label}, which is "
                f"split over {ranks}; {follows}"
            )
        case Replicate() if kind != "replicate":
            return f"replicated: the result does not have factor {label}, which is split; {follows}"
        case Replicate():
            if axis == MICROBATCH_AXIS:
                return "the same for every microbatch"
            return f"replicated; {follows}"


def _follows(plan: PlanRecord, axis: str, op: Op) -> str:
    if axis == MICROBATCH_AXIS:
        return "the batch is cut into microbatches"
    values = [*op.operands, *(name for name in op.results if name is not None)]
    by = _openers(plan, axis, values)
    return f"follows the pins, opened by {by}" if by else "no pin on the axis reaches it"


def _openers(plan: PlanRecord, axis: str, values: Sequence[str]) -> str:
    """The pins on the axis that reach one of the values, as the user wrote them."""
    opened: dict[str, tuple[Opened, ...]] = dict(plan.opened)
    found = [o.by for o in opened.get(axis, ()) if not set(values).isdisjoint(o.reached)]
    return ", ".join(dict.fromkeys(found))


def _repeated(plan: PlanRecord, name: str) -> list[str]:
    """Whether the value runs again, or is there because another does."""
    lines: list[str] = []
    for region in plan.regions:
        again = dict(region.repeated)
        if name in again:
            lines.append(f"not kept for the backward of {region.name}: see {again[name]}")
        if name in again.values():
            lines.append(f"recomputed in the backward of {region.name}, whose values are not kept")
        if name in region.communicated:
            lines.append(f"saved for {region.name}: to compute it again it would be communicated")
        elif name in region.saved:
            lines.append(f"saved for {region.name}, which is computed again from it")
    return lines


# -- where a value goes ----------------------------------------------------------------------------


def _users(plan: PlanRecord, name: str) -> list[str]:
    """Who reads the value, and the conversions of it."""
    lines: list[str] = []
    for step in plan.steps:
        if name not in step.reads:
            continue
        match step:
            case Compute():
                text = call_text(step.op.call, step.operands)
                lines.append(f"read by {', '.join(step.gives)} = {text}{_from(step.source)}")
            case Redistribute() if step.in_place:
                lines.append(f"gathered over {step.axis} within {step.name} when it is updated")
            case Redistribute() if step.bucket:
                at = step.operands.index(name)
                what = "the gradient of" if step.noun == "gradient" else "the parameter"
                lines.append(
                    f"{step.kind} on {step.axis} within {step.name}, "
                    f"{size_text(step.moves[at].bytes_sent)} sent: {step.results[at]}, {what} "
                    f"{step.of[at]}"
                )
            case Redistribute() if step.tied:
                lines.append(f"summed over stages {_stages(step)}: {step.of[0]}")
            case Redistribute() | Transfer():
                lines.append(f"{_conversion(plan, step)}: {step.why}{_from(step.source)}")
            case Accumulate():
                lines.append(f"summed over microbatches into {step.result}")
            case Norm():
                lines.append(f"counted in {step.result}")
            case Update():
                lines.append(f"read by the update of {step.parameter} ({step.optimizer})")
    for output in plan.outputs:
        if name in (value for _, value in output.values):
            of = "" if output.kind == "result" else "of "
            lines.append(f"{output.kind} {of}{output.of}")
    return lines


def _conversion(plan: PlanRecord, step: Redistribute | Transfer) -> str:
    times = step_times(plan, step)
    often = f" x{times}" if times > 1 else ""
    if isinstance(step, Transfer):
        sent = f"{size_text(step.spec.max_local_nbytes)} sent{often}"
        where = f"{plan.stage_axis} {step.stage} -> {step.to_stage}"
        return f"{step.result} = transfer({step.operand}, {where}), {sent}"
    (move,), (operand,) = step.moves, step.operands
    sent = "free" if step.is_free else f"{size_text(move.bytes_sent)} sent{often}"
    text = f"{step.name} = {move.kind}({operand}, {move.axis})"
    return f"{text} from {move.src} to {move.dst}, {sent}"


def _stages(step: Redistribute) -> str:
    return ", ".join(map(str, step.tied))


def _at(plan: PlanRecord, stage: int) -> str:
    return f"stage {stage} " if plan.num_stages > 1 else ""


def _from(source: str) -> str:
    return f"    {source}" if source else ""
