"""Test whether an optimizer of an unknown class computes the same numbers on shards.

    probed = probe(lion, masters=False)      # PlanningError with the op, its line, the difference
    print(probed.report)                     # the trials, and the lines of `step` that did not run
    probed.kind.entries                      # {"exp_avg": StateEntry(number=False, ...)}

Optimizers of the class, with the user's options and attributes, step small CPU parameters: once
whole with every op recorded (op_recorder.py), then whole and as shards (`ShardOptimizer` on two or
three ranks), with all values, states, options and attributes compared after each step. Gradients
are large, tiny, not finite, or missing. The probe also finds the form of each state entry, and
which options and attributes a step changes. It takes 0.1 to 0.5 s. It cannot judge lines that did
not run (for sparse gradients, or after 1,000 steps); the report lists them.
"""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from dtensor.errors import PlanningError
from dtensor.numerics import is_narrow
from dtensor.private_torch import DisableTorchFunctionSubclass
from dtensor.runtime.optimizer.elementwise.op_recorder import (
    NotElementwise,
    RecordedSteps,
    text_of,
    unreached,
)
from dtensor.runtime.optimizer.elementwise.shadow_optimizer import Settings, ShadowOptimizer
from dtensor.runtime.optimizer.optimizer_kind import (
    TABLE_DTYPES,
    OptimizerKind,
    StateEntry,
    copy_plain,
    kind_of_value,
    options_of,
    plain_attributes,
    plain_equal,
    step_without_hooks,
)
from dtensor.runtime.optimizer.shard_optimizer import (
    MASTER,
    ShardOptimizer,
    Updated,
    absent,
    is_absent,
)

