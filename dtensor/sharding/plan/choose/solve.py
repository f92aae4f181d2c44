"""The exact choice on one axis: an integer program over one strategy per op.

A `Node` chooses one of its options; an option writes values at placements, reads values at
placements, and costs time. A value that is read at another placement than it is written at must
be converted, once for all its readers; from a replicated copy that some reader asked for, another
may cut its slice. The sum of all prices is least over all choices: `solve` is exact (HiGHS through
scipy.optimize.milp, gap 0), and ties are broken by the order of the options.

    minimize  sum cost[n,k] x[n,k] + sum price[v,p,q] z[v,p,q]
    one option per node; a reader of v at q needs v written at q or converted to q

Nodes that share a `group` (the same op of repeated layers) share one variable: repeated layers
are solved once. Tests compare with an enumeration of all choices (tests/sharding/enumerated.py).
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# (scipy has no types: the one call into it is checked by the tests)

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

from dtensor.sharding.spec.placements import REPLICATE, Placement

At = tuple[str, Placement]  # a value at a placement
Price = Callable[[str, Placement, Placement], float]  # seconds, infinity where impossible

_NANOSECONDS = 1e9
_TIE = 1e-4  # nanoseconds per position in the list of options: only ever breaks ties


@dataclass(frozen=True, slots=True)
class Option:
    reads: tuple[At, ...]
    writes: tuple[At, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Node:
    """``group``: nodes of one group have alike options and make one choice."""

    name: str
    options: tuple[Option, ...]
    group: Hashable
    kind: Literal["op", "input", "result"] = "op"


class Infeasible(Exception):
    """No choice of options can be connected; the planner finds out which op is at fault."""


@dataclass(frozen=True, slots=True)
class Solution:
    chosen: Mapping[str, int]  # node name to the index of its option
    num_variables: int


def solve(nodes: Sequence[Node], price: Price) -> Solution:
    """The cheapest choice. Raises Infeasible.

    Where groups cannot agree (a first layer whose input no other layer has), each node of them
    chooses for itself.
    """
    if not all(node.options for node in nodes):
        raise Infeasible
    try:
        return _solve(nodes, price)
    except Infeasible:
        alone = [replace(node, group=node.name) for node in nodes]
        if len(_groups(nodes)) == len(nodes):
            raise
    return _solve(alone, price)


def _solve(nodes: Sequence[Node], price: Price) -> Solution:
    # Not at the top: it takes 0.3 s to load, which an actor never needs.
    from scipy.optimize import Bounds, milp

    groups = _groups(nodes)
    index: dict[tuple[int, int], int] = {}
    costs: list[float] = []
    for key, members in enumerate(groups):
        for k in range(len(members[0].options)):
            index[key, k] = len(costs)
            total = sum(member.options[k].seconds for member in members)
            costs.append(total * _NANOSECONDS + _TIE * k * len(members))
    num_choices = len(costs)
    rows = _Rows()
    for key, members in enumerate(groups):
        rows.add({index[key, k]: 1.0 for k in range(len(members[0].options))}, 1.0, 1.0)
    for value_class, count in _value_classes(nodes, groups, price).items():
        _connect(value_class, count, index, costs, rows, price)
    integrality = np.array([1] * num_choices + [0] * (len(costs) - num_choices))
    outcome = milp(
        np.array(costs),
        integrality=integrality,
        bounds=Bounds(0.0, 1.0),
        constraints=rows.constraint(len(costs)),
        options={"mip_rel_gap": 0.0, "presolve": True},
    )
    values = cast("np.ndarray[Any, np.dtype[np.float64]] | None", outcome.x)  # pyright: ignore[reportUnknownMemberType]
    if values is None:
        raise Infeasible
    chosen: dict[str, int] = {}
    for key, members in enumerate(groups):
        weights = [float(values[index[key, k]]) for k in range(len(members[0].options))]
        best = int(np.argmax(weights))
        chosen.update({member.name: best for member in members})
    return Solution(chosen, num_choices)


def _groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes by group; a group whose members are not alike falls apart into its members."""
    by_key: dict[Hashable, list[Node]] = {}
    for node in nodes:
        shape = tuple((len(o.reads), len(o.writes), _places(o)) for o in node.options)
        by_key.setdefault((node.group, shape), []).append(node)
    return list(by_key.values())


def _places(option: Option) -> tuple[Placement, ...]:
    return tuple(p for _, p in (*option.reads, *option.writes))


Use = tuple[int, int, Placement]  # the number of a group, of its option, and where a value lies


@dataclass(frozen=True, slots=True)
class _ValueClass:
    """Values written and read alike, by group, option and placement, and priced alike."""

    value: str  # one of them, for prices
    written: tuple[Use, ...]
    read: tuple[tuple[Use, ...], ...]  # one tuple per reader


