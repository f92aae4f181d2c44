"""The Ray actor that hosts ranks: a `Worker`, its connections, and its program counter.

Example (the controller does this, `backend.py`):

    actor = ray.remote(num_cpus=0, max_restarts=0)(Actor).remote(0, (0,), "cpu", "/tmp/.../actor0")
    actor.connect.remote(...); actor.load.remote(...); actor.run.remote(handle, run, inputs)

Invariants: a failure closes the connections, so that peers that wait for this actor fail too
instead of blocking, and is repeated to every later call. Tensors go as `ray_wire.Packed`.
It does not import Ray.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from dtensor.daft.errors import CommunicationError, DaftError, Failure
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.exchange import ExchangeTransport
from dtensor.daft.ray.gloo import join_gloo
from dtensor.daft.ray.malloc import keep_freed_memory
from dtensor.daft.ray.nccl import join_nccl
from dtensor.daft.ray.progress import Counter
from dtensor.daft.ray.routes import Key
from dtensor.daft.ray.tensors_on_wire import pack, pack_all, unpack_all
from dtensor.daft.run.worker import Names, Values, Worker
from dtensor.daft.verification.pairing import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How an actor finds the others: a store at the controller, and its own address."""

    host: str
    port: int
    own_address: str
    start_s: float  # for all to start, which share cores
    deadline_s: float
    actor_of: tuple[int, ...]


class Actor:
    def __init__(self, index: int, ranks: tuple[int, ...], device: str, counter: str) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._index = index
        self._ranks = ranks
        self._device = torch.device(device)
        self._counter = Counter(counter)
        self._transport: ExchangeTransport | None = None
        self._worker: Worker | None = None
        self._failed: DaftError | None = None

    def connect(self, connection: Connection) -> None:
        """Join the others: over gloo at once, over NCCL as programs are loaded."""
        start = timedelta(seconds=connection.start_s)
        store = TCPStore(
            connection.host, connection.port, None, False, start, wait_for_workers=False
        )
        actor_of, deadline_s = connection.actor_of, connection.deadline_s
        # gloo would wait for one that is still starting no longer than for a message.
        store.set(f"here{self._index}", "")
        store.wait([f"here{index}" for index in range(max(actor_of) + 1)], start)
        if self._device.type == "cuda":
            wire = join_nccl(store, self._ranks, max(actor_of) + 1, deadline_s)
        else:
            wire = join_gloo(store, self._index, actor_of, connection.own_address, deadline_s)
        self._transport = ExchangeTransport(wire, actor_of)
        self._worker = Worker(self._ranks, self._device, self._transport)

    def put(self, values: Values) -> None:
        self._get_worker().put(unpack_all(values))

    def get(self, names: Names) -> dict[int, tuple[object, ...]]:
        found = self._get_worker().get(names)
        return {rank: tuple(map(pack, values)) for rank, values in found.items()}

    def delete(self, names: Names) -> None:
        self._get_worker().delete(names)

    def load(
        self, handle: int, program: Program, sites: Sequence[Site], tags: Mapping[Key, int]
    ) -> None:
        worker = self._get_worker()
        assert self._transport is not None
        self._transport.open(tags)
        worker.load(handle, program, sites)

    def unload(self, handle: int) -> None:
        self._get_worker().unload(handle)

    def run(
        self, handle: int, run: int, inputs: Values, keep: Mapping[str, str], timed: bool = False
    ) -> dict[int, dict[str, object]]:
        worker = self._get_worker()
        self._counter.begin(handle, run)
        try:
            results = worker.run(handle, unpack_all(inputs), self._counter.view, keep, timed)
            packed = pack_all(results)
        except Exception as error:
            raise self._fail(error, run) from None
        self._counter.end()
        return packed

    def begin(self, handle: int, run: int, inputs: Values) -> None:
        self._counter.begin(handle, run)
        self._get_worker().begin(handle, unpack_all(inputs))

    def step(self, handle: int, run: int, position: int) -> None:
        self._counter.view[0] = position
        try:
            self._get_worker().step(handle, position)
        except Exception as error:
            raise self._fail(error, run) from None
        self._counter.end()

    def finish(self, handle: int, keep: Mapping[str, str]) -> dict[int, dict[str, object]]:
        return pack_all(self._get_worker().finish(handle, keep))

    def _get_worker(self) -> Worker:
        if self._failed is not None:
            raise self._failed
        assert self._worker is not None, "connect comes first"
        return self._worker

    def _fail(self, raised: Exception, run: int) -> DaftError:
        """Close the connections; the error to raise, with its traceback as text."""
        error = raised
        if not isinstance(error, DaftError):
            reason = f"{type(raised).__name__}: {raised}"
            error = CommunicationError(Failure(rank=self._ranks[0], reason=reason))
        cause = raised.__cause__ if raised.__cause__ is not None else raised
        text = "".join(traceback.format_exception(cause))
        self._failed = type(error)(replace(error.failure, traceback=text, step=run))
        assert self._transport is not None
        self._transport.close()
        return self._failed
