"""Placing an optimizer's state: from the controller into the tables of a session's ranks.

    home = place_optimizer(session, model, adamw, 0, groups, plan, stages, models, masters=False)
    stored = home.owner.stored["up.weight", "exp_avg"]
    stored.label         # "model 0: optimizer 0: exp_avg of up.weight"
    stored.spec          # f32[64@dp,16]: [16,16] on each of ranks 0, 1, 2, 3

The plan's update reads each value under a name, cut as the plan says; a `step` is a number on all
ranks. A value that an earlier program has put stays there, unless the user has read it since.
Values that no update has read yet stay on the controller (`OptimizerHome.unplaced`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dtensor.api.model.models import Models
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.stating.stages import StagePlan
from dtensor.api.store.home import OptimizerHome
from dtensor.api.store.session import MeshSession
from dtensor.api.store.store import Source
from dtensor.api.values.lazy_parameters import Entries, LazyOptimizerState
from dtensor.api.values.on_disk import OnDisk, read_whole
from dtensor.errors import PlanningError
from dtensor.numerics import dtype_name
from dtensor.runtime.lower.program import holders, on_mesh
from dtensor.runtime.lower.rank_builder import OptimizerRole
from dtensor.runtime.optimizer.elementwise.optimizer_rule import OptimizerRule, host_reads, rule_of
from dtensor.runtime.optimizer.owned.packed_state import pack
from dtensor.runtime.optimizer.shard_optimizer import DELAYED, MASTER, value_name
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import updates_of
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.spec import TensorSpec, alike
from dtensor.sharding.spec.stored import StoredTensor

if TYPE_CHECKING:
    from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer


def place_optimizer(
    session: MeshSession,
    model: ParallelModule,
    optimizer: torch.optim.Optimizer,
    number: int,
    groups: tuple[tuple[str, ...], ...],
    plan: Plan,
    stages: StagePlan,
    models: Models,
    *,
    masters: bool,
) -> OptimizerHome:
    """Put the state that the plan's update reads into the ranks' tables, and return its home. State
    that the user has read since it was put is put again. A tensor of its parameter's shape is cut
    by the plan's spec of the state; numbers are replicated; values that do not exist yet are absent
    (shard_optimizer.py). The packed state of an owned parameter is put to its owners. The rank's
    updater is put too.

    Raises PlanningError if two steps share an optimizer and only one of them uses masters, or if
    the state of a parameter lacks a value that the optimizer's class reads.
    """
    model_home = session.model_home(model)
    home = model_home.optimizers.get(id(optimizer))
    if home is not None and home.masters != masters:
        raise PlanningError(
            f"two steps share a {type(optimizer).__name__}: one has "
            f"master_weights={home.masters}, this one master_weights={masters}.\n"
            f"fix: master_weights={home.masters} here too, or a separate optimizer"
        )
    # the parameters first: the program's inputs are checked there
    session.place(models, plan, stages)
    rule = rule_of(optimizer)
    keys = tuple(map(rule.keys, optimizer.param_groups))
    if home is not None and home.rule.owned != rule.owned:
        raise PlanningError(
            f"the options of {type(optimizer).__name__} have changed: its update was "
            f"{'per parameter' if home.rule.owned else 'elementwise'} before, and it no longer is."
            f"\nfix: gather_state_dict before the change, and a new step with a new optimizer"
        )
    unchanged = home is not None and home.rule is rule and home.keys == keys
    reads = host_reads(optimizer) if session.cluster.device.type == "cuda" else ""
    if home is not None and unchanged and home.current and home.placed is plan:
        if home.role.host_reads != reads:
            home.role = replace(home.role, host_reads=reads)
        return home
    opt_label = home.label if home else f"optimizer {len(model_home.optimizers)}"
    name = model_home.name(opt_label)
    updated = updated_state(session.ranks, plan, number, groups, keys, name, models.labels, rule)
    if home is not None and home.current:
        _bring_delayed(home, updated)
    stored = {} if home is None else home.owner.stored
    recast = set[tuple[str, str]]() if home is None else _check_as_before(home, updated)
    on_new_ranks = any(k in stored and not set(updated[k].at) <= set(stored[k].at) for k in updated)
    if home is None or not home.current or on_new_ranks:
        lazy: object = optimizer.state
        is_lazy = isinstance(lazy, LazyOptimizerState)
        user_state = lazy.to_place() if is_lazy else dict(optimizer.state)
        entries = {p: state for p, state in user_state.items() if isinstance(p, torch.Tensor)}
        to_put = {**stored, **updated}
        fields = (optimizer, opt_label, masters, keys, rule, model_home, user_state, entries)
        parameters = {} if home is None else home.parameters
        home = OptimizerHome(*fields, parameters=parameters)
        home.shadow = _shadow_of(model, rule, entries)
        if isinstance(lazy, LazyOptimizerState) and lazy.on_disk is not None:
            home.on_disk = True
            home.state.changed()
        model_home.optimizers[id(optimizer)] = home
        session.put([{name: rule.on_rank(masters)} for _ in range(session.mesh.size)])
    else:
        if home.rule is not rule:  # its options have another kind than before
            home.take_rule(rule)
            session.put([{name: rule.on_rank(masters)} for _ in range(session.mesh.size)])
        to_put = {k: new for k, new in updated.items() if k not in stored or k in recast}
    home.parameters |= {label: model.seen.tensors[label] for label, _ in updated}
    _put_state(session, home, to_put)
    home.keys, home.placed = keys, plan
    home.updated = frozenset(updated)
    home.role = OptimizerRole(name, groups, keys, rule.numbers(), reads)
    labels = models.labels
    home.groups = tuple(tuple(map(labels.__getitem__, group)) for group in groups)
    home.trained = frozenset(
        labels[s.parameter] for s in updates_of(plan.steps) if s.number == number
    )
    _check_delayed(home)
    return home


def _bring_delayed(home: OptimizerHome, updated: Mapping[tuple[str, str], StoredTensor]) -> None:
    """Take back to the controller the delayed gradients that the plan reads under another spec."""
    moved = {
        key: stored
        for key, stored in home.owner.stored.items()
        if key[1] == DELAYED and key in updated and stored.spec != updated[key].spec
    }
    if moved:
        for parameter, entries in home.model_home.gather_values(home, moved).items():
            home.unplaced.setdefault(parameter, {}).update(entries)
        home.model_home.store.forget(home.owner, moved, delete=True)


def _check_delayed(home: OptimizerHome) -> None:
    """Raise PlanningError if the optimizer has delayed gradients that the plan does not read, or
    has them for some of the parameters only."""
    labels = home.model_home.model.labels
    stored = [key for key in home.owner.stored if key[1] == DELAYED]
    if not all(map(home.owner.is_present, stored)):
        home.values()  # waits for a step that makes them
    waiting = {key[0] for key in stored if home.owner.is_present(key)}
    waiting |= {labels.of(p) for p, entries in home.unplaced.items() if DELAYED in entries}
    read = {label for label, key in home.updated if key == DELAYED}
    if not waiting or waiting == read:
        return
    kind = type(home.optimizer).__name__
    fix = f'for state in opt.state.values(): state.pop("{DELAYED}", None)'
    if not read:
        raise PlanningError(
            f"{kind} has the gradients of the last step for {len(waiting)} parameters, which "
            f"this step, with delay=0, would not use.\n"
            f"fix: train_step(..., delay=1); or, to lose them, {fix}"
        )
    first = sorted(map(str, waiting ^ read))[0]
    text = ("has", "lacks") if first in waiting else ("lacks", "has")
    raise PlanningError(
        f"with delay=1, {kind} {text[0]} a gradient of the last step for {first}, for which this "
        f"step {text[1]} one.\n"
        f"fix: train the same parameters in each call; or, to lose these gradients, {fix}"
    )


def lacks_delayed(homes: Sequence[OptimizerHome]) -> bool:
    """Return whether the ranks have no gradients of the step before for a plan that reads them."""
    keys = [(home, key) for home in homes for key in home.updated if key[1] == DELAYED]
    return not all(home.owner.is_present(key) for home, key in keys)


def _shadow_of(
    model: ParallelModule, rule: OptimizerRule, entries: Entries
) -> ShadowOptimizer | None:
    """Return the shadow optimizer for existing state: it has the state's numbers, and the keys of
    the other entries. None if the rule needs no shadow."""
    states: dict[str, Mapping[str, Any]] = {
        label: {k: v for k, v in state.items() if k not in (MASTER, DELAYED)}
        for p, state in entries.items()
        if (label := model.labels.of(p)) is not None
    }
    shadow = rule.shadow({})
    if shadow is not None and states:
        numbers = rule.numbers()
        for label, state in states.items():
            small = {
                k: v
                for k, v in state.items()
                if k in numbers or not isinstance(v, OnDisk) or not v.shape
            }
            states[label] = {**state, **read_whole(small)}
        shadow = rule.shadow(states)
    return shadow


def _put_state(
    session: MeshSession, home: OptimizerHome, new: Mapping[tuple[str, str], StoredTensor]
) -> None:
    """Put values of the state, taking existing values from ``home.unplaced``."""
    parameters = home.parameters
    keys_on_ranks: defaultdict[str, set[str]] = defaultdict(set)
    for label, key in home.values(wait=False):
        keys_on_ranks[label].add(key)
    values: dict[tuple[str, str], tuple[Source, StoredTensor]] = {}
    placed = {(parameters[label], key) for label, key in new}
    for (label, key), stored in new.items():
        entries = _materialize_meta_state(
            home.unplaced.get(parameters[label], {}), label, home.optimizer
        )
        if home.rule.entry(key).packed:
            state = {k: v for k, v in entries.items() if k != DELAYED}
            values[label, key] = _packed(home, label, state) if state else None, stored
            placed |= {(parameters[label], k) for k in state}
            continue
        value = entries.get(key)
        if value is None:
            existing_keys = keys_on_ranks[label] | {k for k, e in entries.items() if e is not None}
            existing_keys -= {MASTER, DELAYED}
            _check_no_key_missing(home, label, key, existing_keys, parameters[label])
        else:
            if isinstance(value, OnDisk) and stored.is_pending:
                value = value.whole()  # one rank gets the value, others zeros
            value = _converted_to_spec(value, stored.spec, key, label, home.rule)
            stored = replace(stored, spec=replace(stored.spec, dtype=value.dtype))
            keys_on_ranks[label].add(key)
        values[label, key] = value, stored
    session.launch.store.put(home.owner, values)
    if home.unplaced:
        home.unplaced = _without_placed(home.unplaced, placed)


def _packed(
    home: OptimizerHome, label: str, entries: Mapping[str, Any]
) -> Callable[[], torch.Tensor]:
    """Return the function that packs the state of an owned parameter when its turn comes. As in
    torch's ``load_state_dict``, a step is a CPU tensor unless the group says otherwise."""
    parameter = home.parameters[label]
    groups = home.optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    on_host = () if group.get("capturable") or group.get("fused") else ("step",)

    def pack_state() -> torch.Tensor:
        device = "cpu" if parameter.is_meta else parameter.device
        try:
            return pack(read_whole(entries), device, on_host=on_host)[0]
        except TypeError as error:
            raise PlanningError(
                f"the state of {label} cannot be put on the ranks: {error}.\n"
                f"fix: numbers, containers and plain dense tensors in optimizer.state"
            ) from error

    return pack_state


