"""A `Cluster`: ranks that hold values and run programs.

    with launch_cluster(2) as cluster:                       # or backend="ray"
        cluster.put([{"w": w0}, {"w": w1}])                  # one item per rank
        handle = cluster.load(program)
        y0 = cluster.run(handle, [{"x": x0}, {"x": x1}]).get()[0]["y"]

Calls take effect in the order in which they are made, on all hosts. If a `Call` of a run raises,
the run is undone, and its future raises TaskError. After a failure that cannot be undone, all
values are lost: `failure` is set, and every later call raises it. Results have the same bits on all
backends. `HostedCluster` is the base of `inprocess.py` and `ray/cluster.py`, which call hosts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch

from dtensor.daft.errors import (
    ClusterClosed,
    CommunicationError,
    DaftError,
    Failure,
    ProgramError,
    TaskError,
)
from dtensor.daft.ir.instructions import Commit
from dtensor.daft.ir.program import Program
from dtensor.daft.run.worker import NOTHING_DROPPED, NOTHING_KEPT, Counted, HostRun, Names, Worker
from dtensor.daft.undo.failed_run import Fault, UndoneRun, first_fault
from dtensor.daft.undo.rollback import UNNUMBERED, TableChange
from dtensor.daft.verification.pairing import Hosts, merge_sites
from dtensor.daft.verification.verifier import Report, check_state, verify
from dtensor.signals import Lock

if TYPE_CHECKING:
    from dtensor.daft.cluster.call_log import Recovered
    from dtensor.daft.cluster.counted_runs import CountedRuns
    from dtensor.daft.cluster.recovery_line import ChangeLog
    from dtensor.daft.status import Status

Mode: TypeAlias = Literal["compiled", "interpreted", "timed"]
"""compiled: one message per host. interpreted: one message per instruction, for debugging. timed:
as compiled, with the timings of `run/timestamps.py` in the outputs."""
Backend: TypeAlias = Literal["inprocess", "ray"]
Method: TypeAlias = Callable[..., Any]
"""A method of `Worker`."""
Part: TypeAlias = tuple[Any, ...]
"""The arguments of a method for one host."""
Places: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]
"""(host, its ranks that take part), for each host that takes part."""


class Future(ABC):
    """The result of a call, which may still be running."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> list[Any]:
        """Wait for the call and return its result, one item per rank. May be called repeatedly.

        Raises TimeoutError after `timeout` seconds; the future can still be read afterwards. Raises
        the root cause, a DaftError, if the call failed.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether `get` would return or raise without waiting."""

    def check(self) -> None:
        """Wait for the call. Raises the failure that `get` would raise."""
        self.get()


@dataclass(frozen=True, slots=True)
class Finished(Future):
    """A future whose call has ended."""

    results: list[Any]
    error: Exception | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        if self.error is not None:
            raise self.error
        return list(self.results)

    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Handle:
    """A program that a cluster has loaded. `places`: its hosts, with the ranks that take part.
    `hosts_know_outcome`: whether each of these hosts knows if a run of the program was undone."""

    id: int
    program: Program = field(repr=False)
    report: Report = field(repr=False)
    places: Places = field(repr=False)
    hosts_know_outcome: bool = field(repr=False)


