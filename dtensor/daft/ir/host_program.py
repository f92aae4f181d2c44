"""The part of a program that is sent to one host, with a summary of the other ranks.

    first, second = host_programs(program, ((0,), (1,)), report.lists)
    first.ranks[0].instructions            # the list of rank 0; rank 1's list is not included
    first.functions                        # the functions that rank 0 calls
    first.alone                            # False: rank 1 takes part as well

The bytes sent to all hosts therefore grow with the number of ranks, not with its square. Ranks have
the program's numbers. Facts about the whole program are equal on all hosts.
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
    """The shared memory that a key of the program needs (`ray/transports/slots.py`).

    `slots`: how many starts of a rank may be in flight with the key. `slot_bytes`: the size of one
    slot, by member. The members reduce into at most `pieces` pieces of `result_bytes` in total.
    """

    key: Key
    slots: int
    slot_bytes: tuple[int, ...]
    pieces: int
    result_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """The facts that hosts need to exchange messages through shared memory.

    `keys`: the keys of the program between ranks of different hosts. `peers`: for each rank of
    another host, its starts with this host's ranks in the order of its list, as (index in `keys`,
    the buffers that it contributes).
    """

    keys: tuple[KeySlots, ...] = ()
    peers: Mapping[int, tuple[tuple[int, tuple[Buffer, ...]], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, tuple[Buffer, ...]], ...]]
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HostProgram:
    """One host's part of a program.

    `size`: the number of ranks of the whole program. `functions`: those that `ranks` call.
    `sites`: (rank, index) in the order in which the host runs them. `alone`: no other host has
    instructions. `commits`: the program has a commit point. `communicates`: some rank starts a
    transfer or a collective. `undoable`: a failed run leaves nothing behind, whichever call fails.
    `graphs`: as in `Program`.
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
    graphs: frozenset[str] | None = None
    meetings: Meetings = field(default_factory=Meetings)

    @staticmethod
    def whole(program: Program, sites: Sequence[tuple[int, int]]) -> HostProgram:
        """Return the part of a host that has all ranks."""
        (program_of_host,) = host_programs(program, [range(program.size)], [sites])
        return program_of_host

    def __repr__(self) -> str:
        return f"<program {self.name} on ranks {sorted(self.ranks)} of {self.size:,}>"


def host_programs(
    program: Program,
    hosts: Sequence[Sequence[int]],
    lists: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[HostProgram]:
    """Yield the part of each host. `hosts`: the ranks of each. `lists`: the sites of each, in the
    order in which it runs them."""
    commits, communicates = _contains(program, Commit), _contains(program, Send | Recv | Collective)
    undoable = not any(map(_cannot_be_undone, program.ranks))
    working = frozenset(
        rank for rank, rank_program in enumerate(program.ranks) if rank_program.instructions
    )
    functions = dict(program.functions)
    for host, sites in zip(hosts, lists, strict=True):
        ranks = {rank: program.ranks[rank] for rank in host}
        called = {
            i.fn
            for rank_program in ranks.values()
            for i in rank_program.instructions
            if isinstance(i, Call)
        }
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
            graphs=program.graphs,
        )


def _contains(program: Program, kind: type | UnionType) -> bool:
    return any(
        isinstance(i, kind) for rank_program in program.ranks for i in rank_program.instructions
    )


def _cannot_be_undone(rank_program: RankProgram) -> bool:
    """Return whether a failed run may leave writes or messages that cannot be taken back."""
    lasting = rank_program.lasting.difference(rank_program.replayable)
    for i in rank_program.instructions:
        if not lasting.isdisjoint((*i.writes, *i.outputs)):
            return True
        if isinstance(i, Send) and i.buffer.variable:  # no placeholder can be sent in its place
            return True
    return False
