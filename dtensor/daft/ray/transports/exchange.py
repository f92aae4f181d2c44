"""The transport between actors over a `Wire`: each collective is an exchange of bytes, then a fold.

Members send at the start and fold in rank order at the wait. So the bits do not depend on the wire
(`gloo.py` or `nccl.py`), shards may be uneven or empty, and a start never blocks. A wire may have
some collectives of its own (`Wire.begin`), whose sums have another order.

    large all_reduce     each member gets a piece and folds it; then all get the folded pieces. The
                         second half is `Wire.later`: no member needs another to reach its `wait`
    other collectives    one exchange

An all_reduce is large if it has more than 64 KiB and more than two members. Invariants: messages
are flat, contiguous, uint8 and not empty; messages of one key keep their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, assert_never

import torch
from torch import Tensor

from dtensor.collectives import SMALL_ALL_REDUCE
from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, key_of
from dtensor.daft.run.transport import (
    Begin,
    LocalTransport,
    Pending,
    Transport,
    combined,
    copied,
)
from dtensor.numerics import REDUCTIONS, fold

FRAME_BYTES = 1 << 12  # the size of the first message of a value of unknown length

Finish: TypeAlias = Callable[[], tuple[Tensor, ...]]
Messages: TypeAlias = Mapping[int, Tensor]
"""Rank to the message for it, or to the buffer for its message."""


class Work(Protocol):
    """The used part of torch's `Work`."""

    def wait(self) -> object: ...


class Wire(ABC):
    """Carries messages between ranks on different actors."""

    @abstractmethod
    def open(self, tags: Mapping[Key, int]) -> None:
        """Connect for these keys. All actors call it with the same numbers."""

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """Return an uninitialized buffer for a message."""

    @abstractmethod
    def post(self, key: Key, sends: Messages, recvs: Messages, half: int) -> Sequence[Work]:
        """Start the messages of an exchange, none of which is empty. `half`: 1 for the second half
        of a large all_reduce, else 0."""

    def begin(self, key: Key, rank: int, collective: Collective) -> Begin | None:
        """Return the function that starts a collective of the wire's library; None if the
        collective is an exchange of messages."""
        return None

    @abstractmethod
    def later(self, key: Key, finish: Finish) -> Pending:
        """Call `finish`, which waits and posts, without blocking this rank; in order by key."""

    @abstractmethod
    def close(self) -> None:
        """Break all connections."""


@dataclass(frozen=True, slots=True)
class Posted(Pending):
    """Messages in flight, and the function that computes the result from them."""

    works: Sequence[Work]
    finish: Finish
    kept_messages: Messages = field(
        default_factory=dict[int, Tensor]
    )  # keeps buffers alive until sent

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.finish()


