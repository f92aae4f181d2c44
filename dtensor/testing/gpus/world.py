"""The streams of simulated GPUs. Kernels run when a host waits, in a random order.

    world = World(num=2, seed=0)
    stream = world.devices[0].main
    stream.put(Kernel("add", "mine.py:3", stream, lambda: a.add_(b)))     # queued, not run
    world.wait(lambda: stream.is_idle, "stream.synchronize()")

`World.wait` runs kernels until its condition holds. Each time it draws one of the kernels that may
run: a kernel runs after the earlier kernels of its stream and of its hardware queue, and after the
events that its stream waits for. So a program that lacks a wait reads old values. Vector clocks
record which kernels are ordered before which (`memory.py` finds races with them). Time is not
simulated.

A stream that captures (`Capture`) records its kernels instead. Each replay queues copies of them on
streams of their own, with the recorded dependencies and no others.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch

Clock = dict[int, int]
"""For the number of each stream, the sequence number of its last kernel that is ordered before."""

MAX_CONNECTIONS = 32
"""The maximum number of hardware queues of a GPU (CUDA_DEVICE_MAX_CONNECTIONS); the default of CUDA
is 8."""
_POLL_SECONDS = 0.02


class Deadlock(RuntimeError):
    """Raised if no host and no stream of the simulated GPUs can continue."""


@dataclass(eq=False, slots=True)
class Kernel:
    """A kernel on a stream.

    ``what``: the op; ``line``: the user's line; ``act``: the work, None for a wait; ``ready``: a
    condition to wait for besides earlier kernels; ``order``: its position among all kernels;
    ``is_launch``: whether the host launches it, and not a wait or a replay of a graph.
    """

    what: str
    line: str
    stream: Stream
    act: Callable[[], object] | None
    ready: Callable[[], bool] = lambda: True
    is_done: bool = False
    order: int = 0
    is_launch: bool = True

    def replayed(self, stream: Stream) -> Self:
        """Return a copy of a captured kernel for a replay on the stream."""
        return replace(self, stream=stream, is_launch=False)

    def run(self) -> bool:
        """Run the kernel if it is ready. Return whether it made progress."""
        if not self.ready():
            return False
        if self.act is not None:
            self.act()
        self.end()
        return True

    def end(self) -> None:
        """Mark the kernel, which is the first of its stream, as done and remove it there."""
        self.is_done, self.act = True, None
        assert self.stream.queue.popleft() is self


@dataclass(frozen=True, slots=True)
class Point:
    """A point on a stream, for which other streams and hosts can wait.

    ``last``: the last kernel before it; ``clock``: the kernels that are ordered before it. While
    the stream captures: ``capture``, and the positions of the ``nodes`` after which it is.
    """

    last: Kernel | None
    clock: Clock
    capture: Capture | None = None
    nodes: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class Stream:
    """A stream of a GPU.

    ``queue``: its kernels that have not ended; ``clock``: the kernels that are ordered before its
    next kernel; ``seq``: the number of kernels that were put on it; ``last``: the last of them;
    ``keeps_order``: replays put kernels that were captured here on this stream too, since NCCL
    keeps the order of a communicator's kernels (src/misc/strongstream.cc). ``capture``, ``tail``:
    while it captures, the capture, and the nodes after which the next node is.
    """

    device: Device
    name: str
    number: int
    hardware_queue: int
    queue: deque[Kernel] = field(default_factory=deque[Kernel])
    clock: Clock = field(default_factory=dict[int, int])
    seq: int = 0
    last: Kernel | None = None
    keeps_order: bool = False
    capture: Capture | None = None
    tail: frozenset[int] = frozenset()

    @property
    def point(self) -> Point:
        """The point after the kernels that were put on the stream so far."""
        return Point(self.last, dict(self.clock), self.capture, self.tail)

    @property
    def is_idle(self) -> bool:
        return not self.queue

    @property
    def head(self) -> Kernel | None:
        """The first kernel of the stream; None if a stream that shares the hardware queue has an
        earlier kernel."""
        if not self.queue:
            return None
        first = self.queue[0]
        for other in self.device.streams:
            shared = other.hardware_queue == self.hardware_queue
            if shared and other.queue and other.queue[0].order < first.order:
                return None
        return first

    def put(self, kernel: Kernel) -> Kernel:
        """Queue a kernel. It is ordered after the kernels of this stream and after all kernels for
        which the host has waited. A stream that captures records the kernel instead."""
        world = self.device.world
        if self.capture is not None:
            return self.capture.record(self, kernel)
        if (capture := self.device.capture_of_thread()) is not None:
            raise capture.error(f"{kernel.what} on {self.name}, which the capture does not include")
        with world.lock:
            world.num_launches += kernel.is_launch
            self.seq += 1
            kernel.order = world.num_kernels
            self.follow(self.device.host_clock)
            self.clock[self.number] = self.seq
            self.queue.append(kernel)
            self.last = kernel
            world.num_kernels += 1
            while world.runs_early() and world.run_one():
                pass
            world.lock.notify_all()
        return kernel

    def wait_for(self, point: Point) -> None:
        """Make the next kernels of this stream wait for the kernels before the point. If the point
        was captured, the stream joins the capture."""
        capture = point.capture
        if capture is not None and capture.has_ended:
            raise capture.error("a wait for an event that was recorded in a capture")
        if self.capture is None and capture is not None:
            self.capture, self.tail = capture, point.nodes
            capture.streams.append(self)
        elif self.capture is not None:
            if capture is None and point.last is None:
                return
            if capture is not self.capture:
                raise self.capture.error("a wait for work that the capture does not include")
            self.tail |= point.nodes
        else:
            last = point.last
            self.follow(point.clock)
            if last is not None and not last.is_done and last.stream is not self:
                title = f"waits for {last.what} on {last.stream.name}"
                ready = lambda: last.is_done  # noqa: E731
                self.put(Kernel(title, last.line, self, None, ready, is_launch=False))

    def follow(self, clock: Clock) -> None:
        """Order the next kernels of this stream after all kernels of the clock."""
        for number, seq in clock.items():
            self.clock[number] = max(seq, self.clock.get(number, 0))


class Device:
    """One GPU.

    Attributes:
        host_clock: the kernels for which its host has waited.
        loaded: the modules and handles that were used before (`first_use`).
        main: the default stream.
    """

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.streams: list[Stream] = []
        self.host_clock: Clock = {}
        self.loaded: set[object] = set()
        self.captures: list[Capture] = []
        self.main = self.stream("main")

    def stream(self, name: str = "", *, own_queue: bool = False) -> Stream:
        """Create a stream. ``own_queue``: it shares no hardware queue."""
        number = next(self.world.numbers)
        index = sum(stream.hardware_queue >= 0 for stream in self.streams)
        queue = -1 - number if own_queue else index % self.world.num_queues
        stream = Stream(self, name or f"side {index}", number, queue)
        self.streams.append(stream)
        return stream

    def capture_of_thread(self) -> Capture | None:
        """Return the capture that this thread makes on the GPU."""
        thread = threading.get_ident()
        return next((each for each in self.captures if each.thread == thread), None)

    def __str__(self) -> str:
        return f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class _Node:
    """A captured kernel; ``after``: the positions of the nodes that it waits for; ``accesses``:
    functions that record its accesses of memory in a replay on a stream."""

    kernel: Kernel
    after: frozenset[int]
    accesses: list[Callable[[Stream], None]]


class Capture:
    """A CUDA graph that is captured or has been captured ("CUDA Graphs", CUDA C++ Programming
    Guide).

    ``pool``: the number of the pool from which it allocates; ``streams``: those that take part, the
    first of which began it.
    """

    def __init__(self, stream: Stream, pool: int) -> None:
        self.device, self.pool, self.streams = stream.device, pool, [stream]
        self.thread = threading.get_ident()
        self.has_ended = False
        self._failure: str | None = None
        self._nodes: list[_Node] = []
        self._chains: dict[Stream, Stream] = {}  # for each captured stream, the stream of replays
        stream.capture, stream.tail = self, frozenset()
        self.device.captures.append(self)

    def error(self, problem: str) -> torch.AcceleratorError:
        """Make the capture invalid, and return the error."""
        self._failure = self._failure or problem
        return torch.AcceleratorError(
            f"CUDA error: operation not permitted when stream is capturing: {problem}"
        )

    def record(self, stream: Stream, kernel: Kernel) -> Kernel:
        """Record a kernel after the tail of its stream."""
        self._nodes.append(_Node(kernel, stream.tail, []))
        stream.tail = frozenset({len(self._nodes) - 1})
        return kernel

    def record_access(self, access: Callable[[Stream], None]) -> None:
        """Record an access of the last kernel."""
        self._nodes[-1].accesses.append(access)

    def end(self) -> None:
        """End the capture. Raises AcceleratorError if an operation was not permitted, or if a
        stream was not joined to the first stream."""
        joined, to_visit = set[int](), set(self.streams[0].tail)
        while to_visit:
            joined.add(node := to_visit.pop())
            to_visit |= self._nodes[node].after - joined
        apart = [stream.name for stream in self.streams if not stream.tail <= joined]
        for stream in self.streams:
            stream.capture, stream.tail = None, frozenset()
        self.device.captures.remove(self)
        self.has_ended = True
        if self._failure is None and apart:
            self._failure = f"{', '.join(apart)} has work that the first stream does not wait for"
        if self._failure is not None:
            raise torch.AcceleratorError(f"CUDA error: the capture is invalid: {self._failure}")

    def replay(self, stream: Stream) -> None:
        """Queue all kernels again, after the kernels of the stream and before its next ones."""
        if stream.capture is not None or self._failure is not None or not self.has_ended:
            raise self.error("a replay during a capture, or of an invalid capture")
        world, begin = self.device.world, stream.point
        points: list[Point] = []
        used: list[Stream] = []
        with world.lock:
            world.num_launches += 1
            for node in self._nodes:
                captured = node.kernel.stream
                if captured not in self._chains:
                    own = self.device.stream(f"graph, {captured.name}", own_queue=True)
                    self._chains[captured] = captured if captured.keeps_order else own
                chain = self._chains[captured]
                if chain not in used:
                    used.append(chain)
                    chain.wait_for(begin)
                for position in sorted(node.after):
                    chain.wait_for(points[position])
                chain.put(node.kernel.replayed(chain))
                for access in node.accesses:
                    access(chain)
                points.append(chain.point)
            for chain in used:
                stream.wait_for(chain.point)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait of a host for a condition."""

    what: str
    condition: Callable[[], bool]


