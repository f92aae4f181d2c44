"""A `Cluster` of ranks that hold values and run programs, and the `Future` of a run.

    with launch_cluster(2) as cluster:                       # or backend="ray"
        cluster.put([{"w": w0}, {"w": w1}])
        handle = cluster.load(program)
        future = cluster.run(handle, [{"x": x0}, {"x": x1}])
        y0 = future.get()[0]["y"]

Invariants: tensors are copied on their way in and out, and come out on the CPU; a run that has
ended when `run` returns may read its inputs where they are. Runs, puts and gets take effect in the
order of their calls. A run in which a call raised is undone (`engine.py`): its future raises a
`TaskError`, and so does whatever reads what it was to keep; all else goes on. After another
failure, or one that came too late to be undone, the values are lost: `failure` is set, and every
later call and future raises it, the root cause. The same program, inputs and state give the same
bits on every backend and in both modes. What is fed to ranks is a sequence in rank order, one item
per rank.

A `HostedCluster` has its ranks in hosts, ((0, 1), (2, 3)) say, each of which has a `Worker`; `put`
and `run` call `Worker.put` and `Worker.run` on each host with the part of its ranks. Checks,
programs and their numbers, runs in both modes, and futures are here; `inprocess.py` and
`ray/cluster.py` say how a call reaches a host. All hosts see calls in one order, the same whichever
threads make them: on that it rests that runs of several programs cannot hang. A call that got to
some hosts only, of which the others would wait for ever, ends the cluster's use.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch

from dtensor.daft.errors import (
    ClusterClosed,
    CommunicationError,
    DaftError,
    Failure,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.run.undone import Fault, Undone, first_fault
from dtensor.daft.run.worker import NOTHING_DROPPED, NOTHING_KEPT, Counted, Names, Worker
from dtensor.daft.verification.pairing import Hosts, merge_sites
from dtensor.daft.verification.verifier import Report, check_state, verify

Mode: TypeAlias = Literal["compiled", "interpreted", "timed"]
"""timed: as compiled; each rank's outputs have those of `run/stamps.py` too."""
Backend: TypeAlias = Literal["inprocess", "ray"]
Method: TypeAlias = Callable[..., Any]
"""Of `Worker`."""
Part: TypeAlias = tuple[Any, ...]
"""What it is called with on one host."""


class Future(ABC):
    """The result of a call that may still be under way."""

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
        """Wait; raises what `get` would."""
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


@dataclass(frozen=True, slots=True)
class Handle:
    """A program that a cluster has loaded."""

    id: int
    program: Program = field(repr=False)
    report: Report = field(repr=False)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run of a recording, in the mode "timed": `begin`, when it was called, by the monotonic
    clock."""

    handle: Handle
    future: Future
    begin: float


class Cluster(ABC):
    """`calls` counts the calls from the controller to actors; a compiled run makes one to each.

    `runs` counts the runs that were started: the number of the next one, `Failure.step` of its
    failure. `failure`: why its values are lost. `immediate`: a run has ended when `run` returns.
    `known_as`: what users call ranks that are in parts of it.
    `recording`: while there is a list, compiled runs are timed ones and go there.
    """

    size: int
    device: torch.device
    calls: int
    runs: int
    failure: DaftError | None
    immediate: bool
    known_as: dict[int, str]
    recording: list[RecordedRun] | None = None

    @abstractmethod
    def put(self, values: Sequence[Mapping[str, object]], *, drop: Names = NOTHING_DROPPED) -> None:
        """Store values in each rank's table, as state of programs.

        `drop`: rank to names of its values that nobody needs; they go with a later call of that
        rank, this one or another, and cost no call of their own.
        """

    @abstractmethod
    def get(self, names: Sequence[Sequence[str]]) -> Future:
        """For each rank, a tuple of the values of these names."""

    @abstractmethod
    def delete(self, names: Sequence[Sequence[str]]) -> None:
        """Drop values from each rank's table; `LookupError` for one that is not there."""

    @abstractmethod
    def load(self, program: Program) -> Handle:
        """Verify a program and ship it, once. `ProgramError` if it is not sound."""

    @abstractmethod
    def unload(self, handle: Handle) -> None:
        """Forget a program; its state stays."""

    @abstractmethod
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
        """Run a program once; for each rank, a dict of its outputs.

        An input may be `Stored(name)`: the value of that name in the rank's table, not copied.
        `keep`: output name to a name under which it stays in the rank's table instead of coming
        back; ranks that do not have the output keep nothing. `returned`: those of them that come
        back too. `counted`: as what the run counts. `drop`: as of `put`.
        """

    @abstractmethod
    def check_undone(self) -> None:
        """Wait for all runs; raises the failure of the first that was undone and that no future has
        raised. Each is raised once."""

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


