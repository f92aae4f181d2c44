"""Programs that move values between two meshes: ranks send, receive and join blocks.

    program = sync_program(plan_sync("Net", {...}), 4, device, names)
    cluster.run(cluster.load(program), [{}] * 4)      # state "policy w" to state "actor w"
    program = transfer_program(plan_transfer(source, target), 4, device)
    cluster.run(cluster.load(program), fed)           # rank r's shard: input "x", output "y"

A rank handles messages in the plan's order, with `MAX_IN_FLIGHT` of each pair in flight. Before it
waits for a message it has started all earlier messages, so no cycle of waits exists. New values
replace the old values after all ranks agree that they have received everything, so a failure on
one rank changes no value on any rank. If source and target do not share a cluster, the controller
carries the blocks with `pieces_of` and `shard_from`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Function,
    Instruction,
    Label,
    Program,
    RankProgram,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.ir.instructions import WORD
from dtensor.numerics import ReduceOp, rest_of
from dtensor.sharding.redistribute.between_meshes import (
    TransferPlan,
    box_of,
)
from dtensor.sharding.redistribute.sync_plan import (
    BUCKET_BYTES,
    SyncMessage,
    SyncPlan,
    join_transfers,
)
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.shards import Where, block, join, positions, shape_of, write

MAX_IN_FLIGHT = 4
"""Messages of a pair of ranks that are in flight at a time."""

Names = Mapping[str, tuple[str, str]]
"""By label, the names of a value on the source's ranks and on the target's ranks."""


def sync_program(plan: SyncPlan, size: int, device: torch.device, names: Names) -> Program:
    """Return the program of a sync on a cluster of ``size`` ranks, from state to state."""
    return values_program(plan, size, device, names, state=True)


def transfer_program(plan: TransferPlan, size: int, device: torch.device) -> Program:
    """Return the program that transfers one value, from input "x" to output "y", on a cluster of
    ``size`` ranks."""
    alone = join_transfers("transfer", {"": plan}, bucket_bytes=bucket_bytes(device))
    return values_program(alone, size, device, {"": ("x", "y")}, state=False)


def values_program(
    plan: SyncPlan,
    size: int,
    device: torch.device,
    names: Names,
    *,
    state: bool,
    also_agree: Collection[int] = (),
) -> Program:
    """Return the program that moves values, from state to state or from inputs to outputs.

    ``also_agree``: ranks that take part in the agreement without sending or receiving, because the
    caller adds instructions for them.
    """
    functions: dict[str, Function] = {}
    active = {message.source_rank for message in plan.messages}.union(also_agree)
    active |= {rank for t in plan.transfers.values() for rank in t.there.ranks}
    group = tuple(sorted(active)) if plan.messages or also_agree else ()
    ranks = tuple(
        _RankInstructions(plan, rank, device, names, functions, group, state).program()
        for rank in range(size)
    )
    return Program(
        name=f"{plan.what} of {plan.name}" if state else plan.name,
        ranks=ranks,
        functions=tuple(functions.items()),
        stage_of=(0,) * size,
    )


def bucket_bytes(device: torch.device) -> int:
    """Return the greatest size of a message in bytes. GPUs need larger messages to hide latency."""
    return BUCKET_BYTES if device.type == "cpu" else 1 << 25


def pieces_of(plan: TransferPlan, index: int, shard: torch.Tensor) -> list[torch.Tensor]:
    """Return the blocks that rank ``index`` of the source's mesh sends, in the plan's order."""
    rank = plan.here.numbers[index]
    return [
        block(shard, positions(box_of(plan.source, index), piece.ranges))
        for piece in plan.pieces
        if piece.source_rank == rank
    ]


def shard_from(
    plan: TransferPlan, index: int, blocks: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the shard of rank ``index`` of the target's mesh, joined from blocks in the plan's
    order."""
    box = box_of(plan.target, index)
    rank_pieces = [p for p in plan.pieces if p.target_rank == plan.there.numbers[index]]
    if not blocks:
        empty = torch.zeros(shape_of(box), dtype=plan.target.dtype, device=device)
        return rest_of(empty, _pending_op(plan))
    return join(blocks, shape_of(box), *(positions(box, piece.ranges) for piece in rank_pieces))


def agreement(group: tuple[int, ...], what: str) -> tuple[Instruction, ...]:
    """Return the instructions of a commit point of the ranks ``group``: after it, no rank of the
    group has failed in an earlier call."""
    label = Label(what)
    if len(group) == 1:
        alone = Vote("vote", label=label), Commit("vote", label=label)
        return (*alone, Free(("vote",), label=label))
    words = ("vote",), ("votes",), (WORD,), (WORD,)
    return (
        Vote("vote", label=label),
        Collective("all_reduce", group, *words, "sum", f"{what} agreed", label=label),
        Wait(("votes",), label=label),
        Commit("votes", label=label),
        Free(("vote", "votes"), label=label),
    )


