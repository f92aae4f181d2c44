"""The verifier: no verified program can hang, use a value that is not there, or leak one.

    report = verify(program)          # or with hosts=((0, 1), (2, 3)): two ranks to an actor
    report.peak_bytes                 # most bytes alive at once, per rank

It raises `ProgramError` for the first fault, with the instruction, the user's line and a fix:

- values: used before their definition or before the `Wait` of what makes them, used after `Free`,
  defined twice, written or freed while a start still reads them, never freed, never waited for;
- partners: a start without one; members of a collective that disagree on kind, op, shape, dtype;
- lent values that are not freed before more is started with their key;
- order: waits that form a circle, in the lists as the actors run them (see `pairing.py`);
- storage: a write in place to what a value shares storage with, where that is read later, is being
  sent, or is returned;
- the commit point, in programs that have one: all ranks have one, it reads the sum of all their
  votes, no rank calls anything between its vote and its commit point, and none writes state before
  that is not replayable.

It is pure. It assumes that each `Call` ends, that its function makes what it declares, and that
`nbytes` and `shares` tell the truth: values whose size is not declared count as nothing, and those
that are not said to share storage have their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import assert_never

import torch

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Key,
    Op,
    Recv,
    Send,
    Start,
    Vote,
    Wait,
    key_of,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.ir.text import format_instruction
from dtensor.daft.verification.commit import check_commit
from dtensor.daft.verification.pairing import (
    Edges,
    Hosts,
    Site,
    fault,
    instruction_at,
    merge_sites,
    pair,
    rehearse,
    show_site,
    starts_of_waits,
    wait_edges,
)
from dtensor.numerics import REDUCTIONS


@dataclass(frozen=True, slots=True)
class Report:
    """`peak_bytes[rank]`: the most bytes of declared values alive at once.

    `lists[host]`: the sites (rank, index) in the order in which the host's thread runs them.
    """

    peak_bytes: tuple[int, ...]
    lists: tuple[tuple[Site, ...], ...] = field(repr=False)


def verify(program: Program, hosts: Hosts | None = None, seed: int = 0) -> Report:
    """Check a program as `hosts` run it (default: one rank to a host), merged with `seed`.

    Raises `ProgramError` for one that is malformed, could hang or leaks, with who waits for whom.
    """
    if hosts is None:
        hosts = tuple((rank,) for rank in range(program.size))
    peaks = tuple(_RankCheck(program, rank).run() for rank in range(program.size))
    partners = pair(program)
    _check_agreement(program, partners)
    edges = wait_edges(program, partners)
    lists = merge_sites(program, hosts, seed, edges)
    order = rehearse(program, lists, edges)
    check_commit(program, partners, order)
    return Report(peaks, lists)


def check_state(loaded: Iterable[Program], program: Program) -> None:
    """`ProgramError` unless state that `program` shares with others has one size in all of them:
    each one's bound on memory rests on it. A size that is not declared agrees with any."""
    state_sizes = [_state_sizes(program, rank) for rank in range(program.size)]
    for other in loaded if any(state_sizes) else ():
        for rank, sizes in enumerate(state_sizes[: other.size]):  # ranks may have joined since
            theirs = _state_sizes(other, rank)
            for name in sorted(sizes.keys() & theirs.keys()):
                if sizes[name] != theirs[name]:
                    raise ProgramError(
                        f"State {name!r} of rank {rank} has {sizes[name]} bytes in program "
                        f"{program.name!r}, and {theirs[name]} in {other.name!r} on the same "
                        f"actors.\n  Fix: declare one size for it, or give one of them another "
                        f"name."
                    )


def _state_sizes(program: Program, rank: int) -> dict[str, int]:
    rank_program = program.ranks[rank]
    state = set(rank_program.state)
    return {name: nbytes for name, nbytes in rank_program.nbytes if name in state}


