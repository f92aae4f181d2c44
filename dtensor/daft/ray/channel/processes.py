"""The processes of a launch: each is a Ray actor that hosts ranks or spawned objects.

    launch = LaunchProcesses(address=None, deadline_s=60.0)  # joins or starts a Ray cluster
    process = launch.spawn(Ranks, (0,), "cpu")       # does not wait for the process to start
    process.serve(channel.credentials(0))            # the process now executes the channel's calls
    launch.close()                                   # ends the processes, and Ray if started here

A process on this machine is ended by a signal if Ray cannot end it, because it is stopped.
Invariant: `close` ends everything that was started here, whatever raises meanwhile, and nothing
else.
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
"""How long a process may take to end after SIGKILL, since it frees its memory first."""
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


class Actor(Protocol):
    """A host's actor: a `RayActor` if this process has joined Ray, else a `LocalHost`."""

    @property
    def id(self) -> str:
        """The actor's id in Ray's errors."""
        ...

    def serve(self, packed_arguments: bytes) -> None:
        """Let the host execute calls that come over a connection. Takes packed credentials."""
        ...

    def ended(self, patience_s: float = 0.0) -> str | None:
        """Wait up to `patience_s`; return Ray's reason if the actor has ended, else None."""
        ...

    def kill(self) -> None:
        """Ask Ray to end the actor. A process that is not stopped ends at once."""
        ...


def start_host(
    local: LocalRay | None,
    options: Mapping[str, object],
    counter: Path,
    kind: Callable[..., object],
    *arguments: object,
) -> Actor:
    """Start a host of the object that `kind` returns. `options`: Ray's; `counter`: the path of the
    host's program counter."""
    packed_arguments = packed(kind, arguments)
    if local is not None:
        return local.start(options, str(counter), packed_arguments)
    from dtensor.daft.ray.channel.ray_actor import RayActor

    return RayActor(options, str(counter), packed_arguments)


