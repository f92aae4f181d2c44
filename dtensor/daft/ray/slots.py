"""Where payloads lie in memory that actors share, and what a wait takes: computed from a program.

Each actor has a window of memory, that it writes and the others read. A key (`instructions.Key`)
has a `Lane`: in the window of each member's actor, `slots` slots, each as large as the largest
payload that this member brings to the key. The k-th start of a program on a key writes slot
`k % slots` of the member's own, and the others read it there.

    all_reduce of f32[1024] over (0, 1), waited for before the next on its channel:
    Lane(key, slots=2, slot_bytes=(4096, 4096), begins=(0, 0), ...)      # 8 KB in either window

How many slots: `span` of a rank is the most starts from the oldest that it has not waited for to
the newest, both counted. A start may overwrite what the key's members have all read, and that is
all but the last `span` of its own starts and as many as the partner's span before them: the sum of
the two largest spans is enough (docs/design/0016-same-host.md has the proof, and
`python -m tests.daft.explore --slots` tries it).

What a wait takes: one semaphore for each ordered pair of ranks counts the starts of the one that
concern the other, on whatever key, in the order of its list. `ahead` says, for a start and each of
its partners, how many of them there must have been: as many as this rank had made itself before
this start, and so many more.

Invariants: all actors compute the same from the same program. A window begins with a line for who
uses it; payloads begin at multiples of `LINE`. Bytes are bounded: for each key and member `slots`
times its largest payload, of which `LARGEST_BYTES` is the most; a key with more is left to
messages. It knows neither memory nor processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import TypeAlias, assert_never

from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, Wait, key_of
from dtensor.daft.ir.program import Program
from dtensor.daft.verification.pairing import Site, instruction_at, starts_of_waits
from dtensor.numerics import REDUCTIONS

LINE = 64
"""Of a cache, in bytes: tensors and semaphores begin at multiples."""
LARGEST_BYTES = 1 << 28
"""Of a slot. What is larger is rare, and would stay with the actor as long as the program."""
TOGETHER_BYTES = 1 << 16
"""An all_reduce of more, over more than two, is folded piece by piece, each by one of its members:
else each member would read what all bring."""
PIECE_BYTES = 1 << 18  # its sums stay in a core's cache
MOST_PIECES = 32

Piece: TypeAlias = tuple[tuple[int, int, int], ...]
"""Elements of a bucket: (number of the tensor, first element, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where the payloads of a key lie; all offsets are in the window of an actor.

    `slot_bytes` and `begins` are by member, in the order of the key's ranks. What is folded
    together (`pieces` of them at most, 0 if nothing is) has, in the window of the first member,
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
    """`window_bytes`: by actor. `partners` and `ahead`: of each start, by the key's other ranks."""

    lanes: Mapping[Key, Lane]
    window_bytes: tuple[int, ...]
    partners: Mapping[Site, tuple[Site, ...]]
    ahead: Mapping[Site, tuple[int, ...]]


def lay_out(program: Program, host_of: Sequence[int], shares: Callable[[Key], bool]) -> Arena:
    """For the keys that `shares` says; `host_of`: by rank, the number of its actor."""
    uses = _uses(program, shares)
    used = [LINE] * (max(host_of) + 1)
    lanes: dict[Key, Lane] = {}
    for key in sorted(uses, key=lambda key: (key[2], *key)):
        lane = _lane(program, uses[key], host_of, used)
        if lane is not None:
            lanes[key] = lane
    here = {host_of[rank] for key in lanes for rank in key[0]}
    window_bytes = tuple(nbytes if actor in here else 0 for actor, nbytes in enumerate(used))
    partners, ahead = _meetings([uses[key] for key in lanes])
    return Arena(lanes=lanes, window_bytes=window_bytes, partners=partners, ahead=ahead)


def brought(start: Start) -> tuple[Buffer, ...]:
    """What a rank writes into its slot."""
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
    """Where each of them begins in a slot or among results, and the bytes of all."""
    ends = tuple(accumulate((_lines(buffer.nbytes) for buffer in buffers), initial=0))
    return ends[:-1], ends[-1]


def pieces_of(start: Start) -> tuple[Piece, ...]:
    """What its members fold one by one; nothing if each folds all of it."""
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
    """Of a key: by rank, the indices of its starts in the rank's list; and all ranks' spans."""

    key: Key
    starts: dict[int, list[int]]
    spans: list[int]


def _uses(program: Program, shares: Callable[[Key], bool]) -> dict[Key, _Use]:
    uses: dict[Key, _Use] = {}
    shared: dict[Key, bool] = {}
    for rank, own in enumerate(program.ranks):
        waits = starts_of_waits(own.instructions)
        at: dict[int, tuple[Key, int]] = {}  # a start: its key, and its number on that
        pending: dict[Key, dict[int, None]] = defaultdict(dict)  # numbers, the oldest first
        spans: dict[Key, int] = {}
        for index, instruction in enumerate(own.instructions):
            if isinstance(instruction, Wait):
                for start in waits[index]:
                    if start in at:
                        key, number = at[start]
                        del pending[key][number]
            elif isinstance(instruction, Send | Recv | Collective):
                if not isinstance(instruction, Collective) and instruction.buffer.variable:
                    continue
                key = key_of(rank, instruction)
                if key not in shared:
                    shared[key] = shares(key)
                if not shared[key]:
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


def _lane(program: Program, use: _Use, host_of: Sequence[int], used: list[int]) -> Lane | None:
    """Where a key's slots lie, behind what is `used` of each window; None if they are too large."""
    members = use.key[0]
    starts = [[_start(program, (rank, index)) for index in use.starts[rank]] for rank in members]
    sizes = tuple(max(placed(brought(start))[1] for start in own) for own in starts)
    if max(sizes) > LARGEST_BYTES:
        return None
    together = [(start, pieces) for start in starts[0] if (pieces := pieces_of(start))]
    pieces = max((len(pieces) for _, pieces in together), default=0)
    result = max((placed(_made(start))[1] for start, _ in together), default=0)
    slots = sum(sorted(use.spans)[-2:])

    def take(member: int, nbytes: int) -> int:
        actor = host_of[members[member]]
        begin = used[actor]
        used[actor] += nbytes
        return begin

    return Lane(
        key=use.key,
        slots=slots,
        slot_bytes=sizes,
        begins=tuple(take(m, slots * size) for m, size in enumerate(sizes)),
        pieces=pieces,
        result_bytes=result,
        claims=take(0, slots * pieces * LINE),
        results=take(0, slots * result),
        done=tuple(take(m, slots * LINE if pieces else 0) for m in range(len(members))),
    )


def _meetings(
    uses: Sequence[_Use],
) -> tuple[dict[Site, tuple[Site, ...]], dict[Site, tuple[int, ...]]]:
    """`Arena.partners` and `Arena.ahead`."""
    groups = {
        (rank, index): use for use in uses for rank in use.starts for index in use.starts[rank]
    }
    before: dict[Site, dict[int, int]] = {}  # by partner: starts that concern it, before this one
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for site in sorted(groups):
        own = before[site] = {}
        for other in groups[site].key[0]:
            if other != site[0]:
                own[other] = counts[site[0], other]
                counts[site[0], other] += 1
    partners: dict[Site, tuple[Site, ...]] = {}
    ahead: dict[Site, tuple[int, ...]] = {}
    for use in uses:
        members = use.key[0]
        for indices in zip(*(use.starts[rank] for rank in members), strict=True):
            sites = tuple(zip(members, indices, strict=True))
            for site in sites:
                rank = site[0]
                others = tuple(other for other in sites if other != site)
                partners[site] = others
                ahead[site] = tuple(
                    before[other][rank] + 1 - before[site][other[0]] for other in others
                )
    return partners, ahead


def _start(program: Program, site: Site) -> Start:
    start = instruction_at(program, site)
    assert isinstance(start, Send | Recv | Collective)
    return start


def _made(start: Start) -> tuple[Buffer, ...]:
    assert isinstance(start, Collective)
    return start.out_buffers


def _lines(nbytes: int) -> int:
    """`nbytes`, up to a whole number of lines."""
    return -(-nbytes // LINE) * LINE
