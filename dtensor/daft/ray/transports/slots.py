"""The layout of payloads in shared memory of actors, and the counts a wait needs: from a program.

    between = CrossHostKeys(program, (0, 1))            # the controller: once for a program,
    replace(own, meetings=between.of(own.ranks))        # then for each host's part of it
    arena = lay_out(own, (0, 1), shares)                # the host

Each actor has a window of memory, which it writes and the others read. A key (`instructions.Key`)
has a `Lane`: in the window of each member's actor, `slots` slots, each as large as the largest
payload that this member brings to the key. The k-th start of a program on a key writes slot `k %
slots` of the member's own, and the others read it there.

    all_reduce of f32[1024] over (0, 1), waited for before the next on its channel:
    Lane(key, slots=2, slot_bytes=(4096, 4096), begins=(0, 0), ...)      # 8 KB in either window

The number of slots: `span` of a rank is the largest number of starts from the oldest unfinished one
to the newest, both counted. A start may overwrite a slot that all members have read. They have read
all but the last `span` of its own starts and as many as the partner's span before them, so the sum
of the two largest spans is enough (docs/design/0016-same-host.md has the proof, and `python -m
tests.daft.explore --slots` tests it).

The counts of a wait: one semaphore for each ordered pair of ranks counts the starts of the first
that concern the second, on any key, in the order of its list. For a start and each of its partners,
`ahead` is the count that the semaphore must reach: the starts that this rank had made itself before
this start, and so many more.

A host has the lists of its own ranks. For the other ranks it gets the payloads of their starts with
its ranks, in their order, and for all keys between hosts the number and the size of their slots.

Invariants: all actors compute the same layout from their parts of the same program. A window begins
with a line for its user; payloads begin at multiples of `LINE`. Bytes are bounded: for each key and
member `slots` times its largest payload, which is at most `LARGEST_BYTES`; a key with larger ones
uses messages. It handles neither memory nor processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import TypeAlias, assert_never

from dtensor.daft.ir.host_program import HostProgram, KeySlots, Meetings
from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, Wait, key_of
from dtensor.daft.ir.program import Program
from dtensor.daft.verification.pairing import Site, instruction_at, starts_of_waits
from dtensor.numerics import REDUCTIONS

LINE = 64
"""Size of a cache line in bytes: tensors and semaphores begin at multiples."""
LARGEST_BYTES = 1 << 28
"""Most bytes of a slot. Larger payloads are rare, and would stay with the actor as long as the
program."""
TOGETHER_BYTES = 1 << 16
"""An all_reduce of more bytes, over more than two ranks, is folded piece by piece, each piece by
one member: else each member would read the payloads of all."""
PIECE_BYTES = 1 << 18  # its sums stay in a core's cache
MOST_PIECES = 32

Piece: TypeAlias = tuple[tuple[int, int, int], ...]
"""Elements of a bucket: (number of the tensor, first element, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The places of a key's payloads; all offsets are in the window of an actor.

    `slot_bytes` and `begins` are by member, in the order of the key's ranks. A collective that is
    folded together (in at most `pieces`, 0 if none is) has, in the window of the first member,
    `claims`, a semaphore for each slot and piece, and `results`, `result_bytes` for each slot; and
    with each member `done`, a semaphore for each slot.
    """

    key: Key
    slots: int
    slot_bytes: tuple[int, ...]
    begins: tuple[int, ...]
    pieces: int
    result_bytes: int
    claims: int
    results: int
    done: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """The layout on one host. `window_bytes`: by actor. For each start of its own ranks, `brings`:
    the payloads by member of its key; `ahead`: counts by the key's other ranks."""

    lanes: Mapping[Key, Lane]
    window_bytes: tuple[int, ...]
    brings: Mapping[Site, tuple[tuple[Buffer, ...], ...]]
    ahead: Mapping[Site, Mapping[int, int]]


class CrossHostKeys:
    """The traffic between hosts of a program, of all its ranks; `host_of`: by rank, its host."""

    def __init__(self, program: Program, host_of: Sequence[int]) -> None:
        uses = _uses(program, host_of)
        ordered = sorted(uses, key=lambda key: (key[2], *key))
        slots = [(key, _slots_of(program, uses[key])) for key in ordered]
        self.keys: tuple[KeySlots, ...] = tuple(
            key_slots for _, key_slots in slots if key_slots is not None
        )
        known: dict[tuple[int, tuple[Buffer, ...]], tuple[int, tuple[Buffer, ...]]] = {}
        starts: dict[Site, tuple[int, tuple[Buffer, ...]]] = {}
        for number, key_slots in enumerate(self.keys):
            for rank, indices in uses[key_slots.key].starts.items():
                for index in indices:
                    each = number, brought(_start(program, (rank, index)))
                    starts[rank, index] = known.setdefault(each, each)
        self._starts: dict[int, list[tuple[int, tuple[Buffer, ...]]]] = defaultdict(list)
        for site in sorted(starts):
            self._starts[site[0]].append(starts[site])

    def of(self, ranks: Collection[int]) -> Meetings:
        """The facts that the host of these ranks needs."""
        members = [frozenset(members_of_key.key[0]) for members_of_key in self.keys]
        mine = {
            n for n, members_of_key in enumerate(members) if not members_of_key.isdisjoint(ranks)
        }
        peers = sorted({rank for n in mine for rank in members[n]}.difference(ranks))
        return Meetings(
            keys=self.keys,
            peers={r: tuple(each for each in self._starts[r] if each[0] in mine) for r in peers},
        )


def lay_out(program: HostProgram, host_of: Sequence[int], shares: Callable[[Key], bool]) -> Arena:
    """The layout for the keys for which `shares` is true; `host_of`: by rank, the number of its
    actor."""
    used = [LINE] * (max(host_of) + 1)
    meetings = program.meetings
    lanes = {own.key: _lane(own, host_of, used) for own in meetings.keys if shares(own.key)}
    here = {host_of[rank] for key in lanes for rank in key[0]}
    window_bytes = tuple(nbytes if actor in here else 0 for actor, nbytes in enumerate(used))
    starts = {rank: _own_starts(program, rank, lanes) for rank in program.ranks}
    keys = [own.key for own in meetings.keys]
    for rank, own in meetings.peers.items():
        starts[rank] = [(-1, keys[n], buffers) for n, buffers in own if keys[n] in lanes]
    brings, ahead = _met(starts, program.ranks)
    return Arena(lanes=lanes, window_bytes=window_bytes, brings=brings, ahead=ahead)


def brought(start: Start) -> tuple[Buffer, ...]:
    """The payload that a rank writes into its slot."""
    match start:
        case Send(buffer=buffer):
            return (buffer,)
        case Recv():
            return ()
        case Collective(in_buffers=buffers):
            return buffers
        case _:
            assert_never(start)


def placed(buffers: Sequence[Buffer]) -> tuple[tuple[int, ...], int]:
    """The begin of each in a slot or among results, and the bytes of all."""
    ends = tuple(accumulate((_lines(buffer.nbytes) for buffer in buffers), initial=0))
    return ends[:-1], ends[-1]


def pieces_of(start: Start) -> tuple[Piece, ...]:
    """The pieces that single members fold; empty if each member folds all of it."""
    if not isinstance(start, Collective) or start.kind != "all_reduce" or start.op is None:
        return ()
    total = sum(buffer.nbytes for buffer in start.in_buffers)
    if len(start.group) == 2 or total <= TOGETHER_BYTES:
        return ()
    most = min(PIECE_BYTES, ceil(total / (2 * len(start.group))))
    unit, most = REDUCTIONS[start.op].unit, max(most, ceil(total / MOST_PIECES))
    pieces: list[Piece] = []
    piece: list[tuple[int, int, int]] = []
    room = most
    for number, buffer in enumerate(start.in_buffers):
        size, itemsize, at = prod(buffer.shape), buffer.dtype.itemsize, 0
        while at < size:
            end = min(size, at + max(unit, room // itemsize // unit * unit))
            piece.append((number, at, end))
            room -= (end - at) * itemsize
            at = end
            if room < unit * itemsize:
                pieces.append(tuple(piece))
                piece, room = [], most
    return (*pieces, tuple(piece)) if piece else tuple(pieces)


@dataclass(slots=True)
class _Use:
    """The use of a key: by rank, the indices of its starts in the rank's list; and all ranks'
    spans."""

    key: Key
    starts: dict[int, list[int]]
    spans: list[int]


def _uses(program: Program, host_of: Sequence[int]) -> dict[Key, _Use]:
    """The uses of the keys whose members are on different hosts."""
    uses: dict[Key, _Use] = {}
    crosses: dict[Key, bool] = {}
    for rank, rank_program in enumerate(program.ranks):
        waits = starts_of_waits(rank_program.instructions)
        at: dict[int, tuple[Key, int]] = {}  # a start: its key, and its number on that
        pending: dict[Key, dict[int, None]] = defaultdict(dict)  # numbers, the oldest first
        spans: dict[Key, int] = {}
        for index, instruction in enumerate(rank_program.instructions):
            if isinstance(instruction, Wait):
                for start in waits[index]:
                    if start in at:
                        key, number = at[start]
                        del pending[key][number]
            elif isinstance(instruction, Send | Recv | Collective):
                if not isinstance(instruction, Collective) and instruction.buffer.variable:
                    continue
                key = key_of(rank, instruction)
                if key not in crosses:
                    hosts = {host_of[member] for member in key[0]}
                    crosses[key] = len(hosts) == len(key[0]) > 1
                if not crosses[key]:
                    continue
                use = uses.setdefault(key, _Use(key, {member: [] for member in key[0]}, []))
                number = len(use.starts[rank])
                use.starts[rank].append(index)
                at[index] = key, number
                pending[key][number] = None
                spans[key] = max(spans.get(key, 0), number - next(iter(pending[key])) + 1)
        for key, span in spans.items():
            uses[key].spans.append(span)
    return uses


def _slots_of(program: Program, use: _Use) -> KeySlots | None:
    """The slots of a key; None if they are too large."""
    starts = [
        [_start(program, (r, index)) for index in indices] for r, indices in use.starts.items()
    ]
    sizes = tuple(max(placed(brought(start))[1] for start in indices) for indices in starts)
    if max(sizes) > LARGEST_BYTES:
        return None
    together = [(start, pieces) for start in starts[0] if (pieces := pieces_of(start))]
    return KeySlots(
        key=use.key,
        slots=sum(sorted(use.spans)[-2:]),
        slot_bytes=sizes,
        pieces=max((len(pieces) for _, pieces in together), default=0),
        result_bytes=max((placed(_made(start))[1] for start, _ in together), default=0),
    )


def _lane(key_slots: KeySlots, host_of: Sequence[int], used: list[int]) -> Lane:
    """Place a key's slots after the `used` bytes of each window."""
    members, slots = key_slots.key[0], key_slots.slots

    def take(member: int, nbytes: int) -> int:
        actor = host_of[members[member]]
        begin = used[actor]
        used[actor] += nbytes
        return begin

    return Lane(
        key=key_slots.key,
        slots=slots,
        slot_bytes=key_slots.slot_bytes,
        begins=tuple(take(m, slots * size) for m, size in enumerate(key_slots.slot_bytes)),
        pieces=key_slots.pieces,
        result_bytes=key_slots.result_bytes,
        claims=take(0, slots * key_slots.pieces * LINE),
        results=take(0, slots * key_slots.result_bytes),
        done=tuple(take(m, slots * LINE if key_slots.pieces else 0) for m in range(len(members))),
    )


_Starts: TypeAlias = list[tuple[int, Key, tuple[Buffer, ...]]]
"""The starts of a rank, in its order: the index, -1 on another host, the key, and the payload."""


def _own_starts(program: HostProgram, rank: int, lanes: Mapping[Key, Lane]) -> _Starts:
    starts: _Starts = []
    for index, start in enumerate(program.ranks[rank].instructions):
        if isinstance(start, Send | Recv | Collective):
            key = key_of(rank, start)
            if key in lanes and (isinstance(start, Collective) or not start.buffer.variable):
                starts.append((index, key, brought(start)))
    return starts


def _met(
    starts: Mapping[int, _Starts], hosted: Collection[int]
) -> tuple[dict[Site, tuple[tuple[Buffer, ...], ...]], dict[Site, dict[int, int]]]:
    """`Arena.brings` and `Arena.ahead`."""
    # for the k-th start on a key, by rank: its payload, and by partner how many earlier starts of
    # the rank concern it
    brings: dict[tuple[Key, int, int], tuple[Buffer, ...]] = {}
    before: dict[tuple[Key, int, int], dict[int, int]] = {}
    sites: dict[Site, tuple[Key, int]] = {}
    for rank, listed in starts.items():
        numbers: dict[Key, int] = defaultdict(int)
        counts: dict[int, int] = defaultdict(int)
        concerned = {key: _concerned(key, rank, hosted) for _, key, _ in listed}
        for index, key, buffers in listed:
            number = numbers[key]
            numbers[key] += 1
            if rank in hosted:
                sites[rank, index] = key, number
            brings[key, number, rank] = buffers
            there = before[key, number, rank] = {}
            for other in concerned[key]:
                there[other] = counts[other]
                counts[other] += 1
    return (
        {
            site: tuple(brings[key, number, member] for member in key[0])
            for site, (key, number) in sites.items()
        },
        {
            (rank, index): {
                other: before[key, number, other][rank] + 1 - before[key, number, rank][other]
                for other in key[0]
                if other != rank
            }
            for (rank, index), (key, number) in sites.items()
        },
    )


def _concerned(key: Key, rank: int, hosted: Collection[int]) -> tuple[int, ...]:
    """The partners of a rank on a key whose starts are counted here."""
    return tuple(other for other in key[0] if other != rank and (rank in hosted or other in hosted))


def _start(program: Program, site: Site) -> Start:
    start = instruction_at(program, site)
    assert isinstance(start, Send | Recv | Collective)
    return start


def _made(start: Start) -> tuple[Buffer, ...]:
    assert isinstance(start, Collective)
    return start.out_buffers


def _lines(nbytes: int) -> int:
    """`nbytes`, rounded up to whole lines."""
    return -(-nbytes // LINE) * LINE