def updated_state(
    numbers: Sequence[int],
    plan: Plan,
    number: int,
    groups: Sequence[Sequence[str]],
    keys: Sequence[tuple[str, ...]],
    optimizer: str,
    labels: Mapping[str, str],
    rule: OptimizerRule,
) -> dict[tuple[str, str], StoredTensor]:
    """Return the homes of the state that the plan's updates by the optimizer ``number`` read, by
    (label, key).

    Args:
        numbers: the launch's numbers of the mesh's ranks.
        groups, keys: for each parameter group, its parameters' names, and the keys of their state.
        labels: the label of each parameter's name.
    """
    keys_by_name = {n: k for group, k in zip(groups, keys, strict=True) for n in group}
    items = {item.label: item for item in plan.inputs if item.kind == "parameter"}
    stored: dict[tuple[str, str], StoredTensor] = {}
    for step in updates_of(plan.steps):
        if step.number != number:
            continue
        item, masters = items[step.parameter], bool(step.master_bytes)
        label = labels[step.parameter]
        state = on_mesh(plan, item.state)  # the spec of entries of the parameter's shape
        base = replace(state, dtype=torch.float32) if masters else state
        replicated = (REPLICATE,) * len(state.placements)
        for key in (*keys_by_name[step.parameter], *([MASTER] if masters else [])):
            name, entry = value_name(optimizer, key, label), rule.entry(key)
            ranks = holders(plan, item)
            if rule.owned and key == MASTER:  # it is in the packed state
                continue
            if entry.packed:  # its size is not known before a step: the spec has an estimate
                nbytes = step.state_bytes + step.master_bytes
                spec = TensorSpec((nbytes,), torch.uint8, state.mesh, replicated)
                ranks = [r for r in ranks if step.is_on_rank(plan.mesh.coordinates(r))]
            elif entry.number:
                dtype = entry.dtype(torch.float32)
                spec = TensorSpec(entry.shape, dtype, state.mesh, replicated)
            else:
                spec = replace(base, dtype=entry.dtype(base.dtype)) if key != MASTER else base
            stored[label, key] = StoredTensor.of(name, spec, ranks, numbers)
    for item in plan.delayed:
        if item.label in keys_by_name:
            label, spec = labels[item.label], on_mesh(plan, item.spec)
            name = value_name(optimizer, DELAYED, label)
            stored[label, DELAYED] = StoredTensor.of(name, spec, holders(plan, item), numbers)
    return stored


