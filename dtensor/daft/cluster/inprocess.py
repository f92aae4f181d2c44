"""Run all ranks in the caller's process, one instruction at a time: the default backend.

Example: `InProcessCluster(4, torch.device("cpu"), diagnose=status_here)`. With device "cuda" all
ranks share the current GPU, and collectives are plain device operations.

`run` executes the merged list at once (`seed` selects its order), reads inputs without a copy and
returns a finished future; on a GPU, it returns the pending future of a deferred run once its
kernels are queued. Runs are deterministic; several threads take turns. `calls` counts one call per
actor, as on Ray. With any `snapshot_every`, every failed run is undone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, Places, hosts_of
from dtensor.daft.errors import DaftError, ProgramError, error_to_send
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.program import Program
from dtensor.daft.remote_exceptions import interrupts
from dtensor.daft.run.pending_results import PendingResults
from dtensor.daft.run.transport import TRANSPORTS, Meeting
from dtensor.daft.run.worker import HostRun, Worker
from dtensor.daft.status import Status
from dtensor.daft.undo.snapshots import MemorySnapshots
from dtensor.daft.verification.pairing import Hosts

Running: TypeAlias = tuple[int, int, int, float]
"""A run in progress: (program, run, thread id, begin in seconds of the monotonic clock)."""

Diagnose: TypeAlias = Callable[
    [int, Mapping[int, Handle], Callable[[], tuple[int, Running | None]], float], Status
]
"""A function (number of ranks, programs by id, a function that returns the current position and
run, seconds between two samples of it) -> the status."""

POLL_S = 0.001
"""Seconds between two looks at a pending result that is waited for with a timeout."""

Made: TypeAlias = tuple[Any, Exception | None]
"""The result of a call, and the error that it raised."""


class InProcessCluster(HostedCluster):
    """A cluster whose ranks share one `Worker` in this process."""

    _last_call: tuple[int | None, Part, int, float] = (None, (), 0, 0.0)
    """The last call: (run, arguments, thread id, begin)."""

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
        if device == torch.device("cuda"):  # fix the current GPU, which may change later
            device = torch.device("cuda", torch.cuda.current_device())
        everyone = tuple(range(size))
        self._ranks_per_actor = ranks_per_actor
        self._diagnose = diagnose
        hosts_of(size, ranks_per_actor)  # checks the numbers
        copies = None if snapshot_every is None else MemorySnapshots()
        connect = TRANSPORTS.get((device.type, "process"), TRANSPORTS["cpu", "process"])
        transport = connect(Meeting(ranks=everyone))
        self._worker = Worker(everyone, device, transport, lent=True, snapshots=copies)
        super().__init__(size, device, (everyone,), seed)
        self.immediate = device.type == "cpu" or copies is not None
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
        """Call the worker, once per part. Return (result, error) of each call."""
        calls: list[Made] = []
        for part in parts:  # there is one host
            self._last_call = run, part, threading.get_native_id(), time.monotonic()
            try:
                calls.append((method(self._worker, *part), None))
            except BaseException as error:
                calls.append((None, self._handle_error(error, read)))
        return calls

    def _handle_error(self, error: BaseException, read: bool) -> Exception:
        """Return the error of a call as its result, or raise it if the caller will not read it."""
        if interrupts(error):
            self.interrupted()
            raise error
        sent = error_to_send(error)
        if sent is error and isinstance(error, DaftError):
            self.failure = error
        elif not read or isinstance(sent, ProgramError):
            raise sent from sent.__cause__
        return sent

    def _count(self, places: Places) -> int:
        return len({rank // self._ranks_per_actor for _, ranks in places for rank in ranks})

    def collect(self, calls: Sequence[Made], timeout: float | None = None) -> list[Any]:
        for _, error in calls:
            if error is not None:
                raise error
        end = None if timeout is None else time.monotonic() + timeout
        return [self._result(result, end) for result, _ in calls]

    def _result(self, result: Any, end: float | None) -> Any:
        """Return a result, after waiting for it up to the time `end` if it is pending."""
        if not isinstance(result, PendingResults):
            return result
        while end is not None and not result.done():
            if time.monotonic() >= end:
                raise TimeoutError("The result is not there yet; ask again.")
            time.sleep(POLL_S)
        try:
            return result.wait()
        except DaftError as error:
            self.failure = self.failure or error
            raise

    def came(self, calls: Sequence[Made]) -> bool:
        return all(not isinstance(each, PendingResults) or each.done() for each, _ in calls)

    def ended(self, call: Made) -> bool:
        return call[1] is None and self.came([call])

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        pass

    def _ship(self, handle: Handle) -> Sequence[Any]:
        part = (handle.id, HostProgram.whole(handle.program, handle.report.lists[0]))
        self._submit(Worker.load, handle.places, [part] * len(handle.places), read=False)
        return ()

    def _wait_loaded(self, calls: Sequence[Any]) -> None:
        pass

    def _grow(self, size: int) -> Hosts:
        self._worker.join(tuple(range(size)))
        return (self._worker.ranks,)

    def _end(self) -> None:
        self._worker.close()

    def status(self, seconds: float) -> Status:
        self._check()
        return self._diagnose(self.size, self._handles, self._position, seconds)

    def _position(self) -> tuple[int, Running | None]:
        """Return the position in the list, and the run in progress in another thread, or None if
        the lock is free."""
        if idle := self._lock.acquire(blocking=False):
            self._lock.release()
        run, part, thread, began = self._last_call
        first: Any = part[0] if part else None
        program: int = first.program if isinstance(first, HostRun) else first
        running = None if idle or run is None else (program, run, thread, began)
        return self._worker.counter[0], running
