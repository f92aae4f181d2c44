"""Runs one host's list over a table of values: the same in every backend and in both modes.

    table = {(0, "w"): ...}                                # (rank, name) -> value
    engine = Engine(program, sites, table, transport)      # sites: the host's list, `Report.lists`
    results = engine.run({0: {"x": x}})                    # {rank: {output: value}}

`begin`, `step` for each position, `finish` do the same, one instruction at a time.

Invariants: the program is verified, so no step looks for what is not there. Of the table it
touches its state alone: all other values of a run are its own (`values`), so that programs on the
same ranks may use the same names. Functions are built once. Steps run under `no_grad` with one
kernel thread. `Free`, `finish` and overwriting drop the reference and no other is kept. What a
`Call` raises becomes a `TaskError`, what a transfer raises a `CommunicationError`, both with the
user's line.

It does not copy inputs or outputs, and after an error the values are left as they are: the cluster
that owns the table does both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias, assert_never

import torch

from dtensor.daft.errors import CommunicationError, DaftError, Failure, TaskError
from dtensor.daft.ir.instructions import (
    Call,
    Collective,
    Free,
    Recv,
    Send,
    Start,
    Wait,
    key_of,
    outputs_of,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.ir.text import excerpt
from dtensor.daft.run.transport import Pending, Transport, check_value
from dtensor.daft.verification.pairing import Site, instruction_at, starts_of_waits

TIMES = "daft.times"
"""Output of a timed run: for each instruction of the rank (its index, begin, end), in seconds of
the host's monotonic clock."""

Table: TypeAlias = dict[tuple[int, str], object]
Place: TypeAlias = tuple[Table, tuple[int, str]]
"""Where a value is: the table that it is in, and its key there."""
Inputs: TypeAlias = dict[int, dict[str, object]]
"""Values fed to each rank. A run takes them out, so that `Free` drops the last reference."""
Step: TypeAlias = Callable[[], None]
Times: TypeAlias = dict[int, list[tuple[int, float, float]]]
"""By rank, (index, begin, end) of its instructions."""


