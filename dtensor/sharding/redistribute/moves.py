"""Redistribution on one mesh: the cheapest path of moves, each on one axis.

    moves("f32[8@tp,16]" -> "f32[8,16@tp]")   ==  all_to_all on tp

    Shard -> Replicate   all_gather         Partial -> Replicate   all_reduce
    Shard -> Shard'      all_to_all         Partial -> Shard       reduce_scatter
    Replicate -> Shard   slice (free)       Replicate -> Partial   fill (free)
    Shard -> Shard of the same cut with another shift: shift, which the planner states

Any axis can change alone, because the index sets of a placement do not depend on the other axes.
A fill keeps the value on rank 0 and puts the reduction's identity on the other ranks; a reduction
without identity (max) has no fill. Axes on which both specs agree do not change. Rows that are
split by token are exchanged to be split by expert, and back (all_to_all); they have no other moves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dtensor.collectives import COLLECTIVES
from dtensor.errors import PlanningError
from dtensor.numerics import REDUCTIONS, is_integer
from dtensor.sharding.redistribute.topology import Topology, sent_bytes
from dtensor.sharding.spec.fits import splits_rows
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    counted,
    cuts_experts,
    intersect,
    length,
    on_dim,
    pieces,
    same,
)
from dtensor.sharding.spec.spec import TensorSpec, compared_ranks

MoveKind = str
"""A key of `MOVES`: the name of a collective or of a local move."""
MIN_SAVING = 0.01
"""The fraction of the price that a path through intermediate shardings must save, because it has
more collectives."""
MAX_EXPANDED = 100
"""The maximum number of shardings that a search through intermediate shardings visits. This covers
nearly all shardings of two axes; on three axes the search may miss the best path."""
_SECONDS_PER_MOVE = 1e-13
"""Seconds added for each move, so that the shortest of several paths with equal price is chosen."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a redistribution: ``src`` and ``dst`` differ only on ``axis``. The result of a
    reduction may have a wider dtype (plan/precision.py)."""

    kind: MoveKind
    axis: str
    src: TensorSpec
    dst: TensorSpec

    @property
    def suffix(self) -> str:
        """The suffix of the result's name: ``h_reduced``."""
        return MOVES[self.kind].suffix

    @property
    def is_sized(self) -> bool:
        """Whether the move exchanges rows between tokens and experts, so that sizes are data."""
        ends = self.src.placement(self.axis), self.dst.placement(self.axis)
        return self.kind == "all_to_all" and any(isinstance(p, Shard) and p.ragged for p in ends)

    @property
    def distance(self) -> int:
        """In a shift, each rank sends to the coordinate that is as much larger, cyclically; 0 for
        other kinds."""
        ends = self.src.placement(self.axis), self.dst.placement(self.axis)
        before, after = (p.shift if isinstance(p, Shard) else 0 for p in ends)
        return (after - before) % self.src.mesh.axis_size(self.axis) * (self.kind == "shift")

    @property
    def gathers_counts(self) -> bool:
        """Whether the move gives every rank the numbers of rows by expert of all ranks."""
        return self.kind == "all_gather" and self.src.shape != self.dst.shape

    @property
    def reduces(self) -> bool:
        """Whether the move is a collective that reduces."""
        return self.kind in COLLECTIVES and COLLECTIVES[self.kind].reduces

    @property
    def bytes_sent(self) -> int:
        """The bytes that the rank which sends most sends: (n-1)/n of the value for all_gather and
        reduce_scatter, 2(n-1)/n for all_reduce, the blocks that change ranks for all_to_all, the
        largest shard for shift."""
        return _bytes_sent(self)

    @property
    def most_bytes_sent(self) -> int:
        """The bytes that a rank sends at most: all its rows to other ranks, if it sends rows of its
        tokens, or all rows of other ranks that its experts can have."""
        if not self.is_sized:
            return self.bytes_sent
        at = dict.fromkeys(self.src.mesh.axes, 0)
        num = self.src.mesh.axis_size(self.axis)
        rows, *sizes = self.src.local_shape(at)
        if cuts_experts(self.src.placement(self.axis)):
            rows = self.src.row_bound(at) * (num - 1) // num
        elif self.src.is_by_expert:
            rows = self.src.row_bound(at)
        return rows * math.prod(sizes) * self.src.dtype.itemsize

    def seconds(self, topology: Topology) -> float:
        """Return the price of the move."""
        num = self.src.mesh.axis_size(self.axis)
        if self.kind in FREE_KINDS:
            # nothing is sent, but the price of a local copy decides ties
            moved = self.dst.max_local_nbytes if MOVES[self.kind].copies else 0
            return topology.compute_seconds(flops=0, bytes_moved=moved)
        return topology.collective_seconds(
            self.kind, self.axis, num=num, bytes_sent=self.bytes_sent
        )


