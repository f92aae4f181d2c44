"""Runs the actors of one host as plain processes without Ray; each process joins the others and
runs a given function.

    with actors(2, tell_rank) as told:           # two processes that call tell_rank(joined, pipe)
        told[0].send(...)

`Here` is the state of one actor: its number, the transport that a launch on Ray would give it, and
a gloo-only transport for comparison.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dtensor.daft import Program
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.gloo import join_gloo
from dtensor.daft.ray.transports.same_host import SameHostTransport, join_same_host
from dtensor.daft.ray.transports.shared_memory_peers import own_place
from dtensor.daft.run.worker import HostRun, Worker
from tests.daft.backends import context
from tests.daft.programs import parts_of

Hosts = tuple[tuple[int, ...], ...]
SECRET = b"of these actors"


@dataclass
class Here:
    index: int
    hosts: Hosts
    store: Store

    def __post_init__(self) -> None:
        self.host_of = tuple(h for h, ranks in enumerate(self.hosts) for _ in ranks)
        self.joins = 0

    def join(self, node: str = "here") -> ExchangeTransport | SameHostTransport:
        """Join the other actors. All actors call this method together."""
        self.joins += 1
        store = PrefixStore(f"join{self.joins}", self.store)

        def meet(text: str) -> None:
            store.set(f"here{self.index}", text)
            store.wait([f"here{i}" for i in range(len(self.hosts))])

        return join_same_host(
            store,
            own_place(node),
            self.index,
            self.host_of,
            meet=meet,
            connect=lambda: join_gloo(store, self.index, self.host_of, "127.0.0.1", SECRET),
        )

    def gloo(self) -> ExchangeTransport:
        self.joins += 1
        store = PrefixStore(f"join{self.joins}", self.store)
        wire = join_gloo(store, self.index, self.host_of, "127.0.0.1", SECRET)
        return ExchangeTransport(wire, self.host_of)

    def meet(self, name: str) -> None:
        self.store.set(f"{name}{self.index}", "")
        self.store.wait([f"{name}{i}" for i in range(len(self.hosts))])


class Hosted:
    """An actor's worker over a transport; it loads programs as a cluster does."""

    def __init__(self, here: Here, transport: ExchangeTransport | SameHostTransport) -> None:
        self.here = here
        self.transport = transport
        self.worker = Worker(here.hosts[here.index], torch.device("cpu"), transport)
        self._tags: dict[Any, int] = {}
        self.loaded = 0

    def load(self, made: Program) -> int:
        for key in check_routes(made, self.here.host_of):
            self._tags.setdefault(key, len(self._tags))
        self.transport.open(self._tags)
        self.loaded += 1
        self.worker.load(self.loaded, parts_of(made, self.here.hosts)[self.here.index])
        return self.loaded

    def run(self, handle: int, fed: Sequence[Mapping[str, object]]) -> dict[int, dict[str, Tensor]]:
        ranks = self.here.hosts[self.here.index]
        made = self.worker.run(HostRun(handle, 0, {rank: dict(fed[rank]) for rank in ranks}))
        assert isinstance(made, dict)
        return made  # type: ignore[return-value]


def each(size: int, act: Callable[..., Any], *given: Any, hosts: Hosts | None = None) -> list[Any]:
    """Run `act(here, *given)` in each of `size` processes and return the results."""
    with actors(size, _answer, act, given, hosts=hosts) as pipes:
        answers = [pipe.recv() for pipe in pipes]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _answer(here: Here, pipe: Connection, act: Callable[..., Any], given: Sequence[Any]) -> None:
    try:
        answer = act(here, *given)
    except Exception as error:
        answer = RuntimeError(f"actor {here.index}: {type(error).__name__}: {error}")
    pipe.send(answer)


@contextmanager
def actors(
    size: int, act: Callable[..., None], *given: Any, hosts: Hosts | None = None
) -> Iterator[list[Connection]]:
    """Start processes that call `act(here, pipe, *given)` and yield the other ends of their pipes.
    The processes end with the block."""
    hosts = tuple((rank,) for rank in range(size)) if hosts is None else hosts
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free.listen()
        descriptor = free.detach()
    port = socket.socket(fileno=descriptor)
    number = port.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", number, None, True, wait_for_workers=False, master_listen_fd=port.detach()
    )
    pipes = [context.Pipe() for _ in hosts]
    processes = [
        context.Process(target=_begin, args=(i, hosts, number, act, pipes[i][1], given))
        for i in range(len(hosts))
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for ours, _ in pipes:
            ours.close()
        del store


def _begin(
    index: int,
    hosts: Hosts,
    port: int,
    act: Callable[..., None],
    pipe: Connection,
    given: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    act(Here(index, hosts, store), pipe, *given)
