"""Placements: how one tensor lies along *one* axis of a mesh.

    Replicate()                  every rank of the axis holds the whole
    Shard(0)                     the dim is cut into ceil blocks, as torch.chunk cuts
    Shard(0, blocks=3)           3 equal blocks end to end, each cut on its own (fused qkv)
    Shard(0, blocks=(64,32,32))  blocks of these sizes, each cut on its own
    Shard(0, unit=16)            cuts only at multiples of 16 (whole heads)
    Partial("sum")               the value is the sum (max, min) over the ranks of the axis
    Partial("softmax")           [..., 3]: maxima, sums of exp(x - maximum) and sums, of parts of x

A Shard maps a coordinate on the axis to an *index set* on the global dim: a tuple of half-open
intervals (`index_sets`). A tensor's shard on a rank is the intersection over the axes, so each
axis can be removed alone by one collective. Two axes on one dim: the minor one's blocks are the
pieces of the major one (`pieces`).

Nothing here knows tensors or meshes; see spec.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Never, Protocol, cast

from dtensor.errors import PlanningError, checked_call
from dtensor.numerics import REDUCTIONS, ReduceOp, reductions_listed

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __init__(self, *axis: Never) -> None:
        if axis:
            from dtensor.misspelled import no_axis  # seldom needed

            raise no_axis("Replicate", axis)

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard:
    """The dim is split over the axis: rank i of it holds the i-th piece.

        >>> def held(placement, rows=12):
        ...     x = dt.distribute(torch.arange(rows), dt.Mesh(tp=2), tp=placement)
        ...     return [shard.tolist() for shard in x.local_tensors()]
        >>> held(dt.Shard(0))
        [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]

    With ``blocks`` the dim is that many blocks end to end, and each is split on its own. The rows
    of a fused qkv are such: rank 0 wants the first half of q, of k and of v.

        >>> held(dt.Shard(0, blocks=3))
        [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
        >>> held(dt.Shard(0, blocks=(8, 2, 2)))    # fewer heads in k and v than in q
        [[0, 1, 2, 3, 8, 10], [4, 5, 6, 7, 9, 11]]

    With ``unit`` it is cut at multiples of that many elements alone: heads stay whole. Three heads
    of 4 over two ranks are two and one.

        >>> held(dt.Shard(0, unit=4))
        [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]

    What does not divide is cut as `torch.chunk` cuts, and ranks at the end may hold nothing.

        >>> held(dt.Shard(0), rows=5), held(dt.Shard(0), rows=1)
        ([[0, 1, 2], [3, 4]], [[0], []])

    Args:
        dim: of the tensor; -1 is the last one.
        blocks: a number of equal blocks, or their sizes, which add up to the dim's.
        unit: each block is a multiple of it.

    Raises PlanningError for what is no whole number of at least 1; that it does not fit a tensor is
    said where it is given one.
    """

    dim: int
    blocks: int | tuple[int, ...] = 1
    unit: int = 1

    def __post_init__(self) -> None:
        blocks = self.blocks
        if type(self.dim) is type(blocks) is type(self.unit) is int and blocks == self.unit == 1:
            return  # most are so, and planning makes many
        if isinstance(blocks, Sequence) and not isinstance(blocks, str):
            blocks = tuple(blocks)
            object.__setattr__(self, "blocks", blocks)
        check_split(self, self.dim, blocks, self.unit)

    def __repr__(self) -> str:
        return f"Shard({', '.join((repr(self.dim), *options_of(self)))})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction of what the ranks of the axis hold: a result that waits for its
    all_reduce, which is done where something needs it. A mean is a sum / count.

    Args:
        op: "sum", "max", "min" or "softmax", or the name of a registered `Reduction`;
            PlanningError for another.

    "softmax" is of float32 or float64 values ``[..., 3]``, whose last dim stays whole: for rows of
    some x that is split over the axis, the maximum, the sum of exp(x - maximum), and a plain sum.
    """

    op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise PlanningError(f"Partial({self.op!r}): the op is {reductions_listed()}")

    def __repr__(self) -> str:
        return f'Partial("{self.op}")'


Placement = Replicate | Shard | Partial
"""How a tensor lies along one axis."""
REPLICATE = Replicate()
PARTIAL = Partial("sum")


@checked_call
def Row(*, blocks: int | Sequence[int] = 1, unit: int = 1) -> Shard:
    """``Shard(0)``: a matrix split into blocks of rows. ``blocks`` and ``unit`` are those of
    `Shard`, whose PlanningError it raises."""
    return Shard(0, blocks, unit)  # type: ignore[arg-type]


@checked_call
def Column(*, blocks: int | Sequence[int] = 1, unit: int = 1) -> Shard:
    """``Shard(-1)``: a matrix split into blocks of columns. ``blocks`` and ``unit`` are those of
    `Shard`, whose PlanningError it raises."""
    return Shard(-1, blocks, unit)  # type: ignore[arg-type]


def check_split(stated: object, dim: object, blocks: object, unit: object) -> None:
    """PlanningError unless ``stated`` has whole numbers for these, blocks and unit at least 1."""
    sizes = [blocks]
    if isinstance(blocks, list | tuple):
        sizes = list(cast(Sequence[object], blocks))
    if not isinstance(dim, int):
        raise PlanningError(f"{stated!r}: a dim is a whole number; fix: dt.Shard(0)")
    if not sizes or not all(isinstance(n, int) and n >= 1 for n in (*sizes, unit)):
        raise PlanningError(
            f"{stated!r}: blocks and unit are whole numbers of at least 1; fix: blocks=3, unit=16"
        )


def block_sizes(blocks: int | tuple[int, ...], size: int) -> tuple[int, ...]:
    """The sizes of the blocks of a dim; PlanningError where they do not fill it."""
    if isinstance(blocks, tuple):
        if sum(blocks) != size:
            raise PlanningError(
                f"blocks={blocks} add up to {sum(blocks)}, but the dim has size {size}"
            )
        return blocks
    if size % blocks:
        raise PlanningError(f"a dim of size {size} is not {blocks} equal blocks")
    return (size // blocks,) * blocks


# -- what others ask of a cut; its blocks and unit are read here, in spec.py and rules/rule.py -----


class Cut(Protocol):
    """A Shard, or a role of a module's weight."""

    @property
    def blocks(self) -> int | tuple[int, ...]: ...
    @property
    def unit(self) -> int: ...


def options_of(cut: Cut) -> tuple[str, ...]:
    """What one states of it besides the dim: ``("blocks=3", "unit=16")``."""
    blocks = (f"blocks={cut.blocks!r}",) if cut.blocks != 1 else ()
    return (*blocks, f"unit={cut.unit!r}") if cut.unit != 1 else blocks


def blocks_of(shard: Shard, size: int) -> tuple[int, ...]:
    """The sizes of its blocks in a dim of ``size``; PlanningError where they do not fill it."""
    return block_sizes(shard.blocks, size)


def units_of(shard: Shard, size: int) -> int:
    """In how many pieces its smallest block can be cut."""
    return min(blocks_of(shard, size)) // shard.unit


def on_dim(shard: Shard, dim: int) -> Shard:
    """The same cut of another dim."""
    return Shard(dim, shard.blocks, shard.unit)


def with_unit(shard: Shard, unit: int) -> Shard:
    return Shard(shard.dim, shard.blocks, unit)


def one_block(shard: Shard) -> Shard:
    """A cut at the same units of a dim that is one block."""
    return Shard(shard.dim, 1, shard.unit)


def fits(shard: Shard, size: int) -> bool:
    """Whether a dim of ``size`` can be cut so."""
    blocks = shard.blocks
    filled = sum(blocks) == size if isinstance(blocks, tuple) else size % blocks == 0
    return filled and not any(block % shard.unit for block in block_sizes(blocks, size))


def misfit(shard: Shard, size: int, dim: str) -> tuple[str, str]:
    """Why a dim of ``size``, of that name, cannot be cut so, and what to state instead."""
    blocks, unit = shard.blocks, shard.unit
    if isinstance(blocks, tuple) and sum(blocks) != size:
        rest = size - sum(blocks[:-1])
        fixed: int | tuple[int, ...] = (*blocks[:-1], rest) if rest > 0 else 1
        return f"blocks={blocks} add up to {sum(blocks)}, {dim}", f"blocks={fixed}"
    if isinstance(blocks, int) and size % blocks:
        near = _nearest_divisor(size, blocks)
        return f"{dim} is not {blocks} equal blocks", f"blocks={near}, or the sizes of each"
    block = next(block for block in block_sizes(blocks, size) if block % unit)
    near = _nearest_divisor(block, unit)
    whole = "" if block == size else f", in blocks of {block},"
    return f"{dim}{whole} is not a multiple of unit={unit}", f"unit={near}"


def _nearest_divisor(size: int, wanted: int) -> int:
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - wanted), d))


