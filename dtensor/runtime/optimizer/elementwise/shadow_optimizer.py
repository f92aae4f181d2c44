"""Compute on the controller how a step changes the optimizer's options and attributes.

    shadow = ShadowOptimizer(kind, {"w": {"step": 3}})
    shadow.step((("w", "b"),), {"w", "b"}, ({"lr": 0.1, "k": 3},), {})
    # returns ({"lr": 0.1, "k": 4},), {} if the class's step does `group["k"] += 1`

Such counts belong to the controller's optimizer, which never steps; the ranks receive their current
values with each step. The new values do not depend on the elements of parameters, which a step may
not read. So the shadow steps an optimizer of the same class over one-element parameters and returns
its options and attributes. The probe checks that torch's own step leaves equal ones. An optimizer
that needs whole parameters has small parameters with as many dims as the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from dtensor.numerics import is_narrow
from dtensor.private_torch import DisableTorchFunctionSubclass
from dtensor.runtime.optimizer.optimizer_kind import (
    OptimizerKind,
    copy_plain,
    is_number,
    options_of,
    plain_attributes,
    plain_equal,
    split_attributes,
    step_without_hooks,
)

SAMPLE_GRADIENT = 1e-3


Form = tuple[tuple[int, ...], torch.dtype, str]
"""The shape, dtype and device of a shadow's parameter."""


def small_form(parameter: torch.Tensor, masters: bool, exact: bool) -> Form:
    """Return the form of the parameter that represents a whole parameter in a shadow: small, or
    with ``exact`` a meta tensor of its shape."""
    with DisableTorchFunctionSubclass():  # does not fetch lazy parameters
        dtype = torch.float32 if masters and is_narrow(parameter.dtype) else parameter.dtype
        if exact:
            return tuple(parameter.shape), dtype, "meta"
        return tuple(min(size, 2) for size in parameter.shape), dtype, "cpu"


Settings = tuple[tuple[dict[str, Any], ...], dict[str, Any]]
"""The options of each group, and the optimizer's attributes."""


