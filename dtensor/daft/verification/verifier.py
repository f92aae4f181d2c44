"""The verifier: no verified program can hang, use a value that is not there, or leak one.

    report = verify(program)          # or with hosts=((0, 1), (2, 3)): two ranks to an actor
    report.peak_bytes                 # most bytes alive at once, per rank

It raises `ProgramError` for the first fault, with the instruction, the user's line and a fix:

- values: used before their definition or before the `Wait` of what makes them, used after `Free`,
  defined twice, written or freed while a start still reads them, never freed, never waited for;
- partners: a start without one; members of a collective that disagree on kind, op, shape, dtype;
- order: waits that form a circle, in the lists as the actors run them (see `pairing.py`).

It is pure. It assumes that each `Call` ends, that its function makes what it declares, and that
`nbytes` tells the truth: values whose size is not declared count as nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import assert_never

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import (
    Buffer,
    Call,
    Collective,
    Free,
    Recv,
    Send,
    Start,
    Wait,
    inputs_of,
    outputs_of,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.verification.agreement import check_agreement
from dtensor.daft.verification.merge import Hosts, merge_sites
from dtensor.daft.verification.pairing import (
    Site,
    explain_hang,
    instruction_at,
    pair,
    show_site,
    simulate,
    wait_edges,
)


@dataclass(frozen=True, slots=True)
class Report:
    """`peak_bytes[rank]`: the most bytes of declared values alive at once.

    `lists[host]`: the sites (rank, index) in the order in which the host's thread runs them.
    """

    peak_bytes: tuple[int, ...]
    lists: tuple[tuple[Site, ...], ...] = field(repr=False)


def verify(program: Program, hosts: Hosts | None = None, seed: int = 0) -> Report:
    """Check a program as `hosts` run it (default: one rank to a host), merged with `seed`."""
    if hosts is None:
        hosts = tuple((rank,) for rank in range(program.size))
    peaks = tuple(_RankCheck(program, rank).run() for rank in range(program.size))
    partners = pair(program)
    check_agreement(program, partners)
    lists = merge_sites(program, hosts, seed)
    edges = wait_edges(program, partners)
    trace = simulate(lists, edges)
    if trace.blocked:
        raise explain_hang(program, lists, edges, trace)
    return Report(peaks, lists)


class _RankCheck:
    """The data flow of one rank's list."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.functions = dict(program.functions)
        own = program.ranks[rank]
        self.own = own
        self.index = 0
        self.sizes = dict(own.nbytes)
        self.live: set[str] = set(own.inputs) | set(own.state)
        if len(self.live) != len(own.inputs) + len(own.state):
            raise ProgramError(
                f"Rank {rank} of program {program.name!r} names a value twice among its inputs "
                f"{own.inputs} and state {own.state}."
            )
        self.freed: set[str] = set()
        self.making: dict[str, int] = {}  # value -> the start that makes it
        self.reading: dict[str, set[int]] = defaultdict(set)  # value -> starts that read it
        self.started: set[str] = set()  # values that some start has named
        self.bytes = sum(self.sizes.get(value, 0) for value in self.live)

    def run(self) -> int:
        peak = self.bytes
        for index, instruction in enumerate(self.own.instructions):
            self.index = index
            match instruction:
                case Call():
                    self._call(instruction)
                case Send() | Recv() | Collective():
                    self._start(instruction)
                case Wait():
                    for value in instruction.values:
                        self._wait(value)
                case Free():
                    for value in instruction.values:
                        self._free(value)
                case _:
                    assert_never(instruction)
            peak = max(peak, self.bytes)
        self._end()
        return peak

    def _call(self, call: Call) -> None:
        if call.fn not in self.functions:
            raise self._fault(
                f"there is no function {call.fn!r}", f"one of {sorted(self.functions)}"
            )
        for value in call.inputs:
            self._use(value)
        for value in call.writes:
            if value not in call.inputs:
                raise self._fault(
                    f"{value!r} is written but is no input", "pass it to the function"
                )
            self._not_read(value, "written")
        for value in call.outputs:
            self._define(value, self.sizes.get(value, 0))

    def _start(self, start: Start) -> None:
        peers = _members(self.rank, start)
        if len(set(peers)) != len(peers) or not set(peers) <= set(range(self.program.size)):
            raise self._fault(
                f"the ranks {peers} are not distinct ranks of 0..{self.program.size - 1}",
                "name each rank once",
            )
        if self.rank not in peers:
            raise self._fault(f"rank {self.rank} is not in {peers}", "add it to the group")
        reads, makes = _touches(start)
        for value in reads:
            self._use(value)
        for value, buffer in makes:
            if not buffer.variable:
                self.sizes[value] = buffer.nbytes
            self._define(value, self.sizes.get(value, 0))
            self.making[value] = self.index
        for value in reads:
            self.reading[value].add(self.index)
        if isinstance(start, Send):
            self.started.add(start.value)
        self.started |= {value for value, _ in makes}

    def _wait(self, value: str) -> None:
        # A collective's own inputs are read until it ends, but it is named by its outputs.
        starts = {
            index for index in self.reading[value] if isinstance(self.own.instructions[index], Send)
        }
        if value in self.making:
            starts.add(self.making[value])
        if not starts and value not in self.started:
            raise self._fault(
                f"nothing was started that makes or sends {value!r}",
                "wait for a sent value, a received one, or an output of a collective",
            )
        for index in starts:
            start = self.own.instructions[index]
            assert isinstance(start, Send | Recv | Collective)
            reads, makes = _touches(start)
            for name, _ in makes:
                self.making.pop(name, None)
            for name in reads:
                self.reading[name].discard(index)

    def _free(self, value: str) -> None:
        self._use(value)
        self._not_read(value, "freed")
        if value in self.own.state:
            raise self._fault(f"{value!r} is state, which outlives the run", "do not free it")
        self.live.discard(value)
        self.freed.add(value)
        self.started.discard(value)
        self.bytes -= self.sizes.get(value, 0)

    def _use(self, value: str) -> None:
        if value in self.making:
            start = show_site(self.program, (self.rank, self.making[value]))
            raise self._fault(
                f"{value!r} is used before the wait for {start}", f"wait {value} before this"
            )
        if value in self.freed:
            raise self._fault(f"{value!r} is used after its free", "free it later")
        if value not in self.live:
            raise self._fault(
                f"{value!r} is not defined here",
                "define it before, or name it in the rank's inputs or state",
            )

    def _not_read(self, value: str, done: str) -> None:
        if self.reading[value]:
            start = show_site(self.program, (self.rank, min(self.reading[value])))
            raise self._fault(f"{value!r} is {done} while {start} reads it", "wait before this")

    def _define(self, value: str, size: int) -> None:
        if value in self.live:
            if value not in self.own.state:
                raise self._fault(f"{value!r} is defined twice", "free it first or rename it")
            self._not_read(value, "overwritten")
            if value in self.making:
                raise self._fault(f"{value!r} is overwritten before its wait", "wait before this")
            return
        self.live.add(value)
        self.freed.discard(value)
        self.bytes += size

    def _end(self) -> None:
        pending = set(self.making.values()).union(*self.reading.values())
        if pending:
            self.index = min(pending)
            raise self._fault("it is never waited for", "add a wait")
        own = self.own
        missing = [value for value in own.outputs if value not in self.live]
        if missing:
            raise ProgramError(
                f"Program {self.program.name!r}, rank {self.rank}: the outputs {missing} are not "
                f"there at the end.\n  Fix: define them, and do not free them."
            )
        leaked = sorted(self.live - {*own.inputs, *own.outputs, *own.state})
        if leaked:
            raise ProgramError(
                f"Program {self.program.name!r}, rank {self.rank}: {leaked} are never freed.\n"
                f"  Fix: free them after their last use."
            )

    def _fault(self, fact: str, fix: str) -> ProgramError:
        site = (self.rank, self.index)
        source = instruction_at(self.program, site).source
        return ProgramError(
            f"Program {self.program.name!r}, {show_site(self.program, site)}: {fact}.\n"
            + (f"  at {source}\n" if source else "")
            + f"  Fix: {fix}."
        )


def _members(rank: int, start: Start) -> tuple[int, ...]:
    match start:
        case Send():
            return (rank, start.to)
        case Recv():
            return (start.source_rank, rank)
        case Collective():
            return start.group
        case _:
            assert_never(start)


def _touches(start: Start) -> tuple[tuple[str, ...], tuple[tuple[str, Buffer], ...]]:
    """The values that a start reads, and those that it makes."""
    match start:
        case Send():
            buffers = ()
        case Recv():
            buffers = (start.buffer,)
        case Collective():
            buffers = start.out_buffers
        case _:
            assert_never(start)
    return inputs_of(start), tuple(zip(outputs_of(start), buffers))
