"""Run one host's part of a program, over a table of values.

    table = {(0, "w"): ...}                                # (rank, name) -> value
    engine = Engine(HostProgram.whole(program, sites), table, transport)
    results = engine.run({0: {"x": x}})                    # {rank: {output: value}}

If a `Call` raises, its rank is poisoned: it skips all later calls but still sends messages (zeros
for missing values), so that no other rank hangs. At the commit point all ranks learn of the failure
before any has written state, and `run` returns `UndoneRun`. A failure that cannot be undone (after
the commit point, in a transfer, or with the GPU lost) is raised as TaskError or CommunicationError.
If commits have a predicate, the device decides, and `run` returns `DeferredRun` (device_commit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, assert_never, cast

import torch

from dtensor.daft.errors import (
    CommunicationError,
    DaftError,
    RunInterrupted,
    TaskError,
)
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    Recv,
    Send,
    Sizes,
    Start,
    Vote,
    Wait,
)
from dtensor.daft.ir.program import Built
from dtensor.daft.remote_exceptions import RemoteException, interrupts, reason_of
from dtensor.daft.run.device_commit import DeferredRun, DeviceCommit, Results
from dtensor.daft.run.failures import describe, lost_device
from dtensor.daft.run.first_uses import use_once
from dtensor.daft.run.graphs import Graphs
from dtensor.daft.run.local_execution import CPU, local_execution
from dtensor.daft.run.timestamps import Stamps
from dtensor.daft.run.transport import Pending, Transport, Undeclared, check_rows, check_value
from dtensor.daft.undo.failed_run import (
    CutShort,
    Fault,
    OthersFailed,
    Poisoned,
    UndoneRun,
    shortened,
)
from dtensor.daft.verification.pairing import Site, instruction_at, starts_of_waits
from dtensor.signals import act, keep, noted

if TYPE_CHECKING:
    from dtensor.daft.run.device_waits import DeviceWaits

Table: TypeAlias = dict[tuple[int, str], object]
Place: TypeAlias = tuple[Table, tuple[int, str]]
"""Where a value is stored: a table, and the key in it."""
Inputs: TypeAlias = dict[int, dict[str, object]]
"""The inputs of each rank. A run removes them, so that `Free` drops the last reference."""
Step: TypeAlias = Callable[[], None]


class _Vector(Protocol):
    """A tensor i64[E] in host memory."""

    def tolist(self) -> list[int]: ...


class Engine:
    """A program that is loaded on a host.

    `number`: the program's number among those loaded over this transport. `undoes`: the table's
    owner can restore the table. `must_roll_back`: the owner must do so, since the last run failed
    after writes. `values`: the values of the current run; only state is written to the table.
    `device_waits`: records where the GPU waits.
    """

    def __init__(
        self,
        program: HostProgram,
        table: Table,
        transport: Transport,
        device: torch.device = CPU,
        number: int = 0,
        *,
        undoes: bool = False,
        device_waits: DeviceWaits | None = None,
    ) -> None:
        """Compile the program's functions, and prepare a step for each instruction."""
        self.program = program
        self.sites: tuple[Site, ...] = program.sites
        self.values: Table = {}  # of the current run, except state
        self._table = table
        # before anything that can raise, so that the other hosts do not wait for this one
        self._prepared = transport.prepare(program, number)
        self._device = device
        self._state = frozenset(
            (rank, name)
            for rank, rank_program in program.ranks.items()
            for name in rank_program.state
        )
        self._pending: dict[Site, Pending] = {}
        self._functions = dict(program.functions)
        self._built = {name: function.build() for name, function in program.functions}
        ranks = sorted({rank for rank, _ in program.sites})
        self._waits = {rank: starts_of_waits(program.ranks[rank].instructions) for rank in ranks}
        self._skipped = self._vote_sums() if program.alone else frozenset[Site]()
        self._device_commit = DeviceCommit.of(program, device)
        self._steps = [self._prepare(site) for site in self.sites]
        if device_waits is not None and not program.alone:
            for position, site in enumerate(self.sites):
                if isinstance(instruction_at(program, site), Wait) and site not in self._skipped:
                    self._steps[position] = device_waits.recorded(position, self._steps[position])
        self._order = [p for p, site in enumerate(self.sites) if site not in self._skipped]
        self._end_of_undoable = _end_of_undoable(program, ranks)
        self._can_roll_back = undoes and program.alone
        self._peers_stay_unaware = (
            program.communicates and not program.commits and not self._can_roll_back
        )
        self.must_roll_back: bool = False
        self._runs_first = device.type == "cuda" and program.communicates and not program.alone
        self._device_waits = device_waits
        self._graphs: Graphs | None = None
        if program.graphs is not None and device.type == "cuda":
            plain = [self._prepare(site) for site in self.sites]  # a graph records no events
            tables = self.values, table
            commit = self._device_commit
            self._graphs = Graphs(program, self._order, plain, *tables, commit, self._pack)
        self._stamps: Stamps | None = None  # for timed runs
        self._stamped: list[Step] = []
        # of the current run
        self._running = self._steps
        self._keeps_outputs = False
        self._poisoned_ranks: set[int] = set()
        self._faults: list[Fault] = []

    def run(
        self,
        inputs: Inputs,
        counter: memoryview | None = None,
        *,
        timed: bool = False,
        keeps: bool = False,
    ) -> Results | UndoneRun | DeferredRun:
        """Run all steps, and return the outputs of each rank, `UndoneRun`, or `DeferredRun`.

        ``counter[0]`` is always the position of the current step. ``timed``: add the timings of
        `Stamps` to the outputs. ``keeps``: some outputs stay in the table for later runs.
        """
        ranks = tuple(inputs)
        if self._runs_first:
            self._runs_first = False
            with local_execution():
                use_once(self.program, self._built, self._table, inputs, self._device)
        self.begin(inputs, self._timed_steps() if timed else None, keeps=keeps)
        if counter is None:
            counter = memoryview(bytearray(8)).cast("q")
        if self._graphs is None or timed:
            self._run_steps(self._order, counter)
        else:
            self._run_parts(self._graphs, counter)
        results = self.finish(ranks)
        if timed and self._stamps is not None and not isinstance(results, UndoneRun):
            by_rank = results.results if isinstance(results, DeferredRun) else results
            for rank, outputs in by_rank.items():
                outputs |= self._stamps.outputs_of(rank)
        return results

    def _timed_steps(self) -> list[Step]:
        """Return the steps that record times. They are created for the first timed run."""
        if self._stamps is None:
            functions = {name: self._functions[name] for name in self._built}
            stamps = self._stamps = Stamps(functions, self._device)
            for site, step in zip(self.sites, self._steps, strict=True):
                if isinstance(call := instruction_at(self.program, site), Call):
                    step = self._prepare_call(site, call, stamps.built[call.fn])
                self._stamped.append(stamps.timed(site, step))
        self._stamps.begin()
        return self._stamped

    def begin(
        self, inputs: Inputs, steps: list[Step] | None = None, *, keeps: bool = False
    ) -> None:
        """Begin a run; `step` and `finish` follow. ``steps``: replace the usual ones."""
        self._running = self._steps if steps is None else steps
        self._keeps_outputs = keeps
        self._poisoned_ranks, self._faults, self.must_roll_back = set(), [], False
        if self._device_commit is not None:
            self._device_commit.begin()
        for rank, values in inputs.items():
            for name in tuple(values):
                value = self.values[rank, name] = values.pop(name)
                if isinstance(value, Poisoned):
                    if keeps and self._peers_stay_unaware:
                        raise TaskError(value.failure)
                    self._faults.append(Fault(None, TaskError(value.failure)))
                    self._poison(rank)

    def step(self, position: int) -> None:
        if self.sites[position] not in self._skipped:
            self._run_steps((position,), memoryview(bytearray(8)).cast("q"))

    def _run_steps(self, positions: Sequence[int], counter: memoryview) -> None:
        """Run the steps at these positions. After a failure, continue with a poisoned rank."""
        index, end = 0, len(positions)
        with local_execution(self._device):
            while index < end:
                running = self._running  # replaced when a rank is poisoned
                try:
                    while index < end:
                        position = counter[0] = positions[index]
                        if noted:
                            self._handle_signal(position)
                        running[position]()
                        index += 1
                except BaseException as error:
                    self._handle_failure(positions[index], error)

    def _run_parts(self, graphs: Graphs, counter: memoryview) -> None:
        """Run all steps, as CUDA graphs where possible: not in the first run with the state at its
        addresses, after a failure, or if a signal must be handled."""
        graphs.begin()
        for part in graphs.parts:
            graph, first = part.graph, part.positions[0]
            if graph is None:
                self._run_steps(part.positions, counter)
            elif not graphs.are_warm or graph.is_given_up or self._poisoned_ranks or noted:
                graph.record_reads()
                self._run_steps(part.positions, counter)
            else:
                counter[0] = first
                run = partial(graph.run, counter)
                if self._device_waits is not None and part.waits:
                    run = self._device_waits.recorded(first, run)
                try:
                    with local_execution(self._device):
                        run()
                except Exception as error:
                    fault = self._error(counter[0], error, lost_device(self._device, error))
                    fault.add_note(
                        "This instruction cannot be part of a CUDA graph. "
                        "Fix: dt.launch(..., graphs=False)"
                    )
                    raise fault from error
        if not self._poisoned_ranks:
            graphs.end()

    def _handle_signal(self, position: int) -> None:
        """Run the handler of a pending signal, if the run can still be undone at this position."""
        rank, index = self.sites[position]
        undoes = not (
            self._can_roll_back
            or (self._peers_stay_unaware and self._keeps_outputs)
            or self._poisoned_ranks
        )
        if undoes and index < self._end_of_undoable[rank]:
            try:
                act()
            except BaseException as error:
                keep(error)
                raise CutShort(reason_of(error)) from None

    def _handle_failure(self, position: int, error: BaseException) -> None:
        """Poison the rank, which then repeats its step as a poisoned rank, or raise the error if
        the run cannot be undone."""
        if interrupts(error):
            raise error
        rank, index = self.sites[position]
        if not isinstance(error, OthersFailed):
            instruction = instruction_at(self.program, (rank, index))
            device_error = lost_device(self._device, error)
            is_user_fault = isinstance(error, Undeclared | CutShort) or (
                isinstance(instruction, Call) and device_error is None
            )
            leaks = self._peers_stay_unaware and self._keeps_outputs
            must_roll_back = (
                leaks or rank in self._poisoned_ranks or index >= self._end_of_undoable[rank]
            )
            fault = self._error(position, error, device_error)
            if not is_user_fault or (must_roll_back and not self._can_roll_back):
                raise fault from fault.__cause__
            self._faults.append(Fault((rank, index), fault))
            if must_roll_back:  # all ranks are here, and the results of none are needed
                self.must_roll_back = True
                for other in {site[0] for site in self.sites} - self._poisoned_ranks - {rank}:
                    self._poison(other)
        self._poison(rank)

    def _poison(self, rank: int) -> None:
        """Replace the steps of a rank by the steps of `_prepare_poisoned`."""
        self._poisoned_ranks.add(rank)
        self._running = [
            self._prepare_poisoned(site, step) if site[0] == rank else step
            for site, step in zip(self.sites, self._running, strict=True)
        ]

    def abandon(self) -> None:
        """Drop the current run without finishing it."""
        self.values.clear()
        self._pending.clear()
        self._running, self._poisoned_ranks, self._faults, self.must_roll_back = (
            self._steps,
            set(),
            [],
            False,
        )

    def finish(self, ranks: Sequence[int]) -> Results | UndoneRun | DeferredRun:
        """Return the outputs of these ranks, `UndoneRun` or `DeferredRun`. Drops all values except
        state."""
        deferred, faults = self._device_commit, self._faults
        if self._poisoned_ranks:
            self.values.clear()
            self._running, self._faults = self._steps, []
            return deferred.finish({}, faults) if deferred else UndoneRun(tuple(faults))
        results = {rank: self._outputs(rank) for rank in ranks}
        for rank in ranks:
            rank_program = self.program.ranks[rank]
            for name in (*rank_program.inputs, *rank_program.outputs):
                self.values.pop((rank, name), None)
        return results if deferred is None else deferred.finish(results, ())

    @property
    def is_deferred(self) -> bool:
        """Whether only the device knows if a run is undone."""
        return self._device_commit is not None

    def _outputs(self, rank: int) -> dict[str, object]:
        places = {name: self._place(rank, name) for name in self.program.ranks[rank].outputs}
        return {name: table[key] for name, (table, key) in places.items()}

    def _pack(self) -> None:
        """Pack the small results of a run whose steps are all captured."""
        if self._device_commit is not None:
            self._device_commit.pack({rank: self._outputs(rank) for rank in self.program.ranks})

    def outcome(self, run: DeferredRun) -> UndoneRun | None:
        """Return the record of a deferred run that was undone, None if it was committed. ``run``:
        with its rows and its predicate in the host's memory."""
        if self._device_commit is None or not (run.faults or run.skip.item()):
            return None
        faults: list[Fault] = []
        for site, error, line in self._device_commit.faults(run.rows):
            failure = describe(self.program, site, reason_of(error), line=line)
            failure = replace(failure, raised=RemoteException(error))
            faults.append(Fault(site, TaskError(failure)))
        faults += run.faults  # a call that raised made its checks before
        position = {site: at for at, site in enumerate(self.sites)}
        faults.sort(key=lambda fault: -1 if fault.site is None else position[fault.site])
        return UndoneRun(tuple(faults))

    def close(self) -> None:
        """Unload the program."""
        if self._graphs is not None:
            self._graphs.close()
        self._prepared.close()

    def _place(self, rank: int, name: str) -> Place:
        key = (rank, name)
        return (self._table if key in self._state else self.values), key

    def _prepare(self, site: Site) -> Step:
        """Return the function that executes an instruction in each run."""
        rank, _ = site
        instruction = instruction_at(self.program, site)
        match instruction:
            case Call():
                return self._prepare_call(site, instruction, self._built[instruction.fn])
            case Send() | Recv() | Collective():
                return self._prepare_start(site, instruction)
            case Wait():
                return self._prepare_wait(site)
            case Free(values=values):
                local_values, keys = self.values, [(rank, value) for value in values]

                def free() -> None:
                    for key in keys:  # a poisoned rank lacks some of them
                        local_values.pop(key, None)

                return free
            case Vote() | Commit(predicate=str()) if self._device_commit is not None:
                return self._prepare_deferred(rank, instruction, self._device_commit)
            case Vote(value=value):
                table, key = self._place(rank, value)
                word = torch.zeros((), device=self._device)

                def vote() -> None:
                    table[key] = word

                return vote
            case Commit(value=value):
                table, key = self._place(rank, value)
                alone = self.program.alone

                def commit() -> None:
                    if self._poisoned_ranks if alone else table[key]:
                        raise OthersFailed

                return commit
            case _:
                assert_never(instruction)

    def _prepare_poisoned(self, site: Site, step: Step) -> Step:
        """Return the step of a poisoned rank: it calls nothing, ignores the sum of votes, votes 1,
        and sends zeros for missing values."""
        rank, _ = site
        instruction = instruction_at(self.program, site)
        match instruction:
            case Vote() | Commit(predicate=str()) if self._device_commit is not None:
                return self._prepare_deferred(rank, instruction, self._device_commit, failed=True)
            case Call() | Commit():
                return _do_nothing
            case Vote(value=value):
                table, key = self._place(rank, value)
                word = torch.ones((), device=self._device)

                def vote() -> None:
                    table[key] = word

                return vote
            case Send() | Collective() if site not in self._skipped:
                return self._prepare_start(site, instruction, poisoned=True)
            case Send() | Collective() | Recv() | Wait() | Free():
                return step
            case _:
                assert_never(instruction)

    def _prepare_deferred(
        self, rank: int, instruction: Vote | Commit, device: DeviceCommit, *, failed: bool = False
    ) -> Step:
        """Return the step of a vote or a commit that the host does not read. ``failed``: of a
        poisoned rank."""
        table, key = self._place(rank, instruction.outputs[0])
        inputs = [self._place(rank, value) for value in instruction.inputs]
        if isinstance(instruction, Vote):

            def vote() -> None:
                rows = [values.get(row) for values, row in inputs]
                table[key] = device.vote(rank, rows, failed=failed)

            return vote
        ((words, word),), alone = inputs, self.program.alone

        def commit() -> None:
            table[key] = device.predicate(None if alone else cast(torch.Tensor, words[word]))

        return commit

    def _vote_sums(self) -> frozenset[Site]:
        """Return the collectives that sum only votes, and their waits. They are skipped if one host
        has all ranks of the program."""
        sites: set[Site] = set()
        vote_values: set[tuple[int, str]] = set()
        for site in self.sites:
            rank, index = site
            match instruction_at(self.program, site):
                case Vote(value=value):
                    vote_values.add((rank, value))
                case Collective(inputs=inputs, outputs=outputs):
                    if inputs and all((rank, name) in vote_values for name in inputs):
                        sites.add(site)
                        vote_values.update((rank, name) for name in outputs)
                case Wait():
                    starts = self._waits[rank][index]
                    if starts and all((rank, start) in sites for start in starts):
                        sites.add(site)
                case Call() | Send() | Recv() | Free() | Commit():
                    pass
        return frozenset(sites)

    def _prepare_call(self, site: Site, call: Call, fn: Built) -> Step:
        """Return the step of a call: it reads the inputs, calls ``fn``, and stores the outputs."""
        rank, _ = site
        inputs = [self._place(rank, value) for value in call.inputs]
        outputs = [self._place(rank, value) for value in call.outputs]
        if (boxed := getattr(fn, "boxed", None)) is not None:
            fn, inputs = self._handing_over(site, call, boxed), []

        def run() -> None:
            """Call the function, and store its results."""
            results = fn(*[table[key] for table, key in inputs])
            if len(results) != len(outputs):
                raise ValueError(
                    f"Function {call.fn!r} returned {len(results)} values for "
                    f"{len(outputs)} outputs."
                )
            for (table, key), result in zip(outputs, results):
                table[key] = result

        return run

    def _handing_over(self, site: Site, call: Call, boxed: Callable[..., Any]) -> Built:
        """Return a function that calls a boxed function with the call's inputs. Inputs that the
        next instruction frees leave the table before, so that the function holds the last
        reference."""
        rank, index = site
        after = self.program.ranks[rank].instructions[index + 1 : index + 2]
        freed = {name for free in after if isinstance(free, Free) for name in free.values}
        reads = [
            (
                table.pop
                if name in freed and name not in call.inputs[at + 1 :]
                else table.__getitem__,
                key,
            )
            for at, name in enumerate(call.inputs)
            for table, key in [self._place(rank, name)]
        ]
        return lambda: boxed([read(key) for read, key in reads])

    def _prepare_start(self, site: Site, start: Start, *, poisoned: bool = False) -> Step:
        """Return the step of a start. ``poisoned``: it sends zeros for missing values."""
        rank, _ = site
        begin, pending = self._prepared.begins[site], self._pending
        checked = self._value_or_zeros if poisoned else check_value
        match start:
            case Send(value=name, buffer=buffer):
                read = [(name, buffer)]
            case Recv():
                read = []
            case Collective(sizes=Sizes() as sizes):
                return self._prepare_sized(site, start, sizes, poisoned=poisoned)
            case Collective(inputs=names, in_buffers=buffers):
                read = list(zip(names, buffers))
            case _:
                assert_never(start)
        declared_inputs = [(*self._place(rank, name), buffer, name) for name, buffer in read]

        def run() -> None:
            pending[site] = begin(
                [checked(table.get(key), b, name) for table, key, b, name in declared_inputs]
            )

        return run

    def _prepare_sized(
        self, site: Site, start: Collective, sizes: Sizes, *, poisoned: bool
    ) -> Step:
        """Return the step of a sized collective. Each piece must have the length that the counts
        promise, within its bound. ``poisoned``: the rank sends zeros of these lengths."""
        rank, _ = site
        begin, pending = self._prepared.begins[site], self._pending
        me = start.group.index(rank)
        counts = [self._place(rank, name) for name in sizes.counts]
        pieces = [self._place(rank, name) for name in start.inputs]

        def run() -> None:
            """Compute all lengths, and start with the pieces of this rank."""
            vectors = [cast(_Vector, table[key]).tolist() for table, key in counts]
            lengths = sizes.lengths(vectors)
            received = [sent[me] for sent in lengths]
            values = [table.get(key) for table, key in pieces]
            if poisoned or sizes.exceeded(vectors):
                buffers = map(Buffer.with_rows, start.in_buffers, lengths[me])
                checked = list(map(self._value_or_zeros, values, buffers, start.inputs))
            else:
                checked = list(map(check_value, values, start.in_buffers, start.inputs))
                check_rows(start, checked, lengths[me], received)
            pending[site] = begin(checked, received)

        return run

    def _value_or_zeros(self, value: object, buffer: Buffer, name: str) -> torch.Tensor:
        """Return the value, or zeros of the declared shape if it is missing. (Zeros are valid
        indices for any receiver.)"""
        if isinstance(value, torch.Tensor) and buffer.accepts(value):
            return value
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=self._device)

    def _prepare_wait(self, site: Site) -> Step:
        """Return the step of a wait: it stores the outputs of the starts that it completes."""
        rank, index = site
        pending, instructions = self._pending, self.program.ranks[rank].instructions
        completed = [
            (
                (rank, start),
                [self._place(rank, n) for n in instructions[start].outputs],
                self._device.type != "cpu" and _on_host(instructions[start]),
            )
            for start in self._waits[rank][index]
            if (rank, start) not in self._skipped
        ]

        def wait() -> None:
            for start, places, copies_to_host in completed:
                values = pending.pop(start).wait()
                if copies_to_host:
                    values = torch.stack(values).cpu().unbind()
                for (table, key), value in zip(places, values):
                    table[key] = value

        return wait

    def _error(
        self, position: int, error: BaseException, device_error: BaseException | None = None
    ) -> DaftError:
        """Return daft's error for an exception. ``device_error``: see `lost_device`."""
        site = self.sites[position]
        if isinstance(error, CutShort):
            return RunInterrupted(describe(self.program, site, str(error)))
        instruction = instruction_at(self.program, site)
        kind, line = CommunicationError, None
        if isinstance(instruction, Call):
            kind, line = TaskError, self._functions[instruction.fn].user_line(error)
        reason = reason_of(error)
        if device_error is not None and device_error is not error:
            reason += f"\nThis process can use {self._device} no more: {reason_of(device_error)}"
        failure = describe(self.program, site, reason, line=line)
        return kind(replace(failure, raised=RemoteException(shortened(error))))


def _do_nothing() -> None:
    pass


def _on_host(instruction: Instruction) -> bool:
    return isinstance(instruction, Collective) and instruction.on_host


def _end_of_undoable(program: HostProgram, ranks: Sequence[int]) -> dict[int, int]:
    """Return, for each rank, the index of the first instruction whose failure cannot be undone."""
    lists = {rank: program.ranks[rank].instructions for rank in ranks}
    if not program.commits:
        return {
            rank: len(instructions) if program.undoable else 0
            for rank, instructions in lists.items()
        }
    return {
        rank: next((i for i, x in enumerate(instructions) if isinstance(x, Vote)), 0)
        for rank, instructions in lists.items()
    }