def _check_as_before(
    home: OptimizerHome, updated: Mapping[tuple[str, str], StoredTensor]
) -> set[tuple[str, str]]:
    """Raise PlanningError if the placement of a value has changed, or the dtype of a value that a
    step has made. Return the values whose dtype has changed and that no step has made."""
    recast = set[tuple[str, str]]()
    for entry, now in updated.items():
        if home.rule.entry(entry[1]).packed:  # its spec has an estimate of its size
            continue
        before = home.owner.stored.get(entry, now).spec
        if not alike(before, now.spec):
            raise PlanningError(
                f"{entry[1]} of {entry[0]} is stored as {before}, this program needs it stored as "
                f"{now.spec}"
            )
        changed = before.dtype != now.spec.dtype and before.dtype.is_floating_point
        if changed and not home.rule.entry(entry[1]).number:
            recast.add(entry)
    for label, key in sorted(recast & home.values().keys() if recast else ()):
        kind, dtype = type(home.optimizer).__name__, home.owner.stored[label, key].spec.dtype
        raise PlanningError(
            f"{label} was cast to {dtype_name(updated[label, key].spec.dtype)} after {kind} had "
            f"made its {key}, which is {dtype_name(dtype)}.\n"
            f"fix: make a new {kind} after the cast, and a step with it"
        )
    return recast


