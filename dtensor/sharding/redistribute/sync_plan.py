"""Many named values between two meshes: the pieces of each, in few large messages.

    sync = plan_sync("Net", {"weight": (here, there), "bias": (...)})

    sync of Net: 2 values, mesh(dp=2, name="train") -> mesh(tp=2, name="play")

      bias     f32[4]      -> f32[4@tp]      0 -> 2 [0:2]      8 bytes
                                             1 -> 3 [2:4]      8 bytes
      ...

    pair                messages   values    bytes
    * rank 0 -> 2              1        2       40
    ...

Each value is a `TransferPlan` (between_meshes.py): a target's rank gets the elements that it lacks,
each once, and keeps those that it holds already. Among replicas that could send, the one with the
fewest bytes so far sends, the largest values first, so that no rank is the bottleneck.

The data from one rank to another is cut into blocks of at most ``BUCKET_BYTES``, and blocks of any
values and dtypes are joined into messages of at most that size: large, so that their latency does
not count, and several, so that a rank fills the next while its partner empties the last.

Invariants: the messages hold each piece that crosses ranks exactly once; within a message blocks
are sorted by falling size of their elements, so that each is aligned for its dtype; messages are in
an order that all ranks can follow: the first of each pair, then the second of each. The same specs
give the same plan. This file runs nothing: runtime/transfer/between_meshes.py makes a program of
the plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dtensor.sharding.redistribute.between_meshes import (
    TransferPlan,
    box_text,
    busiest_seconds,
    plan_transfer,
)
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Intervals, length
from dtensor.sharding.spec.shards import Where, shape_of
from dtensor.sharding.spec.stored import StoredTensor

BUCKET_BYTES = 1 << 20
"""Most bytes of a message between processes of one host: it is copied into shared memory and out
again, and stays in a core's cache meanwhile (67 MB on 2 cores took half as long as in 8 MB)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the value ``label``, by global indices."""

    label: str
    ranges: Where


