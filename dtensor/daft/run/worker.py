"""One host's table of values and loaded programs: what an actor is, without the actor.

The in-process cluster has one that hosts all ranks; each Ray actor has one for its own.

    worker = Worker((0, 1), torch.device("cpu"), LocalTransport())
    worker.put({0: {"w": torch.ones(2)}})
    worker.load(7, sites, program)
    worker.run(7, {0: {"x": torch.ones(2)}, 1: {}})       # {0: {"y": tensor}, 1: {}}

Invariants: tensors come in and go out as contiguous copies, in on the worker's device and out on
the CPU; nothing outside aliases the table. It is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dtensor.daft.ir.program import Program
from dtensor.daft.run.engine import Engine, Table
from dtensor.daft.run.transport import Transport
from dtensor.daft.verification.pairing import Site

Values = Mapping[int, Mapping[str, object]]
Names = Mapping[int, Sequence[str]]
NOTHING_KEPT: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stored:
    """Stands among a run's inputs for a value in the rank's table."""

    name: str


class Worker:
    """`counter[0]`, if given, is always the position in the list that runs."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        transport: Transport,
        counter: memoryview | None = None,
    ) -> None:
        self.ranks = ranks
        self.device = device
        self.transport = transport
        self.engines: dict[int, Engine] = {}
        self._counter = counter
        self._table: Table = {}

    def put(self, values: Values) -> None:
        for rank, named in values.items():
            for name, value in named.items():
                self._table[rank, name] = copy_to(value, self.device)

    def get(self, names: Names) -> dict[int, tuple[object, ...]]:
        return {
            rank: tuple(copy_to(self._find(rank, name), torch.device("cpu")) for name in wanted)
            for rank, wanted in names.items()
        }

    def delete(self, names: Names) -> None:
        for rank, unwanted in names.items():
            for name in unwanted:
                self._find(rank, name)
                del self._table[rank, name]

    def load(self, handle: int, sites: Sequence[Site], program: Program) -> None:
        self.engines[handle] = Engine(program, sites, self._table, self.transport)

    def unload(self, handle: int) -> None:
        del self.engines[handle]

    def run(
        self,
        handle: int,
        inputs: Values,
        keep: Mapping[str, str] = NOTHING_KEPT,
        timed: bool = False,
    ) -> dict[int, dict[str, object]]:
        """The outputs of the hosted ranks."""
        engine = self.engines[handle]
        return self._out(engine.run(self._in(inputs), self._counter, timed=timed), keep)

    def begin(self, handle: int, inputs: Values) -> None:
        self.engines[handle].begin(self._in(inputs))

    def step(self, handle: int, position: int) -> None:
        if self._counter is not None:
            self._counter[0] = position
        self.engines[handle].step(position)

    def finish(
        self, handle: int, keep: Mapping[str, str] = NOTHING_KEPT
    ) -> dict[int, dict[str, object]]:
        return self._out(self.engines[handle].finish(self.ranks), keep)

    def close(self) -> None:
        self.engines.clear()
        self._table.clear()
        self.transport.close()

    def _in(self, inputs: Values) -> dict[int, dict[str, object]]:
        return {
            rank: {
                name: self._find(rank, value.name)
                if isinstance(value, Stored)
                else copy_to(value, self.device)
                for name, value in named.items()
            }
            for rank, named in inputs.items()
        }

    def _out(self, results: Values, keep: Mapping[str, str]) -> dict[int, dict[str, object]]:
        """What goes back; kept outputs go into the table, as copies that nothing else changes."""
        for rank, named in results.items():
            for output, name in keep.items():
                if output in named:
                    self._table[rank, name] = copy_to(named[output], self.device)
        cpu = torch.device("cpu")
        return {
            rank: {n: copy_to(v, cpu) for n, v in named.items() if n not in keep}
            for rank, named in results.items()
        }

    def _find(self, rank: int, name: str) -> object:
        if (rank, name) not in self._table:
            raise LookupError(
                f"Rank {rank} has no value {name!r}. It has "
                f"{sorted(n for r, n in self._table if r == rank)}."
            )
        return self._table[rank, name]


def copy_to(value: object, device: torch.device) -> object:
    """A contiguous copy of a tensor on `device`; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
