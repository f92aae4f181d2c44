"""The transport between actors on CPUs: gloo's point-to-point messages, and nothing else of gloo.

Every collective is an exchange of bytes among its members and a left fold at `wait`, so that the
bits do not depend on gloo, that pieces may be uneven or empty and of any dtype, and that a start
never blocks. One process group spans all actors; each direction of transfer and each (group,
channel) has a tag of its own, on which gloo keeps the order.

    all_reduce    up to 64 KiB, or 2 members: everyone sends everything and folds
                  else: pieces to their owner, who folds, then the folded pieces to all. The second
                  half runs in the channel's helper thread: a rank must not need its peer to reach
                  its own `wait`, or programs that the verifier accepts could hang.
    the others    one exchange

Ranks that share an actor use the `LocalTransport`. A collective with members of both sorts has no
route: `check_routes` refuses it at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor.daft.errors import ProgramError
from dtensor.daft.instructions import Buffer, Call, Collective, Free, Recv, Send, Wait
from dtensor.daft.local import LocalTransport
from dtensor.daft.program import Program
from dtensor.daft.transport import Pending, Transport, fold

SMALL_BYTES = 1 << 16

Key: TypeAlias = tuple[tuple[int, ...], str, str]
"""(ranks, channel, "transfer" | "collective"): what has an order of its own."""


class Messenger(Protocol):
    """What is used of `ProcessGroupGloo`, whose stubs leave it out."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> dist.Work: ...


Finish: TypeAlias = Callable[[], tuple[Tensor, ...]]


def key_of(rank: int, start: Send | Recv | Collective) -> Key:
    match start:
        case Send(to=to, channel=channel):
            return ((rank, to), channel, "transfer")
        case Recv(source_rank=source, channel=channel):
            return ((source, rank), channel, "transfer")
        case Collective(group=group, channel=channel):
            return (group, channel, "collective")
        case _:
            assert_never(start)


def check_routes(program: Program, actor_of: Sequence[int]) -> list[Key]:
    """The keys that cross actors, sorted. `ProgramError` for a collective that does so in part."""
    found: set[Key] = set()
    for rank, own in enumerate(program.ranks):
        for instruction in own.instructions:
            match instruction:
                case Send() | Recv() | Collective():
                    key = key_of(rank, instruction)
                    actors = {actor_of[member] for member in key[0]}
                    if 1 < len(actors) < len(key[0]):
                        raise ProgramError(
                            f"Program {program.name!r}: a collective over {key[0]} has members "
                            f"that share an actor and members that do not (actors "
                            f"{[actor_of[member] for member in key[0]]}).\n"
                            f"  Fix: launch with ranks_per_actor=1, or with all members on one."
                        )
                    if len(actors) > 1:
                        found.add(key)
                case Call() | Wait() | Free():
                    pass
                case _:
                    assert_never(instruction)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Posted(Pending):
    works: tuple[dist.Work, ...]
    finish: Finish

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.finish()


@dataclass(frozen=True, slots=True)
class _Helped(Pending):
    future: Future[tuple[Tensor, ...]]

    def wait(self) -> tuple[Tensor, ...]:
        return self.future.result()