class ExchangeTransport(Transport):
    """The transport of an actor over a wire. `host_of`: the actor of each rank. Ranks of one actor
    use a `LocalTransport` and no wire."""

    def __init__(self, wire: Wire, host_of: Sequence[int]) -> None:
        self._wire = wire
        self._tags: dict[Key, int] = {}
        self._host_of = tuple(host_of)
        self._local = LocalTransport()

    def open(self, tags: Mapping[Key, int]) -> None:
        """Connect for the keys of a program that is about to be loaded."""
        self._wire.open(tags)
        self._tags.update(tags)

    def begin(self, rank: int, start: Start) -> Begin:
        """Return the function that starts a message: over the wire if its ranks are on different
        actors, else by `LocalTransport`."""
        key = key_of(rank, start)
        match start:
            case Send():
                if self._host_of[rank] == self._host_of[start.to]:
                    return self._local.begin(rank, start)
                if start.buffer.variable:
                    return lambda values, rows=(): self._start_variable_send(
                        key, start.to, values[0]
                    )
                return lambda values, rows=(): self._start_send(key, start.to, values[0])
            case Recv():
                if self._host_of[rank] == self._host_of[start.source_rank]:
                    return self._local.begin(rank, start)
                if start.buffer.variable:
                    return lambda values, rows=(): self._start_variable_recv(key, start)
                return lambda values, rows=(): self._start_recv(key, start)
            case Collective():
                if key not in self._tags:
                    return self._local.begin(rank, start)
                if (begin := self._wire.begin(key, rank, start)) is not None:
                    return begin
                if in_two_halves(start):
                    return partial(self._start_large_all_reduce, rank, start, key)
                return partial(self._start_collective, rank, start, key)
            case _:
                assert_never(start)

    def _start_send(self, key: Key, to: int, value: Tensor) -> Pending:
        sends = {to: as_bytes(value)}
        return Posted(self._post(key, sends, {}), tuple, sends)

    def _start_recv(self, key: Key, recv: Recv) -> Pending:
        data = self._wire.empty(recv.buffer.nbytes)
        works = self._post(key, {}, {recv.source_rank: data})
        return Posted(works, lambda: (from_bytes(data, recv.buffer),))

    def _start_collective(
        self,
        rank: int,
        collective: Collective,
        key: Key,
        values: Sequence[Tensor],
        rows: Sequence[int] = (),
    ) -> Pending:
        """Exchange contributions with all other members in one message each, and combine them when
        all have arrived."""
        position = collective.group.index(rank)
        all_get_all = not (collective.does.divided or collective.does.rotates)
        packed = pack_bytes(values) if all_get_all else None
        sends: dict[int, Tensor] = {}
        data: dict[int, Tensor] = {}
        for m, member in enumerate(collective.group):
            if m != position:
                sent = collective.given(values, position, m)
                sends[member] = pack_bytes(sent) if packed is None else packed
                nbytes = sum(buffer.nbytes for buffer in expected(collective, position, m, rows))
                data[member] = self._wire.empty(nbytes)

        def finish() -> tuple[Tensor, ...]:
            """Combine the received parts with this rank's own contribution."""
            parts: list[Sequence[Tensor]] = [
                unpack_bytes(data[member], expected(collective, position, m, rows))
                if m != position
                else ()
                for m, member in enumerate(collective.group)
            ]
            own = collective.given(values, position, position)
            parts[position] = own if collective.op is not None else list(map(copied, own))
            return combined(collective, parts)

        return Posted(self._post(key, sends, data), finish, sends)

    def close(self) -> None:
        self._wire.close()
        self._local.close()

    def _post(self, key: Key, sends: Messages, recvs: Messages, half: int = 0) -> Sequence[Work]:
        """Post all messages that are not empty. Neither side expects an empty message."""
        sends = {member: data for member, data in sends.items() if data.numel()}
        recvs = {member: data for member, data in recvs.items() if data.numel()}
        return self._wire.post(key, sends, recvs, half) if sends or recvs else ()

    def _start_variable_send(self, key: Key, to: int, value: Tensor) -> Pending:
        """Send a frame with the length and the first bytes; then the other bytes, as `half` 1,
        since the frames of later sends may overtake them."""
        data, frame = as_bytes(value), torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        num_first_bytes = min(data.numel(), FRAME_BYTES - 8)
        frame[:8] = as_bytes(torch.tensor([data.numel()]))
        frame[8 : 8 + num_first_bytes] = data[:num_first_bytes]
        frame_send = Posted(self._post(key, {to: frame}, {}), tuple, {to: frame})
        remaining = {to: data[num_first_bytes:]}
        return Posted(self._post(key, remaining, {}, 1), frame_send.wait, remaining)

    def _start_variable_recv(self, key: Key, recv: Recv) -> Pending:
        """Receive a value of unknown size: a frame with the length and the first bytes, then a
        second message with the other bytes."""
        source, frame = recv.source_rank, self._wire.empty(FRAME_BYTES)
        works = self._post(key, {}, {source: frame})

        def finish() -> tuple[Tensor, ...]:
            """Wait for the frame, receive the other bytes, and return the whole value."""
            for work in works:
                work.wait()
            data = self._wire.empty(int(frame[:8].view(torch.int64).item()))
            num_first_bytes = min(data.numel(), FRAME_BYTES - 8)
            data[:num_first_bytes] = frame[8 : 8 + num_first_bytes]
            for work in self._post(key, {}, {source: data[num_first_bytes:]}, 1):
                work.wait()
            return (data.view(recv.buffer.dtype),)

        return self._wire.later(key, finish)

    def _start_large_all_reduce(
        self,
        rank: int,
        collective: Collective,
        key: Key,
        values: Sequence[Tensor],
        rows: Sequence[int] = (),
    ) -> Pending:
        """Start an all_reduce in two halves: each member folds one piece of the values and sends
        the folded piece to all others. This moves 2 (n-1)/n of the value per member instead of n-1
        times the value."""
        group, op = collective.group, collective.op
        assert op is not None
        # for each member, a piece of every tensor in the bucket; the first members' are larger
        unit = REDUCTIONS[op].unit
        pieces = {
            member: [
                v.contiguous().reshape(-1, unit).tensor_split(len(group))[m].reshape(-1)
                for v in values
            ]
            for m, member in enumerate(group)
        }
        other_members = [member for member in group if member != rank]
        own_bytes = sum(piece.nbytes for piece in pieces[rank])
        data = {member: self._wire.empty(own_bytes) for member in other_members}
        sends = {member: pack_bytes(pieces[member]) for member in other_members}
        first_half = Posted(self._post(key, sends, data), tuple, sends)

        def finish() -> tuple[Tensor, ...]:
            """Fold this rank's piece, send it to all other members, and join the pieces that they
            fold."""
            first_half.wait()
            buffers = [Buffer.of(piece) for piece in pieces[rank]]
            parts = {member: unpack_bytes(data[member], buffers) for member in other_members}
            parts[rank] = tuple(pieces[rank])
            outs = [buffer.dtype for buffer in collective.out_buffers]
            buffers_of_member = {
                member: [
                    Buffer(tuple(piece.shape), dtype)
                    for piece, dtype in zip(pieces[member], outs, strict=True)
                ]
                for member in other_members
            }
            folded = [fold([parts[m][i] for m in group], op, dtype) for i, dtype in enumerate(outs)]
            message = pack_bytes(folded)
            gathered = {
                m: self._wire.empty(sum(b.nbytes for b in buffers_of_member[m]))
                for m in other_members
            }
            for work in self._post(key, {m: message for m in other_members}, gathered, 1):
                work.wait()
            folded_of_member = {
                m: unpack_bytes(gathered[m], buffers_of_member[m]) for m in other_members
            }
            folded_of_member[rank] = tuple(folded)
            return tuple(
                torch.cat([folded_of_member[m][i] for m in group]).reshape(buffer.shape)
                for i, buffer in enumerate(collective.out_buffers)
            )

        return self._wire.later(key, finish)


