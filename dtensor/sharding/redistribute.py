"""Redistribution: from one spec to another as a cheapest path of one-axis moves.

    moves("f32[8@tp,16]" -> "f32[8,16@tp]")   ==  all_to_all on tp
    moves("f32[8,16]{sum@tp}" -> "f32[8,16]") ==  all_reduce on tp

A move changes the placement on one axis. Because each placement maps to an index set on the
global dim whatever the other axes do, any axis can be changed alone:

    Shard -> Replicate   all_gather         Partial -> Replicate   all_reduce
    Shard -> Shard'      all_to_all         Partial -> Shard       reduce_scatter
    Replicate -> Shard   slice (free)       Replicate -> Partial   zero_fill (rank 0 keeps; free)

`bytes_sent` is what coordinate 0, the largest, sends: (n-1)/n of the value for all_gather and
reduce_scatter, twice that for all_reduce, and what changes hands for all_to_all. The path is found
by Dijkstra's algorithm over the shardings that mix both ends' placements. Nothing runs here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dtensor.errors import PlanningError
from dtensor.sharding.cost import Topology
from dtensor.sharding.placements import (
    REPLICATE,
    Intervals,
    Partial,
    Placement,
    Replicate,
    Shard,
    intersect,
    length,
    same,
)
from dtensor.sharding.spec import TensorSpec

MoveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "zero_fill", "relabel"
]
_SUFFIXES: dict[MoveKind, str] = {
    "all_reduce": "reduced",
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_to_all": "exchanged",
    "slice": "sliced",
    "zero_fill": "pending",
    "relabel": "same",
}
FREE_KINDS: tuple[MoveKind, ...] = ("slice", "zero_fill", "relabel")


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a redistribution: ``src`` and ``dst`` differ on ``axis`` alone."""

    kind: MoveKind
    axis: str
    src: TensorSpec
    dst: TensorSpec

    @property
    def suffix(self) -> str:
        """What the result's name says of the move: ``h_reduced``."""
        return _SUFFIXES[self.kind]

    @property
    def bytes_sent(self) -> int:
        """Bytes that the rank at coordinate 0 sends."""
        return _bytes_sent(self)

    def seconds(self, topology: Topology) -> float:
        num = self.src.mesh.axis_size(self.axis)
        if self.kind in FREE_KINDS:
            # not communication, but the copy is not nothing: it decides ties
            moved = 0 if self.kind == "relabel" else self.dst.max_local_nbytes
            return topology.compute_seconds(flops=0, bytes_moved=moved)
        return topology.collective_seconds(
            self.kind, self.axis, num=num, bytes_sent=self.bytes_sent
        )


def move_kind(src: Placement, dst: Placement) -> MoveKind | None:
    """The kind of the one-axis move, or None where there is no such move."""
    match src, dst:
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Replicate(), Shard():
            return "slice"
        case Replicate(), Partial("sum"):
            return "zero_fill"
        case _:
            return None


def moves(src: TensorSpec, dst: TensorSpec, topology: Topology) -> tuple[Move, ...]:
    """The cheapest path of moves; () where nothing changes. PlanningError where there is none."""
    path = _path(src, dst, topology)
    if path is None:
        raise PlanningError(f"{src} cannot be redistributed to {dst}")
    return path


def seconds(src: TensorSpec, dst: TensorSpec, topology: Topology) -> float:
    """The price of the cheapest path; infinity where there is none."""
    path = _path(src, dst, topology)
    return math.inf if path is None else sum(move.seconds(topology) for move in path)


@lru_cache(maxsize=65536)
def _path(src: TensorSpec, dst: TensorSpec, topology: Topology) -> tuple[Move, ...] | None:
    if src.shape != dst.shape or src.dtype != dst.dtype or src.mesh != dst.mesh:
        raise PlanningError(f"{src} and {dst} are not two shardings of one value")
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
        done.add(here.placements)
        for axis, options in zip(src.mesh.axes, choices, strict=True):
            for option in options:
                move = _one_move(here, axis, option)
                if move is not None and move.dst.placements not in done:
                    price = cost + move.seconds(topology)
                    heapq.heappush(queue, (price, next(tie), move.dst, (*path, move)))
    return None


def _choices(src: Placement, dst: Placement) -> tuple[Placement, ...]:
    return tuple(dict.fromkeys((src, dst, REPLICATE))) if src != dst else (src,)


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
    dst = here.with_placements(**{axis: option})
    if not covers(dst):
        return None
    return Move(kind, axis, here, dst)


def covers(spec: TensorSpec) -> bool:
    """Whether the shards of all ranks cover the tensor: two axes on a dim may miss parts."""
    by_dim: dict[int, list[str]] = {}
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append(axis)
    for dim, axes in by_dim.items():
        if len(axes) == 1:
            continue
        ranges = [range(spec.mesh.axis_size(a)) for a in axes]
        origin = dict.fromkeys(spec.mesh.axes, 0)
        total = sum(
            length(spec.intervals(dim, origin | dict(zip(axes, at, strict=True))))
            for at in itertools.product(*ranges)
        )
        if total != spec.shape[dim]:
            return False
    return True


def _bytes_sent(move: Move) -> int:
    mesh = move.src.mesh
    num = mesh.axis_size(move.axis)
    origin = dict.fromkeys(mesh.axes, 0)
    itemsize = move.src.dtype.itemsize
    match move.kind:
        case "all_gather":
            return move.src.local_nbytes(origin) * (num - 1)
        case "all_reduce":
            return -(-2 * move.src.local_nbytes(origin) * (num - 1) // num)
        case "reduce_scatter":
            return move.src.local_nbytes(origin) - move.dst.local_nbytes(origin)
        case "all_to_all":
            kept = math.prod(length(i) for i in overlap(move.src, move.dst, origin, origin))
            return move.src.local_nbytes(origin) - kept * itemsize
        case _:
            return 0


def overlap(
    src: TensorSpec,
    dst: TensorSpec,
    sender: Mapping[str, int],
    receiver: Mapping[str, int],
) -> tuple[Intervals, ...]:
    """Per dim, the global indices that ``sender`` holds under src and ``receiver`` under dst."""
    return tuple(
        intersect(src.intervals(dim, sender), dst.intervals(dim, receiver))
        for dim in range(len(src.shape))
    )


def positions(held: Sequence[Intervals], wanted: Sequence[Intervals]) -> tuple[Intervals, ...]:
    """Per dim, where the ``wanted`` global indices stand within a shard that holds ``held``."""
    result: list[Intervals] = []
    for have, want in zip(held, wanted, strict=True):
        found: list[tuple[int, int]] = []
        offset = 0
        for lo, hi in have:
            for a, b in intersect(((lo, hi),), want):
                start = offset + a - lo
                if found and found[-1][1] == start:
                    found[-1] = (found[-1][0], start + b - a)
                else:
                    found.append((start, start + b - a))
            offset += hi - lo
        result.append(tuple(found))
    return tuple(result)
