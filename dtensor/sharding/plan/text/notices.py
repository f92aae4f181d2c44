"""What a plan says of placements that are seldom meant.

    ends    a.weight as Shard(0) on tp, which does not line up: ... 144 B sent a step; fix: ...
    warning tp splits 2% of the parameters (up.bias), ...
    hint    3 all_reduces over tp, and 1 with "up.weight" and "down.weight" turned round: ...
    repeats the 2 ranks of tp repeat the same work: 36% of the FLOP of each, ...

Invariants: no "ends" for a plan whose pins all line up; no other line for a training step whose
axes each split an input, the stages or a tenth of the parameters, whose attention is split or
stated as whole, and whose pairs are the right way round. Not here: the comparison of two plans
(plan/swapped_pairs.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from dtensor.sharding.plan.cost.seconds import collectives_of, step_times
from dtensor.sharding.plan.record import Misaligned, PlanRecord, SwappedPair
from dtensor.sharding.plan.steps import Compute, Step, updates_of
from dtensor.sharding.plan.text.words import collapse, op_text, size_text, wrapped
from dtensor.sharding.spec.placements import REPLICATE, Shard

WIDTH = 100
_LEAST = 0.1
"""Of the parameters, by their elements: an axis that splits less is warned of."""
_MOST_REPEATED = 0.05
"""Of the FLOP of a rank: what all ranks of an axis may compute alike without a warning; of an axis
that splits the batch or weights, attention alone counts."""


def notices_of(plan: PlanRecord) -> list[str]:
    """The lines; none of most plans."""
    lines: list[str] = []
    if not updates_of(plan.steps):
        return lines
    for axis in plan.mesh.axes:
        if text := _splits_little(plan, axis):
            lines += wrapped(text, "warning  ", WIDTH)
        elif text := _repeats(plan, axis):
            lines += wrapped(text, "repeats  ", WIDTH)
    for pair in plan.swapped:
        lines += wrapped(_swapped(pair), "hint  ", WIDTH)
    return lines


def split_ends(plan: PlanRecord) -> list[str]:
    """The pins whose split ends at an op that it does not line up with, and what that sends."""
    groups: dict[Misaligned, tuple[dict[str, None], dict[str, None]]] = {}
    for _, opened in plan.opened:
        for item in opened:
            if (pin := item.misaligned) is not None:
                labels, ops = groups.setdefault(replace(pin, ops=()), ({}, {}))
                labels[item.label] = None
                ops.update(dict.fromkeys(pin.ops))
    lines: list[str] = []
    kinds = {item.label: item.kind for item in plan.inputs}
    for pin, (labels, ops) in groups.items():
        stored = any(kinds.get(label) in ("parameter", "buffer") for label in labels)
        sent = _redistributed_bytes(plan, pin.axis, ops)
        if not sent and not stored:
            continue
        at = f" ({pin.source})" if pin.source else ""
        price = f"the activation is redistributed before it, {size_text(sent)} sent a step"
        text = (
            f"{', '.join(collapse(list(labels)))} as {pin.placement!r} on {pin.axis}, which does "
            f"not line up: {pin.why}{at}; {price if sent else 'nothing is sent before it'}; "
            f"pinned by {pin.by}"
        )
        if stored:
            text += f"; fix: {pin.fix}" if pin.fix else "; no other split of the dim lines up"
        lines += wrapped(text, "ends    ", WIDTH)
    return lines


def _redistributed_bytes(plan: PlanRecord, axis: str, ops: Collection[str]) -> int:
    """The bytes that a rank sends over the axis in a step to bring split operands to the ops."""
    makers = {name: step for step in plan.steps for name in step.gives if name}
    waiting = [n for step in plan.steps if step.op and step.op.name in ops for n in step.reads]
    moved: dict[str, Step] = {}
    while waiting:
        name = waiting.pop()
        step = makers.get(name)
        if step is None or name in moved:
            continue
        if any(m.axis == axis and not m.reduces for m in step.moves):
            moved[name] = step
        if step.moves or step.viewed:
            waiting.append(step.reads[0])
        elif isinstance(step, Compute) and not step.flops:  # an elementwise op, as a bias
            shapes = [spec.shape for _, _, spec in step.gives_as()][:1]
            waiting += [read for _, read, spec in step.reads_as() if [spec.shape] == shapes]
    return sum(
        c.bytes_sent * c.times for step in moved.values() for c in collectives_of(plan, step)
    )


def _splits_little(plan: PlanRecord, axis: str) -> str:
    used = (plan.stage_axis, None if plan.zero is None else plan.zero[0])
    if plan.mesh.axis_size(axis) == 1 or axis in used:
        return ""
    labels, share = _split_by(plan, axis)
    if share >= _LEAST:
        return ""
    stated = [by for on, _, by in plan.pinned if on == axis]
    if labels:
        why = f"{', '.join(collapse(labels))} alone, {share:.1%} of the parameters"
    elif stated:
        why = (
            f"nothing: the placements stated on it ({', '.join(collapse(stated))}) are Replicate()"
        )
    else:
        why = "nothing: no placement is stated on it"
    size = plan.mesh.axis_size(axis)
    return (
        f"{axis} splits {why}; so its {size} ranks compute and hold the same. fix: "
        f'{{"*.weight": dict({axis}=dt.Row())}} of the large weights, '
        f"inputs=dict({axis}=dt.Row()) for the batch, or zero={{{axis!r}: 1}}"
    )


def _split_by(plan: PlanRecord, axis: str) -> tuple[list[str], float]:
    """The parameters that the axis splits, and which part of the parameters they are; 1 where it
    splits an argument."""
    split = [i for i in plan.inputs if isinstance(i.base.sharding.get(axis), Shard)]
    elements = {i.label: prod(i.base.shape) for i in plan.inputs if i.kind == "parameter"}
    labels = [item.label for item in split if item.label in elements]
    share = sum(elements[label] for label in labels) / max(sum(elements.values()), 1)
    return labels, 1.0 if _splits_argument(plan, axis) else share


def _splits_argument(plan: PlanRecord, axis: str) -> bool:
    arguments = (item for item in plan.inputs if item.kind == "argument")
    return any(isinstance(item.base.sharding.get(axis), Shard) for item in arguments)


def repeated_work(plan: PlanRecord) -> str:
    """The warning of a training step, a line for each axis whose ranks compute the same; "" for a
    step that splits its work over every axis, or states `Replicate()` on the others."""
    return "\n".join(filter(None, (_repeats(plan, axis) for axis in plan.mesh.axes)))


def _repeats(plan: PlanRecord, axis: str) -> str:
    size = plan.mesh.axis_size(axis)
    little = _split_by(plan, axis)[1] < _LEAST
    if size == 1 or axis == plan.stage_axis or _states_replicas(plan, axis, little):
        return ""
    computed = [(s, s.flops * step_times(plan, s)) for s in plan.steps if isinstance(s, Compute)]
    repeated = [(step, flops) for step, flops in computed if not _is_placed(step, axis)]
    if not little:  # other weights are whole as stated, such as a head's
        repeated = [(s, flops) for s, flops in repeated if _attends(s)]
    total, same = (sum(flops for _, flops in each) for each in (computed, repeated))
    if same <= _MOST_REPEATED * total:
        return ""
    longest = max(repeated, key=lambda each: each[1])[0]
    most = op_text(longest.op.call) + f" at {longest.source}" * bool(longest.source)
    meant = f"inputs=dict({axis}=dt.Replicate())"
    if little:
        fix = (
            f"inputs=dict({axis}=dt.Row()) splits the batch, and "
            f'{{"*.weight": dict({axis}=dt.Row())}} splits weights'
        )
    else:
        if _splits_argument(plan, axis):
            meant = f'{{"*.weight": dict({axis}=dt.Replicate())}} of the weights before it'
        fix = _lining_up(plan, axis) or (
            f"step.plan(...).explain({longest.gives[0]!r}) says why it is not split"
        )
    return (
        f"the {size} ranks of {axis} repeat the same work: {same / total:.0%} of the FLOP of each, "
        f"most of it in {most}.\n"
        f"fix: {fix}; {meant} states that it is meant"
    )


def _attends(step: Compute) -> bool:
    """Whether the step is attention, or a product of attention that a model writes out."""
    return step.rule.kind == "attention" or step.op.call.name == "aten.bmm.default"


def _lining_up(plan: PlanRecord, axis: str) -> str:
    """The fix of the first pin on the axis whose split ends at an op; "" if all pins line up."""
    pins = ((item.label, item.misaligned) for _, opened in plan.opened for item in opened)
    lines_up = (f"{i} as {pin.fix}" for i, pin in pins if pin and pin.fix and pin.axis == axis)
    return next(lines_up, "")


def _states_replicas(plan: PlanRecord, axis: str, little: bool) -> bool:
    """Whether an argument is stated as `Replicate()` on the axis; or a matrix is, if the axis
    splits more than a ``little`` or another axis splits the batch. Otherwise the weights may be
    replicas for data parallelism, and the batch forgotten."""
    stated = {value for on, value, _ in plan.pinned if on == axis}
    counts = not little or any(_splits_argument(plan, other) for other in plan.mesh.axes)
    return any(
        item.kind == "argument" or (counts and len(item.base.shape) > 1)
        for item in plan.inputs
        if item.name in stated and item.base.sharding.get(axis) == REPLICATE
    )


def _is_placed(step: Compute, axis: str) -> bool:
    """Whether a value of the step is split or pending over the axis."""
    specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
    return any(spec.sharding.get(axis, REPLICATE) != REPLICATE for spec in specs)


def _swapped(pair: SwappedPair) -> str:
    summed, given = (", ".join(map(repr, collapse(names))) for names in (pair.summed, pair.given))
    plural = "s" * (pair.other_num != 1)
    return (
        f"{pair.num} all_reduces over {pair.axis} a step; {pair.other_num} all_reduce{plural} with "
        f"these turned round: dt.Row() of {summed}, dt.Column() of {given}. "
        f"Megatron's ColumnParallelLinear is dt.Row() of torch's weight [out, in]"
    )