def in_two_halves(collective: Collective) -> bool:
    """Return whether a collective is a large all_reduce, whose second half uses `Wire.later`."""
    total = sum(buffer.nbytes for buffer in collective.in_buffers)
    large = len(collective.group) > 2 and total > SMALL_ALL_REDUCE
    return collective.kind == "all_reduce" and large


def expected(
    collective: Collective, me: int, member: int, rows: Sequence[int] = ()
) -> Sequence[Buffer]:
    """Return the buffers that position `me` of a group receives from position `member`. `rows`: the
    number of rows from each member, if the collective is sized."""
    buffers = collective.got(me, member)
    return [buffer.with_rows(rows[member]) for buffer in buffers] if rows else buffers


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, buffer: Buffer) -> Tensor:
    return data.view(buffer.dtype).reshape(buffer.shape)


def pack_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors, end to end. A single tensor is not copied."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def unpack_bytes(data: Tensor, buffers: Sequence[Buffer]) -> tuple[Tensor, ...]:
    """The inverse of `pack_bytes`. Copies, since a part may not be aligned for its dtype."""
    if len(buffers) == 1:
        return (from_bytes(data, buffers[0]),)
    parts = torch.split(data, [buffer.nbytes for buffer in buffers])
    return tuple(from_bytes(p.clone(), b) for p, b in zip(parts, buffers, strict=True))
