"""The processes that host a cluster's ranks, and the spares that wait to replace a lost one.

    membership = Membership(home, ((0,), (1,)), "cpu", spares=1)  # 3 processes; it does not wait
    membership.host(1)                                   # the process that hosts rank 1
    by = membership.replace(1)                           # "a spare": that process, from now on

A spare is a host of no ranks: it has all imports, and the needs of programs. It gets a lost host's
part of each program when it replaces that host. A used spare is followed by another, which starts
while the ranks continue; if there is none, a new process is started, which takes seconds. The old
process is ended first, through its pidfd, so that it never writes again.

If Ray spans several machines, hosts are in blocks on them (`actor_placement.py`). If snapshots are
kept, too, hosts of the next machine, in a ring, keep copies of each machine's snapshots
(`replicas.py`). A lost host is replaced on its own machine, if others live there, else on the one
that has the copies.

Invariants: a process, its line to the controller and its name in the store have one number, which
no other process of the launch has. Not here: the work that ranks repeat when they have met again
(`recovery.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.bootstrap.machines import on_machine
from dtensor.daft.ray.channel.messages import ONE_WAY, REQUEST, Kind, Payload
from dtensor.daft.ray.channel.processes import NO_OPTIONS, HostProcess, LaunchProcesses
from dtensor.daft.ray.channel.run_channel import Reply, RunChannel
from dtensor.daft.ray.ranks.ranks import Ranks
from dtensor.daft.ray.transports.connect import Rendezvous, connect_of
from dtensor.daft.verification.pairing import Hosts

SPARE = "a spare"
STARTING = "a spare that started"
NEW = "a new process"
MOVED = " on another machine"


@dataclass(slots=True)
class HostCall:
    """A call of a host. `program`: of its run; `stored`: values of ranks that are inputs of the run
    by name; `plain`: inputs that refer to data which hosts were sent before. `lent`: the caller
    waits, and changes none of its buffers meanwhile."""

    functions: tuple[Any, ...]
    given: tuple[Any, ...] | Payload
    run: int | None
    kind: Kind = REQUEST
    program: int | None = None
    stored: tuple[tuple[int, str], ...] = ()
    plain: Mapping[tuple[int, int, str], tuple[int, bytes]] = field(
        default_factory=dict[tuple[int, int, str], tuple[int, bytes]]
    )
    lent: bool = False

    def keep_payload(self) -> None:
        """Copy the payload, unless its buffers are lent."""
        if isinstance(self.given, Payload) and not self.lent:
            self.given = self.given.kept()


class Membership:
    """`hosts`: the ranks of each; `memory`: as for `Ranks`. `options` are Ray's. `machines`: by
    host, Ray's name of its machine, if Ray spans several; `controllers`: the controller's."""

    def __init__(
        self,
        home: LaunchProcesses,
        channel: RunChannel,
        hosts: Hosts,
        device: str,
        *,
        spares: int,
        memory: Path | None,
        options: Mapping[str, object] = NO_OPTIONS,
        machines: Sequence[str] = (),
        controllers: str = "",
    ) -> None:
        self.spares: list[HostProcess] = []
        self.hosts: Hosts = hosts
        self.home = home
        self.channel = channel
        self._device = device
        self._memory = memory
        self._options = options
        self.controllers = controllers
        self.several: bool = memory is not None and any(machines)  # copies are on others, too
        self._wanted = spares
        self._warm: dict[int, Reply] = {}  # replies that spares give when they have started
        self._place: dict[int, int] = {}  # by number of a process, its host
        where = machines or [""] * len(hosts)
        self._hosts = [self._spawn(*each) for each in zip(hosts, where, strict=True)]
        for host, process in enumerate(self._hosts):
            self._place[process.index] = host
        self.start_spares()

    def host(self, host: int) -> HostProcess:
        return self._hosts[host]

    def place(self, process: int) -> int | None:
        """The host of a process, by its number; None for a spare and for one that was replaced."""
        return self._place.get(process)

    @property
    def all(self) -> Sequence[HostProcess]:
        return self._hosts

    @property
    def host_of(self) -> tuple[int, ...]:
        """By rank, its host."""
        return tuple(host for host, ranks in enumerate(self.hosts) for _ in ranks)

    def tell(self, process: HostProcess, method: Callable[..., Any], *given: object) -> None:
        self.channel.send(process.index, ONE_WAY, (method,), given)

    def meeting(self, prefix: str, tags: Mapping[Key, int], patience_s: float) -> Rendezvous:
        """The rendezvous of the present hosts. It also publishes, for `dt.status`, the ranks and
        the machine of each process."""
        files = [process.counter.path.name for process in self.all]
        where = [self.home.named(process.machine) for process in self.all]
        self.home.folder.say("ranks", dict(zip(files, self.hosts, strict=True)), where)
        hosts = tuple(process.index for process in self.all)
        return Rendezvous(
            address=self.home.address,
            port=self.home.store.port,
            secret=self.home.secret,
            prefix=prefix,
            hosts=hosts,
            host_of=self.host_of,
            tags=tags,
            connect=connect_of(hosts, torch.device(self._device).type),
            patience_s=patience_s,
        )

    def living(self, lost: Collection[int]) -> set[str]:
        """The machines with hosts that are not lost or with spares, and the controller's."""
        there = [p for host, p in enumerate(self._hosts) if host not in lost]
        there += [spare for spare in self.spares if self._is_there(spare)]
        return {self.controllers, *(process.machine for process in there)}

    def replace(self, host: int, places: Sequence[str]) -> tuple[HostProcess, str]:
        """Replace a host by a process on the first of these machines that has a spare, or else on
        the first; returns it and its kind. The old process is ended."""
        old = self._hosts[host]
        old.kill()
        old.end(grace_s=0.0)
        old.counts = False
        del self._place[old.index]
        new, by = self._taken(self.hosts[host], places)
        if new.machine != old.machine:
            by += MOVED
        new.counts = True
        self._hosts[host] = new
        self._place[new.index] = host
        return new, by

    def add(self, new: Hosts) -> list[HostProcess]:
        """Add hosts of these ranks, after the present ones: spares, and new processes."""
        processes: list[HostProcess] = []
        for ranks in new:
            hosts = [process.machine for process in self._hosts]
            fewest = sorted(dict.fromkeys(hosts), key=hosts.count)
            process, _ = self._taken(ranks, fewest)
            self._place[process.index] = len(self._hosts)
            self._hosts.append(process)
            processes.append(process)
        self.hosts = (*self.hosts, *new)
        return processes

    def drop_last(self, num: int) -> None:
        """Remove the last hosts, and end their processes."""
        for process in self._hosts[-num:]:
            process.counts = False
            process.kill()
            process.end(grace_s=0.0)
            del self._place[process.index]
        self._hosts, self.hosts = self._hosts[:-num], self.hosts[:-num]

    def _taken(self, ranks: tuple[int, ...], places: Sequence[str]) -> tuple[HostProcess, str]:
        """A process to host these ranks, and its kind."""
        self.spares = [spare for spare in self.spares if self._is_there(spare)]
        near = [s for place in places for s in self.spares if s.machine == place]
        ready = [spare for spare in near if self._warm[spare.index].over]
        if not near:
            return self._spawn(ranks, places[0]), NEW
        new = (ready or near)[0]
        self.spares.remove(new)
        return new, SPARE if ready else STARTING

    def _is_there(self, spare: HostProcess) -> bool:
        return not (spare.gone or spare.stopped or self.channel.is_broken(spare.index))

    @property
    def ready(self) -> bool:
        """Whether all spares have started."""
        replies = [self._warm[spare.index] for spare in self.spares]
        return len(replies) == self._wanted and self.channel.all_over(replies)

    def start_spares(self) -> list[HostProcess]:
        """Start the missing spares; returns the new ones."""
        new: list[HostProcess] = []
        while len(self.spares) < self._wanted:
            there = [spare.machine for spare in self.spares]
            where = dict.fromkeys(process.machine for process in self._hosts)
            spare = self._spawn((), min(where, key=there.count))
            spare.counts = False
            self._warm[spare.index] = self.channel.send(spare.index, REQUEST, (Ranks.warm,), ())
            self.spares.append(spare)
            new.append(spare)
        return new

    def _spawn(self, ranks: tuple[int, ...], machine: str) -> HostProcess:
        arguments, options = (ranks, self._device, self._memory), self._options
        if self.several:
            arguments = *arguments, machine, machine == self.controllers
        if machine:
            options = {**options, **on_machine(machine)}
        process = self.home.spawn(Ranks, *arguments, options=options)
        process.machine = machine
        line = self.channel.add()
        assert line == process.index, "a process has the number of its line"
        process.serve(self.channel.credentials(line))
        return process


def ring(machines: Sequence[str]) -> list[int | None]:
    """By host, given their machines, the host on the next machine that keeps its copies; None if
    there is no other machine. The hosts of a machine take turns."""
    there: dict[str, list[int]] = {}
    for host, machine in enumerate(machines):
        there.setdefault(machine, []).append(host)
    if len(there) < 2:
        return [None] * len(machines)
    following = dict(zip(there, [*list(there)[1:], *list(there)[:1]], strict=True))
    keepers: list[int | None] = []
    for host, machine in enumerate(machines):
        others = there[following[machine]]
        keepers.append(others[there[machine].index(host) % len(others)])
    return keepers
