"""The layout of a program's messages in shared memory, and the counts that its waits need.

    keys = CrossHostKeys(program, (0, 1))               # on the controller, once for a program
    replace(part, meetings=keys.of(part.ranks))         # on the controller, for each host's part
    arena = lay_out(part, (0, 1), shares)               # on each host

A key (`instructions.Key`) has a `Lane`: some slots in the window of each member's actor. Start
number k on the key writes slot k % slots of its own actor, where the other members read it. An
all_reduce of f32[1024] over (0, 1) has Lane(key, slots=2, slot_bytes=(4096, 4096), ...). A
semaphore for each pair of ranks counts starts. docs/design/0016-same-host.md proves that the slots
and counts are enough. Invariant: all actors compute the same layout from their parts of a program.
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
"""The bytes of a cache line: tensors and semaphores begin at multiples of it."""
MAX_SLOT_BYTES = 1 << 28
"""The most bytes of a slot. A key with larger payloads uses messages, since its slots would keep
their memory as long as the program is loaded."""
TOGETHER_BYTES = 1 << 16
"""An all_reduce of more bytes over more than two ranks is folded piece by piece, each piece by one
member. Otherwise each member would read the payloads of all."""
PIECE_BYTES = 1 << 18  # a piece whose sums stay in a core's cache
MAX_PIECES = 32

Piece: TypeAlias = tuple[tuple[int, int, int], ...]
"""Parts of tensors in a bucket: (number of the tensor, first element, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The places of a key's payloads. Offsets are in the windows of actors; tuples are by member,
    in the order of the key's ranks. The fields from `pieces` on are for all_reduces that are folded
    piece by piece."""

    key: Key
    slots: int
    slot_bytes: tuple[int, ...]
    begins: tuple[int, ...]  # offsets of the first slots
    pieces: int  # the most pieces of an all_reduce, 0 if none is folded piece by piece
    result_bytes: int  # the results of one slot
    claims: int  # offset, in the first member's window, of a semaphore for each slot and piece
    results: int  # offset, in the first member's window, of the results
    done: tuple[int, ...]  # offsets of a semaphore for each slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """The layout on one host. `window_bytes`: by actor. For each start of the host's ranks,
    `brings`: the buffers of each member; `ahead`: for each other rank of the key, by how many
    starts that rank must be ahead of this rank's starts before this one."""

    lanes: Mapping[Key, Lane]
    window_bytes: tuple[int, ...]
    brings: Mapping[Site, tuple[tuple[Buffer, ...], ...]]
    ahead: Mapping[Site, Mapping[int, int]]


class CrossHostKeys:
    """The keys of a program with members on several hosts. `host_of`: rank to host."""

    def __init__(self, program: Program, host_of: Sequence[int]) -> None:
        """Choose the slots of all keys, and list the starts of each rank on them."""
        uses = _uses(program, host_of)
        ordered = sorted(uses, key=lambda key: (key[2], *key))
        slots = [(key, _slots_of(program, uses[key])) for key in ordered]
        self.keys: tuple[KeySlots, ...] = tuple(
            key_slots for _, key_slots in slots if key_slots is not None
        )
        shared: dict[tuple[int, tuple[Buffer, ...]], tuple[int, tuple[Buffer, ...]]] = {}
        starts: dict[Site, tuple[int, tuple[Buffer, ...]]] = {}
        for number, key_slots in enumerate(self.keys):
            for rank, indices in uses[key_slots.key].starts.items():
                for index in indices:
                    index_and_buffers = number, brought(_start(program, (rank, index)))
                    starts[rank, index] = shared.setdefault(
                        index_and_buffers, index_and_buffers
                    )  # equal entries share an object
        self._starts: dict[int, list[tuple[int, tuple[Buffer, ...]]]] = defaultdict(list)
        for site in sorted(starts):
            self._starts[site[0]].append(starts[site])

    def of(self, ranks: Collection[int]) -> Meetings:
        """Return the facts that the host of these ranks needs: all keys, and for each other rank
        its starts on keys of these ranks."""
        members = [frozenset(key_slots.key[0]) for key_slots in self.keys]
        numbers = {n for n, of_key in enumerate(members) if not of_key.isdisjoint(ranks)}
        peers = sorted({rank for n in numbers for rank in members[n]}.difference(ranks))
        return Meetings(
            keys=self.keys,
            peers={r: tuple(each for each in self._starts[r] if each[0] in numbers) for r in peers},
        )


def lay_out(program: HostProgram, host_of: Sequence[int], shares: Callable[[Key], bool]) -> Arena:
    """Return the layout of the keys for which `shares(key)` is true. `host_of`: actors by rank."""
    used = [LINE] * (max(host_of) + 1)
    meetings = program.meetings
    lanes = {
        key_slots.key: _lane(key_slots, host_of, used)
        for key_slots in meetings.keys
        if shares(key_slots.key)
    }
    used_actors = {host_of[rank] for key in lanes for rank in key[0]}
    window_bytes = tuple(nbytes if actor in used_actors else 0 for actor, nbytes in enumerate(used))
    starts = {rank: _own_starts(program, rank, lanes) for rank in program.ranks}
    keys = [key_slots.key for key_slots in meetings.keys]
    for rank, peer_starts in meetings.peers.items():
        starts[rank] = [(-1, keys[n], buffers) for n, buffers in peer_starts if keys[n] in lanes]
    brings, ahead = _match_starts(starts, program.ranks)
    return Arena(lanes=lanes, window_bytes=window_bytes, brings=brings, ahead=ahead)


def brought(start: Start) -> tuple[Buffer, ...]:
    """Return the buffers that a rank writes into its slot."""
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
    """Return the offset of each buffer in a slot, and the bytes of all."""
    ends = tuple(accumulate((_lines(buffer.nbytes) for buffer in buffers), initial=0))
    return ends[:-1], ends[-1]


def pieces_of(start: Start) -> tuple[Piece, ...]:
    """Return the pieces of an all_reduce that single members fold, () if there are none."""
    if not isinstance(start, Collective) or start.kind != "all_reduce" or start.op is None:
        return ()
    total = sum(buffer.nbytes for buffer in start.in_buffers)
    if len(start.group) == 2 or total <= TOGETHER_BYTES:
        return ()
    limit = min(PIECE_BYTES, ceil(total / (2 * len(start.group))))
    unit, limit = REDUCTIONS[start.op].unit, max(limit, ceil(total / MAX_PIECES))
    pieces: list[Piece] = []
    piece: list[tuple[int, int, int]] = []
    bytes_left = limit
    for number, buffer in enumerate(start.in_buffers):
        size, itemsize, begin = prod(buffer.shape), buffer.dtype.itemsize, 0
        while begin < size:
            end = min(size, begin + max(unit, bytes_left // itemsize // unit * unit))
            piece.append((number, begin, end))
            bytes_left -= (end - begin) * itemsize
            begin = end
            if bytes_left < unit * itemsize:
                pieces.append(tuple(piece))
                piece, bytes_left = [], limit
    return (*pieces, tuple(piece)) if piece else tuple(pieces)


@dataclass(slots=True)
class _Use:
    """The use of a key. `starts`: rank to the indices of its starts in the rank's list; `spans`:
    for each rank, the most starts from the oldest unfinished one to the newest, both counted."""

    key: Key
    starts: dict[int, list[int]]
    spans: list[int]


def _uses(program: Program, host_of: Sequence[int]) -> dict[Key, _Use]:
    """Return the uses of the keys whose members are on different hosts."""
    uses: dict[Key, _Use] = {}
    crosses: dict[Key, bool] = {}
    for rank, rank_program in enumerate(program.ranks):
        waits = starts_of_waits(rank_program.instructions)
        position_of_start: dict[
            int, tuple[Key, int]
        ] = {}  # index of a start to its key, and its number there
        pending: dict[Key, dict[int, None]] = defaultdict(dict)  # unfinished, the oldest first
        spans: dict[Key, int] = {}
        for index, instruction in enumerate(rank_program.instructions):
            if isinstance(instruction, Wait):
                for start in waits[index]:
                    if start in position_of_start:
                        key, number = position_of_start[start]
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
                position_of_start[index] = key, number
                pending[key][number] = None
                spans[key] = max(spans.get(key, 0), number - next(iter(pending[key])) + 1)
        for key, span in spans.items():
            uses[key].spans.append(span)
    return uses


def _slots_of(program: Program, use: _Use) -> KeySlots | None:
    """Return the slots of a key, None if they would be too large."""
    starts = [
        [_start(program, (r, index)) for index in indices] for r, indices in use.starts.items()
    ]
    sizes = tuple(max(placed(brought(start))[1] for start in indices) for indices in starts)
    if max(sizes) > MAX_SLOT_BYTES:
        return None
    in_pieces = [(start, pieces) for start in starts[0] if (pieces := pieces_of(start))]
    return KeySlots(
        key=use.key,
        slots=sum(sorted(use.spans)[-2:]),
        slot_bytes=sizes,
        pieces=max((len(pieces) for _, pieces in in_pieces), default=0),
        result_bytes=max((placed(_out_buffers(start))[1] for start, _ in in_pieces), default=0),
    )


def _lane(key_slots: KeySlots, host_of: Sequence[int], used: list[int]) -> Lane:
    """Place the slots of a key after the `used` bytes of each window, and add them to `used`."""
    members, slots = key_slots.key[0], key_slots.slots

    def take(member: int, nbytes: int) -> int:
        """Reserve ``nbytes`` in the window of a member's actor, and return their offset."""
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
"""The starts of a rank, in order: the index in its list (-1 if the rank is on another host), the
key, and the buffers."""


def _own_starts(program: HostProgram, rank: int, lanes: Mapping[Key, Lane]) -> _Starts:
    """Return the starts of a hosted rank on keys with a lane: (index in its list, key, the buffers
    that it writes)."""
    starts: _Starts = []
    for index, start in enumerate(program.ranks[rank].instructions):
        if isinstance(start, Send | Recv | Collective):
            key = key_of(rank, start)
            if key in lanes and (isinstance(start, Collective) or not start.buffer.variable):
                starts.append((index, key, brought(start)))
    return starts


def _match_starts(
    starts: Mapping[int, _Starts], hosted: Collection[int]
) -> tuple[dict[Site, tuple[tuple[Buffer, ...], ...]], dict[Site, dict[int, int]]]:
    """Return `Arena.brings` and `Arena.ahead`. `hosted`: the ranks of this host."""
    # for start number k of a rank on a key: its buffers, and, by partner, how many earlier starts
    # of the rank concern the partner
    brings: dict[tuple[Key, int, int], tuple[Buffer, ...]] = {}
    earlier_starts: dict[tuple[Key, int, int], dict[int, int]] = {}
    sites: dict[Site, tuple[Key, int]] = {}
    for rank, rank_starts in starts.items():
        numbers: dict[Key, int] = defaultdict(int)
        counts: dict[int, int] = defaultdict(int)
        concerned = {key: _concerned(key, rank, hosted) for _, key, _ in rank_starts}
        for index, key, buffers in rank_starts:
            number = numbers[key]
            numbers[key] += 1
            if rank in hosted:
                sites[rank, index] = key, number
            brings[key, number, rank] = buffers
            earlier = earlier_starts[key, number, rank] = {}
            for other in concerned[key]:
                earlier[other] = counts[other]
                counts[other] += 1
    return (
        {
            site: tuple(brings[key, number, member] for member in key[0])
            for site, (key, number) in sites.items()
        },
        {
            (rank, index): {
                other: earlier_starts[key, number, other][rank]
                + 1
                - earlier_starts[key, number, rank][other]
                for other in key[0]
                if other != rank
            }
            for (rank, index), (key, number) in sites.items()
        },
    )


def _concerned(key: Key, rank: int, hosted: Collection[int]) -> tuple[int, ...]:
    """Return a rank's partners on a key for which this host counts starts."""
    return tuple(other for other in key[0] if other != rank and (rank in hosted or other in hosted))


def _start(program: Program, site: Site) -> Start:
    start = instruction_at(program, site)
    assert isinstance(start, Send | Recv | Collective)
    return start


def _out_buffers(start: Start) -> tuple[Buffer, ...]:
    assert isinstance(start, Collective)
    return start.out_buffers


def _lines(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole lines."""
    return -(-nbytes // LINE) * LINE