@lru_cache(maxsize=1 << 13)  # searches between different specs meet the same moves
def _bytes_sent(move: Move) -> int:
    """Return the bytes that are sent by the rank that sends the most."""
    sends = MOVES[move.kind].sends
    if sends is None:
        return 0
    if _all_ranks_send_equally(move):
        return sends(move, dict.fromkeys(move.src.mesh.axes, 0))
    return max(sends(move, at) for at in _coordinates_to_compare(move))


def bytes_sent_together(moves: Sequence[Move]) -> tuple[int, ...]:
    """Return the bytes that each of these moves of one message sends, on the rank that sends most
    in all: if placements have sizes, the fullest rank of one move may send nothing of another."""
    if not any(move.src.is_sized or move.dst.is_sized for move in moves):
        return tuple(move.bytes_sent for move in moves)
    return max(zip(*map(_sent_by_rank, moves), strict=True), key=sum)


@lru_cache(maxsize=1 << 13)
def _sent_by_rank(move: Move) -> tuple[int, ...]:
    """Return the bytes that each rank sends."""
    sends = MOVES[move.kind].sends
    return tuple(sends(move, at) if sends else 0 for at in compared_ranks(move.src.mesh))


def move_kind(src: Placement, dst: Placement) -> MoveKind | None:
    """Return the kind of a move between two placements on one axis; None if there is none."""
    if isinstance(dst, Partial) and REDUCTIONS[dst.op].identity is None:
        return None
    return _KIND_BY_CLASSES.get((type(src), type(dst)))


def moves(
    src: TensorSpec, dst: TensorSpec, topology: Topology, *, whole: bool = False
) -> tuple[Move, ...]:
    """Return the cheapest path of moves; () if the specs are equal.

    If several axes change, or shards are uneven, the search also tries intermediate shardings: a
    value pending over a and b is scattered over a, reduced over b and gathered over a; `12@a,5@b`
    becomes `12@b,5@a` by way of `12@(b,a),5`. tests/sharding/redistribution_search.py compares the
    result with a search over all shardings.

    ``whole``: use only the placements of both specs and Replicate, which is a hundred times faster.
    An all_reduce then stays one move, which several values can share in a bucket.
    Raises PlanningError if there is no path.
    """
    path = _path(src, dst, topology, whole)
    if path is None:
        raise PlanningError(f"{src} cannot be redistributed to {dst}")
    return path


def seconds(src: TensorSpec, dst: TensorSpec, topology: Topology, *, whole: bool = False) -> float:
    """Return the seconds of the cheapest path of moves; infinity if there is none. ``whole``: use
    only the placements of both specs and Replicate."""
    path = _path(src, dst, topology, whole)
    return math.inf if path is None else _price(path, topology)


@lru_cache(maxsize=1 << 13)
def _path(
    src: TensorSpec, dst: TensorSpec, topology: Topology, whole: bool
) -> tuple[Move, ...] | None:
    """Return the cheapest path of moves, cached; None if there is none. Intermediate shardings are
    searched only where they can save `MIN_SAVING` of the price of the direct path."""
    if src.shape != dst.shape or src.dtype != dst.dtype or src.mesh != dst.mesh:
        raise PlanningError(f"{src} and {dst} are not two shardings of one value")
    direct = _search(src, dst, topology)
    num_changed = sum(p != q for p, q in zip(src.placements, dst.placements, strict=True))
    if direct is None or whole or (num_changed < 2 and _unevenness(src) < 1.5):
        return direct
    price = _price(direct, topology)
    if price - _min_latency(src, dst, topology) < MIN_SAVING * price:
        return direct
    return _search(src, dst, topology, below=(1 - MIN_SAVING) * price) or direct


