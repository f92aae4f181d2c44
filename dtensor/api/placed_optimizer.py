"""An optimizer's state on the cluster: each rank's shards of it, in a `ShardOptimizer`.

    home = place_optimizer(session, model, opt, (("w", "b"),), held=[{"w"}, {"w", "b"}])
    home.name                          # what the actors' tables call their `ShardOptimizer`s

A tensor of its parameter's shape is cut as the plan says that the state is stored; numbers are
copied. Not here: what a rank does with it (runtime/shard_optimizer.py), the way back (state.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtensor.api.parallel import ParallelModule
from dtensor.errors import PlanningError
from dtensor.runtime.shard_optimizer import NAMES, ShardOptimizer, hyperparameters
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.api.session import Session


@dataclass(slots=True)
class OptimizerHome:
    """One torch optimizer, the table's name of its shards, whether they hold masters, and the
    names by group that the ranks know."""

    optimizer: torch.optim.Optimizer
    name: str
    masters: bool
    groups: tuple[tuple[str, ...], ...]

    def options(self, groups: tuple[tuple[str, ...], ...]) -> tuple[dict[str, Any], ...]:
        """What a step is fed: each group's options, and its names where the groups changed."""
        found = hyperparameters(self.optimizer)
        if groups == self.groups:
            return found
        self.groups = groups
        return tuple({**given, NAMES: names} for given, names in zip(found, groups, strict=True))


def place_optimizer(
    session: Session,
    model: ParallelModule,
    optimizer: torch.optim.Optimizer,
    groups: tuple[tuple[str, ...], ...],
    held: Sequence[Collection[str]],
    *,
    masters: bool = False,
) -> OptimizerHome:
    """Put the shards of an optimizer's state where they are missing; ``held``: labels by rank."""
    resident = session.resident(model)
    home = resident.optimizers.get(id(optimizer))
    if home is not None:
        return agreed(home, masters)
    name = f"{resident.prefix}optimizer {len(resident.optimizers)}"
    home = OptimizerHome(optimizer, name, masters, groups)
    resident.optimizers[id(optimizer)] = home
    state = optimizer_state(model, optimizer)
    values: list[dict[str, object]] = []
    for rank, labels in enumerate(held):
        cut = {
            label: {
                key: _cut(session, value, resident.states[label], rank)
                for key, value in state[label].items()
            }
            for label in sorted(labels)
            if label in state
        }
        values.append({name: ShardOptimizer(type(optimizer), groups, cut, masters)})
    session.put(values)
    return home


def agreed(home: OptimizerHome, masters: bool) -> OptimizerHome:
    """PlanningError where two steps share an optimizer and one of them wants masters."""
    if home.masters != masters:
        raise PlanningError(
            f"two steps share a {type(home.optimizer).__name__}: one has "
            f"master_weights={home.masters}, this one master_weights={masters}.\n"
            f"fix: master_weights={home.masters} here too, or an optimizer of its own"
        )
    return home


def optimizer_state(
    model: ParallelModule, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Parameter name to the controller's optimizer state for it."""
    names = {id(p): name for name, p in model.module.named_parameters()}
    return {names[id(p)]: dict(entry) for p, entry in optimizer.state.items() if id(p) in names}


def _cut(session: Session, value: Any, spec: TensorSpec, rank: int) -> Any:
    """A state tensor of the parameter's shape is cut as the parameter is."""
    if isinstance(value, torch.Tensor) and tuple(value.shape) == spec.shape and spec.shape:
        local = TensorSpec(spec.shape, value.dtype, spec.mesh, spec.placements)
        return shard_of(value, local, session.mesh.coordinates(rank))
    return value
