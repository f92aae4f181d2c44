"""A `Cluster` of ranks that hold values and run programs, and the `Future` of a run.

    with launch_cluster(2) as cluster:                       # or backend="ray"
        cluster.put([{"w": w0}, {"w": w1}])
        handle = cluster.load(program)
        future = cluster.run(handle, [{"x": x0}, {"x": x1}])
        y0 = future.get()[0]["y"]

Invariants: tensors are copied on their way in and out, and come out on the CPU; a run that has
ended when `run` returns may read its inputs where they are. Runs, puts and gets take effect in the
order of their calls. A run in which a call raised is undone (`engine.py`): its future raises a
`TaskError`, and so does a read of a value that it should have kept; other calls are unaffected.
After any other failure, or one that came too late to be undone, the values are lost: `failure` is
set, and every later call and future raises it, the root cause. The same program, inputs and state
give the same bits on every backend and in both modes. Inputs of ranks are a sequence in rank order,
one item per rank.

A `HostedCluster` has its ranks in hosts, ((0, 1), (2, 3)) say, each of which has a `Worker`; `put`
and `run` call `Worker.put` and `Worker.run` on each host concerned, with its ranks' part. The
members of a program are the ranks with an instruction, an input, an output or state of it
(`Program.members`): a program of ranks 0 and 1 is loaded, run and read there while ranks 2 and 3
run another. This file has checks, programs and their numbers, runs in both modes, and futures;
`inprocess.py` and `ray/cluster.py` say how a call reaches a host. Calls have one order, the same
whichever threads make them, and each host sees its own calls in that order, so runs of several
programs cannot hang (docs/design/0019-runs-on-their-own-ranks.md). A call that reached only some of
its hosts would make those wait for ever for the rest, so the cluster cannot be used after it.
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
"""timed: as compiled; each rank's outputs have those of `run/timestamps.py` too."""
Backend: TypeAlias = Literal["inprocess", "ray"]
Method: TypeAlias = Callable[..., Any]
"""Of `Worker`."""
Part: TypeAlias = tuple[Any, ...]
"""The arguments of a method, for one host."""
Places: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]
"""Hosts, each with those of its ranks that take part."""


class Future(ABC):
    """The result of a call, which may still be running."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> list[Any]:
        """The result, one item per rank; again and again, the same.

        `TimeoutError` after `timeout` seconds, which does not consume the future. A failure is
        raised as the root cause, a `DaftError`.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return, or raise a failure, at once."""

    def check(self) -> None:
        """Wait; raises the failure that `get` would raise."""
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
    """A program that a cluster has loaded. `places`: its hosts, with the ranks that take part;
    `told`: whether all of these hosts know if a run was undone."""

    id: int
    program: Program = field(repr=False)
    report: Report = field(repr=False)
    places: Places = field(repr=False)
    told: bool = field(repr=False)


class RunRequest(NamedTuple):
    """The arguments of `Cluster.run`."""

    handle: Handle
    inputs: Sequence[Mapping[str, object]]
    mode: Mode = "compiled"
    keep: Mapping[str, str] = NOTHING_KEPT
    counted: Counted | None = None
    returned: Collection[str] = ()
    drop: Names = NOTHING_DROPPED


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run of a recording, in the mode "timed": `begin`, when it was called, by the monotonic
    clock."""

    handle: Handle
    future: Future
    begin: float


