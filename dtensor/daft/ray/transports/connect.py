"""Hosts that run a program together: what crosses between them, how they find each other, and what
a failure of one does.

Example, host 0 of two, whose ranks are 0 and 1 (`ranks.py` does this):

    joined = HostConnections.by(join, 0, (0,), torch.device("cpu"))  # blocks until both have come
    engine = Engine(host_program, table, joined.transport)
    with joined.running():
        engine.run({0: {"x": x}})

The controller numbers the keys that cross hosts, of all programs loaded: gloo makes tags of the
numbers, NCCL a communicator for each number, in their order (`communicators.py`). `pipeline(4)` on
two hosts of two ranks crosses once, from rank 1 to rank 2:

    check_routes(program, (0, 0, 1, 1))        # [((1, 2), "fwd", "transfer")]

Invariants: what fails while they run closes the connections, so that hosts that wait for this one
fail too instead of blocking, and is repeated to whatever comes later. Nothing here is a time-out: a
host that dies breaks its connections at once, and the controller ends one that has stopped or
stands still (`failure_detector.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch

from dtensor.daft.errors import CommunicationError, DaftError, Failure, ProgramError
from dtensor.daft.ir.instructions import Collective, Key, Recv, Send, key_of
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.bootstrap.machines import START_S, node_at, reached_at
from dtensor.daft.ray.bootstrap.rendezvous import SignedStore
from dtensor.daft.ray.channel.messages import HostFailed
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.gloo import join_gloo
from dtensor.daft.ray.transports.nccl import join_nccl
from dtensor.daft.ray.transports.same_host import join_same_host
from dtensor.daft.ray.transports.shared_memory_peers import own_place
from dtensor.daft.remote_exceptions import RemoteException, interrupts, reason_of, trace_of
from dtensor.daft.run.transport import TRANSPORTS, Connect, Locality, Meeting, Transport
from dtensor.private_torch import PrefixStore, Store

SLICE_S = 0.02  # how often one that waits for others to join looks whether they have, or are lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How hosts find each other, under `prefix` in a store at the controller. `hosts` are their
    numbers in the launch, `tags` those of the keys; `host_of`: by rank, which of `hosts` has it.
    `secret`: the launch's, by which they know each other. `connect` makes the transport;
    `patience_s` is of NCCL's watchdog."""

    address: str
    port: int
    secret: bytes = field(repr=False)
    prefix: str
    hosts: tuple[int, ...]
    host_of: tuple[int, ...]
    tags: Mapping[Key, int]
    connect: Connect
    patience_s: float = 60.0


class HostConnections:
    """Hosts that have joined, as one of them sees it."""

    def __init__(self, transport: Transport, join: Rendezvous, ranks: Sequence[int]) -> None:
        self.transport = transport
        self.failed: HostFailed | None = None
        self.store: SignedStore | None = None
        self._hosts = join.hosts
        self._rank = ranks[0]

    @staticmethod
    def by(
        join: Rendezvous,
        index: int,
        ranks: Sequence[int],
        device: torch.device,
        tell: Callable[[int], None] = lambda rank: None,
    ) -> HostConnections:
        """As host `index` of these; blocks until all have come. Over gloo they connect here, over
        NCCL in `open`; those of one machine share memory. `tell`: the rank that it waits for."""
        if locality_of(join.hosts, device.type) == "process":
            return HostConnections(join.connect(Meeting(ranks=tuple(ranks))), join, ranks)
        start = timedelta(seconds=START_S)
        store = SignedStore.join(join.address, join.port, join.secret, start)
        prefixed = PrefixStore(join.prefix, store)
        meeting = Meeting(
            ranks=tuple(ranks),
            index=index,
            host_of=join.host_of,
            store=prefixed,
            meet=lambda card: meet(store, prefixed, join, index, card, tell),
            address=join.address,
            secret=join.secret,
            patience_s=join.patience_s,
        )
        joined = HostConnections(join.connect(meeting), join, ranks)
        joined.store = store  # torch's do not hold it
        joined.open(join.tags)
        return joined

    def open(self, tags: Mapping[Key, int]) -> None:
        """Make ready for the keys of a program that is about to be loaded."""
        self.transport.open(tags)

    def check(self) -> None:
        if self.failed is not None:
            raise self.failed

    @contextmanager
    def running(self, step: int | None = None) -> Generator[None]:
        """Whatever is raised in it is a failure of run `step`, the last of these connections."""
        self.check()
        try:
            yield
        except BaseException as error:
            if interrupts(error):
                raise
            failed = self.failed = host_failed(error, self._hosts, rank=self._rank, step=step)
            try:
                self.transport.close()
            except Exception as closing:  # as a lost GPU does; that must not hide why
                known = failed.error.failure
                said = f"{known.reason}\nThe connections failed to close: {reason_of(closing)}"
                error = type(failed.error)(replace(known, reason=said))
                failed = self.failed = HostFailed(error, self._hosts)
            raise failed from None


