"""Check the commit point: no rank writes state before all ranks know that no rank has failed.

    rank 0    a = vote; s = all_reduce.sum(a) over (0, 1); wait s; commit s; call up(w) writes w
    rank 1    a = vote; s = all_reduce.sum(a) over (0, 1); wait s; commit s

In a program with votes, each rank that has instructions votes once and then commits once, on a sum
of the votes of at least all other ranks. It calls nothing between its vote and its commit, since no
vote would count a failure there, and before the commit it writes only replayable state. The check
follows one order of execution, because the votes that a value sums are the same in every order.
A program without votes is not checked: if it writes state, its failures cannot be undone.

If a commit has a predicate, the host reads no value of the device (`check_deferred`): each later
call that writes lasting state reads the predicate, no message writes state, and the row of each
call that makes checks is in the vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from dtensor.daft.ir.instructions import (
    WORD,
    Call,
    Collective,
    Commit,
    Free,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.verification.pairing import Edges, Site, fault, instruction_at


def check_commit(program: Program, partners: Edges, order: Sequence[Site]) -> None:
    """Raise ProgramError unless the commit point is sound. ``order``: all instructions, in an order
    in which each wait follows the starts that it needs."""
    if any(isinstance(instruction_at(program, site), Vote | Commit) for site in order):
        _VoteCheck(program, partners).run(order)
    checked = frozenset(name for name, function in program.functions if function.checks)
    instructions = [i for rank_program in program.ranks for i in rank_program.instructions]
    if any(
        (isinstance(i, Commit) and i.predicate) or (isinstance(i, Vote) and i.faults)
        for i in instructions
    ) or any(isinstance(i, Call) and i.fn in checked for i in instructions):
        for rank in range(program.size):
            _check_deferred(program, rank, checked)


def _check_deferred(program: Program, rank: int, checked: frozenset[str]) -> None:
    """Raise ProgramError unless the rank's later writes read its predicate and its checks are in
    its vote. ``checked``: the functions that make checks."""
    rank_program = program.ranks[rank]
    instructions = rank_program.instructions
    rows = {row for i in instructions if isinstance(i, Vote) for row in i.faults}
    unread, voted, predicate = set(rows), False, None
    for index, instruction in enumerate(instructions):
        site, fact, fix = (rank, index), "", ""
        match instruction:
            case Call(fn=fn, inputs=inputs) if fn in checked:
                own = rows.intersection(inputs)
                if voted or len(own) != 1 or not own <= unread:
                    fact = (
                        "it makes checks on the device, and has no row of its own in a later vote"
                    )
                    fix = "give it a row, and the row to the rank's vote"
                unread -= own
            case Vote():
                voted = True
            case Commit():
                predicate = instruction.predicate
                if predicate is None:
                    fact = (
                        "it has no predicate, and faults or other ranks' writes are on the device"
                    )
                    fix = "give every commit a predicate"
            case Collective(sizes=sizes, on_host=on_host) if sizes is not None or on_host:
                fact, fix = "the host waits for its counts", "commit without a predicate"
            case Send(buffer=buffer) | Recv(buffer=buffer) if buffer.variable:
                fact, fix = "the host waits for its length", "commit without a predicate"
            case _:
                pass
        writes = rank_program.lasting.intersection((*instruction.writes, *instruction.outputs))
        if predicate is not None and writes and not fact:
            skips = isinstance(instruction, Call) and predicate in instruction.inputs
            if not skips:
                fact = f"it writes {min(writes)!r} after the commit and does not read {predicate!r}"
                fix = f"write only where {predicate} is 0"
        if fact:
            raise fault(program, site, fact, fix)


class _VoteCheck:
    """Follows one order of all instructions, and tracks whose votes each value is the sum of."""

    def __init__(self, program: Program, partners: Edges) -> None:
        self.program = program
        self.partners = partners
        self.active = frozenset(
            r for r, rank_program in enumerate(program.ranks) if rank_program.instructions
        )
        self.voted: set[int] = set()
        self.committed: set[int] = set()
        # (rank, value) -> the ranks whose votes are in it
        self.votes: dict[tuple[int, str], frozenset[int]] = {}
        # (rank, output of an all_reduce) -> the start, and the position of the output
        self.in_flight: dict[tuple[int, str], tuple[Site, int]] = {}
        self.contributions: dict[tuple[Site, int], frozenset[int]] = {}

    def run(self, order: Sequence[Site]) -> None:
        """Check all instructions in this order, and that every rank commits."""
        for site in order:
            self._step(site)
        missing = sorted(self.active - self.committed)
        if missing:
            site = (missing[0], len(self.program.ranks[missing[0]].instructions) - 1)
            fact = f"rank {missing[0]} ends without a commit point, and there are votes"
            raise fault(self.program, site, fact, "give every rank a commit point, or none")

    def _step(self, site: Site) -> None:
        """Check one instruction, and record whose votes its outputs contain."""
        rank, _ = site
        instruction = instruction_at(self.program, site)
        if rank not in self.committed:
            rank_program, written = (
                self.program.ranks[rank],
                (*instruction.writes, *instruction.outputs),
            )
            early = [v for v in written if v in rank_program.lasting]
            early = [v for v in early if v not in rank_program.replayable]
            if early:
                fact = f"it writes state {early[0]!r} before the rank's commit point"
                raise fault(self.program, site, fact, "move it behind the commit point")
        for value in instruction.outputs:  # forget an earlier value with this name
            self.votes.pop((rank, value), None)
            self.in_flight.pop((rank, value), None)
        match instruction:
            case Vote(value=value):
                if rank in self.voted:
                    raise fault(self.program, site, "the rank votes twice", "leave one out")
                self.voted.add(rank)
                self.votes[rank, value] = frozenset({rank})
            case Call():
                if rank in self.voted and rank not in self.committed:
                    fact = "it is between the rank's vote and its commit point, where a failure "
                    fact += "is in no vote"
                    raise fault(self.program, site, fact, "call it before the vote")
            case Collective(kind="all_reduce", op="sum"):
                self._record_contributions(site, instruction)
            case Commit(value=value, predicate=predicate):
                self._commit(site, value, deferred=predicate is not None)
            case Send() | Recv() | Collective() | Wait() | Free():
                pass
            case _:
                assert_never(instruction)

    def _record_contributions(self, site: Site, start: Collective) -> None:
        """Record the votes that a member contributes to an all_reduce."""
        for position, (name, buffer) in enumerate(zip(start.inputs, start.in_buffers, strict=True)):
            voters = self._votes_in(site[0], name)
            if voters and buffer != WORD:
                raise fault(self.program, site, f"a vote is sent as {buffer}", f"send {WORD}")
            self.contributions[site, position] = voters
            self.in_flight[site[0], start.outputs[position]] = site, position

    def _commit(self, site: Site, value: str, *, deferred: bool) -> None:
        """Check that the value sums the votes of all other ranks, and of its own if the device
        reads it."""
        rank, _ = site
        if rank in self.committed:
            raise fault(self.program, site, "the rank commits twice", "leave one out")
        if rank not in self.voted:
            raise fault(self.program, site, "the rank has not voted", "vote before it")
        own = set[int]() if deferred else {rank}  # the host knows whether its own rank has failed
        missing = sorted(self.active - self._votes_in(rank, value) - own)
        if missing:
            fact = f"{value!r} is not the sum of all votes: those of ranks {missing} are not in it"
            raise fault(self.program, site, fact, "all_reduce the votes of all ranks before it")
        self.committed.add(rank)

    def _votes_in(self, rank: int, value: str) -> frozenset[int]:
        """Return the ranks whose votes are in a value. It has been waited for, so all members of
        its all_reduce have started."""
        if (rank, value) in self.in_flight:
            site, position = self.in_flight[rank, value]
            members = (site, *self.partners[site])
            return frozenset[int]().union(
                *(self.contributions[member, position] for member in members)
            )
        return self.votes.get((rank, value), frozenset())
