"""Matching a checkpoint with a model and its optimizer, by names, before anything is loaded.

    values = matched(checkpoint, model, convert=False)
    values["up.weight"]        # InCheckpoint("model.up.weight", (64, 16), f32, ".../100", ...)
    (state,) = matched_states(checkpoint, model, (adamw,))
    state.read()               # {parameter: {"step": ..., "exp_avg": f32[64,16], ...}}

Names are as in state dicts, and shapes are global. A tied tensor matches any of its names; in
another program's checkpoint, names may begin with "model."; Hugging Face's files may have the
published names (published.py). One error lists all differences. A checkpoint has the groups of
several optimizers one after another, and their entries side by side: no parameter has two.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from dtensor.api.checkpoint.published import assembled, is_ignored
from dtensor.api.model.initial_values import labels_in_state
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.api.step.controller_optimizer import check_parameters
from dtensor.api.values.lazy_parameters import (
    Entries,
    LazyOptimizerState,
    without_hook,
)
from dtensor.api.values.on_disk import OnDisk, read_whole
from dtensor.errors import PlanningError
from dtensor.numerics import dtype_name
from dtensor.private_torch import pytree
from dtensor.runtime.checkpoint import (
    Checkpoint,
    TensorRecord,
)
from dtensor.runtime.checkpoint.assembly import Assembly, read_block
from dtensor.runtime.checkpoint.extra import decoded
from dtensor.runtime.checkpoint.saving import open_cached, read_shard
from dtensor.runtime.optimizer.elementwise.optimizer_rule import (
    known_class,
    known_rule,
    set_attributes,
)
from dtensor.runtime.optimizer.shard_optimizer import DELAYED
from dtensor.sharding.ops.philox import Pieces

OWN = ("dtensor",)
"""The path of dtensor's own entry in a checkpoint: counters, and the optimizer's description."""


@dataclass(frozen=True, slots=True)
class InCheckpoint(OnDisk):
    """A tensor of the checkpoint in ``folder``, which consists of tensors of its files. ``stride``:
    of the whole tensor; None if it is row-major."""

    folder: str
    source: Assembly
    stride: tuple[int, ...] | None = None

    def part(self, pieces: Pieces) -> Tensor:
        return read_shard(open_cached(self.folder), self.source, pieces, self.dtype)

    def whole(self) -> Tensor:
        value = super(InCheckpoint, self).whole()
        if self.stride is None:
            return value
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).copy_(value)


def matched(
    checkpoint: Checkpoint, model: ParallelModule, *, convert: bool
) -> dict[str, InCheckpoint]:
    """Return the location in the checkpoint of each parameter and buffer of the state dict, by
    label. ``convert``: a dtype may differ. Raises PlanningError for missing or unexpected names,
    other shapes and other dtypes."""
    tensors, keys = model.seen.tensors, labels_in_state(model.module, model.seen)
    prefix = _prefix(checkpoint, keys)
    stored = {
        name.removeprefix(prefix): _whole(record)
        for name, record in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    if checkpoint.layout == "hf" and not _fits(stored, model, keys):
        stored = _with_own_names(checkpoint, stored, model, keys)
    else:
        stored |= {n: stored[saved_name] for n, saved_name in checkpoint.tied.items() if n in keys}
    keys_by_label: dict[str, list[str]] = {}
    for key, label in keys.items():
        keys_by_label.setdefault(label, []).append(key)
    missing = [
        names[0] for names in keys_by_label.values() if not any(key in stored for key in names)
    ]
    unexpected = sorted(stored.keys() - keys.keys())
    if missing or unexpected:
        raise _other_names(checkpoint, missing, unexpected, list(keys), list(stored))
    in_checkpoint: dict[str, InCheckpoint] = {}
    shapes: list[str] = []
    dtypes: list[str] = []
    for label, names in keys_by_label.items():
        present = [key for key in names if key in stored]
        source = stored[present[0]]
        with without_hook():
            shape, dtype = tuple(tensors[label].shape), tensors[label].dtype
        line = (
            f"\n  {present[0]}: {_type(source.dtype, source.shape)} in the checkpoint, "
            f"{_type(dtype, shape)} in the model"
        )
        if source.shape != shape:
            shapes.append(line)
        elif source.dtype != dtype and not convert:
            dtypes.append(line)
        for other in present[1:]:
            _check_tied(checkpoint, present[0], source, other, stored[other])
        in_checkpoint[label] = InCheckpoint(
            prefix + present[0], shape, dtype, os.path.abspath(checkpoint.path), source
        )
    if shapes:
        raise _mismatch_error(checkpoint, "shapes", shapes, "build the model like the saved one")
    if dtypes:
        fix = (
            'dt.load(path, model, dtype="model") converts to the model\'s, or model.to(...) before'
        )
        raise _mismatch_error(checkpoint, "dtypes", dtypes, fix)
    return in_checkpoint


def _whole(record: TensorRecord) -> Assembly:
    return Assembly.of(record.name, record.dtype, record.shape)


def _fits(stored: Mapping[str, Assembly], model: ParallelModule, keys: Mapping[str, str]) -> bool:
    """Return whether a folder has the names of the model, with their shapes."""
    with without_hook():
        tensors = model.seen.tensors
        shapes = {k: tuple(tensors[label].shape) for k, label in keys.items() if label in tensors}
    return all(shapes.get(key) == source.shape for key, source in stored.items())


def _with_own_names(
    checkpoint: Checkpoint,
    stored: Mapping[str, Assembly],
    model: ParallelModule,
    keys: Mapping[str, str],
) -> dict[str, Assembly]:
    """Return the tensors of Hugging Face's files by the names that they have in the model."""
    with without_hook():
        tensors = model.seen.tensors
        own = {
            key: Assembly.of(key, tensors[label].dtype, tensors[label].shape)
            for key, label in keys.items()
            if label in tensors
        }
    tied = {name: stored[saved_name] for name, saved_name in checkpoint.tied.items()}
    result = assembled(model.module, {**stored, **tied}, own)
    return {
        name: source
        for name, source in result.items()
        if name in own or not (name in tied or is_ignored(model.module, name))
    }


