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

from dtensor.daft.instructions import Collective, Recv, Send
from dtensor.daft.transport import Pending, Transport, fold

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


class LocalTransport(Transport):
    def __init__(self) -> None:
        self._boxes: dict[_Key, tuple[Tensor, ...]] = {}
        self._counts: dict[_Key, int] = defaultdict(int)
        self._joined: dict[_Key, dict[int, Sequence[Tensor]]] = defaultdict(dict)

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
        group = collective.group
        key = (group, collective.channel)
        key = (*key, self._number(rank, key))
        joined = self._joined[key]
        joined[rank] = values
        if len(joined) == len(group):
            del self._joined[key]
            parts = [joined[member] for member in group]
            for member, results in zip(group, exchange(collective, parts), strict=True):
                self._boxes[(*key, member)] = results
        return _Due(self._boxes, (*key, rank))

    def close(self) -> None:
        self._boxes.clear()
        self._joined.clear()

    def _number(self, who: object, key: _Key) -> int:
        """How many starts `who` has made on this channel before."""
        full = (who, *key)
        self._counts[full] += 1
        return self._counts[full] - 1


def exchange(collective: Collective, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Each member's results from each member's inputs, both in group order."""
    size = len(parts)
    match collective.kind:
        case "all_reduce":
            assert collective.op is not None
            op = collective.op
            first = tuple(fold(column, op) for column in zip(*parts, strict=True))
            return [first] + [tuple(map(_copy, first)) for _ in range(size - 1)]
        case "all_gather":
            return [tuple(_copy(part[0]) for part in parts) for _ in range(size)]
        case "reduce_scatter":
            assert collective.op is not None
            op = collective.op
            return [(fold([part[member] for part in parts], op),) for member in range(size)]
        case "all_to_all":
            return [tuple(_copy(part[member]) for part in parts) for member in range(size)]
        case "broadcast":
            return [(_copy(parts[0][0]),) for _ in range(size)]
        case _:
            assert_never(collective.kind)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
