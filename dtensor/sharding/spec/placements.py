"""Placements: how one tensor is placed on *one* axis of a mesh.

    Replicate()          every rank of the axis holds the whole tensor
    Shard(0, blocks=3)   dim 0 is 3 equal blocks end to end, and each is split over the ranks
    Shard(0, unit=16)    dim 0 is cut only at multiples of 16
    Zigzag(1)            dim 1 is cut into 2n pieces: rank r of n holds pieces r and 2n-1-r
    Shard(0, sizes=(48, 16))   rank 0 holds 48 indices of dim 0, rank 1 the next 16
    Partial("sum")       the value is the sum of the local tensors of the axis

A Shard maps each coordinate on the axis to an *index set* of the global dim: a tuple of half-open
intervals (`index_sets`). A rank's shard is the intersection of the index sets of all axes, so one
collective can remove each axis alone. If two axes split one dim, the blocks of the minor axis are
the pieces that the major axis cuts (`pieces`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Never, Protocol, cast

from dtensor.errors import PlanningError, checked_call
from dtensor.numerics import REDUCTIONS, ReduceOp, reduction_names_text

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __init__(self, *axis: Never) -> None:
        if axis:
            from dtensor.misspelled import positional_argument_error  # seldom needed

            raise positional_argument_error("Replicate", axis)

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Ragged:
    """How a dim of rows that are sorted by expert is split: ``by`` token or expert.

    The dim has ``slots`` rows for each token. By token, a rank has all rows of its tokens, and the
    blocks and the unit of the `Shard` count tokens. By expert, a rank has all rows of its experts,
    a number that is data, and they count experts. ``experts``: the number of experts.
    """

    by: Literal["token", "expert"]
    experts: int
    slots: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The dim is split over the axis: rank i of the axis holds piece i.

        >>> def held(placement, rows=12):
        ...     x = dt.distribute(torch.arange(rows), dt.Mesh(tp=2), tp=placement)
        ...     return [shard.tolist() for shard in x.local_tensors()]
        >>> held(dt.Shard(0))
        [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]

    With ``blocks`` the dim is that many blocks end to end, and each block is split separately. A
    fused qkv weight needs this: rank 0 holds the first half of q, of k and of v.

        >>> held(dt.Shard(0, blocks=3))
        [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
        >>> held(dt.Shard(0, blocks=(8, 2, 2)))    # fewer heads in k and v than in q
        [[0, 1, 2, 3, 8, 10], [4, 5, 6, 7, 9, 11]]

    With ``unit`` the dim is cut only at multiples of that many elements, so that heads stay whole.
    With three heads of 4 elements, the first rank holds two heads and the second rank one head.

        >>> held(dt.Shard(0, unit=4))
        [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]

    A size that the ranks do not divide is cut as `torch.chunk` cuts: the last ranks hold less, or
    nothing.

        >>> held(dt.Shard(0), rows=5), held(dt.Shard(0), rows=1)
        ([[0, 1, 2], [3, 4]], [[0], []])

    With ``sizes`` rank i of the axis holds that many elements, in order. A size may be 0, so that
    one rank can hold the whole dim.

        >>> held(dt.Shard(0, sizes=(9, 3))), held(dt.Shard(0, sizes=(0, 2)), rows=2)
        ([[0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]], [[], [0, 1]])

    Args:
        dim: the dim of the tensor that is split; -1 is the last one.
        blocks: the number of equal blocks, or the sizes of the blocks, which add up to the dim's.
        unit: the size of each block is a multiple of it.
        ragged: for the rows of `to_experts`, set by the planner.
        zigzag: whether each block is split as `Zigzag` describes.
        shift: rank i of n holds what rank (i - shift) mod n holds without the shift. The planner
            sets it for keys that travel around a ring of ranks.
        sizes: the number of elements on each rank of the axis, which add up to the dim's. Blocks,
            a unit and a zigzag cannot be combined with it. If several axes split the dim, each axis
            with ``sizes`` splits the whole dim, independently of the other axes.

    Raises PlanningError if ``blocks`` or ``unit`` is not a whole number of at least 1, or ``sizes``
    are not whole numbers of at least 0. Using the placement for a tensor or an axis that it does
    not fit raises PlanningError there.
    """

    dim: int
    blocks: int | tuple[int, ...] = 1
    unit: int = 1
    ragged: Ragged | None = None
    zigzag: bool = False
    shift: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        blocks = self.blocks
        if self.sizes is not None:
            self._check_sizes(self.sizes)
        if type(self.dim) is type(blocks) is type(self.unit) is int and blocks == self.unit == 1:
            return  # the common case, for which planning constructs many Shards
        if isinstance(blocks, Sequence) and not isinstance(blocks, str):
            blocks = tuple(blocks)
            object.__setattr__(self, "blocks", blocks)
        check_split(self, self.dim, blocks, self.unit)

    def _check_sizes(self, sizes: object) -> None:
        """Raise PlanningError unless the sizes are ints of at least 0 without other options."""
        listed = list(cast(Sequence[object], sizes)) if isinstance(sizes, list | tuple) else []
        if not listed or not all(type(n) is int and n >= 0 for n in listed):
            raise PlanningError(
                f"Shard({self.dim!r}, sizes={sizes!r}): sizes are whole numbers of at least 0, one "
                f"for each rank of the axis; fix: sizes=(48, 16)"
            )
        object.__setattr__(self, "sizes", tuple(listed))
        if replace(self, sizes=None) != Shard(self.dim, shift=self.shift):
            raise PlanningError(
                f"{self!r}: sizes say what each rank holds, so they cannot be combined with "
                f"blocks, a unit or a zigzag; fix: dt.Shard({self.dim!r}, sizes={self.sizes!r})"
            )

    def __repr__(self) -> str:
        ragged = (f"ragged={self.ragged!r}",) if self.ragged else ()
        shift = (f"shift={self.shift}",) if self.shift else ()
        name = "Zigzag" if self.zigzag else "Shard"
        return f"{name}({', '.join((repr(self.dim), *options_of(self), *ragged, *shift))})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction of the local tensors of the axis. It is pending: the all_reduce
    runs when an op needs the value. A mean is a sum divided by the count.

    Args:
        op: "sum", "max", "min" or "softmax", or the name of a registered `Reduction`. Raises
            PlanningError for any other name.

    "softmax" is for float32 or float64 values ``[..., 3]``, whose last dim is not split. They are
    three statistics of the rows of an x that is split over the axis: the maximum, the sum of
    exp(x - maximum), and a plain sum.
    """

    op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise PlanningError(f"Partial({self.op!r}): the op is {reduction_names_text()}")

    def __repr__(self) -> str:
        return f'Partial("{self.op}")'


Placement = Replicate | Shard | Partial
"""How a tensor is placed on one axis."""
REPLICATE = Replicate()
PARTIAL = Partial("sum")


@checked_call
def Row(
    *, blocks: int | Sequence[int] = 1, unit: int = 1, sizes: Sequence[int] | None = None
) -> Shard:
    """Return ``Shard(0, blocks, unit, sizes=sizes)``, which splits a matrix into blocks of rows.
    Raises PlanningError as `Shard` does."""
    return Shard(0, blocks, unit, sizes=sizes)  # type: ignore[arg-type]


@checked_call
def Column(
    *, blocks: int | Sequence[int] = 1, unit: int = 1, sizes: Sequence[int] | None = None
) -> Shard:
    """Return ``Shard(-1, blocks, unit, sizes=sizes)``, which splits a matrix into blocks of
    columns. Raises PlanningError as `Shard` does."""
    return Shard(-1, blocks, unit, sizes=sizes)  # type: ignore[arg-type]


@checked_call
def Zigzag(dim: int, *, blocks: int | Sequence[int] = 1, unit: int = 1) -> Shard:
    """Return the split of a dim that gives each rank an early and a late part of it. Over n ranks
    the dim is cut into 2n pieces, and rank r holds pieces r and 2n-1-r.

        >>> x = dt.distribute(torch.arange(8), dt.Mesh(cp=2), cp=dt.Zigzag(0))
        >>> [shard.tolist() for shard in x.local_tensors()]
        [[0, 1, 6, 7], [2, 3, 4, 5]]

    State it for a sequence under causal attention, where a late query attends to more keys than an
    early one: every rank then has the same work. If 2n does not divide the dim's size, pieces
    0, 2n-1, 1, 2n-2, ... have one element more, in this order, so that rank 0 holds the most.
    ``blocks`` and ``unit`` are those of `Shard`. Raises PlanningError if ``dim`` is not a whole
    number, or ``blocks`` or ``unit`` is not a whole number of at least 1. Using the placement for a
    dim with fewer than 2n elements raises PlanningError there.
    """
    return Shard(dim, blocks, unit, zigzag=True)  # type: ignore[arg-type]


def check_split(stated: object, dim: object, blocks: object, unit: object) -> None:
    """Raise PlanningError, which shows the placement ``stated``, unless its dim is an int and its
    blocks and unit are ints of at least 1."""
    sizes = [blocks]
    if isinstance(blocks, list | tuple):
        sizes = list(cast(Sequence[object], blocks))
    if not isinstance(dim, int):
        name = "Zigzag" if isinstance(stated, Shard) and stated.zigzag else "Shard"
        raise PlanningError(f"{stated!r}: a dim is a whole number; fix: dt.{name}(0)")
    if not sizes or not all(isinstance(n, int) and n >= 1 for n in (*sizes, unit)):
        raise PlanningError(
            f"{stated!r}: blocks and unit are whole numbers of at least 1; fix: blocks=3, unit=16"
        )


def block_sizes(blocks: int | tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the sizes of a dim's blocks. Raises PlanningError if they do not fill ``size``."""
    if isinstance(blocks, tuple):
        if sum(blocks) != size:
            raise PlanningError(
                f"blocks={blocks} add up to {sum(blocks)}, but the dim has size {size}"
            )
        return blocks
    if size % blocks:
        raise PlanningError(f"a dim of size {size} is not {blocks} equal blocks")
    return (size // blocks,) * blocks


# -- questions about a cut: only this folder and rules/rule.py read blocks, unit and sizes ---------


class Cut(Protocol):
    """Anything with blocks and a unit: a Shard, ColumnParallel or RowParallel."""

    @property
    def blocks(self) -> int | tuple[int, ...]: ...
    @property
    def unit(self) -> int: ...


def options_of(cut: Cut) -> tuple[str, ...]:
    """Return the arguments of a cut that are not defaults: ``("blocks=3", "unit=16")``."""
    if isinstance(cut, Shard) and cut.sizes is not None:
        return (f"sizes={cut.sizes!r}",)
    blocks = (f"blocks={cut.blocks!r}",) if cut.blocks != 1 else ()
    return (*blocks, f"unit={cut.unit!r}") if cut.unit != 1 else blocks


def cut_size(shard: Shard, size: int) -> int:
    """Return the size that the shard's blocks fill, for a dim of ``size``: the number of tokens or
    of experts if the dim is ragged."""
    ragged = shard.ragged
    if ragged is None:
        return size
    return ragged.experts if ragged.by == "expert" else size // ragged.slots


def blocks_of(shard: Shard, size: int) -> tuple[int, ...]:
    """Return the sizes of the shard's blocks. Raises PlanningError if they do not fill the dim."""
    return block_sizes(shard.blocks, cut_size(shard, size))


def units_of(shard: Shard, size: int) -> int:
    """Return how many units of the shard its smallest block has: the most pieces of it."""
    return min(blocks_of(shard, size)) // shard.unit


def on_dim(shard: Shard, dim: int) -> Shard:
    """Return the shard with another dim."""
    return Shard(
        dim, shard.blocks, shard.unit, shard.ragged, shard.zigzag, shard.shift, shard.sizes
    )


def with_unit(shard: Shard, unit: int) -> Shard:
    return shard if unit == shard.unit else with_cuts(shard, shard.blocks, unit)


def one_block(shard: Shard) -> Shard:
    """Return the shard with a single block, which is split evenly."""
    return with_cuts(shard, 1, shard.unit)


def with_cuts(shard: Shard, blocks: int | tuple[int, ...], unit: int) -> Shard:
    """Return the shard with other blocks and another unit, and without sizes."""
    return Shard(shard.dim, blocks, unit, shard.ragged, shard.zigzag, shard.shift)


def with_shift(shard: Shard, shift: int, num: int) -> Shard:
    """Return the shard with another shift, modulo ``num`` ranks."""
    shift %= num
    return shard if shift == shard.shift else replace(shard, shift=shift)


@lru_cache(maxsize=65536)
def index_sets(shard: Shard, size: int, num: int) -> tuple[Intervals, ...]:
    """Return the intervals of a dim of ``size`` that each of ``num`` coordinates holds: of indices,
    or of tokens or experts if the dim is ragged. The intervals of a coordinate are ascending, not
    empty and not adjacent."""
    if shard.shift:
        home = index_sets(with_shift(shard, 0, num), size, num)
        return tuple(home[(i - shard.shift) % num] for i in range(num))
    return tuple(merge_adjacent(item) for item in _pieces_by_coordinate(shard, size, num))


@lru_cache(maxsize=65536)
def _pieces_by_coordinate(shard: Shard, size: int, num: int) -> list[list[tuple[int, int]]]:
    """Return the pieces of the blocks that each coordinate holds without a shift, in order."""
    result: list[list[tuple[int, int]]] = [[] for _ in range(num)]
    cut = _zigzag_pieces if shard.zigzag else _chunk
    start, unit = 0, shard.unit
    if shard.sizes is not None:
        if (sum(shard.sizes), len(shard.sizes)) != (size, num):
            raise PlanningError(f"{shard!r} does not fit a dim of size {size} over {num} ranks")
        ends = (0, *itertools.accumulate(shard.sizes))
        return [[(lo, hi)] if lo < hi else [] for lo, hi in itertools.pairwise(ends)]
    for block in blocks_of(shard, size):
        if block % unit:
            raise PlanningError(f"a block of size {block} is not a multiple of unit={unit}")
        for i in range(num):
            for lo, hi in cut(block // unit, num, i):
                if lo < hi:
                    result[i].append((start + lo * unit, start + hi * unit))
        start += block
    return result


def _chunk(units: int, num: int, i: int) -> Intervals:
    """Return the units of a block that coordinate ``i`` of ``num`` holds: ceil(units / num)."""
    step = -(-units // num)
    return ((min(i * step, units), min((i + 1) * step, units)),)


def _zigzag_pieces(units: int, num: int, i: int) -> Intervals:
    """Return pieces ``i`` and ``2 num - 1 - i`` of a block of ``units`` units."""
    each, more = divmod(units, 2 * num)

    def end(pieces: int, longer: int) -> int:  # of this many pieces, counted from one end
        return pieces * each + min(pieces, longer)

    early, late = more - more // 2, more // 2  # how many pieces of each half have one unit more
    return (end(i, early), end(i + 1, early)), (units - end(i + 1, late), units - end(i, late))


def merge_adjacent(intervals: Sequence[tuple[int, int]]) -> Intervals:
    """Return ascending intervals with adjacent intervals merged."""
    merged: list[tuple[int, int]] = []
    for lo, hi in intervals:
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of two ascending tuples of intervals."""
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
    """Return the fraction of a dim's indices that the fullest rank holds. ``cuts``: (placement,
    axis size) of each axis that splits the dim."""
    if len(cuts) == 1:  # a short cut for the common case: one axis splits the dim evenly
        shard, num = cuts[0]
        whole = cut_size(shard, size)
        units = shard.blocks * shard.unit if type(shard.blocks) is int and not shard.sizes else 0
        if units and whole % (units * num * (1 + shard.zigzag)) == 0:
            return 1 / num
    part = 1.0
    for by_experts in (False, True):  # the two cuts of a ragged dim are independent
        family = [(s, num) for s, num in cuts if cuts_experts(s) == by_experts]
        whole = cut_size(family[0][0], size) if family and size else 0
        intervals: Intervals = ((0, whole),)
        fullest = fullest_coordinates(tuple(family), size) if whole else ()
        for (shard, num), at in zip(family, fullest):
            intervals = intersect(intervals, index_sets(shard, size, num)[at])
        part *= length(intervals) / whole if whole else 1.0
    return part


def fullest_coordinates(cuts: tuple[tuple[Shard, int], ...], size: int) -> tuple[int, ...]:
    """Return the coordinates of a rank that holds most indices of a dim, on the axes that split it.
    ``cuts``: (placement, axis size) of each axis. Without sizes and shifts, coordinate 0 of every
    axis holds most."""
    if all(shard.sizes is None for shard, _ in cuts):
        return tuple(shard.shift % num for shard, num in cuts)
    return _fullest_of_sizes(cuts, size)


@lru_cache(maxsize=65536)
def _fullest_of_sizes(cuts: tuple[tuple[Shard, int], ...], size: int) -> tuple[int, ...]:
    at_by_held: dict[Intervals, tuple[int, ...]] = {((0, size),): ()}
    for shard, num in cuts:
        extended: dict[Intervals, tuple[int, ...]] = {}
        for held, at in at_by_held.items():
            for i, intervals in enumerate(index_sets(shard, size, num)):
                extended.setdefault(intersect(held, intervals), (*at, i))
        at_by_held = extended
    return at_by_held[max(at_by_held, key=length)]


def cuts_experts(placement: Placement) -> bool:
    """Return whether the placement splits rows by expert."""
    ragged = placement.ragged if isinstance(placement, Shard) else None
    return ragged is not None and ragged.by == "expert"


def same(a: Placement, b: Placement, shape: tuple[int, ...], num: int) -> bool:
    """Return whether both placements give every rank of an axis of ``num`` the same indices."""
    if a == b or num == 1:
        return True
    if isinstance(a, Shard) and isinstance(b, Shard) and (a.dim, a.ragged) == (b.dim, b.ragged):
        size = shape[a.dim]
        return index_sets(a, size, num) == index_sets(b, size, num)
    return False


def pieces(majors: Sequence[tuple[Shard, int]], size: int) -> tuple[int, ...]:
    """Return the sizes of the pieces that the (placement, axis size) pairs cut a dim into, in
    order. They are the blocks of a minor axis that splits the same dim further."""
    whole = cut_size(majors[0][0], size) if majors else size
    cuts = {0, whole}
    for shard, num in majors:
        for held in _pieces_by_coordinate(shard, size, num):
            cuts.update(point for piece in held for point in piece)
    ordered = sorted(cuts)
    return tuple(b - a for a, b in itertools.pairwise(ordered)) or (whole,)


def refine(minor: Shard, majors: Sequence[tuple[Shard, int]], size: int) -> Shard:
    """Return ``minor`` with its blocks replaced by the pieces that ``majors``, the (placement, axis
    size) pairs of the major axes, cut the dim into, and with at least the last one's unit. A minor
    with sizes is returned as it is: it splits the whole dim."""
    if not majors or minor.sizes is not None:
        return minor
    blocks = pieces(majors, size)
    unit = max(minor.unit, majors[-1][0].unit)
    return counted(with_cuts(minor, blocks, unit), size)


def counted(shard: Shard, size: int) -> Shard:
    """Return the shard with ``blocks`` as a number if all blocks are equal, else as sizes. Raises
    PlanningError if the blocks do not fill a dim of ``size``."""
    if shard.sizes is not None:
        return shard
    sizes = blocks_of(shard, size)
    equal = len(set(sizes)) == 1
    return with_cuts(shard, len(sizes) if equal else sizes, shard.unit)


def simplest(placement: Placement, shape: tuple[int, ...], num: int) -> Placement:
    """Return the simplest placement with the same index sets: its unit is dropped if the same
    boundaries follow without it, a zigzag of blocks of one unit is none, sizes of an even split are
    none, and on one rank it is Replicate."""
    if num == 1:
        return REPLICATE
    if isinstance(placement, Shard):
        placement = counted(with_shift(placement, placement.shift, num), shape[placement.dim])
        even = Shard(placement.dim, shift=placement.shift)
        if placement.sizes is not None and same(placement, even, shape, num):
            return even
        if placement.zigzag and max(blocks_of(placement, shape[placement.dim])) <= placement.unit:
            placement = replace(placement, zigzag=False)
        plain = with_unit(placement, 1)
        if placement.unit > 1 and same(plain, placement, shape, num):
            return plain
    return placement