def _price(path: Sequence[Move], topology: Topology) -> float:
    return sum(move.seconds(topology) for move in path)


def _min_latency(src: TensorSpec, dst: TensorSpec, topology: Topology) -> float:
    """Return a lower bound of the seconds of every path: the sum of the latencies of one collective
    for each axis that must change by communication."""
    total = 0.0
    for axis, before, after in zip(src.mesh.axes, src.placements, dst.placements, strict=True):
        num = src.mesh.axis_size(axis)
        if before == REPLICATE or same(before, after, src.shape, num):
            continue
        scattered = isinstance(before, Partial) and isinstance(after, Shard)
        kind = move_kind(before, after if scattered else REPLICATE)
        assert kind is not None, "everything can be made whole"
        total += topology.collective_seconds(kind, axis, num=num, bytes_sent=0)
    return total


def _search(
    src: TensorSpec, dst: TensorSpec, topology: Topology, *, below: float | None = None
) -> tuple[Move, ...] | None:
    """Return the cheapest path by Dijkstra's algorithm over the placements of both ends and
    Replicate; None if there is none. ``below``: search intermediate shardings too, for a path with
    a price below this."""
    choices = [_choices(src.placement(axis), dst.placement(axis)) for axis in src.mesh.axes]
    tie = itertools.count()
    queue: list[tuple[float, int, TensorSpec, tuple[Move, ...]]] = [(0.0, next(tie), src, ())]
    visited: set[tuple[Placement, ...]] = set()
    while queue:
        cost, _, spec, path = heapq.heappop(queue)
        if spec.placements == dst.placements:
            return path
        if spec.placements in visited:
            continue
        if below is not None and len(visited) == MAX_EXPANDED:
            return None
        visited.add(spec.placements)
        for axis, options in zip(src.mesh.axes, choices, strict=True):
            if below is not None and len(options) > 1:
                options = tuple(dict.fromkeys((*options, *_intermediate(spec, (src, dst), axis))))
            for option in options:
                move = _move(spec, axis, option)
                if move is not None and move.is_sized and _is_early(move, dst):
                    continue
                if move is not None and move.dst.placements not in visited:
                    price = cost + move.seconds(topology) + _SECONDS_PER_MOVE
                    remaining = 0.0 if below is None else _min_latency(move.dst, dst, topology)
                    if below is None or price + remaining < below:
                        heapq.heappush(queue, (price, next(tie), move.dst, (*path, move)))
    return None


def _intermediate(
    current: TensorSpec, ends: tuple[TensorSpec, TensorSpec], axis: str
) -> tuple[Placement, ...]:
    """Return possible intermediate placements on an axis: for each dim, a split of the pieces that
    the other axes cut in ``current`` or in one of the ends.

    With these pieces, a later move on another axis can leave the pieces of this axis in place. The
    virtual axis of microbatches has none, because it runs in time.
    """
    if axis == MICROBATCH_AXIS or ends[0].mesh.axis_size(axis) == 1:
        return ()
    placements: dict[Placement, None] = {}
    for dim, size in enumerate(current.shape):
        if size == 0:
            continue
        cuts = [spec.cuts(dim, except_axis=axis) for spec in (current, *ends)]
        if any(shard.ragged for found in cuts for shard, _ in found):
            continue  # rows of experts are only exchanged
        for majors in (*cuts, cuts[1] + cuts[2]):
            placements[counted(Shard(dim, pieces(majors, size)), size)] = None
    return tuple(placements)


def _choices(src: Placement, dst: Placement) -> tuple[Placement, ...]:
    """Return the placements of an axis that a path may use: both ends and Replicate; one if the
    ends are equal."""
    return tuple(dict.fromkeys((src, dst, REPLICATE))) if src != dst else (src,)


