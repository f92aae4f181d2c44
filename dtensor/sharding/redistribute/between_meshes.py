"""Transfer: which blocks go from which rank to which, between two specs on two meshes.

    here = StoredTensor.of("x", parse("f32[8@tp,4]", Mesh(tp=2)), (0, 1), (0, 1))
    plan_transfer(here, StoredTensor.of("y", parse("f32[8@x,4]", Mesh(x=4)), range(4), range(4)))

    transfer f32[8@tp,4] on mesh(tp=2) -> f32[8@x,4] on mesh(x=4)
      rank 0 keeps   [0:2,:]
    * rank 0 -> 1    [2:4,:]     32 bytes
    * rank 1 -> 2    [4:6,:]     32 bytes
    * rank 1 -> 3    [6:8,:]     32 bytes
      96 bytes sent, at most 64 by one rank

The meshes may differ in size, names and shape. Each axis cuts a dim into disjoint index sets, so
the source's distinct shards are disjoint boxes that fill the tensor; a target's shard is filled by
its intersections with them. What a rank already holds, where both meshes live on one set of ranks,
it keeps. Of several ranks that hold a piece, the one that sends the least so far gives it, and of
equals the target's own number picks (target rank modulo the number of holders), so that replicas
share the work; the same specs give the same pieces. sync_plan.py plans many values together.

A pending source must be reduced first. A pending target takes the value at coordinate 0 and what
adds nothing elsewhere (sum, softmax), or the value everywhere (max, min). Nothing runs here:
runtime/transfer/between_meshes.py makes a program of it.
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
from dtensor.sharding.spec.shards import Where, held, shape_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of the global tensor that ``source_rank`` has and ``target_rank`` is to hold.

    Ranks are numbers in the cluster that hosts both meshes. Where they are equal the block stays
    on its rank and no byte is sent; it is not so where the meshes' ranks are distinct.
    """

    source_rank: int
    target_rank: int
    ranges: Where
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The pieces, by target rank, then source rank.

    ``here``: the value as it is stored, ``there``: as it is to be; ``distinct``: the two meshes
    live on different clusters, so that equal numbers are different ranks.
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
        """Bytes that go from one rank to another, all ranks together."""
        return sum(piece.bytes_sent for piece in self.pieces)

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) to bytes, of the pairs that communicate."""
        bytes_of: defaultdict[tuple[int, int], int] = defaultdict(int)
        for piece in self.pieces:
            if piece.bytes_sent:
                bytes_of[piece.source_rank, piece.target_rank] += piece.bytes_sent
        return dict(sorted(bytes_of.items()))

    def seconds(self, topology: Topology) -> float:
        """The price: the busiest rank's messages and bytes, in or out, one after the other.

        A transfer runs along no axis of either mesh, so the slowest axis that a topology names is
        what counts.
        """
        messages = ((*pair, sent) for pair, sent in self.bytes_by_pair.items())
        return busiest_seconds(messages, topology, (self.source.mesh, self.target.mesh))

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for piece in self.pieces:
            box = box_text(piece.ranges, self.source.shape)
            if self.stays(piece):
                rows.append((f"  rank {piece.source_rank} keeps", box, ""))
            else:
                pair = f"* rank {piece.source_rank} -> {piece.target_rank}"
                rows.append((pair, box, f"{piece.bytes_sent} bytes"))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [f"{a:<{widths[0]}}   {b:<{widths[1]}}   {c}".rstrip() for a, b, c in rows]
        by_rank: defaultdict[int, int] = defaultdict(int)
        for (source, _), sent in self.bytes_by_pair.items():
            by_rank[source] += sent
        most = max(by_rank.values(), default=0)
        return "\n".join(
            [
                f"transfer {self.source} on {self.source.mesh} -> "
                f"{self.target} on {self.target.mesh}",
                *lines,
                f"  {self.bytes_sent} bytes sent, at most {most} by one rank",
            ]
        )

    def stays(self, piece: Piece) -> bool:
        """Whether its rank has it already."""
        return not self.distinct and piece.source_rank == piece.target_rank


def plan_transfer(
    here: StoredTensor,
    there: StoredTensor,
    *,
    distinct: bool = False,
    sent: dict[int, int] | None = None,
) -> TransferPlan:
    """The cheapest way of one value from where it is to where it is to be.

    Args:
        distinct: the meshes live on different clusters; nothing is kept.
        sent: by the cluster's rank, the bytes that it sends of other values; these are added.

    Raises PlanningError for specs of different tensors, and for a pending source.
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
            f"{source} is pending over {', '.join(pending)}, and a transfer moves values, not "
            f"summands; fix: x.redistribute({fixed}) first"
        )
    pieces = _pieces(here, there, distinct, {} if sent is None else sent)
    return TransferPlan(here=here, there=there, distinct=distinct, pieces=tuple(pieces))