class GlooTransport(Transport):
    def __init__(self, group: Messenger, actor_of: Sequence[int]) -> None:
        self.tags: dict[Key, int] = {}  # filled at load, the same on all actors
        self._group: Messenger | None = group
        self._actor_of = tuple(actor_of)
        self._local = LocalTransport()
        self._helpers: dict[int, ThreadPoolExecutor] = {}

    def start_send(self, rank: int, send: Send, value: Tensor) -> Pending:
        if self._actor_of[rank] == self._actor_of[send.to]:
            return self._local.start_send(rank, send, value)
        tag = self.tags[key_of(rank, send)]
        return _Posted(self._post({send.to: as_bytes(value)}, {}, tag), tuple)

    def start_recv(self, rank: int, recv: Recv) -> Pending:
        if self._actor_of[rank] == self._actor_of[recv.source_rank]:
            return self._local.start_recv(rank, recv)
        tag, buffer = self.tags[key_of(rank, recv)], recv.buffer
        data = torch.empty(buffer.nbytes, dtype=torch.uint8)
        works = self._post({}, {recv.source_rank: data}, tag)
        return _Posted(works, lambda: (from_bytes(data, buffer),))

    def start_collective(
        self, rank: int, collective: Collective, values: Sequence[Tensor]
    ) -> Pending:
        group = collective.group
        key = key_of(rank, collective)
        if key not in self.tags:
            return self._local.start_collective(rank, collective, values)
        tag = self.tags[key]
        total = sum(buffer.nbytes for buffer in collective.in_buffers)
        if collective.kind == "all_reduce" and len(group) > 2 and total > SMALL_BYTES:
            return self._start_large_all_reduce(rank, collective, values, tag)
        sends, recvs = messages(rank, collective, values)
        data = {m: torch.empty(b, dtype=torch.uint8) for m, b in recvs.items()}
        works = self._post(sends, data, tag)
        return _Posted(works, lambda: finish(rank, collective, values, data))

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.shutdown(wait=False, cancel_futures=True)
        self._group = None
        self._local.close()

    def _post(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int
    ) -> tuple[dist.Work, ...]:
        """Start messages to and from ranks; empty ones are not sent, which both sides know."""
        group = self._group
        if group is None:
            raise RuntimeError("The connections of this actor are closed.")
        works = [
            group.recv([data], self._actor_of[member], tag)
            for member, data in recvs.items()
            if data.numel()
        ]
        works += [
            group.send([data], self._actor_of[member], tag)
            for member, data in sends.items()
            if data.numel()
        ]
        return tuple(works)

    def _start_large_all_reduce(
        self, rank: int, collective: Collective, values: Sequence[Tensor], tag: int
    ) -> Pending:
        group, op = collective.group, collective.op
        assert op is not None
        # A piece of every tensor of the bucket for each member; the first ones are the larger.
        pieces = {
            member: [v.contiguous().reshape(-1).tensor_split(len(group))[m] for v in values]
            for m, member in enumerate(group)
        }
        others = [member for member in group if member != rank]
        own_bytes = sum(piece.nbytes for piece in pieces[rank])
        data = {member: torch.empty(own_bytes, dtype=torch.uint8) for member in others}
        sends = {member: pack_bytes(pieces[member]) for member in others}
        works = self._post(sends, data, tag)

        def rest() -> tuple[Tensor, ...]:
            torch.set_num_threads(1)
            for work in works:
                work.wait()
            buffers = [Buffer.of(piece) for piece in pieces[rank]]
            parts = {member: unpack_bytes(data[member], buffers) for member in others}
            parts[rank] = tuple(pieces[rank])
            folded = [fold([parts[m][i] for m in group], op) for i in range(len(values))]
            message = pack_bytes(folded)
            gathered = {
                member: torch.empty(sum(p.nbytes for p in pieces[member]), dtype=torch.uint8)
                for member in others
            }
            for work in self._post({m: message for m in others}, gathered, tag + 1):
                work.wait()
            done = {m: unpack_bytes(gathered[m], [Buffer.of(p) for p in pieces[m]]) for m in others}
            done[rank] = tuple(folded)
            return tuple(
                torch.cat([done[m][i] for m in group]).reshape(buffer.shape)
                for i, buffer in enumerate(collective.out_buffers)
            )

        if tag not in self._helpers:
            self._helpers[tag] = ThreadPoolExecutor(1, f"channel {collective.channel}")
        return _Helped(self._helpers[tag].submit(torch.no_grad()(rest)))


def messages(
    rank: int, collective: Collective, values: Sequence[Tensor]
) -> tuple[dict[int, Tensor], dict[int, int]]:
    """What this rank sends to each other member (bytes), and how many bytes it gets from each."""
    group, outs = collective.group, collective.out_buffers
    others = [(m, member) for m, member in enumerate(group) if member != rank]
    match collective.kind:
        case "all_reduce":
            message = pack_bytes(values)
            return {r: message for _, r in others}, {r: message.numel() for _, r in others}
        case "all_gather":
            message = as_bytes(values[0])
            return {r: message for _, r in others}, {r: outs[m].nbytes for m, r in others}
        case "reduce_scatter":
            sends = {r: as_bytes(values[m]) for m, r in others}
            return sends, {r: outs[0].nbytes for _, r in others}
        case "all_to_all":
            sends = {r: as_bytes(values[m]) for m, r in others}
            return sends, {r: outs[m].nbytes for m, r in others}
        case "broadcast":
            if rank != group[0]:
                return {}, {group[0]: outs[0].nbytes}
            message = as_bytes(values[0])
            return {r: message for _, r in others}, {}
        case _:
            assert_never(collective.kind)


def finish(
    rank: int, collective: Collective, values: Sequence[Tensor], data: Mapping[int, Tensor]
) -> tuple[Tensor, ...]:
    """This rank's results, from its own values and what has come from the others."""
    group, outs = collective.group, collective.out_buffers
    me = group.index(rank)
    match collective.kind:
        case "all_reduce" | "reduce_scatter":
            op = collective.op
            assert op is not None
            parts = {member: unpack_bytes(raw, outs) for member, raw in data.items()}
            parts[rank] = (values[me],) if collective.kind == "reduce_scatter" else tuple(values)
            return tuple(fold([parts[m][i] for m in group], op) for i in range(len(outs)))
        case "all_gather" | "all_to_all":
            own = values[0] if collective.kind == "all_gather" else values[me]
            return tuple(
                own.clone(memory_format=torch.contiguous_format)
                if member == rank
                else from_bytes(data[member], outs[m])
                for m, member in enumerate(group)
            )
        case "broadcast":
            if rank != group[0]:
                return (from_bytes(data[group[0]], outs[0]),)
            return (values[0].clone(memory_format=torch.contiguous_format),)
        case _:
            assert_never(collective.kind)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, buffer: Buffer) -> Tensor:
    return data.view(buffer.dtype).reshape(buffer.shape)


def pack_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all, end to end; without a copy for a single one."""
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def unpack_bytes(data: Tensor, buffers: Sequence[Buffer]) -> tuple[Tensor, ...]:
    """The inverse of `pack_bytes`. Copies: a part need not be aligned for its dtype."""
    if len(buffers) == 1:
        return (from_bytes(data, buffers[0]),)
    parts = torch.split(data, [buffer.nbytes for buffer in buffers])
    return tuple(from_bytes(p.clone(), b) for p, b in zip(parts, buffers, strict=True))
