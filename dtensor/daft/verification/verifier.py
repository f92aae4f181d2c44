"""Verify a program: it cannot hang, use a value that does not exist, or leak a value.

    report = verify(program)          # or with hosts=((0, 1), (2, 3)): two ranks to an actor
    report.peak_bytes                 # maximum of bytes alive at once, per rank

Raises ProgramError for the first fault, with the instruction, the user's line and a fix. Faults
are: values used too early, too late or twice, or never freed; starts without a partner; members of
a collective that disagree on kind, op, shape, dtype, or on where their counts are from; waits that
form a circle (pairing.py); a write to storage that a value shares, if the value is read later; an
unsound commit point (commit.py). Declared `nbytes` and `shares`, and functions, are trusted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias, assert_never

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
    Sizes,
    Start,
    Vote,
    Wait,
    key_of,
    values_read,
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

Makers: TypeAlias = Mapping[Site, tuple[int | None, ...]]
"""For each sized collective and each vector of its counts: the instruction of the same rank that
made or last wrote the vector, None if it is an input or state."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify`.

    `peak_bytes[rank]`: the maximum of bytes of declared values alive at once. `lists[host]`: the
    sites (rank, index) in the order in which the host's thread runs them.
    """

    peak_bytes: tuple[int, ...]
    lists: tuple[tuple[Site, ...], ...] = field(repr=False)


def verify(program: Program, hosts: Hosts | None = None, seed: int = 0) -> Report:
    """Verify a program as `hosts` run it (default: one rank per host). `seed`: selects the order of
    the merged lists. Raises ProgramError for the first fault."""
    if hosts is None:
        hosts = tuple((rank,) for rank in range(program.size))
    checks = [_RankCheck(program, rank) for rank in range(program.size)]
    peaks = tuple(check.run() for check in checks)
    partners = pair(program)
    makers_of_counts = {site: made for check in checks for site, made in check.makers.items()}
    _check_agreement(program, partners, makers_of_counts)
    edges = wait_edges(program, partners)
    lists = merge_sites(program, hosts, seed, edges)
    order = rehearse(program, lists, edges)
    check_commit(program, partners, order)
    return Report(peaks, lists)


def check_state(loaded: Iterable[Program], program: Program) -> None:
    """Raise ProgramError if a state value has another size in `program` than in a loaded program,
    because `peak_bytes` would be wrong. Undeclared sizes are not compared."""
    state_sizes = [_state_sizes(program, rank) for rank in range(program.size)]
    for other in loaded if any(state_sizes) else ():
        for rank, sizes in enumerate(state_sizes[: other.size]):  # ranks may have joined later
            other_sizes = _state_sizes(other, rank)
            for name in sorted(sizes.keys() & other_sizes.keys()):
                if sizes[name] != other_sizes[name]:
                    raise ProgramError(
                        f"State {name!r} of rank {rank} has {sizes[name]} bytes in program "
                        f"{program.name!r}, and {other_sizes[name]} in {other.name!r} on the same "
                        f"actors.\n  Fix: declare one size for it, or give one of them another "
                        f"name."
                    )


def _state_sizes(program: Program, rank: int) -> dict[str, int]:
    rank_program = program.ranks[rank]
    state = set(rank_program.state)
    return {name: nbytes for name, nbytes in rank_program.nbytes if name in state}


class _RankCheck:
    """Checks the data flow of one rank's list, instruction by instruction."""

    def __init__(self, program: Program, rank: int) -> None:
        """Begin with the rank's inputs and state alive. Raises ProgramError if its declarations
        contradict."""
        self.program = program
        self.rank = rank
        self.functions = dict(program.functions)
        rank_program = program.ranks[rank]
        self.rank_program = rank_program
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
        self.being_made: dict[str, int] = {}  # value -> the start that makes it
        self.being_read: dict[str, set[int]] = defaultdict(set)  # value -> starts that read it
        self.named_by_starts: set[str] = set()  # values that some start has named
        self.sharers: dict[str, set[str]] = defaultdict(
            set
        )  # input or state -> values that share its storage
        for value, other in rank_program.shares:
            if other not in self.live:
                raise ProgramError(
                    f"Rank {rank} of program {program.name!r}: {value!r} is declared to share the "
                    f"storage of {other!r}, which is neither an input nor state."
                )
            self.sharers[other].add(value)
        strange = sorted(set(rank_program.replayable) - rank_program.lasting) + sorted(
            set(rank_program.changed) - set(rank_program.inputs)
        )
        if strange:
            raise ProgramError(
                f"Rank {rank} of program {program.name!r}: {strange} are declared replayable or "
                f"changed, but are neither state nor inputs."
            )
        self.stale: dict[str, str] = {}  # value -> the written value that shares its storage
        self.lent: dict[str, Key] = {}  # received and lent value -> its key
        self.changed_by: dict[str, int] = {}  # value -> the last instruction that made or wrote it
        # sized collective -> for each of its vectors of counts, the instruction that made it
        self.makers: dict[Site, tuple[int | None, ...]] = {}
        self.bytes = sum(self.sizes.get(value, 0) for value in self.live)

    def run(self) -> int:
        """Check all instructions. Return the maximum of bytes alive at once."""
        peak = self.bytes
        for index, instruction in enumerate(self.rank_program.instructions):
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
                case Vote() | Commit():
                    for value in instruction.inputs:
                        self._use(value)
                    for value in instruction.outputs:
                        self._define(value, self.sizes.get(value, 0))
                case _:
                    assert_never(instruction)
            self.changed_by.update(
                dict.fromkeys((*instruction.outputs, *instruction.writes), index)
            )
            peak = max(peak, self.bytes)
        self._end()
        return peak

    def _call(self, call: Call) -> None:
        """Check that the function exists and that its inputs can be used, and define its
        outputs."""
        if call.fn not in self.functions:
            raise self._fault(
                f"there is no function {call.fn!r}", f"one of {sorted(self.functions)}"
            )
        for value in call.inputs:
            self._use(value)
        for value in call.writes:
            if value not in call.inputs:
                raise self._fault(
                    f"{value!r} is written but is not an input", "pass it to the function"
                )
            self._check_not_read(value, "written")
            self._mark_sharers_stale(value)
        for value in call.outputs:
            self._define(value, self.sizes.get(value, 0))

    def _start(self, start: Start) -> None:
        """Check the ranks and values of a start, and mark the values as being read or made."""
        peers, *_ = key_of(self.rank, start)
        if len(set(peers)) != len(peers) or not set(peers) <= set(range(self.program.size)):
            raise self._fault(
                f"the ranks {peers} are not distinct ranks of 0..{self.program.size - 1}",
                "name each rank once",
            )
        if self.rank not in peers:
            raise self._fault(f"rank {self.rank} is not in {peers}", "add it to the group")
        key = key_of(self.rank, start)
        for value, lent_key in self.lent.items():
            if lent_key == key:
                raise self._fault(f"{value!r} is lent by the same key", f"free {value} before this")
        if isinstance(start, Send | Recv) and start.buffer.bounded:
            raise self._fault(
                f"a message of {start.buffer} has no length", "send it in a sized all_to_all"
            )
        if isinstance(start, Collective) and start.sizes is not None:
            counts = start.sizes.counts
            self.makers[self.rank, self.index] = tuple(map(self.changed_by.get, counts))
        reads, makes = _values_of(start)
        for value in values_read(start):
            self._use(value)
        for value, buffer in makes:
            if not buffer.variable:
                self.sizes[value] = buffer.nbytes
            elif isinstance(start, Recv) and start.lent:
                raise self._fault(f"{value!r} is lent, and of unknown size", "receive it")
            self._define(value, self.sizes.get(value, 0))
            self.being_made[value] = self.index
        for value in reads:
            self.being_read[value].add(self.index)
        if isinstance(start, Send):
            self.named_by_starts.add(start.value)
        self.named_by_starts |= {value for value, _ in makes}

    def _wait(self, wait: Wait) -> None:
        """Check that each value has a start, and record that these starts are complete."""
        for value in wait.values:
            if value not in self.named_by_starts:
                raise self._fault(
                    f"nothing was started that makes or sends {value!r}",
                    "wait for a sent value, a received one, or an output of a collective",
                )
        for index in self.waits[self.index]:
            start = self.rank_program.instructions[index]
            assert isinstance(start, Send | Recv | Collective)
            reads, makes = _values_of(start)
            for name, _ in makes:
                self.being_made.pop(name, None)
                if isinstance(start, Recv) and start.lent:
                    self.lent[name] = key_of(self.rank, start)
            for name in reads:
                self.being_read[name].discard(index)

    def _free(self, value: str) -> None:
        """Check that a value may be freed, and remove it from the live values."""
        self.stale.pop(value, None)
        self._use(value)
        self._check_not_read(value, "freed")
        if value in self.rank_program.state:
            raise self._fault(f"{value!r} is state, which outlives the run", "do not free it")
        self.live.discard(value)
        self.freed.add(value)
        self.stale.pop(value, None)
        self.named_by_starts.discard(value)
        self.lent.pop(value, None)
        self.bytes -= self.sizes.get(value, 0)

    def _mark_sharers_stale(self, written: str) -> None:
        """Record that values sharing the storage of ``written`` must not be read from now on."""
        for value in sorted(self.sharers.get(written, ())):
            if value in self.live:
                self._check_not_read(value, f"changed, by a write to {written!r},")
                self.stale[value] = written

    def _use(self, value: str) -> None:
        """Check that a value can be read at this point."""
        if value in self.stale:
            raise self._fault(
                f"{value!r} shares the storage of {self.stale[value]!r}, which has been written "
                f"since",
                "copy it before the write, or write to a copy",
            )
        if value in self.being_made:
            start = show_site(self.program, (self.rank, self.being_made[value]))
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

    def _check_not_read(self, value: str, done: str) -> None:
        if self.being_read[value]:
            start = show_site(self.program, (self.rank, min(self.being_read[value])))
            raise self._fault(f"{value!r} is {done} while {start} reads it", "wait before this")

    def _define(self, value: str, size: int) -> None:
        """Add a value to the live values. Only state may be overwritten, and only if no start uses
        it."""
        self.stale.pop(value, None)
        if value in self.live:
            if value not in self.rank_program.state:
                raise self._fault(f"{value!r} is defined twice", "free it first or rename it")
            self._check_not_read(value, "overwritten")
            if value in self.being_made:
                raise self._fault(f"{value!r} is overwritten before its wait", "wait before this")
            return
        self.live.add(value)
        self.freed.discard(value)
        self.bytes += size

    def _end(self) -> None:
        """Check the end of the list: nothing is pending, leaked or missing."""
        pending = set(self.being_made.values()).union(*self.being_read.values())
        if pending:
            self.index = min(pending)
            raise self._fault("it is never waited for", "add a wait")
        rank_program = self.rank_program
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


