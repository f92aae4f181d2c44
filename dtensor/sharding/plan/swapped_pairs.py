"""Pairs of weights that are split the wrong way round: the first by what its product sums over, the
second by what comes out. Megatron's ColumnParallelLinear is `Row()` of torch's weight [out, in].

    swapped(request, planned)
    # (SwappedPair(axis="tp", summed=("up.weight",), given=("down.weight",), num=3, other_num=1),)

The weights of all such patterns are turned round together and the program is planned once more, so
it is a fact about two plans. Who asks looks first whether the forward slices a whole value: a pair
that is the right way round sums over what is split already.

Not here: one pattern turned round (hints.py).
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.contractions import contractions_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan, rules_of, trained
from dtensor.sharding.plan.record import SwappedPair
from dtensor.sharding.plan.request import Request
from dtensor.sharding.spec.placements import Shard, on_dim, one_block


def swapped(request: Request, planned: Plan) -> tuple[SwappedPair, ...]:
    """At most one for each axis: that which costs fewer all_reduces turned round."""
    flow = trained(request)
    rules, batch = rules_of(flow), flow.batch_values
    pairs: list[SwappedPair] = []
    for axis in planned.mesh.axes:
        turned: dict[str, Shard] = {}
        ways: dict[str, bool] = {}  # by pattern: whether it splits what is summed over
        for value, by in request.pinned_by.items():
            stated = request.pins[value].get(axis)
            products = contractions_of(flow, rules, value, batch)
            if not isinstance(stated, Shard) or not products or products[0].lookup:
                continue
            one, dim = products[0], stated.dim % len(flow.metas[value].shape)
            if dim in (one.contracted_dim, one.output_dim):
                ways[by] = dim == one.contracted_dim
                other = one.output_dim if ways[by] else one.contracted_dim
                turned[value] = one_block(on_dim(stated, other))
        if len(set(ways.values())) == 2:
            pairs += _compared(request, planned, axis, turned, ways)
    return tuple(pairs)


def _compared(
    request: Request, planned: Plan, axis: str, turned: dict[str, Shard], ways: dict[str, bool]
) -> list[SwappedPair]:
    pins = {
        value: {**stated, axis: turned[value]} if value in turned else stated
        for value, stated in request.pins.items()
    }
    try:
        other = plan(replace(request, pins=pins, misaligned="error"))
    except PlanningError:  # they do not go together so, or would be gathered instead of reduced
        return []
    num, other_num = _num_reduced(planned, axis), _num_reduced(other, axis)
    if other_num >= num:
        return []
    return [
        SwappedPair(
            axis=axis,
            summed=tuple(by for by, contracted in ways.items() if contracted),
            given=tuple(by for by, contracted in ways.items() if not contracted),
            num=num,
            other_num=other_num,
        )
    ]


def _num_reduced(planned: Plan, axis: str) -> int:
    reductions = (c for c in planned.collectives if c.kind == "all_reduce" and c.axis == axis)
    return sum(collective.times for collective in reductions)
