"""Finds repeated layers in a plan: runs of steps that are equal except for the layer's number.

    runs_of(plan, [forward, backward])    # 32 layers of 93 steps each in the forward
    [[Run(start=23, period=93, count=32, shown=0, layers=("blocks.{0..31}",), passed=("x_2",))],
     [Run(start=14, period=115, count=32, shown=31, ...)]]

Two steps are equal if they print the same call, types, bytes, FLOP and source line. The numbers in
their labels must differ by the same amount from each layer to the next. Their operands must be
corresponding values of their layers, values that all layers read, or values passed from layer to
layer. Repetitions whose labels have no numbers (a loop) are not runs, as layers would have no name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, assert_never, cast

from dtensor.sharding.ops.call import is_random
from dtensor.sharding.plan.dataflow import without_numbers
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Accumulate, Compute, Redistribute, Step
from dtensor.sharding.plan.text.words import call_text, collapse


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``count`` layers of ``period`` steps each, from ``start`` on.

    shown: the index of the layer that is printed, usually the layer with the smallest number.
    first: the name of the shown layer. layers: the names of all layers. passed: values of the
    shown layer that later layers read.
    """

    start: int
    period: int
    count: int
    shown: int
    first: str
    layers: tuple[str, ...]
    passed: tuple[str, ...]

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    def steps(self, section: Sequence[Step]) -> Sequence[Step]:
        """Return the steps of the shown layer. ``section``: the list in which the run was found."""
        first = self.start + self.shown * self.period
        return section[first : first + self.period]

    def steps_of_layers(self, section: Sequence[Step], offset: int) -> Sequence[Step]:
        """Return the step at ``offset`` of every layer."""
        return section[self.start + offset : self.stop : self.period]


def runs_of(plan: PlanRecord, sections: Iterable[Sequence[Step]]) -> list[list[Run]]:
    """Return the runs of each list of steps, in order. A list may read values of earlier lists."""
    shared = _SharedState({item.name: item.label for item in plan.inputs})
    return [_RunFinder(shared, steps).runs() for steps in sections]


_Ref = tuple[str, str | int]
"""A name in a step that may differ between layers: (kind, name), where the kind is "value", "label"
or "number"."""
_Relation = tuple[Hashable, ...]
"""How a name of a layer is related to the corresponding name of the layer before:
    ("same",)                               the same value or label
    ("label", pattern, differences)         labels whose numbers differ by these amounts
    ("number", difference)                  numbers of random ops
    ("own", offset, index, distance)        result ``index`` of the step at ``offset``, ``distance``
                                            layers before
    ("of", run, offset, index, distance)    the same for a result of an earlier run
"""
_SAME: _Relation = ("same",)
_OUTSIDE: _Relation = ("outside",)
"""Both names are different values from before the run. This is allowed for the first layers only
if later layers show that these values are passed from layer to layer."""


@dataclass(slots=True)
class _SharedState:
    """The results of searching the earlier lists.

    labels: input -> its label. keys: key of a step -> its number. places: value -> its places, each
    (number of the run, layer, offset in the layer, index among the step's results).
    """

    labels: dict[str, str]
    keys: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    places: dict[str, list[tuple[int, int, int, int]]] = field(
        default_factory=dict[str, list[tuple[int, int, int, int]]]
    )
    num_runs: int = 0


