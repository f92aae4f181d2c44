"""Assigns messages to NCCL communicators: as few as the orders of messages in programs allow.

    communicators = Communicators()
    communicators.number(program, keys, host_of)   # new: {((0, 1), "fwd", "transfer"): 0, ...}

Keys with the same members share a communicator if all members start their messages in the same
order. If a later program has another order, its keys move to new communicators, for all programs;
hosts load and run in the controller's order, so all of them move between the same two runs.

Sharing adds no hang. Let message m start before message n on all members. On each host, everything
that m waits for comes before n on the same stream, so n waits for it anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Collective, Key, Recv, Send, key_of
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.transports.exchange import in_two_halves

MAX_COMMUNICATORS = 24
"""The most communicators on one GPU, see `nccl.py`."""
MAX_STREAMS = 32
"""The most streams of one GPU, which has as many hardware queues: the current stream, one for each
communicator, and a side stream for each that has an all_reduce in two halves (`exchange.py`)."""


class Communicators:
    """The communicators of a launch. `of`: key to the number of its communicator."""

    def __init__(self) -> None:
        self.of: dict[Key, int] = {}
        self._members: list[tuple[int, ...]] = []  # by number
        self._sided: frozenset[int] = frozenset()  # numbers of communicators with a side stream

    def number(
        self, program: Program, keys: Iterable[Key], host_of: Sequence[int]
    ) -> dict[Key, int]:
        """Assign communicators for a program that is about to be loaded; return the keys with a new
        communicator. `keys`: the program's keys that cross hosts. Raises ProgramError if a GPU
        would have more communicators than can run at the same time."""
        of, members = dict(self.of), list(self._members)
        user: dict[int, int] = {}  # communicator to the list of keys of this program that uses it

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
    """Return lists of keys that may share a communicator, because of their order in a program."""
    orders: dict[tuple[tuple[int, ...], str], dict[int, list[Key]]] = {}
    for rank, own in enumerate(program.ranks):
        for instruction in own.instructions:
            if isinstance(instruction, Send | Recv | Collective):
                key = key_of(rank, instruction)
                if key in keys:
                    members, _, sort = key
                    orders.setdefault((members, sort), {}).setdefault(rank, []).append(key)
    lists: list[list[Key]] = []
    for by_member in orders.values():
        first, *others = by_member.values()
        keys_of_group = list(dict.fromkeys(first))
        if all(order == first for order in others):
            lists.append(keys_of_group)
        else:
            lists += [[key] for key in keys_of_group]
    return lists


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
    """Raise ProgramError if a host has too many communicators or streams."""
    communicators, streams = Counter[int](), Counter[int]()
    for number, ranks in enumerate(members):
        hosts = {host_of[rank] for rank in ranks}
        communicators.update(hosts)
        streams.update(dict.fromkeys(hosts, 1 + (number in sided)))
    for host in sorted(communicators):
        count = communicators[host]
        if count > MAX_COMMUNICATORS or streams[host] >= MAX_STREAMS:
            raise ProgramError(
                f"The programs loaded need {count} NCCL communicators on actor {host}, with "
                f"{streams[host]} streams; at most {MAX_COMMUNICATORS} with {MAX_STREAMS - 1} can "
                f"be sure to run at once.\n"
                f"  Fix: start messages of the same ranks in one order on all of them, or launch "
                f"anew for programs that use other groups."
            )
