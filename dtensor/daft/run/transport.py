"""What the engine asks of a transport, and the one way in which numbers are reduced.

A transport starts transfers and collectives; each start gives a `Pending`, whose `wait` gives the
values made (none for a send). `LocalTransport` (`in_process_transport.py`) serves ranks of one
process, `ExchangeTransport` (`ray/exchange.py`) ranks of several, over gloo or NCCL.

Invariants: a start never blocks; the tensors handed to it stay unchanged until its `wait` (the
verifier sees to that); what `wait` returns is contiguous and shares no storage with anything.
Reductions are `fold` in group order, so that every transport gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from dtensor.daft.ir.instructions import Buffer, Collective, Op, Recv, Send


class Pending(ABC):
    """A start that is not complete yet."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until complete; the values made, in the order of the instruction's outputs."""


class Transport(ABC):
    @abstractmethod
    def start_send(self, rank: int, send: Send, value: Tensor) -> Pending: ...

    @abstractmethod
    def start_recv(self, rank: int, recv: Recv) -> Pending: ...

    @abstractmethod
    def start_collective(
        self, rank: int, collective: Collective, values: Sequence[Tensor]
    ) -> Pending: ...

    @abstractmethod
    def close(self) -> None:
        """Break all connections; waits of peers then fail instead of blocking."""


def fold(parts: Sequence[Tensor], op: Op, dtype: torch.dtype | None = None) -> Tensor:
    """The left fold ((a0 + a1) + a2) + ...: same bits wherever it is done, whole or in pieces.

    Sums of floats narrower than 32 bits accumulate in float32 and are rounded once, at the end; or
    never, where the result is to be of ``dtype`` float32.
    """
    first = parts[0]
    made = first.dtype if dtype is None else dtype
    if len(parts) == 1:
        return first.to(made, copy=True, memory_format=torch.contiguous_format)
    wide = op == "sum" and first.is_floating_point() and first.dtype.itemsize < 4
    total = first.float() if wide else first
    for part in parts[1:]:
        match op:
            case "sum":
                total = total + part.float() if wide else total + part
            case "max":
                total = torch.maximum(total, part)
            case "min":
                total = torch.minimum(total, part)
            case _:
                assert_never(op)
    return total.to(made).contiguous()


def check_value(value: object, buffer: Buffer, name: str) -> Tensor:
    """The value, if it is the tensor that was declared."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"Only tensors are sent, {name!r} is a {type(value).__name__}; declared: {buffer}."
        )
    if not buffer.accepts(value):
        raise ValueError(
            f"The value {name!r} is not what was declared: it is "
            f"{value.dtype}{list(value.shape)}, declared is {buffer}."
        )
    return value
