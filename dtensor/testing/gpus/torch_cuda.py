"""What stands for `torch.cuda` while GPUs are simulated: streams, events, devices, memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtensor.frontend.capture import capture
from dtensor.private_torch import cuda_bindings, pytree
from dtensor.runtime.lower import state_writes
from dtensor.sharding.ops import attention_masked
from dtensor.testing.gpus.host import Seen, device_wait, here, host_wait
from dtensor.testing.gpus.tensors import SimTensor
from dtensor.testing.gpus.world import Clock, Kernel
from dtensor.testing.gpus.world import Stream as SimStream


def _seen(device: Any) -> Seen:
    """By what torch.cuda's functions take: a device, its name, its number, None."""
    if device is None:
        return here().current
    return here().of(
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    )


class Stream:
    """torch.cuda.Stream."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, sim: SimStream | None = None
    ) -> None:
        seen = _seen(device)
        self.sim = sim or seen.device.stream()

    @property
    def device(self) -> torch.device:
        index = next(i for i, each in enumerate(here().seen) if each.device is self.sim.device)
        return torch.device("cuda", index)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        other.record_event().wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_wait("stream.synchronize()", self.sim)

    def query(self) -> bool:
        return self.sim.is_idle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.sim is other.sim

    def __hash__(self) -> int:
        return hash(self.sim.number)


class Event:
    """torch.cuda.Event: what was on a stream when it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.kernel: Kernel | None = None
        self.clock: Clock = {}
        self.stream: SimStream | None = None

    def record(self, stream: Stream | None = None) -> None:
        sim = here().current.stream if stream is None else stream.sim
        self.kernel, self.clock, self.stream = sim.last, dict(sim.clock), sim

    def wait(self, stream: Stream | None = None) -> None:
        sim = here().current.stream if stream is None else stream.sim
        kernel = self.kernel
        sim.follow(self.clock)
        if kernel is not None and not kernel.is_done and kernel.stream is not sim:
            what = f"waits for {kernel.what} on {kernel.stream.name}"
            sim.put(Kernel(what, kernel.line, sim, None, lambda: kernel.is_done))

    def synchronize(self) -> None:
        if self.stream is not None:
            host_wait("event.synchronize()", self.stream, until=self.kernel, clock=self.clock)

    def query(self) -> bool:
        return self.kernel is None or self.kernel.is_done


def current_stream(device: Any = None) -> Stream:
    seen = _seen(device)
    return Stream(sim=seen.stream)


def default_stream(device: Any = None) -> Stream:
    seen = _seen(device)
    return Stream(sim=seen.device.main)


@contextmanager
def stream(stream: Stream | None) -> Generator[None]:
    if stream is None:
        yield
        return
    host = here()
    index = next(i for i, each in enumerate(host.seen) if each.device is stream.sim.device)
    seen = host.seen[index]
    before, before_index = seen.stream, host.index
    seen.stream, host.index = stream.sim, index
    try:
        yield
    finally:
        seen.stream, host.index = before, before_index


def synchronize(device: Any = None) -> None:
    seen = _seen(device)
    device_wait("torch.cuda.synchronize()", seen.device)


def set_device(device: Any) -> None:
    host = here()
    index = device if isinstance(device, int) else torch.device(device).index
    host.of(torch.device("cuda", index))
    host.index = index


def exchange_device(index: int) -> int:
    """-1: the current one stays."""
    before = here().index
    if index >= 0:
        set_device(index)
    return before