class HostProcess:
    """A process with a host. `index` is its number in the launch; `counter` is the host's program
    counter, which the controller can read if the process is on this machine."""

    def __init__(self, index: int, counter: ProgramCounter, actor: Actor) -> None:
        self.index = index
        self.counter = counter
        self.actor = actor
        self.started: float = time.monotonic()
        self.counts = True  # False for a spare, and for a process that was replaced
        self.machine = ""  # Ray's name of its machine, if the launch spans several machines
        self._process: int | None = None  # a pidfd, once the process has started on this machine
        self._ended = False  # whether it ended before the pidfd was opened
        self._answered = False

    @property
    def answered(self) -> bool:
        """Whether it has answered a call; then it has started, wherever it is."""
        return self._answered

    @answered.setter
    def answered(self, answered: bool) -> None:
        if answered != self._answered:
            self._answered = self.counter.answered = answered

    def serve(self, credentials: Credentials) -> None:
        """Let the host execute the calls that come over a connection."""
        self.actor.serve(packed(credentials))

    def ended(self, patience_s: float = 0.0) -> str | None:
        """Wait up to `patience_s`; return Ray's reason if the actor has ended, else None."""
        return self.actor.ended(patience_s)

    @property
    def id(self) -> str:
        """The actor's id in Ray's errors."""
        return self.actor.id

    # -- life -----------------------------------------------------------------------------------
    def watch(self) -> None:
        """Open a pidfd of the process if it has started on this machine."""
        if self._process is None and not self._ended and self.counter.pid:
            try:
                self._process = os.pidfd_open(self.counter.pid)
            except ProcessLookupError:
                self._ended = True

    @property
    def gone(self) -> bool:
        """Whether the process has ended. False if it is on another machine."""
        self.watch()
        return self._ended or self._ends_within(0.0)

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another machine: it has answered, but its counter shows no pid here."""
        return self._answered and not self.counter.pid

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process, by its state in /proc."""
        return process_stat(self.counter.pid)[0] in "Tt"

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its threads and of its ended child processes, such as compilers; 0 if it
        is not on this machine."""
        return sum(map(int, process_stat(self.counter.pid)[11:15])) / os.sysconf("SC_CLK_TCK")

    @property
    def runnable_s(self) -> float:
        """Seconds for which the thread that runs instructions was on a core or waited for one; 0 if
        the kernel does not count them."""
        path = f"/proc/{self.counter.pid}/task/{self.counter.read().thread}/schedstat"
        try:
            return sum(map(int, Path(path).read_text().split()[:2])) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            return 0.0

    def kill(self) -> None:
        """Ask Ray to end the actor. A process that is not stopped ends at once."""
        self.watch()
        self.actor.kill()

    def end(self, grace_s: float = 1.0) -> None:
        """After `kill`, wait for the process to end; after `grace_s` send it SIGKILL."""
        if self._process is not None and not self._ends_within(grace_s):
            with suppress(ProcessLookupError):  # it may have ended just now
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self._ends_within(END_S)

    def close(self) -> None:
        """Close the pidfd and remove the counter's file."""
        if self._process is not None:
            os.close(self._process)
        self._process, self._ended = None, True
        self.counter.close()

    def _ends_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``, and return whether the process has ended; False if it is
        unknown."""
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(int(seconds * 1000)))


class LaunchProcesses:
    """The processes of a launch on Ray, with its folder, its store for rendezvous, and Ray itself
    if it was started here. `beside`: start Ray in a separate process if possible (`local_ray.py`);
    `warm`: the separate process may stay after the launch."""

    def __init__(
        self, address: str | None, deadline_s: float, *, warm: bool = True, beside: bool = True
    ) -> None:
        """Create the launch's folder and make Ray usable."""
        self.processes: list[HostProcess] = []
        self._closed = False
        self.secret: bytes = secrets.token_bytes(32)  # known to the processes of this launch alone
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
                self.address = own_address()  # valid whichever other machines end
            self._exit_stack = ending.pop_all()

    def spawn(
        self,
        kind: Callable[..., object],
        *arguments: object,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> HostProcess:
        """Start a process with a host of the object that `kind` returns; do not wait for it."""
        if self._closed:
            raise ClusterClosed("This launch is closed.")
        index = len(self.processes)
        path = self._folder / f"host{index}"
        counter = ProgramCounter.make(path)
        actor = start_host(self.local, options, path, kind, *arguments)
        self.processes.append(HostProcess(index, counter, actor))
        return self.processes[-1]

    def check(self) -> None:
        """Raise `RuntimeError` if Ray could not be started."""
        if self.local is not None:
            self.local.check()

    def resources(self) -> dict[str, float]:
        """Return the total of each resource in Ray, by Ray's name."""
        return cluster_resources() if self.local is None else self.local.resources()

    def connect(self) -> RunChannel:
        """Return a new channel to the processes of this launch."""
        address = self.address
        elsewhere = address if address != LOOPBACK else None
        self._channel = RunChannel(self._folder, 0, elsewhere)
        return self._channel

    def hang_up(self) -> None:
        """Close the channel; the processes stop serving once they have executed their calls."""
        if self._channel is not None:
            self._channel.close()

    @property
    def store(self) -> SignedStore:
        if self._store is None:
            self._store = SignedStore.open(self.address, self.secret)
        return self._store

    @property
    def snapshots(self) -> Path:
        """The launch's folder in memory (mode 0700), for values that outlive a process."""
        if self._snapshots is None:
            self._snapshots = self._exit_stack.enter_context(OwnFolder.in_memory()).path
        return self._snapshots

    def machines(self, kind: str = "CPU") -> list[Machine]:
        """Return Ray's machines, [] if there is only one. `kind`: see `bootstrap.machines`."""
        if self.address == LOOPBACK:
            return []
        spanned = machines(kind)
        self._machines = {machine.node: machine for machine in spanned}
        return spanned if len(spanned) > 1 else []

    def named(self, machine: str) -> str:
        """Return the user's name of a machine, given Ray's name; "" if there is only one."""
        by_node = self._machines or {}
        if len(by_node) < 2 or machine not in by_node:
            return ""
        name = str(by_node[machine])
        nodes = [each for each in by_node.values() if str(each) == name]  # of the same machine
        return name if len(nodes) == 1 else f"{name}, node {machine[:8]}"

    @property
    def own_machine(self) -> str:
        """Ray's name of the controller's machine."""
        return own_node()

    def announce(self, key: str) -> None:
        """Set a key in the store, for the processes that wait for it there."""
        if self._store is not None:
            self._store.set(key, "")

    def close(self) -> None:
        """End everything that was started here, and wait until it has ended. Twice is fine."""
        self._closed = True
        processes, self.processes = self.processes, []
        if self.local is not None and any(process.gone for process in processes):
            self.local.stays = False  # Ray may be faulty, since a process has ended by itself
        self.hang_up()
        self._store = None  # frees its port even if a future keeps this object alive
        with self._exit_stack as ending:  # in reverse order; each is called even if another raises
            for process in processes:
                ending.callback(process.close)
            for process in processes:
                ending.callback(process.end)
            for process in processes:
                process.kill()
