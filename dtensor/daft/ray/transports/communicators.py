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
        number_of, members = dict(self.of), list(self._members)
        list_using: dict[
            int, int
        ] = {}  # communicator to the list of keys of this program that uses it

        def make(key: Key, keys_in_order: int) -> int:
            """Add a communicator for the members of a key, and return its number."""
            members.append(key[0])
            list_using[len(members) - 1] = keys_in_order
            return len(members) - 1

        for i, keys_in_order in enumerate(_keys_in_same_order(program, frozenset(keys))):
            replacement_of: dict[int, int] = {}
            for key in keys_in_order:
                number = number_of.get(key)
                if number is not None and list_using.setdefault(number, i) != i:
                    if number not in replacement_of:
                        replacement_of[number] = make(key, i)
                    number_of[key] = replacement_of[number]
            numbers = [number_of[key] for key in keys_in_order if key in number_of]
            for key in keys_in_order:
                if key not in number_of:
                    numbers = numbers or [make(key, i)]
                    number_of[key] = numbers[0]
        sided = self._sided | {
            number_of[key] for key in _in_two_halves(program) if key in number_of
        }
        _check(members, sided, host_of)
        new = {key: number for key, number in number_of.items() if self.of.get(key) != number}
        self.of, self._members, self._sided = number_of, members, sided
        return new


def _keys_in_same_order(program: Program, keys: frozenset[Key]) -> list[list[Key]]:
    """Return lists of keys with the same members, which start messages of a list in the same order,
    so that the keys may share a communicator."""
    orders: dict[tuple[tuple[int, ...], str], dict[int, list[Key]]] = {}
    for rank, rank_program in enumerate(program.ranks):
        for instruction in rank_program.instructions:
            if isinstance(instruction, Send | Recv | Collective):
                key = key_of(rank, instruction)
                if key in keys:
                    members, _, kind = key
                    orders.setdefault((members, kind), {}).setdefault(rank, []).append(key)
    lists: list[list[Key]] = []
    for orders_by_member in orders.values():
        first_order, *other_orders = orders_by_member.values()
        keys_of_group = list(dict.fromkeys(first_order))
        if all(order == first_order for order in other_orders):
            lists.append(keys_of_group)
        else:
            lists += [[key] for key in keys_of_group]
    return lists


def _in_two_halves(program: Program) -> set[Key]:
    """Return the keys of large all_reduces, whose second half runs on a side stream."""
    return {
        key_of(rank, instruction)
        for rank, rank_program in enumerate(program.ranks)
        for instruction in rank_program.instructions
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
