"""Lowering of what a program does about rows of experts besides exchanging them.

    check_received(counts_of_all_ranks, budget)      before rows are sent, with ``capacity=``
    expert load = joined_counts(counts of each route and microbatch)      returned by each step

A `Budget` limits the rows that a rank receives in one exchange, or holds if its ranks have all
tokens. All members of an exchange know the counts, so all of them raise the same error.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.runtime.lower.code import CodeBuilder
from dtensor.runtime.lower.rank_builder import RankBuilder
from dtensor.sharding.local.expert_rows import Budget, check_held
from dtensor.sharding.plan.choose.routes import ROUTE
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Compute
from dtensor.sharding.spec.placements import REPLICATE, Placement, Shard, cuts_experts, on_dim
from dtensor.sharding.spec.spec import TensorSpec

LOAD = "expert load"
"""The output with the counts of the rank's routes, in the order of `route_steps`."""
_VALUE = "rank.expert_load"


def split_counts(rows: TensorSpec) -> TensorSpec:
    """Return the spec of the numbers of rows by expert, split as the experts of ``rows``."""
    placements: dict[str, Placement] = {
        axis: on_dim(replace(p, ragged=None), 0)
        for axis, p in rows.sharding.items()
        if isinstance(p, Shard) and cuts_experts(p)
    }
    ragged = rows.ragged
    assert ragged is not None, "the spec has no ragged dim"
    full = tuple(placements.get(axis, REPLICATE) for axis in rows.mesh.axes)
    return TensorSpec((ragged.experts,), torch.int64, rows.mesh, full)


def held_experts(counts: TensorSpec, coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """Return the experts that the rank at ``coordinates`` holds."""
    return tuple(e for lo, hi in counts.intervals(0, coordinates) for e in range(lo, hi))


# -- the budget of capacity= -----------------------------------------------------------------------


def budget_of_exchange(
    b: RankBuilder, rows: TensorSpec, axis: str, parts: tuple[tuple[int, ...], ...]
) -> Budget | None:
    """Return the budget of an exchange over ``axis`` that gives ``rows``, or from which they
    return; None without ``capacity=``. ``parts``: of each member, the positions of its experts."""
    if b.plan.capacity is None:
        return None
    counts = split_counts(rows).with_placements(**{axis: REPLICATE})
    return _budget(b, rows, b.group(axis), parts, held_experts(counts, b.coordinates))


def check_route(b: RankBuilder, step: Compute, code: CodeBuilder, source: str | None) -> None:
    """Add the check of the rows of a route whose rank has all tokens but only some experts."""
    rows = step.result_specs[1] if step.op.call.name == ROUTE else None
    if b.plan.capacity is None or rows is None or not rows.is_by_expert:
        return
    axes = [axis for axis, p in rows.sharding.items() if cuts_experts(p)]
    sizes = [range(b.plan.mesh.axis_size(axis)) for axis in axes]
    members = [dict(zip(axes, at, strict=True)) for at in itertools.product(*sizes)]
    ranks = tuple(b.plan.mesh.rank({**b.mesh_coordinates, **at}) for at in members)
    counts = split_counts(rows)
    parts = tuple(held_experts(counts, {**b.coordinates, **at}) for at in members)
    budget = _budget(b, rows, ranks, parts, tuple(range(counts.shape[0])))
    code.apply(check_held, [step.operands[0]], (), layout=budget, source=source)


def _budget(
    b: RankBuilder,
    rows: TensorSpec,
    ranks: tuple[int, ...],
    parts: tuple[tuple[int, ...], ...],
    experts: tuple[int, ...],
) -> Budget:
    capacity = b.plan.capacity
    assert capacity is not None
    return Budget(
        capacity=capacity,
        rows=rows.row_budget(b.coordinates, capacity),
        balanced=rows.row_budget(b.coordinates, 1),
        ranks=ranks,
        parts=parts,
        experts=experts,
    )


# -- the load of experts ---------------------------------------------------------------------------


def route_steps(plan: PlanRecord, stages: Collection[int]) -> list[Compute]:
    """Return the steps on ``stages`` that route tokens to experts in the forward."""
    return [
        step
        for step in plan.steps
        if isinstance(step, Compute)
        and step.op.call.name == ROUTE
        and (step.phase, step.op.copy_of) == ("forward", None)
        and step.stage in stages
    ]


def add_load(b: RankBuilder) -> dict[str, str]:
    """Emit the counts of the rank's routes, added over microbatches. Return the output `LOAD` with
    its value in the table, or {} if the rank has no routes."""
    names: list[str] = []
    first: list[str] = []  # of each route
    numbers: list[int] = []
    b.close()
    for step in (steps := route_steps(b.plan, b.stages)):
        name, segment = step.gives[0], b.segment()
        values = dict.fromkeys(b.value_of(name, i) for i in range(b.plan.num_microbatches))
        numbers.append(len(values))
        first.append(f"{name}_in0")
        for i, value in enumerate(values):
            names.append(f"{name}_in{i}")
            segment.table[names[-1]] = value
    if steps:
        segment = b.segment()
        segment.table["load"] = _VALUE
        segment.code.apply(joined_counts, [names], ["load"], layout=tuple(numbers))
        b.nbytes[_VALUE] = sum(b.nbytes[segment.table[name]] for name in first)
    return {LOAD: _VALUE} if steps else {}


def joined_counts(counts: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """Return the counts of all routes in one vector. ``numbers``: of each route, how many of
    ``counts`` are to be added, one for each microbatch."""
    each, sums = iter(counts), list[torch.Tensor]()
    for number in numbers:
        total, *more = itertools.islice(each, number)
        for part in more:
            total = total + part
        sums.append(total.to(sums[0].device) if sums else total)
    return torch.cat(sums)