def check_inputs(handle: Handle, inputs: Sequence[Mapping[str, object]]) -> None:
    """Raises `ValueError` unless every rank is fed exactly the inputs that it declares."""
    program = handle.program
    check_size(program.size, inputs, f"A run of {program.name!r}")
    for rank, (given, own) in enumerate(zip(inputs, program.ranks, strict=True)):
        if set(given) != set(own.inputs):
            raise ValueError(
                f"Rank {rank} of program {program.name!r} takes the inputs "
                f"{sorted(own.inputs)}, got {sorted(given)}."
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
    def __init__(self, size: int, device: torch.device, hosts: Hosts, seed: int) -> None:
        self.size = size
        self.device = device
        self.hosts = hosts
        self.calls = 0
        self.runs = 0
        self.failure: DaftError | None = None
        self.immediate = False
        self.known_as = {}
        self._seed = seed
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0
        self._closed = False
        self._raised: set[int] = set()  # runs that were undone, whose failure was raised
        self._unneeded: dict[int, list[str]] = {}  # by rank, what its host is to be told to drop
        self._lock = threading.RLock()

    # -- what a backend does --------------------------------------------------------------------
    @abstractmethod
    def _call(self, host: int, run: int | None, read: bool, method: Method, part: Part) -> Any:
        """Call a host; what stands for the result. `run`: the run that it is of. Unless it is
        `read`, what it raises must come with another call."""

    @abstractmethod
    def collect(self, asked: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The results of calls. A failure is raised as its root cause, and is `failure` then."""

    @abstractmethod
    def came(self, asked: Sequence[Any]) -> bool:
        """Whether `collect` would not wait."""

    @abstractmethod
    def _ship(self, handle: Handle) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    # -- what is the same everywhere ------------------------------------------------------------
    def put(self, values: Sequence[Mapping[str, object]], *, drop: Names = NOTHING_DROPPED) -> None:
        parts = self._parts(values, "put")
        with self._lock:
            dropped = self._dropped(drop)
            given = [(*part, own) for part, own in zip(parts, dropped, strict=True)]
            self._submit(Worker.put, given, read=False)

    def get(self, names: Sequence[Sequence[str]]) -> Future:
        wanted = self._parts([tuple(own) for own in names], "get")
        return _Called(self, self._submit(Worker.get, wanted))

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        self._submit(Worker.delete, self._parts([tuple(n) for n in names], "delete"), read=False)

    def load(self, program: Program) -> Handle:
        self._check()
        check_size(self.size, program.ranks, f"Program {program.name!r}")
        report = verify(program, self.hosts, self._seed)
        with self._lock:
            check_state((handle.program for handle in self._handles.values()), program)
            handle = Handle(self._next_handle, program, report)
            self._next_handle += 1  # first: some hosts may have it when this is interrupted
            self._ship(handle)
            self._handles[handle.id] = handle
        return handle

    def unload(self, handle: Handle) -> None:
        with self._lock:
            self._submit(Worker.unload, [(handle.id,)] * len(self.hosts), read=False)
            del self._handles[handle.id]

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
        self._check()
        check_inputs(handle, inputs)
        fed = [{rank: inputs[rank] for rank in ranks} for ranks in self.hosts]
        with self._lock:
            run, self.runs = self.runs, self.runs + 1
            dropped = self._dropped(drop)
            if mode != "interpreted":
                begin, recording = time.monotonic(), self.recording
                timed = mode == "timed" or recording is not None
                parts = [
                    (handle.id, own, dict(keep), counted, timed, returned, gone)
                    for own, gone in zip(fed, dropped, strict=True)
                ]
                future = _Called(self, self._each(Worker.run, parts, run, True))
                if recording is not None:
                    recording.append(RecordedRun(handle, future, begin))
                return future
            try:
                parts = [
                    (handle.id, own, dict(keep), counted, returned, gone)
                    for own, gone in zip(fed, dropped, strict=True)
                ]
                return self._run_interpreted(handle, run, parts)
            except DaftError as error:
                return Finished([], error)
            except BaseException:
                self._interrupted()
                raise

    def _dropped(self, drop: Names) -> list[Names]:
        """For each host, what a message to it is to drop; what no message took before, too."""
        for rank, names in drop.items():
            self._unneeded.setdefault(rank, []).extend(names)
        if not self._unneeded:
            return [{}] * len(self.hosts)
        unneeded, self._unneeded = self._unneeded, {}
        return [{r: unneeded[r] for r in ranks if r in unneeded} for ranks in self.hosts]

    def _run_interpreted(self, handle: Handle, run: int, parts: Sequence[Part]) -> Future:
        """One instruction at a time, in an order in which a single thread would never block."""
        lists = handle.report.lists
        self.collect(self._submit(Worker.begin, parts))
        place = {site: (h, i) for h, sites in enumerate(lists) for i, site in enumerate(sites)}
        everyone = (tuple(range(self.size)),)
        for site in merge_sites(handle.program, everyone, self._seed)[0]:
            host, position = place[site]
            part = (handle.id, position)
            self.collect([self._call(host, run, True, Worker.step, part)])
        made = self._submit(Worker.finish, [(handle.id,)] * len(self.hosts))
        return _Called(self, made)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end()

    def by_rank(self, found: Sequence[Mapping[int, Any]]) -> list[Any]:
        """What hosts gave by rank, as one list."""
        merged = {rank: given for part in found for rank, given in part.items()}
        return [merged[rank] for rank in range(self.size)]

    def check_undone(self) -> None:
        self._check()
        found: dict[int, list[Undone]] = {}
        for undone in self._all_undone():
            if undone.run is not None:
                found.setdefault(undone.run, []).append(undone)
        for run in sorted(found.keys() - self._raised):
            told = set(self._raised)
            root = self.root(found[run])
            if root.failure.step not in told:
                raise root

    def _all_undone(self) -> list[Undone]:
        asked = self._submit(Worker.undone, [()] * len(self.hosts))
        return [undone for own in self.collect(asked) for undone in own]

    def root(self, undone: Sequence[Undone]) -> DaftError:
        """Why hosts have undone a run, or have no value; counts as raised.

        What an earlier run failed of comes first. Of several faults it is the one that is first in
        an order of all instructions: what follows from another comes after it there, and which one
        that is does not depend on timing.
        """
        faults = [fault for each in undone for fault in each.faults]
        inherited = [f for f in faults if f.site is None]
        if inherited:
            root = next((f for f in inherited if f.error.failure.rank is not None), None)
            if root is None:  # it failed on a rank that has no part of the value
                step = inherited[0].error.failure.step
                root = self._first([u for u in self._all_undone() if u.run == step])
        else:
            root = self._first(undone)
        error = (root or inherited[0]).error
        self._raised.update(u.run for u in undone if u.run is not None)
        if error.failure.step is not None:
            self._raised.add(error.failure.step)
        return error

    def _first(self, undone: Sequence[Undone]) -> Fault | None:
        programs = (self._handles.get(u.program) for u in undone if u.program is not None)
        handle = next(programs, None)
        if handle is None:
            return first_fault(undone, ())
        everyone = (tuple(range(self.size)),)
        return first_fault(undone, merge_sites(handle.program, everyone, self._seed)[0])

    def _parts(self, items: Sequence[Any], what: str) -> list[Part]:
        check_size(self.size, items, what)
        return [({rank: items[rank] for rank in ranks},) for ranks in self.hosts]

    def _submit(
        self, method: Method, parts: Sequence[Part], run: int | None = None, *, read: bool = True
    ) -> list[Any]:
        """One call to each host, with its part, and no other thread's between them."""
        with self._lock:
            self._check()
            return self._each(method, parts, run, read)

    def _each(
        self, method: Method, parts: Sequence[Part], run: int | None, read: bool
    ) -> list[Any]:
        asked: list[Any] = []
        try:
            for host, part in enumerate(parts):
                asked.append(self._call(host, run, read, method, part))
        except BaseException as error:
            if asked or not isinstance(error, Exception):
                self._interrupted()  # hosts that were called would wait for the others
            raise
        return asked

    def _check(self) -> None:
        if self._closed:
            raise ClusterClosed("This cluster is closed: launch another one.")
        if self.failure is not None:
            raise self.failure

    def _interrupted(self) -> None:
        """State may be half-written, and transfers half-made."""
        self.failure = CommunicationError(Failure(rank=None, reason="a run was interrupted"))


class _Called(Future):
    """The results of one call to every host."""

    def __init__(self, cluster: HostedCluster, asked: Sequence[Any]) -> None:
        self._cluster = cluster
        self._asked = asked
        self._finished: Finished | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        if self._finished is None:
            cluster = self._cluster
            try:
                found = cluster.collect(self._asked, timeout)
                undone = [each for each in found if isinstance(each, Undone)]
                if undone:
                    self._finished = Finished([], cluster.root(undone))
                else:
                    self._finished = Finished(cluster.by_rank(found))
            except (DaftError, LookupError) as error:
                self._finished = Finished([], error)
            self._asked = ()
        return self._finished.get()

    def done(self) -> bool:
        return self._finished is not None or self._cluster.came(self._asked)

    def check(self) -> None:
        if self._finished is not None or not self._cluster.immediate:
            self.get()
            return
        for each in self._cluster.collect(self._asked):  # without a look at what came back
            if isinstance(each, Undone):
                self.get()
