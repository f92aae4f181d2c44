"""Hold the values and the loaded programs of one host: the state of an actor, without the actor.

    worker = Worker((0, 1), torch.device("cpu"), LocalTransport())
    worker.put({0: {"w": torch.ones(2)}})
    worker.load(7, HostProgram.whole(program, sites))
    worker.run(HostRun(7, 0, {0: {"x": torch.ones(2)}, 1: {}}))       # {0: {"y": tensor}, 1: {}}

The in-process cluster has one worker for all ranks; each Ray actor has one for its ranks. Tensors
are copied on their way in (to the worker's device) and out (to the CPU), so nothing outside shares
memory with the table, except `lent` inputs, which a run reads without a copy. An undone run leaves
`Poisoned` under the names of missing outputs that it should have kept. One thread at a time.

On a GPU a deferred run returns `PendingResults`, and the worker records its outcome later: when the
next run begins, or before anything that needs to know which runs were undone.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtensor.daft.errors import Failure, TaskError
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Call
from dtensor.daft.run.device_commit import DeferredRun, Results
from dtensor.daft.run.engine import Engine, Table
from dtensor.daft.run.pending_results import PendingResults
from dtensor.daft.run.transport import Transport
from dtensor.daft.undo.failed_run import (
    COUNTERS,
    Fault,
    Poisoned,
    UndoneCounts,
    UndoneRun,
    detached,
)
from dtensor.daft.undo.rollback import UNNUMBERED, Rollback, Stored, TableChange
from dtensor.daft.undo.snapshots import SnapshotStore

if TYPE_CHECKING:
    from dtensor.daft.run.device_waits import DeviceWaits
    from dtensor.daft.run.input_copies import InputCopies

Values = Mapping[int, Mapping[str, object]]
Names = Mapping[int, Sequence[str]]
NOTHING_KEPT: Mapping[str, str] = MappingProxyType({})
NOTHING_DROPPED: Names = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Counted:
    """A run that gets a number among the runs with the same `key` that were not undone.

    The number is the value of the program's input `input`. The controller computes it without
    knowing all undone runs yet: it has already subtracted `known` of them, and the host subtracts
    the others that it knows, from run `since` on (`cluster/counted_runs.py`). `takes`: the run
    consumes its number; if it is undone, the next run gets the same number.
    """

    key: str
    known: int
    input: str
    takes: bool = True
    since: int = 0


class HostRun(NamedTuple):
    """The message of one run to one host.

    `inputs`: of the host's ranks. `keep`, `counted`, `returned`, `drop`: see `Cluster.run`.
    `timed`: add the timings of `run/timestamps.py` to the outputs. `change`: the number of the
    change of the host's table, for snapshots.
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
        """Return plain tuples and dicts, which pickle four times as fast. `of` is the inverse."""
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
        """Return the run of a tuple made by `plain`."""
        program, number, inputs, keep, counted, timed, returned, drop, change = plain
        counted_run = counted and Counted(*counted)
        table_change = TableChange(*change) if change[0] else UNNUMBERED
        return HostRun(
            program, number, inputs, keep, counted_run, timed, returned, drop, table_change
        )


MAX_UNDONE_RUNS = 64
"""Number of undone runs whose failures a host remembers."""
MAX_PENDING = 8
"""Number of runs whose kernels may be queued on a GPU: one more run waits for the oldest."""


