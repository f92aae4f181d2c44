"""A trial whether an optimizer of an unknown class computes the same numbers on shards.

    probed = probe(lion, masters=False)      # PlanningError: the op, its line, the difference
    print(probed.report)                     # the trials, and the lines of `step` that did not run
    probed.kind.entries                      # {"exp_avg": StateEntry(number=False, ...)}

An optimizer of the same class, with the user's options and attributes, steps small parameters of 1
to 4 dims. First as in torch, with each op recorded (op_recorder.py); then also through the ranks'
own path, `ShardOptimizer` over flat runs, cut unevenly over two and three ranks, and with whole
parameters on either of two. Gradients are of 1e-6 to 1e3, some have NaN and Inf in single elements,
some are missing, one parameter gets its first gradient late. After each step all values, states,
groups' options and attributes are compared: in float64, where a weight decay that depends on the
shape shows, and in the user's dtypes.

The probe observes the form of a state (a tensor like the parameter, a number, its dtype), and which
options and attributes a step changes. It costs 0.1 to 0.5 s, and its result is remembered.

It does not see lines that did not run, such as those for sparse gradients or from the 1,000th step
on; the report lists them. It runs on the CPU.
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
from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer, Told
from dtensor.runtime.optimizer.optimizer_kind import (
    PYTHON,
    OptimizerKind,
    StateEntry,
    bare_step,
    copied,
    kind_of_value,
    options_of,
    plain_attributes,
    same,
)
from dtensor.runtime.optimizer.shard_optimizer import (
    MASTER,
    ShardOptimizer,
    Updated,
    absent,
    is_absent,
)

SHAPES = ((7,), (6, 5), (4, 3, 5), (3, 2, 3, 3), (66, 64))
"""Shapes of the parameters of a group; the last is large enough for a run of its own."""
SCALES = (1.0, 1e-3, 1e-6, 1e3, 10.0, 0.1, 1e-2, 1e2, 1e-5, 1.0, 1e-4, 1.0)
"""Sizes of the gradients, by step."""
NOT_FINITE = 7
"""From this step on single elements of gradients are not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The observations of a probe of an elementwise optimizer.

    ``ops``: on elements of parameters; ``state``: of a parameter, by key; ``changed``: options of
    groups and attributes that a step changes; ``unreached``: lines of `step`, and of functions that
    it calls in the classes' files, that did not run, so that their effect is unknown.
    """

    optimizer: str
    steps: int
    dtypes: tuple[torch.dtype, ...]
    ops: tuple[str, ...]
    state: tuple[str, ...]
    changed: tuple[str, ...]
    unreached: tuple[str, ...]

    def __str__(self) -> str:
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
    """A class that passed. ``keys``: of a parameter's state, by the group's options; ``changed``:
    names of options and of attributes that a step changes; ``seen``: everything that the probe's
    answer depends on."""

    kind: OptimizerKind
    report: ProbeReport
    keys: Mapping[object, tuple[str, ...]]
    changed: frozenset[str]
    attributes_changed: frozenset[str]
    seen: object

    @property
    def moves(self) -> bool:
        """Whether a step changes numbers on the optimizer itself."""
        return bool(self.changed or self.attributes_changed)


def probe(optimizer: torch.optim.Optimizer, masters: bool) -> Probed:
    """PlanningError unless it is elementwise, as far as a trial shows."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            return _Trial(optimizer, masters).run()
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


def group_key(group: Mapping[str, Any], changed: frozenset[str]) -> object:
    """The options of a group on which a class may decide, without those that its step changes."""
    options = options_of(group)
    return tuple((k, kind_of_value(v)) for k, v in options.items() if k not in changed)