def _value_classes(
    nodes: Sequence[Node], groups: Sequence[Sequence[Node]], price: Price
) -> dict[_ValueClass, int]:
    """Each class and how many values it has.

    There are as many values as ops in all layers: uses are numbered, so that classes are told
    apart by numbers.
    """
    numbers: dict[Use, int] = {}
    written: dict[str, dict[int, None]] = {}
    read: dict[str, dict[str, dict[int, None]]] = {}
    alike: dict[str, list[list[int]]] = {}  # by node: of its options, that of its group
    for key, members in enumerate(groups):
        uses = [
            [numbers.setdefault((key, k, p), len(numbers)) for p in _places(option)]
            for k, option in enumerate(members[0].options)
        ]
        alike.update(dict.fromkeys((member.name for member in members), uses))
    for node in nodes:
        for option, uses in zip(node.options, alike[node.name], strict=True):
            num = len(option.reads)
            for (value, _), use in zip(option.writes, uses[num:], strict=True):
                written.setdefault(value, {})[use] = None
            for (value, _), use in zip(option.reads, uses[:num], strict=True):
                read.setdefault(value, {}).setdefault(node.name, {})[use] = None
    known = list(numbers)
    kinds: dict[object, tuple[tuple[Use, ...], tuple[tuple[Use, ...], ...], list[_Pair]]] = {}
    counts: dict[object, tuple[_ValueClass, int]] = {}
    for value, readers in read.items():
        kind = (tuple(written[value]), *dict.fromkeys(map(tuple, readers.values())))
        if kind not in kinds:
            first, *others = (tuple(known[use] for use in uses) for uses in kind)
            kinds[kind] = (first, tuple(others), _pairs(first, others))
        writers, uses, pairs = kinds[kind]
        priced = (kind, tuple(price(value, p, q) for p, q in pairs))
        seen = counts.get(priced)
        value_class = seen[0] if seen else _ValueClass(value, writers, uses)
        counts[priced] = (value_class, 1 + (seen[1] if seen else 0))
    return dict(counts.values())


_Pair = tuple[Placement, Placement]


def _pairs(written: Sequence[Use], read: Sequence[Sequence[Use]]) -> list[_Pair]:
    """The conversions that a value may need."""
    sources = dict.fromkeys((*(p for _, _, p in written), REPLICATE))
    targets = dict.fromkeys((*(p for uses in read for _, _, p in uses), REPLICATE))
    return [(p, q) for p in sources for q in targets if p != q]


def _connect(
    item: _ValueClass,
    count: int,
    index: Mapping[tuple[int, int], int],
    costs: list[float],
    rows: _Rows,
    price: Price,
) -> None:
    native: dict[Placement, dict[int, float]] = {}
    for key, k, placement in item.written:
        native.setdefault(placement, {})[index[key, k]] = 1.0
    needed = dict.fromkeys(p for reader in item.read for _, _, p in reader)
    if set(native) == set(needed) and len(native) == 1:
        return
    converted: dict[tuple[Placement, Placement], int] = {}
    for p, q in _pairs(item.written, item.read):
        seconds = price(item.value, p, q)
        if math.isinf(seconds):
            continue
        converted[p, q] = len(costs)
        costs.append(seconds * _NANOSECONDS * count)
    for (p, _), column in converted.items():
        row = {column: 1.0}
        for source, weight in native.get(p, {}).items():
            row[source] = row.get(source, 0.0) - weight
        if p == REPLICATE:
            for (other, target), via in converted.items():
                if target == REPLICATE and other != REPLICATE:
                    row[via] = row.get(via, 0.0) - 1.0
        rows.add(row, -math.inf, 0.0)
    for reader in item.read:
        for q in dict.fromkeys(p for _, _, p in reader):
            row: dict[int, float] = {}
            for key, k, p in reader:
                if p == q:
                    row[index[key, k]] = 1.0
            for source, weight in native.get(q, {}).items():
                row[source] = row.get(source, 0.0) - weight
            for (_, target), column in converted.items():
                if target == q:
                    row[column] = row.get(column, 0.0) - 1.0
            rows.add(row, -math.inf, 0.0)


class _Rows:
    """Sparse rows of lower <= A x <= upper."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, row: Mapping[int, float], lower: float, upper: float) -> None:
        for column, weight in row.items():
            self.rows.append(len(self.lower))
            self.columns.append(column)
            self.data.append(weight)
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, num_columns: int) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        shape = (len(self.lower), num_columns)
        matrix = csr_array((self.data, (self.rows, self.columns)), shape=shape)
        return LinearConstraint(matrix, np.array(self.lower), np.array(self.upper))  # pyright: ignore[reportArgumentType]
