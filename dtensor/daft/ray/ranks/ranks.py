"""Ranks in a host: a `Worker`, its connections to the other hosts, and the program counter.

Inputs of a run that are plain data, such as an optimizer's options, are sent only when they have
changed (`SentInputs`), compared with the last message, whether or not its run succeeded. The
controller's settings of torch's kernels (`kernel_flags.py`) are sent likewise, before the run.

Example (the controller does this, `cluster.py`, through `Host.call`):

    ranks = Ranks(counter, (0,), "cpu")
    ranks.connect(join, 0)
    ranks.load(7, lists, functions)
    ranks.run_program(HostRun(7, 0, {0: {"x": x}}).plain(), {})      # run 0 of program 7

Invariants: the first failure of a run closes the connections and is repeated to every later call
(`connect.py`). The memory of a tensor that arrives has no other owner, and the worker copies it.
"""

from __future__ import annotations

import marshal
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dtensor.daft.errors import Failure
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.bootstrap.machines import reached_at
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.bootstrap.user_folder import elsewhere, shared
from dtensor.daft.ray.channel.messages import HostFailed, Packed
from dtensor.daft.ray.ranks.operators import Needed
from dtensor.daft.ray.ranks.replicas import Endpoint, ReplicaServer, ReplicatedFile, hold
from dtensor.daft.ray.transports.connect import HostConnections, Rendezvous
from dtensor.daft.run.worker import HostRun, Values, Worker
from dtensor.daft.undo.snapshot_file import SnapshotFile
from dtensor.daft.undo.snapshots import SnapshotStore
from dtensor.kernel_flags import obey

Plain: TypeAlias = dict[int, dict[str, bytes | int]]
"""By rank and name, marshalled data, or the number of the run with the same data."""


FLAGS = "kernel flags"
_FLAGS_AT = -1
"""They are sent with the plain data, as those of a rank: -1 of host 0, -2 of host 1."""


class SentInputs:
    """The controller's record of the plain data that hosts were last sent."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, str], tuple[int, bytes]] = {}

    def split(self, handle: int, inputs: Values) -> tuple[Values, Plain]:
        """The inputs of a run that are sent unchanged, and the plain data."""
        rest: dict[int, dict[str, object]] = {}
        plain: Plain = {}
        for rank, named in inputs.items():
            sent: dict[str, Any] = dict(named)
            rest[rank] = sent
            for name, value in tuple(sent.items()):
                if type(value) in _CONTAINERS and _has_plain_items(value):
                    data = marshal.dumps(value, 2)  # 1, 1.0 and True differ; NaN is equal to NaN
                    plain.setdefault(rank, {})[name] = self._new(handle, rank, name, data)
                    del sent[name]
        return rest, plain

    def flags(self, host: int, handle: int, data: bytes) -> Plain:
        """The settings of a host's kernels for a run of a program, if the host does not know
        them."""
        at = _FLAGS_AT - host
        return {at: {FLAGS: self._new(handle, at, FLAGS, data)}}

    def _new(self, handle: int, rank: int, name: str, data: bytes) -> bytes | int:
        run, known = self._sent.get((handle, rank, name), (-1, b""))
        return run if known == data else data

    def note(self, run: int, handle: int, plain: Plain) -> None:
        """Note plain data that was sent."""
        for rank, named in plain.items():
            for name, data in named.items():
                if isinstance(data, bytes):
                    self._sent[handle, rank, name] = run, data

    def known(self, handle: int, plain: Plain) -> dict[tuple[int, int, str], tuple[int, bytes]]:
        """The earlier data that a run's unchanged plain data refers to: by program, rank and name,
        the run for which it was sent, and the data."""
        return {
            (handle, rank, name): self._sent[handle, rank, name]
            for rank, named in plain.items()
            for name, data in named.items()
            if not isinstance(data, bytes)
        }

    def forget(self, handle: int) -> None:
        for key in [key for key in self._sent if key[0] == handle]:
            del self._sent[key]


_CONTAINERS = frozenset({tuple, list, dict})
_ATOMS = frozenset({bool, int, float, str, bytes, type(None)})


def _has_plain_items(container: Any) -> bool:
    """Return whether a container holds only the types of `_ATOMS` and `_CONTAINERS`, at any depth.
    Subclasses do not count: marshal would write numpy's numbers as bytes."""
    items: Any = (*container, *container.values()) if type(container) is dict else container
    for item in items:  # a plain loop, since it runs with each step: one call for each container
        kind = type(item)  # pyright: ignore[reportUnknownVariableType]
        if kind not in _ATOMS and (kind not in _CONTAINERS or not _has_plain_items(item)):
            return False
    return True


