"""Compares a plan with the plans of opposite pins: Column where Row is stated, or Row for Column.

    hints(request, planned)      # (Hint(by="*.down.weight", axis="tp", opposite=Shard(1), ...),)
    swapped(request, planned)    # (SwappedPair(axis="tp", summed=("up.weight",), ...),)

The opposite of splitting a weight's output dim is splitting the dim that its product sums
(choose/contractions.py). `hints` tries the opposite of each pattern on each axis, on request.
`swapped` tries the opposite of all patterns of an axis together: the two are often confused,
because Megatron's ColumnParallelLinear is `Row()` of torch's weight [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.contractions import Contraction, contractions_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan, rules_of, training_flow
from dtensor.sharding.plan.record import Hint, SwappedPair
from dtensor.sharding.plan.request import Request
from dtensor.sharding.spec.placements import Shard, on_dim, one_block

_MAX_RATIO = 0.99  # of the opposite's seconds to the stated plan's; smaller gains are not reported


def hints(request: Request, planned: Plan) -> tuple[Hint, ...]:
    """Return the hints for ``planned``, the plan of ``request``, in the order of its pins."""
    flow = training_flow(request)
    rules, batch = rules_of(flow), flow.batch_values
    # (pattern, axis) -> value -> (stated placement, dim of the opposite)
    groups: dict[tuple[str, str], dict[str, tuple[Shard, int]]] = {}
    for value, placements in request.pins.items():
        contractions = (
            contractions_of(flow, rules, value, batch) if value in request.pinned_by else ()
        )
        for axis, placement in placements.items():
            if not isinstance(placement, Shard) or value in request.settled or not contractions:
                continue
            dim = placement.dim % len(flow.metas[value].shape)
            opposite_dim = _opposite_dim(contractions[0], dim)
            if opposite_dim is not None:
                key = (request.pinned_by[value], axis)
                groups.setdefault(key, {})[value] = (placement, opposite_dim)
    request = _with_chosen_attention(request, planned)
    candidates = (_hint(request, planned, by, axis, pins) for (by, axis), pins in groups.items())
    return tuple(hint for hint in candidates if hint is not None)


def swapped(request: Request, planned: Plan) -> tuple[SwappedPair, ...]:
    """Return at most one swapped pair for each axis. ``planned``: the plan of ``request``. The
    caller checks first that the forward slices a full value: with correct placements, the operand
    of a weight that is split over the summed dim is already split."""
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
            dim = stated.dim % len(flow.metas[value].shape)
            opposite_dim = _opposite_dim(contractions[0], dim)
            if opposite_dim is not None:
                splits_summed[by] = dim == contractions[0].contracted_dim
                opposites[value] = one_block(on_dim(stated, opposite_dim))
        if len(set(splits_summed.values())) == 2:
            chosen = _with_chosen_attention(request, planned)
            pairs += _swapped_pair(chosen, planned, axis, opposites, splits_summed)
    return tuple(pairs)


def _with_chosen_attention(request: Request, planned: Plan) -> Request:
    """Return the request that states the strategies of attention that "auto" chose."""
    chosen = {choice.axis: choice.word for choice in planned.sequence}
    return replace(request, attention=tuple({**dict(request.attention), **chosen}.items()))


def _opposite_dim(contraction: Contraction, dim: int) -> int | None:
    """Return the summed dim for the output dim and the reverse; None for another dim."""
    if dim == contraction.output_dim:
        return contraction.contracted_dim
    return contraction.output_dim if dim == contraction.contracted_dim else None


def _hint(
    request: Request, planned: Plan, by: str, axis: str, pinned: Mapping[str, tuple[Shard, int]]
) -> Hint | None:
    """Plan with the opposite of one pattern's pins on one axis; return the hint if it is cheaper.
    ``pinned``: value -> (stated placement, dim of the opposite). The opposite has one block and the
    unit 1, or, if that cannot be planned, the stated unit."""
    first, (stated, _) = next(iter(pinned.items()))
    for cut in dict.fromkeys((Shard(0), one_block(on_dim(stated, 0)))):
        opposites = {value: on_dim(cut, dim) for value, (_, dim) in pinned.items()}
        other = _plan_with(request, axis, opposites)
        if other is None:
            continue
        seconds, cheaper = planned.cost.seconds, other.cost.seconds
        if cheaper > _MAX_RATIO * seconds:
            return None
        return Hint(
            by=by,
            axis=axis,
            stated=stated,
            opposite=opposites[first],
            seconds=seconds,
            opposite_seconds=cheaper,
            bytes_sent=planned.totals.bytes_sent,
            opposite_bytes_sent=other.totals.bytes_sent,
            removed=tuple(sorted(_collectives(planned) - _collectives(other))),
        )
    return None


def _swapped_pair(
    request: Request,
    planned: Plan,
    axis: str,
    opposites: Mapping[str, Shard],
    splits_summed: Mapping[str, bool],
) -> list[SwappedPair]:
    """Plan with the opposite pins; return [the pair] if that saves all_reduces over ``axis``, else
    []. ``splits_summed``: the user's pattern of a pin -> whether it splits the summed dim."""
    other = _plan_with(replace(request, misaligned="error"), axis, opposites)
    if other is None:
        return []
    num, other_num = _num_all_reduces(planned, axis), _num_all_reduces(other, axis)
    if other_num >= num:
        return []
    return [
        SwappedPair(
            axis=axis,
            summed=tuple(by for by, summed in splits_summed.items() if summed),
            output_split=tuple(by for by, summed in splits_summed.items() if not summed),
            num=num,
            other_num=other_num,
        )
    ]


def _plan_with(request: Request, axis: str, opposites: Mapping[str, Shard]) -> Plan | None:
    """Return the plan with other pins on one axis, or None if it cannot be planned."""
    pins = {
        value: {**placements, axis: opposites[value]} if value in opposites else placements
        for value, placements in request.pins.items()
    }
    try:
        return plan(replace(request, pins=pins))
    except PlanningError:
        return None


def _collectives(planned: Plan) -> set[tuple[str, str, str, str]]:
    """Return (kind, axis, phase, the user's line) of each collective."""
    return {(c.kind, c.axis, c.phase, c.source) for c in planned.collectives}


def _num_all_reduces(planned: Plan, axis: str) -> int:
    """Return how many all_reduces over the axis a training step runs."""
    reductions = (c for c in planned.collectives if c.kind == "all_reduce" and c.axis == axis)
    return sum(collective.times for collective in reductions)