class _RankCheck:
    """The data flow of one rank's list."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.functions = dict(program.functions)
        rank_program = program.ranks[rank]
        self.own = rank_program
        self.index = 0
        self.waits = starts_of_waits(rank_program.instructions)
        self.sizes = dict(rank_program.nbytes)
        self.live: set[str] = set(rank_program.inputs) | set(rank_program.state)
        if len(self.live) != len(rank_program.inputs) + len(rank_program.state):
            raise ProgramError(
                f"Rank {rank} of program {program.name!r} names a value twice among its inputs "
                f"{rank_program.inputs} and state {rank_program.state}."
            )
        self.freed: set[str] = set()
        self.making: dict[str, int] = {}  # value -> the start that makes it
        self.reading: dict[str, set[int]] = defaultdict(set)  # value -> starts that read it
        self.started: set[str] = set()  # values that some start has named
        self.sharers: dict[str, set[str]] = defaultdict(set)  # by what they share storage with
        for value, other in rank_program.shares:
            if other not in self.live:
                raise ProgramError(
                    f"Rank {rank} of program {program.name!r}: {value!r} is said to share the "
                    f"storage of {other!r}, which is neither an input nor state."
                )
            self.sharers[other].add(value)
        strange = sorted(set(rank_program.replayable) - rank_program.lasting) + sorted(
            set(rank_program.changed) - set(rank_program.inputs)
        )
        if strange:
            raise ProgramError(
                f"Rank {rank} of program {program.name!r}: {strange} are said to be replayable or "
                f"changed, and are neither state nor inputs that are changed."
            )
        self.stale: dict[str, str] = {}  # value -> what it shares storage with, written since
        self.lent: dict[str, Key] = {}  # values that were waited for -> their key
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
                    self._wait(instruction)
                case Free():
                    for value in instruction.values:
                        self._free(value)
                case Vote():
                    self._define(instruction.value, self.sizes.get(instruction.value, 0))
                case Commit():
                    self._use(instruction.value)
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
            self._not_seen(value)
        for value in call.outputs:
            self._define(value, self.sizes.get(value, 0))

    def _start(self, start: Start) -> None:
        peers, *_ = key_of(self.rank, start)
        if len(set(peers)) != len(peers) or not set(peers) <= set(range(self.program.size)):
            raise self._fault(
                f"the ranks {peers} are not distinct ranks of 0..{self.program.size - 1}",
                "name each rank once",
            )
        if self.rank not in peers:
            raise self._fault(f"rank {self.rank} is not in {peers}", "add it to the group")
        key = key_of(self.rank, start)
        for value, of in self.lent.items():
            if of == key:
                raise self._fault(f"{value!r} is lent by the same key", f"free {value} before this")
        reads, makes = _touches(start)
        for value in reads:
            self._use(value)
        for value, buffer in makes:
            if not buffer.variable:
                self.sizes[value] = buffer.nbytes
            elif isinstance(start, Recv) and start.lent:
                raise self._fault(f"{value!r} is lent, and of unknown size", "receive it")
            self._define(value, self.sizes.get(value, 0))
            self.making[value] = self.index
        for value in reads:
            self.reading[value].add(self.index)
        if isinstance(start, Send):
            self.started.add(start.value)
        self.started |= {value for value, _ in makes}

    def _wait(self, wait: Wait) -> None:
        for value in wait.values:
            if value not in self.started:
                raise self._fault(
                    f"nothing was started that makes or sends {value!r}",
                    "wait for a sent value, a received one, or an output of a collective",
                )
        for index in self.waits[self.index]:
            start = self.own.instructions[index]
            assert isinstance(start, Send | Recv | Collective)
            reads, makes = _touches(start)
            for name, _ in makes:
                self.making.pop(name, None)
                if isinstance(start, Recv) and start.lent:
                    self.lent[name] = key_of(self.rank, start)
            for name in reads:
                self.reading[name].discard(index)

    def _free(self, value: str) -> None:
        self.stale.pop(value, None)
        self._use(value)
        self._not_read(value, "freed")
        if value in self.own.state:
            raise self._fault(f"{value!r} is state, which outlives the run", "do not free it")
        self.live.discard(value)
        self.freed.add(value)
        self.stale.pop(value, None)
        self.started.discard(value)
        self.lent.pop(value, None)
        self.bytes -= self.sizes.get(value, 0)

    def _not_seen(self, written: str) -> None:
        """A value that shares its storage is not read after this."""
        for value in sorted(self.sharers.get(written, ())):
            if value in self.live:
                self._not_read(value, f"changed, by a write to {written!r},")
                self.stale[value] = written

    def _use(self, value: str) -> None:
        if value in self.stale:
            raise self._fault(
                f"{value!r} shares the storage of {self.stale[value]!r}, which has been written "
                f"since",
                "copy it before the write, or write to a copy",
            )
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
        self.stale.pop(value, None)
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
        rank_program = self.own
        if self.lent:
            raise ProgramError(
                f"Program {self.program.name!r}, rank {self.rank}: {sorted(self.lent)} are lent "
                f"and not given back.\n  Fix: free them after their last use."
            )
        missing = [value for value in rank_program.outputs if value not in self.live]
        if missing:
            raise ProgramError(
                f"Program {self.program.name!r}, rank {self.rank}: the outputs {missing} are not "
                f"there at the end.\n  Fix: define them, and do not free them."
            )
        for written in sorted(
            {v for i in rank_program.instructions if isinstance(i, Call) for v in i.writes}
        ):
            for value in rank_program.outputs:
                if value in self.sharers.get(written, ()):
                    raise ProgramError(
                        f"Program {self.program.name!r}, rank {self.rank}: the output {value!r} "
                        f"shares the storage of {written!r}, which the program writes.\n"
                        f"  Fix: return a copy."
                    )
        leaked = sorted(
            self.live - {*rank_program.inputs, *rank_program.outputs, *rank_program.state}
        )
        if leaked:
            raise ProgramError(
                f"Program {self.program.name!r}, rank {self.rank}: {leaked} are never freed.\n"
                f"  Fix: free them after their last use."
            )

    def _fault(self, fact: str, fix: str) -> ProgramError:
        return fault(self.program, (self.rank, self.index), fact, fix)


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
    return start.inputs, tuple(zip(start.outputs, buffers))


def _check_agreement(program: Program, partners: Edges) -> None:
    """Raises `ProgramError` for the first operation whose partners disagree.

    What may differ by rank: the input of an all_gather, the pieces of an all_to_all and
    reduce_scatter; then each piece must be what the other side expects. A sum of bf16 may come out
    in bf16, or in f32 on all ranks. It looks at declared buffers only; the engine compares them
    with the values when they are there.
    """
    for site in sorted(partners):
        start = instruction_at(program, site)
        match start:
            case Send():
                (other,) = partners[site]
                recv = instruction_at(program, other)
                assert isinstance(recv, Recv)
                if recv.buffer != start.buffer:
                    raise _disagree(program, [site, other], "send and receive other buffers")
            case Collective():
                if site[0] == start.group[0]:
                    sites = {rank: index for rank, index in (site, *partners[site])}
                    _check_collective(program, [(rank, sites[rank]) for rank in start.group])
            case Recv() | Call() | Wait() | Free() | Vote() | Commit():
                pass
            case _:
                assert_never(start)


def _check_collective(program: Program, sites: Sequence[Site]) -> None:
    members: list[Collective] = []
    for site in sites:
        member = instruction_at(program, site)
        assert isinstance(member, Collective)
        members.append(member)
    if len({(member.kind, member.op) for member in members}) != 1:
        raise _disagree(program, sites, "differ in kind or op")
    first = members[0]
    ins = [member.in_buffers for member in members]
    outs = [member.out_buffers for member in members]
    if not _fit(first, ins, outs):
        raise _disagree(program, sites, "do not fit together")


def _fit(
    collective: Collective, ins: Sequence[tuple[Buffer, ...]], outs: Sequence[tuple[Buffer, ...]]
) -> bool:
    """Whether what each member declares to get is what all declare to give it."""
    does, size = collective.does, len(ins)
    if not all(does.takes(len(own), at, size) for at, own in enumerate(ins)):
        return False
    if not does.bucket and not (_one_dtype(chain(*ins)) and _one_dtype(chain(*outs))):
        return False
    if not does.divided and any(own != outs[0] for own in outs):
        return False
    for to in range(size) if does.divided else (0,):
        parts = [tuple(does.given(own, to)) for own in ins]
        if not does.reduces:
            fits = outs[to] == tuple(chain(*parts))
        else:
            fits = all(part == parts[0] for part in parts)
            fits = fits and _reduced(parts[0], outs[to], collective.op)
        if not fits:
            return False
    return True


def _reduced(ins: Sequence[Buffer], outs: Sequence[Buffer], op: Op | None) -> bool:
    """Whether a reduction gives these: of one shape each, and of one dtype, or a sum of narrow
    floats left in the float32 that it is accumulated in, or one of float32 rounded to such."""
    widens = op is not None and REDUCTIONS[op].widens
    return len(ins) == len(outs) and all(
        a.shape == b.shape and (a.dtype == b.dtype or (widens and _accumulated(a.dtype, b.dtype)))
        for a, b in zip(ins, outs, strict=True)
    )


def _accumulated(given: torch.dtype, result: torch.dtype) -> bool:
    others = {given, result} - {torch.float32}
    return len(others) == 1 and all(d.is_floating_point and d.itemsize < 4 for d in others)


def _one_dtype(buffers: Iterable[Buffer]) -> bool:
    return len({buffer.dtype for buffer in buffers}) <= 1


def _disagree(program: Program, sites: Sequence[Site], fact: str) -> ProgramError:
    lines: list[str] = []
    for site in sites:
        instruction = instruction_at(program, site)
        text = format_instruction(instruction)
        lines.append(f"  rank {site[0]}, instr {site[1]}: {text}")
    return ProgramError(
        f"Program {program.name!r}: operations that meet {fact}.\n"
        + "\n".join(lines)
        + "\n  Fix: give all members one kind and op, and buffers that match piece by piece."
    )