def _values_of(start: Start) -> tuple[tuple[str, ...], tuple[tuple[str, Buffer], ...]]:
    """Return the values that a start reads, and (value, buffer) of those that it makes."""
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


def _check_agreement(program: Program, partners: Edges, makers: Makers) -> None:
    """Raise ProgramError for the first operation whose partners have declared different buffers.

    The inputs of an all_gather and the pieces of an all_to_all or reduce_scatter may differ by
    rank, but each piece must be what its receiver declares. The engine compares the actual tensors
    with the declared buffers during a run.
    """
    for site in sorted(partners):
        start = instruction_at(program, site)
        match start:
            case Send():
                (other,) = partners[site]
                recv = instruction_at(program, other)
                assert isinstance(recv, Recv)
                if recv.buffer != start.buffer:
                    raise _mismatch(program, [site, other], "send and receive different buffers")
            case Collective():
                if site[0] == start.group[0]:
                    index_of = {rank: index for rank, index in (site, *partners[site])}
                    sites = [(rank, index_of[rank]) for rank in start.group]
                    _check_collective(program, sites)
                    if start.sizes is not None:
                        _check_counts(program, sites, partners, makers)
            case Recv() | Call() | Wait() | Free() | Vote() | Commit():
                pass
            case _:
                assert_never(start)


