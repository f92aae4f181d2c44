"""`TransferPlan`: which blocks of one value go from which rank to which, between two meshes.

    transfer f32[8@tp,4] on mesh(tp=2) -> f32[8@x,4] on mesh(x=4)
      rank 0 keeps   [0:2,:]
    * rank 0 -> 1    [2:4,:]     32 bytes
    * rank 1 -> 2    [4:6,:]     32 bytes
    * rank 1 -> 3    [6:8,:]     32 bytes
      96 bytes sent, at most 64 by one rank

A target's shard is filled from its intersections with the distinct shards of the source, which are
disjoint boxes. sync_plan.py plans many values; runtime/transfer/between_meshes.py runs the plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtensor.errors import PlanningError
from dtensor.numerics import REDUCTIONS
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Partial, intersect
from dtensor.sharding.spec.shards import Where, held_indices, shape_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.showing import table


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of the global tensor that ``source_rank`` holds and ``target_rank`` needs. Ranks are
    numbers in a cluster. If they are equal and both meshes are on one cluster, the block stays on
    its rank and ``bytes_sent`` is 0."""

    source_rank: int
    target_rank: int
    ranges: Where
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The pieces that move one value, sorted by target rank, then source rank.

    ``here``: the present place of the value; ``there``: its new place. ``distinct``: the two meshes
    are on different clusters, so that equal numbers are different ranks.
    """

    here: StoredTensor
    there: StoredTensor
    distinct: bool
    pieces: tuple[Piece, ...]

    @property
    def source(self) -> TensorSpec:
        return self.here.spec

    @property
    def target(self) -> TensorSpec:
        return self.there.spec

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks together send to other ranks."""
        return sum(piece.bytes_sent for piece in self.pieces)

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """The bytes that each pair (source rank, target rank) sends, without pairs that send
        nothing."""
        bytes_of: defaultdict[tuple[int, int], int] = defaultdict(int)
        for piece in self.pieces:
            if piece.bytes_sent:
                bytes_of[piece.source_rank, piece.target_rank] += piece.bytes_sent
        return dict(sorted(bytes_of.items()))

    def seconds(self, topology: Topology) -> float:
        """Return the predicted seconds of the busiest rank, which sends or receives its messages
        one after the other. Each message is priced by the slowest axis of the two meshes, because a
        transfer does not run along one axis."""
        messages = ((*pair, sent) for pair, sent in self.bytes_by_pair.items())
        return busiest_seconds(messages, topology, (self.source.mesh, self.target.mesh))

    def __str__(self) -> str:
        """Return a line for each piece that moves or stays, and the bytes sent."""
        rows: list[tuple[str, str, str]] = []
        for piece in self.pieces:
            box = box_text(piece.ranges, self.source.shape)
            if self.stays(piece):
                rows.append((f"  rank {piece.source_rank} keeps", box, ""))
            else:
                pair = f"* rank {piece.source_rank} -> {piece.target_rank}"
                rows.append((pair, box, f"{piece.bytes_sent} bytes"))
        lines = table(rows, "<", gap="   ")
        by_rank: defaultdict[int, int] = defaultdict(int)
        for (source, _), sent in self.bytes_by_pair.items():
            by_rank[source] += sent
        max_sent = max(by_rank.values(), default=0)
        return "\n".join(
            [
                f"transfer {self.source} on {self.source.mesh} -> "
                f"{self.target} on {self.target.mesh}",
                *lines,
                f"  {self.bytes_sent} bytes sent, at most {max_sent} by one rank",
            ]
        )

    def stays(self, piece: Piece) -> bool:
        """Return whether the piece's target rank holds it already."""
        return not self.distinct and piece.source_rank == piece.target_rank


def plan_transfer(
    here: StoredTensor,
    there: StoredTensor,
    *,
    distinct: bool = False,
    sent: dict[int, int] | None = None,
) -> TransferPlan:
    """Return the plan that moves a value from its present place ``here`` to its new place
    ``there``. Equal arguments give equal plans.

    A rank keeps pieces that it holds already. If several ranks hold a piece, the rank that has sent
    the fewest bytes sends it; the target's rank breaks ties, so that replicas share the work.
    A pending target gets the value at coordinate 0 and the identity elsewhere (sum, softmax), or
    the value everywhere (max, min).

    Args:
        distinct: the meshes are on different clusters, so that no rank keeps anything.
        sent: the bytes that each rank of the cluster sends of other values; updated.

    Raises PlanningError if the specs differ in shape or dtype, and if the source is pending.
    """
    source, target = here.spec, there.spec
    if source.shape != target.shape or source.dtype != target.dtype:
        raise PlanningError(
            f"{source} and {target} are not two placements of one value; "
            f"fix: state the target with the source's shape and dtype"
        )
    pending = [axis for axis, p in source.sharding.items() if isinstance(p, Partial)]
    if pending:
        fixed = ", ".join(f"{axis}=dt.Replicate()" for axis in pending)
        raise PlanningError(
            f"{source} is pending over {', '.join(pending)}, and a transfer cannot reduce it; "
            f"fix: x.redistribute({fixed}) first"
        )
    pieces = _pieces(here, there, distinct, {} if sent is None else sent)
    return TransferPlan(here=here, there=there, distinct=distinct, pieces=tuple(pieces))