class Cluster(ABC):
    """`calls` counts the calls from the controller to actors; a compiled run makes one to each
    actor that takes part.

    `runs` counts the runs that were started: the number of the next one, `Failure.step` of its
    failure. `failure`: why its values are lost. `immediate`: a run has ended when `run` returns.
    `known_as`: what users call ranks that are in parts of it. `recording`: if it is a list,
    compiled runs are timed and appended to it. `copies`: how many copies of the values that a run
    writes are kept, to undo it.
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
        """The losses of ranks that were recovered so far."""
        return ()

    @property
    def machines(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks on each machine, by its name for users; empty where all are on one."""
        return {}

    @property
    def recovered(self) -> int:
        """How often lost ranks were replaced so far. Values that only replayable writes have made,
        as those of caches, do not outlive it: reading one is an error until it is put anew."""
        return 0

    @abstractmethod
    def put(
        self,
        values: Sequence[Mapping[str, object]],
        *,
        drop: Names = NOTHING_DROPPED,
        wait: bool = False,
    ) -> None:
        """Store values in each rank's table, as state of programs.

        `drop`: rank to names of its values that are not needed any more; a later call to that rank,
        this one or another, drops them, so they cost no call of their own. `wait`: return when the
        ranks have them. Then the values are sent without a copy; else a value for which a host has
        no room is copied first.
        """

    @abstractmethod
    def get(self, names: Sequence[Sequence[str] | None]) -> Future:
        """For each rank, a tuple of the values of these names, after all earlier calls to that
        rank; other ranks' calls do not delay it. If no rank has names, it waits for all ranks
        except those whose entry is None."""

    @abstractmethod
    def delete(self, names: Sequence[Sequence[str]]) -> None:
        """Drop values of these ``names`` from each rank's table; `LookupError` for one that is not
        there."""

    @abstractmethod
    def load(self, program: Program) -> Handle:
        """Verify a program and ship it, once. `ProgramError` if it is not sound."""

    @abstractmethod
    def unload(self, handle: Handle) -> None:
        """Forget the program of ``handle``; its state stays."""

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
        """Run a program once, on the ranks that take part; for each rank, a dict of its outputs.

        An input may be `Stored(name)`: the value of that name in the rank's table, not copied.
        `keep`: output name to a name under which it stays in the rank's table instead of coming
        back; ranks that do not have the output keep nothing. `returned`: those of `keep` that come
        back too. `counted`: what the run counts as. `drop`: as of `put`.
        """
        return self.submit(RunRequest(handle, inputs, mode, keep, counted, returned, drop))

    @abstractmethod
    def submit(self, request: RunRequest) -> Future:
        """Run a program once, as `run` does."""

    @abstractmethod
    def check_undone(self) -> None:
        """Wait for all runs on all ranks; raises the failure of the first that was undone and that
        no future has raised. Each is raised once."""

    @abstractmethod
    def status(self, seconds: float) -> Status:
        """The state of the ranks, from two samples that are ``seconds`` apart. Any thread may ask,
        while the cluster has not failed."""

    @abstractmethod
    def grow(self, size: int) -> None:
        """Add ranks, up to ``size``. The present ranks keep their values and loaded programs; the
        new ones come after them and hold nothing. It waits for calls in flight. ValueError for
        fewer ranks than there are."""

    @abstractmethod
    def interrupted(self) -> None:
        """A change of its values was interrupted half-way: they are lost."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything that this cluster started. Twice is fine."""

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
    """Raises `ValueError` unless every rank is fed exactly the inputs that it declares; a rank that
    joined after the program was loaded has no part in it."""
    program = handle.program
    check_size(size, inputs, f"A run of {program.name!r}")
    takes = [declared.inputs for declared in program.ranks] + [()] * (size - program.size)
    for rank, (given, declared) in enumerate(zip(inputs, takes, strict=True)):
        if set(given) != set(declared):
            raise ValueError(
                f"Rank {rank} of program {program.name!r} takes the inputs "
                f"{sorted(declared)}, got {sorted(given)}."
            )