class Worker:
    """The table and the programs of a host.

    `counter[0]`: always the position of the current instruction in the host's list. `lent`: runs
    may read inputs without a copy. `snapshots`: the store of copies of the table; if a dead process
    has left copies in it, `roll_back` restores them.
    """

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
        self._input_copies: InputCopies | None = None
        if device.type == "cuda":
            from dtensor.daft.run.device_waits import DeviceWaits
            from dtensor.daft.run.input_copies import InputCopies

            self.device_waits, self._input_copies = DeviceWaits(), InputCopies(device)
        self._lends_inputs = lent
        self._written_names: dict[int, frozenset[str]] = {}  # by program: values its calls write
        self._table: Table = {}
        self._rollback = None if snapshots is None else Rollback(self._table, snapshots)
        self._num_undone: dict[str, torch.Tensor] = {}  # see `_undone_on_device`
        self._current_run = HostRun(-1, -1, {})  # or the last run
        self._has_failed = False  # whether a run failed since the last began
        self._pending: deque[tuple[HostRun, PendingResults]] = deque()  # without their inputs

    def put(
        self, values: Values, drop: Names = NOTHING_DROPPED, change: TableChange = UNNUMBERED
    ) -> None:
        """Drop values of the table, and then store copies of new ones."""
        self._settle()
        if self._rollback is not None:
            self._rollback.begin(change, drop, values)
        self._drop(drop)
        for rank, named in values.items():
            for name, value in named.items():
                self._table[rank, name] = copy_to(value, self.device)
        if self._rollback is not None:
            self._rollback.end()

    def get(self, names: Names) -> dict[int, tuple[object, ...]] | UndoneRun:
        """Return copies of the named values on the CPU, or `UndoneRun` if the run that should have
        made one of them was undone."""
        self._settle()
        values = {
            rank: tuple(self._value(rank, n) for n in values_of_rank)
            for rank, values_of_rank in names.items()
        }
        all_values = chain.from_iterable(values.values())
        faults = tuple(
            Fault(None, TaskError(v.failure)) for v in all_values if isinstance(v, Poisoned)
        )
        if faults:
            return UndoneRun(faults)
        cpu = torch.device("cpu")
        return {
            rank: tuple(copy_to(v, cpu) for v in values_of_rank)
            for rank, values_of_rank in values.items()
        }

    def undone(self) -> tuple[UndoneRun, ...]:
        """Return the records of the last undone runs."""
        self._settle()
        return self._counters.undone

    def undone_since(self, key: str, since: int) -> list[int]:
        """Return the undone runs with this key of `Counted`, as far as this host knows."""
        self._settle()
        return [run for run in self._counters.runs.get(key, ()) if run >= since]

    @property
    def _counters(self) -> UndoneCounts:
        counters = self._table.get(COUNTERS)
        return counters if isinstance(counters, UndoneCounts) else UndoneCounts()

    def delete(self, names: Names, change: TableChange = UNNUMBERED) -> None:
        """Drop values of the table. Raises LookupError if one is missing."""
        if self._rollback is not None:
            self._rollback.begin(change, names)
        self._drop(names)
        if self._rollback is not None:
            self._rollback.end()

    def ended(self) -> int:
        """Return the number of the last change that ended on this host; 0 without snapshots."""
        return 0 if self._rollback is None else self._rollback.snapshots.ended

    def roll_back(self, to: int) -> int:
        """Restore the table after the last restorable change up to ``to``; return its number.

        Values of replayable writes are restored only if an ordinary change wrote them later. The
        current run is dropped; the caller must clear its messages from connections. Raises
        ValueError if there is no such state, or no snapshots.
        """
        if self._rollback is None:
            raise ValueError("This host keeps no snapshots.")
        self._settle()
        self._num_undone.clear()
        for engine in self.engines.values():
            engine.abandon()
        return self._rollback.roll_back(to)

    def _drop(self, names: Names) -> None:
        for rank, unwanted in names.items():
            for name in unwanted:
                self._value(rank, name)
                del self._table[rank, name]

    def load(self, handle: int, program: HostProgram) -> None:
        """Prepare a program under the number ``handle``."""
        arguments = program, self._table, self.transport, self.device, handle
        undoes = self._rollback is not None
        self.engines[handle] = Engine(*arguments, undoes=undoes, device_waits=self.device_waits)
        if self._rollback is not None:
            self._rollback.load(handle, program)
        instructions = (item.instructions for item in program.ranks.values())
        calls = (i for item in instructions for i in item if isinstance(i, Call))
        self._written_names[handle] = frozenset(name for call in calls for name in call.writes)

    def unload(self, handle: int) -> None:
        self._settle()
        self.engines.pop(handle).close()
        if self._rollback is not None:
            self._rollback.unload(handle)
        del self._written_names[handle]

    def run(self, run: HostRun) -> Results | UndoneRun | PendingResults:
        """Run a program; return the outputs of each rank that are not kept, or are `returned`."""
        engine = self.engines[run.program]
        # A run that is not deferred gets a number of the host, which knows all undone runs.
        runs_ahead = run.counted is None or engine.is_deferred
        self._settle(MAX_PENDING - 1 if runs_ahead else 0)
        inputs_by_rank = self._take_inputs(run)
        results = engine.run(inputs_by_rank, self.counter, timed=run.timed, keeps=bool(run.keep))
        ends_here = self.device.type == "cpu" or run.keep or run.timed or self._rollback is not None
        if ends_here or not isinstance(results, DeferredRun) or results.faults:
            self._settle()
            return self._results_of(results)
        pending = self._pending_results(results)
        self._pending.append((run._replace(inputs={}), pending))
        return pending

    def _settle(self, ahead: int = 0) -> None:
        """Record the outcomes of the runs that have ended, in their order. Wait until at most
        ``ahead`` runs are pending."""
        pending = self._pending
        while pending and (len(pending) > ahead or pending[0][1].done()):
            run, results = pending[0]
            if isinstance(undone := results.wait(), UndoneRun):
                self._record_undone(run, undone)
            pending.popleft()

    def undo(self, run: HostRun, *, failure: Failure) -> UndoneRun:
        """Record a run as undone because of ``failure``, in place of running it."""
        self._settle()
        self._begin_change(run)
        rank, index = failure.rank, failure.index
        faults: tuple[Fault, ...] = ()
        if rank is not None and index is not None and rank in self.ranks:
            faults = (Fault((rank, index), TaskError(failure)),)
        return self._undo(UndoneRun(faults))

    def begin(self, run: HostRun) -> None:
        self._settle()
        self.engines[run.program].begin(self._take_inputs(run), keeps=bool(run.keep))

    def step(self, handle: int, position: int) -> None:
        self.counter[0] = position
        self.engines[handle].step(position)

    def finish(self, handle: int) -> Results | UndoneRun:
        engine = self.engines[handle]
        return self._results_of(engine.finish(tuple(engine.program.ranks)))

    def join(self, ranks: tuple[int, ...]) -> None:
        """Set the ranks of this host: the present ranks and new ones."""
        self.ranks = ranks

    def close(self) -> None:
        """Drop all programs and values, and close the snapshots and connections."""
        self._pending.clear()
        self.engines.clear()
        self._table.clear()
        if self._rollback is not None:
            self._rollback.snapshots.close()
        self.transport.close()

    def _begin_change(self, run: HostRun) -> None:
        """Begin a run's change of the table: take a snapshot if necessary, and drop values."""
        if self._has_failed:  # an exception and its frames form a cycle that keeps the run's values
            self._has_failed = False
            gc.collect()
        if self._rollback is not None:
            self._rollback.begin_run(run.program, run.inputs, run.keep, run.drop, run.change)
        self._drop(run.drop)
        self._current_run = run
        if self.device_waits is not None:
            self.device_waits.begin(run.program, run.number)

    def _take_inputs(self, run: HostRun) -> dict[int, dict[str, object]]:
        """Begin a run, and return the inputs of its ranks: values of the table, or copies. The
        undone runs that the controller did not know are subtracted from the run's number
        (`Counted`)."""
        self._begin_change(run)
        written, counted = self._written_names[run.program], run.counted
        on_device = {} if self._input_copies is None else self._input_copies.of(run.inputs)
        inputs_by_rank = {
            rank: {
                name: self._value(rank, value.name)
                if isinstance(value, Stored)
                else on_device[rank, name]
                if (rank, name) in on_device
                else self._lend_or_copy(value)
                if self._lends_inputs and name not in written
                else copy_to(value, self.device)
                for name, value in named.items()
            }
            for rank, named in run.inputs.items()
        }
        if self.engines[run.program].is_deferred:
            for named in inputs_by_rank.values():
                numbers = {n: v for n, v in named.items() if type(v) is int}
                named |= {n: self._number(v, n, counted) for n, v in numbers.items()}
        elif counted is not None:
            unreported = len(self.undone_since(counted.key, counted.since)) - counted.known
            for named in inputs_by_rank.values():
                number = named.get(counted.input)
                if isinstance(number, int):
                    named[counted.input] = number - unreported
        return inputs_by_rank

    def _number(self, number: int, name: str, counted: Counted | None) -> torch.Tensor:
        """Return the input ``name`` of a deferred run as an i64[] on the device. From the run's
        number the device subtracts the undone runs of which the host does not know yet."""
        if counted is None or name != counted.input:
            return torch.full((), number, dtype=torch.int64, device=self.device)
        runs = self._counters.runs.get(counted.key, ())
        reported = counted.known + sum(run < counted.since for run in runs)
        return number + reported - self._undone_on_device(counted.key)

    def _undone_on_device(self, key: str) -> torch.Tensor:
        """Return how many runs with this key of `Counted` were undone, i64[] on the device."""
        if key not in self._num_undone:  # then no run with the key is pending
            known = len(self._counters.runs.get(key, ()))
            self._num_undone[key] = torch.full((), known, dtype=torch.int64, device=self.device)
        return self._num_undone[key]

    def _lend_or_copy(self, value: object) -> object:
        """Return the tensor without a copy if it is plain, contiguous and on the device."""
        if isinstance(value, torch.Tensor) and is_on(value, self.device):
            plain = not (value.is_inference() or value.is_conj() or value.is_neg())
            if plain and value.is_contiguous():
                return value.detach()
        return copy_to(value, self.device)

    def _results_of(self, results: Results | UndoneRun | DeferredRun) -> Results | UndoneRun:
        """End the current run: copy the outputs of `keep` into the table, and return copies of the
        outputs that go back to the controller. If the run was undone, record that."""
        if isinstance(results, UndoneRun):
            return self._undo(results)
        returned: Results | UndoneRun | None = None
        if isinstance(results, DeferredRun):
            returned, results = self._pending_results(results).wait(), results.results
            if isinstance(returned, UndoneRun):
                return self._undo(returned)
        keep = self._current_run.keep
        for rank, outputs in results.items():
            for output, name in keep.items():
                if output in outputs:
                    self._table[rank, name] = copy_to(outputs[output], self.device)
        if self._rollback is not None:
            self._rollback.end()
        if returned is not None:
            return returned
        cpu = torch.device("cpu")
        return {
            rank: {name: copy_to(value, cpu) for name, value in outputs.items()}
            for rank, outputs in self._returned(results).items()
        }

    def _returned(self, results: Results) -> Results:
        """Return the outputs of the current run that go back to the controller."""
        keep, returned = self._current_run.keep, self._current_run.returned
        return {
            rank: {n: v for n, v in outputs.items() if n not in keep or n in returned}
            for rank, outputs in results.items()
        }

    def _pending_results(self, run: DeferredRun) -> PendingResults:
        """Return the pending results of the current run, and count it on the device if it is
        undone."""
        number, program = self._current_run.number, self._current_run.program
        if (counted := self._current_run.counted) is not None and counted.takes:
            self._undone_on_device(counted.key).add_(run.skip.to(torch.int64))
        engine = self.engines[program]

        def outcome(on_host: DeferredRun) -> UndoneRun | None:
            undone = engine.outcome(on_host)
            return None if undone is None else undone.numbered(number, program)

        return PendingResults(
            replace(run, results=self._returned(run.results)), self.device, outcome
        )

    def _undo(self, undone: UndoneRun) -> UndoneRun:
        """Record the current run as undone, and restore the table if the run has written to it.
        Return the record with the numbers of the run and its program."""
        run = self._current_run
        if self._rollback is not None and self.engines[run.program].must_roll_back:
            self._rollback.undo()
        undone = undone.numbered(run.number, run.program)
        self._record_undone(run, undone)
        self._num_undone.clear()  # no run is pending
        if self._rollback is not None:
            self._rollback.end_undone()
        return undone

    def _record_undone(self, host_run: HostRun, undone: UndoneRun) -> None:
        """Record that a run was undone, and leave `Poisoned` for the outputs that it should have
        kept."""
        self._has_failed = True
        handle, run, counted = host_run.program, host_run.number, host_run.counted
        faults, counts = undone.faults, self._counters
        runs = dict(counts.runs)
        if counted and counted.takes:
            runs[counted.key] = (*runs.get(counted.key, ()), run)
        # The stored record has no frames, whose locals would keep the run's activations.
        record = UndoneRun(tuple(replace(f, error=detached(f.error)) for f in faults), run, handle)
        self._table[COUNTERS] = UndoneCounts((*counts.undone, record)[-MAX_UNDONE_RUNS:], runs)
        unknown_failure = Failure(rank=None, step=run, reason="a call on another rank failed.")
        poisoned = Poisoned(record.faults[0].error.failure if faults else unknown_failure)
        program = self.engines[handle].program
        for rank, rank_program in program.ranks.items():
            for output, name in host_run.keep.items():
                if output in rank_program.outputs:
                    self._table.setdefault((rank, name), poisoned)

    def _value(self, rank: int, name: str) -> object:
        """Return a value of the table. Raises LookupError if it is missing."""
        if (rank, name) not in self._table:
            raise LookupError(
                f"Rank {rank} has no value {name!r}. It has "
                f"{sorted(n for r, n in self._table if r == rank)}."
            )
        return self._table[rank, name]


def is_on(value: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on ``device``. ``cuda`` without an index means the current GPU."""
    value_device = value.device
    if value_device == device:
        return True
    if value_device.type != "cuda" or torch.device("cuda") != device:
        return False
    return value_device.index == torch.cuda.current_device()


def copy_to(value: object, device: torch.device) -> object:
    """Return a contiguous copy of a tensor on `device`. Other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_on(value, device):  # `clone` takes half the time of `to`
        return value.detach().clone(memory_format=torch.contiguous_format)
    return value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
