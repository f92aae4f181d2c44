"""The processes that host a cluster's ranks, and the spares that wait to replace a lost process.

    membership = Membership(launch, channel, ((0,), (1,)), "cpu", spares=1, memory=None)
    membership.host(1)                                   # the process that hosts rank 1
    process, kind = membership.replace(1, [""])          # kind: "a spare"

A spare hosts no ranks, but has all imports and the custom ops of programs. Without a spare, a new
process is started, which takes seconds. The old process is ended first, so that it never writes
again. A lost host is replaced on its own machine if other hosts live there, else on the machine
with the copies of its snapshots (`replicas.py`). Invariant: a process has one number in the launch,
in the channel and in the store.
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
    """A call of a host, as it is sent. If it starts a run, `program` is the run's program, `stored`
    its inputs that are values of ranks, (rank, name), and `plain` the earlier data that its inputs
    refer to. `lent`: the caller does not change its buffers before the answer."""

    functions: tuple[Any, ...]
    arguments: tuple[Any, ...] | Payload
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
        if isinstance(self.arguments, Payload) and not self.lent:
            self.arguments = self.arguments.kept()


class Membership:
    """The host processes and spares of a launch. `hosts`: the ranks of each host; `memory`: see
    `Ranks`; `options`: Ray's, for each process. `machines`: Ray's name of each host's machine, if
    the launch spans several; `controllers`: Ray's name of the controller's machine."""

    def __init__(
        self,
        launch: LaunchProcesses,
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
        self.launch = launch
        self.channel = channel
        self._device = device
        self._memory = memory
        self._options = options
        self.controllers = controllers
        self.several: bool = memory is not None and any(machines)  # snapshots are replicated
        self._num_spares = spares
        self._warm: dict[int, Reply] = {}  # a spare's number to the answer that it has started
        self._host_of_process: dict[int, int] = {}  # a process's number to its host
        machine_of = machines or [""] * len(hosts)
        # by host
        self.processes = [self._spawn(*each) for each in zip(hosts, machine_of, strict=True)]
        for host, process in enumerate(self.processes):
            self._host_of_process[process.index] = host
        self.start_spares()

    def host(self, host: int) -> HostProcess:
        return self.processes[host]

    def place(self, process: int) -> int | None:
        """Return the host of a process, by its number; None for a spare or replaced one."""
        return self._host_of_process.get(process)

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(host for host, ranks in enumerate(self.hosts) for _ in ranks)

    def tell(self, process: HostProcess, method: Callable[..., Any], *arguments: object) -> None:
        """Call a method of `Ranks` one-way."""
        self.channel.send(process.index, ONE_WAY, (method,), arguments)

    def meeting(self, prefix: str, tags: Mapping[Key, int], patience_s: float) -> Rendezvous:
        """Return the rendezvous of the present hosts, and write their ranks and machines into the
        launch's folder for `dt.status`."""
        files = [process.counter.path.name for process in self.processes]
        machines = [self.launch.named(process.machine) for process in self.processes]
        self.launch.folder.write_facts("ranks", dict(zip(files, self.hosts, strict=True)), machines)
        hosts = tuple(process.index for process in self.processes)
        return Rendezvous(
            address=self.launch.address,
            port=self.launch.store.port,
            secret=self.launch.secret,
            prefix=prefix,
            hosts=hosts,
            host_of=self.host_of,
            tags=tags,
            connect=connect_of(hosts, torch.device(self._device).type),
            patience_s=patience_s,
        )

    def living(self, lost: Collection[int]) -> set[str]:
        """Return the machines with spares or with hosts that are not lost, and the controller's
        machine."""
        alive = [process for host, process in enumerate(self.processes) if host not in lost]
        alive += [spare for spare in self.spares if self._is_usable(spare)]
        return {self.controllers, *(process.machine for process in alive)}

    def replace(self, host: int, machines: Sequence[str]) -> tuple[HostProcess, str]:
        """End a host's process and replace it: by a spare on the first of these machines that has
        one, else by a new process on the first. Return the new process and its kind as text."""
        old = self.processes[host]
        old.kill()
        old.end(grace_s=0.0)
        old.counts = False
        del self._host_of_process[old.index]
        new, kind = self._spare_or_new(self.hosts[host], machines)
        if new.machine != old.machine:
            kind += MOVED
        new.counts = True
        self.processes[host] = new
        self._host_of_process[new.index] = host
        return new, kind

    def add(self, new: Hosts) -> list[HostProcess]:
        """Add hosts of these ranks after the present hosts; return their processes."""
        processes: list[HostProcess] = []
        for ranks in new:
            hosts = [process.machine for process in self.processes]
            fewest = sorted(dict.fromkeys(hosts), key=hosts.count)
            process, _ = self._spare_or_new(ranks, fewest)
            self._host_of_process[process.index] = len(self.processes)
            self.processes.append(process)
            processes.append(process)
        self.hosts = (*self.hosts, *new)
        return processes

    def drop_last(self, num: int) -> None:
        """Remove the last `num` hosts, and end their processes."""
        for process in self.processes[-num:]:
            process.counts = False
            process.kill()
            process.end(grace_s=0.0)
            del self._host_of_process[process.index]
        self.processes, self.hosts = self.processes[:-num], self.hosts[:-num]

    def _spare_or_new(
        self, ranks: tuple[int, ...], machines: Sequence[str]
    ) -> tuple[HostProcess, str]:
        """Return a process to host these ranks, and its kind as text: a spare, if there is one on
        these machines, else a new process on the first machine."""
        self.spares = [spare for spare in self.spares if self._is_usable(spare)]
        spares = [s for place in machines for s in self.spares if s.machine == place]
        started = [spare for spare in spares if self._warm[spare.index].over]
        if not spares:
            return self._spawn(ranks, machines[0]), NEW
        spare = (started or spares)[0]
        self.spares.remove(spare)
        return spare, SPARE if started else STARTING

    def _is_usable(self, spare: HostProcess) -> bool:
        return not (spare.gone or spare.stopped or self.channel.is_broken(spare.index))

    @property
    def ready(self) -> bool:
        """Whether all spares have started."""
        replies = [self._warm[spare.index] for spare in self.spares]
        return len(replies) == self._num_spares and self.channel.all_over(replies)

    def start_spares(self) -> list[HostProcess]:
        """Start missing spares, each on the machine with the fewest spares. Return the new ones."""
        new: list[HostProcess] = []
        while len(self.spares) < self._num_spares:
            spares = [spare.machine for spare in self.spares]
            machines = dict.fromkeys(process.machine for process in self.processes)
            spare = self._spawn((), min(machines, key=spares.count))
            spare.counts = False
            self._warm[spare.index] = self.channel.send(spare.index, REQUEST, (Ranks.warm,), ())
            self.spares.append(spare)
            new.append(spare)
        return new

    def _spawn(self, ranks: tuple[int, ...], machine: str) -> HostProcess:
        """Start a process for these ranks on a machine ("" for any), and connect it to the
        channel."""
        arguments, options = (ranks, self._device, self._memory), self._options
        if self.several:
            arguments = *arguments, machine, machine == self.controllers
        if machine:
            options = {**options, **on_machine(machine)}
        process = self.launch.spawn(Ranks, *arguments, options=options)
        process.machine = machine
        number = self.channel.add()
        assert number == process.index, "a process has one number in the launch and the channel"
        process.serve(self.channel.credentials(number))
        return process


def ring(machines: Sequence[str]) -> list[int | None]:
    """Return, for each host, the host on the next machine that keeps copies of its snapshots; None
    if there is no other machine. `machines`: the machine of each host.

    Example: ring(["a", "a", "b"]) == [2, 2, 0].
    """
    hosts_on: dict[str, list[int]] = {}
    for host, machine in enumerate(machines):
        hosts_on.setdefault(machine, []).append(host)
    if len(hosts_on) < 2:
        return [None] * len(machines)
    following = dict(zip(hosts_on, [*list(hosts_on)[1:], *list(hosts_on)[:1]], strict=True))
    servers: list[int | None] = []
    for host, machine in enumerate(machines):
        next_hosts = hosts_on[following[machine]]
        servers.append(next_hosts[hosts_on[machine].index(host) % len(next_hosts)])
    return servers