class World:
    """All simulated GPUs, and the hosts that wait for them. The arguments are described at
    `simulated_gpus`."""

    def __init__(
        self,
        num: int,
        seed: int = 0,
        early: float = 0.0,
        num_queues: int = MAX_CONNECTIONS,
        varies: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.early = early
        self.num_queues = num_queues
        self.varies = varies
        self.lock = threading.Condition(threading.RLock())
        self.numbers = itertools.count()
        self.num_kernels = 0
        self.num_launches = 0
        self.deadlock: str | None = None
        self.devices = [Device(self, index) for index in range(num)]
        self._waits: dict[int, _Wait] = {}  # by thread
        self._num_tasks: dict[int, int] = {}  # for each host, tasks that have begun and not ended

    def runs_early(self) -> bool:
        return self.early > 0 and self.rng.random() < self.early

    def run_one(self) -> bool:
        """Run one kernel that may run, and return whether there was one. The lock must be held."""
        heads = [s.head for device in self.devices for s in device.streams]
        kernels = [kernel for kernel in heads if kernel is not None]
        self.rng.shuffle(kernels)
        return any(kernel.run() for kernel in kernels)

    # -- hosts -------------------------------------------------------------------------------------

    def begin(self, host: int) -> None:
        """Record that a task of the host begins. Until `end` the host is busy: other hosts may wait
        for it without a deadlock."""
        with self.lock:
            self._num_tasks[host] = self._num_tasks.get(host, 0) + 1

    def end(self, host: int) -> None:
        """Record that a task of the host has ended."""
        with self.lock:
            self._num_tasks[host] -= 1
            self.lock.notify_all()

    @contextmanager
    def idle(self, host: int) -> Generator[None]:
        """A context in which the host is not busy, because it waits for other hosts."""
        self.end(host)
        try:
            yield
        finally:
            self.begin(host)

    def wait_for_hosts(self, host: int) -> None:
        """Wait until no other host is busy."""
        with self.idle(host), self.lock:
            while any(num > 0 for other, num in self._num_tasks.items() if other != host):
                self.lock.wait(_POLL_SECONDS)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Run kernels until the condition holds. Raises Deadlock if no kernel and no other host can
        make it hold. ``what``: the wait, for the error."""
        thread = threading.get_ident()
        with self.lock:
            try:
                while not condition():
                    if self.deadlock is not None:
                        raise Deadlock(self.deadlock)
                    if self.run_one():
                        continue
                    self._waits[thread] = _Wait(what, condition)
                    if self._is_deadlock():
                        self.deadlock = self._deadlock_text()
                        raise Deadlock(self.deadlock)
                    self.lock.wait(_POLL_SECONDS)
                    self._waits.pop(thread, None)
            finally:
                self._waits.pop(thread, None)
                self.lock.notify_all()

    def _is_deadlock(self) -> bool:
        """Return whether all busy hosts wait, for conditions that do not hold."""
        num_busy = max(1, sum(num > 0 for num in self._num_tasks.values()))
        waits = list(self._waits.values())
        return len(waits) >= num_busy and not any(each.condition() for each in waits)

    def _deadlock_text(self) -> str:
        lines = [f"  a host waits: {each.what}" for each in self._waits.values()]
        for device in self.devices:
            for stream in device.streams:
                if stream.queue:
                    first = stream.queue[0]
                    lines.append(
                        f"  {device}, {stream.name}: {len(stream.queue)} queued, the first is "
                        f"{first.what} ({first.line})"
                    )
        return "no host and no stream can go on.\n" + "\n".join(lines)
