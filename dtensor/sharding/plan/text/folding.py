"""Repeated layers of a plan: runs of steps that are the same but for the number of their layer.

    runs_of(plan, [forward, backward])    # of 32 layers, 93 steps of each in the forward:
    [[Run(start=23, period=93, count=32, shown=0, layers=("blocks.{0..31}",), passed=("x_2",))],
     [Run(start=14, period=115, count=32, shown=31, ...)]]

Steps are the same if their printed text is: call and numbers, types, bytes sent, FLOP, the user's
line. Labels and module paths may differ in their numbers, by the same difference from each layer to
the next; operands are the same value of the next layer, the same value for all layers, or a value
that the previous layer passes on. The number of a random op may rise likewise.

Invariants: runs of a list do not overlap and are in order; a layer that differs in anything is in
none. Repetitions without a number in a label or a path (a loop) are no run: no name tells them
apart. Not here: how runs print (render.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, assert_never, cast

from dtensor.sharding.ops.call import is_random
from dtensor.sharding.plan.dataflow import without_numbers
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Redistribute,
    Step,
)
from dtensor.sharding.plan.text.words import call_text, collapse


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``count`` layers of ``period`` steps each, from ``start`` on.

    shown: the layer that is printed, as a rule that of the smallest number; first: its name;
    layers: the names of all; passed: values of the shown layer that those after it read.
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

    def steps(self, of: Sequence[Step]) -> Sequence[Step]:
        """The steps of the shown layer."""
        first = self.start + self.shown * self.period
        return of[first : first + self.period]

    def alike(self, of: Sequence[Step], offset: int) -> Sequence[Step]:
        """The step at ``offset`` of every layer."""
        return of[self.start + offset : self.stop : self.period]


def runs_of(plan: PlanRecord, lists: Iterable[Sequence[Step]]) -> list[list[Run]]:
    """The runs of each list, in order; a list may read values of those before it."""
    places = _Found({item.name: item.label for item in plan.inputs})
    return [_List(places, steps).runs() for steps in lists]


# A name that two layers may spell differently: (kind, name) with the kinds "value", "label" and
# "number".
_Ref = tuple[str, str | int]
# The relation of a layer's name to the name in the layer before it.
_Relation = tuple[Hashable, ...]
_SAME: _Relation = ("same",)
_OUTSIDE: _Relation = ("outside",)
"""Both values are from before the run: later layers must show that they are passed to its first
layers, or it is no run."""


@dataclass(slots=True)
class _Found:
    """The state over the lists so far: interned keys, and by value its places (run, layer, offset,
    index)."""

    labels: dict[str, str]
    keys: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    places: dict[str, list[tuple[int, int, int, int]]] = field(
        default_factory=dict[str, list[tuple[int, int, int, int]]]
    )
    num_runs: int = 0


class _List:
    """One list of steps, in which runs are searched."""

    def __init__(self, found: _Found, steps: Sequence[Step]) -> None:
        self.found = found
        self.steps = steps
        unique = iter(range(-1, -len(steps) - 1, -1))
        self.keys = [
            next(unique) if key is None else found.keys.setdefault(key, len(found.keys))
            for key in map(_key, steps)
        ]
        self.refs = [list(_refs(step)) for step in steps]
        self.at: dict[int, list[int]] = {}
        for index, key in enumerate(self.keys):
            self.at.setdefault(key, []).append(index)

    def runs(self) -> list[Run]:
        runs: list[Run] = []
        start = 0
        while start < len(self.steps):
            period, extent = self._periodic(start)
            if not period:
                start += 1
                continue
            begin = self._begin(start, period, extent)
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

    def _periodic(self, start: int) -> tuple[int, int]:
        """(period, steps) of the repetition from ``start`` on that folds most steps; zeros if none.

        Steps are compared without their operands here.
        """
        keys, best, most = self.keys, (0, 0), 0
        for other in self.at[keys[start]]:
            period = other - start
            if period <= 0 or (best[0] and period % best[0] == 0 and period < best[1]):
                continue
            if start + 2 * period > len(keys):
                break
            first, extent = keys[start:other], period
            while keys[start + extent : start + extent + period] == first:
                extent += period
            if extent - period > most:
                most = extent - period
                while start + extent < len(keys) and keys[start + extent] == first[extent % period]:
                    extent += 1
                best = (period, extent)
        return best

    def _begin(self, start: int, period: int, extent: int) -> int:
        """The begin of the layers: the place at which a period has the fewest numbered modules."""

        def concerned(begin: int) -> int:
            refs = [ref for found in self.refs[begin : begin + period] for ref in found]
            labels = [name for kind, name in refs if kind == "label"]
            labels += [self.found.labels.get(str(name), "") for _, name in refs]
            return len({_layer(str(label)) for label in labels})

        return min(range(start, start + extent % period + 1), key=concerned)

    def _run(
        self, start: int, period: int, count: int
    ) -> Run | Literal["not alike", "not numbered"]:
        """The run of as many layers as have related operands."""
        own: dict[str, tuple[int, int, int]] = {}
        for index in range(start, start + period * count):
            for number, name in enumerate(self.steps[index].gives):
                layer, offset = divmod(index - start, period)
                own[name] = (layer, offset, number)
        agreed: list[list[set[_Relation]]] = []
        layers = 1
        for layer in range(1, count):
            now: list[list[set[_Relation]]] = []
            for offset in range(period):
                index = start + layer * period + offset
                pairs = zip(self.refs[index - period], self.refs[index], strict=True)
                now.append([self._relations(a, b, own, layer) for a, b in pairs])
                if agreed:
                    now[-1] = [_both(x, y) for x, y in zip(agreed[offset], now[-1], strict=True)]
            if not all(relations for relations_of in now for relations in relations_of):
                break
            agreed, layers = now, layer + 1
        if layers == 1 or any(
            _OUTSIDE in relations for relations_of in agreed for relations in relations_of
        ):
            return "not alike"
        numbered = [
            (offset, number, relation)
            for offset, relations_of in enumerate(agreed)
            for number, relations in enumerate(relations_of)
            for relation in relations
            if relation[0] == "label"
        ]
        if not numbered:
            return "not numbered"
        names: list[list[str]] = [[] for _ in range(layers)]
        for layer in range(layers):
            for offset, number, (_, _, by) in numbered:
                name = self.refs[start + layer * period + offset][number][1]
                names[layer].append(_until(self.found.labels.get(str(name), str(name)), by))
        shown = 0 if _first_number(names[0]) <= _first_number(names[-1]) else layers - 1
        if not self._is_clear(agreed, start + shown * period):
            shown += 1 if shown == 0 else -1
        self._register(start, period, layers, agreed)
        places = {(o, n): name for name, (layer, o, n) in own.items() if layer == shown}
        passed = [
            name
            for (offset, number), name in sorted(places.items())
            if any(
                relation[:3] == ("own", offset, number) and relation[3]
                for relations_of in agreed
                for relations in relations_of
                for relation in relations
            )
        ]
        return Run(
            start=start,
            period=period,
            count=layers,
            shown=shown,
            first=", ".join(collapse(dict.fromkeys(names[shown]))),
            layers=collapse(dict.fromkeys(name for relations_of in names for name in relations_of)),
            passed=tuple(dict.fromkeys(passed)),
        )

    def _is_clear(self, agreed: Sequence[Sequence[set[_Relation]]], start: int) -> bool:
        """Whether each name that the layer reads is related in one way: a value that all layers
        read may also be the one passed to the first."""
        ways: dict[_Ref, set[_Relation]] = {}
        for offset, relations_of in enumerate(agreed):
            for ref, relations in zip(self.refs[start + offset], relations_of, strict=True):
                ways[ref] = ways.get(ref, relations) & relations
        return all(ways.values())

    def _relations(
        self, a: _Ref, b: _Ref, places: dict[str, tuple[int, int, int]], layer: int
    ) -> set[_Relation]:
        """Every relation of ``b``, a name in ``layer``, to ``a`` in the layer before."""
        (kind, first), (_, second) = a, b
        if kind == "number":
            return {("number", int(second) - int(first))}
        first, second = str(first), str(second)
        if kind == "label":
            return _label_relations(first, second)
        if first == second:
            return set() if first in places else {_SAME}
        place, after = places.get(first), places.get(second)
        if after is not None:
            # from the same number of layers back, or passed to the first layers from outside
            passed = place is None and after[0] == 0
            if not passed and place != (after[0] - 1, *after[1:]):
                return set()
            return {("own", *after[1:], layer - after[0])}
        labels = self.found.labels
        if first in labels and second in labels:
            return _label_relations(labels[first], labels[second])
        relations: set[_Relation] = {
            ("of", run, offset, index, later[1] - layer)
            for run, layer, offset, index in self.found.places.get(first, ())
            for later in self.found.places.get(second, ())
            if (later[0], *later[2:]) == (run, offset, index)
        }
        return relations or ({_OUTSIDE} if place is None else set())

    def _register(
        self, start: int, period: int, count: int, agreed: Sequence[Sequence[set[_Relation]]]
    ) -> None:
        """Note the places of the run's values, for later lists; values passed to the first layers
        count as values of layers before them."""
        run, places = self.found.num_runs, self.found.places
        self.found.num_runs += 1
        for index in range(start, start + period * count):
            layer, offset = divmod(index - start, period)
            for number, name in enumerate(self.steps[index].gives):
                places.setdefault(name, []).append((run, layer, offset, number))
        for offset, relations_of in enumerate(agreed):
            for at, relations in enumerate(relations_of):
                for relation in relations:
                    match relation:
                        case ("own", int() as made, int() as number, int() as back):
                            for layer in range(back):
                                name = str(self.refs[start + layer * period + offset][at][1])
                                places.setdefault(name, []).append(
                                    (run, layer - back, made, number)
                                )
                        case _:
                            pass


# -- one step --------------------------------------------------------------------------------------


def _key(step: Step) -> Hashable | None:
    """A key that is equal for steps with the same text except names; None for steps that are never
    part of a layer."""
    match step:
        case Compute(op=op):
            call = op.call
            if is_random(call):
                call = replace(call, kwargs=tuple(k for k in call.kwargs if k[0] != "op"))
            named = tuple(name is not None for name in step.results)
            text = call_text(call, ("_",) * len(step.operands))
            place = (op.source, without_numbers(op.module), step.phase, step.stage, step.once)
            specs = (step.operand_specs, step.result_specs)
            return (text, named, place, specs, step.flops, step.rule.kind, step.strategies)
        case Redistribute() if not step.tied:
            of = tuple(map(without_numbers, step.of))
            place = (step.source, step.phase, step.stage, step.once)
            return (step.moves, place, step.in_place, bool(step.bucket), of)
        case Accumulate():
            return (step.src, step.dst, step.stage, without_numbers(step.of))
        case _:
            return None


def _refs(step: Step) -> Iterator[_Ref]:
    """The names that layers may spell differently, in an order that equal keys share."""
    for name in step.reads:
        yield "value", name
    for label in step.labels:
        yield "label", label
    if step.op is not None and is_random(step.op.call):
        yield "number", dict(step.op.call.kwargs)["op"]


def _both(before: set[_Relation], now: set[_Relation]) -> set[_Relation]:
    """The relations that hold for all layers so far. A value from outside the run may come from its
    first layers from now on."""
    kept = before & now
    if _OUTSIDE in before:
        kept |= {relation for relation in now if relation[0] == "own"}
    return kept


# -- numbers of layers -----------------------------------------------------------------------------


@cache
def _path(label: str) -> tuple[str, tuple[int, ...]]:
    """("blocks.*.up", (3,)) of "blocks.3.up"."""
    return without_numbers(label), tuple(int(p) for p in label.split(".") if p.isdigit())


def _label_relations(first: str, second: str) -> set[_Relation]:
    if first == second:
        return {_SAME}
    (pattern, before), (other, after) = _path(first), _path(second)
    if pattern != other:
        return set()
    return {("label", pattern, tuple(y - x for x, y in zip(before, after, strict=True)))}


def _layer(label: str) -> str:
    """``blocks.3`` of "blocks.3.up": up to its first number; nothing where it has none."""
    parts = label.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


def _until(label: str, by: Hashable) -> str:
    """The label up to the first number that rises."""
    parts, numbers = label.split("."), iter(cast(tuple[int, ...], by))
    for index, part in enumerate(parts):
        if part.isdigit() and next(numbers):
            return ".".join(parts[: index + 1])
    raise AssertionError(label)


def _first_number(names: Sequence[str]) -> int:
    return int(names[0].rpartition(".")[2])
