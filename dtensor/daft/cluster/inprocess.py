"""All ranks in the caller's process, one after the other: the default, and what tests use.

Example: `InProcessCluster(4, torch.device("cpu"))`. With device "cuda" all ranks share one GPU,
and collectives are plain device operations.

Invariants: a run executes at once, in the order of the merged list (`seed` picks another legal
order); it gives a finished future. Deterministic. `calls` counts as if each of the actors were
called, so that programs of both backends can be compared. Calls of several threads take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from dtensor.daft.cluster.cluster import (
    Cluster,
    Finished,
    Future,
    Handle,
    Mode,
    check_inputs,
    check_size,
    hosts_of,
)
from dtensor.daft.errors import ClusterClosed, CommunicationError, DaftError, Failure
from dtensor.daft.ir.program import Program
from dtensor.daft.run.transport import LocalTransport
from dtensor.daft.run.worker import NOTHING_KEPT, Worker
from dtensor.daft.verification.verifier import check_state, verify


class InProcessCluster(Cluster):
    def __init__(
        self, size: int, device: torch.device, *, ranks_per_actor: int = 1, seed: int = 0
    ) -> None:
        self.size = size
        self.device = device
        self.calls = 0
        self.runs = 0
        self.failure: DaftError | None = None
        self._num_actors = len(hosts_of(size, ranks_per_actor))
        self._seed = seed
        self._ranks = tuple(range(size))
        self._worker = Worker(self._ranks, device, LocalTransport())
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0
        self._closed = False
        self._lock = threading.RLock()

    def put(self, values: Sequence[Mapping[str, object]]) -> None:
        self._check()
        check_size(self.size, values, "put")
        with self._lock:
            self.calls += self._num_actors
            self._worker.put(dict(enumerate(values)))

    def get(self, names: Sequence[Sequence[str]]) -> Future:
        self._check()
        check_size(self.size, names, "get")
        with self._lock:
            self.calls += self._num_actors
            try:
                found = self._worker.get(dict(enumerate(names)))
            except LookupError as error:
                return Finished([], error)
            return Finished([found[rank] for rank in self._ranks])

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        self._check()
        check_size(self.size, names, "delete")
        with self._lock:
            self.calls += self._num_actors
            self._worker.delete(dict(enumerate(names)))

    def load(self, program: Program) -> Handle:
        self._check()
        check_size(self.size, program.ranks, f"Program {program.name!r}")
        report = verify(program, (self._ranks,), self._seed)
        with self._lock:
            check_state((handle.program for handle in self._handles.values()), program)
            handle = Handle(self._next_handle, program, report)
            self._next_handle += 1
            self.calls += self._num_actors
            self._worker.load(handle.id, program, report.lists[0])
            self._handles[handle.id] = handle
        return handle

    def unload(self, handle: Handle) -> None:
        self._check()
        with self._lock:
            self.calls += self._num_actors
            self._worker.unload(handle.id)
            del self._handles[handle.id]

    def run(
        self,
        handle: Handle,
        inputs: Sequence[Mapping[str, object]],
        *,
        mode: Mode = "compiled",
        keep: Mapping[str, str] = NOTHING_KEPT,
    ) -> Future:
        self._check()
        check_inputs(handle, inputs)
        fed = dict(enumerate(inputs))
        with self._lock:
            self.runs += 1
            try:
                if mode != "interpreted":
                    self.calls += self._num_actors
                    results = self._worker.run(handle.id, fed, keep=keep, timed=mode == "timed")
                else:
                    self._worker.begin(handle.id, fed)
                    for position in range(len(handle.report.lists[0])):
                        self.calls += 1
                        self._worker.step(handle.id, position)
                    results = self._worker.finish(handle.id, keep)
                    self.calls += 2 * self._num_actors
            except DaftError as error:
                self.failure = error
                return Finished([], error)
            except BaseException:
                # An interrupt: state may be half-written, and transfers half-made.
                self.failure = CommunicationError(
                    Failure(rank=None, reason="a run was interrupted")
                )
                raise
            return Finished([results[rank] for rank in self._ranks])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.close()

    def _check(self) -> None:
        if self._closed:
            raise ClusterClosed("This cluster is closed: launch another one.")
        if self.failure is not None:
            raise self.failure
