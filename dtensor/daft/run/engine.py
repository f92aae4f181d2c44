"""Runs one host's list over a table of values: the same in every backend and in both modes.

    table = {(0, "w"): ...}                                # (rank, name) -> value
    engine = Engine(HostProgram.whole(program, sites), table, transport)
    results = engine.run({0: {"x": x}})                    # {rank: {output: value}}

`begin`, `step` for each position, `finish` do the same, one instruction at a time.

A `Call` that raises poisons its rank for the rest of the run, and does not end the run: the rank
continues through its list, calls nothing, and sends zeros of the declared shapes where it has no
value, so no rank waits for it. At the commit point all ranks learn of it and are poisoned too,
before any has written state. `run` then returns `UndoneRun`, and the next run finds all state
unchanged. That holds for programs with a commit point, and for those that write no state. In
others, and after a rank has voted, half-written state is lost, and the error is raised; so is any
error after which this process cannot use its GPU any more, for there all values are lost. But if
`undoes`, and all ranks of the program are here, all of them continue in the same way, and `late`
says that their writes must be undone (`worker.py`).

Invariants: the program is verified, so no step checks for missing values. In the table it changes
only its state: all other values of a run are its own (`values`), so that programs on the same ranks
may use the same names. Functions are built once. Steps run under `no_grad` with one kernel thread.
`Free`, `finish` and overwriting drop the reference and no other is kept. An exception of a `Call`
becomes a `TaskError`, one of a transfer a `CommunicationError`, both with the user's line; so does
a SystemExit, but no exception that is meant for the process (`remote_exceptions.py`). Where all
ranks of a program are here, they need no messages to agree: sums of votes alone are left out.

It does not copy inputs or outputs, and after an error the values stay as they are: the cluster that
owns the table does both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, assert_never

import torch

from dtensor.daft.errors import (
    CommunicationError,
    DaftError,
    Failure,
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
    Recv,
    Send,
    Start,
    Vote,
    Wait,
    key_of,
)
from dtensor.daft.ir.program import Built, Program
from dtensor.daft.ir.text import excerpt
from dtensor.daft.remote_exceptions import RemoteException, interrupts, reason_of
from dtensor.daft.run.first_uses import use_once
from dtensor.daft.run.timestamps import Stamps
from dtensor.daft.run.transport import Pending, Transport, Undeclared, check_value
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
"""The place of a value: its table, and its key there."""
Inputs: TypeAlias = dict[int, dict[str, object]]
"""Values fed to each rank. A run takes them out, so that `Free` drops the last reference."""
Step: TypeAlias = Callable[[], None]

CPU = torch.device("cpu")


class Engine:
    """`device`: of the ranks here, and of the zeros that they send in place of missing values.
    `number`: of the program, among those that its hosts load over this transport. `undoes`: the
    table's owner can restore it; `late`: it must, after the run that ended. `device_waits`: notes
    where the GPU waits."""

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
        self.program = program
        self.sites: tuple[Site, ...] = program.sites
        self.values: Table = {}  # of the run: all but state
        self._table = table
        # first: other hosts find this host's part, even if it fails later
        self._prepared = transport.prepare(program, number)
        self._device = device
        self._state = frozenset(
            (rank, name) for rank, own in program.ranks.items() for name in own.state
        )
        self._pending: dict[Site, Pending] = {}
        self._functions = dict(program.functions)
        self._built = {name: function.build() for name, function in program.functions}
        ranks = sorted({rank for rank, _ in program.sites})
        self._waits = {rank: starts_of_waits(program.ranks[rank].instructions) for rank in ranks}
        self._idle = self._sums_of_votes() if program.alone else frozenset[Site]()
        self._steps = [self._prepare(site) for site in self.sites]
        if device_waits is not None and not program.alone:
            for position, site in enumerate(self.sites):
                if isinstance(instruction_at(program, site), Wait) and site not in self._idle:
                    self._steps[position] = device_waits.noted(position, self._steps[position])
        self._order = [p for p, site in enumerate(self.sites) if site not in self._idle]
        self._undoable = _undoable(program, ranks)
        self._undoes = undoes and program.alone
        self._leaks = program.communicates and not program.commits and not self._undoes
        self.late: bool = False
        self._is_new = device.type == "cuda" and program.communicates and not program.alone
        self._stamps: Stamps | None = None  # of timed runs
        self._stamped: list[Step] = []
        # of the current run
        self._running = self._steps
        self._keeps = False
        self._spoiled: set[int] = set()
        self._faults: list[Fault] = []

    def run(
        self,
        inputs: Inputs,
        counter: memoryview | None = None,
        *,
        timed: bool = False,
        keeps: bool = False,
    ) -> dict[int, dict[str, object]] | UndoneRun:
        """Run all steps; `counter[0]` (if given) is always the position of the current one.

        ``timed``: the results have those of `Stamps` too. ``keeps``: some stay here for later runs.
        """
        ranks = tuple(inputs)
        if self._is_new:
            self._is_new = False
            with local_execution():
                use_once(self.program, self._built, self._table, inputs, self._device)
        self.begin(inputs, self._timed_steps() if timed else None, keeps=keeps)
        if counter is None:
            counter = memoryview(bytearray(8)).cast("q")
        self._go(self._order, counter)
        results = self.finish(ranks)
        if timed and self._stamps is not None and not isinstance(results, UndoneRun):
            for rank in ranks:
                results[rank] |= self._stamps.taken(rank)
        return results

    def _timed_steps(self) -> list[Step]:
        if self._stamps is None:
            functions = {name: self._functions[name] for name in self._built}
            stamps = self._stamps = Stamps(functions, self._device)
            for site, step in zip(self.sites, self._steps, strict=True):
                if isinstance(call := instruction_at(self.program, site), Call):
                    step = self._prepare_call(site[0], call, stamps.built[call.fn])
                self._stamped.append(stamps.timed(site, step))
        self._stamps.begin()
        return self._stamped

    def begin(
        self, inputs: Inputs, steps: list[Step] | None = None, *, keeps: bool = False
    ) -> None:
        self._running = self._steps if steps is None else steps
        self._keeps = keeps
        self._spoiled, self._faults, self.late = set(), [], False
        for rank, values in inputs.items():
            for name in tuple(values):
                value = self.values[rank, name] = values.pop(name)
                if isinstance(value, Poisoned):
                    if keeps and self._leaks:
                        raise TaskError(value.failure)
                    self._faults.append(Fault(None, TaskError(value.failure)))
                    self._poison(rank)

    def step(self, position: int) -> None:
        self._go((position,), memoryview(bytearray(8)).cast("q"))

    def _go(self, positions: Sequence[int], counter: memoryview) -> None:
        at, end = 0, len(positions)
        with local_execution(self._device):
            while at < end:
                running = self._running  # another list, once a rank is poisoned
                try:
                    while at < end:
                        position = counter[0] = positions[at]
                        if noted:
                            self._act(position)
                        running[position]()
                        at += 1
                except BaseException as error:
                    self._failed(positions[at], error)

    def _act(self, position: int) -> None:
        """Handle a signal here, where the run can still be undone."""
        rank, index = self.sites[position]
        undoes = not (self._undoes or (self._leaks and self._keeps) or self._spoiled)
        if undoes and index < self._undoable[rank]:
            try:
                act()
            except BaseException as error:
                keep(error)
                raise CutShort(reason_of(error)) from None

    def _failed(self, position: int, error: BaseException) -> None:
        """Poison the rank, and repeat its step here as that of a poisoned rank; or raise."""
        if interrupts(error):
            raise error
        rank, index = self.sites[position]
        if not isinstance(error, OthersFailed):
            instruction = instruction_at(self.program, (rank, index))
            lost = lost_device(self._device, error)
            ours = isinstance(error, Undeclared | CutShort) or (
                isinstance(instruction, Call) and lost is None
            )
            leaks = self._leaks and self._keeps
            late = leaks or rank in self._spoiled or index >= self._undoable[rank]
            fault = self._error(position, error, lost)
            if not ours or (late and not self._undoes):
                raise fault from fault.__cause__
            self._faults.append(Fault((rank, index), fault))
            if late:  # none of its results is needed
                self.late = True
                for other in {site[0] for site in self.sites} - self._spoiled - {rank}:
                    self._poison(other)
        self._poison(rank)

    def _poison(self, rank: int) -> None:
        self._spoiled.add(rank)
        self._running = [
            self._prepare_poisoned(site, step) if site[0] == rank else step
            for site, step in zip(self.sites, self._running, strict=True)
        ]

    def abandon(self) -> None:
        """The current run will not be ended."""
        self.values.clear()
        self._pending.clear()
        self._running, self._spoiled, self._faults, self.late = self._steps, set(), [], False

    def finish(self, ranks: Sequence[int]) -> dict[int, dict[str, object]] | UndoneRun:
        """The outputs of these ranks; drops outputs and inputs, but no state."""
        if self._spoiled:
            undone = UndoneRun(tuple(self._faults))
            self.values.clear()
            self._running, self._faults = self._steps, []
            return undone
        results: dict[int, dict[str, object]] = {}
        for rank in ranks:
            rank_program = self.program.ranks[rank]
            places = {name: self._place(rank, name) for name in rank_program.outputs}
            results[rank] = {name: table[key] for name, (table, key) in places.items()}
            for name in (*rank_program.inputs, *rank_program.outputs):
                self.values.pop((rank, name), None)
        return results

    def close(self) -> None:
        """The program is unloaded."""
        self._prepared.close()

    def _place(self, rank: int, name: str) -> Place:
        key = (rank, name)
        return (self._table if key in self._state else self.values), key

    def _prepare(self, site: Site) -> Step:
        rank, _ = site
        instruction = instruction_at(self.program, site)
        match instruction:
            case Call():
                return self._prepare_call(rank, instruction, self._built[instruction.fn])
            case Send() | Recv() | Collective():
                return self._prepare_start(site, instruction)
            case Wait():
                return self._prepare_wait(site)
            case Free(values=values):
                local_values, keys = self.values, [(rank, value) for value in values]

                def free() -> None:
                    for key in keys:  # a poisoned rank has not made all of them
                        local_values.pop(key, None)

                return free
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
                    if self._spoiled if alone else table[key]:
                        raise OthersFailed

                return commit
            case _:
                assert_never(instruction)

    def _prepare_poisoned(self, site: Site, step: Step) -> Step:
        """The step of a poisoned rank: everything except calls and reads of votes."""
        rank, _ = site
        instruction = instruction_at(self.program, site)
        match instruction:
            case Call() | Commit():
                return _nothing
            case Vote(value=value):
                table, key = self._place(rank, value)
                word = torch.ones((), device=self._device)

                def vote() -> None:
                    table[key] = word

                return vote
            case Send() | Collective() if site not in self._idle:
                return self._prepare_start(site, instruction, poisoned=True)
            case Send() | Collective() | Recv() | Wait() | Free():
                return step
            case _:
                assert_never(instruction)

    def _sums_of_votes(self) -> frozenset[Site]:
        """Collectives of only votes, and the waits for only them."""
        sites: set[Site] = set()
        words: set[tuple[int, str]] = set()
        for site in self.sites:
            rank, index = site
            match instruction_at(self.program, site):
                case Vote(value=value):
                    words.add((rank, value))
                case Collective(inputs=inputs, outputs=outputs):
                    if inputs and all((rank, name) in words for name in inputs):
                        sites.add(site)
                        words.update((rank, name) for name in outputs)
                case Wait():
                    starts = self._waits[rank][index]
                    if starts and all((rank, start) in sites for start in starts):
                        sites.add(site)
                case Call() | Send() | Recv() | Free() | Commit():
                    pass
        return frozenset(sites)

    def _prepare_call(self, rank: int, call: Call, fn: Built) -> Step:
        inputs = [self._place(rank, value) for value in call.inputs]
        outputs = [self._place(rank, value) for value in call.outputs]

        def run() -> None:
            results = fn(*[table[key] for table, key in inputs])
            if len(results) != len(outputs):
                raise ValueError(
                    f"Function {call.fn!r} returned {len(results)} values for "
                    f"{len(outputs)} outputs."
                )
            for (table, key), result in zip(outputs, results):
                table[key] = result

        return run

    def _prepare_start(self, site: Site, start: Start, *, poisoned: bool = False) -> Step:
        rank, _ = site
        begin, pending = self._prepared.begins[site], self._pending
        checked = self._or_zeros if poisoned else check_value
        match start:
            case Send(value=name, buffer=buffer):
                read = [(name, buffer)]
            case Recv():
                read = []
            case Collective(inputs=names, in_buffers=buffers):
                read = list(zip(names, buffers))
            case _:
                assert_never(start)
        wanted = [(*self._place(rank, name), buffer, name) for name, buffer in read]

        def run() -> None:
            pending[site] = begin(
                [checked(table.get(key), b, name) for table, key, b, name in wanted]
            )

        return run

    def _or_zeros(self, value: object, buffer: Buffer, name: str) -> torch.Tensor:
        """Zeros, for they are in range of every lookup of a receiver."""
        if isinstance(value, torch.Tensor) and buffer.accepts(value):
            return value
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=self._device)

    def _prepare_wait(self, site: Site) -> Step:
        rank, index = site
        pending, instructions = self._pending, self.program.ranks[rank].instructions
        completed = [
            ((rank, start), [self._place(rank, n) for n in instructions[start].outputs])
            for start in self._waits[rank][index]
            if (rank, start) not in self._idle
        ]

        def wait() -> None:
            for start, places in completed:
                for (table, key), value in zip(places, pending.pop(start).wait()):
                    table[key] = value

        return wait

    def _error(
        self, position: int, error: BaseException, lost: BaseException | None = None
    ) -> DaftError:
        site = self.sites[position]
        if isinstance(error, CutShort):
            return RunInterrupted(describe(self.program, site, str(error)))
        instruction = instruction_at(self.program, site)
        kind, line = CommunicationError, None
        if isinstance(instruction, Call):
            kind, line = TaskError, self._functions[instruction.fn].user_line(error)
        reason = reason_of(error)
        if lost is not None and lost is not error:
            reason += f"\nThis process can use {self._device} no more: {reason_of(lost)}"
        failure = describe(self.program, site, reason, line=line)
        return kind(replace(failure, raised=RemoteException(shortened(error))))


def lost_device(device: torch.device, error: BaseException) -> BaseException | None:
    """The error that ended this process's use of a GPU; None if it can use it still.

    Libraries raise errors of their own (cuBLAS and Triton a RuntimeError) where CUDA's context is
    lost, so it is asked; a query of a stream waits for nothing, and repeats an error that stays.
    """
    if isinstance(error, torch.AcceleratorError):
        return error
    if device.type == "cuda":
        try:
            torch.cuda.current_stream(device).query()
        except RuntimeError as found:
            return found
    return None


def _nothing() -> None:
    pass


def _undoable(program: HostProgram, ranks: Sequence[int]) -> dict[int, int]:
    """By rank, the index of the instruction from which on a failure cannot be undone."""
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


def describe(
    program: Program | HostProgram, site: Site, reason: str, line: str | None = None
) -> Failure:
    """The facts about an instruction; its user's line, or the line of the message that it waits
    for."""
    rank, index = site
    instructions = program.ranks[rank].instructions
    instruction = instructions[index]
    concerned = [instruction]
    if isinstance(instruction, Wait):
        concerned += [instructions[s] for s in starts_of_waits(instructions)[index]]
    starts = [i for i in concerned if isinstance(i, Send | Recv | Collective)]
    peers = sorted({peer for start in starts for peer in key_of(rank, start)[0]} - {rank})
    return Failure(
        rank=rank,
        known_as=program.known_as[rank] if program.known_as else "",
        stage=program.stage_of[rank],
        index=index,
        text=excerpt(instruction),
        label=next((str(i.label) for i in concerned if i.label is not None), ""),
        line=line or next((i.source for i in concerned if i.source), None),
        peers=tuple(peers),
        reason=reason,
    )


@contextmanager
def local_execution(device: torch.device = CPU) -> Generator[None]:
    """No autograd, and no autocast from the caller, for programs have their own casts; one kernel
    thread: the number of threads changes the bits of a sum; a GPU with a number is the current one,
    for Triton launches there, and each thread has its own."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
                stack.enter_context(torch.cuda.device(device))
            yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