class RunRequest(NamedTuple):
    """One run of a program. The fields are the arguments of `Cluster.run`."""

    handle: Handle
    inputs: Sequence[Mapping[str, object]]
    mode: Mode = "compiled"
    keep: Mapping[str, str] = NOTHING_KEPT
    counted: Counted | None = None
    returned: Collection[str] = ()
    drop: Names = NOTHING_DROPPED


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A timed run in `Cluster.recording`. `begin`: the time of the call (monotonic clock)."""

    handle: Handle
    future: Future
    begin: float


class Cluster(ABC):
    """Ranks that hold values and run programs.

    `calls`: the number of calls from the controller to actors (a compiled run makes one per actor).
    `runs`: the number of runs started so far, which is the number of the next run. `failure`: the
    error by which all values were lost, or None. `immediate`: a run has ended when `run` returns.
    `known_as`: names for users of ranks that belong to a SubCluster. `recording`: if it is a list,
    compiled runs are timed and appended to it. `copies`: how many snapshot copies of a written
    value are kept.
    """

    size: int
    device: torch.device
    calls: int
    runs: int
    failure: DaftError | None
    immediate: bool
    known_as: dict[int, str]
    recording: list[RecordedRun] | None = None
    copies: int = 0

    @property
    def recoveries(self) -> Sequence[Recovered]:
        """The losses of ranks that have been recovered so far."""
        return ()

    @property
    def machines(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks on each machine, by the machine's name; {} if all are on one machine."""
        return {}

    @property
    def recovered(self) -> int:
        """How often lost ranks have been replaced so far. Values that were written only by
        replayable writes (caches) are lost then; reading one raises until it is put again."""
        return 0

    @abstractmethod
    def put(
        self,
        values: Sequence[Mapping[str, object]],
        *,
        drop: Names = NOTHING_DROPPED,
        wait: bool = False,
    ) -> None:
        """Store values in each rank's table. Programs read them as state.

        `drop`: names of values that are not needed any more, by rank. They are dropped with the
        next message to the rank. `wait`: return when the ranks have the values; they are then sent
        without a copy, otherwise a value that does not fit into the send buffer is copied first.
        """

    @abstractmethod
    def get(self, names: Sequence[Sequence[str] | None]) -> Future:
        """Return a future of a tuple of the named values, for each rank.

        They are read after all earlier calls to the rank. If there are no names at all, the future
        waits for all ranks except those whose entry is None.
        """

    @abstractmethod
    def delete(self, names: Sequence[Sequence[str]]) -> None:
        """Drop the named values from each rank's table. Raises LookupError if one is missing."""

    @abstractmethod
    def load(self, program: Program) -> Handle:
        """Verify a program and send it to its hosts. Raises ProgramError if it is not sound."""

    @abstractmethod
    def unload(self, handle: Handle) -> None:
        """Remove a program from its hosts. Its state stays in the tables."""

    def run(
        self,
        handle: Handle,
        inputs: Sequence[Mapping[str, object]],
        *,
        mode: Mode = "compiled",
        keep: Mapping[str, str] = NOTHING_KEPT,
        counted: Counted | None = None,
        returned: Collection[str] = (),
        drop: Names = NOTHING_DROPPED,
    ) -> Future:
        """Run a program once. Return a future of a dict of outputs, for each rank.

        Args:
            inputs: for each rank, exactly the inputs that its part declares. `Stored(name)` is the
                value in the rank's table, without a copy.
            keep: output -> name under which it stays in the rank's table and is not returned.
            returned: outputs of `keep` that are returned as well.
            counted: gives the run a number among others, see `Counted`.
            drop: as in `put`.
        """
        return self.submit(RunRequest(handle, inputs, mode, keep, counted, returned, drop))

    @abstractmethod
    def submit(self, request: RunRequest) -> Future:
        """Run a program once, like `run`."""

    @abstractmethod
    def call_on(self, rank: int, function: Method, *arguments: object) -> Any:
        """Return ``function(worker, *arguments)``, called in the process of a rank."""

    @abstractmethod
    def check_undone(self) -> None:
        """Wait for all runs. Raises the failure of the first undone run whose failure has not been
        raised yet."""

    @abstractmethod
    def status(self, seconds: float) -> Status:
        """Return what the ranks are doing, from two samples ``seconds`` apart. Thread-safe. Raises
        if the cluster has failed."""

    @abstractmethod
    def grow(self, size: int) -> None:
        """Add empty ranks up to ``size``, after waiting for all calls in flight. Present ranks keep
        their values and programs. Raises ValueError if there are more ranks already."""

    @abstractmethod
    def interrupted(self) -> None:
        """Fail the cluster, because a change of its values was interrupted."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything that this cluster started. May be called again."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_size(size: int, items: Sequence[object], what: str) -> None:
    if len(items) != size:
        raise ValueError(f"{what} takes one item per rank: {size} ranks, got {len(items)} items.")


def check_inputs(handle: Handle, inputs: Sequence[Mapping[str, object]], size: int) -> None:
    """Raise ValueError unless each rank gets exactly the inputs that it declares. Ranks that joined
    after the program was loaded get none."""
    program = handle.program
    check_size(size, inputs, f"A run of {program.name!r}")
    declared_inputs = [rank_program.inputs for rank_program in program.ranks] + [()] * (
        size - program.size
    )
    for rank, (names, declared) in enumerate(zip(inputs, declared_inputs, strict=True)):
        if set(names) != set(declared):
            raise ValueError(
                f"Rank {rank} of program {program.name!r} takes the inputs "
                f"{sorted(declared)}, got {sorted(names)}."
            )


def hosts_of(size: int, ranks_per_actor: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host: hosts_of(4, 2) == ((0, 1), (2, 3))."""
    if size < 1 or ranks_per_actor < 1:
        raise ValueError(
            f"A cluster has at least 1 rank and 1 rank per actor, got size={size}, "
            f"ranks_per_actor={ranks_per_actor}."
        )
    return tuple(
        tuple(range(first, min(first + ranks_per_actor, size)))
        for first in range(0, size, ranks_per_actor)
    )


