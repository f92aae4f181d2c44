"""The processes of a launch: each is a Ray actor that hosts ranks or spawned objects.

    home = LaunchProcesses(address=None, deadline_s=60.0)  # joins or starts a Ray
    process = home.spawn(Ranks, (0,), "cpu")         # and its counter file; nothing is waited for
    process.serve(channel.credentials(0))            # from now on it is called over that
    home.close()                                     # all end, and Ray if it was started here

On this machine there is also a handle to the process, which ends it even when it is stopped: Ray's
kill needs the process to answer.

Invariants: only what was started here is ended here, and all of it, whatever raises meanwhile.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from dtensor.daft.errors import ClusterClosed
from dtensor.daft.ray.bootstrap.launch_folder import LaunchFolder
from dtensor.daft.ray.bootstrap.machines import (
    LOOPBACK,
    Machine,
    cluster_resources,
    machines,
    own_address,
    own_node,
)
from dtensor.daft.ray.bootstrap.progress import ProgramCounter, process_stat
from dtensor.daft.ray.bootstrap.rendezvous import SignedStore
from dtensor.daft.ray.bootstrap.user_folder import OwnFolder
from dtensor.daft.ray.channel.handshake import Credentials
from dtensor.daft.ray.channel.host_actor import packed
from dtensor.daft.ray.channel.local_ray import LocalRay, is_possible, release, use
from dtensor.daft.ray.channel.run_channel import RunChannel

END_S = 30.0
"""How long a process may take to end after SIGKILL: it frees its memory."""
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


class Actor(Protocol):
    """Who can start and end a host: this process, if it has joined Ray (`RayActor`), or that which
    has this machine's (`LocalHost`)."""

    @property
    def id(self) -> str:
        """What Ray's errors call it."""
        ...

    def serve(self, given: bytes) -> None:
        """From now on it is called over a connection, until that is closed."""
        ...

    def ended(self, patience_s: float = 0.0) -> str | None:
        """What Ray says of the end of one that served, if it has ended."""
        ...

    def kill(self) -> None:
        """Ask Ray to end it; a process that runs ends at once."""
        ...


def start_host(
    local: LocalRay | None,
    options: Mapping[str, object],
    counter: Path,
    kind: Callable[..., object],
    *arguments: object,
) -> Actor:
    """A host of what `kind` makes. `options` are Ray's, `counter` is the path of its file."""
    given = packed(kind, arguments)
    if local is not None:
        return local.start(options, str(counter), given)
    from dtensor.daft.ray.channel.ray_actor import RayActor

    return RayActor(options, str(counter), given)


