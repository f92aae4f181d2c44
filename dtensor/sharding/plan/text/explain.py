"""Explains why a value of a plan has its placement, and why each conversion of it exists.

    print(plan.explain("h"))              # the name of a value, or of a parameter: "up.weight"
    h: f32[8,64@tp]
      h = add(mm, up_bias)    forward    mlp.py:14: h = self.up(x)
      on tp: factor e1 of add is split over 2 ranks; follows the pins, opened by *.up.weight
      read by a = gelu(h)    mlp.py:15

The reasons come from the plan: the strategy of the op on each axis, the pins that opened the
factor, and the conversions. The plan does not keep the prices of alternatives.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence

from dtensor.errors import PlanningError
from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.record import Misaligned, PlannedInput, PlanRecord, Region
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
)
from dtensor.sharding.plan.text.words import call_text, distance_text, op_text, size_text
from dtensor.sharding.redistribute.moves import bytes_sent_together
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial, Placement, Replicate, Shard


class PlanIndex:
    """The steps, inputs and pins of a plan, indexed by the names of values.

    producers: value -> the step that makes it. readers: value -> the steps that read it, in order.
    pinned: (axis, value) -> the name for which the user wrote the pin. opened: (axis, value) ->
    the pins that split the value, as {position among the axis's pins: name}. ends: (axis, pinned
    value) -> why the split ends at an op.
    """

    def __init__(self, plan: PlanRecord) -> None:
        """Index the plan by one walk over its inputs, steps, pins, regions and outputs."""
        self.plan = plan
        self.specs = plan.value_specs()
        self.inputs = {item.name: item for item in (*plan.inputs, *plan.delayed)}
        self.names = {item.label: item.name for item in plan.inputs}
        self.pinned = {(axis, value): by for axis, value, by in plan.pinned}
        self.producers: dict[str, Step] = {}
        self.readers: dict[str, list[Step]] = defaultdict(list)
        for step in plan.steps:
            self.producers.update(dict.fromkeys(step.gives, step))
            for name in dict.fromkeys(step.reads):
                self.readers[name].append(step)
        self.opened: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        self.ends: dict[tuple[str, str], Misaligned] = {}
        for axis, opened in plan.opened:
            for number, pin in enumerate(opened):
                if pin.misaligned is not None:
                    self.ends[axis, pin.reached[0]] = pin.misaligned
                for name in pin.reached:
                    self.opened[axis, name][number] = pin.by
        self._recompute_reasons: dict[str, list[str]] = defaultdict(list)
        for region in plan.regions:
            self._add_recompute_reasons(region)
        self._outputs: dict[str, list[str]] = defaultdict(list)
        words = {"result": "result ", "delayed": "kept for the next step as the gradient of "}
        for output in plan.outputs:
            text = f"{words.get(output.kind, f'{output.kind} of ')}{output.of}"
            for value in dict.fromkeys(value for _, value in output.values):
                self._outputs[value].append(text)

    def explain(self, name: str) -> str:
        """Return the spec of a value and the reasons, one per line. Raises PlanningError, which
        lists similar names, if there is no such value."""
        name = self.names.get(name, name)
        if name not in self.specs:
            similar = difflib.get_close_matches(name, self.specs, 3)
            raise PlanningError(
                f"the plan has no value {name!r}"
                + (f"; near: {', '.join(similar)}" if similar else "")
            )
        return "\n  ".join([f"{name}: {self.specs[name]}", *self.reasons(name)])

    def reasons(self, name: str) -> list[str]:
        """Return why the value has its placement, as lines about its origin, placement and uses."""
        item, producer = self.inputs.get(name), self.producers.get(name)
        return [
            *([] if item is None else _input_lines(self, item)),
            *([] if producer is None else _producer_lines(self, producer, name)),
            *self._recompute_reasons.get(name, ()),
            *_reader_lines(self, name),
            *self._outputs.get(name, ()),
        ]

    def openers(self, axis: str, values: Sequence[str]) -> list[str]:
        """Return the names of the pins on the axis that split one of the values."""
        pins: dict[int, str] = {}
        for value in values:
            pins |= self.opened.get((axis, value), {})
        return list(dict.fromkeys(pins[number] for number in sorted(pins)))

    def _add_recompute_reasons(self, region: Region) -> None:
        """Record which values are repeated or saved because the region is recomputed."""
        name, reasons = region.name, self._recompute_reasons
        for value, again in region.repeated:
            reasons[value].append(f"not kept for the backward of {name}: see {again}")
        for _, again in region.repeated:
            reasons[again].append(
                f"recomputed in the backward of {name}, whose values are not kept"
            )
        for value in region.communicated:
            text = f"saved for {name}: to compute it again it would be communicated"
            reasons[value].append(text)
        for value in region.saved:
            if value not in region.communicated:
                reasons[value].append(f"saved for {name}, which is computed again from it")


# -- where a value comes from --------------------------------------------------------------------


def _input_lines(index: PlanIndex, item: PlannedInput) -> list[str]:
    """Return the lines about an input: its kind, storage, and placement on each axis."""
    plan = index.plan
    if item.kind == "delayed":
        return [f"the gradient of {item.label} that the step before kept"]
    where = f"    held by stage {' and '.join(map(str, item.stages))}"
    where = where if plan.num_stages > 1 else ""
    lines = [f"{item.kind} {item.label}{where}"]
    if item.owned is not None:
        lines.append(f"updated by one rank: gradient and optimizer state are {item.owned} there")
    if item.owned is not None and item.zero == 3 and item.stored is not None:
        lines.append(f"zero 3: stores it as {item.stored}")
    elif item.owned is None and item.stored is not None:
        texts = {1: "its optimizer state", 2: "its gradient and optimizer state"}
        state = texts.get(item.zero, "it, its gradient and optimizer state")
        lines.append(f"zero {item.zero}: stores {state} as {item.stored}")
    misaligned = {pin.axis: pin for pin in item.misaligned}
    for axis, placement in item.spec.sharding.items():
        if pin := misaligned.get(axis):
            lines.append(
                f"on {axis}: stored as {pin.placement!r}, pinned by {pin.by}, which does not line "
                f"up: {pin.why}; gathered before use{_source_text(pin.source)}"
            )
        elif by := index.pinned.get((axis, item.name)):
            end = index.ends.get((axis, item.name))
            text = f"; its split ends where {end.why}{_source_text(end.source)}" if end else ""
            lines.append(f"on {axis}: {placement!r}, pinned by {by}{text}")
        elif axis == MICROBATCH_AXIS:
            continue
        elif isinstance(placement, Shard):
            by = ", ".join(index.openers(axis, [item.name]))
            lines.append(
                f"on {axis}: {placement!r}, no pin; chosen as cheapest: its uses are split, "
                f"opened by {by}"
            )
        else:
            reached = index.openers(axis, [item.name])
            why = "chosen as cheapest" if reached else "no pin on the axis reaches it"
            lines.append(f"on {axis}: {placement!r}, no pin; {why}")
    return lines


def _producer_lines(index: PlanIndex, step: Step, name: str) -> list[str]:
    """Return the lines about the step that makes the value ``name``."""
    plan = index.plan
    match step:
        case Compute(op=op):
            source = f"    {op.source}: {op.source_text}" if op.source else ""
            once = "    once a step" if step.once else ""
            text = f"{', '.join(step.gives)} = {call_text(op.call, step.operands)}"
            stage = f"stage {step.stage} " if plan.num_stages > 1 else ""
            lines = [f"{text}    {stage}{step.phase}{once}{source}"]
            return [*lines, *_axis_lines(index, step, name)]
        case Redistribute() if step.bucket:
            at = step.results.index(name)
            move = step.moves[at]
            gathered = "scattered" if step.reduces_gradients else "stored split"
            words = {"all_gather": f"{gathered} over", "all_to_all": "split on"}
            why = words.get(step.kind, "pending on")
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
            return [f"{_conversion(plan, step)}: {step.why}{_source_text(step.source)}"]
        case Accumulate():
            return [f"the sum over microbatches of {step.operand}, which is for {step.of}"]
        case Norm() | Update():
            return []


def _axis_lines(index: PlanIndex, step: Compute, name: str) -> list[str]:
    """Return, for each axis, why the op's result ``name`` has its placement there."""
    inner = index.plan.inner
    strategies = dict(step.strategies)
    spec = step.result_specs[step.results.index(name)]
    assert spec is not None
    return [
        f"on {axis}: {_axis_reason(index, step, axis, spec.placement(axis), strategies.get(axis))}"
        for axis in inner.axes
        if inner.axis_size(axis) > 1
    ]


