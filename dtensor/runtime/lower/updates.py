"""Lowering of updates: the calls that step the optimizers of a rank, and what they read and write.

    call compute_owned(...)     # before the vote: new values and state of the parameters it owns
    commit vote.tp
    call step_optimizer(...)    # on the rank's shard, or slice, of each parameter
    call replace_state(...)     # the owner takes over the new state; ranks write the new values

An elementwise optimizer writes its shards in place after the commit. An optimizer that needs whole
parameters runs user code that may raise, so its owner computes into new memory before ranks vote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from dtensor.daft import Label
from dtensor.daft.ir.code import tuple_text
from dtensor.daft.ir.instructions import WORD
from dtensor.runtime.lower import moves
from dtensor.runtime.lower.rank_builder import OptimizerRole, RankBuilder, options_name, rates_name
from dtensor.runtime.optimizer.flat_buffers import filled, group_by_size
from dtensor.runtime.optimizer.shard_optimizer import (
    ELEMENTWISE,
    MASTER,
    STATE,
    ShardOptimizer,
    Updated,
    has_kernel,
    kernel_divides,
    value_name,
)
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Redistribute,
    Update,
    norm_of,
    updates_of,
)
from dtensor.sharding.spec.shards import Where, block, given, write

if TYPE_CHECKING:
    from dtensor.runtime.optimizer.owned.owned_optimizer import OwnedOptimizer


def _updates(b: RankBuilder, number: int) -> list[Update]:
    """Return the updates of this rank's parameters by the optimizer ``number``, one for a parameter
    of several stages."""
    updates = (s for s in updates_of(b.plan.steps, b.stages) if s.number == number)
    return list({s.parameter: s for s in reversed(tuple(updates))}.values())[::-1]


def optimizer_values(b: RankBuilder, number: int) -> dict[str, tuple[str, str]]:
    """Return (parameter, key) of each state entry of the optimizer ``number`` by its name in the
    table; record its bytes."""
    role = b.roles.updates[number]
    keys_of = {n: k for group, k in zip(role.groups, role.keys, strict=False) for n in group}
    names: dict[str, tuple[str, str]] = {}
    for step in _updates(b, number) if keys_of else ():
        if step.owner is not None:
            if step.is_on_rank(b.coordinates):
                (label,) = b.roles.labels_of([step.parameter])
                name = value_name(role.optimizer, STATE, label)
                names[name], b.nbytes[name] = (label, STATE), step.state_bytes + step.master_bytes
            continue
        narrow = (MASTER,) if step.master_bytes else ()
        width = torch.float32 if narrow else step.spec.dtype
        numel = b.shared.nbytes(step.spec, b.coordinates) // step.spec.dtype.itemsize
        (label,) = b.roles.labels_of([step.parameter])
        for key in (*keys_of[step.parameter], *narrow):
            name = value_name(role.optimizer, key, label)
            names[name] = label, key
            b.nbytes[name] = WORD.nbytes if key in role.numbers else numel * width.itemsize
    return names


def update(b: RankBuilder) -> None:
    """Emit the calls that step the rank's optimizers, and the gathers of updated parameters."""
    if not b.roles.updates:
        return
    for number in range(len(b.roles.updates)):
        _step_of(b, number)
    for step in b.plan.steps:
        if isinstance(step, Redistribute) and step.in_place and step.stage in b.stages:
            b.label = Label("regather")
            started = moves.redistribute(b, step, wait=False)
            assert started is not None, "updated parameters are gathered"
            moves.finish(b, started)
    b.label = Label("optimizer")


