"""Ranks on simulated GPUs: an actor, here a thread, for each GPU, over the mock of NCCL.

    with dt.testing.simulated_gpus(num=2), dt.launch(dt.Mesh(tp=2), "ray", device="cuda"):
        step(x, y)

All between `Cluster.run` and the kernels is what runs on real ones: the worker and its engine, the
exchange of messages over `NcclWire` with its side streams, generated code for "cuda", kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future as Asked
from concurrent.futures import ThreadPoolExecutor
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
from dtensor.daft.run.worker import Worker
from dtensor.daft.status import Status
from dtensor.daft.verification.pairing import Hosts
from dtensor.testing.gpus.host import Host, here
from dtensor.testing.gpus.nccl import Fabric
from dtensor.testing.gpus.tensors import Simulated
from dtensor.testing.gpus.world import World

CUDA = torch.device("cuda", 0)
"""As Ray shows an actor its own GPU alone."""


class SimulatedCluster(HostedCluster):
    def __init__(
        self,
        world: World,
        fabric: Fabric,
        hosts: Sequence[Host],
        size: int,
        *,
        ranks_per_actor: int,
        seed: int,
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
        self._host_of = tuple(h for h, own in enumerate(ranks) for _ in own)
        self._communicators = Communicators()
        self._threads = [ThreadPoolExecutor(1, f"actor {h}") for h in range(len(ranks))]
        self._workers: list[Worker] = []

        def make(own: tuple[int, ...]) -> Callable[[], Worker]:
            wire = NcclWire(own, CUDA, fabric.group)
            return lambda: Worker(own, CUDA, ExchangeTransport(wire, self._host_of))

        made = [self._ask(host, make(own)) for host, own in enumerate(ranks)]
        self._workers += [each.result() for each in made]

    def _ask(self, host: int, call: Callable[[], Any]) -> Asked[Any]:
        self._world.begin(self._actors[host].number)

        def called() -> Any:
            try:
                with self._actors[host].here(), Simulated(), torch.no_grad():
                    return call()
            finally:
                self._world.end(self._actors[host].number)

        return self._threads[host].submit(called)

    def _call(
        self,
        method: Method,
        places: Places,
        parts: Sequence[Part],
        *,
        run: int | None = None,
        read: bool = True,
    ) -> list[Asked[Any]]:
        return [
            self._ask_worker(host, method, part)
            for (host, _), part in zip(places, parts, strict=True)
        ]

    def _ask_worker(self, host: int, method: Method, part: Part) -> Asked[Any]:
        return self._ask(host, lambda: method(self._workers[host], *part))

    def _count(self, places: Places) -> int:
        return len(places)

    def collect(self, calls: Sequence[Asked[Any]], timeout: float | None = None) -> list[Any]:
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
        if errors:
            if isinstance(errors[0], DaftError):
                self.failure = errors[0]
            raise errors[0]
        return results

    def came(self, calls: Sequence[Asked[Any]]) -> bool:
        return all(each.done() for each in calls)

    def ended(self, calls: Asked[Any]) -> bool:
        return calls.done() and calls.exception() is None

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        pass

    def _ship(self, handle: Handle) -> Sequence[Asked[Any]]:
        keys = check_routes(handle.program, self._host_of)
        new = self._communicators.number(handle.program, keys, self._host_of)
        calls: list[Asked[Any]] = []
        hosts = [host for host, _ in handle.places]
        lists = [handle.report.lists[host] for host in hosts]
        parts = host_programs(handle.program, [self.hosts[host] for host in hosts], lists)
        for host, part in zip(hosts, parts, strict=True):
            tags = {k: n for k, n in new.items() if host in {self._host_of[r] for r in k[0]}}
            if tags:
                calls.append(self._ask_worker(host, _open, (tags,)))
            calls.append(self._ask_worker(host, Worker.load, (handle.id, part)))
        return calls

    def _wait_loaded(self, calls: Sequence[Asked[Any]]) -> None:
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
