"""What the engine asks of a transport.

A transport starts transfers and collectives; each start gives a `Pending`, whose `wait` gives the
values made (none for a send). `LocalTransport` (`in_process_transport.py`) serves ranks of one
process, `ExchangeTransport` (`ray/exchange.py`) ranks of several, over gloo or NCCL.

Invariants: a start never blocks; the tensors handed to it stay unchanged until its `wait` (the
verifier sees to that); what `wait` returns is contiguous and shares no storage with anything.
Reductions are `numerics.fold` in group order, so that every transport gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from dtensor.daft.ir.instructions import Buffer, Collective, Recv, Send


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