@lru_cache(maxsize=1 << 13)
def _move(spec: TensorSpec, axis: str, option: Placement) -> Move | None:
    """Return the move of ``spec`` to the placement ``option`` on an axis; None if there is none."""
    current = spec.placement(axis)
    if option == current:
        return None
    num = spec.mesh.axis_size(axis)
    kind: MoveKind | None = move_kind(current, option)
    if isinstance(current, Shard) and same(current, option, spec.shape, num):
        kind = "relabel"
    elif axis == MICROBATCH_AXIS and isinstance(current, Shard):
        return None  # a microbatch does not have the rows of the others
    if kind is None or not _keeps_rows(spec, current, option):
        return None
    if isinstance(option, Partial) and any(
        isinstance(p, Partial) and p.op != option.op for p in spec.placements
    ):
        return None  # a value cannot be pending under two reductions
    if splits_rows(len(spec.shape), (option, *spec.placements)):
        return None
    return Move(kind, axis, spec, spec.with_placements(**{axis: option}))


def _keeps_rows(spec: TensorSpec, current: Placement, option: Placement) -> bool:
    """Return whether rows of experts can be moved between two placements on one axis: a split of
    rows changes only between tokens and experts, and other collectives need to know the sizes."""
    before, after = (p.ragged if isinstance(p, Shard) else None for p in (current, option))
    if before is None and after is None:
        return not spec.is_by_expert or move_kind(current, option) in FREE_KINDS
    if is_integer(spec.dtype):  # the slots of rows are numbered on the rank of their tokens
        return False
    return before is not None and after is not None and before.by != after.by


def _is_early(move: Move, dst: TensorSpec) -> bool:
    """Return whether another axis must exchange the rows first on the way to ``dst``. Rows go to
    their experts over the axes in mesh order, and return in reverse order, because each exchange
    sorts the rows of an expert by the ranks that they come from."""
    to_experts = cuts_experts(move.dst.placement(move.axis))
    axes = move.src.mesh.axes
    at = axes.index(move.axis)
    for axis in axes[:at] if to_experts else axes[at + 1 :]:
        p, q = move.src.placement(axis), dst.placement(axis)
        both_ragged = isinstance(p, Shard) and isinstance(q, Shard) and p.ragged and q.ragged
        if both_ragged and (cuts_experts(p), cuts_experts(q)) == (not to_experts, to_experts):
            return True
    return False


def placements_of_counts(rows: TensorSpec, axis: str) -> dict[str, Placement]:
    """Return the placements of the numbers of rows by expert, i64[experts], that belong to rows
    with the spec ``rows`` before they are exchanged over ``axis``, or after they have returned."""
    placements: dict[str, Placement] = {}
    for name, p in rows.sharding.items():
        if isinstance(p, Shard) and p.ragged is not None:
            by_token = name == axis or not cuts_experts(p)
            placements[name] = Partial("sum") if by_token else on_dim(replace(p, ragged=None), 0)
    return placements


def gather_counts(counts: TensorSpec, axis: str) -> Move:
    """Return the move that gives each rank of ``axis`` the counts of all its ranks, one row each.
    ``counts``: their spec, pending over the axis."""
    num = counts.mesh.axis_size(axis)
    placements = tuple(
        REPLICATE if name == axis else on_dim(p, 1) if isinstance(p, Shard) else p
        for name, p in counts.sharding.items()
    )
    gathered = TensorSpec((num, *counts.shape), counts.dtype, counts.mesh, placements)
    return Move("all_gather", axis, counts, gathered)


def _num_local_elements(spec: TensorSpec, at: Mapping[str, int]) -> int:
    return math.prod(length(spec.intervals(dim, at)) for dim in range(len(spec.shape)))


def _sent_by_gather(move: Move, at: Mapping[str, int]) -> int:
    nbytes = _num_local_elements(move.src, at) * move.src.dtype.itemsize
    return sent_bytes("all_gather", nbytes, move.src.mesh.axis_size(move.axis))


def _sent_by_reduction(move: Move, at: Mapping[str, int]) -> int:
    """Return the bytes that a rank sends in an all_reduce: it scatters the source's dtype, then
    gathers the result's, which may be wider."""
    itemsizes = move.src.dtype.itemsize + move.dst.dtype.itemsize
    nbytes = _num_local_elements(move.src, at) * itemsizes
    return sent_bytes("reduce_scatter", nbytes, move.src.mesh.axis_size(move.axis))