def hosts_of(size: int, ranks_per_actor: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks share a host: hosts_of(4, 2) == ((0, 1), (2, 3))."""
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
    """`changes`: of the hosts' tables, where these keep snapshots."""

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
        self._raised: set[int] = set()  # undone runs whose failure was raised
        self._unneeded: dict[int, list[str]] = {}  # by rank, names that its host must drop
        # by their ids; an unloaded one stays while a future of one of its runs may need it
        self._known: WeakValueDictionary[int, Handle] = WeakValueDictionary()
        self._counting: CountedRuns | None = None  # None where one host takes part in all runs
        self._lock = Lock()
        self.changes: ChangeLog | None = None
        self.number_changes(snapshot_every)

    def number_changes(self, every: int | None) -> None:
        """From the first on; once the hosts are known."""
        if every is not None:
            from dtensor.daft.cluster.recovery_line import ChangeLog

            self.copies = 1 if self.immediate else 2  # of files, one is whole while one is written

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
        """Call a method on each of these hosts with its part; return a reference to each result.

        `run`: the run that the calls belong to, if any. If nobody will `read` the results, an
        exception of a call must be raised by a later call. The lock is held. If not all hosts could
        be called, the cluster counts as `interrupted`: those that were would wait for the others.
        """

    def _reads(self, handle: Handle, inputs: Sequence[Mapping[str, object]]) -> None:
        """A run is to be called; raises if a value that it may read was lost with a process."""

    def _finds(self, names: Sequence[Sequence[str]]) -> None:
        """As `_reads`, for values by rank."""

    def _makes(self, names: Sequence[Collection[str]]) -> None:
        """These values are put anew, by rank."""

    def _own(self, asked: Sequence[Any]) -> None:
        """The buffers that were lent to these puts may change from now on."""

    @abstractmethod
    def _count(self, places: Places) -> int:
        """Return the number of actors that calls to these hosts reach."""

    @abstractmethod
    def collect(self, asked: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The results of calls. A failure is raised as its root cause, and is `failure` then."""

    @abstractmethod
    def came(self, asked: Sequence[Any]) -> bool:
        """Whether `collect` would not wait."""

    @abstractmethod
    def ended(self, asked: Any) -> bool:
        """Whether a call has come back, and raised nothing."""

    @abstractmethod
    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        """Give hosts the prerequisites of a program before it is sent to them; it may wait for
        them."""

    @abstractmethod
    def _ship(self, handle: Handle) -> Sequence[Any]:
        """Send a program to its hosts; the calls for which `_joined` waits."""

    @abstractmethod
    def _joined(self, asked: Sequence[Any]) -> None: ...

    @abstractmethod
    def _grow(self, size: int) -> Hosts:
        """Start ranks, and connect all of them; with the lock held, and no call in flight. Returns
        all hosts."""

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
        self._check()
        check_size(self.size, values, "put")
        places = self._places([bool(own) for own in values])
        with self._lock:
            self._check()
            told = zip(places, self._dropped(drop, places), self._changes_of(places), strict=True)
            parts = [
                ({rank: values[rank] for rank in ranks}, gone, change)
                for (_, ranks), gone, change in told
            ]
            asked = self._submit(Worker.put, places, parts, read=wait)
            self._makes(values)
        if wait:
            try:
                self.collect(asked)
            finally:
                self._own(asked)

    def get(self, names: Sequence[Sequence[str] | None]) -> Future:
        self._check()
        check_size(self.size, names, "get")
        asked = [bool(own) for own in names]
        if not any(asked):
            asked = [own is not None for own in names]
        wanted = [tuple(own or ()) for own in names]
        self._finds(wanted)
        return _Called(self, self._submit_items(Worker.get, wanted, asked), tuple)

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        self._check()
        check_size(self.size, names, "delete")
        unwanted = [tuple(own) for own in names]
        places = self._places([bool(own) for own in names])
        with self._lock:
            parts = [
                ({rank: unwanted[rank] for rank in ranks}, change)
                for (_, ranks), change in zip(places, self._changes_of(places), strict=True)
            ]
            self._submit(Worker.delete, places, parts, read=False)

    def load(self, program: Program) -> Handle:
        self._check()
        check_size(self.size, program.ranks, f"Program {program.name!r}")
        report = verify(program, self.hosts, self._seed)
        members = set(program.members)
        places = self._places([rank in members for rank in range(self.size)])
        told = len(places) < 2 or any(
            isinstance(i, Commit) for own in program.ranks for i in own.instructions
        )
        self._prepare(program, [host for host, _ in places])
        with self._lock:
            self._check()
            check_state((handle.program for handle in self._handles.values()), program)
            handle = Handle(self._next_handle, program, report, places, told)
            self._next_handle += 1  # first: some hosts may have it when interrupted
            asked = self._ship(handle)
            self._handles[handle.id] = self._known[handle.id] = handle
        try:
            self._joined(asked)
        except (DaftError, ProgramError):
            raise
        except BaseException:  # a signal's handler has raised
            self.unload(handle)
            raise
        return handle

    def unload(self, handle: Handle) -> None:
        with self._lock:
            parts = [(handle.id,)] * len(handle.places)
            self._submit(Worker.unload, handle.places, parts, read=False)
            del self._handles[handle.id]

    def submit(self, request: RunRequest) -> Future:
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
                counted = self._settled(counted, handle)
            self._check()
            self._reads(handle, inputs)
            run, self.runs = self.runs, self.runs + 1
            self._note(run, handle, counted)
            begin, recording = time.monotonic(), self.recording
            timed = mode == "timed" or recording is not None
            places, dropped = handle.places, self._dropped(drop, handle.places)
            told = zip(places, dropped, self._changes_of(places, handle), strict=True)
            parts = [
                HostRun(
                    handle.id,
                    run,
                    {rank: inputs[rank] for rank in ranks},
                    keep,
                    counted,
                    timed,
                    returned,
                    gone,
                    change,
                )
                for (_, ranks), gone, change in told
            ]
            if mode != "interpreted":
                asked = self._call(Worker.run, places, [(own,) for own in parts], run=run)
                self.calls += self._count(places)
                self._awaits(places, asked)
                if keep:
                    own = (program.outputs for program in handle.program.ranks)
                    self._makes([[keep[o] for o in keep if o in made] for made in own])
                future = _Called(self, asked, dict, handle)
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

    def _dropped(self, drop: Names, places: Places) -> list[Names]:
        """For each host, the names that the next message drops, including those of earlier calls
        that no message carried yet."""
        for rank, names in drop.items():
            self._unneeded.setdefault(rank, []).extend(names)
        if not self._unneeded:
            return [NOTHING_DROPPED] * len(places)
        return [
            {r: self._unneeded.pop(r) for r in self.hosts[host] if r in self._unneeded}
            for host, _ in places
        ]

    def _run_interpreted(self, handle: Handle, parts: Sequence[HostRun]) -> Future:
        """One instruction at a time, in an order in which a single thread would never block.

        With the lock held: an actor carries out one run at a time, and this one is many calls."""
        lists, places, run = handle.report.lists, handle.places, parts[0].number
        self.collect(self._submit(Worker.begin, places, [(own,) for own in parts]))
        place = {site: (h, i) for h, sites in enumerate(lists) for i, site in enumerate(sites)}
        everyone = (tuple(range(handle.program.size)),)
        for site in merge_sites(handle.program, everyone, self._seed)[0]:
            host, position = place[site]
            self.calls += 1
            self.collect(self._call(Worker.step, [(host, ())], [(handle.id, position)], run=run))
        asked = self._submit(Worker.finish, places, [(handle.id,)] * len(places))
        self._awaits(places, asked)
        return _Called(self, asked, dict, handle)

    def _changes_of(self, places: Places, run: Handle | None = None) -> Sequence[TableChange]:
        """The `TableChange` that each of these hosts records, where hosts keep snapshots: of a run,
        or of each host by itself. With the lock held."""
        if self.changes is None or not places:
            return [UNNUMBERED] * len(places)
        self._check()
        return self.changes.told(
            [host for host, _ in places],
            self.ended,
            together=run is not None,
            commits=run is not None and run.told and len(places) > 1,
        )

    def _awaits(self, places: Places, asked: Sequence[Any]) -> None:
        """When these calls have come back, their hosts have ended the last change."""
        if self.changes is not None and not self.immediate:
            self.changes.awaits([host for host, _ in places], asked)

    def _settled(self, counted: Counted, handle: Handle) -> Counted:
        """The number that a run counts as. Hosts that do not know which earlier runs were undone
        are told here. With the lock held, except while it waits for the hosts that know."""
        if self._counting is None:
            return counted
        hosts = [host for host, _ in handle.places]
        takes_number = any(counted.input in own.inputs for own in handle.program.ranks)
        while takes_number and (unsure := self._counting.to_ask(counted.key, hosts)):
            before, places = self.runs, [p for p in self._everywhere() if p[0] in unsure]
            since = self._counting.since(counted.key)
            parts = [(counted.key, since)] * len(places)
            asked = self._submit(Worker.undone_since, places, parts)
            self._lock.release()
            try:
                undone_by_host = self.collect(asked)
            finally:
                self._lock.acquire()
            self._counting.settle(
                counted.key, before, {run for own in undone_by_host for run in own}
            )
        return self._counting.told(counted)

    def _note(self, run: int, handle: Handle, counted: Counted | None) -> None:
        if counted is not None and counted.takes and len(self.hosts) > 1:
            if self._counting is None:
                from dtensor.daft.cluster.counted_runs import CountedRuns

                self._counting = CountedRuns()
            hosts = [host for host, _ in handle.places]
            self._counting.add(counted.key, run, hosts, told=handle.told)

    def grow(self, size: int) -> None:
        if size < self.size:
            raise ValueError(f"A cluster of {self.size} ranks does not grow to {size}.")
        with self._lock:
            if size > self.size:
                self._undone_at(self._everywhere())  # then all earlier calls have ended
                self.hosts = self._grow(size)
                self.size = size

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end()

    def by_rank(
        self, results: Sequence[Mapping[int, Any]], nothing: Callable[[], Any]
    ) -> list[Any]:
        """The hosts' results as one list by rank; `nothing()` for ranks that were not called."""
        merged = {rank: given for part in results for rank, given in part.items()}
        return [merged[r] if r in merged else nothing() for r in range(self.size)]

    def check_undone(self) -> None:
        self._check()
        undone_by_run: dict[int, list[UndoneRun]] = {}
        for undone in self._undone_at(self._everywhere()):
            if undone.run is not None:
                undone_by_run.setdefault(undone.run, []).append(undone)
        for run in sorted(undone_by_run.keys() - self._raised):
            told = set(self._raised)
            root = self.root(undone_by_run[run])
            if root.failure.step not in told:
                raise root

    def _undone_at(self, places: Places) -> list[UndoneRun]:
        asked = self._submit(Worker.undone, places, [()] * len(places))
        return [undone for own in self.collect(asked) for undone in own]

    def _undone_of(self, run: int) -> list[UndoneRun]:
        """The records of an undone run, from its hosts."""
        heard = self._undone_at(self._places_of(run))
        return [undone for undone in heard if undone.run == run]

    def root(self, undone: Sequence[UndoneRun]) -> DaftError:
        """The error because of which hosts have undone a run, or lack a value; it counts as raised.

        The failure of the earliest run comes first. Among several faults it is the first one in an
        order of all instructions: a consequence comes after its cause in that order, and the choice
        does not depend on timing.
        """
        faults = [fault for each in undone for fault in each.faults]
        inherited = [f for f in faults if f.site is None]
        run = next((u.run for u in undone if u.run is not None), None)
        unsaid = "a run was undone, and no host says why."
        unknown = Fault(None, TaskError(Failure(rank=None, step=run, reason=unsaid)))
        if inherited:
            root = next((f for f in inherited if f.error.failure.rank is not None), None)
            heard = inherited[0].error.failure
            # it failed on a rank that holds no part of the value or of the value's inputs
            while root is None and heard.step is not None:
                first = self._first(self._undone_of(heard.step))
                if first is None:
                    break
                earlier = first.error.failure
                if earlier.rank is None and earlier.step is not None and earlier.step < heard.step:
                    heard = earlier
                else:
                    root = first
        else:  # the hosts that were asked may know of the failure only from others
            root = self._first(undone)
            if root is None and run is not None:
                root = self._first(self._undone_of(run))
        error = (root or next(iter(inherited), unknown)).error
        self._raised.update(u.run for u in undone if u.run is not None)
        if error.failure.step is not None:
            self._raised.add(error.failure.step)
        return error

    def _first(self, undone: Sequence[UndoneRun]) -> Fault | None:
        programs = (self._known.get(u.program) for u in undone if u.program is not None)
        handle = next(programs, None)
        if handle is None:
            return first_fault(undone, ())
        everyone = (tuple(range(handle.program.size)),)
        return first_fault(undone, merge_sites(handle.program, everyone, self._seed)[0])

    def _places_of(self, run: int) -> Places:
        """The hosts that a run was sent to, or all hosts where that is not known."""
        return self._everywhere()

    def _everywhere(self) -> Places:
        return tuple(enumerate(self.hosts))

    def _places(self, concerned: Sequence[bool]) -> Places:
        """The hosts of the ranks that are concerned."""
        places = (
            (host, tuple(rank for rank in ranks if concerned[rank]))
            for host, ranks in enumerate(self.hosts)
        )
        return tuple((host, ranks) for host, ranks in places if ranks)

    def _submit_items(
        self, method: Method, items: Sequence[Any], concerned: Sequence[bool], *, read: bool = True
    ) -> list[Any]:
        """To each host the items of its ranks that are concerned."""
        places = self._places(concerned)
        parts = [({rank: items[rank] for rank in ranks},) for _, ranks in places]
        return self._submit(method, places, parts, read=read)

    def _submit(
        self, method: Method, places: Places, parts: Sequence[Part], *, read: bool = True
    ) -> list[Any]:
        """Call a method on each host with its part; no call of another thread comes between."""
        with self._lock:
            self._check()
            asked = self._call(method, places, parts, read=read)
            self.calls += self._count(places)
            return asked

    def _check(self) -> None:
        if self._closed:
            raise ClusterClosed("This cluster is closed: launch another one.")
        if self.failure is not None:
            raise self.failure

    def interrupted(self) -> None:
        self.failure = self.failure or CommunicationError(
            Failure(rank=None, reason="it was interrupted while state changed.")
        )


class _Called(Future):
    """The results of one call to each host concerned; `nothing()` is the result of other ranks,
    `handle` the program of a run."""

    def __init__(
        self,
        cluster: HostedCluster,
        asked: Sequence[Any],
        nothing: Callable[[], Any],
        handle: Handle | None = None,
    ) -> None:
        self._cluster = cluster
        self._asked = asked
        self._nothing = nothing
        self._handle = handle  # while it is not known whether the run has failed
        self._finished: Finished | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        if self._finished is None:
            cluster = self._cluster
            try:
                results = cluster.collect(self._asked, timeout)
                undone = [each for each in results if isinstance(each, UndoneRun)]
                if undone:
                    self._finished = Finished([], cluster.root(undone))
                else:
                    self._finished = Finished(cluster.by_rank(results, self._nothing))
            except (DaftError, LookupError) as error:
                self._finished = Finished([], error)
            self._asked, self._handle = (), None
        return self._finished.get()

    def done(self) -> bool:
        return self._finished is not None or self._cluster.came(self._asked)

    def check(self) -> None:
        if self._finished is not None or not self._cluster.immediate:
            self.get()
            return
        for each in self._cluster.collect(self._asked):  # the results themselves are not read
            if isinstance(each, UndoneRun):
                self.get()
