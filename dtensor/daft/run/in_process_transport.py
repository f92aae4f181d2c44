"""The transport among ranks of one process: plain tensor operations on whatever device they use.

Example: ranks 0 and 1 each start an all_reduce; the second start computes both results, and each
rank's `wait` takes its own.

Invariants: waits never block, as the merged list puts them after the starts that they need; one
that would have to is an error. Every result is a copy, so that ranks never share storage.
It is not safe for several threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from dtensor.daft.ir.instructions import Collective, Recv, Send
from dtensor.daft.run.transport import Pending, Transport
from dtensor.numerics import fold

_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Sent(Pending):
    def wait(self) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class _Due(Pending):
    """What will lie in `boxes` under `key`."""

    boxes: dict[_Key, tuple[Tensor, ...]]
    key: _Key

    def wait(self) -> tuple[Tensor, ...]:
        if self.key not in self.boxes:
            raise RuntimeError(f"A wait would block: nothing has come for {self.key}.")
        return self.boxes.pop(self.key)


class _Meeting:
    """One collective: what its members have brought so far, then the results of each."""

    __slots__ = ("missing", "parts", "results")

    def __init__(self, size: int) -> None:
        self.missing = size
        self.parts: list[Sequence[Tensor]] = [()] * size
        self.results: list[tuple[Tensor, ...]] = []


class _Seat(Pending):
    """A member's results of a meeting. Not a dataclass: one is made for each start, in a hurry."""

    __slots__ = ("at", "meeting")

    def __init__(self, meeting: _Meeting, at: int) -> None:
        self.meeting = meeting
        self.at = at

    def wait(self) -> tuple[Tensor, ...]:
        meeting = self.meeting
        if meeting.missing:
            raise RuntimeError(f"A wait would block: {meeting.missing} ranks have not started.")
        # a meeting is complete when its results are there, so each member takes its own once
        taken, meeting.results[self.at] = meeting.results[self.at], ()
        return taken


class _Channel:
    """The collectives of one group on one channel: each member's k-th start is of the k-th."""

    __slots__ = ("counts", "index", "open")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.index = {rank: i for i, rank in enumerate(group)}
        self.counts = [0] * len(group)
        self.open: dict[int, _Meeting] = {}


class LocalTransport(Transport):
    def __init__(self) -> None:
        self._boxes: dict[_Key, tuple[Tensor, ...]] = {}
        self._counts: dict[_Key, int] = defaultdict(int)
        self._channels: dict[tuple[tuple[int, ...], str], _Channel] = {}

    def start_send(self, rank: int, send: Send, value: Tensor) -> Pending:
        key = (rank, send.to, send.channel)
        self._boxes[(*key, self._number("send", key))] = (_copy(value),)
        return _Sent()

    def start_recv(self, rank: int, recv: Recv) -> Pending:
        key = (recv.source_rank, rank, recv.channel)
        return _Due(self._boxes, (*key, self._number("recv", key)))

    def start_collective(
        self, rank: int, collective: Collective, values: Sequence[Tensor]
    ) -> Pending:
        key = (collective.group, collective.channel)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(collective.group)
        at = channel.index[rank]
        number = channel.counts[at]
        channel.counts[at] = number + 1
        meeting = channel.open.get(number)
        if meeting is None:
            meeting = channel.open[number] = _Meeting(len(channel.counts))
        meeting.parts[at] = values
        meeting.missing -= 1
        if not meeting.missing:
            del channel.open[number]
            meeting.results = exchange(collective, meeting.parts)
            meeting.parts = []
        return _Seat(meeting, at)

    def close(self) -> None:
        self._boxes.clear()
        self._channels.clear()

    def _number(self, who: object, key: _Key) -> int:
        """How many starts `who` has made on this channel before."""
        full = (who, *key)
        self._counts[full] += 1
        return self._counts[full] - 1


def exchange(collective: Collective, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Each member's results from each member's inputs, both in group order."""
    size = len(parts)
    dtypes = [buffer.dtype for buffer in collective.out_buffers]  # a sum may come out wider
    match collective.kind:
        case "all_reduce":
            assert collective.op is not None
            op = collective.op
            columns = zip(zip(*parts, strict=True), dtypes, strict=True)
            first = tuple(fold(column, op, dtype) for column, dtype in columns)
            return [first] + [tuple(map(_copy, first)) for _ in range(size - 1)]
        case "all_gather":
            return [tuple(_copy(part[0]) for part in parts) for _ in range(size)]
        case "reduce_scatter":
            assert collective.op is not None
            op = collective.op
            (dtype,) = dtypes
            return [(fold([part[m] for part in parts], op, dtype),) for m in range(size)]
        case "all_to_all":
            return [tuple(_copy(part[member]) for part in parts) for member in range(size)]
        case "broadcast":
            return [(_copy(parts[0][0]),) for _ in range(size)]
        case _:
            assert_never(collective.kind)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
