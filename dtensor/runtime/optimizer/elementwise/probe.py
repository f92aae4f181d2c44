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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dtensor.errors import PlanningError
from dtensor.numerics import is_narrow
from dtensor.runtime.optimizer.elementwise.op_recorder import (
    NotElementwise,
    unreached,
)
from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer
from dtensor.runtime.optimizer.elementwise.trial import (
    SCALES,
    Probed,
    ProbeReport,
    Reference,
    Trial,
    group_key,
    index_in_group,
    probe_key,
    unnoticed,
)
from dtensor.runtime.optimizer.optimizer_kind import (
    TABLE_DTYPES,
    StateEntry,
    copy_plain,
)
from dtensor.runtime.optimizer.shard_optimizer import (
    MASTER,
    ShardOptimizer,
    Updated,
    absent,
    is_absent,
)


def probe(optimizer: torch.optim.Optimizer, masters: bool) -> Probed:
    """Test the optimizer's class with its options. Raises PlanningError if it is not elementwise.
    The state of Python's, numpy's and torch's random generators is preserved."""
    with unnoticed():
        return _ElementwiseTrial(optimizer, masters).run()


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


class _ElementwiseTrial(Trial):
    def run(self) -> Probed:
        """Run all parts of the probe, and return its result. Raises PlanningError if one fails."""
        changed, attributes_changed = self.find_changed()
        try:
            recorded = self.record()
        except NotElementwise as found:
            raise PlanningError(
                f"{self.name} is not elementwise: {found.what}, so on shards it would give "
                f"other numbers than on whole parameters.\n"
                f"{f'  its line: {found.line}' if found.line else ''}\n{self.fix}"
            ) from None
        entries, keys = self._entries()
        self.kind = replace(self.kind, entries=entries)
        for dtype in dict.fromkeys((torch.float64, *self.dtypes)):
            self._compare(dtype, keys)
        self.kind.check_fixed(self.optimizer)
        report = ProbeReport(
            optimizer=f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}",
            updates=self.updates,
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

    def _entries(self) -> tuple[dict[str, StateEntry], list[tuple[str, ...]]]:
        """Return the forms of the state entries over all dtypes, and the state's keys by group."""
        observed: dict[str, _ObservedEntry] = {}
        keys: list[dict[str, None]] = [{} for _ in self.options]
        for dtype in dict.fromkeys((torch.float64, *self.dtypes)):
            reference = self.make_reference(dtype)
            for step in range(len(SCALES)):
                self.step_reference(reference, step)
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
            reference = self.make_reference(dtype)
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
                label: cut_parameter(index_in_group(label), parameter.detach().to(dtype))
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
                gradients = self.gradients(reference, step)
                options, attributes = reference.settings
                for number, rank in enumerate(ranks):
                    pieces = {
                        n: cut_parameter(index_in_group(n), g)[number] for n, g in gradients.items()
                    }
                    rank_gradients = {
                        n: piece.clone() for n, piece in pieces.items() if n in rank.shards
                    }
                    try:
                        rank.step(
                            reference.groups, keys_by_label, (*options, attributes), rank_gradients
                        )
                    except Exception as error:
                        raise self.step_error(error, f"on shards ({cut_name})") from error
                try:
                    settings = shadow.step(reference.groups, gradients.keys(), options, attributes)
                except Exception as error:
                    raise self.step_error(error, "on parameters of one element") from error
                self.step_reference(reference, step)
                self._check_values(reference, ranks, cut_parameter, f"{cut_name}, step {step + 1}")
                self.check_settings(settings, reference.settings, f"step {step + 1}")

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
                    else cut_parameter(index_in_group(label), stored)
                )
                for rank, part in zip(ranks, parts, strict=True):
                    if label in rank.shards:
                        rank.values[label, key] = part.clone()

    # -- comparisons --------------------------------------------------------------------------

    def _check_values(
        self, reference: Reference, ranks: Sequence[_ShardedRank], cut_parameter: Cut, where: str
    ) -> None:
        """Raise PlanningError if values or states on the ranks differ from the reference."""
        for label, parameter in reference.parameters.items():
            expected = cut_parameter(
                index_in_group(label), parameter.detach().to(reference.stored_dtype)
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
                    else cut_parameter(index_in_group(label), whole_tensor)
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

    def _difference(self, what: str, parameter: Tensor, where: str) -> PlanningError:
        return PlanningError(
            f"{self.name} is not elementwise: on shards {what}.\n"
            f"  a parameter of shape {list(parameter.shape)}, {parameter.dtype}; {where}\n"
            f"{self.fix}"
        )

    def _unsplittable(self, key: str, what: str) -> PlanningError:
        return PlanningError(
            f"{self.name} keeps {what} under {key}, which cannot be cut as a parameter is.\n"
            f"{self.fix}"
        )


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

    def observe(self, probe: _ElementwiseTrial, key: str, value: Any, parameter: Tensor) -> None:
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

    def entry(self, probe: _ElementwiseTrial, key: str) -> StateEntry:
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
