"""The exact choice on one axis: an integer program that chooses one option for each node.

    minimize  sum cost[n,k] x[n,k] + sum price[v,p,q] z[v,p,q]
    one option k per node n; a reader of v at q needs v written at q or converted to q

An option reads and writes values at placements, and costs seconds. A value that is read at another
placement than it is written is converted, once for all readers; a slice may also be cut from a copy
that was gathered for another reader. The result is optimal (HiGHS, gap 0); ties go to the first
option. The nodes of a `group` (the same op of repeated layers) share one variable.
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

ValueAt = tuple[str, Placement]
Price = Callable[[str, Placement, Placement], float]
"""The seconds of converting a value from one placement to another; infinity if impossible."""

_NANOSECONDS = 1e9
_TIE_BREAK = 1e-4  # nanoseconds per position in the list of options


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of a node: the placements at which it reads and writes values, and its cost."""

    reads: tuple[ValueAt, ...]
    writes: tuple[ValueAt, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Node:
    """An op, input or result, which chooses one of its options. Nodes of one ``group`` have
    corresponding options and make the same choice."""

    name: str
    options: tuple[Option, ...]
    group: Hashable
    kind: Literal["op", "input", "result"] = "op"


class Infeasible(Exception):
    """No choice of options connects the nodes. `infeasible` finds the op at fault."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The cheapest choice. ``chosen``: name of a node -> index of its option."""

    chosen: Mapping[str, int]
    num_variables: int


def solve(nodes: Sequence[Node], price: Price) -> Solution:
    """Return the cheapest choice. Raises Infeasible if there is none. If there is no choice that is
    the same for all nodes of a group (the first layer may have an input that the other layers
    lack), each node chooses separately."""
    if not all(node.options for node in nodes):
        raise Infeasible
    try:
        return _solve(nodes, price)
    except Infeasible:
        ungrouped = [replace(node, group=node.name) for node in nodes]
        if len(_groups(nodes)) == len(nodes):
            raise
    return _solve(ungrouped, price)


def _solve(nodes: Sequence[Node], price: Price) -> Solution:
    """Return the cheapest choice in which the nodes of a group choose the same option."""
    # Imported here because it takes 0.3 s to load, and actors never need it.
    from scipy.optimize import Bounds, milp

    groups = _groups(nodes)
    index: dict[tuple[int, int], int] = {}  # (group, option) -> its variable: 1 if chosen, else 0
    costs: list[float] = []  # of each variable; `_connect` appends the costs of conversions
    for key, members in enumerate(groups):
        for k in range(len(members[0].options)):
            index[key, k] = len(costs)
            total = sum(member.options[k].seconds for member in members)
            costs.append(total * _NANOSECONDS + _TIE_BREAK * k * len(members))
    num_choices = len(costs)
    rows = _Rows()
    for key, members in enumerate(groups):  # each group chooses exactly one option
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
    """Return the nodes of each group. Nodes whose options have other placements are separated."""
    by_key: dict[Hashable, list[Node]] = {}
    for node in nodes:
        shape = tuple((len(o.reads), len(o.writes), _placements(o)) for o in node.options)
        by_key.setdefault((node.group, shape), []).append(node)
    return list(by_key.values())


def _placements(option: Option) -> tuple[Placement, ...]:
    return tuple(p for _, p in (*option.reads, *option.writes))


Use = tuple[int, int, Placement]
"""A read or write of a value: index of the group, index of its option, placement."""


@dataclass(frozen=True, slots=True)
class _ValueClass:
    """Values with the same uses and the same prices of conversions; they share variables."""

    value: str  # one of the values, for prices
    written: tuple[Use, ...]
    read: tuple[tuple[Use, ...], ...]  # one tuple per reader


def _value_classes(
    nodes: Sequence[Node], groups: Sequence[Sequence[Node]], price: Price
) -> dict[_ValueClass, int]:
    """Return each class of values, with the number of its values. A deep model has many values, so
    uses are numbered: comparing numbers is fast."""
    numbers: dict[Use, int] = {}
    written: dict[str, dict[int, None]] = {}  # value -> numbers of its writes
    read: dict[str, dict[str, dict[int, None]]] = {}  # value -> reader -> numbers of its reads
    uses_of_node: dict[str, list[list[int]]] = {}  # node -> option -> numbers of its uses
    for key, members in enumerate(groups):
        uses = [
            [numbers.setdefault((key, k, p), len(numbers)) for p in _placements(option)]
            for k, option in enumerate(members[0].options)
        ]
        uses_of_node.update(dict.fromkeys((member.name for member in members), uses))
    for node in nodes:
        for option, uses in zip(node.options, uses_of_node[node.name], strict=True):
            num = len(option.reads)
            for (value, _), use in zip(option.writes, uses[num:], strict=True):
                written.setdefault(value, {})[use] = None
            for (value, _), use in zip(option.reads, uses[:num], strict=True):
                read.setdefault(value, {}).setdefault(node.name, {})[use] = None
    uses_by_number = list(numbers)
    kinds: dict[object, tuple[tuple[Use, ...], tuple[tuple[Use, ...], ...], list[_Pair]]] = {}
    counts: dict[object, tuple[_ValueClass, int]] = {}
    for value, readers in read.items():
        kind = (tuple(written[value]), *dict.fromkeys(map(tuple, readers.values())))
        if kind not in kinds:
            writes, *reads = (tuple(uses_by_number[use] for use in uses) for uses in kind)
            kinds[kind] = (writes, tuple(reads), _pairs(writes, reads))
        writers, uses, pairs = kinds[kind]
        key = (kind, tuple(price(value, p, q) for p, q in pairs))
        entry = counts.get(key)
        value_class = entry[0] if entry else _ValueClass(value, writers, uses)
        counts[key] = (value_class, 1 + (entry[1] if entry else 0))
    return dict(counts.values())


_Pair = tuple[Placement, Placement]


def _pairs(written: Sequence[Use], read: Sequence[Sequence[Use]]) -> list[_Pair]:
    """Return the conversions (from, to) that a value may need: from each written placement, or a
    replicated copy, to each read placement, or a replicated copy."""
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
    """Add the conversion variables of a value class to ``costs``, and its constraints to ``rows``.
    ``count``: the number of values of the class; ``index``: (group, option) -> its variable."""
    writers: dict[Placement, dict[int, float]] = {}  # placement -> variables of options
    for key, k, placement in item.written:
        writers.setdefault(placement, {})[index[key, k]] = 1.0
    read_placements = dict.fromkeys(p for reader in item.read for _, _, p in reader)
    if set(writers) == set(read_placements) and len(writers) == 1:
        return
    converted: dict[tuple[Placement, Placement], int] = {}  # conversion -> its variable
    for p, q in _pairs(item.written, item.read):
        seconds = price(item.value, p, q)
        if math.isinf(seconds):
            continue
        converted[p, q] = len(costs)
        costs.append(seconds * _NANOSECONDS * count)
    for (p, _), column in converted.items():  # a conversion from p needs the value at p
        row = {column: 1.0}
        for variable, weight in writers.get(p, {}).items():
            row[variable] = row.get(variable, 0.0) - weight
        if p == REPLICATE:
            for (source, target), gather in converted.items():
                if target == REPLICATE and source != REPLICATE:
                    row[gather] = row.get(gather, 0.0) - 1.0
        rows.add(row, -math.inf, 0.0)
    for reader in item.read:  # a reader at q needs the value at q
        for q in dict.fromkeys(p for _, _, p in reader):
            row: dict[int, float] = {}
            for key, k, p in reader:
                if p == q:
                    row[index[key, k]] = 1.0
            for variable, weight in writers.get(q, {}).items():
                row[variable] = row.get(variable, 0.0) - weight
            for (_, target), column in converted.items():
                if target == q:
                    row[column] = row.get(column, 0.0) - 1.0
            rows.add(row, -math.inf, 0.0)


class _Rows:
    """The constraints lower <= A x <= upper, with a sparse matrix A: ``data[i]`` is the entry in
    ``rows[i]`` and ``columns[i]``."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, row: Mapping[int, float], lower: float, upper: float) -> None:
        """Add the constraint lower <= row x <= upper; ``row``: variable -> its coefficient."""
        for column, weight in row.items():
            self.rows.append(len(self.lower))
            self.columns.append(column)
            self.data.append(weight)
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, num_columns: int) -> LinearConstraint:
        """Return the constraints on ``num_columns`` variables for scipy's solver."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        shape = (len(self.lower), num_columns)
        matrix = csr_array((self.data, (self.rows, self.columns)), shape=shape)
        return LinearConstraint(matrix, np.array(self.lower), np.array(self.upper))  # pyright: ignore[reportArgumentType]
