"""All ranks in the caller's process, one after the other: the default, and what tests use.

Example: `InProcessCluster(4, torch.device("cpu"))`. With device "cuda" all ranks share one GPU,
the current one of the thread that starts them, and collectives are plain device operations.

Invariants: a run executes at once, in the order of the merged list (`seed` picks another legal
order), and reads its inputs where they are; it gives a finished future. Deterministic. `calls`
counts as if each actor concerned were called, so that programs of both backends can be compared.
Calls of several threads take turns. With `snapshot_every`, a run that fails anywhere is undone; as
there is nobody else, each change is kept, whichever number it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, Places, hosts_of
from dtensor.daft.errors import DaftError, ProgramError, as_sent
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.program import Program
from dtensor.daft.remote_exceptions import interrupts
from dtensor.daft.run.transport import TRANSPORTS, Meeting
from dtensor.daft.run.worker import HostRun, Worker
from dtensor.daft.status import Status
from dtensor.daft.undo.snapshots import MemorySnapshots
from dtensor.daft.verification.pairing import Hosts

Running: TypeAlias = tuple[int, int, int, float]
"""A run under way: of which program, its number, in which thread, since when (monotonic)."""

Diagnose: TypeAlias = Callable[
    [int, Mapping[int, Handle], Callable[[], tuple[int, Running | None]], float], Status
]
"""Of so many ranks, with programs by their ids: where the one thread stands, looked at twice, so
many seconds apart."""

Made: TypeAlias = tuple[Any, Exception | None]
"""What a call gave, or raised."""


class InProcessCluster(HostedCluster):
    _last: tuple[int | None, Part, int, float] = (None, (), 0, 0.0)
    """The last call: the run that it was of, its part, in which thread, since when."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        ranks_per_actor: int = 1,
        seed: int = 0,
        snapshot_every: int | None = None,
        diagnose: Diagnose,
    ) -> None:
        if device == torch.device("cuda"):  # another thread, or later, it may be another one
            device = torch.device("cuda", torch.cuda.current_device())
        everyone = tuple(range(size))
        self._ranks_per_actor = ranks_per_actor
        self._diagnose = diagnose
        hosts_of(size, ranks_per_actor)  # checks them
        copies = None if snapshot_every is None else MemorySnapshots()
        connect = TRANSPORTS.get((device.type, "process"), TRANSPORTS["cpu", "process"])
        transport = connect(Meeting(ranks=everyone))
        self._worker = Worker(everyone, device, transport, lent=True, snapshots=copies)
        super().__init__(size, device, (everyone,), seed)
        self.immediate = True
        self.number_changes(None if copies is None else 1)

    def _call(
        self,
        method: Method,
        places: Places,
        parts: Sequence[Part],
        *,
        run: int | None = None,
        read: bool = True,
    ) -> list[Made]:
        asked: list[Made] = []
        for part in parts:  # there is one host
            self._last = run, part, threading.get_native_id(), time.monotonic()
            try:
                asked.append((method(self._worker, *part), None))
            except BaseException as error:
                asked.append((None, self._caught(error, read)))
        return asked

    def _caught(self, error: BaseException, read: bool) -> Exception:
        if interrupts(error):
            self.interrupted()
            raise error
        sent = as_sent(error)
        if sent is error and isinstance(error, DaftError):
            self.failure = error
        elif not read or isinstance(sent, ProgramError):
            raise sent from sent.__cause__
        return sent

    def _count(self, places: Places) -> int:
        return len({rank // self._ranks_per_actor for _, ranks in places for rank in ranks})

    def collect(self, asked: Sequence[Made], timeout: float | None = None) -> list[Any]:
        for _, error in asked:  # there is one host
            if error is not None:
                raise error
        return [made for made, _ in asked]

    def came(self, asked: Sequence[Any]) -> bool:
        return True

    def ended(self, asked: Made) -> bool:
        return asked[1] is None

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        pass

    def _ship(self, handle: Handle) -> Sequence[Any]:
        part = (handle.id, HostProgram.whole(handle.program, handle.report.lists[0]))
        self._submit(Worker.load, handle.places, [part] * len(handle.places), read=False)
        return ()

    def _joined(self, asked: Sequence[Any]) -> None:
        pass

    def _grow(self, size: int) -> Hosts:
        self._worker.join(tuple(range(size)))
        return (self._worker.ranks,)

    def _end(self) -> None:
        self._worker.close()

    def status(self, seconds: float) -> Status:
        self._check()
        return self._diagnose(self.size, self._handles, self._where, seconds)

    def _where(self) -> tuple[int, Running | None]:
        """The position in the list, and the run that another thread makes while it has the lock."""
        if idle := self._lock.acquire(blocking=False):
            self._lock.release()
        run, part, thread, began = self._last
        first: Any = part[0] if part else None
        program: int = first.program if isinstance(first, HostRun) else first
        running = None if idle or run is None else (program, run, thread, began)
        return self._worker.counter[0], running
