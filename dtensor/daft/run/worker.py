"""One host's table of values and its loaded programs: an actor's state, without the actor.

The in-process cluster has one that hosts all ranks; each Ray actor has one for its own.

    worker = Worker((0, 1), torch.device("cpu"), LocalTransport())
    worker.put({0: {"w": torch.ones(2)}})
    worker.load(7, HostProgram.whole(program, sites))
    worker.run(HostRun(7, 0, {0: {"x": torch.ones(2)}, 1: {}}))       # {0: {"y": tensor}, 1: {}}

Outputs that a run keeps stay in the table; those that are also `returned` come back too, as
separate copies. The message of a put or a run first drops values that are not needed any more.

A run that failed, and was undone, leaves only `Poisoned` under the names of outputs that it should
have kept, where there was no value before. Runs may be counted (`Counted`): an input is then the
number of the run among those that were not undone, even if the controller, which may be two runs
ahead, does not know of all undone runs yet. Numbers of runs come with them: a host need not have
all.

With `snapshots`, puts, deletes and runs are changes with a number each, and the table can return to
its state after one of the last (`roll_back`); a run all of whose ranks are here is undone wherever
a call of it fails.

Invariants: tensors come in and go out as contiguous copies, in on the worker's device and out on
the CPU; nothing outside aliases the table. If the caller of a run waits for its end, its inputs may
be `lent`: they are read without a copy, except those that a call writes to. One thread uses a
worker at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtensor.daft.errors import Failure, TaskError
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Call
from dtensor.daft.run.engine import Engine, Table
from dtensor.daft.run.transport import Transport
from dtensor.daft.undo.failed_run import (
    COUNTERS,
    Fault,
    Poisoned,
    UndoneCounts,
    UndoneRun,
    detached,
    with_run,
)
from dtensor.daft.undo.rollback import UNNUMBERED, Rollback, Stored, TableChange
from dtensor.daft.undo.snapshots import SnapshotStore

if TYPE_CHECKING:
    from dtensor.daft.run.device_waits import DeviceWaits

Values = Mapping[int, Mapping[str, object]]
Names = Mapping[int, Sequence[str]]
NOTHING_KEPT: Mapping[str, str] = MappingProxyType({})
NOTHING_DROPPED: Names = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Counted:
    """A run counts under `key`; its number is fed as `input`, where the program has that input.

    The controller numbers runs, leaving out those of `key` that it knows were undone, `known` of
    them; the ranks know all undone runs, and subtract the others. `takes`: this run consumes a
    number; if it is undone, the next run gets its number. `since`: the ranks count the undone runs
    from that run on, and `known` excludes those before it (`cluster/counted_runs.py`).
    """

    key: str
    known: int
    input: str
    takes: bool = True
    since: int = 0


class HostRun(NamedTuple):
    """A run as the message to one host: its `number`, the `program`, the `inputs` of its ranks.

    `keep`, `counted`, `returned` and `drop` are those of `Cluster.run`; `timed`: its outputs
    include those of `run/timestamps.py`; `change`: the change of the host's table.
    """

    program: int
    number: int
    inputs: Values
    keep: Mapping[str, str] = NOTHING_KEPT
    counted: Counted | None = None
    timed: bool = False
    returned: Collection[str] = ()
    drop: Names = NOTHING_DROPPED
    change: TableChange = UNNUMBERED

    def plain(self) -> tuple[Any, ...]:
        """Plain tuples and dicts, for another process: a pickled dataclass takes four times as
        long. The inverse of `of`."""
        counted, change = self.counted, self.change
        return (
            self.program,
            self.number,
            self.inputs,
            dict(self.keep),
            counted and (counted.key, counted.known, counted.input, counted.takes, counted.since),
            self.timed,
            tuple(self.returned),
            dict(self.drop),
            (change.number, change.committed, change.taken),
        )

    @staticmethod
    def of(plain: tuple[Any, ...]) -> HostRun:
        program, number, inputs, keep, counted, timed, returned, drop, change = plain
        known = counted and Counted(*counted)
        told = TableChange(*change) if change[0] else UNNUMBERED
        return HostRun(program, number, inputs, keep, known, timed, returned, drop, told)


MOST_UNDONE = 64
"""Number of undone runs whose reason a host remembers."""


class Worker:
    """`counter[0]` is always the position in the list that runs. `lent`: inputs are lent.
    `snapshots`: the store of copies of the table's values; the rest of a dead host's process there
    is restored by `roll_back`."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        transport: Transport,
        counter: memoryview | None = None,
        *,
        lent: bool = False,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        self.ranks: tuple[int, ...] = ranks
        self.device = device
        self.transport = transport
        self.engines: dict[int, Engine] = {}
        self.counter = memoryview(bytearray(8)).cast("q") if counter is None else counter
        self.device_waits: DeviceWaits | None = None
        if device.type == "cuda":
            from dtensor.daft.run.device_waits import DeviceWaits

            self.device_waits = DeviceWaits()
        self._lent = lent
        self._written: dict[int, frozenset[str]] = {}  # by program: names that its calls write to
        self._table: Table = {}
        self._undoing = None if snapshots is None else Rollback(self._table, snapshots)
        self._now = HostRun(-1, -1, {})  # the current run, or the last one
        self._has_failed = False  # so did the last run

    def put(
        self, values: Values, drop: Names = NOTHING_DROPPED, change: TableChange = UNNUMBERED
    ) -> None:
        if self._undoing is not None:
            self._undoing.begin(change, drop, values)
        self._drop(drop)
        for rank, named in values.items():
            for name, value in named.items():
                self._table[rank, name] = copy_to(value, self.device)
        if self._undoing is not None:
            self._undoing.end()

    def get(self, names: Names) -> dict[int, tuple[object, ...]] | UndoneRun:
        values = {rank: tuple(self._find(rank, n) for n in own) for rank, own in names.items()}
        poisoned = [v for own in values.values() for v in own if isinstance(v, Poisoned)]
        if poisoned:
            return UndoneRun(tuple(Fault(None, TaskError(value.failure)) for value in poisoned))
        cpu = torch.device("cpu")
        return {rank: tuple(copy_to(v, cpu) for v in own) for rank, own in values.items()}

    def undone(self) -> tuple[UndoneRun, ...]:
        """The last runs that were undone."""
        return self._counters.undone

    def undone_since(self, key: str, since: int) -> list[int]:
        """The undone runs that counted under `key`, as far as this host knows."""
        return [run for run in self._counters.runs.get(key, ()) if run >= since]

    @property
    def _counters(self) -> UndoneCounts:
        counters = self._table.get(COUNTERS)
        return counters if isinstance(counters, UndoneCounts) else UndoneCounts()

    def delete(self, names: Names, change: TableChange = UNNUMBERED) -> None:
        if self._undoing is not None:
            self._undoing.begin(change, names)
        self._drop(names)
        if self._undoing is not None:
            self._undoing.end()

    def ended(self) -> int:
        """The last change that ended here; 0 without snapshots."""
        return 0 if self._undoing is None else self._undoing.snapshots.ended

    def roll_back(self, to: int) -> int:
        """Restore the table, and the records of undone runs, bit for bit as right after the last
        taken change here whose number is at most ``to``; returns its number. Values of replayable
        writes stay as they are, unless another change wrote them since. The current run is
        forgotten; the caller must clear its messages from connections.

        ValueError if that state is not kept any more, or there are no snapshots.
        """
        if self._undoing is None:
            raise ValueError("This host keeps no snapshots.")
        for engine in self.engines.values():
            engine.abandon()
        return self._undoing.roll_back(to)

    def _drop(self, names: Names) -> None:
        for rank, unwanted in names.items():
            for name in unwanted:
                self._find(rank, name)
                del self._table[rank, name]

    def load(self, handle: int, program: HostProgram) -> None:
        given = program, self._table, self.transport, self.device, handle
        undoes = self._undoing is not None
        self.engines[handle] = Engine(*given, undoes=undoes, device_waits=self.device_waits)
        if self._undoing is not None:
            self._undoing.load(handle, program)
        lists = (own.instructions for own in program.ranks.values())
        calls = (i for own in lists for i in own if isinstance(i, Call))
        self._written[handle] = frozenset(name for call in calls for name in call.writes)

    def unload(self, handle: int) -> None:
        self.engines.pop(handle).close()
        if self._undoing is not None:
            self._undoing.unload(handle)
        del self._written[handle]

    def run(self, run: HostRun) -> dict[int, dict[str, object]] | UndoneRun:
        """The outputs of the hosted ranks that take part: those that are not kept, and the
        `returned` ones."""
        fed = self._begin(run)
        engine = self.engines[run.program]
        return self._out(engine.run(fed, self.counter, timed=run.timed, keeps=bool(run.keep)))

    def undo(self, run: HostRun, *, failure: Failure) -> UndoneRun:
        """Called instead of `run`, for a run that was undone because of this failure of a call."""
        self._begin_change(run)
        rank, index = failure.rank, failure.index
        faults: tuple[Fault, ...] = ()
        if rank is not None and index is not None and rank in self.ranks:
            faults = (Fault((rank, index), TaskError(failure)),)
        return self._undo(UndoneRun(faults))

    def begin(self, run: HostRun) -> None:
        self.engines[run.program].begin(self._begin(run), keeps=bool(run.keep))

    def step(self, handle: int, position: int) -> None:
        self.counter[0] = position
        self.engines[handle].step(position)

    def finish(self, handle: int) -> dict[int, dict[str, object]] | UndoneRun:
        engine = self.engines[handle]
        return self._out(engine.finish(tuple(engine.program.ranks)))

    def join(self, ranks: tuple[int, ...]) -> None:
        """Host these ranks from now on: the present and new ones."""
        self.ranks = ranks

    def close(self) -> None:
        self.engines.clear()
        self._table.clear()
        if self._undoing is not None:
            self._undoing.snapshots.close()
        self.transport.close()

    def _begin_change(self, run: HostRun) -> None:
        if self._has_failed:  # an exception and its frames are a cycle, which keeps values of a run
            self._has_failed = False
            gc.collect()
        if self._undoing is not None:
            self._undoing.begin_run(run.program, run.inputs, run.keep, run.drop, run.change)
        self._drop(run.drop)
        self._now = run
        if self.device_waits is not None:
            self.device_waits.begin(run.program, run.number)

    def _begin(self, run: HostRun) -> dict[int, dict[str, object]]:
        """The inputs of its ranks."""
        self._begin_change(run)
        written, counted = self._written[run.program], run.counted
        fed = {
            rank: {
                name: self._find(rank, value.name)
                if isinstance(value, Stored)
                else self._lend(value)
                if self._lent and name not in written
                else copy_to(value, self.device)
                for name, value in named.items()
            }
            for rank, named in run.inputs.items()
        }
        if counted is not None:
            unknown = len(self.undone_since(counted.key, counted.since)) - counted.known
            for named in fed.values():
                number = named.get(counted.input)
                if isinstance(number, int):
                    named[counted.input] = number - unknown
        return fed

    def _lend(self, value: object) -> object:
        """The tensor itself, if a copy would have the same form; else a copy."""
        if isinstance(value, torch.Tensor) and is_on(value, self.device):
            plain = not (value.is_inference() or value.is_conj() or value.is_neg())
            if plain and value.is_contiguous():
                return value.detach()
        return copy_to(value, self.device)

    def _out(
        self, results: dict[int, dict[str, object]] | UndoneRun
    ) -> dict[int, dict[str, object]] | UndoneRun:
        """The results that go back; kept outputs go into the table, as private copies."""
        if isinstance(results, UndoneRun):
            return self._undo(results)
        keep, returned = self._now.keep, self._now.returned
        for rank, named in results.items():
            for output, name in keep.items():
                if output in named:
                    self._table[rank, name] = copy_to(named[output], self.device)
        if self._undoing is not None:
            self._undoing.end()
        cpu = torch.device("cpu")
        return {
            rank: {n: copy_to(v, cpu) for n, v in named.items() if n not in keep or n in returned}
            for rank, named in results.items()
        }

    def _undo(self, undone: UndoneRun) -> UndoneRun:
        host_run, self._has_failed = self._now, True
        handle, run, counted = host_run.program, host_run.number, host_run.counted
        if self._undoing is not None and self.engines[handle].late:
            self._undoing.undo()
        faults = tuple(
            fault if fault.site is None else replace(fault, error=with_run(fault.error, run))
            for fault in undone.faults
        )
        undone = UndoneRun(faults, run, handle)
        before = self._counters
        runs = dict(before.runs)
        if counted and counted.takes:
            runs[counted.key] = (*runs.get(counted.key, ()), run)
        # The record holds no frames: their locals are the activations of the run.
        kept = UndoneRun(tuple(replace(f, error=detached(f.error)) for f in faults), run, handle)
        self._table[COUNTERS] = UndoneCounts((*before.undone, kept)[-MOST_UNDONE:], runs)
        elsewhere = Failure(rank=None, step=run, reason="a call on another rank failed.")
        poisoned = Poisoned(kept.faults[0].error.failure if faults else elsewhere)
        program = self.engines[handle].program
        for rank, listed in program.ranks.items():
            for output, name in host_run.keep.items():
                if output in listed.outputs:
                    self._table.setdefault((rank, name), poisoned)
        if self._undoing is not None:
            self._undoing.end_undone()
        return undone

    def _find(self, rank: int, name: str) -> object:
        if (rank, name) not in self._table:
            raise LookupError(
                f"Rank {rank} has no value {name!r}. It has "
                f"{sorted(n for r, n in self._table if r == rank)}."
            )
        return self._table[rank, name]


def is_on(value: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on ``device``; ``cuda`` without a number is the current GPU."""
    there = value.device
    if there == device:
        return True
    if there.type != "cuda" or torch.device("cuda") != device:
        return False
    return there.index == torch.cuda.current_device()


def copy_to(value: object, device: torch.device) -> object:
    """A contiguous copy of a tensor on `device`; other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_on(value, device):  # half the time of `to`
        return value.detach().clone(memory_format=torch.contiguous_format)
    return value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
