"""Which communicator of NCCL carries which messages: as few as the orders of a program allow.

    shared = Communicators()
    shared.number(program, keys, host_of)      # {((0, 1), "fwd", "transfer"): 0, ...}, what is new

Keys with the same members share one where all members start their messages in the same order:
transfers of one direction between two ranks, or collectives of one group, whatever their channels.
Others have one each. A later program with another order moves the keys that it orders otherwise to
new ones, for all programs: hosts run and load in the controller's order, so that all of them move
between the same two runs.

Sharing adds no hang. The kernel of a message waits for its own stream, for what is before it on the
current stream of its host when it is started, and for its peers. Let m be started before n on all
members. What m waits for on each host is before n on the same stream, so n waits for it anyway; and
by the same argument for what is before m in the communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Collective, Key, Recv, Send, key_of
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.transports.exchange import in_two_halves

MAX_COMMUNICATORS = 24
"""On one GPU, see `nccl.py`."""
MAX_STREAMS = 32
"""Of one GPU, which has as many hardware queues: the current one, one for each communicator, and a
side stream for each with an all_reduce in two halves (`exchange.py`)."""


class Communicators:
    """Of a launch, as the controller knows them. `of`: the number of each key's."""

    def __init__(self) -> None:
        self.of: dict[Key, int] = {}
        self._members: list[tuple[int, ...]] = []  # by number
        self._sided: frozenset[int] = frozenset()  # those with a side stream

    def number(
        self, program: Program, keys: Iterable[Key], host_of: Sequence[int]
    ) -> dict[Key, int]:
        """The keys that have a new one, for a program that is about to be loaded. `keys`: those
        that cross hosts. ProgramError where a GPU would hold more than may run at once."""
        of, members = dict(self.of), list(self._members)
        user: dict[int, int] = {}  # by number, which keys of the program have it

        def make(key: Key, alike: int) -> int:
            members.append(key[0])
            user[len(members) - 1] = alike
            return len(members) - 1

        for i, alike in enumerate(_alike(program, frozenset(keys))):
            moved: dict[int, int] = {}
            for key in alike:
                number = of.get(key)
                if number is not None and user.setdefault(number, i) != i:
                    if number not in moved:
                        moved[number] = make(key, i)
                    of[key] = moved[number]
            has = [of[key] for key in alike if key in of]
            for key in alike:
                if key not in of:
                    has = has or [make(key, i)]
                    of[key] = has[0]
        sided = self._sided | {of[key] for key in _in_two_halves(program) if key in of}
        _check(members, sided, host_of)
        new = {key: number for key, number in of.items() if self.of.get(key) != number}
        self.of, self._members, self._sided = of, members, sided
        return new


def _alike(program: Program, keys: frozenset[Key]) -> list[list[Key]]:
    """Keys that may share one communicator, by this program's orders."""
    orders: dict[tuple[tuple[int, ...], str], dict[int, list[Key]]] = {}
    for rank, own in enumerate(program.ranks):
        for instruction in own.instructions:
            if isinstance(instruction, Send | Recv | Collective):
                key = key_of(rank, instruction)
                if key in keys:
                    members, _, sort = key
                    orders.setdefault((members, sort), {}).setdefault(rank, []).append(key)
    found: list[list[Key]] = []
    for by_member in orders.values():
        first, *others = by_member.values()
        own = list(dict.fromkeys(first))
        found += [own] if all(each == first for each in others) else [[key] for key in own]
    return found


def _in_two_halves(program: Program) -> set[Key]:
    return {
        key_of(rank, instruction)
        for rank, own in enumerate(program.ranks)
        for instruction in own.instructions
        if isinstance(instruction, Collective) and in_two_halves(instruction)
    }


def _check(
    members: Sequence[tuple[int, ...]], sided: Collection[int], host_of: Sequence[int]
) -> None:
    held, streams = Counter[int](), Counter[int]()
    for number, each in enumerate(members):
        hosts = {host_of[rank] for rank in each}
        held.update(hosts)
        streams.update(dict.fromkeys(hosts, 1 + (number in sided)))
    for host in sorted(held):
        if held[host] > MAX_COMMUNICATORS or streams[host] >= MAX_STREAMS:
            raise ProgramError(
                f"The programs loaded need {held[host]} NCCL communicators on actor {host}, with "
                f"{streams[host]} streams; at most {MAX_COMMUNICATORS} with {MAX_STREAMS - 1} can "
                f"be sure to run at once.\n"
                f"  Fix: start messages of the same ranks in one order on all of them, or launch "
                f"anew for programs that use other groups."
            )