def busiest_seconds(
    messages: Iterable[tuple[int, int, int]], topology: Topology, meshes: Sequence[Mesh]
) -> float:
    """Return the seconds of the busiest rank, which sends or receives its messages one after the
    other. ``messages``: (source rank, target rank, bytes)."""
    latency, bandwidth = _slowest_axis(topology, meshes)
    out: defaultdict[int, float] = defaultdict(float)
    into: defaultdict[int, float] = defaultdict(float)
    for source, target, nbytes in messages:
        out[source] += latency + nbytes / bandwidth
        into[target] += latency + nbytes / bandwidth
    return max([*out.values(), *into.values()], default=0.0)


def holders_of(spec: TensorSpec) -> tuple[int, ...]:
    """Return the ranks of the mesh that hold the value: the ranks in the part ``spec.on``."""
    mesh = spec.mesh
    if not spec.on:
        return tuple(range(mesh.size))
    return tuple(
        rank
        for rank in range(mesh.size)
        if all(mesh.coordinates(rank)[axis] == index for axis, index in spec.on)
    )


def box_of(spec: TensorSpec, rank: int) -> Where:
    """Return the global indices that the rank holds."""
    return held_indices(spec, spec.mesh.coordinates(rank))


def holds_identity(spec: TensorSpec, rank: int) -> bool:
    """Return whether the rank's shard of a pending value is the reduction's identity."""
    coordinates = spec.mesh.coordinates(rank)
    return any(
        isinstance(p, Partial) and REDUCTIONS[p.op].identity is not None and coordinates[axis] > 0
        for axis, p in spec.sharding.items()
    )


# -- the pieces --------------------------------------------------------------------------------


def _pieces(
    here: StoredTensor, there: StoredTensor, distinct: bool, sent: dict[int, int]
) -> list[Piece]:
    """Return the pieces of all target ranks, and add the bytes that each rank sends to ``sent``. A
    rank keeps a piece that it holds; otherwise the holder that has sent fewest bytes sends it.
    ``here``, ``there``: the present and the new place of the value."""
    holders: dict[Where, list[int]] = {}
    for rank, number in here.numbers.items():
        holders.setdefault(here.where(rank), []).append(number)
    all_pieces: list[Piece] = []
    for rank, target in there.numbers.items():
        if holds_identity(there.spec, rank):
            continue
        needed_indices = there.where(rank)
        pieces: list[Piece] = []
        for box, owners in holders.items():
            ranges = tuple(intersect(a, b) for a, b in zip(box, needed_indices, strict=True))
            count = math.prod(shape_of(ranges))
            if count == 0:
                continue
            if not distinct and target in owners:
                pieces.append(Piece(target, target, ranges, 0))
                continue
            # among owners that have sent equally much, each target rank prefers another one
            rotated = owners[rank % len(owners) :] + owners[: rank % len(owners)]
            sender = min(rotated, key=lambda owner: sent.get(owner, 0))
            nbytes = count * here.spec.dtype.itemsize
            sent[sender] = sent.get(sender, 0) + nbytes
            pieces.append(Piece(sender, target, ranges, nbytes))
        all_pieces += sorted(pieces, key=lambda piece: (piece.source_rank, piece.ranges))
    return all_pieces


def _slowest_axis(topology: Topology, meshes: Sequence[Mesh]) -> tuple[float, float]:
    """Return the largest latency and the smallest bandwidth of the meshes' axes."""
    axes = sorted({axis for mesh in meshes for axis in mesh.axes})
    latencies = [topology.latency_of(a) for a in axes if _is_stated(topology.latency, a)]
    bandwidths = [topology.bandwidth_of(a) for a in axes if _is_stated(topology.bandwidth, a)]
    if axes and not (latencies and bandwidths):
        raise PlanningError(
            f"the topology states no latency or no bandwidth for any of the axes {axes}; "
            f"fix: name one of them, or give one number for all"
        )
    return max(latencies, default=0.0), min(bandwidths, default=math.inf)


def _is_stated(value: object, axis: str) -> bool:
    return not isinstance(value, dict) or axis in value


def box_text(box: Where, shape: tuple[int, ...]) -> str:
    """Return the text of a block of a tensor of ``shape``: ``[2:4,:]``."""
    parts: list[str] = []
    for intervals, size in zip(box, shape, strict=True):
        if intervals == ((0, size),):
            parts.append(":")
        else:
            parts.append("+".join(f"{lo}:{hi}" for lo, hi in intervals))
    return f"[{','.join(parts)}]"
