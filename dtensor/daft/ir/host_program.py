"""What one host has of a program: its ranks' lists, and what it must know of the others'.

    first, second = host_programs(program, ((0,), (1,)), report.lists)
    first.ranks[0].instructions            # rank 0's own list; rank 1's is not there
    first.functions                        # those that rank 0 calls
    first.alone                            # False: rank 1 takes part as well

So that the bytes for all hosts grow with the ranks, and not with their square. A host that has all
ranks has all of the program: what runs in this process is one, too.

Invariants: `ranks` are those of the host in the program's numbers, of which some may have empty
lists. Each fact of the whole program is the same on all hosts. It is data, and pickles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType

from dtensor.daft.ir.instructions import (
    Buffer,
    Call,
    Collective,
    Commit,
    Key,
    Recv,
    Send,
)
from dtensor.daft.ir.program import Function, Program, RankProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySlots:
    """The memory that a key of the program needs where its ranks share some
    (`ray/transports/slots.py`).

    `slots` are the starts of a rank that may be in flight on it, each of `slot_bytes`, by member.
    What the members fold together is in at most `pieces` with `result_bytes` in all.
    """

    key: Key
    slots: int
    slot_bytes: tuple[int, ...]
    pieces: int
    result_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """What hosts need to meet in shared memory. `keys`: of the program, those between hosts.

    `peers`: by rank of another host, its starts with the host's own ranks, in the order of its
    list: which of `keys` each is on, and what it brings.
    """

    keys: tuple[KeySlots, ...] = ()
    peers: Mapping[int, tuple[tuple[int, tuple[Buffer, ...]], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, tuple[Buffer, ...]], ...]]
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HostProgram:
    """`size`: the ranks of the whole program. `functions` are those that `ranks` call.

    `sites`: (rank, index) in the order in which the host runs them. `alone`: no other host has
    instructions of the program. `commits`: it has a commit point; `communicates`: a rank of it
    starts a transfer or a collective; `undoable`: whichever call fails, no rank has left anything.
    """

    name: str
    size: int
    ranks: Mapping[int, RankProgram]
    functions: tuple[tuple[str, Function], ...]
    stage_of: Mapping[int, int]
    known_as: Mapping[int, str]
    sites: tuple[tuple[int, int], ...]
    alone: bool
    commits: bool
    communicates: bool
    undoable: bool
    meetings: Meetings = field(default_factory=Meetings)

    @staticmethod
    def whole(program: Program, sites: Sequence[tuple[int, int]]) -> HostProgram:
        """Of the host that has all ranks."""
        (program_of_host,) = host_programs(program, [range(program.size)], [sites])
        return program_of_host

    def __repr__(self) -> str:
        return f"<program {self.name} on ranks {sorted(self.ranks)} of {self.size:,}>"


def host_programs(
    program: Program,
    hosts: Sequence[Sequence[int]],
    lists: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[HostProgram]:
    """Those of `hosts`, by the ranks of each; `lists`: by host, the sites in its order."""
    commits, communicates = _has(program, Commit), _has(program, Send | Recv | Collective)
    undoable = not any(map(_leaves, program.ranks))
    working = frozenset(rank for rank, own in enumerate(program.ranks) if own.instructions)
    functions = dict(program.functions)
    for host, sites in zip(hosts, lists, strict=True):
        ranks = {rank: program.ranks[rank] for rank in host}
        called = {i.fn for own in ranks.values() for i in own.instructions if isinstance(i, Call)}
        yield HostProgram(
            name=program.name,
            size=program.size,
            ranks=ranks,
            functions=tuple((name, functions[name]) for name in sorted(called)),
            stage_of={rank: program.stage_of[rank] for rank in ranks},
            known_as={rank: program.known_as[rank] for rank in ranks if program.known_as},
            sites=tuple(sites),
            alone=working <= ranks.keys(),
            commits=commits,
            communicates=communicates,
            undoable=undoable,
        )


def _has(program: Program, kind: type | UnionType) -> bool:
    return any(isinstance(i, kind) for own in program.ranks for i in own.instructions)


def _leaves(rank_program: RankProgram) -> bool:
    """Whether a run of the list may leave what cannot be taken back, without a commit point."""
    kept = rank_program.lasting.difference(rank_program.replayable)
    for i in rank_program.instructions:
        if not kept.isdisjoint((*i.writes, *i.outputs)):
            return True
        if isinstance(i, Send) and i.buffer.variable:  # nothing stands for what is in it
            return True
    return False
