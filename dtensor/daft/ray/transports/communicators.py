"""Assigns messages to NCCL communicators: as few as the orders of messages in programs allow.

    communicators = Communicators()
    communicators.number(program, keys, host_of)   # new: {((0, 1), "fwd", "transfer"): 0, ...}

Keys with the same members share a communicator if all members start their messages in the same
order. If a later program has another order, its keys move to new communicators, for all programs;
hosts load and run in the controller's order, so all of them move between the same two runs.

Sharing adds no hang. Let message m start before message n on all members. On each host, everything
that m waits for comes before n on the same stream, so n waits for it anyway.

A kernel that waits for a peer keeps its multiprocessors. On a GPU the kernels that wait at one time
are messages between their start and their wait in the list of the rank. A communicator that is
alone then gets NCCL's own number of CTAs, and up to three of them 32 each (`CTAS`). If a later
program has more messages under way, the keys move to a new communicator with fewer CTAs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Collective, Key, Recv, Send, Wait, awaited, key_of
from dtensor.daft.ir.program import Program, RankProgram
from dtensor.daft.ray.transports.exchange import in_two_halves
from dtensor.daft.ray.transports.nccl import CTAS, is_native

MAX_COMMUNICATORS = 24
"""The most communicators on one GPU, see `nccl.py`."""
MAX_WIDE = 3
"""The most communicators with 32 CTAs whose kernels wait at the same time."""
MAX_STREAMS = 32
"""The most streams of one GPU, which has as many hardware queues: the current stream, one for each
communicator, and a side stream for each that has an all_reduce in two halves (`exchange.py`)."""


class Communicators:
    """The communicators of a launch. `of`: key to the number of its communicator, which modulo 3 is
    the position of its CTAs in `CTAS`. `in_order`: `nccl.py`."""

    def __init__(self, in_order: bool = False) -> None:
        self.of: dict[Key, int] = {}
        self._in_order = in_order
        self._index_of: dict[Key, int] = {}
        self._members: list[tuple[int, ...]] = []  # by index
        self._sizes: list[int] = []  # by index, the position in `CTAS`
        self._sided: frozenset[int] = frozenset()  # indexes of communicators with a side stream
        self._sided_keys: frozenset[Key] = frozenset()
        self._together: frozenset[frozenset[Key]] = frozenset()  # keys under way at the same time

    def number(
        self, program: Program, keys: Iterable[Key], host_of: Sequence[int]
    ) -> dict[Key, int]:
        """Assign communicators for a program that is about to be loaded; return the keys with a new
        communicator. `keys`: the program's keys that cross hosts. Raises ProgramError if a GPU
        would have more communicators than can run at the same time."""
        index_of, members, crossing = dict(self._index_of), list(self._members), frozenset(keys)
        list_using: dict[
            int, int
        ] = {}  # communicator to the list of keys of this program that uses it

        def make(key: Key, keys_in_order: int) -> int:
            """Add a communicator for the members of a key, and return its index."""
            members.append(key[0])
            list_using[len(members) - 1] = keys_in_order
            return len(members) - 1

        for i, keys_in_order in enumerate(_keys_in_same_order(program, crossing)):
            replacement_of: dict[int, int] = {}
            for key in keys_in_order:
                index = index_of.get(key)
                if index is not None and list_using.setdefault(index, i) != i:
                    if index not in replacement_of:
                        replacement_of[index] = make(key, i)
                    index_of[key] = replacement_of[index]
            indexes = [index_of[key] for key in keys_in_order if key in index_of]
            for key in keys_in_order:
                if key not in index_of:
                    indexes = indexes or [make(key, i)]
                    index_of[key] = indexes[0]
        together = self._together | set(_under_way_together(program, crossing, host_of))
        sizes = _fit(index_of, members, self._sizes, together)
        sided_keys = self._sided_keys | (self._in_two_halves(program) & index_of.keys())
        sided = self._sided | {index_of[key] for key in sided_keys}
        _check(members, sided, host_of)
        number_of = {key: index * len(CTAS) + sizes[index] for key, index in index_of.items()}
        new = {key: number for key, number in number_of.items() if self.of.get(key) != number}
        self.of, self._index_of, self._members, self._sizes = number_of, index_of, members, sizes
        self._sided, self._sided_keys, self._together = sided, sided_keys, together
        return new

    def _in_two_halves(self, program: Program) -> set[Key]:
        """Return the keys of large all_reduces, whose second half runs on a side stream."""
        return {
            key_of(rank, instruction)
            for rank, rank_program in enumerate(program.ranks)
            for instruction in rank_program.instructions
            if isinstance(instruction, Collective)
            and in_two_halves(instruction)
            and not is_native(instruction, self._in_order)
        }


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


def _under_way_together(
    program: Program, keys: frozenset[Key], host_of: Sequence[int]
) -> Iterator[frozenset[Key]]:
    """Yield the sets of keys whose messages are under way at the same time on a host. If the host
    has several ranks, these are all its keys."""
    for rank, rank_program in enumerate(program.ranks):
        if host_of.count(host_of[rank]) > 1:
            hosted = (r for r, host in enumerate(host_of) if host == host_of[rank])
            yield frozenset(key for r in hosted for key in keys if r in key[0])
        else:
            yield from _under_way(rank, rank_program, keys)


def _under_way(rank: int, program: RankProgram, keys: frozenset[Key]) -> Iterator[frozenset[Key]]:
    """Yield the keys of the messages that have started and are not awaited, if they are several."""
    under_way: list[tuple[tuple[str, ...], Key]] = []  # by the values that are awaited
    for instruction in program.instructions:
        match instruction:
            case Send() | Recv() | Collective():
                key = key_of(rank, instruction)
                if key in keys:
                    under_way.append((awaited(instruction), key))
                    together = frozenset(key for _, key in under_way)
                    if len(together) > 1:
                        yield together
            case Wait(values=values):
                under_way = [each for each in under_way if not set(values) & set(each[0])]
            case _:
                pass


def _fit(
    index_of: dict[Key, int],
    members: list[tuple[int, ...]],
    sizes: Sequence[int],
    together: Iterable[frozenset[Key]],
) -> list[int]:
    """Return the position in `CTAS` of each communicator. Keys of a communicator with too many CTAs
    move to a new one. ``sizes``: the positions of the communicators of earlier programs."""
    most: dict[int, int] = {}
    for keys in together:
        indexes = {index_of[key] for key in keys}
        most |= {index: max(len(indexes), most.get(index, 0)) for index in indexes}
    needed = {index: (num > 1) + (num > MAX_WIDE) for index, num in most.items()}
    fitting = [*sizes, *(needed.get(index, 0) for index in range(len(sizes), len(members)))]
    for index in [index for index in sorted(needed) if needed[index] > fitting[index]]:
        fitting.append(needed[index])
        members.append(members[index])
        index_of |= {key: len(members) - 1 for key, old in index_of.items() if old == index}
    return fitting


def _check(
    members: Sequence[tuple[int, ...]], sided: Collection[int], host_of: Sequence[int]
) -> None:
    """Raise ProgramError if a host has too many communicators or streams."""
    communicators, streams = Counter[int](), Counter[int]()
    for index, ranks in enumerate(members):
        hosts = {host_of[rank] for rank in ranks}
        communicators.update(hosts)
        streams.update(dict.fromkeys(hosts, 1 + (index in sided)))
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