def locality_of(hosts: Sequence[int], device: str) -> Locality:
    """A GPU is set up by its wire, which a single host has too."""
    return "process" if len(hosts) == 1 and device == "cpu" else "hosts"


def connect_of(hosts: Sequence[int], device: str) -> Connect:
    """What the controller's registry has, which goes to the hosts."""
    return TRANSPORTS[device, locality_of(hosts, device)]


def connect_cpu(meeting: Meeting) -> Transport:
    """Over gloo; hosts of one machine share memory."""
    store, meet = meeting.of_hosts()
    index, host_of, secret = meeting.index, meeting.host_of, meeting.secret
    return join_same_host(
        store,
        own_place(node_at(meeting.address)),
        index,
        host_of,
        meet=meet,
        connect=lambda: join_gloo(store, index, host_of, reached_at(meeting.address), secret),
    )


def connect_cuda(meeting: Meeting) -> Transport:
    """Over NCCL."""
    store, meet = meeting.of_hosts()
    meet("")
    wire = join_nccl(store, meeting.ranks, max(meeting.host_of) + 1, meeting.patience_s)
    return ExchangeTransport(wire, meeting.host_of)


TRANSPORTS.setdefault(("cpu", "hosts"), connect_cpu)
TRANSPORTS.setdefault(("cuda", "hosts"), connect_cuda)


def check_routes(program: Program, host_of: Sequence[int]) -> list[Key]:
    """The keys that cross actors, sorted. `ProgramError` for a collective that does so in part."""
    crossing: set[Key] = set()
    for rank, rank_program in enumerate(program.ranks):
        for instruction in rank_program.instructions:
            if not isinstance(instruction, Send | Recv | Collective):
                continue
            key = key_of(rank, instruction)
            hosts = {host_of[member] for member in key[0]}
            if 1 < len(hosts) < len(key[0]):
                raise ProgramError(
                    f"Program {program.name!r}: a collective over {key[0]} has members that share "
                    f"an actor and members that do not (actors "
                    f"{[host_of[member] for member in key[0]]}).\n"
                    f"  Fix: launch with ranks_per_actor=1, or with all members on one."
                )
            if len(hosts) > 1:
                crossing.add(key)
    return sorted(crossing)


def meet(
    store: Store,
    prefixed: Store,
    join: Rendezvous,
    index: int,
    card: str = "",
    tell: Callable[[int], None] = lambda rank: None,
) -> None:
    """Blocks until all have come, as gloo would, but not for one that is lost. Others may come
    hours later: from a method, or from runs of other programs. `card`: to be read under
    `here<index>`. `tell`: a rank that has not come, whenever that is another; in the end -1."""
    prefixed.set(f"here{index}", card)
    here = 0  # the first who has not come; the store's own `wait` logs when it times out
    try:
        while here < len(join.hosts):
            while here < len(join.hosts) and prefixed.check([f"here{here}"]):
                here += 1
            for host in join.hosts:
                if store.check([lost_key(host)]):
                    store.get(lost_key(host))  # raises if the controller has not written it
                    raise RuntimeError(f"process {host} was lost before it joined the program")
            if here < len(join.hosts):
                tell(join.host_of.index(here))
                time.sleep(SLICE_S)
    finally:
        tell(-1)


def lost_key(host: int) -> str:
    """What the controller writes into the store when a host is lost."""
    return f"lost{host}"


def host_failed(
    raised: BaseException, hosts: tuple[int, ...], rank: int | None = None, step: int | None = None
) -> HostFailed:
    """With the traceback as text, as it goes to the controller."""
    error = raised
    if not isinstance(error, DaftError):
        failure = Failure(rank=rank, reason=reason_of(raised), raised=RemoteException(raised))
        error = CommunicationError(failure)
    cause = raised.__cause__ if raised.__cause__ is not None else raised
    failure = replace(error.failure, traceback=trace_of(cause), step=step)
    return HostFailed(type(error)(failure), hosts)
