"""The processes that host a cluster's ranks, and the spares that wait to take a lost one's place.

    crew = Crew(home, ((0,), (1,)), "cpu", spares=1)     # three processes, nothing is waited for
    crew.host(1)                                         # the process that hosts rank 1
    by = crew.replace(1)                                 # "a spare": that process, from now on

A spare is a host of no ranks: it has imported all, and has every program that was loaded. One that
was taken is followed by another, which starts while the ranks go on; where there is none a new
process is started, which takes seconds. What was replaced is ended first, through its pidfd, so
that it never writes again.

Invariants: a process, its line to the controller and what it is called in the store have one
number, which no other process of the launch has. Not here: what ranks are told when they have to
meet again, and what they do again (`cluster.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dtensor.daft.ray.messages import ASKED
from dtensor.daft.ray.processes import NO_OPTIONS, Home, HostProcess
from dtensor.daft.ray.ranks import Ranks
from dtensor.daft.ray.run_channel import Reply, RunChannel
from dtensor.daft.verification.pairing import Hosts

SPARE = "a spare"
STARTING = "a spare that started"
NEW = "a new process"


class Crew:
    """`hosts`: the ranks of each; `memory`: as of `Ranks`. `options` are Ray's."""

    def __init__(
        self,
        home: Home,
        channel: RunChannel,
        hosts: Hosts,
        device: str,
        *,
        spares: int,
        memory: Path | None,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> None:
        self.spares: list[HostProcess] = []
        self.hosts = hosts
        self._home = home
        self._channel = channel
        self._device = device
        self._memory = memory
        self._options = options
        self._wanted = spares
        self._warm: dict[int, Reply] = {}  # of the spares, what tells that they have started
        self._place: dict[int, int] = {}  # by number of a process, which host it is
        self._hosts = [self._spawn(ranks) for ranks in hosts]
        for host, process in enumerate(self._hosts):
            self._place[process.index] = host
        self.hire()

    def host(self, host: int) -> HostProcess:
        return self._hosts[host]

    def place(self, process: int) -> int | None:
        """Which host a process is, by its number; None of a spare and of one that was replaced."""
        return self._place.get(process)

    @property
    def all(self) -> Sequence[HostProcess]:
        return self._hosts

    def replace(self, host: int) -> tuple[HostProcess, str]:
        """Another process for a host, and what it was; the old one is ended."""
        old = self._hosts[host]
        old.kill()
        old.end(grace_s=0.0)
        old.counts = False
        del self._place[old.index]
        new, by = self._taken(self.hosts[host])
        new.counts = True
        self._hosts[host] = new
        self._place[new.index] = host
        return new, by

    def add(self, new: Hosts) -> list[HostProcess]:
        """Hosts of these ranks, after those that there are: spares, and new processes."""
        found: list[HostProcess] = []
        for ranks in new:
            process, _ = self._taken(ranks)
            self._place[process.index] = len(self._hosts)
            self._hosts.append(process)
            found.append(process)
        self.hosts = (*self.hosts, *new)
        return found

    def dismiss(self, num: int) -> None:
        """The last hosts are none any more; their processes are ended."""
        for process in self._hosts[-num:]:
            process.counts = False
            process.kill()
            process.end(grace_s=0.0)
            del self._place[process.index]
        self._hosts, self.hosts = self._hosts[:-num], self.hosts[:-num]

    def _taken(self, ranks: tuple[int, ...]) -> tuple[HostProcess, str]:
        """A process to host these ranks, and what it was."""
        self.spares = [spare for spare in self.spares if not (spare.gone or spare.stopped)]
        ready = [spare for spare in self.spares if self._warm[spare.index].came]
        if not self.spares:
            return self._spawn(ranks), NEW
        new = (ready or self.spares)[0]
        self.spares.remove(new)
        return new, SPARE if ready else STARTING

    @property
    def ready(self) -> bool:
        """Whether all spares have started."""
        replies = [self._warm[spare.index] for spare in self.spares]
        return len(replies) == self._wanted and self._channel.came(replies)

    def hire(self) -> list[HostProcess]:
        """Start as many spares as are missing; those that are new."""
        new: list[HostProcess] = []
        while len(self.spares) < self._wanted:
            spare = self._spawn(())
            spare.counts = False
            self._warm[spare.index] = self._channel.send(spare.index, ASKED, (Ranks.warm,), ())
            self.spares.append(spare)
            new.append(spare)
        return new

    def _spawn(self, ranks: tuple[int, ...]) -> HostProcess:
        arguments = ranks, self._device, self._memory
        process = self._home.spawn(Ranks, *arguments, options=self._options)
        line = self._channel.add()
        assert line == process.index, "a process has the number of its line"
        process.serve(self._channel.invitation(line))
        return process