def _check_collective(program: Program, sites: Sequence[Site]) -> None:
    """Raise ProgramError unless the members agree on kind and op, and their buffers fit
    together."""
    members: list[Collective] = []
    for site in sites:
        member = instruction_at(program, site)
        assert isinstance(member, Collective)
        members.append(member)
    if len({(member.kind, member.op, member.distance) for member in members}) != 1:
        raise _mismatch(program, sites, "differ in kind, op or distance")
    first = members[0]
    if len({member.on_host for member in members}) != 1:
        raise _mismatch(program, sites, "differ in whether they deliver on the host")
    if len({member.sizes and replace(member.sizes, counts=first.group) for member in members}) != 1:
        raise _mismatch(
            program, sites, "differ in parts, direction or limit", "give all members equal sizes"
        )
    ins = [member.in_buffers for member in members]
    outs = [member.out_buffers for member in members]
    if not _buffers_fit(first, ins, outs):
        raise _mismatch(program, sites, "do not fit together")


def _check_counts(program: Program, sites: Sequence[Site], partners: Edges, makers: Makers) -> None:
    """Raise ProgramError unless the counts of all members come from one all_gather of the group,
    so that all members compute the same lengths."""
    gathers: list[Site] = []
    for site in sites:
        start = instruction_at(program, site)
        assert isinstance(start, Collective) and start.sizes is not None
        index = makers[site][0]
        if index is None:
            raise _strange_counts(program, site, start.sizes, "made by no instruction")
        gather = instruction_at(program, (site[0], index))
        if (
            not isinstance(gather, Collective)
            or gather.kind != "all_gather"
            or set(makers[site]) != {index}
            or gather.group != start.group
            or gather.outputs != start.sizes.counts
        ):
            fact = f"not the outputs, in order, of one all_gather over {start.group}"
            raise _strange_counts(program, site, start.sizes, fact)
        buffer = gather.out_buffers[0]
        if not gather.on_host or buffer.dtype != torch.int64 or len(buffer.shape) != 1:
            fact = f"{buffer}{' on host' if gather.on_host else ''}, not vectors of i64 on the host"
            raise _strange_counts(program, site, start.sizes, fact)
        last = max((p for part in start.sizes.parts for p in part), default=-1)
        if last >= buffer.shape[0]:
            raise fault(
                program,
                site,
                f"position {last} of parts is outside the counts, {buffer}",
                f"use positions below {buffer.shape[0]}",
            )
        gathers.append((site[0], index))
    if {gathers[0], *partners[gathers[0]]} != set(gathers):
        raise _mismatch(
            program,
            [*gathers, *sites],
            "take their counts from different all_gathers",
            "size the collective on all members by the same all_gather",
        )