def packed(parts: Iterable[HostProgram]) -> Iterator[tuple[Packed, Packed]]:
    """The packed parts of a program for hosts: each its own lists, and its functions, which are
    packed once for all hosts with the same ones. The inverse of `unpacked`."""
    shared: dict[tuple[str, ...], Packed] = {}
    for part in parts:
        names = tuple(name for name, _ in part.functions)
        if names not in shared:
            shared[names] = Packed.of((part.functions, part.meetings.keys))
        lists = replace(part, functions=(), meetings=replace(part.meetings, keys=()))
        yield Packed.of(lists), shared[names]


def unpacked(lists: Packed, functions: Packed) -> HostProgram:
    part, (called, keys) = lists.value(), functions.value()
    return replace(part, functions=called, meetings=replace(part.meetings, keys=keys))


def _file(folder: Path, ranks: tuple[int, ...]) -> SnapshotFile:
    """The file that a dead process of these ranks has left there, or a copy of it, or a new one."""
    try:
        return SnapshotFile.open(folder, ranks)
    except FileNotFoundError:
        return SnapshotFile.create(folder, ranks)


class Ranks:
    """`memory`: the folder of copies of the ranks' values, which outlive this process. `machine`:
    Ray's name of the machine, if a launch spans several and each keeps copies of another's; else
    "". `controllers`: whether the controller is on this machine."""

    def __init__(
        self,
        counter: ProgramCounter,
        ranks: tuple[int, ...],
        device: str,
        memory: Path | None = None,
        machine: str = "",
        controllers: bool = True,
    ) -> None:
        self._counter = counter
        if memory is not None and not controllers:
            memory = elsewhere(memory, machine)
            shared(memory)
        self._memory = memory
        self._several = bool(machine)
        self._keeper: ReplicaServer | None = None
        self._copied: ReplicatedFile | None = None
        self._ranks = ranks
        self._device = torch.device(device)
        self._joined: HostConnections | None = None
        self._worker: Worker | None = None
        self._plain: dict[tuple[int, int, str], tuple[int, bytes]] = {}
        self._programs: dict[int, HostProgram] = {}
        self._flags = b""

    def connect(self, join: Rendezvous, index: int) -> None:
        self._worker = self._made(self._connect(join, index, self._ranks))

    def _connect(self, join: Rendezvous, index: int, ranks: tuple[int, ...]) -> HostConnections:
        told = self._counter.awaits
        joined = self._joined = HostConnections.by(join, index, ranks, self._device, told)
        joined.transport.tell_whom_it_awaits(told)
        return joined

    def _made(self, joined: HostConnections) -> Worker:
        store: SnapshotStore | None = None
        if self._memory is not None and self._several:
            hold(self._memory, self._ranks)
            store = self._copied = ReplicatedFile(_file(self._memory, self._ranks))
        elif self._memory is not None:
            store = _file(self._memory, self._ranks)
        counter = self._counter.view
        made = Worker(self._ranks, self._device, joined.transport, counter, snapshots=store)
        if made.device_waits is not None:
            made.device_waits.watch(self._counter.device_waits)
        return made

    # -- copies on another machine --------------------------------------------------------------
    def keep_copies(self, secret: bytes, address: str) -> Endpoint:
        """Keep copies of other hosts' snapshots; returns the endpoint for them."""
        assert self._memory is not None, "snapshots are kept"
        if self._keeper is None:
            self._keeper = ReplicaServer(self._memory, secret, reached_at(address))
        return self._keeper.endpoint

    def copy_to(self, endpoint: Endpoint | None, secret: bytes) -> None:
        """Copy this process's snapshots there from now on; returns when all are there."""
        assert self._copied is not None, "a launch over several machines has such"
        self._copied.copy_to(endpoint, secret, self._ranks)

    def remove_memory(self) -> None:
        """The launch ends: remove its memory on this machine."""
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)

    # -- after a host was lost ------------------------------------------------------------------
    def leave(self, lost: Sequence[tuple[int, ...]] = ()) -> None:
        """Break the connections, so that others that wait for this host fail too; programs keep
        none of them. No more copies come from `lost` hosts, given by their ranks."""
        if self._keeper is not None:
            self._keeper.end(lost)
        if self._joined is None or self._worker is None:
            return
        self._joined.transport.close()
        for handle, engine in tuple(self._worker.engines.items()):
            engine.abandon()  # gloo's messages hold its connections
            self._worker.unload(handle)

    def rejoin(self, join: Rendezvous, index: int, ranks: tuple[int, ...]) -> int:
        """Connect anew, as the host of these ranks, and make their programs ready; blocks until all
        hosts have come. Returns the last change that has ended here, or in the process that this
        one replaces."""
        self._plain.clear()
        self._ranks = ranks
        self._counter.start_over()
        joined = self._connect(join, index, ranks)
        worker = self._worker = self._worker or self._made(joined)
        worker.transport = joined.transport
        for handle, program in self._programs.items():
            worker.load(handle, program)
        return worker.ended()

    def roll_back(self, to: int) -> int:
        """Roll back to the state right after change `to`, or an earlier one; returns its number."""
        return self._connected[1].roll_back(to)

    def ended(self) -> int:
        """The last change that has ended here."""
        return self._connected[1].ended()

    def learn(self, handle: int, lists: Packed, functions: Packed) -> None:
        """Learn a program of ranks that this process hosts, or will host."""
        self._programs[handle] = unpacked(lists, functions)

    def warm(self) -> None:
        """Import the modules that torch's optimizers import at their first step: it takes
        seconds."""
        import_module("torch._dynamo")

    def remember(self, sent: Mapping[tuple[int, int, str], tuple[int, bytes]]) -> None:
        """Remember plain data that other hosts were sent before."""
        self._plain.update(sent)

    def open(self, tags: Mapping[Key, int]) -> None:
        self._connected[0].open(tags)

    def provide(self, needed: Needed) -> list[tuple[str, str]]:
        """Prepare for a program that names ops other than torch's; returns those that are not
        available."""
        return needed.provide()

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of the worker."""
        joined, worker = self._connected
        joined.check()
        return method(worker, *arguments)

    def load(self, handle: int, lists: Packed, functions: Packed) -> None:
        self.learn(handle, lists, functions)
        self.ask(Worker.load, handle, self._programs[handle])

    def unload(self, handle: int) -> None:
        self._programs.pop(handle, None)
        for key in [key for key in self._plain if key[0] == handle]:
            del self._plain[key]
        if self._worker is not None and handle in self._worker.engines:
            self._worker.unload(handle)

    def run(self, method: Callable[..., Any], run: int, handle: int, *arguments: object) -> Any:
        """Call a method that makes this run of a program, or a step of it."""
        joined, worker = self._connected
        joined.check()
        self._counter.begin(handle, run)
        try:
            with joined.running(run):
                if self._copied is not None:
                    self._copied.check()
                result = method(worker, *arguments)
        except HostFailed as failed:
            if self._memory is not None:  # it will meet others again; gloo's connections break
                failed.__context__ = None  # once nothing refers to their messages
                self.leave()
            raise
        self._counter.end(measured=method is Worker.run)
        return result

    def run_program(self, sent: tuple[Any, ...], plain: Plain) -> Any:
        """`Worker.run`, with the plain data that was sent now or before as inputs."""
        run = self._unpacked(sent, plain)
        return self.run(Worker.run, run.number, run.program, run)

    def undo_program(self, failure: Failure, sent: tuple[Any, ...], plain: Plain) -> Any:
        """Called instead of `run_program`, if the run has failed where it cannot continue."""
        run = self._unpacked(sent, plain)
        return self.run(partial(Worker.undo, failure=failure), run.number, run.program, run)

    def _unpacked(self, sent: tuple[Any, ...], plain: Plain) -> HostRun:
        """The run of a message, with its plain data as inputs."""
        host_run = HostRun.of(sent)
        run, handle = host_run.number, host_run.program
        inputs: dict[int, Any] = dict(host_run.inputs)
        for rank, named in plain.items():
            for name, data in named.items():
                if isinstance(data, bytes):
                    self._plain[handle, rank, name] = run, data
                since, known = self._plain[handle, rank, name]
                if since != (run if isinstance(data, bytes) else data):
                    raise RuntimeError(f"input {name!r} was last sent for run {since}, not {data}")
                if rank <= _FLAGS_AT:
                    self.obey(known)
                else:
                    inputs[rank][name] = marshal.loads(known)  # a new object: it has no other owner
        return host_run

    def obey(self, flags: bytes) -> None:
        """Set the controller's settings of torch's kernels here."""
        if flags != self._flags:
            obey(marshal.loads(flags))
            self._flags = flags

    @property
    def _connected(self) -> tuple[HostConnections, Worker]:
        assert self._joined is not None and self._worker is not None, "connect comes first"
        return self._joined, self._worker
