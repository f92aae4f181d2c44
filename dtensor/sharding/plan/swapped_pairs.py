"""Finds pairs of weights whose Row and Column placements are probably swapped by mistake.

    swapped(request, planned)
    # (SwappedPair(axis="tp", summed=("up.weight",), given=("down.weight",), num=3, other_num=1),)

The mistake is common: Megatron's ColumnParallelLinear is `Row()` of torch's weight [out, in]. In a
swapped pair, the first weight is split over the dim that its product sums, the second over its
output dim. The program is planned again with the placements of all such weights swapped, and a pair
is reported if this plan has fewer all_reduces. Swapping a single pattern is tried in hints.py.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.contractions import contractions_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan, rules_of, training_flow
from dtensor.sharding.plan.record import SwappedPair
from dtensor.sharding.plan.request import Request
from dtensor.sharding.spec.placements import Shard, on_dim, one_block


def swapped(request: Request, planned: Plan) -> tuple[SwappedPair, ...]:
    """Return at most one swapped pair for each axis. ``planned``: the plan of ``request``.

    The caller checks first that the forward slices a full value: with correct placements, the
    operand of a weight that is split over the summed dim is already split.
    """
    flow = training_flow(request)
    rules, batch = rules_of(flow), flow.batch_values
    pairs: list[SwappedPair] = []
    for axis in planned.mesh.axes:
        opposites: dict[str, Shard] = {}
        splits_summed: dict[str, bool] = {}  # by pattern: whether it splits the summed dim
        for value, by in request.pinned_by.items():
            stated = request.pins[value].get(axis)
            contractions = contractions_of(flow, rules, value, batch)
            if not isinstance(stated, Shard) or not contractions or contractions[0].lookup:
                continue
            contraction, dim = contractions[0], stated.dim % len(flow.metas[value].shape)
            if dim in (contraction.contracted_dim, contraction.output_dim):
                splits_summed[by] = dim == contraction.contracted_dim
                other_dim = (
                    contraction.output_dim if splits_summed[by] else contraction.contracted_dim
                )
                opposites[value] = one_block(on_dim(stated, other_dim))
        if len(set(splits_summed.values())) == 2:
            pairs += _compared(request, planned, axis, opposites, splits_summed)
    return tuple(pairs)


def _compared(
    request: Request,
    planned: Plan,
    axis: str,
    opposites: dict[str, Shard],
    splits_summed: dict[str, bool],
) -> list[SwappedPair]:
    """Plan with the opposite pins; return the pair if that saves all_reduces over ``axis``."""
    pins = {
        value: {**stated, axis: opposites[value]} if value in opposites else stated
        for value, stated in request.pins.items()
    }
    try:
        other = plan(replace(request, pins=pins, misaligned="error"))
    except PlanningError:  # the opposite pins contradict each other, or do not line up
        return []
    num, other_num = _num_reduced(planned, axis), _num_reduced(other, axis)
    if other_num >= num:
        return []
    return [
        SwappedPair(
            axis=axis,
            summed=tuple(by for by, summed in splits_summed.items() if summed),
            given=tuple(by for by, summed in splits_summed.items() if not summed),
            num=num,
            other_num=other_num,
        )
    ]


def _num_reduced(planned: Plan, axis: str) -> int:
    reductions = (c for c in planned.collectives if c.kind == "all_reduce" and c.axis == axis)
    return sum(collective.times for collective in reductions)