# -- ranks in hosts --------------------------------------------------------------------------------


class HostedCluster(Cluster):
    """A cluster whose ranks are in hosts, such as ((0, 1), (2, 3)), each with a `Worker`.

    Subclasses say how a call reaches a host. `changes`: the log of changes, if hosts keep
    snapshots.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        hosts: Hosts,
        seed: int,
        snapshot_every: int | None = None,
    ) -> None:
        self.size = size
        self.device = device
        self.hosts: Hosts = hosts
        self.calls = 0
        self.runs = 0
        self.failure: DaftError | None = None
        self.immediate = False
        self.known_as = {}
        self._seed = seed
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0
        self._closed = False
        self._raised_runs: set[int] = set()  # undone runs whose failure was raised
        self._pending_drops: dict[int, list[str]] = {}  # by rank, names to drop with a message
        # by id; an unloaded handle stays while a future of one of its runs may need it
        self._live_handles: WeakValueDictionary[int, Handle] = WeakValueDictionary()
        self._counted_runs: CountedRuns | None = None  # None if there is one host
        self._lock = Lock()
        self.changes: ChangeLog | None = None
        self.number_changes(snapshot_every)

    def number_changes(self, every: int | None) -> None:
        """Start numbering changes for snapshots, if ``every`` is not None. Called once the hosts
        are known."""
        if every is not None:
            from dtensor.daft.cluster.recovery_line import ChangeLog

            self.copies = 1 if self.immediate else 2  # a file keeps the last copy while it writes
            self.changes = ChangeLog(len(self.hosts), every, alone=self.immediate)

    # -- methods of a backend --------------------------------------------------------------------
    @abstractmethod
    def _call(
        self,
        method: Method,
        places: Places,
        parts: Sequence[Part],
        *,
        run: int | None = None,
        read: bool = True,
    ) -> list[Any]:
        """Call a method of each host's `Worker` with its part. Return references to the results.

        `run`: the number of the run that the calls belong to, or None. If the caller will not
        `read` the results, a later call must raise the exception of a call. The lock is held. If
        only some of the hosts could be called, the cluster is `interrupted`, because the called
        hosts would wait forever for the others.
        """

    def _check_readable(self, handle: Handle, inputs: Sequence[Mapping[str, object]]) -> None:
        """Raise if a value that a run may read was lost with a process."""

    def _check_not_lost(self, names: Sequence[Sequence[str]]) -> None:
        """Raise if one of the named values was lost with a process."""

    def _record_written(self, names: Sequence[Collection[str]]) -> None:
        """Record that these values of each rank are written, so that they are not lost any more."""

    def _copy_buffers(self, calls: Sequence[Any]) -> None:
        """Copy the buffers of these puts if they may still be sent: the caller may change them."""

    @abstractmethod
    def _count(self, places: Places) -> int:
        """Return the number of actors that calls to these hosts reach."""

    @abstractmethod
    def collect(self, calls: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Wait for calls and return their results. Raises the root cause of a failure, and sets
        `failure`."""

    @abstractmethod
    def came(self, calls: Sequence[Any]) -> bool:
        """Return whether `collect` would return or raise without waiting."""

    @abstractmethod
    def ended(self, call: Any) -> bool:
        """Return whether a call has returned without an error."""

    @abstractmethod
    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        """Prepare hosts for a program before it is sent to them. May wait for the hosts."""

    @abstractmethod
    def _ship(self, handle: Handle) -> Sequence[Any]:
        """Send a program to its hosts. Return the calls for `_wait_loaded`."""

    @abstractmethod
    def _wait_loaded(self, calls: Sequence[Any]) -> None:
        """Wait until hosts have loaded a program. ``calls``: the result of `_ship`."""

    @abstractmethod
    def _grow(self, size: int) -> Hosts:
        """Start new ranks and connect all ranks. Return all hosts. The lock is held, and no call is
        in flight."""

    @abstractmethod
    def _end(self) -> None: ...

    # -- common to all backends ------------------------------------------------------------
    def put(
        self,
        values: Sequence[Mapping[str, object]],
        *,
        drop: Names = NOTHING_DROPPED,
        wait: bool = False,
    ) -> None:
        """Send each host the values of its ranks, and the names to drop."""
        self._check()
        check_size(self.size, values, "put")
        places = self._places([bool(values_of_rank) for values_of_rank in values])
        with self._lock:
            self._check()
            parts_of_hosts = zip(
                places, self._take_drops(drop, places), self._new_changes(places), strict=True
            )
            parts = [
                ({rank: values[rank] for rank in ranks}, drops, change)
                for (_, ranks), drops, change in parts_of_hosts
            ]
            calls = self._submit(Worker.put, places, parts, read=wait)
            self._record_written(values)
        if wait:
            try:
                self.collect(calls)
            finally:
                self._copy_buffers(calls)

    def get(self, names: Sequence[Sequence[str] | None]) -> Future:
        """Return the future of the named values. If no rank has names, wait for all ranks whose
        entry is not None."""
        self._check()
        check_size(self.size, names, "get")
        concerned = [bool(wanted_names) for wanted_names in names]
        if not any(concerned):
            concerned = [wanted_names is not None for wanted_names in names]
        names_by_rank = [tuple(wanted_names or ()) for wanted_names in names]
        self._check_not_lost(names_by_rank)
        return _CallFuture(self, self._submit_items(Worker.get, names_by_rank, concerned), tuple)

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        """Tell the hosts to drop the named values."""
        self._check()
        check_size(self.size, names, "delete")
        names_by_rank = [tuple(names_of_rank) for names_of_rank in names]
        places = self._places([bool(names_of_rank) for names_of_rank in names])
        with self._lock:
            parts = [
                ({rank: names_by_rank[rank] for rank in ranks}, change)
                for (_, ranks), change in zip(places, self._new_changes(places), strict=True)
            ]
            self._submit(Worker.delete, places, parts, read=False)

    def load(self, program: Program) -> Handle:
        """Verify a program and send it to its hosts. Raises ProgramError if it is not sound."""
        self._check()
        check_size(self.size, program.ranks, f"Program {program.name!r}")
        report = verify(program, self.hosts, self._seed)
        members = set(program.members)
        places = self._places([rank in members for rank in range(self.size)])
        hosts_know_outcome = len(places) < 2 or any(
            isinstance(i, Commit)
            for rank_program in program.ranks
            for i in rank_program.instructions
        )
        self._prepare(program, [host for host, _ in places])
        with self._lock:
            self._check()
            check_state((handle.program for handle in self._handles.values()), program)
            handle = Handle(self._next_handle, program, report, places, hosts_know_outcome)
            self._next_handle += 1  # before sending, since an interrupt may leave it on some hosts
            calls = self._ship(handle)
            self._handles[handle.id] = self._live_handles[handle.id] = handle
        try:
            self._wait_loaded(calls)
        except (DaftError, ProgramError):
            raise
        except BaseException:  # a signal handler raised
            self.unload(handle)
            raise
        return handle

    def call_on(self, rank: int, function: Method, *arguments: object) -> Any:
        self._check()
        host = next(at for at, ranks in enumerate(self.hosts) if rank in ranks)
        with self._lock:
            calls = self._call(function, [(host, (rank,))], [arguments])
        return self._collect_slowly(calls)[0]

    def _collect_slowly(self, calls: Sequence[Any]) -> list[Any]:
        """Return the results of calls that may take minutes."""
        return self.collect(calls)

    def unload(self, handle: Handle) -> None:
        with self._lock:
            parts = [(handle.id,)] * len(handle.places)
            self._submit(Worker.unload, handle.places, parts, read=False)
            del self._handles[handle.id]

    def submit(self, request: RunRequest) -> Future:
        """Send one run to the program's hosts, and return its future. Raises ValueError if the
        inputs do not match the program, or if mode is "interpreted" and lost ranks would be
        replaced."""
        handle, inputs, mode, keep, counted, returned, drop = request
        self._check()
        if mode == "interpreted" and self.changes is not None and not self.immediate:
            raise ValueError(
                'mode="interpreted" is many calls for one run, which cannot be made again where a '
                "rank is lost.\n"
                '  Fix: launch without spares= and snapshot_every=, or mode="compiled".'
            )
        check_inputs(handle, inputs, self.size)
        with self._lock:
            if counted is not None:
                counted = self._settle_count(counted, handle)
            self._check()
            self._check_readable(handle, inputs)
            run, self.runs = self.runs, self.runs + 1
            self._record_counted(run, handle, counted)
            begin, recording = time.monotonic(), self.recording
            timed = mode == "timed" or recording is not None
            places, dropped = handle.places, self._take_drops(drop, handle.places)
            parts_of_hosts = zip(places, dropped, self._new_changes(places, handle), strict=True)
            parts = [
                HostRun(
                    handle.id,
                    run,
                    {rank: inputs[rank] for rank in ranks},
                    keep,
                    counted,
                    timed,
                    returned,
                    drops,
                    change,
                )
                for (_, ranks), drops, change in parts_of_hosts
            ]
            if mode != "interpreted":
                calls = self._call(
                    Worker.run, places, [(outputs_by_rank,) for outputs_by_rank in parts], run=run
                )
                self.calls += self._count(places)
                self._record_awaited(places, calls)
                if keep:
                    outputs_by_rank = (program.outputs for program in handle.program.ranks)
                    self._record_written(
                        [[keep[o] for o in keep if o in outputs] for outputs in outputs_by_rank]
                    )
                future = _CallFuture(self, calls, dict, handle)
                if recording is not None:
                    recording.append(RecordedRun(handle, future, begin))
                return future
            try:
                return self._run_interpreted(handle, parts)
            except DaftError as error:
                return Finished([], error)
            except BaseException:
                self.interrupted()
                raise

    def _take_drops(self, drop: Names, places: Places) -> list[Names]:
        """Return the names that the message to each host drops: new ones, and earlier ones that no
        message has carried yet."""
        for rank, names in drop.items():
            self._pending_drops.setdefault(rank, []).extend(names)
        if not self._pending_drops:
            return [NOTHING_DROPPED] * len(places)
        return [
            {r: self._pending_drops.pop(r) for r in self.hosts[host] if r in self._pending_drops}
            for host, _ in places
        ]

    def _run_interpreted(self, handle: Handle, parts: Sequence[HostRun]) -> Future:
        """Run a program with one call per instruction, in an order that never blocks. The lock is
        held, because an actor executes one run at a time."""
        lists, places, run = handle.report.lists, handle.places, parts[0].number
        self.collect(self._submit(Worker.begin, places, [(part,) for part in parts]))
        position_of = {
            site: (h, i) for h, sites in enumerate(lists) for i, site in enumerate(sites)
        }
        everyone = (tuple(range(handle.program.size)),)
        for site in merge_sites(handle.program, everyone, self._seed)[0]:
            host, position = position_of[site]
            self.calls += 1
            self.collect(self._call(Worker.step, [(host, ())], [(handle.id, position)], run=run))
        calls = self._submit(Worker.finish, places, [(handle.id,)] * len(places))
        self._record_awaited(places, calls)
        return _CallFuture(self, calls, dict, handle)

    def _new_changes(self, places: Places, run: Handle | None = None) -> Sequence[TableChange]:
        """Return the `TableChange` of each host: of one change of all hosts if it is a ``run``, or
        of separate changes. They are UNNUMBERED without snapshots. The lock is held."""
        if self.changes is None or not places:
            return [UNNUMBERED] * len(places)
        self._check()
        return self.changes.number_change(
            [host for host, _ in places],
            self.ended,
            together=run is not None,
            commits=run is not None and run.hosts_know_outcome and len(places) > 1,
        )

    def _record_awaited(self, places: Places, calls: Sequence[Any]) -> None:
        """Record that these hosts have ended the last change once the calls have returned."""
        if self.changes is not None and not self.immediate:
            self.changes.awaits([host for host, _ in places], calls)

    def _settle_count(self, counted: Counted, handle: Handle) -> Counted:
        """Return ``counted`` for the run's message, after asking hosts which earlier runs were
        undone if the run's hosts do not know. The lock is held, but released while waiting."""
        if self._counted_runs is None:
            return counted
        hosts = [host for host, _ in handle.places]
        takes_number = any(
            counted.input in undone_on_host.inputs for undone_on_host in handle.program.ranks
        )
        while takes_number and (
            hosts_to_ask := self._counted_runs.hosts_to_ask(counted.key, hosts)
        ):
            num_runs, places = self.runs, [p for p in self._everywhere() if p[0] in hosts_to_ask]
            since = self._counted_runs.since(counted.key)
            parts = [(counted.key, since)] * len(places)
            calls = self._submit(Worker.undone_since, places, parts)
            self._lock.release()
            try:
                undone_by_host = self.collect(calls)
            finally:
                self._lock.acquire()
            self._counted_runs.settle(
                counted.key,
                num_runs,
                {run for undone_on_host in undone_by_host for run in undone_on_host},
            )
        return self._counted_runs.with_known_undone(counted)

    def _record_counted(self, run: int, handle: Handle, counted: Counted | None) -> None:
        """Record a run that takes a number, if there are several hosts."""
        if counted is not None and counted.takes and len(self.hosts) > 1:
            if self._counted_runs is None:
                from dtensor.daft.cluster.counted_runs import CountedRuns

                self._counted_runs = CountedRuns()
            hosts = [host for host, _ in handle.places]
            self._counted_runs.add(counted.key, run, hosts, know_outcome=handle.hosts_know_outcome)

    def grow(self, size: int) -> None:
        """Add ranks up to ``size``, after all earlier calls have ended."""
        if size < self.size:
            raise ValueError(f"A cluster of {self.size} ranks does not grow to {size}.")
        with self._lock:
            if size > self.size:
                self._undone_runs_on(self._everywhere())  # waits until all earlier calls have ended
                self.hosts = self._grow(size)
                self.size = size

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end()

    def by_rank(
        self, results: Sequence[Mapping[int, Any]], nothing: Callable[[], Any]
    ) -> list[Any]:
        """Merge the hosts' results into a list by rank; `nothing()` for ranks that have none."""
        merged = {rank: result for part in results for rank, result in part.items()}
        return [merged[r] if r in merged else nothing() for r in range(self.size)]

    def check_undone(self) -> None:
        """Raise the root cause of the first undone run that has not been raised yet."""
        self._check()
        undone_by_run: dict[int, list[UndoneRun]] = {}
        for undone in self._undone_runs_on(self._everywhere()):
            if undone.run is not None:
                undone_by_run.setdefault(undone.run, []).append(undone)
        for run in sorted(undone_by_run.keys() - self._raised_runs):
            raised_before = set(self._raised_runs)
            root = self.root(undone_by_run[run])
            if root.failure.step not in raised_before:
                raise root

    def _undone_runs_on(self, places: Places) -> list[UndoneRun]:
        calls = self._submit(Worker.undone, places, [()] * len(places))
        return [undone for undone_on_host in self.collect(calls) for undone in undone_on_host]

    def _records_of_run(self, run: int) -> list[UndoneRun]:
        """Ask its hosts for the records of an undone run."""
        records = self._undone_runs_on(self._places_of(run))
        return [undone for undone in records if undone.run == run]

    def root(self, undone: Sequence[UndoneRun]) -> DaftError:
        """Return the root cause of an undone run or a missing value, and mark it as raised.

        It is the fault of the earliest run; among several faults of a run, the first one in an
        order of all instructions (`first_fault`), which does not depend on timing.
        """
        faults = [fault for record in undone for fault in record.faults]
        inherited = [f for f in faults if f.site is None]
        run = next((u.run for u in undone if u.run is not None), None)
        unsaid = "a run was undone, and no host says why."
        unknown = Fault(None, TaskError(Failure(rank=None, step=run, reason=unsaid)))
        if inherited:
            root = next((f for f in inherited if f.error.failure.rank is not None), None)
            cause = inherited[0].error.failure
            # the fault was on a rank without the value and without its inputs: ask all hosts
            while root is None and cause.step is not None:
                first = self._first_fault(self._records_of_run(cause.step))
                if first is None:
                    break
                earlier = first.error.failure
                if earlier.rank is None and earlier.step is not None and earlier.step < cause.step:
                    cause = earlier
                else:
                    root = first
        else:  # the hosts in ``undone`` may have no fault of their own
            root = self._first_fault(undone)
            if root is None and run is not None:
                root = self._first_fault(self._records_of_run(run))
        error = (root or next(iter(inherited), unknown)).error
        self._raised_runs.update(u.run for u in undone if u.run is not None)
        if error.failure.step is not None:
            self._raised_runs.add(error.failure.step)
        return error

    def _first_fault(self, undone: Sequence[UndoneRun]) -> Fault | None:
        """Return the fault among the records of one run that comes first in an order of all
        instructions, None if no record has a fault."""
        programs = (
            self._live_handles.get(record.program)
            for record in undone
            if record.program is not None
        )
        handle = next(programs, None)
        if handle is None:
            return first_fault(undone, ())
        everyone = (tuple(range(handle.program.size)),)
        return first_fault(undone, merge_sites(handle.program, everyone, self._seed)[0])

    def _places_of(self, run: int) -> Places:
        """Return the hosts that a run was sent to, or all hosts if they are not known."""
        return self._everywhere()

    def _everywhere(self) -> Places:
        return tuple(enumerate(self.hosts))

    def _places(self, concerned: Sequence[bool]) -> Places:
        """Return the hosts of the ranks for which ``concerned`` is True."""
        places = (
            (host, tuple(rank for rank in ranks if concerned[rank]))
            for host, ranks in enumerate(self.hosts)
        )
        return tuple((host, ranks) for host, ranks in places if ranks)

    def _submit_items(
        self, method: Method, items: Sequence[Any], concerned: Sequence[bool], *, read: bool = True
    ) -> list[Any]:
        """Call the hosts of the ``concerned`` ranks, each with the items of these ranks."""
        places = self._places(concerned)
        parts = [({rank: items[rank] for rank in ranks},) for _, ranks in places]
        return self._submit(method, places, parts, read=read)

    def _submit(
        self, method: Method, places: Places, parts: Sequence[Part], *, read: bool = True
    ) -> list[Any]:
        """Call each host once, with its part. Calls of other threads do not interleave."""
        with self._lock:
            self._check()
            calls = self._call(method, places, parts, read=read)
            self.calls += self._count(places)
            return calls

    def _check(self) -> None:
        if self._closed:
            raise ClusterClosed("This cluster is closed: launch another one.")
        if self.failure is not None:
            raise self.failure

    def interrupted(self) -> None:
        self.failure = self.failure or CommunicationError(
            Failure(rank=None, reason="it was interrupted while state changed.")
        )


