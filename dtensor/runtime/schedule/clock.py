"""A virtual clock: replays lists of what ranks compute, send and wait for.

    lists = {
        0: [Stretch(2.0), Begin("x", (0, 1), "0->1", 0.5), Until(("x",))],
        1: [Begin("x", (0, 1), "0->1", 0.5), Until(("x",)), Stretch(1.0)],
    }
    run(lists)[1]       # [(2.0, 2.5), (0.0, 2.5), (2.5, 3.5)]: begin and end of each item

A message runs in the background, from when all members with a list have begun it, and after the
message before it on its channel. A rank's host launches the items in order and waits for nothing;
its device starts an op when the op is launched and the op before it has ended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive ops of one rank.

    Args:
        seconds: the device's time if all ops are launched in time.
        computes: the part of ``seconds`` in which the device computes; in the rest it waits for
            messages that concern no other rank of the clock.
        host: the host's time to launch the ops.
        lead: the time from the first launch to the end of the last op, if the device waits for
            nothing but launches.
    """

    seconds: float = 0.0
    computes: float = 0.0
    host: float = 0.0
    lead: float = 0.0

    @staticmethod
    def of(seconds: float, host: float) -> Stretch:
        """Return the stretch of one op."""
        return Stretch(seconds, seconds, host, host + seconds)

    def then(self, other: Stretch) -> Stretch:
        """Return this stretch followed by the other, as one stretch."""
        return Stretch(
            self.seconds + other.seconds,
            self.computes + other.computes,
            self.host + other.host,
            max(self.lead + other.seconds, self.host + other.lead),
        )


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of a message that takes ``seconds``. The rank waits for it by its ``name``.
    ``host``: seconds of its launches."""

    name: Hashable
    members: tuple[int, ...]
    channel: Hashable
    seconds: float
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Until:
    """The rank waits until these messages are complete."""

    names: tuple[Hashable, ...]


Item = Stretch | Begin | Until
Interval = tuple[float, float]


@dataclass(slots=True, eq=False)
class _Message:
    missing: int  # members that have not begun it
    begin: float = -math.inf  # no earlier than the last of them
    end: float | None = None


class _Clock:
    """The messages of a replay, by channel and number on the channel."""

    def __init__(self, lists: Mapping[int, Sequence[Item]]) -> None:
        self.lists = lists
        self.messages: dict[tuple[object, int], _Message] = {}
        self.counts: dict[tuple[int, object], int] = defaultdict(int)  # messages of a rank so far
        self.free: dict[object, float] = defaultdict(lambda: -math.inf)  # when a channel is free

    def start(self, rank: int, item: Begin, now: float) -> _Message:
        """Return the message that a rank begins ``now``. The k-th message of a rank on a channel is
        the k-th message of every member."""
        channel = item.members, item.channel
        number = self.counts[rank, channel]
        self.counts[rank, channel] += 1
        message = self.messages.get((channel, number))
        if message is None:
            message = _Message(sum(member in self.lists for member in item.members))
            self.messages[channel, number] = message
        message.missing -= 1
        message.begin = max(message.begin, now)
        if not message.missing:
            message.begin = max(message.begin, self.free[channel])
            message.end = self.free[channel] = message.begin + item.seconds
        return message


def run(
    lists: Mapping[int, Sequence[Item]], begin: float = 0.0, host_begin: float | None = None
) -> dict[int, list[Interval]]:
    """Return, by rank, when each of its items begins and ends on the device. For a `Begin`, these
    are the times of the message. Devices start at ``begin``, hosts at ``host_begin``, by default
    the same. Raises AssertionError if ranks wait for each other; the verifier rejects such programs
    before they are simulated."""
    clock = _Clock(lists)
    times: dict[int, list[Interval | _Message]] = {rank: [] for rank in lists}
    now = dict.fromkeys(lists, begin)
    launched = dict.fromkeys(lists, begin if host_begin is None else host_begin)
    named: dict[tuple[int, Hashable], _Message] = {}
    moved = True
    while moved:
        moved = False
        for rank, items in lists.items():
            times_of_rank, at, host = times[rank], now[rank], launched[rank]
            while len(times_of_rank) < len(items):
                match items[len(times_of_rank)]:
                    case Stretch() as item:
                        end = max(at + item.seconds, host + item.lead)
                        times_of_rank.append((at, end))
                        at, host = end, host + item.host
                    case Begin() as item:
                        host += item.host
                        message = clock.start(rank, item, max(at, host))
                        named[rank, item.name] = message
                        times_of_rank.append(message)
                    case Until(names=names):
                        ends = [named[rank, name].end for name in names]
                        if None in ends:
                            break
                        end = max([at, *(e for e in ends if e is not None)])
                        times_of_rank.append((at, end))
                        at = end
                moved = True
            now[rank], launched[rank] = at, host
    stuck = [rank for rank, items in lists.items() if len(times[rank]) < len(items)]
    assert not stuck, f"ranks {stuck} wait for ever; the verifier refuses such programs"
    return {rank: [_interval(t) for t in times_of_rank] for rank, times_of_rank in times.items()}


def _interval(times: Interval | _Message) -> Interval:
    if isinstance(times, tuple):
        return times
    assert times.end is not None, "its members have begun it"
    return times.begin, times.end


# -- folding of a list that is replayed often ------------------------------------------------------


def folded(rank: int, items: Sequence[Item]) -> list[Item]:
    """Return a rank's list with fewer items and the same times: consecutive items that concern no
    other rank become one `Stretch`, cut only where none of the rank's own messages is in flight."""
    folded_items: list[Item] = []
    alone: list[Item] = []
    for part in _parts(items):
        if all(isinstance(item, Stretch) or _is_own(item, part) for item in part):
            alone += part
        else:
            folded_items += [*_together(rank, alone), *part]
            alone = []
    return [*folded_items, *_together(rank, alone)]


def _parts(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield the items in parts, cut where none of the rank's own messages is in flight."""
    part: list[Item] = []
    in_flight: set[Hashable] = set()
    for item in items:
        part.append(item)
        match item:
            case Begin(name=name, members=members) if len(members) == 1:
                in_flight.add(name)
            case Until(names=names):
                in_flight.difference_update(names)
            case _:
                pass
        if not in_flight:
            yield part
            part = []
    assert not part, "an action ends when its own messages have"


def _is_own(item: Item, part: Sequence[Item]) -> bool:
    """Whether a Begin or Until is of messages that concern only this rank and begin in the part."""
    if isinstance(item, Begin):
        return len(item.members) == 1
    begun = {other.name for other in part if isinstance(other, Begin)}
    return isinstance(item, Until) and begun.issuperset(item.names)


def _together(rank: int, items: Sequence[Item]) -> list[Item]:
    """Return items that concern no other rank as at most one stretch."""
    if not items:
        return []
    computes = sum(item.computes for item in items if isinstance(item, Stretch))
    host = sum(item.host for item in items if not isinstance(item, Until))
    seconds = run({rank: items}, host_begin=-math.inf)[rank][-1][1]
    lead = run({rank: items}, -math.inf, host_begin=0.0)[rank][-1][1] if host else seconds
    return [Stretch(seconds, computes, host, lead)]
