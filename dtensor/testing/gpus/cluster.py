"""A cluster of ranks on simulated GPUs: a thread in place of a Ray actor for each GPU.

    with dt.testing.simulated_gpus(num=2), dt.launch(dt.Mesh(tp=2), "ray", device="cuda"):
        step(x, y)

The ranks run the code of real GPUs: the worker and its engine, messages over `NcclWire` with its
side streams, generated code for "cuda", and kernels. Only NCCL is simulated (`nccl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, Places, hosts_of
from dtensor.daft.errors import DaftError
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ir.instructions import Key
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.transports.communicators import Communicators
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import NcclWire
from dtensor.daft.run.pending_results import PendingResults
from dtensor.daft.run.worker import Worker
from dtensor.daft.status import Status
from dtensor.daft.verification.pairing import Hosts
from dtensor.private_torch import pytree
from dtensor.testing.gpus.host import Host, here
from dtensor.testing.gpus.nccl import Fabric
from dtensor.testing.gpus.tensors import Simulated
from dtensor.testing.gpus.world import World

CUDA = torch.device("cuda", 0)
"""The device of each rank: Ray shows an actor only its own GPU."""


class SimulatedCluster(HostedCluster):
    """A cluster whose actors are threads on simulated GPUs. It cannot grow."""

    def __init__(
        self,
        world: World,
        fabric: Fabric,
        hosts: Sequence[Host],
        size: int,
        *,
        ranks_per_actor: int,
        seed: int,
        in_order: bool,
    ) -> None:
        ranks = hosts_of(size, ranks_per_actor)
        if len(ranks) > len(hosts):
            raise ValueError(
                f"{len(ranks)} actors need a GPU each, and {len(hosts)} are simulated.\n"
                f"  Fix: simulated_gpus(num={len(ranks)}), or ranks_per_actor="
                f"{-(-size // len(hosts))}"
            )
        super().__init__(size, CUDA, ranks, seed)
        self._world, self._actors = world, hosts[: len(ranks)]
        self._host_of = tuple(h for h, host_ranks in enumerate(ranks) for _ in host_ranks)
        self._communicators = Communicators(in_order)
        self._threads = [ThreadPoolExecutor(1, f"actor {h}") for h in range(len(ranks))]
        self._workers: list[Worker] = []

        def make_worker(host_ranks: tuple[int, ...]) -> Callable[[], Worker]:
            wire = NcclWire(host_ranks, CUDA, fabric.group, in_order)
            return lambda: Worker(host_ranks, CUDA, ExchangeTransport(wire, self._host_of))

        futures = [self._start_on_host(host, make_worker(each)) for host, each in enumerate(ranks)]
        self._workers += [future.result() for future in futures]

    def _start_on_host(self, host: int, call: Callable[[], Any]) -> Future[Any]:
        """Run the call in the thread of a host."""
        self._world.begin(self._actors[host].number)

        def run() -> Any:
            try:
                with self._actors[host].here(), Simulated(), torch.no_grad():
                    return call()
            finally:
                self._world.end(self._actors[host].number)

        return self._threads[host].submit(run)

    def _call(
        self,
        method: Method,
        places: Places,
        parts: Sequence[Part],
        *,
        run: int | None = None,
        read: bool = True,
    ) -> list[Future[Any]]:
        return [
            self._call_worker(host, method, part)
            for (host, _), part in zip(places, parts, strict=True)
        ]

    def _call_worker(self, host: int, method: Method, part: Part) -> Future[Any]:
        sent = pytree.tree_map_only(torch.Tensor, torch.clone, part)  # as a message has copies
        return self._start_on_host(host, lambda: method(self._workers[host], *sent))

    def _count(self, places: Places) -> int:
        return len(places)

    def collect(self, calls: Sequence[Future[Any]], timeout: float | None = None) -> list[Any]:
        errors: list[BaseException] = []
        results: list[Any] = []
        with self._world.idle(here().number):
            for each in calls:
                try:
                    results.append(each.result(timeout))
                except TimeoutError:
                    raise
                except Exception as error:
                    errors.append(error)
        for index, result in enumerate(results):
            if isinstance(result, PendingResults) and not errors:
                try:
                    results[index] = result.wait()
                except DaftError as error:
                    errors.append(error)
        if errors:
            if isinstance(errors[0], DaftError):
                self.failure = errors[0]
            raise errors[0]
        return results

    def came(self, calls: Sequence[Future[Any]]) -> bool:
        return all(
            each.done()
            and (
                each.exception() is not None
                or not isinstance(result := each.result(), PendingResults)
                or result.done()
            )
            for each in calls
        )

    def ended(self, call: Future[Any]) -> bool:
        return self.came([call]) and call.exception() is None

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        pass

    def _ship(self, handle: Handle) -> Sequence[Future[Any]]:
        keys = check_routes(handle.program, self._host_of)
        new = self._communicators.number(handle.program, keys, self._host_of)
        calls: list[Future[Any]] = []
        hosts = [host for host, _ in handle.places]
        lists = [handle.report.lists[host] for host in hosts]
        parts = host_programs(handle.program, [self.hosts[host] for host in hosts], lists)
        for host, part in zip(hosts, parts, strict=True):
            tags = {k: n for k, n in new.items() if host in {self._host_of[r] for r in k[0]}}
            if tags:
                calls.append(self._call_worker(host, _open, (tags,)))
            calls.append(self._call_worker(host, Worker.load, (handle.id, part)))
        return calls

    def _wait_loaded(self, calls: Sequence[Future[Any]]) -> None:
        self.collect(calls)

    def _grow(self, size: int) -> Hosts:
        raise NotImplementedError("simulated GPUs of a launch are as many as at its start")

    def _end(self) -> None:
        for threads in self._threads:
            threads.shutdown(wait=True)

    def status(self, seconds: float) -> Status:
        raise NotImplementedError("the status of ranks on simulated GPUs")


def _open(worker: Worker, tags: dict[Key, int]) -> None:
    assert isinstance(worker.transport, ExchangeTransport)
    worker.transport.open(tags)
