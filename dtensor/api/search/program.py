"""The training step of a search, with its repeated layers, derived placements and plans.

    program = SearchedProgram.of(captured, num_ranks, topology)
    program.facts.tp_sizes       # (1, 2, 4)
    program.planned(point)       # Compared: the point's plan, or the planner's error

The step is captured once. Placements are derived from its forward with all boundaries stated
(``Row(unit=64)``), so that they are valid for every size of tp.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.api.model.stating.patterns import matches
from dtensor.api.model.stating.stages import Auto
from dtensor.api.search.comparison import CapturedStep, Compared
from dtensor.api.search.placements import Placements, of_step
from dtensor.api.search.space import SearchPoint, SpaceFacts
from dtensor.errors import PlanningError
from dtensor.private_torch import pytree
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.fits import fits
from dtensor.sharding.spec.placements import (
    Row,
    Shard,
    units_of,
    with_unit,
)
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedProgram:
    """``layers``: globs of the repeated modules; ``plans``: a cache of `planned`."""

    step: CapturedStep
    facts: SpaceFacts
    layers: tuple[str, ...]
    placements: Placements
    topology: Topology
    plans: dict[SearchPoint, Compared] = field(default_factory=dict[SearchPoint, Compared])

    @staticmethod
    def of(step: CapturedStep, num_ranks: int, topology: Topology) -> SearchedProgram:
        """Return the program of a captured step for ``num_ranks`` ranks."""
        placements = of_step(step.graph, step.model)
        layers = repeated_modules(step.model)
        facts = SpaceFacts(
            num_ranks=num_ranks,
            rows=_rows(step),
            layers=len(layers),
            tp_sizes=tuple(
                num
                for num in range(1, num_ranks + 1)
                if num_ranks % num == 0 and divides(placements, step.model, num)
            ),
            axes=priced_axes(topology),
        )
        return SearchedProgram(
            step=step,
            facts=facts,
            layers=collapse(layers),
            placements=placements,
            topology=topology,
        )

    def strategy(self, point: SearchPoint) -> dict[str, Any]:
        """Return the point's strategy in the form of `compare`: mesh, placements and options."""
        strategy: dict[str, Any] = {"mesh": point.mesh}
        if point.tp > 1:
            strategy["placements"] = dict(self.placements)
        if point.pp > 1:
            strategy["stages"] = {"pp": Auto(num_stages=point.num_stages)}
        if point.zero:
            strategy["zero"] = {"dp": point.zero}
        if point.dp > 1:
            strategy["inputs"] = {"dp": Row()}
        if point.schedule is not None:
            strategy["schedule"] = point.schedule
        if point.recompute:
            strategy["recompute"] = list(self.layers)
        return strategy

    def planned(self, point: SearchPoint) -> Compared:
        if point not in self.plans:
            self.plans[point] = self.step.planned(point.name, self.strategy(point), self.topology)
        return self.plans[point]


def repeated_modules(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the outermost numbered modules that have a sibling with equal parameters:
    ``blocks.0``, ``blocks.1``."""
    shapes: defaultdict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None and at + 1 < len(parts):
            inside = ".".join(parts[at + 1 :])
            shapes[".".join(parts[: at + 1])].append((inside, tuple(parameter.shape)))
    alike: defaultdict[object, list[str]] = defaultdict(list)
    for name, held in shapes.items():
        alike[name.rpartition(".")[0], tuple(sorted(held))].append(name)
    names_of_repeated = {name for names in alike.values() if len(names) > 1 for name in names}
    return tuple(name for name in shapes if name in names_of_repeated)


def divides(placements: Placements, model: torch.nn.Module, num: int) -> bool:
    """Return whether each of ``num`` ranks gets the same number of whole heads, and a part of each
    other split dim."""
    if num == 1:
        return True
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    for pattern, stated in placements.items():
        shard = stated["tp"]
        assert isinstance(shard, Shard)
        for shape in (shape for name, shape in shapes.items() if matches(pattern, name)):
            units = units_of(shard, shape[shard.dim])
            if (
                units < num
                or not fits(shard, shape[shard.dim], num)
                or (shard != with_unit(shard, 1) and units % num)
            ):
                return False
    return bool(placements)


def priced_axes(topology: Topology) -> tuple[str, ...]:
    """Return the axes (of pp, dp, tp) that the topology has prices for."""
    axes: list[str] = []
    for axis in ("pp", "dp", "tp"):
        try:
            topology.collective_seconds("all_gather", axis, num=2, bytes_sent=1)
        except PlanningError:
            continue
        axes.append(axis)
    return tuple(axes)


def _rows(step: CapturedStep) -> int:
    """Return the rows of the batch: the size of dim 0 of the first argument that has dims."""
    leaves = pytree.tree_leaves((step.args, dict(step.kwargs)))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | TensorSpec) and len(leaf.shape):
            return max(int(leaf.shape[0]), 1)
    return 1
