"""A ghost: it advances the numbers that a step changes on the user's optimizer, without gradients.

    shadow = ShadowOptimizer(kind, {"w": {"step": 3}})
    told = shadow.step(groups=(("w", "b"),), trained={"w", "b"}, options=({"lr": 0.1, "k": 3},), {})
    told                                   # ({"lr": 0.1, "k": 4},), {}: as after torch's step

`group["k"] += 1` and `self.step_count += 1` are state of the controller's optimizer: each step
sends their present values, and the ranks start from these. Their new values do not depend on the
parameters' places, since no element is ever read to Python. So a step of the same class over
parameters of one element computes them: one for neighbours in a group with the same numbers in
their state, which have a gradient where the real ones have.

Invariant: the probe compares the results with those of torch's own step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from dtensor.runtime.optimizer.optimizer_kind import (
    OptimizerKind,
    bare_step,
    copied,
    options_of,
    plain_attributes,
    same,
)

GRADIENT = 1e-3

Told = tuple[tuple[dict[str, Any], ...], dict[str, Any]]
"""The options of each group, and the object's attributes."""


@dataclass(slots=True, eq=False)
class ShadowOptimizer:
    """``numbers``: by label, the entries of parameters that have a state already."""

    kind: OptimizerKind
    numbers: Mapping[str, Mapping[str, Any]]
    of: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict[torch.Tensor, Any])
    _last: tuple[object, object] = (None, None)

    def step(
        self,
        groups: tuple[tuple[str, ...], ...],
        trained: Set[str],
        options: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any],
    ) -> Told:
        """The options and attributes after a step in which ``trained`` had gradients."""
        if self._last != (groups, trained):
            self._stand_in(groups, trained)
            self._last = groups, trained
        held = [dict.fromkeys(self.of[label] for label in group) for group in groups]
        *told, told_attributes = copied((*map(dict, options), dict(attributes)))
        given = [{**o, "params": [*h]} for o, h in zip(told, held, strict=True)]
        optimizer = self.kind.make(given, told_attributes)
        for parameter, entries in self.state.items():
            optimizer.state[parameter] = entries
        for label, parameter in self.of.items():
            parameter.grad = torch.full_like(parameter, GRADIENT) if label in trained else None
        with torch.enable_grad():
            bare_step(optimizer)
        self.state = dict(optimizer.state)
        return tuple(options_of(group) for group in optimizer.param_groups), plain_attributes(
            optimizer
        )

    def kept(self) -> tuple[Any, ...]:
        """The state that `restore` takes."""
        return dict(self.of), copy.deepcopy({id(p): s for p, s in self.state.items()}), self._last

    def restore(self, kept: tuple[Any, ...]) -> None:
        self.of, state, self._last = kept
        self.state = {p: state[id(p)] for p in self.of.values() if id(p) in state}

    def _stand_in(self, groups: Sequence[Sequence[str]], trained: Set[str]) -> None:
        """One parameter for equal neighbours: in a group, with the same history, trained or not.
        They keep the group's order, since the last one may determine an option."""
        alike: list[tuple[tuple[object, ...], list[str]]] = []
        for number, group in enumerate(groups):
            for label in group:
                past = id(self.of[label]) if label in self.of else self._past(label)
                key = number, past, label in trained
                if not alike or alike[-1][0] != key:
                    alike.append((key, []))
                alike[-1][1].append(label)
        before, self.of = self.of, {}
        taken = set[int]()
        for _, labels in alike:
            first = before.get(labels[0])
            if first is not None and id(first) not in taken:
                taken.add(id(first))
                parameter = first
            else:
                parameter = Parameter(torch.full((1,), 0.5))
                state = self._begun(labels[0]) if first is None else self.state.get(first)
                if state:
                    self.state[parameter] = copied(state)
            self.of.update(dict.fromkeys(labels, parameter))
        self.state = {p: s for p, s in self.state.items() if p in set(self.of.values())}

    def _past(self, label: str) -> object:
        """The part of a parameter's state that distinguishes it, before the ghost has seen it."""
        entries, known = self.numbers.get(label, {}), self.kind.entries
        numbers = ((k, float(v)) for k, v in entries.items() if k in known and known[k].number)
        return tuple(sorted(numbers)), frozenset(entries)

    def _begun(self, label: str) -> dict[str, Any]:
        """A state like the parameter's, of one element."""
        state: dict[str, Any] = {}
        for key, value in self.numbers.get(label, {}).items():
            entry = self.kind.entries.get(key)
            if entry is None or value is None or entry.number:
                python = entry is not None and entry.python is not None
                state[key] = entry.python(value) if python else copied(value)  # type: ignore
            else:
                state[key] = entry.begun()
        return state


def advance(
    optimizer: torch.optim.Optimizer,
    shadow: ShadowOptimizer,
    groups: tuple[tuple[str, ...], ...],
    trained: Set[str],
) -> Callable[[], None]:
    """A step was called: give the optimizer the new values of its groups' options and attributes.
    The returned function restores the old values, except those that the user has written since."""
    kept = shadow.kept()
    places: list[dict[str, Any]] = [*optimizer.param_groups, vars(optimizer)]
    before = [*map(options_of, optimizer.param_groups), plain_attributes(optimizer)]
    before = [*copied(tuple(before))]
    options, attributes = shadow.step(groups, trained, before[:-1], before[-1])
    after = [*options, attributes]
    shared: dict[int, Any] = {}
    for place, old, new in zip(places, before, after, strict=True):
        _turn(place, old, new, shared)

    def undo() -> None:
        shadow.restore(kept)
        for place, old, new in zip(places, before, after, strict=True):
            known = {k: place[k] for k in {*old, *new} if k in place}
            changed_keys = {k for k in {*old, *new} if (k in known) != (k in new)}
            changed_keys |= {k for k in known if k in new and not same(known[k], new[k])}
            then, back = (
                {k: v for k, v in one.items() if k not in changed_keys} for one in (new, old)
            )
            _turn(place, then, back, {})

    return undo


def _turn(
    place: dict[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], shared: dict[int, Any]
) -> None:
    """Set the values that differ; a tensor in place, as it may have other references."""
    for key in old.keys() - new.keys():
        place.pop(key, None)
    for key, value in new.items():
        if key in old and same(old[key], value):
            continue
        here = place.get(key)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor):
            here.copy_(value)
        else:
            place[key] = copied(value, shared)