def _step_of(b: RankBuilder, number: int) -> None:
    """Emit the call that steps the optimizer ``number`` of the rank, if it updates a parameter."""
    role, updates = b.roles.updates[number], _updates(b, number)
    if not updates:
        return
    if any(step.owner is not None for step in updates):
        _store_new_values(b, number, updates)
        return
    inputs = {i.label: i for i in b.plan.inputs}
    norm = norm_of(b.plan.steps)
    clip = norm and f"{norm.result}_clip"
    b.close()
    b.label = Label("update")
    segment = b.segment()
    for step in updates:
        b.price(step)
    names = [inputs[s.parameter].name for s in updates]
    gradients = [s.gradient for s in updates]
    segment.table |= {"optimizer": role.optimizer, "options": options_name(number)}
    values = optimizer_values(b, number)
    state = {f"optimizer_{at}": name for at, name in enumerate(values)}
    segment.table |= state
    segment.writes = (*state, *names)
    parts = [_updated_part(b, inputs[s.parameter], s) for s in updates]
    code = segment.code
    function = code.bind("step_optimizer", step_optimizer)
    labels_of = b.roles.labels_of
    split_labels = labels_of(
        s.parameter for s, n, p in zip(updates, names, parts, strict=True) if n != p
    )
    divides = norm is not None and kernel_divides(norm.dtype)
    overwritable = _overwritable(b, updates) if divides else ()
    labels = labels_of(s.parameter for s in updates)
    groups = tuple(map(labels_of, role.groups))
    updated = code.bind("updated", Updated(groups, labels, tuple(values.values())))
    tensors = f"{tuple_text(parts)}, {tuple_text(gradients)}, {tuple_text(tuple(state))}, {clip}"
    if split_labels or overwritable:
        own = labels_of(overwritable)
        tensors += f", {code.bind('parts', split_labels)}, {code.bind('own', own)}"
    predicate = b.predicate()
    tensors += "".join(f", skip={name}" for name in predicate)
    reads = ["optimizer", "options", *state, *parts, *gradients, *([clip] if clip else [])]
    reads += predicate
    if takes_rates(b, number):
        segment.table["rates"] = rates_name(number)
        tensors += ", rates=rates"
        reads.append("rates")
    copied = _copied_bytes(b, role, updates, overwritable if clip else None)
    if copied:
        code.line(f'"copies {copied} B of gradients"', (), ())
    if predicate and not all(_has_kernel(b, step) for step in updates):
        whole = (s.spec for s in updates if not s.master_bytes)
        kept = sum(b.shared.nbytes(spec, b.coordinates) for spec in whole)
        kept += sum(map(b.nbytes.__getitem__, values))
        code.line(f'"copies {kept} B of parameters and state, kept if the step is undone"', (), ())
    code.line(f"{function}(optimizer, {updated}, options, {tensors})", reads, (), called=function)
    for step, name, part in zip(updates, names, parts, strict=True):
        where = _updated_places(b, inputs[step.parameter])
        # a part of several blocks is a copy, which must be written back
        if part != name and any(len(intervals) > 1 for intervals in where):
            code.apply(write, [name, part], (), layout=where)  # a skipped step has not changed it
    b.close()


def compute_new_values(b: RankBuilder) -> None:
    """Emit the calls that compute the new values and the new state of the parameters that this rank
    owns, into new memory, before ranks vote."""
    norm = norm_of(b.plan.steps)
    clip = norm and f"{norm.result}_clip"
    for number, role in enumerate(b.roles.updates):
        mine: list[Update] = []
        for step in _updates(b, number):
            if step.owner is None:
                continue
            if step.is_on_rank(b.coordinates):
                mine.append(step)
            else:  # the value has no elements here
                b.assign(step.value, step.result)
                b.record(step.result, step.spec)
        if not mine:
            continue
        b.close()
        b.label = Label("update")
        segment = b.segment()
        code = segment.code
        segment.table |= {"optimizer": role.optimizer, "options": options_name(number)}
        values = optimizer_values(b, number)
        state, new_state = _state_names(values)
        segment.table |= state | new_state
        labels_of = b.roles.labels_of
        labels = labels_of(s.parameter for s in mine)
        groups = tuple(map(labels_of, role.groups))
        updated = code.bind("updated", Updated(groups, labels, tuple(values.values())))
        wholes, gradients = [s.value for s in mine], [s.gradient for s in mine]
        function = code.bind("compute_owned", compute_owned)
        results = [*(s.result for s in mine), *new_state]
        overwritable = () if clip else labels_of(_overwritable(b, mine))
        own = f", {code.bind('own', overwritable)}" if overwritable else ""
        code.line(
            f"{tuple_text(results)} = {function}(optimizer, {updated}, options, "
            f"{tuple_text(wholes)}, {tuple_text(gradients)}, {tuple_text(tuple(state))}, "
            f"{clip}{own})",
            ["optimizer", "options", *wholes, *gradients, *state, *([clip] if clip else [])],
            results,
            called=function,
        )
        for step in mine:
            b.price(step)
            b.record(step.result, step.spec)
        b.nbytes.update((name, b.nbytes[old]) for name, old in zip(new_state.values(), values))
        b.close()
    b.label = Label("optimizer")