def _strange_counts(program: Program, site: Site, sizes: Sizes, fact: str) -> ProgramError:
    return fault(
        program,
        site,
        f"its counts {', '.join(sizes.counts)} are {fact}",
        "all_gather a vector i64[E] of each member with on_host=True, and size it by the outputs",
    )


def _buffers_fit(
    collective: Collective, ins: Sequence[tuple[Buffer, ...]], outs: Sequence[tuple[Buffer, ...]]
) -> bool:
    """Return whether each member's output buffers are what the kind of collective makes of the
    input buffers of all members."""
    kind, size = collective.does, len(ins)
    if not all(kind.takes(len(buffers), member, size) for member, buffers in enumerate(ins)):
        return False
    if not kind.bucket and not (_one_dtype(chain(*ins)) and _one_dtype(chain(*outs))):
        return False
    results_are_equal = not (kind.divided or kind.rotates)
    if results_are_equal and any(buffers != outs[0] for buffers in outs):
        return False
    for to in (0,) if results_are_equal else range(size):
        parts = [tuple(collective.given(own, source, to)) for source, own in enumerate(ins)]
        if collective.sizes is not None:  # the members' bounds may differ
            fits = len({buffer.with_rows(0) for buffer in chain(outs[to], *parts)}) == 1
            fits = fits and len(outs[to]) == size
        elif not kind.reduces:
            fits = outs[to] == tuple(chain(*parts))
        else:
            fits = all(part == parts[0] for part in parts)
            fits = fits and _is_reduction(parts[0], outs[to], collective.op)
        if not fits:
            return False
    return True


def _is_reduction(ins: Sequence[Buffer], outs: Sequence[Buffer], op: Op | None) -> bool:
    """Return whether reducing ``ins`` can give ``outs``: shapes are equal, and dtypes too, unless
    the reduction accumulates 16-bit floats in float32."""
    widens = op is not None and REDUCTIONS[op].widens
    return len(ins) == len(outs) and all(
        a.shape == b.shape
        and (a.dtype == b.dtype or (widens and _is_accumulation(a.dtype, b.dtype)))
        for a, b in zip(ins, outs, strict=True)
    )


def _is_accumulation(operand: torch.dtype, result: torch.dtype) -> bool:
    others = {operand, result} - {torch.float32}
    return len(others) == 1 and all(d.is_floating_point and d.itemsize < 4 for d in others)


def _one_dtype(buffers: Iterable[Buffer]) -> bool:
    return len({buffer.dtype for buffer in buffers}) <= 1


def _mismatch(
    program: Program,
    sites: Sequence[Site],
    fact: str,
    fix: str = "give all members one kind and op, and buffers that match piece by piece",
) -> ProgramError:
    """Return the error for partners whose declarations differ, with the instruction of each."""
    lines: list[str] = []
    for site in sites:
        instruction = instruction_at(program, site)
        text = format_instruction(instruction)
        lines.append(f"  rank {site[0]}, instr {site[1]}: {text}")
    return ProgramError(
        f"Program {program.name!r}: operations that meet {fact}.\n"
        + "\n".join(lines)
        + f"\n  Fix: {fix}."
    )