@dataclass(slots=True, eq=False)
class ShadowOptimizer:
    """An optimizer over small parameters, which follows the user's optimizer.

    ``numbers``: the state entries of parameters that already have a state, by label. ``forms``:
    the form of each small parameter, by label, for an optimizer that needs whole parameters; None
    for one-element parameters. ``parameters``: the small parameter that represents each parameter.
    ``changed``: the options that a step changes. ``masters``: whether the
    ranks have float32 copies of narrow parameters. ``exact``: whether small parameters have the
    shapes of the user's.
    """

    kind: OptimizerKind
    numbers: Mapping[str, Mapping[str, Any]]
    forms: Mapping[str, Form] | None = None
    changed: Set[str] = frozenset()
    masters: bool = False
    exact: bool = False
    parameters: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict[torch.Tensor, Any])
    _last_assignment: tuple[object, object] = (None, None)

    def step(
        self,
        groups: tuple[tuple[str, ...], ...],
        trained: Set[str],
        options: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any],
    ) -> Settings:
        """Return the options and attributes after a step in which ``trained`` have gradients."""
        if self._last_assignment != (groups, trained):
            self._assign_parameters(groups, trained, options, attributes)
            self._last_assignment = groups, trained
        group_parameters = [
            dict.fromkeys(self.parameters[label] for label in group) for group in groups
        ]
        *new_options, new_attributes = copy_plain((*map(dict, options), dict(attributes)))
        param_groups = [
            {**o, "params": [*h]} for o, h in zip(new_options, group_parameters, strict=True)
        ]
        optimizer = self.kind.make(param_groups, new_attributes)
        for parameter, entries in self.state.items():
            optimizer.state[parameter] = entries
        for label, parameter in self.parameters.items():
            parameter.grad = (
                torch.full_like(parameter, SAMPLE_GRADIENT) if label in trained else None
            )
        with torch.enable_grad():
            step_without_hooks(optimizer)
        self.state = {p: s for p, s in optimizer.state.items() if isinstance(p, torch.Tensor)}
        return tuple(options_of(group) for group in optimizer.param_groups), plain_attributes(
            optimizer
        )

    def snapshot(self) -> tuple[Any, ...]:
        """Return a copy of the state, for `restore`."""
        return (
            dict(self.parameters),
            copy.deepcopy({id(p): s for p, s in self.state.items()}),
            self._last_assignment,
        )

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        self.parameters, state, self._last_assignment = snapshot
        self.state = {p: state[id(p)] for p in self.parameters.values() if id(p) in state}

    def _form(self, label: str) -> Form:
        return (self.forms or {}).get(label, ((1,), torch.float32, "cpu"))

    def _new_value(self, label: str) -> torch.Tensor:
        shape, dtype, device = self._form(label)
        return torch.full(shape, 0.5, dtype=dtype, device=device)

    def _assign_parameters(
        self,
        groups: Sequence[Sequence[str]],
        trained: Set[str],
        options: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any],
    ) -> None:
        """Represent each run of equal neighbours in a group by one parameter.

        Neighbours are equal if they have the same history and both have gradients or both have
        none. The group's order is kept, since its last parameter may determine an option. With
        ``forms``, equal parameters that are not neighbours are represented by one parameter too.
        """
        runs: list[tuple[tuple[int, *tuple[object, ...]], list[str]]] = []
        for number, group in enumerate(groups):
            for label in group:
                history = (
                    id(self.parameters[label]) if label in self.parameters else self._history(label)
                )
                key = number, history, label in trained, self._form(label)
                candidates = runs[-1:] if self.forms is None else runs
                labels = next((labels for k, labels in candidates if k == key), None)
                if labels is None:
                    labels = list[str]()
                    runs.append((key, labels))
                labels.append(label)
        old_parameters, self.parameters = self.parameters, {}
        used_ids = set[int]()
        for (number, *_), labels in runs:
            old_parameter = old_parameters.get(labels[0])
            if old_parameter is not None and id(old_parameter) not in used_ids:
                used_ids.add(id(old_parameter))
                parameter = old_parameter
            else:
                parameter = Parameter(self._new_value(labels[0]))
                if old_parameter is not None:
                    state = self.state.get(old_parameter)
                elif self.forms is None:
                    state = self._initial_state(labels[0])
                else:
                    state = self._begun_state(labels[0], options[number], attributes)
                if state:
                    self.state[parameter] = copy.deepcopy(state)
            self.parameters.update(dict.fromkeys(labels, parameter))
        self.state = {p: s for p, s in self.state.items() if p in set(self.parameters.values())}

    def _history(self, label: str) -> object:
        """Return a key that is equal for two new parameters if one can represent both."""
        state, entries = self.numbers.get(label, {}), self.kind.entries
        if self.forms is None:
            state_numbers = {k: v for k, v in state.items() if k in entries and entries[k].number}
        else:
            state_numbers = {k: v for k, v in state.items() if is_number(v)}
        return tuple(sorted((k, float(v)) for k, v in state_numbers.items())), frozenset(state)

    def _initial_state(self, label: str) -> dict[str, Any]:
        """Return a one-element state with the numbers of the parameter's state."""
        state: dict[str, Any] = {}
        for key, value in self.numbers.get(label, {}).items():
            entry = self.kind.entries.get(key)
            if entry is None or value is None or entry.number:
                python = entry is not None and entry.python is not None
                state[key] = entry.python(value) if python else copy_plain(value)  # type: ignore
            else:
                state[key] = entry.sample()
        return state

    def _begun_state(
        self, label: str, options: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a state that a step of a new optimizer makes, with the numbers of the parameter's
        state, except numbers that depend on the shape; {} if the parameter has no state."""
        numbers = {k: v for k, v in self.numbers.get(label, {}).items() if is_number(v)}
        if not self.numbers.get(label):
            return {}
        value = self._new_value(label)
        state = self._first_state(value, options, attributes)
        kept = {k for k in numbers if k in state and is_number(state[k])}
        if kept and not self.exact:
            larger = value.new_full([size + 1 for size in value.shape], 0.5)
            with suppress(Exception):  # perhaps it takes no parameters of this shape
                other = self._first_state(larger, options, attributes)
                kept = {k for k in kept if plain_equal(state[k], other.get(k))}
        return {**state, **copy_plain({k: numbers[k] for k in kept})}

    def _first_state(
        self, value: torch.Tensor, options: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state of a parameter with this value after the first step."""
        parameter = Parameter(value)
        parameter.grad = torch.full_like(parameter, SAMPLE_GRADIENT)
        group = {**self.kind.new_options(options, self.changed), "params": [parameter]}
        optimizer = self.kind.make([group], copy_plain(dict(attributes)))
        with torch.enable_grad():
            step_without_hooks(optimizer)
        return dict(optimizer.state[parameter])


def advance(
    optimizer: torch.optim.Optimizer,
    shadow: ShadowOptimizer,
    groups: tuple[tuple[str, ...], ...],
    trained: Set[str],
    parameters: Mapping[str, torch.Tensor],
) -> Callable[[], None]:
    """Set the options and attributes of the user's optimizer to their values after a step. The
    returned function restores the old values, except where the user has set others since.
    ``parameters``: at least the trained ones, by label."""
    if shadow.forms is not None:
        how = shadow.masters, shadow.exact
        shadow.forms = {label: small_form(p, *how) for label, p in parameters.items()}
    snapshot = shadow.snapshot()
    targets: list[Any] = [*optimizer.param_groups, vars(optimizer), optimizer.state]
    old_options = map(options_of, optimizer.param_groups)
    *old_options, old_attributes = copy_plain((*old_options, plain_attributes(optimizer)))
    options, attributes = shadow.step(groups, trained, old_options, old_attributes)
    old_settings = [*old_options, *split_attributes(old_attributes)]
    new_settings = [*options, *split_attributes(attributes)]
    shared: dict[int, Any] = {}
    for target, old, new in zip(targets, old_settings, new_settings, strict=True):
        _apply_changes(target, old, new, shared)

    def undo() -> None:
        """Restore the old values where the current values are those that the step has set."""
        shadow.restore(snapshot)
        targets[-1] = optimizer.state
        for target, old, new in zip(targets, old_settings, new_settings, strict=True):
            current = {k: target[k] for k in {*old, *new} if k in target}
            by_user = {k for k in {*old, *new} if (k in current) != (k in new)}
            by_user |= {k for k in current if k in new and not plain_equal(current[k], new[k])}
            new_values, old_values = (
                {k: v for k, v in values.items() if k not in by_user} for values in (new, old)
            )
            _apply_changes(target, new_values, old_values, {})

    return undo


def _apply_changes(
    target: MutableMapping[str, Any],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    shared: dict[int, Any],
) -> None:
    """Change ``target`` from ``old`` to ``new`` where they differ. Tensors are written in place,
    because other objects may refer to them."""
    for key in old.keys() - new.keys():
        target.pop(key, None)
    for key, value in new.items():
        if key in old and plain_equal(old[key], value):
            continue
        current = target.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            current.copy_(value)
        else:
            target[key] = copy_plain(value, shared)
