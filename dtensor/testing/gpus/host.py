"""A host of simulated GPUs: a thread that sees some GPUs and has a current GPU and stream.

    with Host(world, 0, gpus, waits).here():
        host_wait("item()", here().current.stream)

A host sees its GPUs as "cuda:0", "cuda:1", ..., as a process with CUDA_VISIBLE_DEVICES does. Each
wait of a host is counted with the user's line: the nearest line of the call stack outside torch,
the standard library and this simulator.
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

from dtensor.testing.gpus.memory import Access, Memory, pinned_uses
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
    """Return the user's line, as "mine.py:12"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            folder = os.getcwd() + os.sep
            return f"{file.removeprefix(_PACKAGE).removeprefix(folder)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@dataclass(frozen=True, slots=True)
class HostWait:
    """A call in which a host waits for a GPU, as ``what`` "item()" in ``line`` "mine.py:12"."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} ({self.line})"


@dataclass(slots=True)
class VisibleGpu:
    """A GPU that a host sees, with its current stream."""

    device: Device
    memory: Memory
    stream: Stream


@dataclass(eq=False, slots=True)
class Host:
    """A simulated process with GPUs; in fact a thread.

    Attributes:
        gpus: the GPUs that it sees: ``gpus[0]`` is its "cuda:0".
        waits: the number of each wait for a GPU.
        index: the index of the current GPU.
    """

    world: World
    number: int
    gpus: Sequence[VisibleGpu]
    waits: Counter[HostWait]
    index: int = 0

    @property
    def current(self) -> VisibleGpu:
        return self.gpus[self.index]

    def of(self, device: torch.device) -> VisibleGpu:
        """Return the GPU of a device. Raises RuntimeError if the host does not see it."""
        index = self.index if device.index is None else device.index
        if index >= len(self.gpus):
            raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of {len(self.gpus)}")
        return self.gpus[index]

    @contextmanager
    def working(self) -> Generator[Host]:
        """Make this thread the host, and busy, so that other hosts may wait for it."""
        self.world.begin(self.number)
        with self.expected():
            yield self

    @contextmanager
    def expected(self) -> Generator[Host]:
        """Make this thread the host, which `SimulatedGpus.expect` has made busy; the host is idle
        after the block."""
        try:
            with self.here():
                yield self
        finally:
            self.world.end(self.number)

    @contextmanager
    def here(self) -> Generator[Host]:
        """Make this thread the host. Call `World.begin` first if other hosts may wait for it."""
        previous = _THREAD.host
        _THREAD.host = self
        try:
            yield self
        finally:
            _THREAD.host = previous


class _ThreadHosts(threading.local):
    """The hosts of this thread. ``host``: set by `Host.here`; ``of_process``: for a thread that
    user code started, which sees all GPUs like each thread of a process."""

    host: Host | None = None
    of_process: Host | None = None


_THREAD = _ThreadHosts()
_process_host: Host | None = None


@contextmanager
def everywhere(host: Host) -> Generator[None]:
    """Make all threads see the GPUs of this host. A new thread begins on the main streams."""
    global _process_host
    _process_host = host
    try:
        with host.here():
            yield
    finally:
        _process_host = None


def here() -> Host:
    """Return the host of this thread. Raises RuntimeError if no GPU is simulated."""
    if _THREAD.host is not None:
        return _THREAD.host
    process = _process_host
    if process is None:
        raise RuntimeError("no GPU is simulated here: simulated_gpus() has ended, or not begun")
    host = _THREAD.of_process
    if host is None or host.world is not process.world:
        gpus = [VisibleGpu(each.device, each.memory, each.device.main) for each in process.gpus]
        _THREAD.of_process = host = Host(process.world, process.number, gpus, process.waits)
    return host


def host_wait(
    what: str,
    stream: Stream | None = None,
    *,
    until: Kernel | None = None,
    clock: Clock | None = None,
) -> None:
    """Wait as the host for all kernels on the stream (None: the current stream). For an event, wait
    for the kernel ``until`` after which it was recorded, with the ``clock`` of that time."""
    stream = stream or here().current.stream
    last = stream.last if clock is None else until
    _wait(what, stream.device, [last], stream.clock if clock is None else clock)


def device_wait(what: str, device: Device) -> None:
    """Wait as the host for all streams of the GPU."""
    clock: Clock = {}
    for stream in device.streams:
        for number, seq in stream.clock.items():
            clock[number] = max(seq, clock.get(number, 0))
    _wait(what, device, [stream.last for stream in device.streams], clock)


def first_use(resource: str, device: Device) -> None:
    """Wait for the device at the first use of a module ("Lazy Loading", CUDA C++ Programming Guide)
    or of a cuBLAS handle, which allocates. CUDA may wait there, but does not promise it. So the
    wait does not order accesses."""
    if resource not in device.loaded:
        device.loaded.add(resource)
        _wait(f"first use of {resource}", device, [stream.last for stream in device.streams], {})


def _wait(what: str, device: Device, until: Sequence[Kernel | None], clock: Clock) -> None:
    """Count the wait and run kernels until these have ended. The next kernels of the host's GPUs
    are ordered after all kernels of the clock."""
    host, wait = here(), HostWait(what, line_here())
    check_not_capturing(str(wait))
    host.waits[wait] += 1
    pending = [kernel for kernel in until if kernel is not None and not kernel.is_done]
    if pending:
        last = pending[-1]
        title = f"{wait} for {last.what} ({last.line}) on {device}, {last.stream.name}"
        is_busy = _THREAD.host is host  # a thread that user code started is not busy yet
        with nullcontext() if is_busy else host.working():
            host.world.wait(lambda: all(kernel.is_done for kernel in pending), title)
    order_host_after(clock)


def check_not_capturing(what: str) -> None:
    """Raise AcceleratorError if this thread captures a graph, which does not permit ``what``."""
    for gpu in here().gpus:
        if (capture := gpu.device.capture_of_thread()) is not None:
            raise capture.error(what)


def order_host_after(clock: Clock) -> None:
    """Order the next kernels of the host's GPUs, and its next accesses of pinned memory, after all
    kernels of the clock."""
    for gpu in here().gpus:
        host_clock = gpu.device.host_clock
        for number, seq in clock.items():
            host_clock[number] = max(seq, host_clock.get(number, 0))


def check_host_access(x: torch.Tensor, what: str, *, writes: bool) -> None:
    """Count the races of this access of a CPU tensor by the host, if its memory is pinned."""
    if (memory := pinned_uses(x)) is not None:
        gpu = here().current
        access = Access(what, line_here(), "the host")
        with gpu.device.world.lock:
            gpu.memory.host_access(memory, gpu.device.host_clock, access, writes=writes)