class Engine:
    def __init__(
        self, program: Program, sites: Sequence[Site], table: Table, transport: Transport
    ) -> None:
        self.program = program
        self.sites = tuple(sites)
        self.values: Table = {}  # of the run: all but state
        self._table = table
        self._transport = transport
        self._state = frozenset(
            (rank, name) for rank, own in enumerate(program.ranks) for name in own.state
        )
        self._pending: dict[Site, Pending] = {}
        self._functions = dict(program.functions)
        needed = {i.fn for s in sites if isinstance(i := instruction_at(program, s), Call)}
        self._built = {name: self._functions[name].build() for name in sorted(needed)}
        ranks = sorted({rank for rank, _ in sites})
        self._waits = {rank: starts_of_waits(program.ranks[rank].instructions) for rank in ranks}
        self._steps = [self._prepare(site) for site in self.sites]

    def run(
        self, inputs: Inputs, counter: memoryview | None = None, *, timed: bool = False
    ) -> dict[int, dict[str, object]]:
        """Run all steps; `counter[0]` (if given) is always the position of the current one.

        ``timed``: the results have `TIMES` too.
        """
        ranks = tuple(inputs)
        self.begin(inputs)
        if counter is None:
            counter = memoryview(bytearray(8)).cast("q")
        counter[0] = 0
        times: Times = {rank: [] for rank in ranks}
        steps = [*map(timing(times), self.sites, self._steps)] if timed else self._steps
        with local_execution():
            try:
                for position, step in enumerate(steps):
                    counter[0] = position
                    step()
            except Exception as error:
                raise self._error(counter[0], error) from error
        results = self.finish(ranks)
        for rank in ranks if timed else ():
            results[rank][TIMES] = times[rank]
        return results

    def begin(self, inputs: Inputs) -> None:
        for rank, values in inputs.items():
            for name in tuple(values):
                self.values[rank, name] = values.pop(name)

    def step(self, position: int) -> None:
        with local_execution():
            try:
                self._steps[position]()
            except Exception as error:
                raise self._error(position, error) from error

    def finish(self, ranks: Sequence[int]) -> dict[int, dict[str, object]]:
        """The outputs of these ranks; drops outputs and inputs, but no state."""
        results: dict[int, dict[str, object]] = {}
        for rank in ranks:
            own = self.program.ranks[rank]
            places = {name: self._place(rank, name) for name in own.outputs}
            results[rank] = {name: table[key] for name, (table, key) in places.items()}
            for name in (*own.inputs, *own.outputs):
                self.values.pop((rank, name), None)
        return results

    def _place(self, rank: int, name: str) -> Place:
        key = (rank, name)
        return (self._table if key in self._state else self.values), key

    def _prepare(self, site: Site) -> Step:
        rank, _ = site
        instruction = instruction_at(self.program, site)
        match instruction:
            case Call():
                return self._prepare_call(rank, instruction)
            case Send() | Recv() | Collective():
                return self._prepare_start(site, instruction)
            case Wait():
                return self._prepare_wait(site)
            case Free(values=values):
                own, keys = self.values, [(rank, value) for value in values]

                def free() -> None:
                    for key in keys:
                        del own[key]

                return free
            case _:
                assert_never(instruction)

    def _prepare_call(self, rank: int, call: Call) -> Step:
        fn = self._built[call.fn]
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

    def _prepare_start(self, site: Site, start: Start) -> Step:
        rank, _ = site
        transport, pending = self._transport, self._pending
        match start:
            case Send(value=name, buffer=buffer):
                table, key = self._place(rank, name)

                def run_send() -> None:
                    value = check_value(table[key], buffer, name)
                    pending[site] = transport.start_send(rank, start, value)

                return run_send
            case Recv():

                def run_recv() -> None:
                    pending[site] = transport.start_recv(rank, start)

                return run_recv
            case Collective():
                wanted = [
                    (*self._place(rank, n), b, n) for n, b in zip(start.inputs, start.in_buffers)
                ]

                def run_collective() -> None:
                    values = [check_value(table[key], b, name) for table, key, b, name in wanted]
                    pending[site] = transport.start_collective(rank, start, values)

                return run_collective
            case _:
                assert_never(start)

    def _prepare_wait(self, site: Site) -> Step:
        rank, index = site
        pending, instructions = self._pending, self.program.ranks[rank].instructions
        completed = [
            ((rank, start), [self._place(rank, n) for n in outputs_of(instructions[start])])
            for start in self._waits[rank][index]
        ]

        def wait() -> None:
            for start, places in completed:
                for (table, key), value in zip(places, pending.pop(start).wait()):
                    table[key] = value

        return wait

    def _error(self, position: int, error: Exception) -> DaftError:
        site = self.sites[position]
        instruction = instruction_at(self.program, site)
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(instruction, Call):
            return CommunicationError(describe(self.program, site, reason))
        function = self._functions[instruction.fn]
        line = function.user_line(error) or instruction.source
        return TaskError(describe(self.program, site, reason, line=line))


def timing(times: Times) -> Callable[[Site, Step], Step]:
    """Makes of a step one that notes when it began and ended."""

    def timed(site: Site, step: Step) -> Step:
        rank, index = site

        def run() -> None:
            begin = time.monotonic()
            step()
            times[rank].append((index, begin, time.monotonic()))

        return run

    return timed


def describe(program: Program, site: Site, reason: str, line: str | None = None) -> Failure:
    """The facts about an instruction; its user's line, or that of what it waits for."""
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
        stage=program.stage_of[rank],
        index=index,
        text=excerpt(instruction),
        label=next((i.label for i in concerned if i.label), ""),
        line=line or next((i.source for i in concerned if i.source), None),
        peers=tuple(peers),
        reason=reason,
    )


@contextmanager
def local_execution() -> Generator[None]:
    """No autograd, and no autocast of the caller, for programs have their own casts; one kernel
    thread: the number of threads changes the bits of a sum."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        with torch.no_grad(), ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
