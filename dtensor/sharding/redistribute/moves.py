"""Redistribution: from one spec to another as a cheapest path of one-axis moves.

    moves("f32[8@tp,16]" -> "f32[8,16@tp]")   ==  all_to_all on tp
    moves("f32[8,16]{sum@tp}" -> "f32[8,16]") ==  all_reduce on tp

A move changes the placement on one axis. Because each placement maps to an index set on the global
dim whatever the other axes do, any axis can be changed alone:

    Shard -> Replicate   all_gather         Partial -> Replicate   all_reduce
    Shard -> Shard'      all_to_all         Partial -> Shard       reduce_scatter
    Replicate -> Shard   slice (free)       Replicate -> Partial   fill (rank 0 keeps; free)

A pending value is filled with its reduction's identity; a reduction without one, such as a maximum,
cannot be made from a whole value. The last dim of a value that is pending under a reduction with a
unit is never split.

`bytes_sent` counts the bytes of the rank that sends most: (n-1)/n of the value for all_gather and
reduce_scatter, twice that for all_reduce, and the blocks that change ranks for all_to_all. The path
is found by Dijkstra's algorithm over the shardings that mix both ends' placements. Where two axes
or more change, or shards are very uneven, a path through further shardings may be cheaper: a value
pending over a and b is scattered over a, reduced over b and gathered over a; `12@a,5@b` becomes
`12@b,5@a` by way of `12@(b,a),5`. As it has more collectives, it must save `WORTH` of the price; as
the shardings are many, the search ends after `MAX_EXPANDED`, which on three axes may miss one. Axes
on which both ends agree do not change. tests/sharding/redistribution_search.py compares with a
search over all shardings of many families. This file runs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtensor.collectives import COLLECTIVES
from dtensor.errors import PlanningError
from dtensor.numerics import REDUCTIONS
from dtensor.sharding.redistribute.topology import Topology, sent_bytes
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    counted,
    intersect,
    length,
    pieces,
    same,
    splits_rows,
)
from dtensor.sharding.spec.spec import TensorSpec

MoveKind = str
"""A name in `MOVES`: of a collective, or of a move without messages."""
WORTH = 0.01
"""The part of the price that a path through further shardings must save."""
MAX_EXPANDED = 100
"""Most shardings that a search for such a path visits: on two axes this is nearly all."""
_TIE = 1e-13
"""Seconds a move: of paths that cost the same, the one with fewer moves."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a redistribution: ``src`` and ``dst`` differ on ``axis`` alone; a reduction may
    have a result of a wider dtype (plan/precision.py)."""

    kind: MoveKind
    axis: str
    src: TensorSpec
    dst: TensorSpec

    @property
    def suffix(self) -> str:
        """The suffix of the result's name: ``h_reduced``."""
        return MOVES[self.kind].suffix

    @property
    def reduces(self) -> bool:
        """Whether it is a collective that folds."""
        return self.kind in COLLECTIVES and COLLECTIVES[self.kind].reduces

    @property
    def bytes_sent(self) -> int:
        """Bytes that the rank which sends most sends."""
        return _bytes_sent(self)

    def seconds(self, topology: Topology) -> float:
        num = self.src.mesh.axis_size(self.axis)
        if self.kind in FREE_KINDS:
            # not communication, but the copy has a cost, which decides ties
            moved = self.dst.max_local_nbytes if MOVES[self.kind].copies else 0
            return topology.compute_seconds(flops=0, bytes_moved=moved)
        return topology.collective_seconds(
            self.kind, self.axis, num=num, bytes_sent=self.bytes_sent
        )


@lru_cache(maxsize=1 << 13)  # searches between other ends come by the same shardings
def _bytes_sent(move: Move) -> int:
    sends = MOVES[move.kind].sends
    if sends is None:
        return 0
    if _alike_on_all_ranks(move):
        return sends(move, dict.fromkeys(move.src.mesh.axes, 0))
    return max(sends(move, at) for at in _ranks_that_differ(move))


def move_kind(src: Placement, dst: Placement) -> MoveKind | None:
    """The kind of the one-axis move, or None if there is no such move."""
    if isinstance(dst, Partial) and REDUCTIONS[dst.op].identity is None:
        return None
    return _BETWEEN.get((type(src), type(dst)))


