"""`SyncPlan`: the transfers of many named values between two meshes, in few large messages.

    sync = plan_sync("Net", {"weight": (here, there), "bias": (...)})

Each value has a `TransferPlan` (between_meshes.py). Pieces are cut into blocks of at most
``BUCKET_BYTES``; blocks of all values and dtypes from one rank to another are joined into messages
of at most that size. runtime/transfer/between_meshes.py lowers the plan to a program.

Invariants: the messages hold each piece that is sent exactly once; the blocks of a message are
sorted by falling itemsize, so that each is aligned; the messages are in an order that all ranks
can follow: the first message of each pair, then the second of each; equal specs give equal plans.
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
from dtensor.showing import table

BUCKET_BYTES = 1 << 20
"""The maximum bytes of a message. Several messages let a rank fill the next message while its
partner empties the last. A message of this size stays in a core's cache while two processes of one
host copy it through shared memory: 67 MB on 2 cores took half as long as in messages of 8 MB."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the value ``label``, as global indices."""

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
    """The transfers of all values of a model between two meshes, as `sync_plan` and
    ``run.switch_plan`` return them. Prints the pieces of each value, and the messages of each pair
    of ranks.

    ``transfers``: the transfer of each value by label; ``messages``: in the order of sending;
    ``topology``: the hardware that prices the plan; ``what``: "sync" or "transfer", in text.
    """

    name: str
    transfers: Mapping[str, TransferPlan]
    messages: tuple[SyncMessage, ...]
    topology: Topology
    what: str = "sync"

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks together send to other ranks."""
        return sum(message.bytes_sent for message in self.messages)

    @property
    def bytes_kept(self) -> int:
        """The bytes that are not sent, because their target rank holds them already."""
        return sum(self._kept().values())

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """The bytes that each pair (source rank, target rank) sends."""
        bytes_of: defaultdict[tuple[int, int], int] = defaultdict(int)
        for message in self.messages:
            bytes_of[message.source_rank, message.target_rank] += message.bytes_sent
        return dict(sorted(bytes_of.items()))

    @property
    def seconds(self) -> float:
        """The predicted seconds of the busiest rank, which sends or receives its messages one after
        the other."""
        sent = ((m.source_rank, m.target_rank, m.bytes_sent) for m in self.messages)
        return busiest_seconds(sent, self.topology, self._meshes())

    def __repr__(self) -> str:
        num, sent = len(self.transfers), self.bytes_sent
        return f"<{self.what} of {self.name}: {num} values, {sent:,} bytes>"

    def __str__(self) -> str:
        """Return a table of the pieces of each value, one of the pairs of ranks, and the totals."""
        if not self.transfers:
            return f"{self.what} of {self.name}: no value is on the ranks yet"
        meshes = " -> ".join(map(str, self._meshes()))
        num, pairs = len(self.messages), self.bytes_by_pair
        out: defaultdict[int, int] = defaultdict(int)
        into: defaultdict[int, int] = defaultdict(int)
        for (source, target), sent in pairs.items():
            out[source] += sent
            into[target] += sent
        max_out, max_in = max(out.values(), default=0), max(into.values(), default=0)
        return "\n".join(
            [
                f"{self.what} of {self.name}: {_count(len(self.transfers), 'value')}, {meshes}",
                "",
                *table(list(self._value_rows()), "<<<<>", gap="   "),
                "",
                *table(list(self._pair_rows()), "<>", gap="   "),
                "",
                f"{self.bytes_sent:,} bytes sent in {_count(num, 'message')}, at most {max_out:,} "
                f"by one rank and {max_in:,} to one; {self.bytes_kept:,} are there already",
                f"predicted {self.seconds * 1e6:,.1f} us, {self.topology.title}",
            ]
        )

    def _value_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row of text for each piece of each value."""
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
        """Yield a row of text for each pair that communicates, and each rank that keeps values."""
        yield "pair", "messages", "values", "bytes"
        for pair, sent in self.bytes_by_pair.items():
            messages = [m for m in self.messages if (m.source_rank, m.target_rank) == pair]
            labels = {block.label for message in messages for block in message.blocks}
            what = f"* rank {pair[0]} -> {pair[1]}"
            yield what, f"{len(messages):,}", f"{len(labels):,}", f"{sent:,}"
        for rank, nbytes in sorted(self._kept().items()):
            num_kept = sum(
                any(plan.stays(piece) and piece.target_rank == rank for piece in plan.pieces)
                for plan in self.transfers.values()
            )
            yield f"  rank {rank} keeps", "", f"{num_kept:,}", f"{nbytes:,}"

    def _kept(self) -> dict[int, int]:
        """Return the bytes that each rank keeps, by rank."""
        bytes_of: defaultdict[int, int] = defaultdict(int)
        for plan in self.transfers.values():
            for piece in plan.pieces:
                if plan.stays(piece):
                    count = math.prod(shape_of(piece.ranges))
                    bytes_of[piece.target_rank] += count * plan.source.dtype.itemsize
        return dict(bytes_of)

    def _meshes(self) -> list[Mesh]:
        """Return the distinct meshes of the sources and targets."""
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
    """Return the plan that moves each of ``values``, (present place, new place) by label. The
    largest values are planned first, so that the senders have similar loads. Raises PlanningError
    if a value's two specs differ in shape or dtype, and if the first is pending."""
    sent: dict[int, int] = {}
    plans: dict[str, TransferPlan] = {}
    for label in sorted(values, key=lambda label: (-values[label][0].spec.nbytes, label)):
        plans[label] = plan_transfer(*values[label], sent=sent)
    return join_transfers(name, {n: plans[n] for n in values}, topology, bucket_bytes)