def _state_names(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names in the table of the state and of the new state, by their names in code.
    ``names``: in the table, of the state of the parameters that this rank owns."""
    names = tuple(names)
    return (
        {f"optimizer_{at}": name for at, name in enumerate(names)},
        {f"new_state_{at}": f"new {name}" for at, name in enumerate(names)},
    )


def _store_new_values(b: RankBuilder, number: int, updates: Sequence[Update]) -> None:
    """Emit the writes of new values into the rank's shards of the parameters, and of the new state
    of the parameters that the rank owns."""
    inputs = {i.label: i for i in b.plan.inputs}
    b.close()
    b.label = Label("update")
    segment = b.segment()
    state, new_state = _state_names(optimizer_values(b, number))
    segment.table |= state | new_state
    if state:
        segment.code.apply(replace_state, [tuple(state), tuple(new_state)], ())
    written: list[str] = []
    for step in updates:
        item = inputs[step.parameter]
        where = _updated_places(b, item)
        if all(where):
            segment.code.apply(write, [item.name, step.written], (), layout=where)
            written.append(item.name)
    segment.writes = (*state, *written)
    b.close()


def _updated_places(b: RankBuilder, item: PlannedInput) -> Where:
    """Return the places of the elements that this rank updates in its shard of the parameter."""
    return given(item.held, item.updated, b.coordinates, b.coordinates)


def _updated_part(b: RankBuilder, item: PlannedInput, step: Update) -> str:
    """Emit and return the part of a parameter that this rank updates. It is a view if it is one
    block, else a copy."""
    if step.spec == item.held:
        return item.name
    part = f"{item.name}_part"
    b.segment().code.apply(block, [item.name], [part], _updated_places(b, item))
    return part


_FRESH_OPS = frozenset(
    f"aten.{op}"
    for op in (
        *("add", "addmm", "bmm", "convolution_backward", "embedding_dense_backward", "mean"),
        *("mm", "mul", "native_layer_norm_backward", "sum"),
    )
)
"""Ops whose result never shares its memory with another tensor."""


def _overwritable(b: RankBuilder, updates: Sequence[Update]) -> tuple[str, ...]:
    """Return the parameters whose gradients the update may overwrite: each gradient has its own
    memory, as the result of an op, a sum or a message, and only the update reads it."""
    if b.roles.gradients:
        return ()
    parameter_of: dict[str, str] = {}  # gradient to its first parameter
    for update in updates:
        match b.shared.producers.get(update.gradient):
            case Compute() as step:
                name = b.shared.local_call(step, b.coordinates).name  # aten.sum.dim_IntList
                is_fresh = name.rpartition(".")[0] in _FRESH_OPS
            case Accumulate():
                is_fresh = b.plan.num_microbatches > 1
            case Redistribute() as step:
                is_fresh = not step.is_free
            case _:
                is_fresh = False
        if is_fresh:
            parameter_of.setdefault(update.gradient, update.parameter)
    return tuple(parameter_of.values())


def _copied_bytes(
    b: RankBuilder,
    role: OptimizerRole,
    updates: Sequence[Update],
    overwritable: Sequence[str] | None,
) -> int:
    """Return the bytes of gradients that the update copies: small ones, to lie end to end like
    their parameters (flat_buffers.py), unless they are parts of one message; gradients of another
    dtype than the updated tensor; and, if there is a norm, gradients that the update may not
    overwrite (not in ``overwritable``). Not counted, because unknown here: gradients that
    are not contiguous, and all gradients if the user chose an implementation of the update and
    there is a norm."""
    scattered = {
        name: (step.name, at)
        for step in b.plan.steps
        if isinstance(step, Redistribute) and step.bucket and step.kind == "reduce_scatter"
        for at, name in enumerate(step.results)
    }
    specs = b.plan.value_specs()
    by_label = {update.parameter: update for update in updates}
    dtypes = {u.parameter: torch.float32 if u.master_bytes else u.spec.dtype for u in updates}
    fused = all(_has_kernel(b, update) for update in updates)
    total = 0
    for group in role.groups or (tuple(by_label),):
        by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[Update]] = {}
        for update in (by_label[label] for label in group if label in by_label):
            key = update.spec.dtype, dtypes[update.parameter]
            by_dtypes.setdefault(key, []).append(update)
        for (_, dtype), same_dtypes in by_dtypes.items():
            sizes = [math.prod(update.spec.local_shape(b.coordinates)) for update in same_dtypes]
            for run in group_by_size(sizes):
                gradient_specs = [specs[same_dtypes[at].gradient] for at in run]
                places = [scattered.get(same_dtypes[at].gradient, ("", -at)) for at in run]
                first, begin = places[0]
                in_order = (
                    places == [(first, begin + i) for i in range(len(run))]
                    and all(spec.dtype == dtype for spec in gradient_specs)
                    and all(sizes[at] == filled(sizes[at], dtype) for at in run)
                )
                read_only = (
                    overwritable is None and same_dtypes[0].optimizer in _READ_ONLY_OPTIMIZERS
                )
                written = read_only or (
                    overwritable is not None
                    and fused
                    and all(same_dtypes[at].parameter in overwritable for at in run)
                )
                if not (in_order and written):
                    total += sum(spec.local_nbytes(b.coordinates) for spec in gradient_specs)
    return total


def takes_rates(b: RankBuilder, number: int) -> bool:
    """Return whether the program takes the learning rates of the optimizer ``number`` on the
    device. Kernels read rates in float32, which would round the rate of a float64 parameter."""
    updates = [step for step in updates_of(b.plan.steps) if step.number == number]
    wide = any(step.spec.dtype == torch.float64 for step in updates)
    return b.shared.deferred and not wide and all(_has_kernel(b, step) for step in updates)


def _has_kernel(b: RankBuilder, update: Update) -> bool:
    """Return whether torch has a fused kernel for the update."""
    dtype = torch.float32 if update.master_bytes else update.spec.dtype
    return has_kernel(update.optimizer, dtype, b.shared.device)


_READ_ONLY_OPTIMIZERS = frozenset(cls.__name__ for cls in ELEMENTWISE)
"""Optimizers that do not write to gradients, so that gradients need no copies if there is no
norm."""


# -- functions that generated code calls -----------------------------------------------------------


def compute_owned(
    optimizer: OwnedOptimizer,
    updated: Updated,
    options: tuple[dict[str, object], ...],
    values: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    states: tuple[torch.Tensor, ...],
    clip: torch.Tensor | None,
    overwritable: tuple[str, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Return the new values, then the new states, of the parameters that a rank owns; see
    `OwnedOptimizer.compute`. Runs on ranks."""
    labels = updated.labels
    parameters, grads, old_states = (
        dict(zip(labels, x, strict=True)) for x in (values, gradients, states)
    )
    new_values, new_states = optimizer.compute(
        updated, parameters, options, grads, old_states, clip, overwritable
    )
    return (*map(new_values.__getitem__, labels), *map(new_states.__getitem__, labels))


def replace_state(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...]) -> None:
    """Let the tensors ``old`` of the rank's table have the memory of ``new``. Runs on ranks."""
    for value, new_value in zip(old, new, strict=True):
        value.data = new_value


def step_optimizer(
    optimizer: ShardOptimizer,
    updated: Updated,
    options: tuple[dict[str, object], ...],
    shards: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    clip: torch.Tensor | None,
    parts: tuple[str, ...] = (),
    overwritable: tuple[str, ...] = (),
    skip: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
) -> None:
    """Step the rank's optimizer; see `ShardOptimizer.step`. Runs on ranks."""
    by_label = dict(zip(updated.labels, shards, strict=True))
    grads = dict(zip(updated.labels, gradients, strict=True))
    on_device = skip, rates
    optimizer.step(updated, by_label, options, grads, values, clip, parts, overwritable, *on_device)
