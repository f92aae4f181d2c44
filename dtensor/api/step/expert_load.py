"""`expert_load`: how many rows each expert and each rank had in the last training step.

    load = dt.expert_load(step)
    load.rows["layers.0.mlp"]           # (12, 9, 20, 23): rows by expert, over the batch
    load.by_rank["layers.0.mlp"]        # {0: 21, 1: 43}: rows that each rank multiplied
    print(load)                         # a table with one line for each layer

Each step returns the counts of its routes with its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtensor.api.step.training import TrainStep
from dtensor.errors import PlanningError, check_kind
from dtensor.runtime.lower.experts import LOAD, held_experts, route_steps, split_counts
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Compute
from dtensor.sharding.spec.placements import Partial, Replicate, cuts_experts
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.showing import html_text, screen, table


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExpertLoad:
    """The rows of experts in a training step; its str is a table.

    ``rows``: layer -> the rows of each expert, over all tokens of the batch. ``by_rank``: layer ->
    rank -> the rows of the experts that the rank holds. A layer is the path of its module.
    """

    rows: Mapping[str, tuple[int, ...]]
    by_rank: Mapping[str, Mapping[int, int]]

    @property
    def fullest_over_mean(self) -> dict[str, float]:
        """Layer -> the rows of the fullest expert over the mean of all experts; 1 without rows."""
        return {layer: _over_mean(rows) for layer, rows in self.rows.items()}

    def __repr__(self) -> str:
        return f"<expert load of {len(self.rows)} layers>"

    def _repr_html_(self) -> str:
        return html_text(screen(str(self)))

    def __str__(self) -> str:
        lines = [["layer", "rows", "fullest expert", "over mean", "fullest rank", "over mean"]]
        for layer, rows in self.rows.items():
            by_rank = self.by_rank[layer]
            expert = max(range(len(rows)), key=rows.__getitem__)
            rank = max(by_rank, key=by_rank.__getitem__)
            lines.append(
                [
                    layer,
                    f"{sum(rows):,}",
                    f"{expert}: {rows[expert]:,}",
                    f"{_over_mean(rows):.2f}",
                    f"{rank}: {by_rank[rank]:,}",
                    f"{_over_mean(tuple(by_rank.values())):.2f}",
                ]
            )
        return "\n".join(table(lines))


def expert_load(step: TrainStep) -> ExpertLoad:
    """Return the rows of each expert and rank in the last step that succeeded, after waiting for
    pending steps.

    Rows of microbatches are added. Raises PlanningError if no step was taken, or if the step has no
    `to_experts`. Raises the error of a pending step that fails.
    """
    check_kind("step", step, TrainStep, "a step of dt.train_step", "dt.expert_load(step)")
    done = step.last_results()
    if done is None:
        raise PlanningError(
            "dt.expert_load needs the counts of a step, and no step was taken.\n"
            "fix: loss = step(*batch), then dt.expert_load(step)"
        )
    planned, results = done
    plan = planned.plan
    routes = route_steps(plan, range(plan.num_stages))
    if not routes:
        raise PlanningError(
            f"the step of {plan.name} has no rows of experts, so experts have no load.\n"
            f"fix: dt.to_experts and dt.expert_linear in the model's mixture of experts"
        )
    rows: dict[str, tuple[int, ...]] = {}
    by_rank: dict[str, Mapping[int, int]] = {}
    counts_by_rank = [_counts(plan, rank, result.get(LOAD)) for rank, result in enumerate(results)]
    for route in routes:
        name = layer = route.op.module or route.source
        for number in range(2, len(routes) + 2):
            if name not in rows:
                break
            name = f"{layer} ({number})"
        key = id(route)
        own = {rank: c[key] for rank, c in enumerate(counts_by_rank) if key in c}
        rows[name] = _total(plan, route, own)
        by_rank[name] = _of_ranks(plan, route, own)
    return ExpertLoad(rows=rows, by_rank=by_rank)


def _over_mean(rows: tuple[int, ...]) -> float:
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0


Counts = dict[int, int]
"""The rows of each expert that a rank has counted."""


def _coordinates(plan: PlanRecord, rank: int, spec: TensorSpec) -> dict[str, int]:
    """Return the rank's coordinates on the mesh of a spec; 0 on the axis of microbatches."""
    on_mesh = plan.mesh.coordinates(rank)
    return {axis: on_mesh.get(axis, 0) for axis in spec.mesh.axes}


def _counts(plan: PlanRecord, rank: int, load: torch.Tensor | None) -> dict[int, Counts]:
    """Return the counts of each route of a rank, by ``id(step)``. ``load``: the counts of the
    rank's routes in one vector, as the rank returned them; None if it has no route."""
    at = plan.mesh.coordinates(rank)[plan.stage_axis] if plan.stage_axis else 0
    numbers: list[int] = [] if load is None else load.tolist()
    counts: dict[int, Counts] = {}
    for step in route_steps(plan, plan.hosted[at]):
        spec = _spec(step)
        experts = held_experts(spec, _coordinates(plan, rank, spec))
        counts[id(step)] = dict(zip(experts, numbers, strict=False))
        numbers = numbers[len(experts) :]
    return counts


def _spec(route: Compute) -> TensorSpec:
    spec = route.result_specs[0]
    assert spec is not None, "the counts of a route are used"
    return spec


def _total(plan: PlanRecord, route: Compute, counts: Mapping[int, Counts]) -> tuple[int, ...]:
    """Return the rows of each expert. Of replicas, the rank at coordinate 0 counts."""
    spec, total = _spec(route), [0] * _spec(route).shape[0]
    whole = [axis for axis, p in spec.sharding.items() if isinstance(p, Replicate)]
    for rank, own in counts.items():
        coordinates = _coordinates(plan, rank, spec)
        if not any(coordinates[axis] for axis in whole):
            for expert, number in own.items():
                total[expert] += number
    return tuple(total)


def _of_ranks(plan: PlanRecord, route: Compute, counts: Mapping[int, Counts]) -> dict[int, int]:
    """Return the rows that each rank multiplies: the rows of its experts that were counted by the
    ranks with which it exchanges rows."""
    rows = _multiplied_rows(plan, route)
    exchanged = [
        axis
        for axis, p in _spec(route).sharding.items()
        if isinstance(p, Partial) and cuts_experts(rows.placement(axis))
    ]
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in counts:
        at = plan.mesh.coordinates(rank)
        key = tuple((axis, at[axis]) for axis in at if axis not in exchanged)
        groups.setdefault(key, []).append(rank)
    result: dict[int, int] = {}
    for group in groups.values():
        for rank in group:
            at = _coordinates(plan, rank, rows)
            experts = held_experts(split_counts(rows), at) if rows.is_by_expert else counts[rank]
            result[rank] = sum(counts[other].get(e, 0) for other in group for e in experts)
    return dict(sorted(result.items()))


def _multiplied_rows(plan: PlanRecord, route: Compute) -> TensorSpec:
    """Return the spec of rows of the route where most axes split them by expert."""
    counts = route.op.results[0]
    specs = [
        spec
        for step in plan.steps
        if isinstance(step, Compute) and (step is route or counts in step.op.operands)
        for _, _, spec in (*step.reads_as(), *step.gives_as())
    ]
    return max(specs, key=lambda spec: sum(map(cuts_experts, spec.placements)))
