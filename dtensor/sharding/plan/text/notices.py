"""Finds placements that the user probably did not intend, and renders the plan's lines about them.

    ends    a.weight as Shard(0) on tp, which does not line up: ... 144 B sent a step; fix: ...
    warning tp splits 2% of the parameters (up.bias), ...
    hint    3 all_reduces over tp, and 1 with "up.weight" and "down.weight" turned round: ...
    repeats the 2 ranks of tp repeat the same work: 36% of the FLOP of each, ...

All except "ends" are for training steps only. An axis gets no warning if it splits an input, the
stages or a tenth of the parameters, and also splits attention, or the user stated Replicate for
attention.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from dtensor.sharding.plan.cost.seconds import collectives_of, step_times
from dtensor.sharding.plan.record import Misaligned, PlanRecord, SwappedPair
from dtensor.sharding.plan.steps import Compute, Step, updates_of
from dtensor.sharding.plan.storage import Zero
from dtensor.sharding.plan.text.words import collapse, op_text, size_text, wrapped
from dtensor.sharding.spec.placements import REPLICATE, Shard
from dtensor.showing import WIDTH

_MIN_SPLIT_FRACTION = 0.1
"""An axis that splits a smaller fraction of the parameters' elements gets a warning."""
_MAX_REPEATED_FRACTION = 0.05
"""The fraction of a rank's FLOP that all ranks of an axis may repeat without a warning. If the axis
splits the batch or weights, only attention counts as repeated."""


def notices_of(plan: PlanRecord) -> list[str]:
    """Return the lines "warning", "repeats" and "hint" about placements that the user probably did
    not intend; [] for most plans."""
    lines: list[str] = []
    if not updates_of(plan.steps):
        return lines
    for axis in plan.mesh.axes:
        if text := _little_split_text(plan, axis):
            lines += wrapped(text, "warning  ", WIDTH)
        elif text := _repeated_work_text(plan, axis):
            lines += wrapped(text, "repeats  ", WIDTH)
    for pair in plan.swapped:
        lines += wrapped(_swapped_text(pair), "hint  ", WIDTH)
    return lines


def split_ends(plan: PlanRecord) -> list[str]:
    """Return the lines "ends": pins that do not line up with an op, and the bytes this sends."""
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
    """Return the bytes that a rank sends over the axis in a step to convert the operands of these
    ops, searching back through conversions, views and elementwise ops."""
    producers = {name: step for step in plan.steps for name in step.gives if name}
    pending = [n for step in plan.steps if step.op and step.op.name in ops for n in step.reads]
    conversions: dict[str, Step] = {}
    while pending:
        name = pending.pop()
        step = producers.get(name)
        if step is None or name in conversions:
            continue
        if any(m.axis == axis and not m.reduces for m in step.moves):
            conversions[name] = step
        if step.moves or step.viewed:
            pending.append(step.reads[0])
        elif isinstance(step, Compute) and not step.flops:  # elementwise, such as adding a bias
            shapes = [spec.shape for _, _, spec in step.gives_as()][:1]
            pending += [read for _, read, spec in step.reads_as() if [spec.shape] == shapes]
    return sum(
        c.bytes_sent * c.times for step in conversions.values() for c in collectives_of(plan, step)
    )


def _little_split_text(plan: PlanRecord, axis: str) -> str:
    """Return the warning about an axis that splits (almost) nothing; "" if it splits enough."""
    zero = plan.zero or Zero((), 1) if plan.level_choice is None else plan.level_choice
    if plan.mesh.axis_size(axis) == 1 or axis in (plan.stage_axis, *zero.axes):
        return ""
    labels, share = _split_parameters(plan, axis)
    if share >= _MIN_SPLIT_FRACTION:
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
        f"inputs=dict({axis}=dt.Row()) for the batch, or {Zero((*zero.axes, axis), zero.level)}"
    )


def _split_parameters(plan: PlanRecord, axis: str) -> tuple[list[str], float]:
    """Return the parameters that the axis splits, and their fraction of all parameters; the
    fraction is 1 if the axis splits an argument."""
    split = [i for i in plan.inputs if isinstance(i.base.sharding.get(axis), Shard)]
    elements = {i.label: prod(i.base.shape) for i in plan.inputs if i.kind == "parameter"}
    labels = [item.label for item in split if item.label in elements]
    share = sum(elements[label] for label in labels) / max(sum(elements.values()), 1)
    return labels, 1.0 if _splits_argument(plan, axis) or _is_annotated(plan, axis) else share


def _is_annotated(plan: PlanRecord, axis: str) -> bool:
    """Return whether an annotation in the program splits a value over the axis."""
    annotated = {op.results[0] for op in plan.flow.ops if op.call.name == "dt.annotate.default"}
    return any(on == axis and o.label in annotated for on, all_ in plan.opened for o in all_)


