"""Cuts a chain of units into consecutive parts, so that the dearest part is as cheap as possible.

    chain = Chain(own=(5, 1, 1, 1, 4), sent=(Sent(1, 0, (1,)), ...), ...)
    partition(chain, 2).bounds         # (0, 2, 5): units 0-1 and 2-4

Part k is units bounds[k] to bounds[k+1] - 1. It pays the cost of each of its units, shared costs of
its units once, and for each of its values that other parts read, once for each such part. Costs are
integers, so that equal layers tie exactly; ties go to the cut that sends least, then to even parts
that are cut between modules rather than within, then to earlier cuts.

The search is exact: dynamic programming over prefixes (the linear partition of Skiena, The
Algorithm Design Manual, 8.5), which counts a value once for any number of readers; if that makes a
difference (a skip over several parts), then branch and bound. Only the latter has a limit of nodes,
after which it returns the best cut so far.

Not here: the units (frontend/dataflow/units.py), their costs (unit_costs.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_NODES = 100_000
_WITHIN = 0.02  # of a part's squared cost: unevenness worth a cut within one more module
_FAR = np.iinfo(np.int64).max // 4  # the cost of a forbidden part

Table = NDArray[np.int64]
"""By first unit and end: [i, j] belongs to the part of units i to j - 1."""


@dataclass(frozen=True, slots=True)
class SharedCost:
    """A cost that each part with any of the ``units`` pays once; ascending."""

    cost: int
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that ``unit`` makes; its part pays ``cost`` for each other part with a reader."""

    cost: int
    unit: int
    readers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The costs of units, in femtoseconds, and their memory, in bytes.

    tied: paid once by each part that has some of the units but not all. barred: (u, v): a part that
    has unit u may not end right before unit v. depth: by unit except the first, the number of
    modules around both it and the previous one. bytes_held: of parameters and their state;
    bytes_kept: of a microbatch, for the backward; bytes_passing: the most temporary bytes that a
    unit needs at a time.
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
        """The cost of each part."""
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
    """``bounds``: first unit of each part, and the number of units. ``fits``: within memory."""

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
    """The cut of ``chain`` into ``num_parts``, each of a unit or more; None if there is none.

    Args:
        in_flight: by part, the number of microbatches that it keeps at a time (1 by default).
        memory_bytes: of a part. If no cut is within it, the fullest part is as small as possible.
    """
    num = len(chain.own)
    sent = _sent(chain)
    cost = _fixed(chain) + sent
    allowed = np.broadcast_to(_may_be(chain), (num_parts, num, num + 1)).copy()
    fits = True
    if memory_bytes is not None and chain.bytes_held:
        memory = _memory(chain, num_parts, in_flight)
        within = allowed & np.stack([table <= memory_bytes for table in memory])
        if _least([cost] * num_parts, within)[num_parts, num] >= _FAR:
            fits = False
            least = int(_least(memory, allowed)[num_parts, num])
            within = allowed & np.stack([table <= least for table in memory])
        allowed = within
    best = _least([cost] * num_parts, allowed)
    if best[num_parts, num] >= _FAR:
        return None
    bounds = _tidy(chain, cost, sent, allowed, int(best[num_parts, num]))
    if max(chain.costs(bounds)) > best[num_parts, num]:  # a value is sent to several parts
        bounds = _searched(chain, cost, allowed, bounds)
    return Partition(bounds=bounds, costs=chain.costs(bounds), fits=fits)


# -- tables of all parts ---------------------------------------------------------------------------


def _any(items: Sequence[SharedCost], num: int) -> Table:
    """The cost for each part of the items of which it has any unit."""
    table = np.zeros((num, num + 1), np.int64)
    for item in items:
        before = -1
        for unit in item.units:
            table[before + 1 : unit + 1, unit + 1 :] += item.cost
            before = unit
    return table


def _fixed(chain: Chain) -> Table:
    num = len(chain.own)
    sums = np.concatenate([[0], np.cumsum(np.array(chain.own, np.int64))])
    table = sums[None, :] - sums[:num, None] + _any((*chain.shared, *chain.tied), num)
    for item in chain.tied:  # all of the units: no sum is needed
        table[: item.units[0] + 1, item.units[-1] + 1 :] -= item.cost
    return table


def _sent(chain: Chain) -> Table:
    """The cost for each part of values that other parts read, as if one part read each."""
    num = len(chain.own)
    table = np.zeros((num, num + 1), np.int64)
    for item in chain.sent:
        first, last = min(item.unit, *item.readers), max(item.unit, *item.readers)
        table[: item.unit + 1, item.unit + 1 :] += item.cost
        table[: first + 1, last + 1 :] -= item.cost
    return table


