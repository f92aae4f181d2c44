"""Ranks in a host: a `Worker`, its connections to the other hosts, and the program counter.

Example (the controller does this, `cluster.py`, through `Host.call`):

    ranks = Ranks(counter, (0,), "cpu")
    ranks.connect(join, 0)
    ranks.ask(Worker.load, 7, sites, program)
    ranks.run(Worker.run, 0, 7, {0: {"x": x}})                   # run 0 of program 7

Invariants: the first failure of a run closes the connections and is repeated to every later call
(`joining.py`). Nobody else has the memory of a tensor that arrives, and the worker copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.joining import Join, Joined
from dtensor.daft.ray.messages import Pickled
from dtensor.daft.ray.operators import Needed
from dtensor.daft.ray.progress import ProgramCounter
from dtensor.daft.run.worker import Worker
from dtensor.daft.verification.pairing import Site


class Ranks:
    def __init__(self, counter: ProgramCounter, ranks: tuple[int, ...], device: str) -> None:
        self._counter = counter
        self._ranks = ranks
        self._device = torch.device(device)
        self._joined: Joined | None = None
        self._worker: Worker | None = None

    def connect(self, join: Join, index: int) -> None:
        self._joined = Joined.by(join, index, self._ranks, self._device)
        transport, counter = self._joined.transport, self._counter.view
        self._worker = Worker(self._ranks, self._device, transport, counter)

    def open(self, tags: Mapping[Key, int]) -> None:
        self._connected[0].open(tags)

    def provide(self, needed: Needed) -> list[tuple[str, str]]:
        """Make ready for a program that names others than torch's ops; those that cannot be had."""
        return needed.provide()

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of the worker."""
        joined, worker = self._connected
        joined.check()
        return method(worker, *arguments)

    def load(self, handle: int, sites: Sequence[Site], program: Pickled) -> None:
        self.ask(Worker.load, handle, sites, program.value())

    def run(self, method: Callable[..., Any], run: int, handle: int, *arguments: object) -> Any:
        """Call one that runs a program, or a step of it."""
        joined, worker = self._connected
        joined.check()
        self._counter.begin(handle, run)
        with joined.running(run):
            made = method(worker, handle, *arguments)
        self._counter.end()
        return made

    @property
    def _connected(self) -> tuple[Joined, Worker]:
        assert self._joined is not None and self._worker is not None, "connect comes first"
        return self._joined, self._worker