def asked_of(
    optimizer: torch.optim.Optimizer,
    masters: bool,
    changed: frozenset[str],
    attributes_changed: frozenset[str],
) -> object:
    """The facts that a probe's answer depends on, without those that a step changes: kinds, no
    values."""
    groups = {group_key(group, changed): None for group in optimizer.param_groups}
    with DisableTorchFunctionSubclass():  # it reads no lazy parameter
        dtypes = {p.dtype: None for group in optimizer.param_groups for p in group["params"]}
    kind = OptimizerKind.of(optimizer)
    fixed = (*kind.fixed.items(), *kind.methods.items(), *kind.defaults.items())
    attributes = plain_attributes(optimizer).items()
    plain = ((k, kind_of_value(v)) for k, v in attributes if k not in attributes_changed)
    held = tuple((k, kind_of_value(v)) for k, v in fixed)
    several = len(optimizer.param_groups) > 1
    return (type(optimizer), masters, several, *groups, *dtypes, *held, *plain)


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's optimizer, and the values of its table."""

    own: ShardOptimizer
    shards: dict[str, Tensor]
    values: dict[tuple[str, str], Tensor] = field(default_factory=dict[Any, Tensor])

    def step(
        self,
        groups: tuple[tuple[str, ...], ...],
        keys: Mapping[str, tuple[str, ...]],
        told: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, Tensor],
    ) -> None:
        names: list[tuple[str, str]] = []
        for label in gradients:
            narrow = self.own.masters and is_narrow(self.shards[label].dtype)
            names += [(label, key) for key in (*keys[label], *([MASTER] if narrow else []))]
        for which in names:
            self.values.setdefault(which, absent("cpu"))
        what = Updated(groups, tuple(gradients), tuple(names))
        given = tuple(self.values[which] for which in names)
        shards = {label: self.shards[label] for label in gradients}
        self.own.step(what, shards, told, gradients, given)


Cut = Callable[[int, Tensor], list[Tensor]]
"""A parameter's shards by rank, from its number and the parameter."""


@dataclass(slots=True, eq=False)
class _Whole:
    """Torch's optimizer, over whole parameters of one dtype."""

    optimizer: torch.optim.Optimizer
    held: dict[str, Parameter]
    groups: tuple[tuple[str, ...], ...]
    stored: torch.dtype  # of the parameters; the updated tensors may be float32 copies

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for label, parameter in self.held.items():
            given = gradients.get(label)
            parameter.grad = None if given is None else given.to(parameter.dtype).clone()
        bare_step(self.optimizer)

    @property
    def told(self) -> Told:
        groups = map(options_of, self.optimizer.param_groups)
        *options, attributes = copied((*groups, plain_attributes(self.optimizer)))
        return tuple(options), attributes


