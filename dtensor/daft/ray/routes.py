"""Which starts of a program cross actors, and what each of them needs between the actors.

Example: `pipeline(4)` on two actors of two ranks crosses once, from rank 1 to rank 2:

    check_routes(program, (0, 0, 1, 1))        # [((1, 2), "fwd", "transfer")]

A `Key` is what has an order of its own: one direction of transfer, or one group, on one channel.
The controller numbers the keys of all programs loaded; a gloo transport makes tags of the numbers,
an NCCL transport one communicator for each key, in the order of the numbers.

Invariant: pure, and the same list on every call. A collective with members of which some share an
actor and some do not has no route, and is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, assert_never

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Call, Collective, Free, Recv, Send, Wait
from dtensor.daft.ir.program import Program

Key: TypeAlias = tuple[tuple[int, ...], str, str]
"""(ranks, channel, "transfer" | "collective"); of a transfer, (from, to)."""

MAX_GROUPS = 24
"""Communicators on one GPU, see `nccl.py`."""


def key_of(rank: int, start: Send | Recv | Collective) -> Key:
    match start:
        case Send(to=to, channel=channel):
            return ((rank, to), channel, "transfer")
        case Recv(source_rank=source, channel=channel):
            return ((source, rank), channel, "transfer")
        case Collective(group=group, channel=channel):
            return (group, channel, "collective")
        case _:
            assert_never(start)


def check_routes(program: Program, actor_of: Sequence[int]) -> list[Key]:
    """The keys that cross actors, sorted. `ProgramError` for a collective that does so in part."""
    found: set[Key] = set()
    for rank, own in enumerate(program.ranks):
        for instruction in own.instructions:
            match instruction:
                case Send() | Recv() | Collective():
                    key = key_of(rank, instruction)
                    actors = {actor_of[member] for member in key[0]}
                    if 1 < len(actors) < len(key[0]):
                        raise ProgramError(
                            f"Program {program.name!r}: a collective over {key[0]} has members "
                            f"that share an actor and members that do not (actors "
                            f"{[actor_of[member] for member in key[0]]}).\n"
                            f"  Fix: launch with ranks_per_actor=1, or with all members on one."
                        )
                    if len(actors) > 1:
                        found.add(key)
                case Call() | Wait() | Free():
                    pass
                case _:
                    assert_never(instruction)
    return sorted(found)


def check_groups(keys: Iterable[Key], actor_of: Sequence[int]) -> None:
    """`ProgramError` if an actor would hold more NCCL communicators than may run at once."""
    held: dict[int, int] = {}
    for members, _, _ in keys:
        for member in members:
            held[actor_of[member]] = held.get(actor_of[member], 0) + 1
    actor, most = max(held.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    if most > MAX_GROUPS:
        raise ProgramError(
            f"The programs loaded need {most} NCCL communicators on actor {actor}, at most "
            f"{MAX_GROUPS} can be sure to run at once.\n"
            f"  Fix: put starts that need no order among themselves on one channel, or launch anew "
            f"for programs that use other groups."
        )
