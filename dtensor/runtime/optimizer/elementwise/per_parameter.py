"""Test whether an optimizer updates each parameter from its own gradient and state alone.

    probed = probe_parameters(muon, masters=False)  # PlanningError names two coupled parameters
    probed.owned                                    # True: each parameter is updated by one rank
    probed.report                                   # the trials, and the lines that did not run

An optimizer of the user's class steps small CPU parameters together, with as many dims as the
user's: square, tall, wide, equal and larger ones. For each of them an `OwnedOptimizer`, as the rank
that owns it has, must give the same bits of values, states, options and attributes over 12 steps.
Then other values and gradients of one parameter must change no bit of the others. A step may not
draw random numbers. The probe takes 0.1 to 1 s.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from dtensor.errors import PlanningError
from dtensor.private_torch import DisableTorchFunctionSubclass
from dtensor.runtime.optimizer.elementwise.op_recorder import (
    Meetings,
    NotElementwise,
    RecordedSteps,
    unreached,
)
from dtensor.runtime.optimizer.elementwise.shadow_optimizer import (
    Settings,
    ShadowOptimizer,
    small_form,
)
from dtensor.runtime.optimizer.elementwise.trial import (
    SCALES,
    Probed,
    ProbeReport,
    Reference,
    Trial,
    group_key,
    probe_key,
    unnoticed,
)
from dtensor.runtime.optimizer.optimizer_kind import (
    copy_plain,
    is_plain,
    plain_equal,
    step_without_hooks,
)
from dtensor.runtime.optimizer.owned.owned_optimizer import OwnedOptimizer
from dtensor.runtime.optimizer.owned.packed_state import pack, unpack
from dtensor.runtime.optimizer.shard_optimizer import MASTER, STATE, Updated, absent

SHAPES_BY_DIMS: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((),),
    1: ((7,), (30,), (7,)),
    2: ((6, 5), (8, 8), (4, 12), (66, 64), (6, 5)),
    3: ((4, 3, 5), (5, 4, 3)),
    4: ((3, 2, 3, 3), (4, 3, 1, 1)),
}
NOT_FINITE = 10
"""The first step in which some elements of some gradients are NaN or infinite."""
SETTINGS = "settings"
MANY_GROUPS = 4
RESUMED = 6
"""The step before which a second shadow begins, as after a load."""


def probe_parameters(optimizer: torch.optim.Optimizer, masters: bool) -> Probed:
    """Test the optimizer's class with its options. Raises PlanningError if its step couples
    parameters, draws random numbers, or raises."""
    with unnoticed():
        return _PerParameterTrial(optimizer, masters).run()


@dataclass(slots=True, eq=False)
class _OwnerRank:
    """The rank that owns one parameter."""

    optimizer: OwnedOptimizer
    label: str
    value: Tensor
    blob: Tensor

    def step(self, reference: Reference, settings: Settings, gradient: Tensor) -> None:
        options, attributes = settings
        updated = Updated(reference.groups, (self.label,), ((self.label, STATE),))
        values, blobs = self.optimizer.compute(
            updated,
            {self.label: self.value},
            (*options, attributes),
            {self.label: gradient},
            {self.label: self.blob},
            None,
        )
        self.value, self.blob = values[self.label], blobs[self.label]

    def state(self) -> dict[str, Any]:
        """Return the parameter's state as in torch."""
        return {} if self.blob.dtype == torch.bool else unpack(self.blob)