def _splits_argument(plan: PlanRecord, axis: str) -> bool:
    arguments = (item for item in plan.inputs if item.kind == "argument")
    return any(isinstance(item.base.sharding.get(axis), Shard) for item in arguments)


def repeated_work(plan: PlanRecord) -> str:
    """Return the warning about repeated work of a training step, one line for each axis whose ranks
    repeat the same work; "" if every axis splits work or has a stated `Replicate()`."""
    return "\n".join(filter(None, (_repeated_work_text(plan, axis) for axis in plan.mesh.axes)))


def _repeated_work_text(plan: PlanRecord, axis: str) -> str:
    """Return the warning about work that all ranks of the axis repeat; "" if there is little."""
    size = plan.mesh.axis_size(axis)
    splits_little = _split_parameters(plan, axis)[1] < _MIN_SPLIT_FRACTION
    if size == 1 or axis == plan.stage_axis or _states_replicas(plan, axis, splits_little):
        return ""
    ops = [(s, s.flops * step_times(plan, s)) for s in plan.steps if isinstance(s, Compute)]
    repeated = [(step, flops) for step, flops in ops if not _is_placed(step, axis)]
    if not splits_little:  # then other replicated weights, such as a head's, are intended
        repeated = [(s, flops) for s, flops in repeated if _attends(s)]
    total, num_repeated = (sum(flops for _, flops in pairs) for pairs in (ops, repeated))
    if num_repeated <= _MAX_REPEATED_FRACTION * total:
        return ""
    longest = max(repeated, key=lambda op_and_flops: op_and_flops[1])[0]
    longest_text = op_text(longest.op.call) + f" at {longest.source}" * bool(longest.source)
    statement = f"inputs=dict({axis}=dt.Replicate())"
    if splits_little:
        fix = (
            f"inputs=dict({axis}=dt.Row()) splits the batch, and "
            f'{{"*.weight": dict({axis}=dt.Row())}} splits weights'
        )
    else:
        if _splits_argument(plan, axis):
            statement = f'{{"*.weight": dict({axis}=dt.Replicate())}} of the weights before it'
        fix = _aligned_fix(plan, axis) or (
            f"step.plan(...).explain({longest.gives[0]!r}) says why it is not split"
        )
    return (
        f"the {size} ranks of {axis} repeat the same work: {num_repeated / total:.0%} of the FLOP "
        f"of each, most of it in {longest_text}.\n"
        f"fix: {fix}; {statement} states that it is meant"
    )


def _attends(step: Compute) -> bool:
    """Return whether the step is attention, or a batched product of attention that is written
    out."""
    return step.rule.kind == "attention" or step.op.call.name == "aten.bmm.default"


def _aligned_fix(plan: PlanRecord, axis: str) -> str:
    """Return the fix of the first misaligned pin on the axis that has one; "" if none has."""
    pins = ((item.label, item.misaligned) for _, opened in plan.opened for item in opened)
    fixes = (f"{i} as {pin.fix}" for i, pin in pins if pin and pin.fix and pin.axis == axis)
    return next(fixes, "")


def _states_replicas(plan: PlanRecord, axis: str, splits_little: bool) -> bool:
    """Return whether the user stated replicas on the axis, so that repeated work is intended.

    A stated `Replicate()` of an argument counts. A stated `Replicate()` of a weight matrix counts
    only if the axis splits more than a little, or if some axis splits the batch: otherwise the user
    may have stated replicas for data parallelism and forgotten to split the batch.
    """
    stated = {value for on, value, _ in plan.pinned if on == axis}
    batch_split = any(_splits_argument(plan, other) for other in plan.mesh.axes)
    weights_count = not splits_little or batch_split
    return any(
        item.kind == "argument" or (weights_count and len(item.base.shape) > 1)
        for item in plan.inputs
        if item.name in stated and item.base.sharding.get(axis) == REPLICATE
    )


def _is_placed(step: Compute, axis: str) -> bool:
    """Return whether a value of the step is split or pending over the axis."""
    specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
    return any(spec.sharding.get(axis, REPLICATE) != REPLICATE for spec in specs)


def _swapped_text(pair: SwappedPair) -> str:
    """Return the hint that weights cost fewer all_reduces with their placements swapped."""
    summed, output_split = (
        ", ".join(map(repr, collapse(names))) for names in (pair.summed, pair.output_split)
    )
    plural = "s" * (pair.other_num != 1)
    return (
        f"{pair.num} all_reduces over {pair.axis} a step; {pair.other_num} all_reduce{plural} with "
        f"these turned round: dt.Row() of {summed}, dt.Column() of {output_split}. "
        f"Megatron's ColumnParallelLinear is dt.Row() of torch's weight [out, in]"
    )
