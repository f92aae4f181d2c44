"""Steps of a copy of the user's optimizer over small parameters, as both probes run them.

    trial = Trial(optimizer, masters=False)
    changed, attributes = trial.find_changed()       # ({"step"}, {}): options that steps change
    reference = trial.make_reference(torch.float32)  # new parameters, and their optimizer
    trial.step_reference(reference, 0)               # with the gradients of step 0

A trial uses the class, the options and the attributes of the user's optimizer. Gradients are large,
tiny, not finite, or missing in some steps, and the same in each trial.
"""

from __future__ import annotations

import inspect
import io
import random
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from dtensor.errors import PlanningError
from dtensor.numerics import is_narrow
from dtensor.private_torch import DisableTorchFunctionSubclass
from dtensor.runtime.optimizer.elementwise.op_recorder import RecordedSteps, text_of
from dtensor.runtime.optimizer.elementwise.shadow_optimizer import Settings
from dtensor.runtime.optimizer.optimizer_kind import (
    OptimizerKind,
    Unread,
    copy_plain,
    kind_of_value,
    options_of,
    plain_attributes,
    plain_equal,
    step_without_hooks,
    stray_state,
    unwrapped_step,
)

if TYPE_CHECKING:
    from dtensor.sharding.plan.request import UpdateCost

SHAPES = ((7,), (6, 5), (4, 3, 5), (3, 2, 3, 3), (66, 64))
"""Shapes of the parameters of a group. The last is large enough for a flat buffer of its own."""
SCALES = (1.0, 1e-3, 1e-6, 1e3, 10.0, 0.1, 1e-2, 1e2, 1e-5, 1.0, 1e-4, 1.0)
"""The magnitude of the gradients in each step."""
NOT_FINITE = 7
"""The first step in which some elements of gradients are NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The observations of a probe that passed.

    ``updates``: "elementwise" or "per parameter". ``ops``: the ops that ran on elements of
    parameters, for an elementwise optimizer. ``state``: the form of each state entry.
    ``changed``: the options and attributes that a step changes. ``unreached``: the lines of `step`,
    and of functions that it calls in the classes' files, that did not run and so are untested.
    """

    optimizer: str
    updates: str
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
            f"{self.optimizer}: {self.updates} in {self.steps} steps of {listed(self.dtypes)}",
            *([f"  ops on elements  {listed(self.ops)}"] if self.ops else []),
            f"  state            {listed(self.state) or 'none'}",
            f"  a step changes   {listed(self.changed) or 'no options or attributes'}",
            f"  lines not run    {len(self.unreached)}",
            *(f"    {line}" for line in self.unreached),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The result of a probe that passed.

    ``owned``: an update needs a whole parameter, which one rank owns. ``keys``: the keys of a
    parameter's state, by `group_key`, if it is not owned. ``changed``: the options that a step
    changes. ``key``: the `probe_key`; the result is valid for optimizers with an equal key.
    ``exact``: the class takes parameters of the user's shapes only. ``costs``: the known costs of
    updates, by options, shape and dtype.
    """

    kind: OptimizerKind
    report: ProbeReport
    keys: Mapping[object, tuple[str, ...]]
    changed: frozenset[str]
    attributes_changed: frozenset[str]
    key: object
    owned: bool = False
    exact: bool = False
    costs: dict[object, UpdateCost] = field(default_factory=dict[object, Any])

    @property
    def changes_optimizer(self) -> bool:
        """Whether a step changes the optimizer's options or attributes."""
        return bool(self.changed or self.attributes_changed)


@contextmanager
def unnoticed() -> Generator[None]:
    """Preserve the states of Python's, numpy's and torch's random generators within the block,
    print nothing, and use one kernel thread, as ranks do: more threads would spin on small
    tensors."""
    python, arrays = random.getstate(), numpy.random.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=()), redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_num_threads(threads)
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
    owned: bool = False,
) -> object:
    """Return everything that the result of a probe depends on, for comparison by ``==``: the class,
    and the kinds of its options and attributes, without the ones that a step changes. ``owned``:
    also the numbers of dims of its parameters."""
    groups = {group_key(group, changed): None for group in optimizer.param_groups}
    with DisableTorchFunctionSubclass():  # does not fetch lazy parameters
        dtypes = {p.dtype: None for group in optimizer.param_groups for p in group["params"]}
    kind = OptimizerKind.of(optimizer)
    fixed = (*kind.fixed.items(), *kind.methods.items(), *kind.defaults.items())
    attributes = plain_attributes(optimizer).items()
    plain = ((k, kind_of_value(v)) for k, v in attributes if k not in attributes_changed)
    fixed_kinds = tuple((k, kind_of_value(v)) for k, v in fixed)
    dims: object = dims_by_options(optimizer, changed) if owned else None
    several = len(optimizer.param_groups) > 1
    return (type(optimizer), masters, dims, several, *groups, *dtypes, *fixed_kinds, *plain)