def busiest_seconds(
    messages: Iterable[tuple[int, int, int]], topology: Topology, meshes: Sequence[Mesh]
) -> float:
    """Messages (source rank, target rank, bytes), of one rank one after the other, in or out."""
    latency, bandwidth = _slowest(topology, meshes)
    out: defaultdict[int, float] = defaultdict(float)
    into: defaultdict[int, float] = defaultdict(float)
    for source, target, nbytes in messages:
        out[source] += latency + nbytes / bandwidth
        into[target] += latency + nbytes / bandwidth
    return max([*out.values(), *into.values()], default=0.0)


def holders_of(spec: TensorSpec) -> tuple[int, ...]:
    """The ranks of the mesh that hold the value: those on its part (``spec.on``)."""
    mesh = spec.mesh
    if not spec.on:
        return tuple(range(mesh.size))
    return tuple(
        rank
        for rank in range(mesh.size)
        if all(mesh.coordinates(rank)[axis] == index for axis, index in spec.on)
    )


def box_of(spec: TensorSpec, rank: int) -> Where:
    """What the rank holds of the global tensor."""
    return held(spec, spec.mesh.coordinates(rank))


def is_neutral(spec: TensorSpec, rank: int) -> bool:
    """Whether the rank holds what adds nothing to a pending value: away from coordinate 0."""
    here = spec.mesh.coordinates(rank)
    return any(
        isinstance(p, Partial) and REDUCTIONS[p.op].identity is not None and here[axis] > 0
        for axis, p in spec.sharding.items()
    )


# -- the pieces --------------------------------------------------------------------------------


def _pieces(
    here: StoredTensor, there: StoredTensor, distinct: bool, sent: dict[int, int]
) -> list[Piece]:
    holders: dict[Where, list[int]] = {}
    for rank, number in here.numbers.items():
        holders.setdefault(here.where(rank), []).append(number)
    in_order: list[Piece] = []
    for rank, own in there.numbers.items():
        if is_neutral(there.spec, rank):
            continue
        wanted = there.where(rank)
        pieces: list[Piece] = []
        for box, owners in holders.items():
            ranges = tuple(intersect(a, b) for a, b in zip(box, wanted, strict=True))
            count = math.prod(shape_of(ranges))
            if count == 0:
                continue
            if not distinct and own in owners:
                pieces.append(Piece(own, own, ranges, 0))
                continue
            turned = owners[rank % len(owners) :] + owners[: rank % len(owners)]
            sender = min(turned, key=lambda owner: sent.get(owner, 0))
            nbytes = count * here.spec.dtype.itemsize
            sent[sender] = sent.get(sender, 0) + nbytes
            pieces.append(Piece(sender, own, ranges, nbytes))
        in_order += sorted(pieces, key=lambda piece: (piece.source_rank, piece.ranges))
    return in_order


def _slowest(topology: Topology, meshes: Sequence[Mesh]) -> tuple[float, float]:
    axes = sorted({axis for mesh in meshes for axis in mesh.axes})
    latencies = [topology.latency_of(a) for a in axes if _known(topology.latency, a)]
    bandwidths = [topology.bandwidth_of(a) for a in axes if _known(topology.bandwidth, a)]
    if axes and not (latencies and bandwidths):
        raise PlanningError(
            f"the topology states no latency or no bandwidth for any of the axes {axes}; "
            f"fix: name one of them, or give one number for all"
        )
    return max(latencies, default=0.0), min(bandwidths, default=math.inf)


def _known(value: object, axis: str) -> bool:
    return not isinstance(value, dict) or axis in value


def box_text(box: Where, shape: tuple[int, ...]) -> str:
    parts: list[str] = []
    for intervals, size in zip(box, shape, strict=True):
        if intervals == ((0, size),):
            parts.append(":")
        else:
            parts.append("+".join(f"{lo}:{hi}" for lo, hi in intervals))
    return f"[{','.join(parts)}]"
