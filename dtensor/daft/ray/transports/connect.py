"""How the hosts of a cluster find each other, connect, and share a failure.

    joined = HostConnections.join(rendezvous, 0, (0,), torch.device("cpu"))  # waits for all hosts
    engine = Engine(host_program, table, joined.transport)
    with joined.running():
        engine.run({0: {"x": x}})
    check_routes(program, (0, 0, 1, 1))      # keys that cross hosts: [((1, 2), "fwd", "transfer")]

The controller numbers these keys: the numbers are gloo's tags and NCCL's communicators. Invariants:
a failure during a run closes the connections, so that hosts that wait for this one fail, too. There
are no time-outs: a host that dies breaks its connections, and the controller ends a host that has
stopped (`failure_detector.py`).
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

SLICE_S = 0.02  # how often a host that waits checks whether the others have come or are lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The data with which hosts connect. They meet under `prefix` in the store at `address` and
    `port`, whose values are signed with `secret`. `hosts`: the numbers of their processes;
    `host_of`: the position in `hosts` of each rank's host; `tags`: the numbers of keys; `connect`:
    returns the transport; `patience_s`: the limit of NCCL's watchdog; `in_order`: whether
    reductions are folds in the order of the group."""

    address: str
    port: int
    secret: bytes = field(repr=False)
    prefix: str
    hosts: tuple[int, ...]
    host_of: tuple[int, ...]
    tags: Mapping[Key, int]
    connect: Connect
    patience_s: float = 60.0
    in_order: bool = False


class HostConnections:
    """The connections of a host to the other hosts. `failed`: the failure that closed them."""

    def __init__(self, transport: Transport, rendezvous: Rendezvous, ranks: Sequence[int]) -> None:
        self.transport = transport
        self.failed: HostFailed | None = None
        self.store: SignedStore | None = None
        self._hosts = rendezvous.hosts
        self._rank = ranks[0]

    @staticmethod
    def join(
        rendezvous: Rendezvous,
        index: int,
        ranks: Sequence[int],
        device: torch.device,
        tell: Callable[[int], None] = lambda rank: None,
    ) -> HostConnections:
        """Connect as host `index`; wait until all hosts have come. NCCL connects in `open`. `tell`
        is called with the rank that this host waits for."""
        if locality_of(rendezvous.hosts, device.type) == "process":
            return HostConnections(
                rendezvous.connect(Meeting(ranks=tuple(ranks))), rendezvous, ranks
            )
        start = timedelta(seconds=START_S)
        store = SignedStore.join(rendezvous.address, rendezvous.port, rendezvous.secret, start)
        prefixed = PrefixStore(rendezvous.prefix, store)
        meeting = Meeting(
            ranks=tuple(ranks),
            index=index,
            host_of=rendezvous.host_of,
            store=prefixed,
            meet=lambda text: meet(store, prefixed, rendezvous, index, text, tell),
            address=rendezvous.address,
            secret=rendezvous.secret,
            patience_s=rendezvous.patience_s,
            in_order=rendezvous.in_order,
        )
        joined = HostConnections(rendezvous.connect(meeting), rendezvous, ranks)
        joined.store = store  # keeps it alive, which torch's stores do not
        joined.open(rendezvous.tags)
        return joined

    def open(self, tags: Mapping[Key, int]) -> None:
        """Connect for the keys of a program that is about to be loaded."""
        self.transport.open(tags)

    def check(self) -> None:
        if self.failed is not None:
            raise self.failed

    @contextmanager
    def running(self, step: int | None = None) -> Generator[None]:
        """Within the block, an exception is a failure of run `step`, and closes the connections."""
        self.check()
        try:
            yield
        except BaseException as error:
            if interrupts(error):
                raise
            if self.failed is not None:  # an earlier run on a GPU has failed meanwhile
                raise self.failed from None
            failed = self.failed = host_failed(error, self._hosts, rank=self._rank, step=step)
            try:
                self.transport.close()
            except Exception as closing:  # for example a lost GPU; it must not hide the failure
                failure = failed.error.failure
                reason = f"{failure.reason}\nThe connections failed to close: {reason_of(closing)}"
                error = type(failed.error)(replace(failure, reason=reason))
                failed = self.failed = HostFailed(error, self._hosts)
            raise failed from None


def locality_of(hosts: Sequence[int], device: str) -> Locality:
    """Return "process" if no transport between hosts is needed. A GPU needs it even on a single
    host, since the wire also sets up the device."""
    return "process" if len(hosts) == 1 and device == "cpu" else "hosts"


def connect_of(hosts: Sequence[int], device: str) -> Connect:
    """Return the registered function that connects such hosts; it is sent to them."""
    return TRANSPORTS[device, locality_of(hosts, device)]


def connect_cpu(meeting: Meeting) -> Transport:
    """Connect over gloo, and over shared memory on one machine."""
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
    """Connect over NCCL."""
    store, meet = meeting.of_hosts()
    meet("")
    num_actors = max(meeting.host_of) + 1
    wire = join_nccl(store, meeting.ranks, num_actors, meeting.patience_s, meeting.in_order)
    return ExchangeTransport(wire, meeting.host_of)


TRANSPORTS.setdefault(("cpu", "hosts"), connect_cpu)
TRANSPORTS.setdefault(("cuda", "hosts"), connect_cuda)


def check_routes(program: Program, host_of: Sequence[int]) -> list[Key]:
    """Return the keys whose members are on different actors, sorted. Raises ProgramError for a
    collective of which only some members share an actor."""
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
    rendezvous: Rendezvous,
    index: int,
    text: str = "",
    tell: Callable[[int], None] = lambda rank: None,
) -> None:
    """Publish `text` as `here<index>`, and wait until all hosts have come. Raises RuntimeError if a
    host is lost. A host may come hours later, after a long call. `tell` is called with a rank of a
    host that has not come, and with -1 at the end."""
    prefixed.set(f"here{index}", text)
    num_here = 0  # these hosts have come. The store's own `wait` is not used: its time-outs log
    try:
        while num_here < len(rendezvous.hosts):
            while num_here < len(rendezvous.hosts) and prefixed.check([f"here{num_here}"]):
                num_here += 1
            for host in rendezvous.hosts:
                if store.check([lost_key(host)]):
                    store.get(lost_key(host))  # raises if the controller has not signed it
                    raise RuntimeError(f"process {host} was lost before it joined the program")
            if num_here < len(rendezvous.hosts):
                tell(rendezvous.host_of.index(num_here))
                time.sleep(SLICE_S)
    finally:
        tell(-1)


def lost_key(host: int) -> str:
    """Return the key that the controller sets in the store when a process is lost."""
    return f"lost{host}"


def host_failed(
    raised: BaseException, hosts: tuple[int, ...], rank: int | None = None, step: int | None = None
) -> HostFailed:
    """Return an exception as it is sent to the controller, with the traceback as text."""
    error = raised
    if not isinstance(error, DaftError):
        failure = Failure(rank=rank, reason=reason_of(raised), raised=RemoteException(raised))
        error = CommunicationError(failure)
    cause = raised.__cause__ if raised.__cause__ is not None else raised
    failure = replace(error.failure, traceback=trace_of(cause), step=step)
    return HostFailed(type(error)(failure), hosts)
