"""Pins whose opposite would be cheaper: column where row is stated, and the other way round.

    hints(request, planned)
    # (Hint(by="*.down.weight", axis="tp", stated=Shard(0), opposite=Shard(1), ...),)

The opposite of a split of a weight's output dim is that of the dim which its product sums over
(plan/choose/contractions.py). All weights that one pattern pins are turned round together and the
program is planned again, so a hint is a fact about two plans and not an estimate; it costs one
planning a pattern and axis, and is made on request alone. A pattern whose opposite cannot be
planned has none.

Invariants: prices are the predicted seconds of a step. Not here: better placements of another kind
(replicated, another axis).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.contractions import contractions_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan, rules_of, trained
from dtensor.sharding.plan.record import Hint
from dtensor.sharding.plan.request import Request
from dtensor.sharding.spec.placements import Shard, on_dim, one_block

_WORTH = 0.99  # of the stated plan's seconds; a smaller gain is not worth a line


def hints(request: Request, planned: Plan) -> tuple[Hint, ...]:
    """The hints for ``planned``, which was made of ``request``, in the order of its pins."""
    flow = trained(request)
    rules, batch = rules_of(flow), flow.batch_values
    groups: dict[tuple[str, str], dict[str, tuple[Shard, int]]] = {}  # stated, the opposite's dim
    for value, placements in request.pins.items():
        contractions = (
            contractions_of(flow, rules, value, batch) if value in request.pinned_by else ()
        )
        for axis, placement in placements.items():
            if not isinstance(placement, Shard) or value in request.settled or not contractions:
                continue
            dim = placement.dim % len(flow.metas[value].shape)
            one = contractions[0]
            if dim not in (one.output_dim, one.contracted_dim):
                continue
            key = (request.pinned_by[value], axis)
            turned = one.contracted_dim if dim == one.output_dim else one.output_dim
            groups.setdefault(key, {})[value] = (placement, turned)
    contractions = (
        _compare(request, planned, by, axis, pins) for (by, axis), pins in groups.items()
    )
    return tuple(hint for hint in contractions if hint is not None)


def _compare(
    request: Request,
    planned: Plan,
    by: str,
    axis: str,
    pinned: Mapping[str, tuple[Shard, int]],
) -> Hint | None:
    first, (stated, _) = next(iter(pinned.items()))
    for cut in dict.fromkeys((Shard(0), one_block(on_dim(stated, 0)))):
        turned = {value: on_dim(cut, dim) for value, (_, dim) in pinned.items()}
        pins = {
            value: {**placements, axis: turned[value]} if value in turned else placements
            for value, placements in request.pins.items()
        }
        other = _planned(replace(request, pins=pins))
        if other is None:
            continue
        seconds, cheaper = planned.cost.seconds, other.cost.seconds
        if cheaper > _WORTH * seconds:
            return None
        return Hint(
            by=by,
            axis=axis,
            stated=stated,
            opposite=turned[first],
            seconds=seconds,
            opposite_seconds=cheaper,
            bytes_sent=planned.totals.bytes_sent,
            opposite_bytes_sent=other.totals.bytes_sent,
            removed=tuple(sorted(_kinds(planned) - _kinds(other))),
        )
    return None


def _planned(request: Request) -> Plan | None:
    """The plan, or None where these pins do not go together."""
    try:
        return plan(request)
    except PlanningError:
        return None


def _kinds(planned: Plan) -> set[tuple[str, str, str, str]]:
    return {(c.kind, c.axis, c.phase, c.source) for c in planned.collectives}
