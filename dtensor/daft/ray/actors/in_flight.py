"""The calls in flight of a controller to actor processes, and the values that these keep alive.

    under_way = InFlight(store, channel)
    under_way.hold_up("a.execute", look)               # waits where too much is in flight
    value = RemoteValue("a.execute", 7, ...)                 # of the call that is about to be made
    under_way.add(Submission(...))

A value is needed while a future holds it (`ValueReference`), or a call in flight takes it as an
argument. After that, the processes that have it are told to drop it: at once if it is large, else
with the next call to them.

Backpressure: where values without a future come to `MOST_BYTES`, the controller is blocked before
it submits more calls, with a warning. These values are arguments of calls in flight; a value that
is not made yet counts for as many bytes as the last value of the same method. Until several calls
of a method have answered with results of like size, few are submitted ahead (`FEW`). If none of
them answers for `SLOW_S`, the method makes values slowly, and more may be in flight.

Invariants: a blocked controller waits for answers to earlier calls, which do not depend on later
ones; where no answer comes for `PATIENCE_S`, it continues, so that no call hangs for lack of room.
Finalizers take no lock: they run in any thread, at any point.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dtensor.daft.ray.actors.object_store import Key, ObjectStore
from dtensor.daft.ray.channel.run_channel import Reply, RunChannel

MOST_BYTES = 1 << 29
FEW = 16
"""Calls of a method that may be in flight; two more for each that has answered like the last."""
ALIKE_BYTES = 1 << 20
"""Values are alike if they are smaller than this, or not twice as large as each other."""
SLOW_S = 1.0
PATIENCE_S = 10.0
SAID_S = 1.0
"""The controller warns after it has been blocked for so long, in all."""
LARGE_BYTES = 1 << 16
"""Processes are told at once to drop a value of so many bytes."""
MOST_DROPPED = 256
"""Most small values that a process drops with its next call; more are dropped at once."""
SLICE_S = 0.25


class RemoteValue:
    """A value that process `holder` makes in the call `number` (its last call, if none came after)
    and then has. `there`: other processes that received it. `nbytes`: once it is made."""

    __slots__ = (
        "__weakref__",
        "counted",
        "held",
        "holder",
        "key",
        "message",
        "nbytes",
        "number",
        "owner",
        "reply",
        "there",
    )

    def __init__(self, owner: InFlight, holder: int, number: int, key: Key) -> None:
        self.owner = owner
        self.holder = holder
        self.number = number
        self.key = key
        self.reply: Reply | None = None
        self.there: set[int] = set()
        self.nbytes = 0
        self.message: bytes | None = None  # if it is small
        self.held = True  # by a future
        self.counted = False

    def count(self) -> int:
        """Its bytes, once it is made and no future holds it; counted once."""
        if self.held or self.counted or not self.nbytes:
            return 0
        self.counted = True
        return self.nbytes

    def __del__(self) -> None:
        owner, there = self.owner, (self.holder, *self.there)
        if self.counted:
            owner.gone.append(self.nbytes)
        if self.nbytes >= LARGE_BYTES:
            owner.store.forget(self.key, there)
        else:
            owner.forgotten.append((self.key, there))


class ValueReference:
    """A future's hold on a value."""

    __slots__ = ("value",)

    def __init__(self, value: RemoteValue) -> None:
        self.value = value

    def __del__(self) -> None:
        self.value.owner.unheld.append(weakref.ref(self.value))


@dataclass(slots=True)
class Submission:
    """Calls that were submitted together, one for each of `titles`; `nbytes`: the bytes that they
    are assumed to need. `given`: their arguments."""

    titles: Sequence[str]
    given: Sequence[RemoteValue]
    nbytes: int
    left: int


@dataclass(slots=True)
class InFlightCall:
    """One call of a submission; `values`: its results, whose lengths the answer has."""

    reply: Reply
    title: str
    of: Submission
    values: Sequence[RemoteValue] = field(default_factory=tuple[RemoteValue, ...])


@dataclass(slots=True)
class _Method:
    """The statistics of one method: bytes of its last results, how many calls in a row have
    answered with like results, and how many are in flight; `slow`: none of these has answered for a
    while."""

    nbytes: int = 0
    alike: int = 0
    under_way: int = 0
    slow: bool = False

    @property
    def may(self) -> bool:
        return self.slow or self.under_way < FEW + 2 * self.alike

    def answered(self, nbytes: int) -> None:
        alike = nbytes <= max(2 * self.nbytes, ALIKE_BYTES)
        self.alike = self.alike + 1 if alike else 0
        self.nbytes, self.slow = nbytes, False
        self.under_way -= 1