@lru_cache(maxsize=65536)
def index_sets(shard: Shard, size: int, num: int) -> tuple[Intervals, ...]:
    """For each of ``num`` coordinates, the intervals of a dim of ``size`` that it holds.

    The intervals of a coordinate are ascending, not empty and not adjacent within one block.
    """
    result: list[list[tuple[int, int]]] = [[] for _ in range(num)]
    start = 0
    for block in block_sizes(shard.blocks, size):
        if block % shard.unit:
            raise PlanningError(f"a block of size {block} is not a multiple of unit={shard.unit}")
        step = -(-(block // shard.unit) // num) * shard.unit
        for i in range(num):
            lo, hi = min(i * step, block), min((i + 1) * step, block)
            if lo < hi:
                result[i].append((start + lo, start + hi))
        start += block
    return tuple(joined(item) for item in result)


def joined(intervals: Sequence[tuple[int, int]]) -> Intervals:
    """Ascending intervals, adjacent ones as one."""
    merged: list[tuple[int, int]] = []
    for lo, hi in intervals:
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The intersection of two ascending interval tuples."""
    result: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if lo < hi:
            result.append((lo, hi))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


def length(intervals: Intervals) -> int:
    return sum(hi - lo for lo, hi in intervals)


def largest_part(cuts: Sequence[tuple[Shard, int]], size: int) -> float:
    """The fraction of a dim's indices that the rank at coordinate 0 of every axis holds, which
    holds most. ``cuts``: the placement and the size of each axis that splits the dim."""
    if len(cuts) == 1:  # most dims are split by one axis, evenly
        shard, num = cuts[0]
        if type(shard.blocks) is int and size % (shard.blocks * shard.unit * num) == 0:
            return 1 / num
    held: Intervals = ((0, size),)
    for shard, num in cuts if size else ():
        held = intersect(held, index_sets(shard, size, num)[0])
    return length(held) / size if size else 1.0


def same(a: Placement, b: Placement, shape: tuple[int, ...], num: int) -> bool:
    """Whether two placements hold the same indices on every coordinate of an axis of ``num``."""
    if a == b or num == 1:
        return True
    if isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim:
        size = shape[a.dim]
        return index_sets(a, size, num) == index_sets(b, size, num)
    return False


def splits_rows(num_dims: int, placements: Sequence[Placement]) -> bool:
    """Whether the last dim is split of what is pending under a reduction that needs it whole."""
    if not any(isinstance(p, Partial) and REDUCTIONS[p.op].unit > 1 for p in placements):
        return False
    return any(isinstance(p, Shard) and p.dim == num_dims - 1 for p in placements)


def pieces(majors: Sequence[tuple[Shard, int]], size: int) -> tuple[int, ...]:
    """The sizes of the pieces that (placement, axis size) pairs cut a dim into, in order.

    They are the blocks of a further, minor axis on the same dim.
    """
    cuts = {0, size}
    for shard, num in majors:
        start = 0
        for block in block_sizes(shard.blocks, size):
            cuts.add(start)
            start += block
        for intervals in index_sets(shard, size, num):
            cuts.update(point for interval in intervals for point in interval)
    ordered = sorted(cuts)
    return tuple(b - a for a, b in itertools.pairwise(ordered)) or (size,)


def refine(minor: Shard, majors: Sequence[tuple[Shard, int]], size: int) -> Shard:
    """``minor`` with its blocks replaced by the pieces that the majors cut the dim into."""
    if not majors:
        return minor
    blocks = pieces(majors, size)
    return counted(Shard(minor.dim, blocks, max(minor.unit, majors[-1][0].unit)), size)


def counted(shard: Shard, size: int) -> Shard:
    """The normal form of ``blocks`` for a dim of ``size``: equal blocks as their number.

    PlanningError where the blocks do not fill the dim.
    """
    sizes = block_sizes(shard.blocks, size)
    equal = len(set(sizes)) == 1
    return Shard(shard.dim, len(sizes) if equal else sizes, shard.unit)


def simplest(placement: Placement, shape: tuple[int, ...], num: int) -> Placement:
    """The plainest placement with the same index sets: no unit where boundaries agree without."""
    if num == 1:
        return REPLICATE
    if isinstance(placement, Shard):
        placement = counted(placement, shape[placement.dim])
        plain = Shard(placement.dim, placement.blocks)
        if placement.unit > 1 and same(plain, placement, shape, num):
            return plain
    return placement