def _mismatch_error(
    checkpoint: Checkpoint, attribute: str, lines: Sequence[str], fix: str
) -> PlanningError:
    """Return the error for differing "shapes" or "dtypes", with a line for each tensor."""
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    return PlanningError(
        f"{checkpoint.path} has other {attribute} than the model; nothing was loaded."
        f"{''.join(lines[:8])}{more}\nfix: {fix}"
    )


def _prefix(checkpoint: Checkpoint, keys: Mapping[str, str]) -> str:
    """Return the prefix of a model's names in the checkpoint: "model." in dtensor's, none in
    Hugging Face's, and the one that matches most names in others."""
    if checkpoint.layout == "hf":
        return ""
    if checkpoint.layout == "dtensor":
        return "model."
    fitting = {p: sum(p + key in checkpoint.tensors for key in keys) for p in ("model.", "")}
    return max(fitting, key=lambda p: (fitting[p], p))


def _other_names(
    checkpoint: Checkpoint,
    missing: Sequence[str],
    unexpected: Sequence[str],
    keys: Sequence[str],
    stored: Sequence[str],
) -> PlanningError:
    """Return the error for names that differ, with near names and a fix."""
    text = f"{checkpoint.path} has other names than the model; nothing was loaded."

    def line(title: str, names: Sequence[str], candidates: Sequence[str]) -> str:
        """Return a line of names, with names of ``candidates`` that resemble the first one."""
        if not names:
            return ""
        near = nearest(names[0], candidates)
        hint = f" (near {names[0]}: {', '.join(near)})" if near else ""
        return f"\n  {title}: {listing(names)}{hint}"

    text += line("only in the model", missing, unexpected or stored)
    text += line("only in the checkpoint", unexpected, missing or keys)
    for prefix in ("model.", "module.", "_orig_mod."):
        if missing and all(prefix + key in stored for key in missing):
            return PlanningError(
                f'{text}\nfix: the names in the checkpoint begin with "{prefix}": load it into the '
                f"model that has these names, such as AutoModelForCausalLM in place of AutoModel"
            )
        bare = [key.removeprefix(prefix) for key in missing if key.startswith(prefix)]
        if missing and len(bare) == len(missing) and set(bare) <= set(stored):
            return PlanningError(
                f'{text}\nfix: the names in the model begin with "{prefix}": load the checkpoint '
                f"into the part of it that has these names"
            )
    return PlanningError(f"{text}\nfix: build the model that was saved, or choose its checkpoint")


