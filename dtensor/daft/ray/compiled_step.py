"""A compiled function in one of Ray's processes: its part of the program, and its connections.

Example, process 0 of two (`host.py` does this):

    part = ProgramPart(7, program, sites, {0: subject}, join, address)  # blocks until all have come
    part.run({0: {"x0": message}}, counter.view)                     # {0: {"v1": message}}

Invariants: each program has connections of its own, so that one that fails leaves the others as
they are. What a user's method raises is a value (`tasks/task.py`); what else fails closes the
connections, so that the others fail too instead of waiting, and is repeated to every later run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dtensor.daft.errors import CommunicationError, DaftError, Failure
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.exchange import ExchangeTransport
from dtensor.daft.ray.gloo import join_gloo
from dtensor.daft.ray.routes import Key
from dtensor.daft.run.engine import Engine, Table
from dtensor.daft.run.in_process_transport import LocalTransport
from dtensor.daft.run.transport import Transport
from dtensor.daft.tasks.frozen import SELF
from dtensor.daft.tasks.task import Subject
from dtensor.daft.verification.pairing import Site

PATIENCE = timedelta(days=1)
"""How long a transfer may wait for a method of another actor. A process that dies breaks its
connections at once, and the controller ends one that has stopped: nothing else is a time-out."""
SLICE_S = 0.1  # how often one that waits for others to join looks whether they have, or are lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """How the processes of a program find each other: `index` of those in `host_of` (by rank).
    `processes` are their numbers in the launch."""

    host: str
    port: int
    prefix: str
    index: int
    processes: tuple[int, ...]
    host_of: tuple[int, ...]
    tags: Mapping[Key, int]
    start_s: float


class StepFailed(CommunicationError):
    """A step failed in one process, of the program that the controller calls `program`."""

    def __init__(self, failure: Failure, program: int) -> None:
        super().__init__(failure)
        self.program = program

    def __reduce__(self) -> tuple[Any, ...]:
        return (StepFailed, (self.failure, self.program))


class ProgramPart:
    def __init__(
        self,
        number: int,
        program: Program,
        sites: Sequence[Site],
        subjects: Mapping[int, Subject],
        join: Join,
        own_address: str,
    ) -> None:
        self._transport = _connect(join, own_address)
        self._number = number
        self._ranks = tuple(subjects)
        table: Table = {(rank, SELF): subject for rank, subject in subjects.items()}
        self._engine = Engine(program, sites, table, self._transport)
        self._failed: StepFailed | None = None

    def run(
        self, inputs: Mapping[int, Mapping[str, Tensor]], counter: memoryview
    ) -> dict[int, dict[str, object]]:
        if self._failed is not None:
            raise self._failed
        fed: dict[int, dict[str, object]] = {r: dict(inputs.get(r, {})) for r in self._ranks}
        try:
            return self._engine.run(fed, counter)
        except Exception as error:
            self._failed = step_failed(error, self._number)
            self._transport.close()
            raise self._failed from None


def _connect(join: Join, own_address: str) -> Transport:
    if len(set(join.host_of)) == 1:
        return LocalTransport()
    start = timedelta(seconds=join.start_s)
    store = TCPStore(join.host, join.port, None, False, start, wait_for_workers=False)
    prefixed = PrefixStore(join.prefix, store)
    meet(store, prefixed, join)
    patience_s = PATIENCE.total_seconds()
    wire = join_gloo(prefixed, join.index, join.host_of, own_address, patience_s)
    transport = ExchangeTransport(wire, join.host_of)
    transport.open(join.tags)
    return transport


def meet(store: Store, prefixed: Store, join: Join) -> None:
    """Blocks until all have come, as gloo would, but not for one that is lost. Others may come
    hours later: from a method, or from runs of other programs."""
    prefixed.set(f"here{join.index}", "")
    others = [f"here{host}" for host in sorted(set(join.host_of))]
    while not prefixed.check(others):  # the store's own `wait` logs each time that it times out
        for process in join.processes:
            if store.check([lost_key(process)]):
                raise RuntimeError(f"process {process} was lost before it joined the program")
        time.sleep(SLICE_S)


def lost_key(process: int) -> str:
    """What the controller writes into the store when a process is lost."""
    return f"lost{process}"


def step_failed(raised: Exception, program: int) -> StepFailed:
    """With the traceback as text, as it goes to the controller."""
    failure = Failure(rank=None, reason=f"{type(raised).__name__}: {raised}")
    if isinstance(raised, DaftError):
        failure = raised.failure
    cause = raised.__cause__ if raised.__cause__ is not None else raised
    text = "".join(traceback.format_exception(cause))
    return StepFailed(replace(failure, traceback=text), program)