class HostProcess:
    """A host, by its number in the launch, its counter file, and its process if that is on this
    machine."""

    def __init__(self, index: int, counter: ProgramCounter, actor: Actor) -> None:
        self.index = index
        self.counter = counter
        self.actor = actor
        self.started: float = time.monotonic()
        self.counts = True  # others rest on it: no spare, and none that was replaced
        self.machine = ""  # Ray's name of where it is, where that matters
        self._process: int | None = None
        self._ended = False  # before anybody held on to it
        self._answered = False

    @property
    def answered(self) -> bool:
        """A call: then it has started, though its counter may not be seen."""
        return self._answered

    @answered.setter
    def answered(self, answered: bool) -> None:
        if answered != self._answered:
            self._answered = self.counter.answered = answered

    def serve(self, credentials: Credentials) -> None:
        """From now on it is called over a connection, until that is closed."""
        self.actor.serve(packed(credentials))

    def ended(self, patience_s: float = 0.0) -> str | None:
        """What Ray says of the end of one that served, if it has ended."""
        return self.actor.ended(patience_s)

    @property
    def id(self) -> str:
        """What Ray's errors call it."""
        return self.actor.id

    # -- life -----------------------------------------------------------------------------------
    def watch(self) -> None:
        """Hold on to the process as soon as it has started."""
        if self._process is None and not self._ended and self.counter.pid:
            try:
                self._process = os.pidfd_open(self.counter.pid)
            except ProcessLookupError:
                self._ended = True

    @property
    def gone(self) -> bool:
        """Whether the process has ended, as far as can be seen from here."""
        self.watch()
        return self._ended or self._ends_within(0.0)

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another machine: it has answered, and its counter does not say who."""
        return self._answered and not self.counter.pid

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it: its state says so, where a heartbeat may be late."""
        return process_stat(self.counter.pid)[0] in "Tt"

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time of all its threads, and of processes that it started and that have
        ended, as compilers; 0 if it is not on this machine."""
        return sum(map(int, process_stat(self.counter.pid)[11:15])) / os.sysconf("SC_CLK_TCK")

    @property
    def runnable_s(self) -> float:
        """For how long the thread that runs instructions was on a core, or waited for one; 0 where
        the kernel does not count it."""
        path = f"/proc/{self.counter.pid}/task/{self.counter.read().thread}/schedstat"
        try:
            return sum(map(int, Path(path).read_text().split()[:2])) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            return 0.0

    def kill(self) -> None:
        """Ask Ray to end it; a process that runs ends at once."""
        self.watch()
        self.actor.kill()

    def end(self, grace_s: float = 1.0) -> None:
        """After `kill`: wait for the process to end; a stopped one needs a signal."""
        if self._process is not None and not self._ends_within(grace_s):
            with suppress(ProcessLookupError):  # it may end between the two lines
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self._ends_within(END_S)

    def close(self) -> None:
        """Let go of the process and its file."""
        if self._process is not None:
            os.close(self._process)
        self._process, self._ended = None, True
        self.counter.close()

    def _ends_within(self, seconds: float) -> bool:
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(int(seconds * 1000)))


class LaunchProcesses:
    """What a launch on Ray has on this machine: Ray, if it was started here, its folder, its
    processes, and the store where those find each other. `beside`: a Ray of its own is in a process
    beside this one, where that can be; `warm`: and may stay after the launch."""

    def __init__(
        self, address: str | None, deadline_s: float, *, warm: bool = True, beside: bool = True
    ) -> None:
        self.processes: list[HostProcess] = []
        self._closed = False
        self.secret: bytes = secrets.token_bytes(32)  # by which its processes know each other
        self._store: SignedStore | None = None
        self._channel: RunChannel | None = None
        self._snapshots: Path | None = None
        self._machines: dict[str, Machine] | None = None
        with ExitStack() as ending:
            self.folder: LaunchFolder = LaunchFolder.make()
            ending.callback(self.folder.close)
            self._folder = self.folder.path
            self.local: LocalRay | None = None
            self.address: str = LOOPBACK
            if beside and address is None and is_possible():
                self.local = use(warm=warm)
                ending.callback(release, self.local)
            else:
                from dtensor.daft.ray.bootstrap.start_ray import end_ray, start_ray

                if start_ray(address, deadline_s):
                    ending.callback(end_ray)
                self.address = own_address()  # as long as this lasts, whichever machines end
            self._ending = ending.pop_all()

    def spawn(
        self,
        kind: Callable[..., object],
        *arguments: object,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> HostProcess:
        """A host of what `kind` makes, in a process of its own; nothing is waited for."""
        if self._closed:
            raise ClusterClosed("This launch is closed.")
        index = len(self.processes)
        path = self._folder / f"host{index}"
        counter = ProgramCounter.make(path)
        actor = start_host(self.local, options, path, kind, *arguments)
        self.processes.append(HostProcess(index, counter, actor))
        return self.processes[-1]

    def check(self) -> None:
        """`RuntimeError` if Ray could not be started."""
        if self.local is not None:
            self.local.check()

    def resources(self) -> dict[str, float]:
        """All that Ray has, in its names."""
        return cluster_resources() if self.local is None else self.local.resources()

    def connect(self) -> RunChannel:
        """To processes of this launch, which are told to serve it."""
        address = self.address
        elsewhere = address if address != LOOPBACK else None
        self._channel = RunChannel(self._folder, 0, elsewhere)
        return self._channel

    def hang_up(self) -> None:
        """The processes that serve end that, once they have done what they were asked."""
        if self._channel is not None:
            self._channel.close()

    @property
    def store(self) -> SignedStore:
        if self._store is None:
            self._store = SignedStore.open(self.address, self.secret)
        return self._store

    @property
    def snapshots(self) -> Path:
        """The launch's own folder in memory, 0700, for what outlives a process."""
        if self._snapshots is None:
            self._snapshots = self._ending.enter_context(OwnFolder.in_memory()).path
        return self._snapshots

    def machines(self, kind: str = "CPU") -> list[Machine]:
        """Those that Ray spans, where they are several; `kind`: as of `start_ray.machines`."""
        if self.address == LOOPBACK:
            return []
        spanned = machines(kind)
        self._machines = {machine.node: machine for machine in spanned}
        return spanned if len(spanned) > 1 else []

    def named(self, machine: str) -> str:
        """What people call one, by Ray's name of it; "" if there are no others."""
        known = self._machines or {}
        if len(known) < 2 or machine not in known:
            return ""
        name = str(known[machine])
        same = [each for each in known.values() if str(each) == name]  # nodes of one machine
        return name if len(same) == 1 else f"{name}, node {machine[:8]}"

    @property
    def own_machine(self) -> str:
        """Ray's name of the controller's."""
        return own_node()

    def announce(self, key: str) -> None:
        """To those that wait at the store, if anybody does."""
        if self._store is not None:
            self._store.set(key, "")

    def close(self) -> None:
        """End all of it, waiting until it has ended. Twice is fine."""
        self._closed = True
        processes, self.processes = self.processes, []
        if self.local is not None and any(process.gone for process in processes):
            self.local.stays = False  # whatever has ended it may end others
        self.hang_up()
        self._store = None  # and its port: somebody may hold on to a future, and so to this
        with self._ending as ending:  # the last first; each is done, whichever raises
            for process in processes:
                ending.callback(process.close)
            for process in processes:
                ending.callback(process.end)
            for process in processes:
                process.kill()