def join_transfers(
    name: str,
    transfers: Mapping[str, TransferPlan],
    topology: Topology | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> SyncPlan:
    """Return the plan that sends these transfers, by label, between the ranks of one cluster in
    messages of at most ``bucket_bytes``."""
    return SyncPlan(
        name=name,
        transfers=dict(transfers),
        messages=tuple(_messages(transfers, bucket_bytes)),
        topology=topology or Topology(),
    )


# -- messages --------------------------------------------------------------------------------------


def _messages(transfers: Mapping[str, TransferPlan], max_bytes: int) -> list[SyncMessage]:
    """Return the messages of at most ``max_bytes`` in the order in which they are sent."""
    blocks: defaultdict[tuple[int, int], list[tuple[Block, int]]] = defaultdict(list)
    by_width = sorted(transfers, key=lambda label: -transfers[label].source.dtype.itemsize)
    for label in by_width:
        plan = transfers[label]
        width = plan.source.dtype.itemsize
        for piece in plan.pieces:
            if plan.stays(piece):
                continue
            blocks_of_pair = blocks[piece.source_rank, piece.target_rank]
            for ranges in _cut(piece.ranges, max(1, max_bytes // width)):
                blocks_of_pair.append((Block(label, ranges), math.prod(shape_of(ranges)) * width))
    size = 1 + max((rank for pair in blocks for rank in pair), default=0)
    messages: list[tuple[tuple[int, int, int], SyncMessage]] = []
    for pair, blocks_of_pair in sorted(blocks.items()):
        for turn, (message_blocks, nbytes) in enumerate(_join(blocks_of_pair, max_bytes)):
            # sorted by distance of the ranks, so that not all ranks send to rank 0 first
            sort_key = (turn, (pair[1] - pair[0]) % size, pair[0])
            messages.append((sort_key, SyncMessage(*pair, message_blocks, nbytes)))
    return [message for _, message in sorted(messages, key=lambda item: item[0])]


def _join(
    blocks: list[tuple[Block, int]], max_bytes: int
) -> Iterator[tuple[tuple[Block, ...], int]]:
    """Yield the blocks of each message, and its bytes. ``blocks``: (block, bytes) of one pair of
    ranks, in the order of sending."""
    message_blocks: list[Block] = []
    total = 0
    for block, nbytes in blocks:
        if message_blocks and total + nbytes > max_bytes:
            yield tuple(message_blocks), total
            message_blocks, total = [], 0
        message_blocks.append(block)
        total += nbytes
    if message_blocks:
        yield tuple(message_blocks), total


def _cut(ranges: Where, max_elements: int) -> Iterator[Where]:
    """Yield blocks of at most ``max_elements``, cut along the first dim of more than one index."""
    if math.prod(shape_of(ranges)) <= max_elements:
        yield ranges
        return
    dim = next(i for i, intervals in enumerate(ranges) if length(intervals) > 1)
    elements_per_index = math.prod(shape_of(ranges[dim + 1 :]))
    for run in _cut_intervals(ranges[dim], max(1, max_elements // elements_per_index)):
        yield from _cut((*ranges[:dim], run, *ranges[dim + 1 :]), max_elements)


def _cut_intervals(intervals: Intervals, max_length: int) -> Iterator[Intervals]:
    """Yield consecutive parts of the intervals with at most ``max_length`` indices each."""
    part: list[tuple[int, int]] = []
    room = max_length
    for lo, hi in intervals:
        while lo < hi:
            num = min(room, hi - lo)
            part.append((lo, lo + num))
            lo, room = lo + num, room - num
            if not room:
                yield tuple(part)
                part, room = [], max_length
    if part:
        yield tuple(part)


# -- text ------------------------------------------------------------------------------------------


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'s' * (num != 1)}"