SHAPES = ((7,), (6, 5), (4, 3, 5), (3, 2, 3, 3), (66, 64))
"""Shapes of the parameters of a group. The last is large enough for a flat buffer of its own."""
SCALES = (1.0, 1e-3, 1e-6, 1e3, 10.0, 0.1, 1e-2, 1e2, 1e-5, 1.0, 1e-4, 1.0)
"""The magnitude of the gradients in each step."""
NOT_FINITE = 7
"""The first step in which some elements of gradients are NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The observations of a probe of an elementwise optimizer.

    ``ops``: the ops that ran on elements of parameters. ``state``: the form of each state entry.
    ``changed``: the options and attributes that a step changes. ``unreached``: the lines of `step`,
    and of functions that it calls in the classes' files, that did not run and so are untested.
    """

    optimizer: str
    steps: int
    dtypes: tuple[torch.dtype, ...]
    ops: tuple[str, ...]
    state: tuple[str, ...]
    changed: tuple[str, ...]
    unreached: tuple[str, ...]

    def __str__(self) -> str:
        """Return the report as text, one observation per line."""

        def listed(values: Sequence[object]) -> str:
            return ", ".join(str(v).removeprefix("torch.").removeprefix("aten.") for v in values)

        lines = [
            f"{self.optimizer}: elementwise in {self.steps} steps of {listed(self.dtypes)}",
            f"  ops on elements  {listed(self.ops)}",
            f"  state            {listed(self.state) or 'none'}",
            f"  a step changes   {listed(self.changed) or 'no options or attributes'}",
            f"  lines not run    {len(self.unreached)}",
            *(f"    {line}" for line in self.unreached),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The result of a probe that passed.

    ``keys``: the keys of a parameter's state, by `group_key`. ``changed``: the options that a step
    changes. ``key``: the `probe_key`; the result is valid for optimizers with an equal key.
    """

    kind: OptimizerKind
    report: ProbeReport
    keys: Mapping[object, tuple[str, ...]]
    changed: frozenset[str]
    attributes_changed: frozenset[str]
    key: object

    @property
    def changes_optimizer(self) -> bool:
        """Whether a step changes the optimizer's options or attributes."""
        return bool(self.changed or self.attributes_changed)


def probe(optimizer: torch.optim.Optimizer, masters: bool) -> Probed:
    """Test the optimizer's class with its options. Raises PlanningError if it is not elementwise.
    The state of Python's, numpy's and torch's random generators is preserved."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            return _Trial(optimizer, masters).run()
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


def group_key(group: Mapping[str, Any], changed: frozenset[str]) -> object:
    """Return a hashable form of a group's options (`kind_of_value`), without ``changed``."""
    options = options_of(group)
    return tuple((k, kind_of_value(v)) for k, v in options.items() if k not in changed)


def probe_key(
    optimizer: torch.optim.Optimizer,
    masters: bool,
    changed: frozenset[str],
    attributes_changed: frozenset[str],
) -> object:
    """Return everything that the result of a probe depends on, for comparison by ``==``: the class,
    and the kinds of its options and attributes, without the ones that a step changes."""
    groups = {group_key(group, changed): None for group in optimizer.param_groups}
    with DisableTorchFunctionSubclass():  # does not fetch lazy parameters
        dtypes = {p.dtype: None for group in optimizer.param_groups for p in group["params"]}
    kind = OptimizerKind.of(optimizer)
    fixed = (*kind.fixed.items(), *kind.methods.items(), *kind.defaults.items())
    attributes = plain_attributes(optimizer).items()
    plain = ((k, kind_of_value(v)) for k, v in attributes if k not in attributes_changed)
    fixed_kinds = tuple((k, kind_of_value(v)) for k, v in fixed)
    several = len(optimizer.param_groups) > 1
    return (type(optimizer), masters, several, *groups, *dtypes, *fixed_kinds, *plain)


@dataclass(slots=True, eq=False)
class _ShardedRank:
    """The optimizer, the shards, and the state values of one simulated rank."""

    optimizer: ShardOptimizer
    shards: dict[str, Tensor]
    values: dict[tuple[str, str], Tensor] = field(default_factory=dict[Any, Tensor])

    def step(
        self,
        groups: tuple[tuple[str, ...], ...],
        keys: Mapping[str, tuple[str, ...]],
        options: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Step the rank's optimizer. ``keys``: the state keys of each parameter."""
        names: list[tuple[str, str]] = []
        for label in gradients:
            narrow = self.optimizer.masters and is_narrow(self.shards[label].dtype)
            names += [(label, key) for key in (*keys[label], *([MASTER] if narrow else []))]
        for name in names:
            self.values.setdefault(name, absent("cpu"))
        updated = Updated(groups, tuple(gradients), tuple(names))
        values = tuple(self.values[name] for name in names)
        shards = {label: self.shards[label] for label in gradients}
        self.optimizer.step(updated, shards, options, gradients, values)


Cut = Callable[[int, Tensor], list[Tensor]]
"""A function (index of a parameter, the parameter) -> its shards by rank."""


@dataclass(slots=True, eq=False)
class _Reference:
    """An optimizer of the user's class over whole parameters, stepped as in plain torch."""

    optimizer: torch.optim.Optimizer
    parameters: dict[str, Parameter]
    groups: tuple[tuple[str, ...], ...]
    stored_dtype: torch.dtype  # the user's dtype; ``parameters`` may be float32 masters

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for label, parameter in self.parameters.items():
            gradient = gradients.get(label)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
        step_without_hooks(self.optimizer)

    @property
    def settings(self) -> Settings:
        groups = map(options_of, self.optimizer.param_groups)
        *options, attributes = copy_plain((*groups, plain_attributes(self.optimizer)))
        return tuple(options), attributes


class _Trial:
    """The state of one probe."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        """Choose what the trials use: the first two groups of the optimizer and all groups with
        other options, the dtypes of its parameters, and copies of its options and attributes."""
        self.name = type(optimizer).__name__
        self.optimizer = optimizer
        self.masters = masters
        self.kind = OptimizerKind.of(optimizer)
        self.files = files_of(type(optimizer))
        self.with_missing = True  # whether some gradients are missing in some steps
        self.attributes = plain_attributes(optimizer)
        self.gradient_cache: dict[tuple[str, int], Tensor] = {}  # gradients, in float64
        groups_by_key: dict[object, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):  # keep the first two, even if equal
            key = group_key(group, frozenset())
            groups_by_key.setdefault(key if number > 1 else (number, key), group)
        self.distinct_groups = list(groups_by_key.values())
        self.options = [*copy_plain(tuple(map(options_of, self.distinct_groups)))]
        self.initial_states: list[dict[str, Any]] = [{} for _ in self.options]  # by group
        # the position of each parameter in its group, which selects the dim to cut
        self.index_of = {
            f"{g}.{i}": i for g in range(len(self.options)) for i in range(len(SHAPES))
        }
        dtypes = dict.fromkeys(p.dtype for g in optimizer.param_groups for p in g["params"])
        self.dtypes = tuple(dtypes) or (torch.float32,)

    def run(self) -> Probed:
        """Run all parts of the probe, and return its result. Raises PlanningError if one fails."""
        changed, attributes_changed = self._find_changed()
        recorded = self._record()
        entries, keys = self._entries()
        self.kind = replace(self.kind, entries=entries)
        for dtype in dict.fromkeys((torch.float64, *self.dtypes)):
            self._compare(dtype, keys)
        report = ProbeReport(
            optimizer=f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}",
            steps=len(SCALES),
            dtypes=tuple(dict.fromkeys((torch.float64, *self.dtypes))),
            ops=tuple(recorded.ops),
            state=tuple(f"{key} ({_describe_entry(entry)})" for key, entry in entries.items()),
            changed=tuple(sorted({*changed, *attributes_changed})),
            unreached=unreached(recorded.reached),
        )
        keys_by_options: dict[object, tuple[str, ...]] = {}
        for options, keys_of_group in zip(self.options, keys, strict=True):
            keys_by_options[group_key(options, changed)] = keys_of_group
        key = probe_key(self.optimizer, self.masters, changed, attributes_changed)
        return Probed(self.kind, report, keys_by_options, changed, attributes_changed, key)

    # -- the trials -----------------------------------------------------------------------------

    def _make_reference(self, dtype: torch.dtype) -> _Reference:
        """Make new parameters of the user's ``dtype`` (or float32 masters) and their optimizer."""
        wide = torch.float32 if self.masters and is_narrow(dtype) else dtype
        draw = torch.Generator().manual_seed(0)
        parameters: dict[str, Parameter] = {}
        groups: list[tuple[str, ...]] = []
        for number in range(len(self.options)):
            labels = tuple(f"{number}.{index}" for index in range(len(SHAPES)))
            groups.append(labels)
            for label, shape in zip(labels, SHAPES, strict=True):
                value = torch.randn(shape, generator=draw, dtype=torch.float64).mul(0.5).to(dtype)
                parameters[label] = Parameter(value.to(wide))
        *group_options, attributes = copy_plain((*self.options, self.attributes))
        param_groups = [
            {**options, "params": [parameters[label] for label in labels]}
            for options, labels in zip(group_options, groups, strict=True)
        ]
        optimizer = self.kind.make(param_groups, attributes)
        for number, labels in enumerate(groups):
            for label in labels if self.initial_states[number] else ():
                optimizer.state[parameters[label]] = self._initial_state(number, parameters[label])
        return _Reference(optimizer, parameters, tuple(groups), dtype)

    def _gradients(self, reference: _Reference, step: int) -> dict[str, Tensor]:
        """Return the gradients of a step, which are the same in all trials."""
        gradients: dict[str, Tensor] = {}
        for index, (label, parameter) in enumerate(reference.parameters.items()):
            value = self.gradient_cache.get((label, step))
            if value is None:
                draw = torch.Generator().manual_seed(1000 * index + step)
                wide, spread = torch.randn(
                    (2, *parameter.shape), generator=draw, dtype=torch.float64
                )
                value = self.gradient_cache[label, step] = wide * spread.exp() * SCALES[step]
                if step >= NOT_FINITE:
                    flat = value.view(-1)
                    flat[0], flat[3], flat[5] = torch.nan, torch.inf, -torch.inf
            missing = (index % len(SHAPES) == 1 and step == 4) or (
                index % len(SHAPES) == 2 and step < 2
            )
            if not (self.with_missing and missing):
                gradients[label] = value.to(reference.stored_dtype)
        return gradients

    def _step_reference(self, reference: _Reference, step: int) -> None:
        """Step the reference. Raises PlanningError if the step raises."""
        try:
            reference.step(self._gradients(reference, step))
        except Exception as error:
            raise self._step_error(error, "on whole parameters") from error

    def _find_changed(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of the options and attributes that steps change, and reset these options
        to the class's defaults. (The user's optimizer may be resumed, with counts in its options;
        the probe's optimizers begin without state.)"""
        user_options = self.options
        defaults = {k: v for k, v in self.kind.defaults.items() if not isinstance(v, bool)}
        self.options = [
            {k: defaults.get(k, v) if _is_count(v) else v for k, v in options.items()}
            for options in user_options
        ]
        changed, attributes = self._first_steps()
        self.options = [
            {
                k: defaults[k] if k in changed else v
                for k, v in o.items()
                if k in defaults or k not in changed
            }
            for o in user_options
        ]
        return changed, attributes

    def _first_steps(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of the options and attributes that steps change.

        If the step raises, try again without missing gradients, then with the state that the
        class's `__init__` made. Raises the first error if no way works.
        """
        first_error: PlanningError | None = None
        empty = self.initial_states
        for missing, states in ((True, empty), (False, empty), (True, None), (False, None)):
            self.with_missing = missing
            self.initial_states = self._initial_states() if states is None else states
            try:
                return self._changed_by_steps()
            except PlanningError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _initial_states(self) -> list[dict[str, Any]]:
        """Return the state that `__init__` made for the first parameter of each group, with a
        `_StateFill` for each tensor of the parameter's shape. If such a tensor is neither constant
        nor equal to its parameter (a step has run), return `self.initial_states` unchanged."""
        states: list[dict[str, Any]] = []
        for group in self.distinct_groups:
            state: dict[str, Any] = {}
            is_local = type(self.optimizer.state) is defaultdict  # otherwise it is on ranks
            for parameter in group["params"][:1] if is_local else ():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    like = isinstance(value, Tensor) and value.shape == parameter.shape
                    if not like or value.numel() < 2:
                        state[key] = copy_plain(value)
                    elif value.is_meta or parameter.is_meta:
                        return self.initial_states
                    elif bool((value == value.view(-1)[0]).all()):
                        state[key] = _StateFill(value.view(-1)[0].item(), value.dtype)
                    elif torch.equal(value, parameter):
                        state[key] = _StateFill(None, value.dtype)
                    else:
                        return self.initial_states
            states.append(state)
        return states

    def _initial_state(self, group: int, parameter: Parameter) -> dict[str, Any]:
        """Return the initial state of a parameter of the probe."""
        state: dict[str, Any] = {}
        for key, value in self.initial_states[group].items():
            if isinstance(value, _StateFill):
                same_dtype = value.dtype == self.distinct_groups[group]["params"][0].dtype
                dtype = parameter.dtype if same_dtype else value.dtype
                tensor = parameter.detach().to(dtype, copy=True)
                state[key] = tensor if value.value is None else tensor.fill_(value.value)
            else:
                state[key] = copy_plain(value)
        return state

    def _changed_by_steps(self) -> tuple[frozenset[str], frozenset[str]]:
        """Run steps, and return the names of the options and attributes that they change."""
        reference = self._make_reference(self.dtypes[0])
        old_settings, changed, attributes = reference.settings, frozenset[str](), frozenset[str]()
        for step in range(NOT_FINITE):
            self._step_reference(reference, step)
            changed_options, changed_attributes = _changed_names(old_settings, reference.settings)
            changed, attributes = changed | changed_options, attributes | changed_attributes
        return changed, attributes

    def _record(self) -> RecordedSteps:
        """Run all steps and record their ops. Raises PlanningError if an op mixes elements."""
        reference = self._make_reference(self.dtypes[0])
        recorded = RecordedSteps(self.files)
        for step in range(len(SCALES)):
            gradients = self._gradients(reference, step)
            for label, parameter in reference.parameters.items():
                gradient = gradients.get(label)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            recorded.follow(p.data for p in reference.parameters.values())
            recorded.follow(p.grad for p in reference.parameters.values() if p.grad is not None)
            try:
                with recorded:
                    step_without_hooks(reference.optimizer)
            except NotElementwise as found:
                raise PlanningError(
                    f"{self.name} is not elementwise: {found.what}, so on shards it would give "
                    f"other numbers than on whole parameters.\n"
                    f"{f'  its line: {found.line}' if found.line else ''}\n"
                    f"fix: one that updates each element of a parameter from its own gradient and "
                    f"state alone, such as torch.optim.AdamW"
                ) from None
            except Exception as error:
                raise self._step_error(error, "on whole parameters") from error
        return recorded

    def _entries(self) -> tuple[dict[str, StateEntry], list[tuple[str, ...]]]:
        """Return the forms of the state entries over all dtypes, and the state's keys by group."""
        observed: dict[str, _ObservedEntry] = {}
        keys: list[dict[str, None]] = [{} for _ in self.options]
        for dtype in dict.fromkeys((torch.float64, *self.dtypes)):
            reference = self._make_reference(dtype)
            for step in range(len(SCALES)):
                self._step_reference(reference, step)
                parameters = set(reference.parameters.values())
                for key in reference.optimizer.state:
                    if key not in parameters:
                        raise self._unsplittable(f"{key!r}", "a state that is of no parameter")
                for group, labels in enumerate(reference.groups):
                    for label in labels:
                        parameter = reference.parameters[label]
                        state = reference.optimizer.state.get(parameter)
                        if state:
                            self._observe(observed, state, parameter)
                            keys[group] |= dict.fromkeys(state)
        entries = {key: values.entry(self, key) for key, values in observed.items()}
        return entries, [
            tuple(k for k in keys_of_group if not observed[k].is_always_none)
            for keys_of_group in keys
        ]

    def _observe(
        self, observed: dict[str, _ObservedEntry], state: Mapping[str, Any], parameter: Tensor
    ) -> None:
        """Record the forms of a parameter's state entries."""
        for key, value in state.items():
            if not isinstance(key, str):
                raise self._unsplittable(f"{key!r}", "a key that is not a string")
            observed.setdefault(key, _ObservedEntry()).observe(self, key, value, parameter)
        for key in observed.keys() - state.keys():
            observed[key].missing = True

    def _compare(self, dtype: torch.dtype, keys: Sequence[tuple[str, ...]]) -> None:
        """Raise PlanningError if steps on shards, cut as in _CUTS, differ from the reference."""
        for cut_parameter, size, cut_name in _CUTS:
            reference = self._make_reference(dtype)
            states = {
                n: dict(reference.optimizer.state.get(p, {}))
                for n, p in reference.parameters.items()
            }
            shadow = ShadowOptimizer(self.kind, copy_plain({n: s for n, s in states.items() if s}))
            keys_by_label = {
                n: k for group, k in zip(reference.groups, keys, strict=True) for n in group
            }
            optimizers = [ShardOptimizer(self.kind, self.masters) for _ in range(size)]
            parts = {
                label: cut_parameter(self.index_of[label], parameter.detach().to(dtype))
                for label, parameter in reference.parameters.items()
            }
            ranks = [
                _ShardedRank(
                    optimizer, {n: p[r].clone() for n, p in parts.items() if p[r] is not None}
                )
                for r, optimizer in enumerate(optimizers)
            ]
            for label, state in states.items():
                self._put_initial_state(ranks, cut_parameter, label, state)
            for step in range(len(SCALES)):
                gradients = self._gradients(reference, step)
                options, attributes = reference.settings
                for number, rank in enumerate(ranks):
                    pieces = {
                        n: cut_parameter(self.index_of[n], g)[number] for n, g in gradients.items()
                    }
                    rank_gradients = {
                        n: piece.clone() for n, piece in pieces.items() if n in rank.shards
                    }
                    try:
                        rank.step(
                            reference.groups, keys_by_label, (*options, attributes), rank_gradients
                        )
                    except Exception as error:
                        raise self._step_error(error, f"on shards ({cut_name})") from error
                try:
                    settings = shadow.step(reference.groups, gradients.keys(), options, attributes)
                except Exception as error:
                    raise self._step_error(error, "on parameters of one element") from error
                self._step_reference(reference, step)
                self._check_values(reference, ranks, cut_parameter, f"{cut_name}, step {step + 1}")
                self._check_settings(settings, reference.settings, f"step {step + 1}")

    def _put_initial_state(
        self,
        ranks: Sequence[_ShardedRank],
        cut_parameter: Cut,
        label: str,
        state: Mapping[str, Any],
    ) -> None:
        """Put a parameter's initial state into the tables of the ranks."""
        for key, value in state.items():
            entry = self.kind.entries[key]
            if value is not None:
                stored = entry.to_table(value)
                parts = (
                    [stored] * len(ranks)
                    if entry.number
                    else cut_parameter(self.index_of[label], stored)
                )
                for rank, part in zip(ranks, parts, strict=True):
                    if label in rank.shards:
                        rank.values[label, key] = part.clone()

    # -- comparisons --------------------------------------------------------------------------

    def _check_values(
        self, reference: _Reference, ranks: Sequence[_ShardedRank], cut_parameter: Cut, where: str
    ) -> None:
        """Raise PlanningError if values or states on the ranks differ from the reference."""
        for label, parameter in reference.parameters.items():
            expected = cut_parameter(
                self.index_of[label], parameter.detach().to(reference.stored_dtype)
            )
            for rank, shard in zip(ranks, expected, strict=True):
                if label in rank.shards:
                    self._check(rank.shards[label], shard, "the value", parameter, where)
            for key, value in (reference.optimizer.state.get(parameter) or {}).items():
                entry = self.kind.entries[key]
                whole_tensor = value if isinstance(value, Tensor) and not entry.number else None
                pieces = (
                    None
                    if whole_tensor is None
                    else cut_parameter(self.index_of[label], whole_tensor)
                )
                for number, rank in enumerate(ranks):
                    stored = rank.values.get((label, key))
                    if label not in rank.shards or value is None:
                        continue
                    if stored is None or is_absent(stored):
                        raise self._difference(f"{key} of the state is missing", parameter, where)
                    expected_piece = pieces[number] if pieces is not None else entry.to_table(value)
                    self._check(stored, expected_piece, f"{key} of the state", parameter, where)

    def _check(
        self, actual: Tensor, expected: Tensor, what: str, parameter: Tensor, where: str
    ) -> None:
        """Raise PlanningError if a shard's value or state differs by more than the tolerance.
        ``parameter``: the parameter. ``what`` and ``where`` are parts of the message."""
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise self._difference(
                f"{what} is {actual.dtype}{list(actual.shape)} in place of "
                f"{expected.dtype}{list(expected.shape)}",
                parameter,
                where,
            )
        if torch.equal(actual, expected):
            return
        rtol, atol, max_fraction = _TOLERANCES.get(
            parameter.dtype if parameter.is_floating_point() else actual.dtype, _TOLERANCE_32_BIT
        )
        if is_narrow(actual.dtype):
            rtol, atol, max_fraction = _TOLERANCE_16_BIT
        a, b = (_widen(x) for x in (actual, expected))
        # a small value may be the difference of large ones
        atol *= max(1.0, float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())) if b.numel() else 1.0
        is_close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if int((~is_close).sum()) <= max_fraction * a.numel():
            return
        max_difference = (a - b)[~is_close].abs().nan_to_num(torch.inf).max()
        raise self._difference(
            f"{what} differs in {int((~is_close).sum())} of {a.numel()} elements, by up to "
            f"{float(max_difference):.2g}",
            parameter,
            where,
        )

    def _check_settings(self, actual: Settings, expected: Settings, where: str) -> None:
        """Raise PlanningError if the shadow's options or attributes differ from the reference's."""
        pairs = zip((*actual[0], actual[1]), (*expected[0], expected[1]), strict=True)
        for number, (a, b) in enumerate(pairs):
            for key in a.keys() | b.keys():
                if key not in a or key not in b or not plain_equal(a[key], b[key]):
                    what = f"{key!r} of a group" if number < len(actual[0]) else f"attribute {key}"
                    raise PlanningError(
                        f"{self.name} is not elementwise: a step changes its {what} depending on "
                        f"the parameters ({where}: {b.get(key)!r}, on one element "
                        f"{a.get(key)!r}).\n{_FIX}"
                    )

    # -- errors ------------------------------------------------------------------------------------

    def _difference(self, what: str, parameter: Tensor, where: str) -> PlanningError:
        return PlanningError(
            f"{self.name} is not elementwise: on shards {what}.\n"
            f"  a parameter of shape {list(parameter.shape)}, {parameter.dtype}; {where}\n{_FIX}"
        )

    def _unsplittable(self, key: str, what: str) -> PlanningError:
        return PlanningError(
            f"{self.name} keeps {what} under {key}, which cannot be cut as a parameter is.\n{_FIX}"
        )

    def _step_error(self, error: Exception, where: str) -> PlanningError:
        """Return the error for a step that raised, with the line of the optimizer's file."""
        line = ""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in self.files:
                line = text_of(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        return PlanningError(
            f"the step of {self.name} raised in its probe, {where}: "
            f"{type(error).__name__}: {error}\n{f'  its line: {line}' if line else ''}\n{_FIX}"
        )


_FIX = (
    "fix: one that updates each element of a parameter from its own gradient and state alone, such "
    "as torch.optim.AdamW"
)


@dataclass(frozen=True, slots=True)
class _StateFill:
    """A tensor of the parameter's shape filled with ``value``, or equal to the parameter (None)."""

    value: Any
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _ObservedEntry:
    """The kinds of values that were observed for one state key.

    ``pythons``: types of Python numbers. ``shapes``: of one-element tensors. ``like``: there were
    tensors of the parameter's shape. ``dtypes``: the parameter's dtype to the tensor's.
    """

    pythons: set[type] = field(default_factory=set[type])
    shapes: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    like: bool = False
    dtypes: dict[torch.dtype, torch.dtype] = field(default_factory=dict[Any, Any])
    missing: bool = False

    @property
    def is_always_none(self) -> bool:
        return not (self.pythons or self.shapes or self.like)

    def observe(self, probe: _Trial, key: str, value: Any, parameter: Tensor) -> None:
        """Record a value. Raises PlanningError if it cannot be cut as the parameter is."""
        if value is None:
            self.missing = True
        elif type(value) in TABLE_DTYPES:
            self.pythons.add(type(value))
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            if value.dtype == torch.bool:
                raise probe._unsplittable(f"{key!r}", "a tensor of bools")
            earlier_dtype = self.dtypes.setdefault(parameter.dtype, value.dtype)
            if value.shape == parameter.shape:
                self.like = True
                if earlier_dtype != value.dtype:
                    raise probe._unsplittable(f"{key!r}", f"now {earlier_dtype}, now {value.dtype}")
            elif value.numel() == 1 and value.dim() < 2:
                self.shapes.add(tuple(value.shape))
            else:
                what = f"a tensor of shape {list(value.shape)} for a parameter of "
                raise probe._unsplittable(f"{key!r}", f"{what}{list(parameter.shape)}")
        else:
            raise probe._unsplittable(f"{key!r}", f"a {type(value).__name__}")

    def entry(self, probe: _Trial, key: str) -> StateEntry:
        """Return the form of the entry: like the parameter, a small tensor, or a Python number.
        Raises PlanningError if several forms were seen."""
        kinds = [bool(self.pythons), self.like, *([True] * len(self.shapes))]
        if sum(kinds) > 1:
            raise probe._unsplittable(f"{key!r}", "values of several kinds")
        dtypes = tuple(self.dtypes.items())
        if self.like or self.is_always_none:
            return StateEntry(number=False, dtypes=dtypes, late=self.missing)
        if self.shapes:
            (shape,) = self.shapes
            return StateEntry(number=True, shape=shape, dtypes=dtypes, late=self.missing)
        python = next(iter(self.pythons)) if len(self.pythons) == 1 else float
        return StateEntry(number=True, python=python, late=self.missing)


def _describe_entry(entry: StateEntry) -> str:
    if entry.python is not None:
        return entry.python.__name__
    return "one number" if entry.number else "like the parameter"


def files_of(cls: type) -> frozenset[str]:
    """Return the source files of an optimizer's class and its bases, except torch's `Optimizer`."""
    files: set[str] = set()
    for base in cls.__mro__:
        if issubclass(base, torch.optim.Optimizer) and base is not torch.optim.Optimizer:
            with suppress(TypeError, OSError):
                files.add(inspect.getsourcefile(base) or "")
            step = vars(base).get("step")
            step = inspect.unwrap(step) if callable(step) else None
            if step is not None and hasattr(step, "__code__"):
                files.add(step.__code__.co_filename)
    return frozenset(files - {""})


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _changed_names(before: Settings, after: Settings) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the options and of the attributes that differ."""

    def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
        common = a.keys() & b.keys()
        return (a.keys() ^ b.keys()) | {k for k in common if not plain_equal(a[k], b[k])}

    groups = (differing(a, b) for a, b in zip(before[0], after[0], strict=True))
    return frozenset[str]().union(*groups), frozenset(differing(before[1], after[1]))


def _widen(x: Tensor) -> Tensor:
    return x if x.is_complex() or x.dtype == torch.float64 else x.double()


def _cut_at(*bounds: int) -> Cut:
    """Return a cut along the first dim (parameters with even index) or the last dim (odd index).
    Shard r ends at the fraction `bounds[r] / bounds[-1]` of the dim."""

    def cut(index: int, x: Tensor) -> list[Tensor]:
        dim = 0 if index % 2 == 0 else x.dim() - 1
        edges = [x.shape[dim] * b // bounds[-1] for b in bounds]
        return [x.narrow(dim, lo, hi - lo) for lo, hi in zip([0, *edges], edges, strict=False)]

    return cut


def _alternate(index: int, x: Tensor) -> list[Any]:
    """Put whole parameters alternately on one of two ranks, as in a pipeline."""
    return [x, None] if index % 2 == 0 else [None, x]


_CUTS: tuple[tuple[Cut, int, str], ...] = (
    (_cut_at(2, 3), 2, "cut over 2 ranks"),
    (_cut_at(1, 3, 4), 3, "cut over 3 ranks"),
    (_alternate, 2, "whole, on 2 ranks"),
)
_TOLERANCE_32_BIT = (2e-4, 1e-5, 0.0)
_TOLERANCES = {
    torch.float64: (1e-9, 1e-12, 0.0),
    torch.complex128: (1e-9, 1e-12, 0.0),
}
"""(relative tolerance, absolute tolerance, fraction of elements that may differ more).

With 16 bits, an update by a sign may differ where a sum is nearly 0, because torch rounds the last
elements of a tensor differently (flat_buffers.py)."""
_TOLERANCE_16_BIT = (0.05, 0.02, 0.05)
