"""What a host's thread has of the simulated GPUs: which it sees, its current one, its streams.

    with Host(world, 0, world.devices).here():
        host_wait("item()", HOST.current.stream)

A host sees its GPUs as "cuda:0", "cuda:1", ..., as under CUDA_VISIBLE_DEVICES. Each wait of a host
is counted with the line that asked, which is the nearest one outside torch, Python's library and
this simulator.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

import torch

from dtensor.testing.gpus.memory import Memory
from dtensor.testing.gpus.world import Clock, Device, Kernel, Stream, World

_STANDARD = ("contextlib.py", "concurrent", "functools.py", "threading.py", "runpy.py", "asyncio")
_SITE = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_SKIPPED = (
    os.path.dirname(__file__) + os.sep,
    *(f"{_SITE}{name}{os.sep}" for name in ("torch", "triton", "numpy", "einops")),
    *(f"{sysconfig.get_path('stdlib')}{os.sep}{name}" for name in _STANDARD),
    "<",
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def line_here() -> str:
    """ "mine.py:12" of the nearest line outside torch and this simulator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            here = os.getcwd() + os.sep
            return f"{file.removeprefix(_PACKAGE).removeprefix(here)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@dataclass(frozen=True, slots=True)
class HostWait:
    """A call in which a host waits for the device."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} ({self.line})"


@dataclass(slots=True)
class Seen:
    """A GPU that a host sees, with its current stream."""

    device: Device
    memory: Memory
    stream: Stream


@dataclass(eq=False, slots=True)
class Host:
    """A process, here a thread, with GPUs.

    Attributes:
        seen: by index, as the host numbers them.
        index: of the current one.
    """

    world: World
    number: int
    seen: Sequence[Seen]
    waits: Counter[HostWait]
    index: int = 0

    @property
    def current(self) -> Seen:
        return self.seen[self.index]

    def of(self, device: torch.device) -> Seen:
        """Raises RuntimeError where the host sees no such GPU."""
        index = self.index if device.index is None else device.index
        if index >= len(self.seen):
            raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of {len(self.seen)}")
        return self.seen[index]

    @contextmanager
    def working(self) -> Generator[Host]:
        """As `here`, in a thread that others may wait for."""
        self.world.begin(self.number)
        with self.expected():
            yield self

    @contextmanager
    def expected(self) -> Generator[Host]:
        """As `working`, where others wait for it already: `SimulatedGpus.expect`."""
        try:
            with self.here():
                yield self
        finally:
            self.world.end(self.number)

    @contextmanager
    def here(self) -> Generator[Host]:
        """Within, this thread is the host's. Who asks it for something says so: `World.begin`."""
        before = _HERE.host
        _HERE.host = self
        try:
            yield self
        finally:
            _HERE.host = before


class _Here(threading.local):
    host: Host | None = None
    other: Host | None = None
    """Of a thread that somebody has started: it sees all GPUs, as any thread of a process."""


_HERE = _Here()
_everywhere: Host | None = None


@contextmanager
def everywhere(host: Host) -> Generator[None]:
    """Within, all threads see the GPUs of this host; they begin on the main streams."""
    global _everywhere
    _everywhere = host
    try:
        with host.here():
            yield
    finally:
        _everywhere = None


def here() -> Host:
    """The host of this thread. Raises RuntimeError where no GPU is simulated."""
    if _HERE.host is not None:
        return _HERE.host
    if _everywhere is None:
        raise RuntimeError("no GPU is simulated here: simulated_gpus() has ended, or not begun")
    other, world = _HERE.other, _everywhere.world
    if other is None or other.world is not world:
        seen = [Seen(each.device, each.memory, each.device.main) for each in _everywhere.seen]
        _HERE.other = other = Host(world, _everywhere.number, seen, _everywhere.waits)
    return other


def host_wait(
    what: str,
    stream: Stream | None = None,
    *,
    until: Kernel | None = None,
    clock: Clock | None = None,
) -> None:
    """The host waits for all that is on the stream (the current one if none is given), or for what
    an event was recorded behind: ``until``, ``clock``."""
    stream = stream or here().current.stream
    last = stream.last if clock is None else until
    _wait(what, stream.device, [last], stream.clock if clock is None else clock)


def device_wait(what: str, device: Device) -> None:
    """The host waits for all streams of the GPU."""
    clock: Clock = {}
    for stream in device.streams:
        for number, seq in stream.clock.items():
            clock[number] = max(seq, clock.get(number, 0))
    _wait(what, device, [stream.last for stream in device.streams], clock)


def first_use(of: str, device: Device) -> None:
    """What CUDA loads or makes when it is first used, for which the host may have to wait for the
    device: a module ("Lazy Loading", CUDA C++ Programming Guide), a handle of cuBLAS (which
    allocates). It does here; but since nothing promises it, it orders nothing."""
    if of not in device.loaded:
        device.loaded.add(of)
        _wait(f"first use of {of}", device, [stream.last for stream in device.streams], {})


def _wait(what: str, device: Device, until: Sequence[Kernel | None], clock: Clock) -> None:
    host, wait = here(), HostWait(what, line_here())
    host.waits[wait] += 1
    left = [kernel for kernel in until if kernel is not None and not kernel.is_done]
    if left:
        last = left[-1]
        of = f"{wait} for {last.what} ({last.line}) on {device}, {last.stream.name}"
        with nullcontext() if _HERE.host is host else host.working():  # nobody has asked it
            host.world.wait(lambda: all(kernel.is_done for kernel in left), of)
    for seen in host.seen:
        known = seen.device.host_clock
        for number, seq in clock.items():
            known[number] = max(seq, known.get(number, 0))