def _refused(run: Callable[..., Any]) -> Callable[..., Any]:
    """torch's engine runs in C++ on the streams of a real GPU."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        given: Any = (args, kwargs)
        if any(isinstance(x, SimTensor) for x in pytree.tree_leaves(given)):
            raise NotImplementedError(
                "torch.autograd of tensors on simulated GPUs: its engine asks for a real one.\n"
                "  Fix: call the backward function of the op, or train through dt.train_step"
            )
        return run(*args, **kwargs)

    return refused


def properties(device: Any = None) -> SimpleNamespace:
    seen = _seen(device)
    total = seen.memory.capacity or 80 << 30
    return SimpleNamespace(name=f"simulated {seen.device}", total_memory=total, major=9, minor=0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    seen = _seen(device)
    total = properties(device).total_memory
    return total - seen.memory.nbytes, total


def _made(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch makes tensors of Python's values in C++, where nothing sees that they go to "cuda"."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda" or isinstance(data, Tensor):
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return made


def pin_memory(x: Tensor, device: Any = None) -> Tensor:
    pinned = x.clone()
    pinned._dtensor_pinned = True  # pyright: ignore[reportAttributeAccessIssue]
    return pinned


def empty_cache() -> None:
    """`cudaFree` waits for the device."""
    device_wait("torch.cuda.empty_cache()", here().current.device)


def is_alias_of(x: Tensor, other: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def by_host(make: Callable[..., Any]) -> Callable[..., Any]:
    """What a process keeps of device tensors; here hosts are threads of one process."""
    made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def kept(*given: Any) -> Any:
        own = made.setdefault(here().current.device, {})
        if given not in own:
            own[given] = make(*given)
        return own[given]

    return kept


_capture: Any = capture._capture_graph  # pyright: ignore[reportPrivateUsage]


def captured(*args: Any, **kwargs: Any) -> Any:
    """Torch's tracer has state that all threads of a process share; here actors are threads."""
    host = here()
    host.world.wait_for_hosts(host.number)
    return _capture(*args, **kwargs)


PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "_lazy_init", lambda: None),
    (torch.cuda, "is_available", lambda: True),
    (torch.cuda, "is_initialized", lambda: True),
    (torch.cuda, "device_count", lambda: len(here().seen)),
    (torch.cuda, "current_device", lambda: here().index),
    (torch.cuda, "set_device", set_device),
    (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
    (torch.cuda, "set_rng_state", lambda *_: None),
    (torch.cuda, "_exchange_device", exchange_device),
    (torch.cuda, "_maybe_exchange_device", exchange_device),
    (torch.cuda, "get_device_properties", properties),
    (torch.cuda, "get_device_name", lambda *_: properties(*_).name),
    (torch.cuda, "mem_get_info", mem_get_info),
    (torch.autograd, "backward", _refused(torch.autograd.backward)),
    (torch.autograd, "grad", _refused(torch.autograd.grad)),
    (torch, "tensor", _made(torch.tensor)),
    (torch, "as_tensor", _made(torch.as_tensor)),
    (torch, "asarray", _made(torch.asarray)),
    (cuda_bindings, "_cuda_getDevice", lambda: here().index),
    (torch.cuda, "Stream", Stream),
    (torch.cuda, "Event", Event),
    (torch.cuda, "current_stream", current_stream),
    (torch.cuda, "default_stream", default_stream),
    (torch.cuda, "stream", stream),
    (torch.cuda, "synchronize", synchronize),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    (torch.cuda, "memory_allocated", lambda *_: here().current.memory.nbytes),
    (torch.cuda, "max_memory_allocated", lambda *_: here().current.memory.peak),
    (torch.cuda, "empty_cache", empty_cache),
    (torch.backends.cuda, "is_flash_attention_available", lambda: True),
    (state_writes, "is_alias_of", is_alias_of),
    (capture, "_capture_graph", captured),
    (
        attention_masked,
        "_zero_and_minus_infinity",
        by_host(attention_masked._zero_and_minus_infinity.__wrapped__),  # pyright: ignore
    ),
    (Tensor, "pin_memory", pin_memory),
    (Tensor, "is_pinned", lambda x, *_: getattr(x, "_dtensor_pinned", False)),
)


@contextmanager
def patched() -> Generator[None]:
    with ExitStack() as patches:
        for owner, name, value in PATCHES:
            patches.enter_context(patch.object(owner, name, value, create=True))
        yield