@dataclass(frozen=True, slots=True)
class SyncMessage:
    """A message from one rank to another; ranks are numbers in the cluster."""

    source_rank: int
    target_rank: int
    blocks: tuple[Block, ...]
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """The result of `sync_plan` and ``run.switch_plan``: the transfers between ranks of all values
    of a model. It prints each value's pieces, and the messages of each pair of ranks.

    ``transfers``: each value's, by label; ``messages``: in the order in which they are sent;
    ``topology``: the hardware of the price; ``what``: its name in text, "sync" or "transfer".
    """

    name: str
    transfers: Mapping[str, TransferPlan]
    messages: tuple[SyncMessage, ...]
    topology: Topology
    what: str = "sync"

    @property
    def bytes_sent(self) -> int:
        """Bytes sent from one rank to another, all ranks together."""
        return sum(message.bytes_sent for message in self.messages)

    @property
    def bytes_kept(self) -> int:
        """Bytes that are not sent, since their target rank has them already."""
        return sum(self._kept().values())

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) to bytes, of the pairs that communicate."""
        bytes_of: defaultdict[tuple[int, int], int] = defaultdict(int)
        for message in self.messages:
            bytes_of[message.source_rank, message.target_rank] += message.bytes_sent
        return dict(sorted(bytes_of.items()))

    @property
    def seconds(self) -> float:
        """Predicted seconds of the busiest rank: its messages, in or out, one after the other."""
        sent = ((m.source_rank, m.target_rank, m.bytes_sent) for m in self.messages)
        return busiest_seconds(sent, self.topology, self._meshes())

    def __repr__(self) -> str:
        num, sent = len(self.transfers), self.bytes_sent
        return f"<{self.what} of {self.name}: {num} values, {sent:,} bytes>"

    def __str__(self) -> str:
        if not self.transfers:
            return f"{self.what} of {self.name}: no value is on the ranks yet"
        meshes = " -> ".join(map(str, self._meshes()))
        num, pairs = len(self.messages), self.bytes_by_pair
        out: defaultdict[int, int] = defaultdict(int)
        into: defaultdict[int, int] = defaultdict(int)
        for (source, target), sent in pairs.items():
            out[source] += sent
            into[target] += sent
        most = max(out.values(), default=0), max(into.values(), default=0)
        return "\n".join(
            [
                f"{self.what} of {self.name}: {_count(len(self.transfers), 'value')}, {meshes}",
                "",
                *_aligned(list(self._value_rows()), "<<<<>"),
                "",
                *_aligned(list(self._pair_rows()), "<>>>"),
                "",
                f"{self.bytes_sent:,} bytes sent in {_count(num, 'message')}, at most {most[0]:,} "
                f"by one rank and {most[1]:,} to one; {self.bytes_kept:,} are there already",
                f"predicted {self.seconds * 1e6:,.1f} us, {self.topology.title}",
            ]
        )

    def _value_rows(self) -> Iterator[tuple[str, ...]]:
        for label, plan in self.transfers.items():
            head = (f"  {label}", str(plan.source), f"-> {plan.target}")
            for piece in plan.pieces:
                box, to = box_text(piece.ranges, plan.source.shape), piece.target_rank
                if plan.stays(piece):
                    yield *head, f"  {to} keeps {box}", ""
                else:
                    pair = f"* {piece.source_rank} -> {to} {box}"
                    yield *head, pair, f"{piece.bytes_sent:,} bytes"
                head = ("", "", "")
            if not plan.pieces:
                yield *head, "  empty", ""

    def _pair_rows(self) -> Iterator[tuple[str, ...]]:
        yield "pair", "messages", "values", "bytes"
        for pair, sent in self.bytes_by_pair.items():
            messages = [m for m in self.messages if (m.source_rank, m.target_rank) == pair]
            labels = {block.label for message in messages for block in message.blocks}
            what = f"* rank {pair[0]} -> {pair[1]}"
            yield what, f"{len(messages):,}", f"{len(labels):,}", f"{sent:,}"
        for rank, nbytes in sorted(self._kept().items()):
            kept = (t for t in self.transfers.values() if _keeps(t, rank))
            yield f"  rank {rank} keeps", "", f"{sum(1 for _ in kept):,}", f"{nbytes:,}"

    def _kept(self) -> dict[int, int]:
        bytes_of: defaultdict[int, int] = defaultdict(int)
        for plan in self.transfers.values():
            for piece in plan.pieces:
                if plan.stays(piece):
                    count = math.prod(shape_of(piece.ranges))
                    bytes_of[piece.target_rank] += count * plan.source.dtype.itemsize
        return dict(bytes_of)

    def _meshes(self) -> list[Mesh]:
        return list(
            dict.fromkeys(
                m for t in self.transfers.values() for m in (t.source.mesh, t.target.mesh)
            )
        )


def plan_sync(
    name: str,
    values: Mapping[str, tuple[StoredTensor, StoredTensor]],
    *,
    topology: Topology | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> SyncPlan:
    """The transfers of each value from its present home to its new one.

    Raises PlanningError as `plan_transfer` does.
    """
    sent: dict[int, int] = {}
    plans: dict[str, TransferPlan] = {}
    for label in sorted(values, key=lambda label: (-values[label][0].spec.nbytes, label)):
        plans[label] = plan_transfer(*values[label], sent=sent)
    return of_transfers(name, {n: plans[n] for n in values}, topology, bucket_bytes)


def of_transfers(
    name: str,
    transfers: Mapping[str, TransferPlan],
    topology: Topology | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> SyncPlan:
    """Transfers among the ranks of one cluster, together."""
    return SyncPlan(
        name=name,
        transfers=dict(transfers),
        messages=tuple(_messages(transfers, bucket_bytes)),
        topology=topology or Topology(),
    )


# -- messages --------------------------------------------------------------------------------------


def _messages(transfers: Mapping[str, TransferPlan], most: int) -> list[SyncMessage]:
    blocks: defaultdict[tuple[int, int], list[tuple[Block, int]]] = defaultdict(list)
    by_width = sorted(transfers, key=lambda label: -transfers[label].source.dtype.itemsize)
    for label in by_width:
        plan = transfers[label]
        width = plan.source.dtype.itemsize
        for piece in plan.pieces:
            if plan.stays(piece):
                continue
            blocks_of_pair = blocks[piece.source_rank, piece.target_rank]
            for ranges in _cut(piece.ranges, max(1, most // width)):
                blocks_of_pair.append((Block(label, ranges), math.prod(shape_of(ranges)) * width))
    size = 1 + max((rank for pair in blocks for rank in pair), default=0)
    messages: list[tuple[tuple[int, int, int], SyncMessage]] = []
    for pair, blocks_of_pair in sorted(blocks.items()):
        for turn, (together, nbytes) in enumerate(_filled(blocks_of_pair, most)):
            # not all to the same rank first
            place = (turn, (pair[1] - pair[0]) % size, pair[0])
            messages.append((place, SyncMessage(*pair, together, nbytes)))
    return [message for _, message in sorted(messages, key=lambda item: item[0])]


def _filled(blocks: list[tuple[Block, int]], most: int) -> Iterator[tuple[tuple[Block, ...], int]]:
    together: list[Block] = []
    total = 0
    for block, nbytes in blocks:
        if together and total + nbytes > most:
            yield tuple(together), total
            together, total = [], 0
        together.append(block)
        total += nbytes
    if together:
        yield tuple(together), total


def _cut(ranges: Where, most: int) -> Iterator[Where]:
    """Blocks of at most so many elements, cut along the first dim that has more than one."""
    if math.prod(shape_of(ranges)) <= most:
        yield ranges
        return
    dim = next(i for i, intervals in enumerate(ranges) if length(intervals) > 1)
    each = math.prod(shape_of(ranges[dim + 1 :]))
    for run in _runs(ranges[dim], max(1, most // each)):
        yield from _cut((*ranges[:dim], run, *ranges[dim + 1 :]), most)


def _runs(intervals: Intervals, most: int) -> Iterator[Intervals]:
    run: list[tuple[int, int]] = []
    room = most
    for lo, hi in intervals:
        while lo < hi:
            num = min(room, hi - lo)
            run.append((lo, lo + num))
            lo, room = lo + num, room - num
            if not room:
                yield tuple(run)
                run, room = [], most
    if run:
        yield tuple(run)


# -- text ------------------------------------------------------------------------------------------


def _keeps(plan: TransferPlan, rank: int) -> bool:
    return any(plan.stays(piece) and piece.target_rank == rank for piece in plan.pieces)


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}{'s' * (num != 1)}"


def _aligned(rows: list[tuple[str, ...]], sides: str) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(sides))]
    return [
        "   ".join(
            f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths)
        ).rstrip()
        for row in rows
    ]