def moves(
    src: TensorSpec, dst: TensorSpec, topology: Topology, *, whole: bool = False
) -> tuple[Move, ...]:
    """The cheapest path of moves; () where nothing changes. PlanningError where there is none.

    ``whole``: through placements of both ends and Replicate alone, so that an all_reduce stays one
    move, for example if several values share it in a bucket. It takes a hundredth of the time.
    """
    path = _path(src, dst, topology, whole)
    if path is None:
        raise PlanningError(f"{src} cannot be redistributed to {dst}")
    return path


def seconds(src: TensorSpec, dst: TensorSpec, topology: Topology, *, whole: bool = False) -> float:
    """The price of the cheapest path, as in `moves`; infinity where there is none."""
    path = _path(src, dst, topology, whole)
    return math.inf if path is None else _price(path, topology)


@lru_cache(maxsize=1 << 13)
def _path(
    src: TensorSpec, dst: TensorSpec, topology: Topology, whole: bool
) -> tuple[Move, ...] | None:
    if src.shape != dst.shape or src.dtype != dst.dtype or src.mesh != dst.mesh:
        raise PlanningError(f"{src} and {dst} are not two shardings of one value")
    plain = _search(src, dst, topology)
    changing = sum(p != q for p, q in zip(src.placements, dst.placements, strict=True))
    if plain is None or whole or (changing < 2 and _unevenness(src) < 1.5):
        return plain
    price = _price(plain, topology)
    if price - _least_latency(src, dst, topology) < WORTH * price:
        return plain
    return _search(src, dst, topology, below=(1 - WORTH) * price) or plain


def _price(path: Sequence[Move], topology: Topology) -> float:
    return sum(move.seconds(topology) for move in path)


def _least_latency(src: TensorSpec, dst: TensorSpec, topology: Topology) -> float:
    """A lower bound of each path's latency: of the collectives that each axis needs alone."""
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
    """Dijkstra's algorithm over the placements of both ends and Replicate.

    ``below``: over further shardings too, for a path that is cheaper than this.
    """
    choices = [_choices(src.placement(axis), dst.placement(axis)) for axis in src.mesh.axes]
    tie = itertools.count()
    queue: list[tuple[float, int, TensorSpec, tuple[Move, ...]]] = [(0.0, next(tie), src, ())]
    done: set[tuple[Placement, ...]] = set()
    while queue:
        cost, _, here, path = heapq.heappop(queue)
        if here.placements == dst.placements:
            return path
        if here.placements in done:
            continue
        if below is not None and len(done) == MAX_EXPANDED:
            return None
        done.add(here.placements)
        for axis, options in zip(src.mesh.axes, choices, strict=True):
            if below is not None and len(options) > 1:
                options = tuple(dict.fromkeys((*options, *_further(here, (src, dst), axis))))
            for option in options:
                move = _one_move(here, axis, option)
                if move is not None and move.dst.placements not in done:
                    price = cost + move.seconds(topology) + _TIE
                    rest = 0.0 if below is None else _least_latency(move.dst, dst, topology)
                    if below is None or price + rest < below:
                        heapq.heappush(queue, (price, next(tie), move.dst, (*path, move)))
    return None


def _further(
    here: TensorSpec, ends: tuple[TensorSpec, TensorSpec], axis: str
) -> tuple[Placement, ...]:
    """Possible intermediate placements of an axis: each dim, within the pieces that other axes cut.

    Those pieces are of ``here`` or of one of the ends, so that a move on another axis leaves this
    axis's pieces in place. The virtual axis of microbatches runs in time: nothing is scattered over
    it.
    """
    if axis == MICROBATCH_AXIS or ends[0].mesh.axis_size(axis) == 1:
        return ()
    placements: dict[Placement, None] = {}
    for dim, size in enumerate(here.shape):
        if size == 0:
            continue
        cuts = [spec.cuts(dim, but=axis) for spec in (here, *ends)]
        for majors in (*cuts, cuts[1] + cuts[2]):
            placements[counted(Shard(dim, pieces(majors, size)), size)] = None
    return tuple(placements)


def _choices(src: Placement, dst: Placement) -> tuple[Placement, ...]:
    return tuple(dict.fromkeys((src, dst, REPLICATE))) if src != dst else (src,)