class _Trial:
    def __init__(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        self.name = type(optimizer).__name__
        self.optimizer = optimizer
        self.masters = masters
        self.kind = OptimizerKind.of(optimizer)
        self.files = files_of(type(optimizer))
        self.late = True  # whether gradients are missing at times
        self.attributes = plain_attributes(optimizer)
        self.drawn: dict[tuple[str, int], Tensor] = {}  # gradients, in float64
        alike: dict[object, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):  # also of two equal groups
            key = group_key(group, frozenset())
            alike.setdefault(key if number > 1 else (number, key), group)
        self.tried = list(alike.values())
        self.options = [*copied(tuple(map(options_of, self.tried)))]
        self.begun: list[dict[str, Any]] = [{} for _ in self.options]  # states, as `_begun`
        dtypes = dict.fromkeys(p.dtype for g in optimizer.param_groups for p in g["params"])
        self.dtypes = tuple(dtypes) or (torch.float32,)

    def run(self) -> Probed:
        changed, attributes_changed = self._changed()
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
            state=tuple(f"{key} ({_told_entry(entry)})" for key, entry in entries.items()),
            changed=tuple(sorted({*changed, *attributes_changed})),
            unreached=unreached(recorded.reached),
        )
        by_options: dict[object, tuple[str, ...]] = {}
        for options, own in zip(self.options, keys, strict=True):
            by_options[group_key(options, changed)] = own
        seen = asked_of(self.optimizer, self.masters, changed, attributes_changed)
        return Probed(self.kind, report, by_options, changed, attributes_changed, seen)

    # -- the trials -----------------------------------------------------------------------------

    def _whole(self, dtype: torch.dtype) -> _Whole:
        """Torch's optimizer for a stored dtype; with masters, float32 copies are updated."""
        wide = torch.float32 if self.masters and is_narrow(dtype) else dtype
        draw = torch.Generator().manual_seed(0)
        held: dict[str, Parameter] = {}
        groups: list[tuple[str, ...]] = []
        for number in range(len(self.options)):
            labels = [f"{number}.{at}" for at in range(len(SHAPES))]
            groups.append(tuple(labels))
            for label, shape in zip(labels, SHAPES, strict=True):
                value = torch.randn(shape, generator=draw, dtype=torch.float64).mul(0.5).to(dtype)
                held[label] = Parameter(value.to(wide))
        *given, attributes = copied((*self.options, self.attributes))
        parameters = [
            {**options, "params": [held[label] for label in labels]}
            for options, labels in zip(given, groups, strict=True)
        ]
        optimizer = self.kind.make(parameters, attributes)
        for number, labels in enumerate(groups):
            for label in labels if self.begun[number] else ():
                optimizer.state[held[label]] = self._state_of(number, held[label])
        return _Whole(optimizer, held, tuple(groups), dtype)

    def _gradients(self, reference: _Whole, step: int) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for at, (label, parameter) in enumerate(reference.held.items()):
            value = self.drawn.get((label, step))
            if value is None:
                draw = torch.Generator().manual_seed(1000 * at + step)
                wide, spread = torch.randn(
                    (2, *parameter.shape), generator=draw, dtype=torch.float64
                )
                value = self.drawn[label, step] = wide * spread.exp() * SCALES[step]
                if step >= NOT_FINITE:
                    flat = value.view(-1)
                    flat[0], flat[3], flat[5] = torch.nan, torch.inf, -torch.inf
            missing = (at % len(SHAPES) == 1 and step == 4) or (at % len(SHAPES) == 2 and step < 2)
            if not (self.late and missing):
                gradients[label] = value.to(reference.stored)
        return gradients

    def _try(self, reference: _Whole, step: int) -> None:
        """One step in torch. PlanningError where it raises."""
        try:
            reference.step(self._gradients(reference, step))
        except Exception as error:
            raise self._raised(error, "on whole parameters") from error

    def _changed(self) -> tuple[frozenset[str], frozenset[str]]:
        """The options and attributes that a step changes. From now on the probe's options begin
        with the values of a new optimizer: the user's optimizer may be resumed, with counts in its
        state, and the probe's has no state."""
        given = self.options
        defaults = {k: v for k, v in self.kind.defaults.items() if not isinstance(v, bool)}
        self.options = [
            {k: defaults.get(k, v) if _is_count(v) else v for k, v in options.items()}
            for options in given
        ]
        changed, attributes = self._first_steps()
        self.options = [
            {
                k: defaults[k] if k in changed else v
                for k, v in o.items()
                if k in defaults or k not in changed
            }
            for o in given
        ]
        return changed, attributes

    def _first_steps(self) -> tuple[frozenset[str], frozenset[str]]:
        """The options and attributes that steps change. The class itself may need all gradients
        from the first step on, or the state that its `__init__` makes."""
        first: PlanningError | None = None
        nothing = self.begun
        for late, begun in ((True, nothing), (False, nothing), (True, None), (False, None)):
            self.late, self.begun = late, self._begun() if begun is None else begun
            try:
                return self._changed_by_steps()
            except PlanningError as error:
                first = first or error
        assert first is not None
        raise first

    def _begun(self) -> list[dict[str, Any]]:
        """The state of a parameter of each group, as `__init__` made it: numbers; for a tensor, the
        number that all its elements equal, or None for the parameter's own value. Empty where the
        state is anything else, as after a step."""
        states: list[dict[str, Any]] = []
        for group in self.tried:
            state: dict[str, Any] = {}
            plain = type(self.optimizer.state) is defaultdict  # else it is on ranks
            for parameter in group["params"][:1] if plain else ():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    like = isinstance(value, Tensor) and value.shape == parameter.shape
                    if not like or value.numel() < 2:
                        state[key] = copied(value)
                    elif value.is_meta or parameter.is_meta:
                        return self.begun
                    elif bool((value == value.view(-1)[0]).all()):
                        state[key] = _Full(value.view(-1)[0].item(), value.dtype)
                    elif torch.equal(value, parameter):
                        state[key] = _Full(None, value.dtype)
                    else:
                        return self.begun
            states.append(state)
        return states

    def _state_of(self, group: int, parameter: Parameter) -> dict[str, Any]:
        """The initial state of a parameter."""
        state: dict[str, Any] = {}
        for key, value in self.begun[group].items():
            if isinstance(value, _Full):
                same_dtype = value.dtype == self.tried[group]["params"][0].dtype
                dtype = parameter.dtype if same_dtype else value.dtype
                begun = parameter.detach().to(dtype, copy=True)
                state[key] = begun if value.value is None else begun.fill_(value.value)
            else:
                state[key] = copied(value)
        return state

    def _changed_by_steps(self) -> tuple[frozenset[str], frozenset[str]]:
        reference = self._whole(self.dtypes[0])
        before, changed, attributes = reference.told, frozenset[str](), frozenset[str]()
        for step in range(NOT_FINITE):
            self._try(reference, step)
            more, others = _changes(before, reference.told)
            changed, attributes = changed | more, attributes | others
        return changed, attributes

    def _record(self) -> RecordedSteps:
        """All steps once, each op watched. PlanningError for one that mixes elements."""
        reference = self._whole(self.dtypes[0])
        recorded = RecordedSteps(self.files)
        for step in range(len(SCALES)):
            gradients = self._gradients(reference, step)
            for label, parameter in reference.held.items():
                given = gradients.get(label)
                parameter.grad = None if given is None else given.to(parameter.dtype)
            recorded.follow(p.data for p in reference.held.values())
            recorded.follow(p.grad for p in reference.held.values() if p.grad is not None)
            try:
                with recorded:
                    bare_step(reference.optimizer)
            except NotElementwise as found:
                raise PlanningError(
                    f"{self.name} is not elementwise: {found.what}, so on shards it would give "
                    f"other numbers than on whole parameters.\n"
                    f"{f'  its line: {found.line}' if found.line else ''}\n"
                    f"fix: one that updates each element of a parameter from its own gradient and "
                    f"state alone, such as torch.optim.AdamW"
                ) from None
            except Exception as error:
                raise self._raised(error, "on whole parameters") from error
        return recorded

    def _entries(self) -> tuple[dict[str, StateEntry], list[tuple[str, ...]]]:
        """The entries of a state, over all dtypes, and its keys by group."""
        seen: dict[str, _Under] = {}
        keys: list[dict[str, None]] = [{} for _ in self.options]
        for dtype in dict.fromkeys((torch.float64, *self.dtypes)):
            reference = self._whole(dtype)
            for step in range(len(SCALES)):
                self._try(reference, step)
                known = set(reference.held.values())
                for key in reference.optimizer.state:
                    if key not in known:
                        raise self._keeps(f"{key!r}", "a state that is of no parameter")
                for group, labels in enumerate(reference.groups):
                    for label in labels:
                        parameter = reference.held[label]
                        state = reference.optimizer.state.get(parameter)
                        if state:
                            self._see(seen, state, parameter)
                            keys[group] |= dict.fromkeys(state)
        entries = {key: one.entry(self, key) for key, one in seen.items()}
        return entries, [tuple(k for k in own if not seen[k].nothing) for own in keys]

    def _see(self, seen: dict[str, _Under], state: Mapping[str, Any], parameter: Tensor) -> None:
        for key, value in state.items():
            if not isinstance(key, str):
                raise self._keeps(f"{key!r}", "a key that is no text")
            seen.setdefault(key, _Under()).look(self, key, value, parameter)
        for key in seen.keys() - state.keys():
            seen[key].missing = True

    def _compare(self, dtype: torch.dtype, keys: Sequence[tuple[str, ...]]) -> None:
        """Compare the ranks' path with torch's, for each way of cutting."""
        for cut, size, how in _CUTS:
            reference = self._whole(dtype)
            begun = {
                n: dict(reference.optimizer.state.get(p, {})) for n, p in reference.held.items()
            }
            shadow = ShadowOptimizer(self.kind, copied({n: s for n, s in begun.items() if s}))
            by_label = {
                n: k for group, k in zip(reference.groups, keys, strict=True) for n in group
            }
            optimizers = [ShardOptimizer(self.kind, self.masters) for _ in range(size)]
            parts = {
                label: cut(_at(label), parameter.detach().to(dtype))
                for label, parameter in reference.held.items()
            }
            ranks = [
                _Rank(one, {n: p[r].clone() for n, p in parts.items() if p[r] is not None})
                for r, one in enumerate(optimizers)
            ]
            for label, state in begun.items():
                self._give(ranks, cut, label, state)
            for step in range(len(SCALES)):
                gradients = self._gradients(reference, step)
                options, attributes = reference.told
                for number, rank in enumerate(ranks):
                    pieces = {n: cut(_at(n), g)[number] for n, g in gradients.items()}
                    mine = {n: piece.clone() for n, piece in pieces.items() if n in rank.shards}
                    try:
                        rank.step(reference.groups, by_label, (*options, attributes), mine)
                    except Exception as error:
                        raise self._raised(error, f"on shards ({how})") from error
                try:
                    told = shadow.step(reference.groups, gradients.keys(), options, attributes)
                except Exception as error:
                    raise self._raised(error, "on parameters of one element") from error
                self._try(reference, step)
                self._check_values(reference, ranks, cut, f"{how}, step {step + 1}")
                self._check_told(told, reference.told, f"step {step + 1}")

    def _give(self, ranks: Sequence[_Rank], cut: Cut, label: str, state: Mapping[str, Any]) -> None:
        """Put a parameter's initial state into the tables of the ranks."""
        for key, value in state.items():
            entry = self.kind.entries[key]
            if value is not None:
                stored = entry.stored(value)
                parts = [stored] * len(ranks) if entry.number else cut(_at(label), stored)
                for rank, part in zip(ranks, parts, strict=True):
                    if label in rank.shards:
                        rank.values[label, key] = part.clone()

    # -- comparisons --------------------------------------------------------------------------

    def _check_values(
        self, reference: _Whole, ranks: Sequence[_Rank], cut: Cut, where: str
    ) -> None:
        for label, parameter in reference.held.items():
            expected = cut(_at(label), parameter.detach().to(reference.stored))
            for rank, one in zip(ranks, expected, strict=True):
                if label in rank.shards:
                    self._check(rank.shards[label], one, "the value", parameter, where)
            for key, value in (reference.optimizer.state.get(parameter) or {}).items():
                entry = self.kind.entries[key]
                like = value if isinstance(value, Tensor) and not entry.number else None
                pieces = None if like is None else cut(_at(label), like)
                for number, rank in enumerate(ranks):
                    held = rank.values.get((label, key))
                    if label not in rank.shards or value is None:
                        continue
                    if held is None or is_absent(held):
                        raise self._differs(f"{key} of the state is missing", parameter, where)
                    wanted = pieces[number] if pieces is not None else entry.stored(value)
                    self._check(held, wanted, f"{key} of the state", parameter, where)

    def _check(self, got: Tensor, wanted: Tensor, what: str, of: Tensor, where: str) -> None:
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise self._differs(
                f"{what} is {got.dtype}{list(got.shape)} in place of "
                f"{wanted.dtype}{list(wanted.shape)}",
                of,
                where,
            )
        if torch.equal(got, wanted):
            return
        rtol, atol, few = _TOLERANCES.get(of.dtype if of.is_floating_point() else got.dtype, _WIDE)
        if is_narrow(got.dtype):
            rtol, atol, few = _NARROW
        a, b = (_wide(x) for x in (got, wanted))
        # a small value may be the difference of large ones
        atol *= max(1.0, float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())) if b.numel() else 1.0
        alike = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if int((~alike).sum()) <= few * a.numel():
            return
        most = (a - b)[~alike].abs().nan_to_num(torch.inf).max()
        raise self._differs(
            f"{what} differs in {int((~alike).sum())} of {a.numel()} elements, by up to "
            f"{float(most):.2g}",
            of,
            where,
        )

    def _check_told(self, got: Told, wanted: Told, where: str) -> None:
        both = zip((*got[0], got[1]), (*wanted[0], wanted[1]), strict=True)
        for number, (one, other) in enumerate(both):
            for key in one.keys() | other.keys():
                if key not in one or key not in other or not same(one[key], other[key]):
                    what = f"{key!r} of a group" if number < len(got[0]) else f"attribute {key}"
                    raise PlanningError(
                        f"{self.name} is not elementwise: a step changes its {what} depending on "
                        f"the parameters ({where}: {other.get(key)!r}, on one element "
                        f"{one.get(key)!r}).\n{_FIX}"
                    )

    # -- errors ------------------------------------------------------------------------------------

    def _differs(self, what: str, parameter: Tensor, where: str) -> PlanningError:
        return PlanningError(
            f"{self.name} is not elementwise: on shards {what}.\n"
            f"  a parameter of shape {list(parameter.shape)}, {parameter.dtype}; {where}\n{_FIX}"
        )

    def _keeps(self, key: str, what: str) -> PlanningError:
        return PlanningError(
            f"{self.name} keeps {what} under {key}, which cannot be cut as a parameter is.\n{_FIX}"
        )

    def _raised(self, error: Exception, where: str) -> PlanningError:
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
class _Full:
    """A tensor like its parameter with one value everywhere, or the parameter's own (None)."""

    value: Any
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _Under:
    """The values seen under a key of the states."""

    pythons: set[type] = field(default_factory=set[type])
    shapes: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    like: bool = False  # tensors of their parameter's shape
    dtypes: dict[torch.dtype, torch.dtype] = field(default_factory=dict[Any, Any])
    missing: bool = False

    @property
    def nothing(self) -> bool:
        return not (self.pythons or self.shapes or self.like)

    def look(self, probe: _Trial, key: str, value: Any, parameter: Tensor) -> None:
        if value is None:
            self.missing = True
        elif type(value) in PYTHON:
            self.pythons.add(type(value))
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            if value.dtype == torch.bool:
                raise probe._keeps(f"{key!r}", "a tensor of bools")
            before = self.dtypes.setdefault(parameter.dtype, value.dtype)
            if value.shape == parameter.shape:
                self.like = True
                if before != value.dtype:
                    raise probe._keeps(f"{key!r}", f"now {before}, now {value.dtype}")
            elif value.numel() == 1 and value.dim() < 2:
                self.shapes.add(tuple(value.shape))
            else:
                what = f"a tensor of shape {list(value.shape)} for a parameter of "
                raise probe._keeps(f"{key!r}", f"{what}{list(parameter.shape)}")
        else:
            raise probe._keeps(f"{key!r}", f"a {type(value).__name__}")

    def entry(self, probe: _Trial, key: str) -> StateEntry:
        kinds = [bool(self.pythons), self.like, *([True] * len(self.shapes))]
        if sum(kinds) > 1:
            raise probe._keeps(f"{key!r}", "values of several kinds")
        dtypes = tuple(self.dtypes.items())
        if self.like or self.nothing:
            return StateEntry(number=False, dtypes=dtypes, late=self.missing)
        if self.shapes:
            (shape,) = self.shapes
            return StateEntry(number=True, shape=shape, dtypes=dtypes, late=self.missing)
        python = next(iter(self.pythons)) if len(self.pythons) == 1 else float
        return StateEntry(number=True, python=python, late=self.missing)


