"""Which actor comes up on which machine, where Ray spans several.

    rooms = [MachineCapacity("10.0.0.1", 8), MachineCapacity("10.0.0.2", 8)]
    place(((0,), (1,), (2,), (3,)), [(0, 1), (2, 3)], rooms)        # [0, 0, 1, 1]

Actors are laid out in the order of their ranks, in blocks, a block on each machine. A *group* is of
ranks that exchange more with each other than with others, as those along a mesh's last axis do: it
stays together, a block ends between groups. So the mesh's order says what is inside a machine: of
`Mesh(pp=2, tp=2)` on two machines tp is, and the wire between them has the messages of pp alone.

On CPUs all machines are used, and blocks are as equal as groups permit; on GPUs (`fewest`) as few
machines as hold all. A group is cut where no machine has room for it, and where it is the only one.

Invariants: pure. No machine gets more actors than it has room for, unless all rooms together are
too few: then CPUs are shared on all machines, as they are on one. It does not know Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dtensor.daft.verification.pairing import Hosts


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """Of a machine, for so many actors."""

    machine: str
    actors: int


def place(
    hosts: Hosts,
    groups: Sequence[Sequence[int]],
    rooms: Sequence[MachineCapacity],
    *,
    kind: str = "CPU",
    fewest: bool = False,
) -> list[int]:
    """By actor, the number of its machine; `ValueError` where rooms are unequal, and do not hold
    the blocks. `kind`: what a room is of, in that error."""
    usable = [number for number, room in enumerate(rooms) if room.actors] or [0]
    units = _units(hosts, groups)
    if len(units) == 1 or max(units) > max(rooms[number].actors for number in usable):
        units = [1] * len(hosts)
    most = min(len(usable), len(units))
    enough = sum(room.actors for room in rooms) >= len(hosts)
    blocks: list[int] = []
    for num in range(1 if fewest else most, most + 1):
        ends = [0, *accumulate(units)]
        bounds = [ends[len(units) * each // num] for each in range(num + 1)]
        blocks = [end - begin for begin, end in pairwise(bounds)]
        fits = all(n <= rooms[number].actors for number, n in zip(usable, blocks))
        if fits or not (enough or fewest):
            return [number for number, n in zip(usable, blocks) for _ in range(n)]
    raise ValueError(_unequal(hosts, blocks, [rooms[number] for number in usable], kind))


def _units(hosts: Hosts, groups: Sequence[Sequence[int]]) -> list[int]:
    """The actors between which a block may end: so many, and so many, ..."""
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    inside: set[int] = set()
    for group in groups:
        there = sorted({host_of[rank] for rank in group})
        if there == list(range(there[0], there[-1] + 1)):  # else no block could have it alone
            inside.update(there[1:])
    begins = [host for host in range(len(hosts)) if host not in inside]
    return [end - begin for begin, end in pairwise([*begins, len(hosts)])]


def _unequal(
    hosts: Hosts, blocks: Sequence[int], rooms: Sequence[MachineCapacity], kind: str
) -> str:
    ends = [0, *accumulate(blocks)]
    facts = ""
    for room, (begin, end) in zip(rooms, pairwise(ends)):
        ranks = [rank for own in hosts[begin:end] for rank in own]
        facts += f"\n  {room.machine}: {room.actors} {kind}s, ranks {ranks[0]} to {ranks[-1]}"
    for room in rooms[len(blocks) :]:
        facts += f"\n  {room.machine}: {room.actors} {kind}s, no ranks"
    return (
        f"Machines have unequal rooms, and {len(hosts)} actors in their order, with ranks along "
        f"the mesh's last axis together, do not fit:{facts}\n"
        f"  Fix: start Ray on each with the same --num-{kind.lower()}s, or use a mesh whose blocks "
        f"fit; --num-{kind.lower()}s=0 leaves a machine out."
    )
