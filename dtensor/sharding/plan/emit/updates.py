"""Emits the end of a training step: the norm of gradients, the updates, and the gathers.

    * gradients_dp  = reduce_scatter(2 gradients, dp)     emitted before, with the outputs
    * parameters_tp = all_to_all(2 parameters, tp)        to the owners of whole parameters
    * grad_norm     = norm(2 gradients)
      update 2 parameters by Muon, each on one rank       into new memory, before the commit
    * updated_tp    = all_to_all(2 updated parameters, tp)
    * parameters_dp = all_gather(2 updated parameters, dp)

An elementwise optimizer updates the shards of a parameter. An optimizer that needs whole parameters
updates each on its owner (owners.py): the parameter is moved to the owner, and the new value back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtensor.numerics import is_narrow
from dtensor.sharding.plan.dataflow import Output
from dtensor.sharding.plan.emit.pending import Pending, convert
from dtensor.sharding.plan.emit.stored_gradients import gather_updated
from dtensor.sharding.plan.emit.values import Emitter
from dtensor.sharding.plan.owners import owner_of, update_seconds
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput
from dtensor.sharding.plan.request import Training, UpdateCost
from dtensor.sharding.plan.steps import Norm, Update
from dtensor.sharding.redistribute.moves import moves
from dtensor.sharding.spec.spec import TensorSpec


def update_parameters(
    e: Emitter, inputs: Mapping[str, PlannedInput], outputs: Sequence[PlannedOutput]
) -> None:
    """Emit the norm of gradients, the updates, and the gathers of updated parameters. ``inputs``:
    the inputs of the plan by label."""
    training = e.request.training
    assert training is not None
    trained = training.trained
    grads = [o for o in outputs if o.kind == "gradient" and str(o.of) in trained]
    wholes = _moved_to_owners(e, inputs, grads)
    if training.clip_grad_norm is not None or training.scaled:
        e.steps.append(
            Norm(
                result=e.fresh("grad_norm"),
                operands=tuple((*o.values[0], str(o.of)) for o in grads),
                specs=tuple(o.spec for o in grads),
                max_norm=math.inf if (limit := training.clip_grad_norm) is None else limit,
                scaled=training.scaled,
            )
        )
    for output in grads:
        item = inputs[str(output.of)]
        for stage, value in output.values if item.owned is None else ():
            elements = output.spec.max_local_nbytes // output.spec.dtype.itemsize
            spec = replace(output.spec, dtype=item.spec.dtype)
            e.steps.append(_update(training, item.label, value, spec, stage, elements))
    _update_whole(e, training, wholes)
    if e.request.stores_split or wholes:
        gather_updated(e, inputs, grads)


def _update(
    training: Training, label: str, gradient: str, spec: TensorSpec, stage: int, elements: int
) -> Update:
    """Return the update of a parameter. ``elements``: the number of elements that the fullest rank
    updates."""
    number, updater = next(
        (n, updater) for n, updater in enumerate(training.updaters) if label in updater.trained
    )
    master = training.master_weights and is_narrow(spec.dtype)
    itemsize = 4 if master else spec.dtype.itemsize
    cost = UpdateCost(0, elements * itemsize * updater.state_tensors)
    if updater.owned is not None:
        cost = updater.owned[label]
    return Update(
        parameter=label,
        gradient=gradient,
        spec=spec,
        stage=stage,
        optimizer=updater.optimizer,
        number=number,
        state_bytes=cost.state_bytes,
        master_bytes=elements * itemsize if master else 0,
        flops=cost.flops,
        host_reads=updater.host_reads,
    )


# -- updates of whole parameters on their owners ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter that one rank of a stage updates. ``owned``: the spec of the parameter on this
    rank. ``moving``: the parameter on its way to the owner."""

    item: PlannedInput
    owned: TensorSpec
    gradient: str
    moving: Pending


def _moved_to_owners(
    e: Emitter, inputs: Mapping[str, PlannedInput], grads: Sequence[PlannedOutput]
) -> list[_Whole]:
    """Emit the moves of parameters to their owners, and return the parameters. Stages on one rank
    that share a parameter update it once."""
    by_rank: dict[tuple[str, int], _Whole] = {}  # by label and rank of the stage axis
    for output in grads:
        item = inputs[str(output.of)]
        if item.owned is None:
            continue
        for stage, gradient in output.values:
            path = moves(item.held, item.owned, e.request.topology, whole=True)
            as_output = Output(item.name, "gradient", item.label, stage)
            moving = Pending(
                as_output, item.name, item.held, item.label, True, path, bucket="parameters"
            )
            whole = _Whole(item, item.owned, gradient, moving)
            by_rank.setdefault((item.label, e.request.stage_ranks[stage]), whole)
    convert(e, [whole.moving for whole in by_rank.values()])
    return list(by_rank.values())


def _update_whole(e: Emitter, training: Training, wholes: Sequence[_Whole]) -> None:
    """Emit the updates of whole parameters on their owners, and the moves of the new values to the
    ranks that write them into their shards."""
    first, returning = len(e.steps), list[Pending]()
    results = [e.fresh(f"{whole.item.name}_updated") for whole in wholes]
    for whole, result in zip(wholes, results, strict=True):
        path = moves(whole.owned, whole.item.updated, e.request.topology, whole=True)
        moved = replace(whole.moving, name=result, spec=whole.owned, path=path, bucket="updated")
        returning.append(moved)
    convert(e, returning)
    updates: list[Update] = []
    load: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}
    for whole, result, moved in zip(wholes, results, returning, strict=True):
        spec, stage, owner = whole.owned, whole.moving.output.stage, owner_of(whole.owned)
        elements = spec.nbytes // spec.dtype.itemsize
        update = _update(training, whole.item.label, whole.gradient, spec, stage, elements)
        names = dict(value=whole.moving.name, result=result, written=moved.name)
        updates.append(replace(update, owner=owner, **names))
        cost = UpdateCost(update.flops, update.state_bytes)
        seconds = update_seconds(e.request.topology, spec.nbytes, cost)
        load[stage, owner] = load.get((stage, owner), 0.0) + seconds
    fullest = dict(sorted((at for at in load if at[1]), key=load.__getitem__))
    e.steps[first:first] = [
        replace(u, is_fullest=not u.owner or u.owner == fullest[u.stage]) for u in updates
    ]
