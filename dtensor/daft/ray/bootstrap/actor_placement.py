"""Places actors on the machines of a Ray cluster.

    rooms = [MachineCapacity("10.0.0.1", 8), MachineCapacity("10.0.0.2", 8)]
    place(((0,), (1,), (2,), (3,)), [(0, 1), (2, 3)], rooms)        # [0, 0, 1, 1]

Each machine gets a block of consecutive actors. A group of ranks, such as those along a mesh's last
axis, stays on one machine: of `Mesh(pp=2, tp=2)` on two machines, only pp's messages cross
machines. A group is split if no machine has room for it, or if it is the only group. On CPUs all
machines are used, with blocks as equal as possible; on GPUs (`fewest`) as few machines as possible.
Invariants: pure. No machine gets more actors than it has room for, unless the total is too small;
then actors share CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dtensor.daft.verification.pairing import Hosts


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """How many actors a machine has room for."""

    machine: str
    actors: int


def place(
    hosts: Hosts,
    groups: Sequence[Sequence[int]],
    capacities: Sequence[MachineCapacity],
    *,
    kind: str = "CPU",
    fewest: bool = False,
) -> list[int]:
    """Return the number of each actor's machine. `hosts`: the ranks of each actor; `groups`: ranks
    that should be on one machine; `capacities`: the machines; `kind`: the resource, for the error.
    Raises ValueError if the machines cannot hold the blocks."""
    usable = [number for number, capacity in enumerate(capacities) if capacity.actors] or [0]
    block_units = _units(hosts, groups)
    if len(block_units) == 1 or max(block_units) > max(
        capacities[number].actors for number in usable
    ):
        block_units = [1] * len(hosts)
    max_blocks = min(len(usable), len(block_units))
    enough = sum(capacity.actors for capacity in capacities) >= len(hosts)
    blocks: list[int] = []
    for num in range(1 if fewest else max_blocks, max_blocks + 1):
        ends = [0, *accumulate(block_units)]
        bounds = [ends[len(block_units) * each // num] for each in range(num + 1)]
        blocks = [end - begin for begin, end in pairwise(bounds)]
        fits = all(n <= capacities[number].actors for number, n in zip(usable, blocks))
        if fits or not (enough or fewest):
            return [number for number, n in zip(usable, blocks) for _ in range(n)]
    raise ValueError(_unequal(hosts, blocks, [capacities[number] for number in usable], kind))


def _units(hosts: Hosts, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the sizes of the runs of consecutive actors that stay together."""
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    inside: set[int] = set()  # actors before which no block may begin
    for group in groups:
        actors = sorted({host_of[rank] for rank in group})
        if actors == list(range(actors[0], actors[-1] + 1)):  # consecutive actors fit in a block
            inside.update(actors[1:])
    begins = [host for host in range(len(hosts)) if host not in inside]
    return [end - begin for begin, end in pairwise([*begins, len(hosts)])]


def _unequal(
    hosts: Hosts, blocks: Sequence[int], capacities: Sequence[MachineCapacity], kind: str
) -> str:
    """Return the text of the error for machines that cannot hold their blocks."""
    ends = [0, *accumulate(blocks)]
    facts = ""
    for capacity, (begin, end) in zip(capacities, pairwise(ends)):
        ranks = [rank for ranks_of_actor in hosts[begin:end] for rank in ranks_of_actor]
        facts += (
            f"\n  {capacity.machine}: {capacity.actors} {kind}s, ranks {ranks[0]} to {ranks[-1]}"
        )
    for capacity in capacities[len(blocks) :]:
        facts += f"\n  {capacity.machine}: {capacity.actors} {kind}s, no ranks"
    return (
        f"Machines have unequal rooms, and {len(hosts)} actors in their order, with ranks along "
        f"the mesh's last axis together, do not fit:{facts}\n"
        f"  Fix: start Ray on each with the same --num-{kind.lower()}s, or use a mesh whose blocks "
        f"fit; --num-{kind.lower()}s=0 leaves a machine out."
    )
