"""Simulated GPUs: streams whose kernels run when somebody waits, in an order drawn by a seed.

    world = World(num=2, seed=0)
    stream = world.devices[0].main
    stream.put("add", lambda: a.add_(b))     # queued; nothing has run
    world.wait(lambda: stream.is_idle, "stream.synchronize()")

A kernel that was put on a stream runs after those before it there; else nothing orders it but the
events that streams wait for (CUDA C++ Programming Guide, "Streams" and "Events"). `World.wait` runs
kernels until its condition holds. It draws each next one among all that may run, of all devices, so
a program that lacks a wait reads what was there before. Where no host and no stream can go on,
`Deadlock` says who waits for what.

Happens-before is kept beside it by vector clocks: `Stream.clock` has the last kernel of each stream
that precedes what is put on this one next (`races.py` compares with it).

A GPU has so many hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). Streams that share one wait for
each other: a kernel is not started before those that were put into its queue earlier have ended.

Not modelled: time, SMs, how many kernels run at once.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

Clock = dict[int, int]
"""By stream's number: how many of its kernels have been put there."""

MAX_CONNECTIONS = 32
"""Hardware queues of a GPU, at most; CUDA's default is 8."""
_LOOK_S = 0.02


class Deadlock(RuntimeError):
    """No host and no stream of the simulated GPUs can go on."""


@dataclass(eq=False, slots=True)
class Kernel:
    """What a stream runs. ``ready``: what it waits for besides its turn; ``act`` gives whether it
    has ended, and is called again until it has."""

    what: str
    line: str
    stream: Stream
    act: Callable[[], object] | None
    ready: Callable[[], bool] = lambda: True
    is_done: bool = False
    order: int = 0

    def run(self) -> bool:
        """Whether anything came of it."""
        if not self.ready():
            return False
        if self.act is not None:
            self.act()
        self.end()
        return True

    def end(self) -> None:
        self.is_done, self.act = True, None
        assert self.stream.queue.popleft() is self


@dataclass(eq=False, slots=True)
class Stream:
    """A queue of kernels, in order."""

    device: Device
    name: str
    number: int
    hardware_queue: int
    queue: deque[Kernel] = field(default_factory=deque[Kernel])
    clock: Clock = field(default_factory=dict[int, int])
    seq: int = 0
    last: Kernel | None = None

    @property
    def is_idle(self) -> bool:
        return not self.queue

    @property
    def head(self) -> Kernel | None:
        """The kernel that its hardware queue lets start."""
        if not self.queue:
            return None
        first = self.queue[0]
        for other in self.device.streams:
            shared = other.hardware_queue == self.hardware_queue
            if shared and other.queue and other.queue[0].order < first.order:
                return None
        return first

    def put(self, kernel: Kernel) -> Kernel:
        """Queue it behind what is there, and all that the host of the device has waited for."""
        world = self.device.world
        with world.lock:
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

    def follow(self, clock: Clock) -> None:
        """What is put here next is behind all of the clock."""
        for number, seq in clock.items():
            self.clock[number] = max(seq, self.clock.get(number, 0))


class Device:
    """One GPU.

    Attributes:
        host_clock: what its host has waited for.
        loaded: whose first use is over.
    """

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.streams: list[Stream] = []
        self.host_clock: Clock = {}
        self.loaded: set[object] = set()
        self.main = self.stream("main")

    def stream(self, name: str = "") -> Stream:
        number = next(self.world.numbers)
        at = len(self.streams)
        stream = Stream(self, name or f"side {at}", number, at % self.world.num_queues)
        self.streams.append(stream)
        return stream

    def __str__(self) -> str:
        return f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class _Waiting:
    what: str
    condition: Callable[[], bool]


class World:
    """All simulated GPUs, and the hosts that wait for them.

    Args:
        num: of GPUs.
        seed: draws the order of kernels.
        early: the chance that a kernel runs as soon as it is put, where it may. 0: none runs before
            somebody waits for it.
        num_queues: hardware queues of a GPU.
        varies: whether ops that CUDA does not keep deterministic differ in last bits.
    """

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
        self.deadlock: str | None = None
        self.devices = [Device(self, index) for index in range(num)]
        self._waiting: dict[int, _Waiting] = {}  # by thread
        self._busy: dict[int, int] = {}  # by host, what it was asked for and has not ended

    def runs_early(self) -> bool:
        return self.early > 0 and self.rng.random() < self.early

    def run_one(self) -> bool:
        """Run one kernel that can run, with the lock held; whether there was one."""
        heads = [s.head for device in self.devices for s in device.streams]
        started = [kernel for kernel in heads if kernel is not None]
        self.rng.shuffle(started)
        return any(kernel.run() for kernel in started)

    # -- hosts -------------------------------------------------------------------------------------

    def begin(self, host: int) -> None:
        """The host has something to do: until `end` others may wait for it."""
        with self.lock:
            self._busy[host] = self._busy.get(host, 0) + 1

    def end(self, host: int) -> None:
        with self.lock:
            self._busy[host] -= 1
            self.lock.notify_all()

    @contextmanager
    def idle(self, host: int) -> Generator[None]:
        """Within, the host waits for other hosts, not for a GPU."""
        self.end(host)
        try:
            yield
        finally:
            self.begin(host)

    def wait_for_hosts(self, host: int) -> None:
        """Until no other host has anything to do."""
        with self.idle(host), self.lock:
            while any(num > 0 for other, num in self._busy.items() if other != host):
                self.lock.wait(_LOOK_S)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Run kernels until it holds. Raises Deadlock where nothing can make it hold."""
        me = threading.get_ident()
        with self.lock:
            try:
                while not condition():
                    if self.deadlock is not None:
                        raise Deadlock(self.deadlock)
                    if self.run_one():
                        continue
                    self._waiting[me] = _Waiting(what, condition)
                    if self._nobody_goes_on():
                        self.deadlock = self._who_waits()
                        raise Deadlock(self.deadlock)
                    self.lock.wait(_LOOK_S)
                    self._waiting.pop(me, None)
            finally:
                self._waiting.pop(me, None)
                self.lock.notify_all()

    def _nobody_goes_on(self) -> bool:
        num_busy = max(1, sum(n > 0 for n in self._busy.values()))
        waiting = list(self._waiting.values())
        return len(waiting) >= num_busy and not any(each.condition() for each in waiting)

    def _who_waits(self) -> str:
        lines = [f"  a host waits: {each.what}" for each in self._waiting.values()]
        for device in self.devices:
            for stream in device.streams:
                if stream.queue:
                    first = stream.queue[0]
                    lines.append(
                        f"  {device}, {stream.name}: {len(stream.queue)} queued, the first is "
                        f"{first.what} ({first.line})"
                    )
        return "no host and no stream can go on.\n" + "\n".join(lines)