def _without_placed(unplaced: Entries, placed: Set[tuple[torch.Tensor, str]]) -> Entries:
    """Return the entries without those that were placed, and without the masters of parameters
    whose state was placed."""
    masters = {(parameter, MASTER) for parameter, _ in placed}
    remaining = {
        parameter: {k: v for k, v in entries.items() if (parameter, k) not in placed | masters}
        for parameter, entries in unplaced.items()
    }
    return {parameter: entries for parameter, entries in remaining.items() if entries}


def _materialize_meta_state(
    entries: Mapping[str, Any], label: str, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """Return a parameter's state with values in place of tensors on the meta device. Only Adagrad's
    initial state can be on the meta device: it is one number everywhere. Raises PlanningError for
    other tensors on the meta device."""
    on_meta = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor) and v.is_meta}
    initial = optimizer.defaults.get("initial_accumulator_value")
    for key, value in on_meta.items():
        if key != "sum" or initial is None or value.is_complex() or float(entries["step"]) != 0:
            raise PlanningError(
                f"{key} of {label} is on the meta device and has no value.\n"
                f"fix: dt.load_state_dict(model, opt, state), which keeps the values"
            )
        filled = torch.full((), initial, dtype=value.dtype).expand(value.shape)
        entries = {**entries, key: filled}
    return entries


def _check_no_key_missing(
    home: OptimizerHome, label: str, key: str, keys: Set[str], parameter: torch.Tensor
) -> None:
    """Raises PlanningError if a parameter's state has some ``keys`` but lacks ``key``: torch's
    optimizer would raise KeyError."""
    if key in (MASTER, DELAYED) or home.rule.entry(key).late or not keys:
        return
    groups = home.optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    if home.rule.creates_missing_state(home.optimizer, group, keys):
        return
    raise PlanningError(
        f"{type(home.optimizer).__name__} reads {key} of {label}, whose state has only "
        f"{', '.join(sorted(keys))}.\n"
        f"fix: the options with which the state was made, or a separate optimizer"
    )


def _converted_to_spec(
    value: Any, spec: TensorSpec, key: str, label: str, rule: OptimizerRule
) -> torch.Tensor | OnDisk:
    """Return a value of the state with the spec's shape, and with its dtype unless the value is a
    number. Raises PlanningError for another shape."""
    entry = rule.entry(key)
    if not isinstance(value, torch.Tensor | OnDisk):
        value = torch.tensor(value, dtype=spec.dtype if entry.python is not None else None)
    elif entry.python is not None and not isinstance(value, OnDisk):
        value = value.reshape(spec.shape).to(spec.dtype)
    if tuple(value.shape) != spec.shape:
        raise PlanningError(
            f"{key} of {label} has the shape {list(value.shape)}, and is read as {spec}.\n"
            f"fix: load the state of the same optimizer and model"
        )
    keeps_dtype = entry.number or not value.dtype.is_floating_point
    if isinstance(value, OnDisk):
        return value if keeps_dtype else replace(value, dtype=spec.dtype)
    return value.detach() if keeps_dtype else value.detach().to(spec.dtype)