class InFlight:
    def __init__(self, store: ObjectStore, channel: RunChannel) -> None:
        self.store = store
        self.forgotten: deque[tuple[Key, tuple[int, ...]]] = deque()
        self.unheld: deque[weakref.ref[RemoteValue]] = deque()
        self.gone: deque[int] = deque()  # bytes
        self.dropped: dict[int, list[Key]] = {}  # by process, the values that its next call drops
        self._channel = channel
        self._lock = threading.Lock()
        self._calls: dict[int, deque[InFlightCall]] = {}  # by process
        self._methods: defaultdict[str, _Method] = defaultdict(_Method)  # by title
        self._bytes = 0
        self._held_up_s = 0.0
        self._said = False

    def add(self, titles: Sequence[str], given: Sequence[RemoteValue], nbytes: int) -> Submission:
        """`nbytes`: the bytes that the controller itself sends."""
        with self._lock:
            for title in titles:
                method = self._methods[title]
                method.under_way += 1
                nbytes += method.nbytes
            self._bytes += nbytes
        return Submission(titles, given, nbytes, len(titles))

    def called(
        self, process: int, title: str, of: Submission, reply: Reply, values: Sequence[RemoteValue]
    ) -> None:
        for value in values:
            value.reply = reply
        with self._lock:  # another thread may be in `look_back`
            self._calls.setdefault(process, deque()).append(InFlightCall(reply, title, of, values))

    def to_drop(self, process: int) -> Sequence[Key]:
        """The values that the process is told to drop with its next call."""
        with self._lock:
            return self.dropped.pop(process, ())

    def hold_up(self, titles: Sequence[str], look: Callable[[], None]) -> None:
        """Wait until the calls of `titles` may be submitted. `look`: checks whether all processes
        are alive."""
        self.look_back()
        if self._may(titles):
            return
        moved = last = time.monotonic()
        while not self._may(titles):
            before = sum(map(len, self._calls.values()))
            first = [calls[0].reply for calls in self._calls.values() if calls]
            self._channel.some_over(first, 1, SLICE_S)
            self.look_back()
            now = time.monotonic()
            if sum(map(len, self._calls.values())) < before:
                moved = now
            elif now - moved > PATIENCE_S:
                return
            else:
                look()
            if now - moved > SLOW_S:
                for title in titles:
                    self._methods[title].slow = True
            if self._bytes > MOST_BYTES // 2:
                self._held_up_s += now - last
            last = now
            if not self._said and self._held_up_s > SAID_S:
                self._said = True
                self._say(titles)

    def _may(self, titles: Sequence[str]) -> bool:
        if not any(self._calls.values()):
            return True
        methods = [self._methods[title] for title in titles]
        needed = self._bytes + sum(method.nbytes for method in methods)
        return needed <= MOST_BYTES and all(method.may for method in methods)

    def _say(self, titles: Sequence[str]) -> None:
        calls = sum(map(len, self._calls.values()))
        warnings.warn(
            f"The controller waits before it calls {', '.join(titles)}: {calls} calls are "
            f"in flight, whose values come to {self._bytes / 2**20:.0f} MiB, of at most "
            f"{MOST_BYTES >> 20}. It continues as they end.",
            RuntimeWarning,
            stacklevel=2,
        )

    def look_back(self) -> None:
        """Take note of answers that have arrived, and of values that are not needed any more."""
        with self._lock:
            self._look_back()

    def _look_back(self) -> None:
        for calls in self._calls.values():
            while calls and calls[0].reply.over:
                self._came(calls.popleft())
        while self.unheld:
            value = self.unheld.popleft()()
            if value is not None:
                value.held = False
                self._bytes += value.count()
        while self.forgotten:
            key, there = self.forgotten.popleft()
            for process in there:
                keys = self.dropped.setdefault(process, [])
                keys.append(key)
                if process == self.store.index or len(keys) > MOST_DROPPED:
                    for each in self.dropped.pop(process):
                        self.store.forget(each, (process,))
        while self.gone:
            self._bytes -= self.gone.popleft()

    def _came(self, call: InFlightCall) -> None:
        of, reply = call.of, call.reply
        sizes = 0
        if not reply.failed and reply.message is not None:
            moved, answers = reply.message.value()
            sizes = moved + sum(nbytes for nbytes, _ in answers)
            for value, (nbytes, message) in zip(call.values, answers, strict=True):
                value.nbytes, value.message = nbytes, message
                self._bytes += value.count()
        self._methods[call.title].answered(sizes)
        of.left -= 1
        if not of.left:
            self._bytes -= of.nbytes
            of.given = ()