def _told_entry(entry: StateEntry) -> str:
    if entry.python is not None:
        return entry.python.__name__
    return "one number" if entry.number else "like the parameter"


def files_of(cls: type) -> frozenset[str]:
    """The files of an optimizer's classes, without torch's base."""
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


def _changes(before: Told, after: Told) -> tuple[frozenset[str], frozenset[str]]:
    """Names of options of groups, and of attributes."""

    def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
        both = one.keys() & other.keys()
        return (one.keys() ^ other.keys()) | {k for k in both if not same(one[k], other[k])}

    groups = (differing(a, b) for a, b in zip(before[0], after[0], strict=True))
    return frozenset[str]().union(*groups), frozenset(differing(before[1], after[1]))


def _at(label: str) -> int:
    return int(label.rpartition(".")[2])


def _wide(x: Tensor) -> Tensor:
    return x if x.is_complex() or x.dtype == torch.float64 else x.double()


def _over(*bounds: int) -> Cut:
    """Cut along the first dim or the last, in turn; part r ends at `bounds[r] / bounds[-1]`."""

    def cut(at: int, x: Tensor) -> list[Tensor]:
        dim = 0 if at % 2 == 0 else x.dim() - 1
        edges = [x.shape[dim] * b // bounds[-1] for b in bounds]
        return [x.narrow(dim, lo, hi - lo) for lo, hi in zip([0, *edges], edges, strict=False)]

    return cut


def _by_parameter(at: int, x: Tensor) -> list[Any]:
    """Whole, on one of two ranks, as in a pipeline."""
    return [x, None] if at % 2 == 0 else [None, x]


_CUTS: tuple[tuple[Cut, int, str], ...] = (
    (_over(2, 3), 2, "cut over 2 ranks"),
    (_over(1, 3, 4), 3, "cut over 3 ranks"),
    (_by_parameter, 2, "whole, on 2 ranks"),
)
_WIDE = (2e-4, 1e-5, 0.0)
_TOLERANCES = {
    torch.float64: (1e-9, 1e-12, 0.0),
    torch.complex128: (1e-9, 1e-12, 0.0),
}
"""Relative, absolute, and how much of a tensor may differ more: with 16 bits an update by a sign
may differ where a sum is nearly 0, since the last elements of a tensor are rounded differently
(flat_buffers.py)."""
_NARROW = (0.05, 0.02, 0.05)