def _axis_reason(
    index: PlanIndex, step: Compute, axis: str, placement: Placement, strategy: Strategy | None
) -> str:
    """Return why a result of an op has ``placement`` on the axis."""
    op = step.op
    kind = "replicate" if strategy is None else strategy.kind
    label = "+".join(strategy.factors) if strategy and strategy.factors else kind
    num = index.plan.inner.axis_size(axis)
    follows = _followed_pins(index, axis, op)
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


def _followed_pins(index: PlanIndex, axis: str, op: Op) -> str:
    """Return the text about the pins that reach the op."""
    if axis == MICROBATCH_AXIS:
        return "the batch is cut into microbatches"
    values = [*op.operands, *(name for name in op.results if name is not None)]
    by = index.openers(axis, values)
    return f"follows the pins, opened by {', '.join(by)}" if by else "no pin on the axis reaches it"


# -- where a value goes ----------------------------------------------------------------------------


def _reader_lines(index: PlanIndex, name: str) -> list[str]:
    """Return one line for each step that reads or converts the value."""
    plan, lines = index.plan, list[str]()
    for step in index.readers.get(name, ()):
        match step:
            case Compute():
                text = call_text(step.op.call, step.operands)
                lines.append(f"read by {', '.join(step.gives)} = {text}{_source_text(step.source)}")
            case Redistribute() if step.in_place:
                lines.append(f"gathered over {step.axis} within {step.name} when it is updated")
            case Redistribute() if step.bucket:
                at = step.operands.index(name)
                noun = "the gradient of" if step.noun == "gradient" else "the parameter"
                lines.append(
                    f"{step.kind} on {step.axis} within {step.name}, "
                    f"{size_text(step.moves[at].bytes_sent)} sent: {step.results[at]}, {noun} "
                    f"{step.of[at]}"
                )
            case Redistribute() if step.tied:
                lines.append(f"summed over stages {_stages(step)}: {step.of[0]}")
            case Redistribute() | Transfer():
                lines.append(f"{_conversion(plan, step)}: {step.why}{_source_text(step.source)}")
            case Accumulate():
                lines.append(f"summed over microbatches into {step.result}")
            case Norm():
                lines.append(f"counted in {step.result}")
            case Update():
                lines.append(f"read by the update of {step.parameter} ({step.optimizer})")
    return lines


