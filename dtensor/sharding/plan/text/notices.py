"""What a plan says of a training step's placements that are seldom meant.

    warning tp splits 2% of the parameters (up.bias), ...
    hint    3 all_reduces over tp, and 1 with "up.weight" and "down.weight" turned round: ...

Invariants: nothing for a step whose axes each split an input, the stages, what zero stores or a
tenth of the parameters, and whose pairs are the right way round. Not here: the comparison of two
plans (plan/swapped_pairs.py).
"""

from __future__ import annotations

from math import prod

from dtensor.sharding.plan.record import PlanRecord, SwappedPair
from dtensor.sharding.plan.steps import updates_of
from dtensor.sharding.plan.text.words import collapse, wrapped
from dtensor.sharding.spec.placements import Shard

WIDTH = 100
_LEAST = 0.1
"""Of the parameters, by their elements: an axis that splits less is warned of."""


def notices_of(plan: PlanRecord) -> list[str]:
    """The lines; none of most plans."""
    lines: list[str] = []
    if not updates_of(plan.steps):
        return lines
    for axis in plan.mesh.axes:
        if text := _splits_little(plan, axis):
            lines += wrapped(text, "warning  ", WIDTH)
    for pair in plan.swapped:
        lines += wrapped(_swapped(pair), "hint  ", WIDTH)
    return lines


def _splits_little(plan: PlanRecord, axis: str) -> str:
    used = (plan.stage_axis, None if plan.zero is None else plan.zero[0])
    if plan.mesh.axis_size(axis) == 1 or axis in used:
        return ""
    split = [i for i in plan.inputs if isinstance(i.base.sharding.get(axis), Shard)]
    if any(item.kind == "argument" for item in split):
        return ""
    elements = {i.label: prod(i.base.shape) for i in plan.inputs if i.kind == "parameter"}
    labels = [item.label for item in split if item.label in elements]
    share = sum(elements[label] for label in labels) / max(sum(elements.values()), 1)
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


def _swapped(pair: SwappedPair) -> str:
    summed, given = (", ".join(map(repr, collapse(names))) for names in (pair.summed, pair.given))
    plural = "s" * (pair.other_num != 1)
    return (
        f"{pair.num} all_reduces over {pair.axis} a step; {pair.other_num} all_reduce{plural} with "
        f"these turned round: dt.Row() of {summed}, dt.Column() of {given}. "
        f"Megatron's ColumnParallelLinear is dt.Row() of torch's weight [out, in]"
    )
