"""Finds pins whose opposite would be cheaper: Column where Row is stated, or Row for Column.

    hints(request, planned)
    # (Hint(by="*.down.weight", axis="tp", stated=Shard(0), opposite=Shard(1), ...),)

The opposite of splitting a weight's output dim is splitting the dim that its product sums
(choose/contractions.py). For each pattern and axis, all weights that the pattern pins get the
opposite placement, and the program is planned again; the predicted seconds of the two plans are
compared. Hints are therefore made only on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.contractions import contractions_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan, rules_of, training_flow
from dtensor.sharding.plan.record import Hint
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
            first = contractions[0]
            if dim not in (first.output_dim, first.contracted_dim):
                continue
            key = (request.pinned_by[value], axis)
            opposite_dim = first.contracted_dim if dim == first.output_dim else first.output_dim
            groups.setdefault(key, {})[value] = (placement, opposite_dim)
    candidates = (_hint(request, planned, by, axis, pins) for (by, axis), pins in groups.items())
    return tuple(hint for hint in candidates if hint is not None)


def _hint(
    request: Request,
    planned: Plan,
    by: str,
    axis: str,
    pinned: Mapping[str, tuple[Shard, int]],
) -> Hint | None:
    """Plan with the opposite of one pattern's pins on one axis; return the hint if it is cheaper.

    ``pinned``: value to (stated placement, dim of the opposite). The opposite has one block and
    the unit 1, or, if that cannot be planned, the stated unit.
    """
    first, (stated, _) = next(iter(pinned.items()))
    for cut in dict.fromkeys((Shard(0), one_block(on_dim(stated, 0)))):
        opposites = {value: on_dim(cut, dim) for value, (_, dim) in pinned.items()}
        pins = {
            value: {**placements, axis: opposites[value]} if value in opposites else placements
            for value, placements in request.pins.items()
        }
        other = _plan_or_none(replace(request, pins=pins))
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


def _plan_or_none(request: Request) -> Plan | None:
    """Return the plan, or None if it cannot be planned with these pins."""
    try:
        return plan(request)
    except PlanningError:
        return None


def _collectives(planned: Plan) -> set[tuple[str, str, str, str]]:
    return {(c.kind, c.axis, c.phase, c.source) for c in planned.collectives}