def _conversion(plan: PlanRecord, step: Redistribute | Transfer) -> str:
    """Return the text of a step that converts, shifts or transfers values."""
    times = step_times(plan, step)
    times_text = f" x{times}" if times > 1 else ""
    if isinstance(step, Transfer):
        sent = f"{size_text(step.spec.max_local_nbytes)} sent{times_text}"
        where = f"{plan.stage_axis} {step.stage} -> {step.to_stage}"
        return f"{step.result} = transfer({step.operand}, {where}), {sent}"
    sent = f"{size_text(sum(bytes_sent_together(step.moves)))} sent{times_text}"
    sent = "free" if step.is_free else sent
    if step.counts:
        sent += (
            f" if the experts have equally many rows, at most "
            f"{size_text(step.moves[0].most_bytes_sent)}; sized by {step.counts}"
        )
    ends = (f"from {move.src} to {move.dst}" for move in step.moves)
    where = f"{', '.join(step.operands)}, {step.axis}{distance_text(step)}"
    text = f"{', '.join(step.results)} = {step.kind}({where})"
    return f"{text} {', '.join(ends)}, {sent}"


def _stages(step: Redistribute) -> str:
    return ", ".join(map(str, step.tied))


def _source_text(source: str) -> str:
    return f"    {source}" if source else ""
