"""The commit point: no rank writes state before all have agreed that none has failed.

    rank 0    a = vote; s = all_reduce.sum(a) over (0, 1); wait s; commit s; call up(w) writes w
    rank 1    a = vote; s = all_reduce.sum(a) over (0, 1); wait s; commit s

In a program that has votes, it must hold for each rank that has instructions:

- it votes once, then has one commit point, which reads a sum of all *other* ranks' votes at least;
- it calls nothing between the two, where a failure would be in no vote;
- it writes no state before, but for what is replayable.

So at their commit points all ranks know the same of all calls before, whichever interleaving ran:
what a rank has of the votes comes of its own, and of all_reduces that it has waited for, and that
is the same in each order. One order is followed here; `tests/daft/undo.py` tries them all.

A program without votes is not looked at: if it writes state, its failures cannot be undone.
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
    """`ProgramError` unless the commit point is sound. ``order``: of all instructions, in which
    each wait comes after the starts that it needs."""
    if any(isinstance(instruction_at(program, site), Vote | Commit) for site in order):
        _Votes(program, partners).run(order)


class _Votes:
    """Which votes each value is the sum of, along one order of all instructions."""

    def __init__(self, program: Program, partners: Edges) -> None:
        self.program = program
        self.partners = partners
        self.active = frozenset(r for r, own in enumerate(program.ranks) if own.instructions)
        self.voted: set[int] = set()
        self.committed: set[int] = set()
        # by value, the ranks whose votes it is the sum of; of what is still on its way, from where
        self.votes: dict[tuple[int, str], frozenset[int]] = {}
        self.coming: dict[tuple[int, str], tuple[Site, int]] = {}
        self.given: dict[tuple[Site, int], frozenset[int]] = {}

    def run(self, order: Sequence[Site]) -> None:
        for site in order:
            self._step(site)
        missing = sorted(self.active - self.committed)
        if missing:
            site = (missing[0], len(self.program.ranks[missing[0]].instructions) - 1)
            fact = f"rank {missing[0]} ends without a commit point, and there are votes"
            raise fault(self.program, site, fact, "give every rank a commit point, or none")

    def _step(self, site: Site) -> None:
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
        for value in instruction.outputs:  # what had the name before
            self.votes.pop((rank, value), None)
            self.coming.pop((rank, value), None)
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
                self._sum(site, instruction)
            case Commit(value=value):
                self._commit(site, value)
            case Send() | Recv() | Collective() | Wait() | Free():
                pass
            case _:
                assert_never(instruction)

    def _sum(self, site: Site, start: Collective) -> None:
        for place, (name, buffer) in enumerate(zip(start.inputs, start.in_buffers, strict=True)):
            carried = self._carried(site[0], name)
            if carried and buffer != WORD:
                raise fault(self.program, site, f"a vote is sent as {buffer}", f"send {WORD}")
            self.given[site, place] = carried
            self.coming[site[0], start.outputs[place]] = site, place

    def _commit(self, site: Site, value: str) -> None:
        rank, _ = site
        if rank in self.committed:
            raise fault(self.program, site, "the rank commits twice", "leave one out")
        if rank not in self.voted:
            raise fault(self.program, site, "the rank has not voted", "vote before it")
        missing = sorted(self.active - self._carried(rank, value) - {rank})
        if missing:
            fact = f"{value!r} is not the sum of all votes: those of ranks {missing} are not in it"
            raise fault(self.program, site, fact, "all_reduce the votes of all ranks before it")
        self.committed.add(rank)

    def _carried(self, rank: int, value: str) -> frozenset[int]:
        """The ranks whose votes are in a value. It is there, so all members have started."""
        if (rank, value) in self.coming:
            site, place = self.coming[rank, value]
            members = (site, *self.partners[site])
            return frozenset[int]().union(*(self.given[member, place] for member in members))
        return self.votes.get((rank, value), frozenset())