def _may_be(chain: Chain) -> NDArray[np.bool_]:
    num = len(chain.own)
    table = np.arange(num)[:, None] < np.arange(num + 1)[None, :]
    for unit, end in chain.barred:
        table[: unit + 1, end] = False
    return table


def _memory(chain: Chain, num_parts: int, in_flight: Sequence[int]) -> list[Table]:
    """By part, its bytes."""
    num = len(chain.own)
    held, kept = _any(chain.bytes_held, num), _any(chain.bytes_kept, num)
    passing = np.zeros((num, num + 1), np.int64)
    for first in range(num):
        passing[first, first + 1 :] = np.maximum.accumulate(chain.bytes_passing[first:])
    flying = [in_flight[k] if k < len(in_flight) else 1 for k in range(num_parts)]
    tables = {count: held + passing + count * kept for count in set(flying)}
    return [tables[count] for count in flying]


# -- the search ------------------------------------------------------------------------------------


def _least_from(cost: Table, allowed: NDArray[np.bool_]) -> Table:
    """[k, j]: the least that the dearest of the last k parts of the units from j on costs."""
    num_parts, num = len(allowed), len(cost)
    starts = np.full((num_parts + 1, num + 1), _FAR)
    starts[0, num] = 0
    for k in range(1, num_parts + 1):
        parts = np.where(allowed[num_parts - k], cost, _FAR)
        starts[k, :num] = np.maximum(parts, starts[k - 1][None, :]).min(axis=1)
    return starts


def _least(cost: Sequence[Table], allowed: NDArray[np.bool_]) -> Table:
    """[k, j]: the least that the dearest of k parts of the first j units costs."""
    num_parts, num = len(allowed), allowed.shape[1]
    ends = np.full((num_parts + 1, num + 1), _FAR)
    ends[0, 0] = 0
    for k in range(1, num_parts + 1):
        parts = np.where(allowed[k - 1], cost[k - 1], _FAR)
        ends[k] = np.maximum(parts, ends[k - 1][:num, None]).min(axis=0)
    return ends


def _tidy(
    chain: Chain, cost: Table, sent: Table, allowed: NDArray[np.bool_], most: int
) -> tuple[int, ...]:
    """Among the cuts whose parts cost at most ``most``, the one that sends least; then even parts,
    and cuts between modules rather than within."""
    num_parts, num = len(allowed), len(cost)
    depth = np.array((*chain.depth, *[0] * (num + 1 - len(chain.depth))), np.float64)
    entered = np.concatenate([[0.0], depth])[:num]  # by first unit of a part
    uneven = (cost / max(most, 1)) ** 2 + _WITHIN * entered[:, None]
    terms = [sent.astype(np.float64), uneven]  # one after the other
    sums = [np.full((num_parts + 1, num + 1), np.inf) for _ in terms]
    for total in sums:
        total[0, 0] = 0.0
    came = np.zeros((num_parts + 1, num + 1), np.int64)
    for k in range(1, num_parts + 1):
        left = allowed[k - 1] & (cost <= most)
        for total, term in zip(sums, terms, strict=True):
            trial = np.where(left, total[k - 1][:num, None] + term, np.inf)
            total[k] = trial.min(axis=0)
            left = left & (trial <= total[k][None, :] * (1 + 1e-12))
        came[k] = left.argmax(axis=0)
    bounds = [num]
    for k in range(num_parts, 0, -1):
        bounds.append(int(came[k, bounds[-1]]))
    return tuple(reversed(bounds))


def _searched(
    chain: Chain, cost: Table, allowed: NDArray[np.bool_], known: tuple[int, ...]
) -> tuple[int, ...]:
    """Branch and bound: the tables give lower bounds of the parts so far, and of those to come."""
    num_parts, num = len(allowed), len(cost)
    starts = _least_from(cost, allowed)
    best, least = known, max(chain.costs(known))
    nodes = 0
    waiting: list[tuple[tuple[int, ...], int]] = [((0,), 0)]
    while waiting and nodes < _MAX_NODES:
        bounds, most = waiting.pop()
        nodes += 1
        part = len(bounds) - 1
        if part == num_parts:
            if bounds[-1] == num and (dearest := max(chain.costs(bounds))) < least:
                best, least = bounds, dearest
            continue
        first = bounds[-1]
        ends = [
            (max(most, int(cost[first, end]), int(starts[num_parts - part - 1, end])), end)
            for end in range(first + 1, num + 1)
            if allowed[part, first, end]
        ]
        for bound, end in sorted(ends, reverse=True):  # the most promising first
            if bound < least:
                waiting.append(((*bounds, end), max(most, int(cost[first, end]))))
    return best