class _RunFinder:
    """Finds the runs in one list of steps.

    keys: a number for each step; steps with equal numbers print the same except for names. refs:
    the names in each step that may differ between layers. indices: key -> the steps that have it.
    """

    def __init__(self, shared: _SharedState, steps: Sequence[Step]) -> None:
        """Number the keys of the steps; a step that is never part of a layer gets a unique one."""
        self.shared = shared
        self.steps = steps
        unique = iter(range(-1, -len(steps) - 1, -1))
        self.keys = [
            next(unique) if key is None else shared.keys.setdefault(key, len(shared.keys))
            for key in map(_key, steps)
        ]
        self.refs = [list(_refs(step)) for step in steps]
        self.indices: dict[int, list[int]] = {}
        for index, key in enumerate(self.keys):
            self.indices.setdefault(key, []).append(index)

    def runs(self) -> list[Run]:
        """Return the runs, in order."""
        runs: list[Run] = []
        start = 0
        while start < len(self.steps):
            period, extent = self._repetition(start)
            if not period:
                start += 1
                continue
            begin = self._first_layer(start, period, extent)
            run = self._run(begin, period, (start + extent - begin) // period)
            match run:
                case Run():
                    runs.append(run)
                    start = run.stop
                case "not numbered":
                    start += extent
                case "not alike":  # the first layer may have other operands
                    start += period if extent >= 3 * period else 1
                case _:
                    assert_never(run)
        return runs

    def _repetition(self, start: int) -> tuple[int, int]:
        """Return (period, number of steps) of the repetition from ``start`` on that folds most
        steps; (0, 0) if there is none. Only keys are compared, not operands."""
        keys, best, most_folded = self.keys, (0, 0), 0
        for next_start in self.indices[keys[start]]:
            period = next_start - start
            if period <= 0 or (best[0] and period % best[0] == 0 and period < best[1]):
                continue
            if start + 2 * period > len(keys):
                break
            first, extent = keys[start:next_start], period
            while keys[start + extent : start + extent + period] == first:
                extent += period
            if extent - period > most_folded:
                most_folded = extent - period
                while start + extent < len(keys) and keys[start + extent] == first[extent % period]:
                    extent += 1
                best = (period, extent)
        return best

    def _first_layer(self, start: int, period: int, extent: int) -> int:
        """Return the start of the first layer, chosen so that layers span the fewest modules."""

        def num_modules(begin: int) -> int:
            refs = [ref for step_refs in self.refs[begin : begin + period] for ref in step_refs]
            labels = [name for kind, name in refs if kind == "label"]
            labels += [self.shared.labels.get(str(name), "") for _, name in refs]
            return len({_numbered_module(str(label)) for label in labels})

        return min(range(start, start + extent % period + 1), key=num_modules)

    def _run(
        self, start: int, period: int, count: int
    ) -> Run | Literal["not alike", "not numbered"]:
        """Return the run of the first layers, as many as have related names; "not alike" if the
        names of the first two layers are not related, "not numbered" if no label has a layer
        number. ``count``: the number of repetitions of ``period`` steps from ``start`` on."""
        results: dict[str, tuple[int, int, int]] = {}  # value -> (layer, offset, index of result)
        for index in range(start, start + period * count):
            for number, name in enumerate(self.steps[index].gives):
                layer, offset = divmod(index - start, period)
                results[name] = (layer, offset, number)
        common: list[list[set[_Relation]]] = []  # step -> name -> relations between all layers
        layers = 1
        for layer in range(1, count):
            extended: list[list[set[_Relation]]] = []
            for offset in range(period):
                index = start + layer * period + offset
                pairs = zip(self.refs[index - period], self.refs[index], strict=True)
                extended.append([self._relations(a, b, results, layer) for a, b in pairs])
                if common:
                    extended[-1] = [
                        _shared_relations(x, y)
                        for x, y in zip(common[offset], extended[-1], strict=True)
                    ]
            if not all(relations for of_step in extended for relations in of_step):
                break  # some name of this layer is not related to the name in the layer before
            common, layers = extended, layer + 1
        if layers == 1 or any(_OUTSIDE in relations for of_step in common for relations in of_step):
            return "not alike"
        numbered = [
            (offset, number, relation)
            for offset, of_step in enumerate(common)
            for number, relations in enumerate(of_step)
            for relation in relations
            if relation[0] == "label"
        ]
        if not numbered:
            return "not numbered"
        # name each layer by its numbered labels
        names: list[list[str]] = [[] for _ in range(layers)]
        for layer in range(layers):
            for offset, number, (_, _, differences) in numbered:
                name = self.refs[start + layer * period + offset][number][1]
                label = self.shared.labels.get(str(name), str(name))
                names[layer].append(_layer_name(label, differences))
        # print the layer with the smallest number; in the backward it comes last
        shown = 0 if _first_number(names[0]) <= _first_number(names[-1]) else layers - 1
        if not self._is_unambiguous(common, start + shown * period):
            shown += 1 if shown == 0 else -1
        self._record_places(start, period, layers, common)
        # (offset, index of the result) -> value of the shown layer
        places = {(o, n): name for name, (layer, o, n) in results.items() if layer == shown}
        passed = [  # values that a later layer reads
            name
            for (offset, number), name in sorted(places.items())
            if any(
                relation[:3] == ("own", offset, number) and relation[3]
                for of_step in common
                for relations in of_step
                for relation in relations
            )
        ]
        return Run(
            start=start,
            period=period,
            count=layers,
            shown=shown,
            first=", ".join(collapse(dict.fromkeys(names[shown]))),
            layers=collapse(dict.fromkeys(name for of_layer in names for name in of_layer)),
            passed=tuple(dict.fromkeys(passed)),
        )

    def _is_unambiguous(self, common: Sequence[Sequence[set[_Relation]]], start: int) -> bool:
        """Return whether each name in the layer at ``start`` stands for one thing at all its uses
        in the layer, such as a result of the previous layer or a value that all layers read."""
        relations_by_ref: dict[_Ref, set[_Relation]] = {}
        for offset, step_relations in enumerate(common):
            for ref, relations in zip(self.refs[start + offset], step_relations, strict=True):
                relations_by_ref[ref] = relations_by_ref.get(ref, relations) & relations
        return all(relations_by_ref.values())

    def _relations(
        self, a: _Ref, b: _Ref, results: dict[str, tuple[int, int, int]], layer: int
    ) -> set[_Relation]:
        """Return all relations of ``b``, a name in ``layer``, to ``a``, the corresponding name in
        the layer before; an empty set if the names are not related. ``results``: value of the
        repetition -> (layer, offset, index of the result)."""
        (kind, first), (_, second) = a, b
        if kind == "number":
            return {("number", int(second) - int(first))}
        first, second = str(first), str(second)
        if kind == "label":
            return _label_relations(first, second)
        if first == second:
            return set() if first in results else {_SAME}
        place, place_after = results.get(first), results.get(second)
        if place_after is not None:
            # corresponding values, or the first is passed into the first layer from outside
            from_outside = place is None and place_after[0] == 0
            if not from_outside and place != (place_after[0] - 1, *place_after[1:]):
                return set()
            return {("own", *place_after[1:], layer - place_after[0])}
        labels = self.shared.labels
        if first in labels and second in labels:
            return _label_relations(labels[first], labels[second])
        relations: set[_Relation] = {
            ("of", run, offset, index, later[1] - layer)
            for run, layer, offset, index in self.shared.places.get(first, ())
            for later in self.shared.places.get(second, ())
            if (later[0], *later[2:]) == (run, offset, index)
        }
        return relations or ({_OUTSIDE} if place is None else set())

    def _record_places(
        self, start: int, period: int, count: int, common: Sequence[Sequence[set[_Relation]]]
    ) -> None:
        """Record the places of the run's values for later lists. Values that are passed into the
        first layers count as values of layers with negative numbers."""
        run, places = self.shared.num_runs, self.shared.places
        self.shared.num_runs += 1
        for index in range(start, start + period * count):
            layer, offset = divmod(index - start, period)
            for number, name in enumerate(self.steps[index].gives):
                places.setdefault(name, []).append((run, layer, offset, number))
        for offset, of_step in enumerate(common):
            for at, relations in enumerate(of_step):
                for relation in relations:
                    match relation:
                        case ("own", int() as result_offset, int() as number, int() as distance):
                            for layer in range(distance):
                                name = str(self.refs[start + layer * period + offset][at][1])
                                places.setdefault(name, []).append(
                                    (run, layer - distance, result_offset, number)
                                )
                        case _:
                            pass


# -- one step --------------------------------------------------------------------------------------


def _key(step: Step) -> Hashable | None:
    """Return a key that is equal for steps whose text differs only in names; None for a step that
    is never part of a layer."""
    match step:
        case Compute(op=op):
            call = op.call
            if is_random(call):
                call = replace(call, kwargs=tuple(k for k in call.kwargs if k[0] != "op"))
            has_result = tuple(name is not None for name in step.results)
            text = call_text(call, ("_",) * len(step.operands))
            place = (op.source, without_numbers(op.module), step.phase, step.stage, step.once)
            specs = (step.operand_specs, step.result_specs)
            return (text, has_result, place, specs, step.flops, step.rule.kind, step.strategies)
        case Redistribute() if not step.tied:
            labels = tuple(map(without_numbers, step.of))
            place = (step.source, step.phase, step.stage, step.once)
            return (step.moves, place, step.in_place, bool(step.bucket), labels)
        case Accumulate():
            return (step.src, step.dst, step.stage, without_numbers(step.of))
        case _:
            return None


def _refs(step: Step) -> Iterator[_Ref]:
    """Yield the names that may differ between layers, in the same order for equal keys."""
    for name in step.reads:
        yield "value", name
    for label in step.labels:
        yield "label", label
    if step.op is not None and is_random(step.op.call):
        yield "number", dict(step.op.call.kwargs)["op"]


def _shared_relations(before: set[_Relation], now: set[_Relation]) -> set[_Relation]:
    """Return the relations ``before`` of the earlier layers that the next layer (``now``) has too.
    If an earlier layer reads a value from outside, an "own" relation of the next layer counts too:
    the first layer has no previous layer whose result it could read."""
    common = before & now
    if _OUTSIDE in before:
        common |= {relation for relation in now if relation[0] == "own"}
    return common


# -- numbers of layers -----------------------------------------------------------------------------


@cache
def _path(label: str) -> tuple[str, tuple[int, ...]]:
    """Split "blocks.3.up" into its pattern "blocks.*.up" and its numbers (3,)."""
    return without_numbers(label), tuple(int(p) for p in label.split(".") if p.isdigit())


def _label_relations(first: str, second: str) -> set[_Relation]:
    """Return the relation of two labels: equal, or with these differences of their numbers."""
    if first == second:
        return {_SAME}
    (pattern, before), (other, after) = _path(first), _path(second)
    if pattern != other:
        return set()
    return {("label", pattern, tuple(y - x for x, y in zip(before, after, strict=True)))}


def _numbered_module(label: str) -> str:
    """Return the label up to its first number, ``blocks.3`` for "blocks.3.up", or ""."""
    parts = label.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


def _layer_name(label: str, differences: Hashable) -> str:
    """Return the label up to the first number whose difference between layers is not 0."""
    parts, changes = label.split("."), iter(cast(tuple[int, ...], differences))
    for index, part in enumerate(parts):
        if part.isdigit() and next(changes):
            return ".".join(parts[: index + 1])
    raise AssertionError(label)


def _first_number(names: Sequence[str]) -> int:
    """Return the layer number of the first name, ``blocks.3`` -> 3."""
    return int(names[0].rpartition(".")[2])
