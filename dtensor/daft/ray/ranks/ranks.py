"""The ranks of a host: a `Worker`, its connections to the other hosts, and the program counter.

    ranks = Ranks(counter, (0,), "cpu")          # the controller calls these methods (`cluster.py`)
    ranks.connect(rendezvous, 0)
    ranks.load(7, lists, functions)
    ranks.run_program(HostRun(7, 0, {0: {"x": x}}).plain(), {})      # run 0 of program 7

Inputs of a run that are plain data, such as an optimizer's options, are sent only if they differ
from the last message's inputs (`SentInputs`). So are the controller's settings of torch's kernels
(`kernel_flags.py`). Invariant: the first failure of a run closes the connections and is
raised by every later call (`connect.py`).
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
from dtensor.daft.ray.bootstrap.progress import BegunRun, ProgramCounter
from dtensor.daft.ray.bootstrap.user_folder import elsewhere, shared
from dtensor.daft.ray.channel.host import Later
from dtensor.daft.ray.channel.messages import HostFailed, Packed
from dtensor.daft.ray.ranks.operators import Needed
from dtensor.daft.ray.ranks.replicas import Endpoint, ReplicaServer, ReplicatedFile, hold
from dtensor.daft.ray.transports.connect import HostConnections, Rendezvous
from dtensor.daft.run.pending_results import PendingResults
from dtensor.daft.run.worker import HostRun, Values, Worker
from dtensor.daft.undo.snapshot_file import SnapshotFile
from dtensor.daft.undo.snapshots import SnapshotStore
from dtensor.kernel_flags import set_kernel_flags

Plain: TypeAlias = dict[int, dict[str, bytes | int]]
"""Rank to name to marshalled data, or, if the data is unchanged, the run that it was sent for."""
SentData: TypeAlias = dict[tuple[int, int, str], tuple[int, bytes]]
"""(program, rank, name) to the last plain data sent: the run that it was sent for, and the data."""

FLAGS = "kernel flags"
_FLAGS_RANK = -1
"""Kernel flags are sent as plain data of a rank below 0: rank -1 for host 0, -2 for host 1."""


class SentInputs:
    """The controller's record of the plain data that hosts were last sent."""

    def __init__(self) -> None:
        self._sent: SentData = {}

    def split(self, handle: int, inputs: Values) -> tuple[Values, Plain]:
        """Split a run's inputs into plain data and other inputs, which are sent with each run."""
        other_inputs: dict[int, dict[str, object]] = {}
        plain: Plain = {}
        for rank, inputs_of_rank in inputs.items():
            others: dict[str, Any] = dict(inputs_of_rank)
            other_inputs[rank] = others
            for name, value in tuple(others.items()):
                if type(value) in _CONTAINERS and _has_plain_items(value):
                    data = marshal.dumps(value, 2)  # 1, 1.0 and True differ; NaN is equal to NaN
                    plain.setdefault(rank, {})[name] = self._data_or_run(handle, rank, name, data)
                    del others[name]
        return other_inputs, plain

    def flags(self, host: int, handle: int, data: bytes) -> Plain:
        """Return the marshalled kernel flags of a host for a run of a program."""
        rank = _FLAGS_RANK - host
        return {rank: {FLAGS: self._data_or_run(handle, rank, FLAGS, data)}}

    def _data_or_run(self, handle: int, rank: int, name: str, data: bytes) -> bytes | int:
        """Return the data, or, if it was sent last, the run that it was sent for."""
        run, last_sent = self._sent.get((handle, rank, name), (-1, b""))
        return run if last_sent == data else data

    def note(self, run: int, handle: int, plain: Plain) -> None:
        """Record plain data that was sent."""
        for rank, data_of_rank in plain.items():
            for name, data in data_of_rank.items():
                if isinstance(data, bytes):
                    self._sent[handle, rank, name] = run, data

    def known(self, handle: int, plain: Plain) -> SentData:
        """Return the data sent for earlier runs that this plain data refers to."""
        return {
            (handle, rank, name): self._sent[handle, rank, name]
            for rank, data_of_rank in plain.items()
            for name, data in data_of_rank.items()
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
    """Pack each host's part of a program: its instruction lists, and its functions. Hosts with the
    same functions share one packed copy. The inverse of `unpacked`."""
    shared: dict[tuple[str, ...], Packed] = {}
    for part in parts:
        names = tuple(name for name, _ in part.functions)
        if names not in shared:
            shared[names] = Packed.of((part.functions, part.meetings.keys))
        lists = replace(part, functions=(), meetings=replace(part.meetings, keys=()))
        yield Packed.of(lists), shared[names]


def unpacked(lists: Packed, functions: Packed) -> HostProgram:
    """Return a host's part of a program, given the two packed pieces from `packed`."""
    part, (functions_of_part, keys) = lists.value(), functions.value()
    return replace(part, functions=functions_of_part, meetings=replace(part.meetings, keys=keys))


def _snapshot_file(folder: Path, ranks: tuple[int, ...]) -> SnapshotFile:
    """Open the snapshots of a dead process of these ranks, or their copy; else create a file."""
    try:
        return SnapshotFile.open(folder, ranks)
    except FileNotFoundError:
        return SnapshotFile.create(folder, ranks)


class Ranks:
    """The ranks of a host. `memory`: the folder of their snapshots, which outlive this process;
    None if no snapshots are kept. `machine`: Ray's name of this machine if snapshots are copied to
    another machine, else "". `controllers`: whether the controller is on this machine."""

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
        self._replica_server: ReplicaServer | None = None
        self._replicated_file: ReplicatedFile | None = None
        self._ranks = ranks
        self._device = torch.device(device)
        self._connections: HostConnections | None = None
        self._worker: Worker | None = None
        self._plain: SentData = {}
        self._programs: dict[int, HostProgram] = {}
        self._flags = b""

    def connect(self, rendezvous: Rendezvous, index: int) -> None:
        """Connect to the other hosts, as host `index`; wait until all have come."""
        self._worker = self._new_worker(self._connect(rendezvous, index, self._ranks))

    def _connect(
        self, rendezvous: Rendezvous, index: int, ranks: tuple[int, ...]
    ) -> HostConnections:
        """Connect as host ``index`` of ``ranks``; the program counter then shows which rank a wait
        waits for."""
        record_wait = self._counter.record_wait
        connections = self._connections = HostConnections.join(
            rendezvous, index, ranks, self._device, record_wait
        )
        connections.transport.set_wait_report(record_wait)
        return connections

    def _new_worker(self, connections: HostConnections) -> Worker:
        """Return a worker over these connections, with the store of snapshots if there is one."""
        store: SnapshotStore | None = None
        if self._memory is not None and self._several:
            hold(self._memory, self._ranks)
            store = self._replicated_file = ReplicatedFile(
                _snapshot_file(self._memory, self._ranks)
            )
        elif self._memory is not None:
            store = _snapshot_file(self._memory, self._ranks)
        counter = self._counter.view
        worker = Worker(self._ranks, self._device, connections.transport, counter, snapshots=store)
        if worker.device_waits is not None:
            worker.device_waits.watch(self._counter.device_waits)
        return worker

    # -- copies on another machine --------------------------------------------------------------
    def keep_copies(self, secret: bytes, address: str) -> Endpoint:
        """Start to keep copies of other hosts' snapshots; return the endpoint to send them to."""
        assert self._memory is not None, "snapshots are kept"
        if self._replica_server is None:
            self._replica_server = ReplicaServer(self._memory, secret, reached_at(address))
        return self._replica_server.endpoint

    def copy_to(self, endpoint: Endpoint | None, secret: bytes) -> None:
        """Copy this host's snapshots to an endpoint from now on; wait until all are there."""
        assert self._replicated_file is not None, (
            "a launch over several machines replicates its snapshots"
        )
        self._replicated_file.copy_to(endpoint, secret, self._ranks)

    def remove_memory(self) -> None:
        """Remove the launch's snapshots on this machine, when the launch ends."""
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)

    # -- after a host was lost ------------------------------------------------------------------
    def leave(self, lost: Sequence[tuple[int, ...]] = ()) -> None:
        """Close the connections, so that hosts that wait for this one fail too, and unload all
        programs. Stop keeping copies for the `lost` hosts, given by their ranks."""
        if self._replica_server is not None:
            self._replica_server.end(lost)
        if self._connections is None or self._worker is None:
            return
        self._connections.transport.close()
        for handle, engine in tuple(self._worker.engines.items()):
            engine.abandon()  # gloo's messages would keep its connections alive
            self._worker.unload(handle)

    def rejoin(self, rendezvous: Rendezvous, index: int, ranks: tuple[int, ...]) -> int:
        """Connect again, as the host of these ranks, and load their programs; wait until all hosts
        have come. Return the last change that has ended here, or in the process that this one
        replaces."""
        self._plain.clear()
        self._ranks = ranks
        self._counter.start_over()
        connections = self._connect(rendezvous, index, ranks)
        worker = self._worker = self._worker or self._new_worker(connections)
        worker.transport = connections.transport
        for handle, program in self._programs.items():
            worker.load(handle, program)
        return worker.ended()

    def roll_back(self, to: int) -> int:
        """Roll back to the state after change `to`, or an earlier one; return its number."""
        return self._connected[1].roll_back(to)

    def ended(self) -> int:
        """Return the number of the last change that has ended here."""
        return self._connected[1].ended()

    def learn(self, handle: int, lists: Packed, functions: Packed) -> None:
        """Unpack a program of the ranks that this process hosts, or will host after `rejoin`."""
        self._programs[handle] = unpacked(lists, functions)

    def warm(self) -> None:
        """Import what torch's optimizers import at their first step; it takes seconds."""
        import_module("torch._dynamo")

    def remember(self, sent: SentData) -> None:
        """Record plain data that was sent to the process that this process replaces."""
        self._plain.update(sent)

    def open(self, tags: Mapping[Key, int]) -> None:
        self._connected[0].open(tags)

    def provide(self, needed: Needed) -> list[tuple[str, str]]:
        """Register the user's ops that a program needs. Return the names of ops that could not be
        registered, each with the reason."""
        return needed.provide()

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of the worker."""
        connections, worker = self._connected
        connections.check()
        return method(worker, *arguments)

    def load(self, handle: int, lists: Packed, functions: Packed) -> None:
        self.learn(handle, lists, functions)
        self.ask(Worker.load, handle, self._programs[handle])

    def unload(self, handle: int) -> None:
        """Unload a program, and forget the plain data that its runs have received."""
        self._programs.pop(handle, None)
        for key in [key for key in self._plain if key[0] == handle]:
            del self._plain[key]
        if self._worker is not None and handle in self._worker.engines:
            self._worker.unload(handle)

    def run(self, method: Callable[..., Any], run: int, handle: int, *arguments: object) -> Any:
        """Call a method of the worker that executes a run of a program, or a step of one."""
        connections, worker = self._connected
        connections.check()
        begun = self._counter.begin(handle, run)
        try:
            with connections.running(run):
                if self._replicated_file is not None:
                    self._replicated_file.check()
                result = method(worker, *arguments)
        except HostFailed as failed:
            if self._memory is not None:  # the hosts will connect again
                failed.__context__ = None  # gloo's connections break once no message is referenced
                self.leave()
            raise
        if isinstance(result, PendingResults):
            return Later(partial(self._end_later, result, begun))
        self._counter.end(begun if method is Worker.run else None)
        return result

    def _end_later(self, pending: PendingResults, begun: BegunRun) -> object:
        """Wait for the end of a run on the GPU, and return its results."""
        with self._connected[0].running(begun.run):
            results = pending.wait()
        self._counter.end(begun)
        return results

    def run_program(self, sent: tuple[Any, ...], plain: Plain) -> Any:
        """Execute a run (`Worker.run`), whose inputs include plain data sent now or earlier."""
        run = self._host_run(sent, plain)
        return self.run(Worker.run, run.number, run.program, run)

    def undo_program(self, failure: Failure, sent: tuple[Any, ...], plain: Plain) -> Any:
        """Report a run as undone, instead of executing it: it had failed after the vote."""
        run = self._host_run(sent, plain)
        return self.run(partial(Worker.undo, failure=failure), run.number, run.program, run)

    def _host_run(self, sent: tuple[Any, ...], plain: Plain) -> HostRun:
        """Return the run of a message, after adding the plain data to its inputs."""
        host_run = HostRun.of(sent)
        run, handle = host_run.number, host_run.program
        inputs: dict[int, Any] = dict(host_run.inputs)
        for rank, data_of_rank in plain.items():
            for name, data in data_of_rank.items():
                if isinstance(data, bytes):
                    self._plain[handle, rank, name] = run, data
                sent_for, value = self._plain[handle, rank, name]
                if sent_for != (run if isinstance(data, bytes) else data):
                    raise RuntimeError(
                        f"input {name!r} was last sent for run {sent_for}, not {data}"
                    )
                if rank <= _FLAGS_RANK:
                    self.set_kernel_flags(value)
                else:
                    inputs[rank][name] = marshal.loads(value)  # a new object, which the run owns
        return host_run

    def set_kernel_flags(self, flags: bytes) -> None:
        """Apply the controller's settings of torch's kernels to this process."""
        if flags != self._flags:
            set_kernel_flags(marshal.loads(flags))
            self._flags = flags

    @property
    def _connected(self) -> tuple[HostConnections, Worker]:
        assert self._connections is not None and self._worker is not None, "connect comes first"
        return self._connections, self._worker
