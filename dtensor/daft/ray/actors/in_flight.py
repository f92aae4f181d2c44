"""The calls in flight to actor processes, and the values that these calls keep alive: backpressure.

    in_flight = InFlight(store, channel)
    in_flight.wait_for_room(["a.execute"], look)         # waits if too much is in flight
    submission = in_flight.add(["a.execute"], arguments, nbytes)
    in_flight.record_call(process, "a.execute", submission, reply, values)

A value is needed while a future holds it (`ValueReference`) or a call in flight takes it; then the
processes that have it drop it. The controller is blocked while values without a future have more
than `MAX_BYTES`, or too many calls of one method are unanswered (`FEW`). It waits only for earlier
calls, and continues without an answer after `PATIENCE_S`. Invariant: finalizers take no lock.
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

MAX_BYTES = 1 << 29
"""The most bytes of values without a future, before the controller is blocked."""
FEW = 16
"""How many calls of a method may be in flight at first; each answer with a result of similar size
allows two more."""
SIMILAR_BYTES = 1 << 20
"""Two results in a row have similar sizes if the second has at most this many bytes, or at most
twice the bytes of the first."""
SLOW_S = 1.0
"""If no call of a method is answered for this long, the method is slow, and `FEW` does not
apply."""
PATIENCE_S = 10.0
WARN_AFTER_S = 1.0
"""The controller warns after it has been blocked for this long in total."""
LARGE_BYTES = 1 << 16
"""A value of at least this size is dropped immediately. Smaller values are dropped with the next
call to their process."""
MAX_DROPPED = 256
"""How many small values a process drops with its next call; if there are more, all are dropped
immediately."""
SLICE_S = 0.25


class RemoteValue:
    """A value that process `holder` makes in call `number`. `receivers`: the other processes that
    received it; `nbytes`: its size, 0 until it is made; `has_future`: a future holds it;
    `is_counted`: it counts among the bytes in flight."""

    __slots__ = (
        "__weakref__",
        "has_future",
        "holder",
        "is_counted",
        "key",
        "message",
        "nbytes",
        "number",
        "owner",
        "receivers",
        "reply",
    )

    def __init__(self, owner: InFlight, holder: int, number: int, key: Key) -> None:
        self.owner = owner
        self.holder = holder
        self.number = number
        self.key = key
        self.reply: Reply | None = None
        self.receivers: set[int] = set()
        self.nbytes = 0
        self.message: bytes | None = None  # the value itself, if it is small
        self.has_future = True
        self.is_counted = False

    def count(self) -> int:
        """Return, once, the bytes of the value when it is made and no future holds it; else 0."""
        if self.has_future or self.is_counted or not self.nbytes:
            return 0
        self.is_counted = True
        return self.nbytes

    def __del__(self) -> None:
        """Let the processes drop the value: at once if it is large, else with their next call."""
        owner, processes = self.owner, (self.holder, *self.receivers)
        if self.is_counted:
            owner.freed_bytes.append(self.nbytes)
        if self.nbytes >= LARGE_BYTES:
            owner.store.forget(self.key, processes)
        else:
            owner.forgotten.append((self.key, processes))


class ValueReference:
    """A future's reference to a value; its finalizer records that no future holds the value."""

    __slots__ = ("value",)

    def __init__(self, value: RemoteValue) -> None:
        self.value = value

    def __del__(self) -> None:
        self.value.owner.unheld.append(weakref.ref(self.value))


@dataclass(slots=True)
class Submission:
    """Calls that were submitted together, one for each of `titles`. `inputs`: their arguments,
    which it keeps alive; `nbytes`: the bytes that the calls are assumed to need."""

    titles: Sequence[str]
    inputs: Sequence[RemoteValue]
    nbytes: int
    unanswered: int


@dataclass(slots=True)
class InFlightCall:
    """One call of a `submission`; `values`: its results."""

    reply: Reply
    title: str
    submission: Submission
    values: Sequence[RemoteValue] = field(default_factory=tuple[RemoteValue, ...])


@dataclass(slots=True)
class _Method:
    """The statistics of a method: the bytes of its last result, the number of results in a row with
    similar sizes, and the number of calls in flight. `slow`: no call was answered for `SLOW_S`."""

    nbytes: int = 0
    num_similar: int = 0
    num_in_flight: int = 0
    slow: bool = False

    @property
    def has_room(self) -> bool:
        return self.slow or self.num_in_flight < FEW + 2 * self.num_similar

    def record_answer(self, nbytes: int) -> None:
        """Record an answer with a result of ``nbytes``."""
        is_similar = nbytes <= max(2 * self.nbytes, SIMILAR_BYTES)
        self.num_similar = self.num_similar + 1 if is_similar else 0
        self.nbytes, self.slow = nbytes, False
        self.num_in_flight -= 1


