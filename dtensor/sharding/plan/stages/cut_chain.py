"""Cuts a chain of units into consecutive parts such that the most expensive part costs least.

    chain = Chain(own=(5, 1, 1, 1, 4), sent=(Sent(1, 0, (1,)), ...), ...)
    partition(chain, 2).bounds         # (0, 2, 5): units 0-1 and 2-4

Part k has the units bounds[k] to bounds[k+1] - 1. Its cost is the sum of its units' costs, shared
costs once, and each value that it sends, once for each other part that reads it. Ties go to the cut
that sends least, then to even parts, then to cuts between modules, then to earlier cuts. The search
is dynamic programming over prefixes (Skiena, The Algorithm Design Manual, 8.5), which counts a sent
value once; if some value is sent to several parts, branch and bound follows, with a node limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_NODES = 100_000
_MODULE_PENALTY = 0.02  # for each module that a cut splits, in squared relative cost of a part
_FORBIDDEN_COST = np.iinfo(np.int64).max // 4  # the cost of a forbidden part

Table = NDArray[np.int64]
"""A figure for each possible part: entry [i, j] is for the part with units i to j - 1."""


@dataclass(frozen=True, slots=True)
class SharedCost:
    """A cost that each part with any of the ``units`` pays once. ``units`` are ascending."""

    cost: int
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that ``unit`` makes. Its part pays ``cost`` for each other part with a reader."""

    cost: int
    unit: int
    readers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The costs of units in femtoseconds, integers so that equal layers tie exactly, and their
    memory in bytes.

    own: the cost of each unit. shared: costs that several units share.
    tied: costs paid once by each part that has some of the units, but not all.
    barred: pairs (u, v): a part that has unit u must not end right before unit v.
    depth: for each unit except the first, the number of modules around both it and the unit before.
    bytes_held: parameters and their state. bytes_kept: values that one microbatch keeps for its
    backward. bytes_passing: for each unit, the most temporary bytes that it needs at a time.
    """

    own: tuple[int, ...]
    shared: tuple[SharedCost, ...] = ()
    sent: tuple[Sent, ...] = ()
    tied: tuple[SharedCost, ...] = ()
    barred: tuple[tuple[int, int], ...] = ()
    depth: tuple[int, ...] = ()
    bytes_held: tuple[SharedCost, ...] = ()
    bytes_kept: tuple[SharedCost, ...] = ()
    bytes_passing: tuple[int, ...] = ()

    def costs(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return the cost of each part of the cut ``bounds``: the first unit of each part, then the
        number of units."""
        part = {u: k for k in range(len(bounds) - 1) for u in range(bounds[k], bounds[k + 1])}
        costs = [sum(self.own[i:j]) for i, j in itertools.pairwise(bounds)]
        for item in self.shared:
            for k in {part[u] for u in item.units}:
                costs[k] += item.cost
        for item in self.tied:
            parts = {part[u] for u in item.units}
            for k in parts if len(parts) > 1 else ():
                costs[k] += item.cost
        for item in self.sent:
            others = {part[u] for u in item.readers} - {part[item.unit]}
            costs[part[item.unit]] += item.cost * len(others)
        return tuple(costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A cut of a chain. ``bounds``: the first unit of each part, then the number of units;
    ``fits``: whether all parts are within the memory limit."""

    bounds: tuple[int, ...]
    costs: tuple[int, ...]
    fits: bool


def partition(
    chain: Chain,
    num_parts: int,
    *,
    in_flight: Sequence[int] = (),
    memory_bytes: float | None = None,
) -> Partition | None:
    """Return the cheapest cut of ``chain`` into ``num_parts`` parts of at least one unit; None if
    there is none.

    Args:
        in_flight: the number of microbatches that each part keeps at a time (1 by default).
        memory_bytes: the limit of each part. If no cut is within it, the cheapest of the cuts with
            the smallest possible fullest part is returned.
    """
    num = len(chain.own)
    sent = _sent_costs(chain)
    cost = _unit_costs(chain) + sent
    allowed = np.broadcast_to(_allowed_parts(chain), (num_parts, num, num + 1)).copy()
    fits = True
    if memory_bytes is not None and chain.bytes_held:
        memory = _memory(chain, num_parts, in_flight)
        within_limit = allowed & np.stack([table <= memory_bytes for table in memory])
        if _least_maximum([cost] * num_parts, within_limit)[num_parts, num] >= _FORBIDDEN_COST:
            fits = False
            least = int(_least_maximum(memory, allowed)[num_parts, num])
            within_limit = allowed & np.stack([table <= least for table in memory])
        allowed = within_limit
    best = _least_maximum([cost] * num_parts, allowed)
    if best[num_parts, num] >= _FORBIDDEN_COST:
        return None
    bounds = _best_of_ties(chain, cost, sent, allowed, int(best[num_parts, num]))
    if max(chain.costs(bounds)) > best[num_parts, num]:  # a value is sent to several parts
        bounds = _branch_and_bound(chain, cost, allowed, bounds)
    return Partition(bounds=bounds, costs=chain.costs(bounds), fits=fits)


# -- tables of all parts ---------------------------------------------------------------------------


def _shared_costs(items: Sequence[SharedCost], num: int) -> Table:
    """Return the table of shared costs: each part pays an item once if it has one of its units."""
    table = np.zeros((num, num + 1), np.int64)
    for item in items:
        previous = -1
        for unit in item.units:  # charge the parts in which this is the first unit of the item
            table[previous + 1 : unit + 1, unit + 1 :] += item.cost
            previous = unit
    return table


def _unit_costs(chain: Chain) -> Table:
    """Return the cost of each part, except for sending."""
    num = len(chain.own)
    sums = np.concatenate([[0], np.cumsum(np.array(chain.own, np.int64))])
    table = sums[None, :] - sums[:num, None] + _shared_costs((*chain.shared, *chain.tied), num)
    for item in chain.tied:  # a part with all units of a tied cost does not pay it
        table[: item.units[0] + 1, item.units[-1] + 1 :] -= item.cost
    return table


def _sent_costs(chain: Chain) -> Table:
    """Return the cost of sending for each part. A value counts once for all outside readers."""
    num = len(chain.own)
    table = np.zeros((num, num + 1), np.int64)
    for item in chain.sent:
        # charge the parts that have the sender, except those that have all readers too
        first, last = min(item.unit, *item.readers), max(item.unit, *item.readers)
        table[: item.unit + 1, item.unit + 1 :] += item.cost
        table[: first + 1, last + 1 :] -= item.cost
    return table


def _allowed_parts(chain: Chain) -> NDArray[np.bool_]:
    """Return which parts are allowed: not empty, and not barred."""
    num = len(chain.own)
    table = np.arange(num)[:, None] < np.arange(num + 1)[None, :]
    for unit, end in chain.barred:
        table[: unit + 1, end] = False
    return table


def _memory(chain: Chain, num_parts: int, in_flight: Sequence[int]) -> list[Table]:
    """Return, for each position in the pipeline, the bytes of each possible part there: its state,
    temporary bytes, and what it saves for the backward of the microbatches in flight."""
    num = len(chain.own)
    state, saved = _shared_costs(chain.bytes_held, num), _shared_costs(chain.bytes_kept, num)
    passing = np.zeros((num, num + 1), np.int64)
    for first in range(num):
        passing[first, first + 1 :] = np.maximum.accumulate(chain.bytes_passing[first:])
    counts = [in_flight[k] if k < len(in_flight) else 1 for k in range(num_parts)]
    tables = {count: state + passing + count * saved for count in set(counts)}
    return [tables[count] for count in counts]


# -- the search ------------------------------------------------------------------------------------


def _least_maximum_of_suffixes(cost: Table, allowed: NDArray[np.bool_]) -> Table:
    """Return table[k, j]: the least possible maximum cost if the units from j on are cut into the
    last k parts."""
    num_parts, num = len(allowed), len(cost)
    table = np.full((num_parts + 1, num + 1), _FORBIDDEN_COST)
    table[0, num] = 0
    for k in range(1, num_parts + 1):
        parts = np.where(allowed[num_parts - k], cost, _FORBIDDEN_COST)
        table[k, :num] = np.maximum(parts, table[k - 1][None, :]).min(axis=1)
    return table


def _least_maximum(cost: Sequence[Table], allowed: NDArray[np.bool_]) -> Table:
    """Return table[k, j]: the least possible maximum cost if the first j units are cut into k
    parts. ``cost``: a table for each part."""
    num_parts, num = len(allowed), allowed.shape[1]
    table = np.full((num_parts + 1, num + 1), _FORBIDDEN_COST)
    table[0, 0] = 0
    for k in range(1, num_parts + 1):
        parts = np.where(allowed[k - 1], cost[k - 1], _FORBIDDEN_COST)
        table[k] = np.maximum(parts, table[k - 1][:num, None]).min(axis=0)
    return table


def _best_of_ties(
    chain: Chain, cost: Table, sent: Table, allowed: NDArray[np.bool_], max_cost: int
) -> tuple[int, ...]:
    """Return the bounds of the best cut whose parts cost at most ``max_cost``. The best cut sends
    least; ties go to even parts and to cuts between modules rather than within modules."""
    num_parts, num = len(allowed), len(cost)
    depth = np.array((*chain.depth, *[0] * (num + 1 - len(chain.depth))), np.float64)
    modules_cut = np.concatenate([[0.0], depth])[:num]  # by first unit of a part
    uneven = (cost / max(max_cost, 1)) ** 2 + _MODULE_PENALTY * modules_cut[:, None]
    terms = [sent.astype(np.float64), uneven]  # minimized in this order
    sums = [np.full((num_parts + 1, num + 1), np.inf) for _ in terms]
    for total in sums:
        total[0, 0] = 0.0
    first_unit = np.zeros((num_parts + 1, num + 1), np.int64)  # of part k - 1, if it ends at j
    for k in range(1, num_parts + 1):
        candidates = allowed[k - 1] & (cost <= max_cost)
        for total, term in zip(sums, terms, strict=True):
            trial = np.where(candidates, total[k - 1][:num, None] + term, np.inf)
            total[k] = trial.min(axis=0)
            candidates = candidates & (trial <= total[k][None, :] * (1 + 1e-12))
        first_unit[k] = candidates.argmax(axis=0)
    bounds = [num]
    for k in range(num_parts, 0, -1):
        bounds.append(int(first_unit[k, bounds[-1]]))
    return tuple(reversed(bounds))


def _branch_and_bound(
    chain: Chain, cost: Table, allowed: NDArray[np.bool_], initial: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the cheapest cut found in `_MAX_NODES` nodes, starting from the cut ``initial``. The
    tables, which count a sent value once, give lower bounds for the parts of a branch."""
    num_parts, num = len(allowed), len(cost)
    suffixes = _least_maximum_of_suffixes(cost, allowed)
    best, least = initial, max(chain.costs(initial))
    nodes = 0
    pending: list[tuple[tuple[int, ...], int]] = [((0,), 0)]  # bounds so far, their highest cost
    while pending and nodes < _MAX_NODES:
        bounds, max_cost = pending.pop()
        nodes += 1
        part = len(bounds) - 1
        if part == num_parts:
            if bounds[-1] == num and (highest := max(chain.costs(bounds))) < least:
                best, least = bounds, highest
            continue
        first = bounds[-1]
        ends = [  # (lower bound of the highest cost, end of the next part)
            (max(max_cost, int(cost[first, end]), int(suffixes[num_parts - part - 1, end])), end)
            for end in range(first + 1, num + 1)
            if allowed[part, first, end]
        ]
        for bound, end in sorted(ends, reverse=True):  # the lowest bound is popped first
            if bound < least:
                pending.append(((*bounds, end), max(max_cost, int(cost[first, end]))))
    return best