# -- functions that ranks call
# -------------------------------------------------------------------------------


def allocate(
    shards: Sequence[tuple[tuple[int, ...], torch.dtype, ReduceOp | None]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return new memory for values; a pending value is filled with its op's identity."""
    return tuple(
        torch.empty(shape, dtype=dtype, device=device)
        if op is None
        else rest_of(torch.zeros(shape, dtype=dtype, device=device), op)
        for shape, dtype, op in shards
    )


def copy_blocks(
    copies: Sequence[tuple[int, Where, int, Where]], *values: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Copy for each (source, place, target, place) the source's block to the target's place."""
    for source, here, target, there in copies:
        write(values[target], block(values[source], here), there)
    return ()


def pack(blocks: Sequence[tuple[int, Where]], *values: torch.Tensor) -> tuple[torch.Tensor]:
    """Return blocks of values as one message of bytes; a single block is its own message."""
    blocks_sent = [block(values[i], where) for i, where in blocks]
    if len(blocks_sent) == 1:
        return (blocks_sent[0],)
    return (torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in blocks_sent]),)


def unpack(
    blocks: Sequence[tuple[int, Where]], message: torch.Tensor, *values: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Copy the message's blocks into the values."""
    if len(blocks) == 1:
        number, where = blocks[0]
        write(values[number], message, where)
        return ()
    begin = 0
    for number, where in blocks:
        shape = shape_of(where)
        end = begin + torch.Size(shape).numel() * values[number].itemsize
        write(values[number], message[begin:end].view(values[number].dtype).view(shape), where)
        begin = end
    return ()


def placed(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the values, to be stored under their final names."""
    return values


# -- one rank's list -------------------------------------------------------------------------------


@dataclass(slots=True)
class _RankInstructions:
    """The instructions of one rank. ``names``: by label of a value, its names on the ranks;
    ``group``: the ranks that agree at the end, empty if no message is needed."""

    plan: SyncPlan
    rank: int
    device: torch.device
    names: Names
    functions: dict[str, Function]
    group: tuple[int, ...]
    state: bool
    items: list[Instruction] = field(default_factory=list[Instruction], init=False)
    nbytes: dict[str, int] = field(default_factory=dict[str, int], init=False)
    source_boxes: dict[str, Where] = field(default_factory=dict[str, Where], init=False)
    target_boxes: dict[str, Where] = field(default_factory=dict[str, Where], init=False)

    def program(self) -> RankProgram:
        """Return the rank's list: allocate, copy local blocks, exchange messages, agree, place."""
        for label, plan in self.plan.transfers.items():
            for boxes, stored in ((self.source_boxes, plan.here), (self.target_boxes, plan.there)):
                if self.rank in stored.ranks:
                    boxes[label] = stored.where(stored.at[stored.ranks.index(self.rank)])
        self._make()
        self._copy()
        self._exchange()
        if self.rank in self.group:  # before the new values are placed
            self.items += agreement(self.group, self._what)
        self._place()
        sources = [self.names[label][0] for label in self.source_boxes]
        targets = [self.names[label][1] for label in self.target_boxes]
        rank_program = RankProgram(
            instructions=tuple(self.items), nbytes=tuple(self.nbytes.items())
        )
        if not self.state:
            return replace(rank_program, inputs=tuple(sources), outputs=tuple(targets))
        # Sizes of state are not declared, because its spec may change in the program.
        state = tuple(dict.fromkeys((*sources, *targets))) if self.items else ()
        return replace(rank_program, state=state)

    def _make(self) -> None:
        """Allocate the values that this rank will hold."""
        if not self.target_boxes:
            return
        shards: list[tuple[tuple[int, ...], torch.dtype, ReduceOp | None]] = []
        for label, box in self.target_boxes.items():
            spec, shape = self.plan.transfers[label].target, shape_of(box)
            is_pending = any(isinstance(p, Partial) for p in spec.placements)
            op = _pending_op(self.plan.transfers[label]) if is_pending else None
            shards.append((shape, spec.dtype, op))
            self.nbytes[self._new_name(label)] = torch.Size(shape).numel() * spec.dtype.itemsize
        self._call("make", partial(allocate, shards, self.device), (), self._new_names())

    def _copy(self) -> None:
        """Copy the blocks that this rank already has."""
        copies: list[tuple[str, Where]] = [
            (label, piece.ranges)
            for label, plan in self.plan.transfers.items()
            for piece in plan.pieces
            if piece.target_rank == self.rank and plan.stays(piece)
        ]
        if not copies:
            return
        labels = list(dict.fromkeys(label for label, _ in copies))
        number = {label: i for i, label in enumerate(labels)}
        wheres = [
            (
                number[label],
                positions(self.source_boxes[label], ranges),
                len(labels) + number[label],
                positions(self.target_boxes[label], ranges),
            )
            for label, ranges in copies
        ]
        new = tuple(self._new_name(label) for label in labels)
        sources = tuple(self.names[label][0] for label in labels)
        self._call("keep", partial(copy_blocks, wheres), (*sources, *new), (), new)

    def _exchange(self) -> None:
        """Start the rank's messages in the plan's order, MAX_IN_FLIGHT per pair of ranks at a
        time."""
        in_flight: dict[tuple[int, int], deque[tuple[int, SyncMessage]]] = {}
        for number, message in enumerate(self.plan.messages):
            pair = message.source_rank, message.target_rank
            if self.rank not in pair:
                continue
            queue = in_flight.setdefault(pair, deque())
            self._start(number, message)
            queue.append((number, message))
            if len(queue) == MAX_IN_FLIGHT:
                self._complete(*queue.popleft())
        remaining = sorted(
            (item for queue in in_flight.values() for item in queue), key=lambda i: i[0]
        )
        for number, message in remaining:
            self._complete(number, message)

    def _start(self, number: int, message: SyncMessage) -> None:
        """Pack and send a message, or start to receive it."""
        name, pair = f"m{number}", (message.source_rank, message.target_rank)
        channel, label = f"{self._what} {pair[0]}->{pair[1]}", Label(self._what)
        buffer = self._buffer(message)
        if self.rank == message.target_rank:
            self.items.append(Recv(name, pair[0], channel, buffer, lent=True, label=label))
            return
        labels, blocks = _blocks(message, self.source_boxes)
        sources = tuple(self.names[label][0] for label in labels)
        self._call(f"pack {number}", partial(pack, blocks), sources, (name,))
        self.nbytes[name] = buffer.nbytes
        self.items.append(Send(name, pair[1], channel, buffer, label=label))

    def _complete(self, number: int, message: SyncMessage) -> None:
        """Wait for a message, and unpack it if this rank received it."""
        name, label = f"m{number}", Label(self._what)
        self.items.append(Wait((name,), label=label))
        if self.rank == message.target_rank:
            labels, blocks = _blocks(message, self.target_boxes)
            new = tuple(map(self._new_name, labels))
            self._call(f"unpack {number}", partial(unpack, blocks), (name, *new), (), new)
        self.items.append(Free((name,), label=label))

    def _place(self) -> None:
        """Store new values under their final names, after the commit point if there is one."""
        if self.state and self.target_boxes:
            new, names = (
                self._new_names(),
                tuple(self.names[label][1] for label in self.target_boxes),
            )
            self._call("place", placed, new, names)
            self.items.append(Free(new, label=Label(self._what)))

    def _call(
        self,
        name: str,
        fn: Callable[..., tuple[torch.Tensor, ...]],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        writes: tuple[str, ...] = (),
    ) -> None:
        name = f"{name} on {self.rank}"
        self.functions[name] = Function.of(fn, name)
        self.items.append(Call(name, inputs, outputs, writes, label=Label(self._what)))

    def _new_names(self) -> tuple[str, ...]:
        return tuple(self._new_name(label) for label in self.target_boxes)

    def _new_name(self, label: str) -> str:
        """Return the temporary name of a new value until it is placed."""
        return f"new {label}" if self.state else self.names[label][1]

    def _buffer(self, message: SyncMessage) -> Buffer:
        alone, *others = message.blocks
        if others:
            return Buffer((message.bytes_sent,), torch.uint8)
        return Buffer(shape_of(alone.ranges), self.plan.transfers[alone.label].source.dtype)

    @property
    def _what(self) -> str:
        return self.plan.what if self.state else "transfer"


def _blocks(
    message: SyncMessage, boxes: Mapping[str, Where]
) -> tuple[list[str], list[tuple[int, Where]]]:
    """Return the labels of a message, and for each of its blocks the label's number and the block's
    position in the rank's shard."""
    labels = list(dict.fromkeys(block.label for block in message.blocks))
    number = {label: i for i, label in enumerate(labels)}
    return labels, [(number[b.label], positions(boxes[b.label], b.ranges)) for b in message.blocks]


def _pending_op(plan: TransferPlan) -> ReduceOp:
    """Return the target's pending op; "sum" if the target is not pending."""
    ops: list[ReduceOp] = [p.op for p in plan.target.placements if isinstance(p, Partial)]
    return ops[0] if ops else "sum"