class InFlight:
    """The calls in flight of a controller. Finalizers fill the deques; `update` reads them."""

    def __init__(self, store: ObjectStore, channel: RunChannel) -> None:
        self.store = store
        self.forgotten: deque[tuple[Key, tuple[int, ...]]] = deque()  # values, their processes
        self.unheld: deque[weakref.ref[RemoteValue]] = deque()
        self.freed_bytes: deque[int] = deque()
        self.dropped: dict[int, list[Key]] = {}  # process to the values that its next call drops
        self._channel = channel
        self._lock = threading.Lock()
        self._calls: dict[int, deque[InFlightCall]] = {}  # by process
        self._methods: defaultdict[str, _Method] = defaultdict(_Method)  # by title
        self._bytes = 0
        self._blocked_s = 0.0
        self._warned = False

    def add(self, titles: Sequence[str], inputs: Sequence[RemoteValue], nbytes: int) -> Submission:
        """Record calls that are about to be made. `nbytes`: the bytes that the controller sends."""
        with self._lock:
            for title in titles:
                method = self._methods[title]
                method.num_in_flight += 1
                nbytes += method.nbytes
            self._bytes += nbytes
        return Submission(titles, inputs, nbytes, len(titles))

    def record_call(
        self,
        process: int,
        title: str,
        submission: Submission,
        reply: Reply,
        values: Sequence[RemoteValue],
    ) -> None:
        """Record a call that was made."""
        for value in values:
            value.reply = reply
        with self._lock:  # another thread may be in `update`
            self._calls.setdefault(process, deque()).append(
                InFlightCall(reply, title, submission, values)
            )

    def to_drop(self, process: int) -> Sequence[Key]:
        """Return, once, the values that the process is to drop with its next call."""
        with self._lock:
            return self.dropped.pop(process, ())

    def wait_for_room(self, titles: Sequence[str], look: Callable[[], None]) -> None:
        """Wait until calls of these titles may be submitted. `look()` checks the processes."""
        self.update()
        if self._has_room(titles):
            return
        last_answer = last_look = time.monotonic()
        while not self._has_room(titles):
            num_calls = sum(map(len, self._calls.values()))
            oldest_replies = [calls[0].reply for calls in self._calls.values() if calls]
            self._channel.some_over(oldest_replies, 1, SLICE_S)
            self.update()
            now = time.monotonic()
            if sum(map(len, self._calls.values())) < num_calls:
                last_answer = now
            elif now - last_answer > PATIENCE_S:
                return
            else:
                look()
            if now - last_answer > SLOW_S:
                for title in titles:
                    self._methods[title].slow = True
            if self._bytes > MAX_BYTES // 2:
                self._blocked_s += now - last_look
            last_look = now
            if not self._warned and self._blocked_s > WARN_AFTER_S:
                self._warned = True
                self._warn(titles)

    def _has_room(self, titles: Sequence[str]) -> bool:
        """Return whether calls of these titles may be submitted: their bytes and numbers are within
        the limits, or nothing is in flight."""
        if not any(self._calls.values()):
            return True
        methods = [self._methods[title] for title in titles]
        needed = self._bytes + sum(method.nbytes for method in methods)
        return needed <= MAX_BYTES and all(method.has_room for method in methods)

    def _warn(self, titles: Sequence[str]) -> None:
        """Warn that the controller waits for calls in flight."""
        calls = sum(map(len, self._calls.values()))
        warnings.warn(
            f"The controller waits before it calls {', '.join(titles)}: {calls} calls are "
            f"in flight, and their values have {self._bytes / 2**20:.0f} MiB (limit: "
            f"{MAX_BYTES >> 20} MiB). It continues when some of the calls have ended.",
            RuntimeWarning,
            stacklevel=2,
        )

    def update(self) -> None:
        """Process the answers that have arrived, and what finalizers have recorded."""
        with self._lock:
            self._update()

    def _update(self) -> None:
        """Do the work of `update`, with the lock held."""
        for calls in self._calls.values():
            while calls and calls[0].reply.over:
                self._record_answer(calls.popleft())
        while self.unheld:
            value = self.unheld.popleft()()
            if value is not None:
                value.has_future = False
                self._bytes += value.count()
        while self.forgotten:
            key, processes = self.forgotten.popleft()
            for process in processes:
                keys = self.dropped.setdefault(process, [])
                keys.append(key)
                if process == self.store.index or len(keys) > MAX_DROPPED:
                    for each in self.dropped.pop(process):
                        self.store.forget(each, (process,))
        while self.freed_bytes:
            self._bytes -= self.freed_bytes.popleft()

    def _record_answer(self, call: InFlightCall) -> None:
        """Record the sizes of a call's results, and that it is no longer in flight."""
        submission, reply = call.submission, call.reply
        sizes = 0
        if not reply.failed and reply.message is not None:
            sent_bytes, answers = reply.message.value()
            sizes = sent_bytes + sum(nbytes for nbytes, _ in answers)
            for value, (nbytes, message) in zip(call.values, answers, strict=True):
                value.nbytes, value.message = nbytes, message
                self._bytes += value.count()
        self._methods[call.title].record_answer(sizes)
        submission.unanswered -= 1
        if not submission.unanswered:
            self._bytes -= submission.nbytes
            submission.inputs = ()
