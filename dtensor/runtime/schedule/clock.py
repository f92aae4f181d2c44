"""A virtual clock: lists of what ranks compute, send and wait for, and when each of it is.

    lists = {
        0: [Stretch(2.0), Begin("x", (0, 1), "0->1", 0.5), Until(("x",))],
        1: [Begin("x", (0, 1), "0->1", 0.5), Until(("x",)), Stretch(1.0)],
    }
    run(lists)[1]       # [(2.0, 2.5), (0.0, 2.5), (2.5, 3.5)]

A message begins when all its members that have a list have begun it, after those before it on its
channel, and goes on in the background; members without a list begin when these do. The k-th of a
rank on a channel meets the k-th of the others.

A rank has a device and a host. The host launches the items in order, and runs ahead of the device:
it waits for nothing. The device starts an op once it is launched and the op before it has ended.
Where launches take no time, as on a CPU, the device alone has the time.

Not here: what a rank's list is (runtime/lower), contention between channels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """Ops that take the device ``seconds`` if all are launched in time, of which it computes in
    ``computes`` and waits for messages of its own in the rest. ``host``: seconds of their launches;
    ``lead``: seconds from the first launch to the end of the last op, if the device waits for
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
        """Return this stretch and then the other as one stretch."""
        return Stretch(
            self.seconds + other.seconds,
            self.computes + other.computes,
            self.host + other.host,
            max(self.lead + other.seconds, self.host + other.lead),
        )


@dataclass(frozen=True, slots=True)
class Begin:
    """The rank's part in a message of ``seconds``; ``name``: by which it waits for it; ``host``:
    seconds of its launches."""

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
    def __init__(self, lists: Mapping[int, Sequence[Item]]) -> None:
        self.lists = lists
        self.messages: dict[tuple[object, int], _Message] = {}
        self.counts: dict[tuple[int, object], int] = defaultdict(int)
        self.free: dict[object, float] = defaultdict(lambda: -math.inf)

    def start(self, rank: int, item: Begin, now: float) -> _Message:
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
    """Return, by rank, the begin and the end of each of its items on the device; for a `Begin`, of
    the message. Devices start at ``begin``, hosts at ``host_begin``, by default the same. Raises
    AssertionError if the lists wait for ever, which the verifier refuses."""
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


# -- a list that comes often -----------------------------------------------------------------------


def folded(rank: int, items: Sequence[Item]) -> list[Item]:
    """The rank's list in fewer items that last as long: all that concerns no other rank, between
    moments at which no message of its own is under way, is one `Stretch`."""
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
    """The items, cut where no message of the rank's own is under way."""
    part: list[Item] = []
    under_way: set[Hashable] = set()
    for item in items:
        part.append(item)
        match item:
            case Begin(name=name, members=members) if len(members) == 1:
                under_way.add(name)
            case Until(names=names):
                under_way.difference_update(names)
            case _:
                pass
        if not under_way:
            yield part
            part = []
    assert not part, "an action ends when its own messages have"


def _is_own(item: Item, part: Sequence[Item]) -> bool:
    if isinstance(item, Begin):
        return len(item.members) == 1
    begun = {other.name for other in part if isinstance(other, Begin)}
    return isinstance(item, Until) and begun.issuperset(item.names)


def _together(rank: int, items: Sequence[Item]) -> list[Item]:
    """Items of one rank alone as one."""
    if not items:
        return []
    computes = sum(item.computes for item in items if isinstance(item, Stretch))
    host = sum(item.host for item in items if not isinstance(item, Until))
    seconds = run({rank: items}, host_begin=-math.inf)[rank][-1][1]
    lead = run({rank: items}, -math.inf, host_begin=0.0)[rank][-1][1] if host else seconds
    return [Stretch(seconds, computes, host, lead)]