def dims_by_options(
    optimizer: torch.optim.Optimizer, changed: frozenset[str]
) -> dict[object, frozenset[int]]:
    """Return the numbers of dims of the parameters in groups with equal options, by `group_key`."""
    dims: dict[object, frozenset[int]] = {}
    with DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            key = group_key(group, changed)
            dims[key] = dims.get(key, frozenset()) | {p.dim() for p in group["params"]}
    return dims


@dataclass(slots=True, eq=False)
class Reference:
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


class Trial:
    """The state of one probe. ``fix``: the end of its errors."""

    fix = (
        "fix: one that updates each element of a parameter from its own gradient and state alone, "
        "such as torch.optim.AdamW"
    )
    updates, shadowed = "elementwise", "one element"

    def __init__(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        """Choose what the trials use: the first two groups of the optimizer and all groups with
        other options, the dtypes of its parameters, and copies of its options and attributes."""
        self.name = type(optimizer).__name__
        self.optimizer = optimizer
        self.masters = masters
        self.files = files_of(type(optimizer))
        self._check_closure(unwrapped_step(type(optimizer)))
        self.kind = OptimizerKind.of(optimizer)
        for value in self.kind.fixed.values():
            if isinstance(value, Unread):
                value.was_read = False
        self.with_missing = True  # whether some gradients are missing in some steps
        self.attributes = plain_attributes(optimizer)
        self.gradient_cache: dict[tuple[str, int], Tensor] = {}  # gradients, in float64
        groups_by_key: dict[object, dict[str, Any]] = {}
        dims: dict[object, set[int]] = {}
        for number, group in enumerate(optimizer.param_groups):  # keep the first two, even if equal
            key = group_key(group, frozenset())
            key = key if number > 1 else (number, key)
            groups_by_key.setdefault(key, group)
            with DisableTorchFunctionSubclass():  # does not fetch lazy parameters
                dims.setdefault(key, set()).update(p.dim() for p in group["params"])
        self.dims = list(dims.values())  # of the parameters of each group
        self.distinct_groups = list(groups_by_key.values())
        self.options = [*copy_plain(tuple(map(options_of, self.distinct_groups)))]
        self.initial_states: list[dict[str, Any]] = [{} for _ in self.options]  # by group
        self.shapes = [SHAPES for _ in self.options]  # of the parameters of each group
        dtypes = dict.fromkeys(p.dtype for g in optimizer.param_groups for p in g["params"])
        self.dtypes = tuple(dtypes) or (torch.float32,)

    def make_reference(self, dtype: torch.dtype) -> Reference:
        """Make new parameters of the user's ``dtype`` (or float32 masters) and their optimizer."""
        wide = torch.float32 if self.masters and is_narrow(dtype) else dtype
        draw = torch.Generator().manual_seed(0)
        parameters: dict[str, Parameter] = {}
        groups: list[tuple[str, ...]] = []
        for number in range(len(self.options)):
            shapes = self.shapes[number]
            labels = tuple(f"{number}.{index}" for index in range(len(shapes)))
            groups.append(labels)
            for label, shape in zip(labels, shapes, strict=True):
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
        return Reference(optimizer, parameters, tuple(groups), dtype)

    def gradients(self, reference: Reference, step: int) -> dict[str, Tensor]:
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
                if not self.is_finite(index, step):
                    for at, number in (0, torch.nan), (3, torch.inf), (5, -torch.inf):
                        value.view(-1)[at : at + 1] = number
            position = index_in_group(label)
            missing = (position == 1 and step == 4) or (position == 2 and step < 2)
            if not (self.with_missing and missing):
                gradients[label] = value.to(reference.stored_dtype)
        return gradients

    def is_finite(self, index: int, step: int) -> bool:
        """Return whether all elements of parameter ``index``'s gradient are finite in a step."""
        return step < NOT_FINITE

    def step_reference(self, reference: Reference, step: int) -> None:
        """Step the reference. Raises PlanningError if the step raises, or keeps a state that ranks
        cannot."""
        try:
            reference.step(self.gradients(reference, step))
        except Exception as error:
            raise self.step_error(error, "on whole parameters") from error
        if stray := stray_state(reference.optimizer, reference.parameters.values()):
            raise self.refused(stray)

    def find_changed(self) -> tuple[frozenset[str], frozenset[str]]:
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
        self.options = [self.kind.new_options(options, changed) for options in user_options]
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
        reference = self.make_reference(self.dtypes[0])
        old_settings, changed, attributes = reference.settings, frozenset[str](), frozenset[str]()
        for step in range(NOT_FINITE):
            self.step_reference(reference, step)
            changed_options, changed_attributes = _changed_names(old_settings, reference.settings)
            changed, attributes = changed | changed_options, attributes | changed_attributes
        return changed, attributes

    def record(self, mixing: bool = False) -> RecordedSteps:
        """Run all steps and record their ops and lines. Raises NotElementwise if an op draws random
        numbers, or, without ``mixing``, if an op mixes elements."""
        reference = self.make_reference(self.dtypes[0])
        recorded = RecordedSteps(self.files, mixing)
        for step in range(len(SCALES)):
            gradients = self.gradients(reference, step)
            for label, parameter in reference.parameters.items():
                gradient = gradients.get(label)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            recorded.follow(p.data for p in reference.parameters.values())
            recorded.follow(p.grad for p in reference.parameters.values() if p.grad is not None)
            try:
                with recorded:
                    step_without_hooks(reference.optimizer)
            except Exception as error:
                raise self.step_error(error, "on whole parameters") from error
        return recorded

    def check_settings(self, actual: Settings, expected: Settings, where: str) -> None:
        """Raise PlanningError if the shadow's options or attributes differ from the reference's."""
        pairs = zip((*actual[0], actual[1]), (*expected[0], expected[1]), strict=True)
        for number, (a, b) in enumerate(pairs):
            for key in a.keys() | b.keys():
                if key not in a or key not in b or not plain_equal(a[key], b[key]):
                    what = f"{key!r} of a group" if number < len(actual[0]) else f"attribute {key}"
                    found = f"{where}: {b.get(key)!r}, on {self.shadowed} {a.get(key)!r}"
                    raise self.settings_error(what, found)

    # -- errors ------------------------------------------------------------------------------------

    def _check_closure(self, step: Any) -> None:
        """Raise PlanningError if the class's step has a required argument."""
        required = [
            p.name
            for p in [*inspect.signature(step).parameters.values()][1:]
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        if required:
            code = inspect.unwrap(step).__code__
            first = text_of(code.co_filename, code.co_firstlineno)
            line = text_of(code.co_filename, code.co_firstlineno + (": @" in first))
            raise self.refused(_REASONS.get(required[0], f"needs {required[0]} in its step"), line)

    def settings_error(self, what: str, found: str) -> PlanningError:
        return self.refused(
            f"is not {self.updates}: a step changes its {what} depending on the parameters "
            f"({found})"
        )

    def step_error(self, error: Exception, where: str) -> PlanningError:
        """Return the error for a step that raised, with the line of the optimizer's file."""
        line = ""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in self.files:
                line = text_of(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        if isinstance(error, PlanningError):
            fact, _, fix = str(error).partition("\n")
            return PlanningError(f"{fact}\n{f'  its line: {line}' if line else ''}\n{fix}")
        for word, reason in _REASONS.items():
            if word in f"{error} {line}":
                return self.refused(f"{reason} ({type(error).__name__}: {error})", line)
        return PlanningError(
            f"the step of {self.name} raised in its probe, {where}: "
            f"{type(error).__name__}: {error}\n{f'  its line: {line}' if line else ''}\n{self.fix}"
        )

    def refused(self, reason: str, line: str = "") -> PlanningError:
        return PlanningError(
            f"{self.name} {reason}.\n{f'  its line: {line}' if line else ''}\n{self.fix}"
        )


_REASONS = {
    "closure": "needs a closure that computes the loss again, and a train step passes none",
    "require grad": "needs a second backward, and the gradients of a train step have no graph",
    "sparse": "needs sparse gradients, and the gradients of a train step are dense",
}
"""Why a step raised, by a word of its error or of its line."""


@dataclass(frozen=True, slots=True)
class _StateFill:
    """A tensor of the parameter's shape filled with ``value``, or equal to the parameter (None)."""

    value: Any
    dtype: torch.dtype


def index_in_group(label: str) -> int:
    """Return the position in its group of a parameter of a trial."""
    return int(label.partition(".")[2])


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