class _CallFuture(Future):
    """The future of one call to each host concerned. `nothing()`: the result of other ranks."""

    def __init__(
        self,
        cluster: HostedCluster,
        calls: Sequence[Any],
        nothing: Callable[[], Any],
        handle: Handle | None = None,
    ) -> None:
        self._cluster = cluster
        self._references = calls
        self._nothing = nothing
        self._handle = handle  # keeps the program until it is known whether the run has failed
        self._finished: Finished | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        """Wait for the hosts' answers, and return them by rank. Raises the root cause if the run
        was undone."""
        if self._finished is None:
            cluster = self._cluster
            try:
                results = cluster.collect(self._references, timeout)
                undone = [each for each in results if isinstance(each, UndoneRun)]
                if undone:
                    self._finished = Finished([], cluster.root(undone))
                else:
                    self._finished = Finished(cluster.by_rank(results, self._nothing))
            except (DaftError, LookupError) as error:
                self._finished = Finished([], error)
            self._references, self._handle = (), None
        return self._finished.get()

    def done(self) -> bool:
        return self._finished is not None or self._cluster.came(self._references)

    def check(self) -> None:
        """Wait for the call. Raises its failure. Unlike `get`, this does not assemble the results
        of a call in this process."""
        if self._finished is not None or not self._cluster.immediate:
            self.get()
            return
        for result in self._cluster.collect(self._references):
            if isinstance(result, UndoneRun):
                self.get()
