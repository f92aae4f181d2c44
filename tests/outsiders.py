"""Extensions as users write them: ops, two reductions, a kernel, a transport and a schedule.

Importing this module registers only the ops, so an actor that imports it gets the rest from the
controller.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from dtensor.daft.ir.instructions import Collective, Recv, Send, Start, key_of
from dtensor.daft.run.transport import (
    Begin,
    Meeting,
    Pending,
    Transport,
    combined,
    copied,
)
from dtensor.numerics import Reduction
from dtensor.runtime.schedule import Grid

# -- reductions, and ops that need them ------------------------------------------------------------

XOR = Reduction(name="xor", fold=torch.bitwise_xor, identity=torch.zeros_like)


def larger(total: Tensor, part: Tensor) -> Tensor:
    """Fold rows (value, position); of equal values take the first."""
    return torch.where(part[:, :1] > total[:, :1], part, total)


ARGMAX = Reduction(name="argmax", fold=larger, unit=2, dtypes=(torch.float64,))


@torch.library.custom_op("outsiders::parity", mutates_args=())
def parity(x: Tensor) -> Tensor:
    """x[n d] -> [d]: the bits that are set in an odd number of rows."""
    return reduce(torch.bitwise_xor, x.unbind(0), x.new_zeros(x.shape[1:]))


@parity.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("outsiders::largest", mutates_args=())
def largest(x: Tensor, at: Tensor) -> Tensor:
    """For rows x[n d] at positions at[n], return [d, 2]: the largest value of each column, and its
    position."""
    value, row = x.max(0)
    return torch.stack((value, at[row]), 1)


@largest.register_fake
def _(x: Tensor, at: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], 2))


# -- a kernel --------------------------------------------------------------------------------------


def parity_of_bits(x: Tensor) -> Tensor:
    """Compute `parity` bit by bit."""
    bits = [((x >> b & 1).sum(0) & 1) << b for b in range(63)]
    return reduce(torch.bitwise_or, bits) + 0


# -- a transport -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Later(Pending):
    finish: Callable[[], tuple[Tensor, ...]]

    def wait(self) -> tuple[Tensor, ...]:
        return self.finish()


class StoreTransport(Transport):
    """A transport through a store; each start has its own key."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._started = Counter[object]()

    def begin(self, rank: int, start: Start) -> Begin:
        return partial(self._start, rank, start)

    def _start(self, rank: int, start: Start, values: Sequence[Tensor]) -> Pending:
        key = key_of(rank, start)
        self._started[rank, key] += 1
        name = f"{key} {self._started[rank, key]}"
        match start:
            case Send():
                self._write(f"{name} sent", values)
                return Later(tuple)
            case Recv():
                return Later(lambda: self._read(f"{name} sent"))
            case Collective(group=group):
                self._write(f"{name} of {rank}", values)
                me = group.index(rank)

                def finish() -> tuple[Tensor, ...]:
                    brought = [self._read(f"{name} of {member}") for member in group]
                    parts = [start.given(each, of, me) for of, each in enumerate(brought)]
                    return tuple(map(copied, combined(start, parts)))

                return Later(finish)

    def _write(self, name: str, values: Sequence[Tensor]) -> None:
        file = io.BytesIO()
        torch.save([copied(value) for value in values], file)
        self._store.set(name, file.getvalue())

    def _read(self, name: str) -> tuple[Tensor, ...]:
        return tuple(torch.load(io.BytesIO(self._store.get(name))))

    def close(self) -> None:
        """Do nothing: the store belongs to others."""


def connect(folder: str, meeting: Meeting) -> Transport:
    """Connect, and leave a file for each process to show that the transport was used."""
    Path(folder, f"host{meeting.index}").touch()
    return StoreTransport(HashStore() if meeting.store is None else meeting.store)


# -- a schedule ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A schedule in which a microbatch begins when the one before is done."""

    microbatches: int

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        span = 2 * num_stages
        lines: list[str] = []
        for rank in range(num_ranks):
            row = ["."] * span * self.microbatches
            for m in range(self.microbatches):
                row[span * m + rank] = f"F{m}"
                row[span * (m + 1) - 1 - rank] = f"B{m}"
            lines.append(" ".join(row))
        return Grid.parse("\n".join(lines))