@lru_cache(maxsize=1 << 13)
def _one_move(here: TensorSpec, axis: str, option: Placement) -> Move | None:
    current = here.placement(axis)
    if option == current:
        return None
    num = here.mesh.axis_size(axis)
    kind: MoveKind | None = move_kind(current, option)
    if isinstance(current, Shard) and same(current, option, here.shape, num):
        kind = "relabel"
    if kind is None:
        return None
    if isinstance(option, Partial) and any(
        isinstance(p, Partial) and p.op != option.op for p in here.placements
    ):
        return None  # a value is not pending in two ways at once
    if splits_rows(len(here.shape), (option, *here.placements)):
        return None
    return Move(kind, axis, here, here.with_placements(**{axis: option}))


def _held(spec: TensorSpec, here: Mapping[str, int]) -> int:
    """The elements of a rank's shard."""
    return math.prod(length(spec.intervals(dim, here)) for dim in range(len(spec.shape)))


def _sent_by_gather(move: Move, here: Mapping[str, int]) -> int:
    nbytes = _held(move.src, here) * move.src.dtype.itemsize
    return sent_bytes("all_gather", nbytes, move.src.mesh.axis_size(move.axis))


def _sent_by_reduction(move: Move, here: Mapping[str, int]) -> int:
    """Bytes sent in a reduction; its result may be gathered in a wider dtype."""
    each = move.src.dtype.itemsize + move.dst.dtype.itemsize
    return sent_bytes(
        "reduce_scatter", _held(move.src, here) * each, move.src.mesh.axis_size(move.axis)
    )


def _sent_by_exchange(move: Move, here: Mapping[str, int]) -> int:
    """Bytes of the blocks that change ranks."""
    cut = _dims(move)
    held = kept = 1
    for dim in range(len(move.src.shape)):
        intervals = move.src.intervals(dim, here)
        held *= length(intervals)
        if dim in cut:
            intervals = intersect(intervals, move.dst.intervals(dim, here))
        kept *= length(intervals)
    return (held - kept) * move.src.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveType:
    """A kind of move.

    ``between``: the placements on its axis before and after, None if these do not determine it.
    ``suffix``: of the result's name. ``sends``: the bytes that the rank at some coordinates sends;
    None: none sends any, as it is no collective. ``copies``: whether a rank makes its result, if it
    sends nothing.
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
    "slice": MoveType(suffix="sliced", between=(Replicate, Shard)),
    "fill": MoveType(suffix="pending", between=(Replicate, Partial)),
    "relabel": MoveType(suffix="same", between=None, copies=False),
}
"""Kinds of moves by name; those with messages are in `COLLECTIVES`."""
FREE_KINDS = tuple(kind for kind, what in MOVES.items() if what.sends is None)
_BETWEEN = {what.between: kind for kind, what in MOVES.items() if what.between is not None}


def _alike_on_all_ranks(move: Move) -> bool:
    """Whether all ranks send equally much: even shards, and no exchange within one dim."""
    src, dst = move.src.placement(move.axis), move.dst.placement(move.axis)
    if isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        return False
    return _unevenness(move.src) == 1 and _unevenness(move.dst) == 1


@lru_cache(maxsize=1 << 13)
def _unevenness(spec: TensorSpec) -> float:
    """The bytes of the largest shard over those of an even one; 1 if all are equal."""
    parts = math.prod(
        spec.mesh.axis_size(axis)
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Shard)
    )
    return spec.max_local_nbytes * parts / spec.nbytes if spec.nbytes else 1.0


def _dims(move: Move) -> set[int]:
    """The dims that the move's axis cuts, before or after it."""
    ends = move.src.placement(move.axis), move.dst.placement(move.axis)
    return {p.dim for p in ends if isinstance(p, Shard)}


def _ranks_that_differ(move: Move) -> Iterator[dict[str, int]]:
    """Coordinates on the axes that cut a dim which the move's axis cuts, before or after it.

    Along the other axes coordinate 0 has the largest shard, and so sends the most.
    """
    mesh = move.src.mesh
    dims = _dims(move)
    axes = [
        axis
        for axis, placement in move.src.sharding.items()
        if axis == move.axis or (isinstance(placement, Shard) and placement.dim in dims)
    ]
    origin = dict.fromkeys(mesh.axes, 0)
    for at in itertools.product(*(range(mesh.axis_size(axis)) for axis in axes)):
        yield {**origin, **dict(zip(axes, at, strict=True))}