def _sent_by_exchange(move: Move, at: Mapping[str, int]) -> int:
    """Return the bytes of the elements that the rank holds before the move and not after it."""
    if move.is_sized:  # experts with equally many rows
        num = move.src.mesh.axis_size(move.axis)
        return _num_local_elements(move.src, at) * move.src.dtype.itemsize * (num - 1) // num
    cut_dims = _cut_dims(move)
    num_before = num_staying = 1
    for dim in range(len(move.src.shape)):
        intervals = move.src.intervals(dim, at)
        num_before *= length(intervals)
        if dim in cut_dims:
            intervals = intersect(intervals, move.dst.intervals(dim, at))
        num_staying *= length(intervals)
    return (num_before - num_staying) * move.src.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveType:
    """A kind of move.

    ``suffix``: the suffix of the result's name. ``between``: the classes of the placements before
    and after, None if they do not determine the kind. ``sends``: returns the bytes that the rank at
    some coordinates sends; None if the move is local. ``copies``: whether a local move copies
    memory.
    """

    suffix: str
    between: tuple[type[Placement], type[Placement]] | None
    sends: Callable[[Move, Mapping[str, int]], int] | None = None
    copies: bool = True


MOVES: dict[MoveKind, MoveType] = {
    "all_reduce": MoveType(
        suffix="reduced", between=(Partial, Replicate), sends=_sent_by_reduction
    ),
    "all_gather": MoveType(suffix="gathered", between=(Shard, Replicate), sends=_sent_by_gather),
    "reduce_scatter": MoveType(
        suffix="scattered", between=(Partial, Shard), sends=_sent_by_exchange
    ),
    "all_to_all": MoveType(suffix="exchanged", between=(Shard, Shard), sends=_sent_by_exchange),
    "shift": MoveType(
        suffix="shifted", between=None, sends=lambda move, at: move.src.max_local_nbytes
    ),
    "slice": MoveType(suffix="sliced", between=(Replicate, Shard)),
    "fill": MoveType(suffix="pending", between=(Replicate, Partial)),
    "relabel": MoveType(suffix="same", between=None, copies=False),
    "hold": MoveType(suffix="held", between=None, copies=False),
}
"""The kinds of moves by name. The kinds that send messages are also in `COLLECTIVES`."""
FREE_KINDS = tuple(kind for kind, move_type in MOVES.items() if move_type.sends is None)
_KIND_BY_CLASSES = {
    move_type.between: kind for kind, move_type in MOVES.items() if move_type.between is not None
}


def _all_ranks_send_equally(move: Move) -> bool:
    """Return whether all ranks surely send the same number of bytes: all shards have equal sizes,
    and the move is not an exchange within one dim. A shift has the bytes of the largest shard."""
    if move.kind == "shift":
        return True
    src, dst = move.src.placement(move.axis), move.dst.placement(move.axis)
    if isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        return False
    return _unevenness(move.src) == 1 and _unevenness(move.dst) == 1


@lru_cache(maxsize=1 << 13)
def _unevenness(spec: TensorSpec) -> float:
    """Return the bytes of the largest shard over the mean bytes of a shard; 1 if all are equal."""
    parts = math.prod(
        spec.mesh.axis_size(axis)
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Shard)
    )
    return spec.max_local_nbytes * parts / spec.nbytes if spec.nbytes else 1.0


def _cut_dims(move: Move) -> set[int]:
    """Return the dims that the move's axis cuts, before or after the move."""
    ends = move.src.placement(move.axis), move.dst.placement(move.axis)
    return {p.dim for p in ends if isinstance(p, Shard)}


def _coordinates_to_compare(move: Move) -> Iterator[dict[str, int]]:
    """Yield the coordinates of the candidates for the rank that sends most. They differ only on
    axes that cut a dim which the move's axis cuts: on other axes the rank with the largest shard
    sends most."""
    mesh = move.src.mesh
    dims = _cut_dims(move)
    axes = [
        axis
        for axis, placement in move.src.sharding.items()
        if axis == move.axis or (isinstance(placement, Shard) and placement.dim in dims)
    ]
    origin = move.src.fullest
    for at in itertools.product(*(range(mesh.axis_size(axis)) for axis in axes)):
        yield {**origin, **dict(zip(axes, at, strict=True))}