def _check_tied(
    checkpoint: Checkpoint, key: str, source: Assembly, other_key: str, other: Assembly
) -> None:
    """Raises PlanningError if two names that the model ties have different values."""

    def bytes_of(source: Assembly) -> list[Any]:
        return [(checkpoint.tensors[p.name].pieces, replace(p, name="")) for p in source.parts]

    if bytes_of(source) == bytes_of(other):
        return
    same_type = (source.shape, source.dtype) == (other.shape, other.dtype)
    if not same_type or not torch.equal(
        read_block(checkpoint, source), read_block(checkpoint, other)
    ):
        raise PlanningError(
            f"{key} and {other_key} are one tensor in the model, and two with different values in "
            f"{checkpoint.path}; nothing was loaded.\n"
            f"fix: build the model without the tie, or choose another checkpoint"
        )


def _type(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"


# -- giving an optimizer its state -----------------------------------------------------------------


def keys_in_state(
    model: ParallelModule, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[int, str]:
    """Return the names, in files, of the optimizers' parameters, by id: the name in the state dict,
    or "(gone) " and the label of a parameter that has left the module. Raises PlanningError for a
    parameter that was never in the module, and for a parameter of two optimizers."""
    check_parameters(model, optimizers)
    keys: dict[str, str] = {}
    for key, label in labels_in_state(model.module, model.seen).items():
        keys.setdefault(label, key)
    names = {id(p): keys.get(label, label) for label, p in model.seen.tensors.items()}
    for parameter in (p for o in optimizers for group in o.param_groups for p in group["params"]):
        names.setdefault(id(parameter), f"(gone) {model.labels.of(parameter)}")
    return names


@dataclass(slots=True)
class MatchedState:
    """An optimizer's state in a checkpoint: its groups in torch's form, and its entries, whose
    tensors are `OnDisk` until `read`."""

    groups: list[dict[str, Any]]
    entries: Entries
    attributes: Mapping[str, Any]
    numbers: Mapping[str, str]  # the types of Python numbers, which ranks write as tensors, by key
    loaded: Entries | None = None  # the result of `read`

    def read(self) -> Entries:
        """Read the entries, and return them as full values on their parameters' devices."""
        read = {p: self._with_numbers(read_whole(state)) for p, state in self.entries.items()}
        self.loaded = {p: _to_device_of(p, state) for p, state in read.items()}
        return self.loaded

    def _with_numbers(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Convert tensors that stand for Python numbers back to numbers."""
        kinds = {"bool": bool, "int": int, "float": float}
        types = {k: kinds[kind] for k, kind in self.numbers.items() if k in entries}
        return {k: types[k](v) if k in types else v for k, v in entries.items()}

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer's state: to the values, if they were read, else to a lazy state."""
        loaded = self.loaded or {}
        # torch's optimizers cannot set a state that has nothing but a delayed gradient
        made = {p: entries for p, entries in loaded.items() if entries.keys() != {DELAYED}}
        state = defaultdict[Tensor, dict[str, Any]](dict, made)
        optimizer.__setstate__({"state": state, "param_groups": self.groups})
        optimizer.state.update(loaded)
        if self.loaded is None:
            optimizer.state = cast(Any, LazyOptimizerState({}, self.read, self.entries))
        set_attributes(optimizer, self.attributes)


def _to_device_of(parameter: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries on the parameter's device, or on the CPU if this is the meta device."""
    with without_hook():
        device = torch.device("cpu") if parameter.is_meta else parameter.device
    return pytree.tree_map_only(Tensor, lambda v: v.to(device), dict(entries))


def matched_states(
    checkpoint: Checkpoint, model: ParallelModule, optimizers: Sequence[torch.optim.Optimizer]
) -> list[MatchedState]:
    """Return the state of each optimizer in the checkpoint. Raises PlanningError if the optimizers'
    number, order, classes, groups or shapes differ."""
    if not optimizers:
        return []
    keys = keys_in_state(model, optimizers)
    labels = [
        [[keys[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    groups = _groups_in(checkpoint, [names for of_groups in labels for names in of_groups])
    if groups is None:
        raise PlanningError(
            f"{checkpoint.path} has no state of an optimizer; nothing was loaded.\n"
            f"fix: dt.load(path, model), which leaves the optimizer as it is"
        )
    saved = checkpoint.small.get(OWN, {})
    saved_kinds = _by_optimizer(saved.get("optimizer"))
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    if saved_kinds not in ([None], kinds):
        saved_text, text = ", ".join(saved_kinds), ", ".join(kinds)
        fix = f"build the {saved_text} that was saved"
        if len(saved_kinds) > 1:
            fix = f"pass all of them in the order of the checkpoint, [{saved_text}]"
        raise PlanningError(
            f"{checkpoint.path} has the state of {saved_text}, and this is {text}; nothing was "
            f"loaded.\nfix: {fix}, or dt.load(path, model) alone"
        )
    counts = saved.get("groups", [len(of_groups) for of_groups in labels])
    ends = [*itertools.accumulate(counts[:-1]), len(groups)]
    unsaved = [{}] * len(optimizers)
    attributes, numbers = (_by_optimizer(saved.get(k, unsaved)) for k in ("attributes", "numbers"))
    return [
        MatchedState(
            *_matched_groups(checkpoint, optimizer, keys, labels[i], groups[begin:end]),
            attributes[i],
            numbers[i],
        )
        for i, (optimizer, begin, end) in enumerate(zip(optimizers, [0, *ends], ends, strict=False))
    ]


def _by_optimizer(value: Any) -> list[Any]:
    """Return an item of dtensor's own entry, which is a list if several optimizers were saved."""
    return value if isinstance(value, list) else [value]


def _matched_groups(
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    keys: Mapping[int, str],
    labels: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], Entries]:
    """Return the groups of an optimizer with their saved options, and its entries in the
    checkpoint. Raises PlanningError if groups or shapes differ."""
    saved_labels = [list(group["params"]) for group in groups]
    if [sorted(names) for names in labels] != [sorted(names) for names in saved_labels]:
        raise PlanningError(
            f"{checkpoint.path} has the optimizer's parameters in other groups; nothing was "
            f"loaded.{_group_differences(labels, saved_labels)}\n"
            f"fix: build the optimizer over the groups that it had when it was saved"
        )
    rule = known_rule(optimizer)
    has_shapes = known_class(optimizer) is not None or (rule is not None and not rule.owned)
    entries = {
        parameter: _entries_of(checkpoint, keys[id(parameter)], parameter, has_shapes)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    options = [
        {**_with_saved_options(group, saved_group), "params": group["params"]}
        for group, saved_group in zip(optimizer.param_groups, groups, strict=True)
    ]
    return options, {parameter: values for parameter, values in entries.items() if values}


def _groups_in(
    checkpoint: Checkpoint, labels: Sequence[Sequence[str]]
) -> Sequence[Mapping[str, Any]] | None:
    """Return the parameter groups in a checkpoint: options, and the names of ``params``; None if it
    has none. Torch's tools may store the list's items separately, or the options of each parameter;
    the groups are then the groups of ``labels``."""
    root = "optimizer", "param_groups"
    if root in checkpoint.small:
        return checkpoint.small[root]
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, tuple[str, ...]] = {}
    for path in checkpoint.small:
        if path[:2] == root and len(path) == 4 and path[2].isdigit():
            numbered.setdefault(int(path[2]), {})[path[3]] = checkpoint.small[path]
        by_name[".".join(path)] = path
    if numbered:
        return [numbered[number] for number in sorted(numbered)]
    groups: list[dict[str, Any]] = []
    for keys in labels:
        options: list[dict[str, Any]] = []
        for key in keys:
            prefix = f"optimizer.param_groups.{key}."
            paths = {n.removeprefix(prefix): p for n, p in by_name.items() if n.startswith(prefix)}
            key_options = {end: checkpoint.small[p] for end, p in paths.items() if "." not in end}
            options += [key_options] if key_options else []
        if any(other != options[0] for other in options[1:]):
            raise PlanningError(
                f"{checkpoint.path} has different options for parameters that are one group here; "
                f"nothing was loaded.\nfix: build the optimizer over the groups that it had"
            )
        groups += [{**options[0], "params": list(keys)}] if options else []
    return groups or None


def _group_differences(present: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> str:
    """Return the lines of a message that list how the groups' parameters differ."""
    lines = [f"\n  groups: {len(saved)} in the checkpoint, {len(present)} here"]
    for i, (present_names, saved_names) in enumerate(zip(present, saved, strict=False)):
        for side, names in (
            ("only here", sorted(set(present_names) - set(saved_names))),
            ("only in the checkpoint", sorted(set(saved_names) - set(present_names))),
        ):
            if names:
                lines.append(f"\n  group {i}, {side}: {listing(names)}")
    return "".join(lines)


def _with_saved_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with the saved options. An option that is a tensor now stays a tensor."""

    def adapt(present: Any, value: Any) -> Any:
        """Return the saved number as a tensor where the group has a tensor now."""
        if isinstance(present, tuple) and isinstance(value, tuple) and len(present) == len(value):
            return tuple(map(adapt, present, value))
        if isinstance(present, Tensor) and isinstance(value, int | float):
            return torch.full_like(present, value)
        return value

    options = {key: adapt(group.get(key), value) for key, value in saved.items() if key != "params"}
    return {**group, **options}


def _entries_of(
    checkpoint: Checkpoint, key: str, parameter: Tensor, has_shapes: bool
) -> dict[str, Any]:
    """Return a parameter's state entries in the checkpoint, with `OnDisk` in place of tensors.

    ``has_shapes``: a tensor is one number or has the parameter's shape; PlanningError is raised for
    another shape, and for nested entries that another program wrote.
    """
    prefix = f"optimizer.state.{key}."
    entries: dict[str, Any] = {}
    own = checkpoint.small.get(OWN, {})
    trees, strides = own.get("nested", {}).get(key, {}), own.get("strides", {})
    in_trees: dict[str, dict[str, Any]] = {entry: {} for entry in trees}
    folder = os.path.abspath(checkpoint.path)
    with without_hook():
        shape = tuple(parameter.shape)
    for name, record in checkpoint.tensors.items():
        if not name.startswith(prefix):
            continue
        entry, dot, number = name.removeprefix(prefix).rpartition(".")
        stride = strides.get(name)
        tensor = InCheckpoint(name, record.shape, record.dtype, folder, _whole(record), stride)
        if not dot:
            if has_shapes and record.shape not in ((), (1,), shape):
                raise PlanningError(
                    f"{name} is {_type(record.dtype, record.shape)} in {checkpoint.path}, and the "
                    f"parameter has shape {list(shape)}; nothing was loaded.\n"
                    f"fix: build the model and the optimizer that were saved"
                )
            entries[number] = tensor
        elif entry in in_trees:
            in_trees[entry][number] = tensor
        elif record.path[:3] == ("optimizer", "state", key):
            raise PlanningError(
                f"{name} is part of a nested value in {checkpoint.path}, which another program "
                f"wrote, so its form is not known; nothing was loaded.\n"
                f"fix: read the file with that program, and dt.load_state_dict(model, opt, state)"
            )
    entries |= {entry: decoded(tree, in_trees[entry]) for entry, tree in trees.items()}
    for path, value in checkpoint.small.items():
        if path[:3] == ("optimizer", "state", key) and len(path) == 4:
            entries[path[3]] = value
    return entries
