"""The locations of all values of a checkpoint: on ranks, on the controller, or small.

    state = Located()
    locate_model(state, model, model_home, ("model",))
    locate_optimizer(state, adamw, keys, model_home)
    state.on_ranks["optimizer", "state", "up.weight", "exp_avg"]     # f32[64@dp,16] on ranks 0, 1

Ranks write their own values. The controller gathers values that only a rank can read or that are
sums, and writes them: the packed state of owned parameters, and delayed gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtensor.api.model.initial_values import labels_in_state
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.store.home import ModelHome
from dtensor.api.store.optimizer_state import lacks_delayed
from dtensor.api.values.lazy_parameters import LazyOptimizerState, holder_of
from dtensor.api.values.on_disk import read_whole
from dtensor.errors import PlanningError
from dtensor.private_torch import pytree
from dtensor.runtime.checkpoint.extra import encoded
from dtensor.runtime.checkpoint.saving import Names
from dtensor.sharding.spec.stored import StoredTensor


@dataclass(slots=True)
class Located:
    """The locations of a checkpoint's values: tensors on ranks or on the controller
    (``local``), and ``small`` values. ``aliases``: each further name of a tied tensor, with
    its first name. ``nested``: the lists and dicts in the state of optimizers that hold tensors, as
    trees (extra.py), by the parameter's name and the key. ``strides``: of the tensors in the state
    of optimizers that are not row-major, by name: matrix products on them have other bits."""

    on_ranks: dict[Names, StoredTensor] = field(default_factory=dict[Names, StoredTensor])
    local: dict[Names, Tensor] = field(default_factory=dict[Names, Tensor])
    aliases: dict[Names, Names] = field(default_factory=dict[Names, Names])
    small: dict[Names, Any] = field(default_factory=dict[Names, Any])
    nested: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


def locate_model(
    state: Located, model: ParallelModule, model_home: ModelHome | None, prefix: Names
) -> None:
    """Add the locations of the module's state dict. Raises PlanningError for an entry that is
    neither a parameter nor a buffer."""
    tensors = model.seen.tensors
    first: dict[str, Names] = {}
    for key, label in labels_in_state(model.module, model.seen).items():
        path = *prefix, key
        if label not in tensors:
            raise PlanningError(
                f"{key} of the module's state dict is none of its parameters and buffers, so ranks "
                f"cannot write it.\n"
                f"fix: leave it out of the state dict, and pass its value as extra="
            )
        if first.setdefault(label, path) != path:
            state.aliases[path] = first[label]
            continue
        tensor = tensors[label]
        holder = model.initial.holders.get(label) if tensor.is_meta else holder_of(tensor)
        if model_home is None or holder is not model_home:
            state.local[path] = model.initial.value(label, tensor).detach()
        elif model_home.stored[label].is_pending:
            state.local[path] = model_home.gather([label])[label]
        else:
            state.on_ranks[path] = model_home.stored[label]


def locate_optimizer(
    state: Located,
    optimizer: torch.optim.Optimizer,
    keys: Mapping[int, str],
    model_home: ModelHome | None,
) -> None:
    """Add the locations of an optimizer's state and of its groups' options. ``keys``: the names of
    parameters in files, by id."""
    state.small.setdefault(("optimizer", "param_groups"), []).extend(
        {**_options(group), "params": [keys[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    )
    home = model_home.optimizers.get(id(optimizer)) if model_home is not None else None
    if home is not None and home.current:
        gathered: dict[tuple[str, str], StoredTensor] = {}
        if lacks_delayed([home]):
            home.values()  # waits for the step that makes delayed gradients
        for (label, key), stored in home.owner.stored.items():
            if home.rule.entry(key).packed:
                gathered[label, key] = stored
            elif not stored.is_pending or home.owner.is_present((label, key)):
                name = keys[id(home.parameters[label])]
                state.on_ranks["optimizer", "state", name, key] = stored
        entries = {
            p: read_whole(state_of_parameter) for p, state_of_parameter in home.unplaced.items()
        }
        # packed state is unpacked on the controller
        for parameter, values in home.model_home.gather_values(home, gathered).items():
            entries.setdefault(parameter, {}).update(values)
    else:
        lazy: object = optimizer.state
        is_lazy = isinstance(lazy, LazyOptimizerState)
        state_here = lazy.refresh() if is_lazy else optimizer.state
        entries = {p: values for p, values in state_here.items() if isinstance(p, Tensor)}
    for parameter, state_of_parameter in entries.items():
        if any(
            isinstance(value, Tensor) and value.is_meta for value in state_of_parameter.values()
        ):
            continue  # Adagrad's initial state of a parameter on the meta device
        _check_no_shared_memory(state_of_parameter, keys[id(parameter)])
        for key, value in state_of_parameter.items():
            path = "optimizer", "state", keys[id(parameter)], key
            local: dict[Names, Tensor] = {}
            if isinstance(value, Tensor):
                local[path] = value
            elif any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                tree, tensors = encoded(value, ".".join(path))
                state.nested.setdefault(path[2], {})[key] = tree
                local = {(*path, number): tensor for number, tensor in tensors.items()}
            else:
                state.small[path] = value
            state.local |= local
            for tensor_path, tensor in local.items():
                if not tensor.is_contiguous():
                    stride = torch.empty_like(tensor, device="meta").stride()  # without gaps
                    state.strides[".".join(tensor_path)] = stride


def _check_no_shared_memory(entries: Mapping[str, Any], name: str) -> None:
    """Raise PlanningError if two tensors of a parameter's state share memory: in the files they
    would be two tensors, and a write to one would not change the other after a load."""
    key_of: dict[int, str] = {}
    for key, value in entries.items():
        leaves = {id(x): x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)}
        for tensor in (x for x in leaves.values() if x.numel()):
            address = tensor.untyped_storage().data_ptr()
            if address in key_of:
                raise PlanningError(
                    f"{key_of[address]} and {key} of {name} share memory in the state of the "
                    f"optimizer, and would be separate tensors in a checkpoint.\n"
                    f"fix: torch.save(dt.gather_state_dict(model, opt), path), as one tensor"
                )
            key_of[address] = key


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, with numbers in place of tensors of one element."""

    def to_number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(to_number, value))
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    return {k: to_number(v) for k, v in group.items() if k not in ("params", "param_names")}