class _PerParameterTrial(Trial):
    updates, shadowed = "per parameter", "small parameters"
    fix = (
        "fix: an optimizer that updates each parameter from its own gradient and state alone, such "
        "as torch.optim.AdamW or torch.optim.Muon"
    )

    def __init__(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        super().__init__(optimizer, masters)
        self.shapes = [_shapes(dims, len(self.options)) for dims in self.dims]
        self.exact = False  # whether shapes are the user's
        self.with_not_finite = True
        self.changed_label = ""  # the parameter that has other values and gradients
        self.known_runs: dict[tuple[torch.dtype, str], list[dict[str, Any]]] = {}

    def run(self) -> Probed:
        """Run all parts of the probe, and return its result. Raises PlanningError if one fails."""
        if len(self.options) > MANY_GROUPS:
            self._keep_groups_of_other_code()
        try:
            changed, attributes_changed = self.find_changed()
        except PlanningError as error:  # perhaps it takes no parameters of these shapes
            self._take_users_shapes(error)
            changed, attributes_changed = self.find_changed()
        try:
            recorded = self._record()
        except PlanningError:  # perhaps the code of matrices does not take NaN
            self.with_not_finite = False
            self.gradient_cache.clear()
            recorded = self._record()
        state: dict[str, str] = {}
        dtypes: list[torch.dtype] = []
        for dtype in dict.fromkeys((*self.dtypes, torch.float64, torch.float32)):
            try:
                state |= self._compare(dtype, changed if changed or attributes_changed else None)
            except PlanningError:
                if dtype in self.dtypes or self._runs_in(dtype):
                    raise
            else:
                dtypes.append(dtype)
            if dtype == self.dtypes[0]:
                self._change_one(dtype)
        self.kind.check_fixed(self.optimizer)
        cls = type(self.optimizer)
        report = ProbeReport(
            optimizer=f"{cls.__module__}.{cls.__qualname__}",
            updates=self.updates,
            steps=len(SCALES),
            dtypes=tuple(dtypes),
            ops=(),
            state=tuple(f"{key} ({form})" for key, form in state.items()),
            changed=tuple(sorted({*changed, *attributes_changed})),
            unreached=unreached(recorded.reached),
        )
        key = probe_key(self.optimizer, self.masters, changed, attributes_changed, owned=True)
        return Probed(
            self.kind, report, {}, changed, attributes_changed, key, owned=True, exact=self.exact
        )

    @property
    def labels(self) -> list[str]:
        return [f"{g}.{i}" for g, shapes in enumerate(self.shapes) for i in range(len(shapes))]

    # -- the choice of shapes ----------------------------------------------------------------------

    def _keep_groups_of_other_code(self) -> None:
        """Keep two of the groups whose steps run the same lines. Their options differ in text only,
        as in classes that give each parameter a group with its name."""
        kept: dict[object, list[int]] = defaultdict(list)
        for group, options in enumerate(self.options):
            numbers = {k: v for k, v in options.items() if not isinstance(v, str)}
            recorded = RecordedSteps(self.files, mixing=True)
            with suppress(Exception, NotElementwise):
                self._step_group(group, self.shapes[group], recorded)
            lines = ((code, frozenset(lines)) for code, lines in recorded.reached.items())
            key = group_key(numbers, frozenset()), frozenset(lines), frozenset(self.dims[group])
            kept[key].append(group)
        groups = sorted(group for same_code in kept.values() for group in same_code[:2])
        for values in (self.options, self.distinct_groups, self.dims, self.initial_states):
            values[:] = [values[group] for group in groups]  # type: ignore[index]
        self.shapes = [_shapes(dims, len(groups)) for dims in self.dims]

    def _take_users_shapes(self, error: PlanningError) -> None:
        """Take shapes of the user's parameters, with a part of the first dim if the step takes it.
        Raises ``error`` if the step takes none of them."""
        self.exact = True
        self.gradient_cache.clear()
        for number, group in enumerate(self.distinct_groups):
            with DisableTorchFunctionSubclass():  # does not fetch lazy parameters
                shapes = sorted({tuple(p.shape) for p in group["params"]}, key=math.prod)
            smallest = {len(shape): shape for shape in reversed(shapes)}
            taken = [self._taken_shape(number, shape) for shape in smallest.values()]
            if not all(taken):
                raise error
            self.shapes[number] = tuple(shape for shape in taken for _ in range(2))

    def _taken_shape(self, group: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first of some small shapes that a step takes, or (). A 0-D parameter has no
        shape that is smaller."""
        parts = (n for n in (256, 64, 16, 4, 1) if shape and shape[0] % n == 0)
        cut = [(shape[0] // n, *shape[1:]) for n in parts]
        for candidate in (*SHAPES_BY_DIMS.get(len(shape), ())[:1], *cut):
            with suppress(Exception):
                self._step_group(group, (candidate,), nullcontext())
                return candidate
        return ()

    def _step_group(
        self,
        group: int,
        shapes: Sequence[tuple[int, ...]],
        context: AbstractContextManager[Any],
    ) -> None:
        """Step an optimizer that has one of the groups."""
        parameters = [Parameter(torch.full(s, 0.5, dtype=self.dtypes[0])) for s in shapes]
        *options, attributes = copy_plain((self.options[group], self.attributes))
        optimizer = self.kind.make([{**options[0], "params": parameters}], attributes)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            with context:
                step_without_hooks(optimizer)

    # -- the trials --------------------------------------------------------------------------------

    def is_finite(self, index: int, step: int) -> bool:
        return step < NOT_FINITE or index % 2 == 0 or not self.with_not_finite

    def make_reference(self, dtype: torch.dtype) -> Reference:
        reference = super().make_reference(dtype)
        if self.changed_label:
            parameter = reference.parameters[self.changed_label]
            parameter.data.mul_(-1.25).add_(0.1)
        return reference

    def gradients(self, reference: Reference, step: int) -> dict[str, Tensor]:
        gradients = super().gradients(reference, step)
        if self.changed_label in gradients:
            gradients[self.changed_label] = gradients[self.changed_label] * -3
        return gradients

    def _record(self) -> RecordedSteps:
        try:
            return self.record(mixing=True)
        except NotElementwise as found:
            raise self.refused(f"cannot be updated by one rank: {found.what}", found.line) from None

    def _runs_in(self, dtype: torch.dtype) -> bool:
        """Return whether steps over parameters of ``dtype`` do not raise."""
        with suppress(PlanningError):
            return bool(self._run(dtype, ""))
        return False

    def _compare(self, dtype: torch.dtype, changed: Set[str] | None) -> dict[str, str]:
        """Return the forms of the state's entries. Raises PlanningError if the parameters' own
        optimizers differ from the one over all. ``changed``: the options that a step changes; None
        if it changes neither options nor attributes."""
        reference = self.make_reference(dtype)
        ranks = {
            label: _OwnerRank(
                OwnedOptimizer(self.kind, self.masters),
                label,
                parameter.detach().to(dtype, copy=True),
                self._initial_blob(reference, label),
            )
            for label, parameter in reference.parameters.items()
        }
        shadows = [] if changed is None else [self._shadow(reference, changed)]
        forms: dict[str, str] = {}
        run: list[dict[str, Any]] = []
        for step in range(len(SCALES)):
            gradients, settings = self.gradients(reference, step), reference.settings
            if shadows and step == RESUMED:
                shadows.append(self._shadow(reference, changed or frozenset()))
            try:
                expected = [s.step(reference.groups, gradients.keys(), *settings) for s in shadows]
            except Exception as error:
                raise self.step_error(error, "on small parameters") from error
            self.step_reference(reference, step)
            for label, gradient in gradients.items():
                try:
                    ranks[label].step(reference, settings, gradient)
                except Exception as error:
                    where = f"with one parameter of shape {list(gradient.shape)}"
                    raise self.step_error(error, where) from error
            self._check_step(reference, ranks, gradients, step)
            for shadow_settings in expected:
                self.check_settings(shadow_settings, reference.settings, f"step {step + 1}")
            for parameter in reference.parameters.values():
                state = reference.optimizer.state.get(parameter, {})
                forms |= {str(key): _form(value, parameter) for key, value in state.items()}
            run.append(_snapshot(reference))
        self.known_runs[dtype, ""] = run
        return forms

    def _initial_blob(self, reference: Reference, label: str) -> Tensor:
        """Return the packed state that the class's `__init__` makes, or an absent value."""
        state = reference.optimizer.state.get(reference.parameters[label])
        return pack(dict(state), torch.device("cpu"))[0] if state else absent("cpu")

    def _shadow(self, reference: Reference, changed: Set[str]) -> ShadowOptimizer:
        """Return a shadow that begins at the reference's current state."""
        states = {
            label: dict(state)
            for label, parameter in reference.parameters.items()
            if (state := reference.optimizer.state.get(parameter))
        }
        how = self.masters, self.exact
        forms = {label: small_form(p, *how) for label, p in reference.parameters.items()}
        return ShadowOptimizer(self.kind, states, forms, changed, *how)

    def _check_step(
        self,
        reference: Reference,
        ranks: Mapping[str, _OwnerRank],
        gradients: Mapping[str, Tensor],
        step: int,
    ) -> None:
        """Raise PlanningError unless the ranks have the bits of the reference."""
        for label, parameter in reference.parameters.items():
            rank, dtype = ranks[label], reference.stored_dtype
            value, state = parameter.detach().to(dtype), reference.optimizer.state.get(parameter)
            unequal = [] if same(rank.value, value) else [_difference(rank.value, value)]
            if not unequal and label in gradients:
                own = rank.state()
                own.pop(MASTER, None)
                keys = {*own, *(state or {})}
                unequal = [
                    f"{key!r} of its state is another value"
                    for key in keys
                    if not same(own.get(key), (state or {}).get(key))
                ]
            if unequal:
                self._raise_coupled(label, dtype, step, unequal[0])

    def _change_one(self, dtype: torch.dtype) -> None:
        """Raise PlanningError if other values and gradients of the first or the last parameter
        change another parameter."""
        for changed in dict.fromkeys((self.labels[0], self.labels[-1])):
            for label in self.labels:
                found = label != changed and self._influence(changed, label, dtype, len(SCALES))
                if found:
                    raise self._coupled(label, changed, found, dtype)

    # -- coupled parameters ------------------------------------------------------------------------

    def settings_error(self, what: str, found: str) -> PlanningError:
        dtype = self.dtypes[0]
        changing = [n for n in self.labels if self._influence(n, SETTINGS, dtype, len(SCALES))]
        if len(changing) < 2:
            return super().settings_error(what, found)
        first, second, *_ = changing
        return self.refused(
            f"couples parameters: a step changes its {what} depending on {self._describe(first)} "
            f"and on {self._describe(second)}",
            self._meeting_line(first, second, dtype),
        )

    def _run(self, dtype: torch.dtype, changed: str) -> list[dict[str, Any]]:
        """Return the values of all parameters, by label, and the options and attributes, by
        SETTINGS, after each step. ``changed``: the parameter that has other values and gradients,
        or ""."""
        known = self.known_runs.get((dtype, changed))
        if known is None:
            known = self.known_runs[dtype, changed] = []
            self.changed_label = changed
            reference = self.make_reference(dtype)
            for step in range(len(SCALES)):
                self.step_reference(reference, step)
                known.append(_snapshot(reference))
            self.changed_label = ""
        return known

    def _influence(self, changed: str, label: str, dtype: torch.dtype, steps: int) -> str:
        """Return how other values and gradients of ``changed`` change the parameter ``label``, or
        "" if they don't."""
        runs = zip(self._run(dtype, "")[:steps], self._run(dtype, changed), strict=False)
        for step, (old, new) in enumerate(runs):
            if not same(old[label], new[label]):
                return f"{_difference(new[label], old[label])} after step {step + 1}"
        return ""

    def _raise_coupled(self, label: str, dtype: torch.dtype, step: int, what: str) -> NoReturn:
        """Raise PlanningError for a parameter whose own optimizer gives other numbers."""
        for changed in self.labels:
            if changed != label and (found := self._influence(changed, label, dtype, step + 1)):
                raise self._coupled(label, changed, found, dtype)
        raise self.refused(
            f"couples parameters: an optimizer of its own gives {self._describe(label)} other "
            f"numbers than one over all parameters: {what} after step {step + 1} in {dtype}"
        )

    def _coupled(self, label: str, changed: str, found: str, dtype: torch.dtype) -> PlanningError:
        return self.refused(
            f"couples parameters: with other values and gradients of {self._describe(changed)}, "
            f"{self._describe(label)} {found}",
            self._meeting_line(label, changed, dtype),
        )

    def _meeting_line(self, label: str, changed: str, dtype: torch.dtype) -> str:
        """Return the line at which numbers of both parameters meet, or ""."""
        reference = self.make_reference(dtype)
        meetings = Meetings(self.files, label, changed)
        for step in range(len(SCALES)):
            gradients = self.gradients(reference, step)
            for n, parameter in reference.parameters.items():
                gradient = gradients.get(n)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
                meetings.follow(n, (parameter.data, *([parameter.grad] if n in gradients else [])))
            with suppress(Exception), meetings:
                step_without_hooks(reference.optimizer)
        return meetings.line

    def _describe(self, label: str) -> str:
        group, _, index = label.partition(".")
        shape = list(self.shapes[int(group)][int(index)])
        return f"parameter {index} of group {group} (of shape {shape})"


def _snapshot(reference: Reference) -> dict[str, Any]:
    values = {n: p.detach().clone() for n, p in reference.parameters.items()}
    return {**values, SETTINGS: reference.settings}


def _shapes(dims: Set[int], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a group's parameters, in an order in which numbers of dims alternate."""
    per_dims = 5 if num_groups <= MANY_GROUPS else 2
    columns = [SHAPES_BY_DIMS.get(n, ((2,) * n,))[:per_dims] for n in sorted(dims or {1, 2})[::-1]]
    return tuple(shape for row in zip_longest(*columns) for shape in row if shape is not None)


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal: the bits of tensors, and numbers in containers and
    objects. NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        is_alike = (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        return is_alike and (torch.equal(a, b) or bool(((a == b) | (a != a) & (b != b)).all()))
    if a is b or type(a) is not type(b):
        return a is b
    match a:
        case dict():
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        case list() | tuple() | deque():
            return len(a) == len(b) and all(map(same, a, b))
        case _ if is_plain(a):
            return plain_equal(a, b)
        case _ if hasattr(a, "__dict__"):
            return same(vars(a), vars(b))
        case _:
            return bool(a == b)


def _difference(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor):
        return "differ"
    unequal = ~((a == b) | (a != a) & (b != b))
    most = (a - b)[unequal].abs().nan_to_num(torch.inf).max()
    return f"differs in {int(unequal.sum())} of {a.numel()} elements, by up to {float(most):.2g}"


def _form(value: Any, parameter: Tensor) -> str:
    """Return the form of a state entry, for the report."""
    match value:
        case Tensor() if value.shape == parameter.shape:
            return "like the parameter"
        case Tensor():
            return "one number" if value.numel() == 1 else "tensor of another shape"
        case _:
            return type(value).__name__
