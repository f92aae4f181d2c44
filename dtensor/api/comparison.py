"""`compare`: what a training step costs under several strategies, before a cluster is rented.

    found = compare(model, loss_fn, {
        "tp4": (Mesh(tp=4), MEGATRON),
        "dp4": (Mesh(dp=4), {}, dict(inputs=dict(dp=Row()), zero={"dp": 3})),
    }, tokens, targets, topology=Topology(bandwidth={"tp": 400e9, "dp": 50e9}))
    print(found)                           # one table
    found["tp4"].seconds, found["tp4"].memory.total, found["tp4"].plan

The program is captured once and planned once for each strategy; nothing is launched or computed,
the model may be on the meta device and stays as it is. A strategy without a plan keeps its row,
which says why. Numbers are of one rank: where stages differ, of the one that has most of them.

Not here: the table's text (comparison_text.py), how a price is made (sharding.memory, cost).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dtensor.api.eager.tensor import DTensor
from dtensor.api.parallel import ParallelModule, parallelize
from dtensor.api.plan_call import BoundCall
from dtensor.api.stating.patterns import listing, nearest
from dtensor.api.training import train_step
from dtensor.errors import PlanningError
from dtensor.frontend.graph import Graph
from dtensor.runtime.shard_optimizer import check_optimizer
from dtensor.sharding.plan.cost.collectives import PlannedCollective
from dtensor.sharding.plan.cost.memory import Memory
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.spec import TensorSpec

Strategy = tuple[Any, ...] | Mapping[str, Any]
"""(mesh, placements), (mesh, placements, options), or a dict with "mesh", "placements", options:
keywords of `parallelize` and `train_step`."""
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One strategy and its plan, or the PlanningError that it has none for."""

    name: str
    mesh: Mesh
    found: Plan | PlanningError

    @property
    def error(self) -> PlanningError | None:
        return self.found if isinstance(self.found, PlanningError) else None

    @property
    def plan(self) -> Plan:
        """Raises the strategy's PlanningError where it has no plan."""
        if isinstance(self.found, PlanningError):
            raise self.found
        return self.found

    @property
    def bytes(self) -> dict[tuple[str, str], int]:
        """(axis, phase) to the bytes that a rank sends in a step; of the stage that sends most."""
        found: dict[tuple[str, str], int] = {}
        for rank in self._by_rank():
            own: dict[tuple[str, str], int] = {}
            for c in rank:
                own[c.axis, c.phase] = own.get((c.axis, c.phase), 0) + c.bytes_sent * c.times
            found.update({key: max(sent, found.get(key, 0)) for key, sent in own.items()})
        return found

    @property
    def bytes_sent(self) -> int:
        """By the rank that sends most in a step, over all axes and phases."""
        return max(sum(c.bytes_sent * c.times for c in rank) for rank in self._by_rank())

    @property
    def num_collectives(self) -> int:
        """That a rank starts in a step, transfers included."""
        return max(sum(c.times for c in rank) for rank in self._by_rank())

    @property
    def memory(self) -> Memory:
        """Of the fullest rank: the stages that it hosts, added up."""
        memory = self.plan.memory
        ranks = [
            Memory(
                parameters=sum(memory[s].parameters for s in held),
                gradients=sum(memory[s].gradients for s in held),
                optimizer=sum(memory[s].optimizer for s in held),
                activations=sum(memory[s].activations for s in held),
                masters=sum(memory[s].masters for s in held),
            )
            for held in self.plan.hosted
        ]
        return max(ranks, key=lambda m: m.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is within ``topology.memory_bytes``."""
        return self.memory.total <= self.plan.topology.memory_bytes

    @property
    def seconds(self) -> float:
        """Predicted, of one step."""
        return self.plan.cost.seconds

    @property
    def bubble(self) -> float:
        """The fraction of the step in which the ranks of a pipeline wait."""
        return self.plan.cost.bubble

    def _by_rank(self) -> list[list[PlannedCollective]]:
        """What each rank of the stage axis communicates."""
        all_of = self.plan.collectives
        return [[c for c in all_of if c.stage in held] for held in self.plan.hosted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` returns; its str is the table. ``comparison["tp4"]`` is a row."""

    name: str
    optimizer: str
    rows: tuple[Compared, ...]

    def __getitem__(self, name: str) -> Compared:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no strategy {name!r}; there are {listing([r.name for r in self.rows])}")

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        from dtensor.api.comparison_text import render

        return render(self)


def compare(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    strategies: Mapping[str, Strategy],
    *batch: Any,
    topology: Topology | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer = torch.optim.AdamW,
    **kwargs: Any,
) -> Comparison:
    """What a step of ``loss_fn(model, *batch, **kwargs)`` costs under each of ``strategies``.

    Args:
        strategies: name to (mesh, placements), to (mesh, placements, options), or to a dict of
            these; options are keywords of `parallelize` and `train_step` (``stages``, ``zero``,
            ``inputs``, ``schedule``, ``topology``, ...).
        batch: tensors (meta too), `spec`s, or a torch.Size for float32 of it; shapes are global.
        topology: what is priced with, and the memory of a rank; a strategy may state its own.
        optimizer: a class, or a function of the parameters, or an optimizer over them.

    Raises PlanningError for a program that cannot be captured, and for a strategy that is not one.
    One that is but has no plan is a row with its error.
    """
    if isinstance(model, ParallelModule):
        raise PlanningError(
            "compare places the model anew for each strategy, and this one is parallelized.\n"
            "fix: pass the original, model.module"
        )
    if not isinstance(strategies, Mapping) or not strategies:
        raise PlanningError(
            f"strategies is {strategies!r}, not a dict of at least one strategy.\n"
            f'fix: {{"tp2": (dt.Mesh(tp=2), placements)}}'
        )
    stated = [_stated(name, strategy) for name, strategy in strategies.items()]
    over = optimizer
    if not isinstance(over, torch.optim.Optimizer):
        over = over(model.parameters())
    check_optimizer(over)
    args, named = pytree.tree_map(_argument, (batch, kwargs))
    graph = BoundCall.of(loss_fn, (model, *args), named).graph("loss")
    return Comparison(
        name=getattr(loss_fn, "__name__", "step").strip("<>"),
        optimizer=type(over).__name__,
        rows=tuple(
            _row(one, model, loss_fn, over, topology or Topology(), graph, args, named)
            for one in stated
        ),
    )


# -- strategies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """A strategy with its options by the function that they are for."""

    name: str
    mesh: Mesh
    placements: Any
    parallelize: Mapping[str, Any]
    train_step: Mapping[str, Any]


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _stated(name: str, strategy: object) -> _Stated:
    """PlanningError unless it is a mesh, placements and known options."""
    match strategy:
        case Mapping():
            options = dict(strategy)
            mesh, placements = options.pop("mesh", None), options.pop("placements", {})
        case (mesh, placements):
            options = {}
        case (mesh, placements, Mapping() as given):
            options = dict(given)
        case _:
            mesh, placements, options = None, {}, {}
    if not isinstance(mesh, Mesh):
        raise PlanningError(
            f'the strategy "{name}" is {strategy!r}, without a mesh where one is expected.\n'
            f"fix: (dt.Mesh(tp=2), placements), or (dt.Mesh(dp=2), placements, "
            f"dict(inputs=dict(dp=dt.Row())))"
        )
    known = {"parallelize": _keywords(parallelize), "train_step": _keywords(train_step)}
    known["parallelize"].remove("recompute")  # either takes it, and not both
    for key in options:
        if not any(key in names for names in known.values()):
            every = [option for names in known.values() for option in names]
            near = nearest(str(key), every)
            raise PlanningError(
                f'the strategy "{name}" states {key!r}, which is no option of parallelize or '
                f"train_step.\n"
                f"  options: {', '.join(every)}\n"
                f"fix: {near[0] if near else every[0]}="
            )
    return _Stated(
        name=name,
        mesh=mesh,
        placements=placements,
        # what parameters start from is no part of a plan, and recording it takes time
        parallelize={k: options[k] for k in known["parallelize"] if k in options and k != "init"},
        # an option that both take is stated to one of them
        train_step={
            k: options[k]
            for k in known["train_step"]
            if k in options and k not in known["parallelize"]
        },
    )


def _argument(leaf: Any) -> Any:
    """A batch's leaf as every mesh can take it: what states no placement has no mesh of its own."""
    match leaf:
        case torch.Size():
            return torch.empty(leaf, device="meta")
        case DTensor():
            return leaf.spec
        case TensorSpec() if not leaf.on and set(leaf.placements) <= {REPLICATE}:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            return made.requires_grad_(leaf.requires_grad)
        case _:
            return leaf


def _row(
    stated: _Stated,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    topology: Topology,
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Compared:
    try:
        parallel = parallelize(model, stated.mesh, stated.placements, **stated.parallelize)
        options = {"topology": topology, **stated.train_step}
        step = train_step(parallel, loss_fn, optimizer, **options)
        found: Plan | PlanningError = step.plan_of(graph, *args, **kwargs)
    except PlanningError as error:
        found = error
    return Compared(name=stated.name, mesh=stated.mesh, found=found)
