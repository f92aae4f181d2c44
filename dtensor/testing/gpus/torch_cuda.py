"""Replaces functions and classes of `torch.cuda` while GPUs are simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtensor.api.step import loaded_program
from dtensor.frontend.capture import capture
from dtensor.kernels import attention
from dtensor.private_torch import cuda_bindings, pytree
from dtensor.runtime.lower import state_writes
from dtensor.sharding.local import attention_kernels
from dtensor.testing.gpus.cuda_ops import fused_sdp_choice
from dtensor.testing.gpus.host import (
    VisibleGpu,
    check_not_capturing,
    device_wait,
    here,
    host_wait,
    line_here,
    order_host_after,
)
from dtensor.testing.gpus.memory import pinned_copy
from dtensor.testing.gpus.tensors import SimTensor, is_pinned
from dtensor.testing.gpus.world import Capture, Point
from dtensor.testing.gpus.world import Stream as SimStream


def _gpu_of(device: Any) -> VisibleGpu:
    """Return the GPU of a device, a device name or an index; of None, the current GPU."""
    if device is None:
        return here().current
    return here().of(
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    )


class Stream:
    """A stand-in for torch.cuda.Stream. ``sim``: the simulated stream."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, sim: SimStream | None = None
    ) -> None:
        gpu = _gpu_of(device)
        self.sim = sim or gpu.device.stream()

    @property
    def device(self) -> torch.device:
        index = next(i for i, each in enumerate(here().gpus) if each.device is self.sim.device)
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
        check_not_capturing(f"stream.query() ({line_here()})")
        return self.sim.is_idle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.sim is other.sim

    def __hash__(self) -> int:
        return hash(self.sim.number)


class Event:
    """A stand-in for torch.cuda.Event. ``point``: the point of the stream at the time of `record`;
    None before."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.point: Point | None = None
        self.stream: SimStream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = here().current.stream if stream is None else stream.sim
        self.point = self.stream.point

    def wait(self, stream: Stream | None = None) -> None:
        if self.point is not None:
            (here().current.stream if stream is None else stream.sim).wait_for(self.point)

    def synchronize(self) -> None:
        if self.stream is not None and self.point is not None and not self.query():
            point = self.point
            host_wait("event.synchronize()", self.stream, until=point.last, clock=point.clock)

    def query(self) -> bool:
        """Return whether the event has passed. If it has, the host is ordered after it."""
        check_not_capturing(f"event.query() ({line_here()})")
        point = self.point
        if point is not None and point.capture is not None:
            raise point.capture.error("a query of an event that was recorded in a capture")
        passed = point is None or point.last is None or point.last.is_done
        if passed and point is not None:
            order_host_after(point.clock)
        return passed


def current_stream(device: Any = None) -> Stream:
    gpu = _gpu_of(device)
    return Stream(sim=gpu.stream)


def default_stream(device: Any = None) -> Stream:
    gpu = _gpu_of(device)
    return Stream(sim=gpu.device.main)


@contextmanager
def stream_context(stream: Stream | None) -> Generator[None]:
    if stream is None:
        yield
        return
    host = here()
    index = next(i for i, each in enumerate(host.gpus) if each.device is stream.sim.device)
    gpu = host.gpus[index]
    previous_stream, previous_index = gpu.stream, host.index
    gpu.stream, host.index = stream.sim, index
    try:
        yield
    finally:
        gpu.stream, host.index = previous_stream, previous_index


_pool_numbers = itertools.count(1)


def graph_pool_handle() -> int:
    return next(_pool_numbers)


class CUDAGraph:
    """A stand-in for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._gpu: VisibleGpu | None = None
        self._capture: Capture | None = None

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        """Begin a capture on the current stream, which must not be the default stream
        (at::cuda::CUDAGraph::capture_begin). Other threads may wait: "thread_local"."""
        gpu = self._gpu = here().current
        if gpu.stream is gpu.device.main:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self._capture is not None or gpu.device.captures:
            raise RuntimeError("This graph, or another one of the GPU, is captured already.")
        number = graph_pool_handle() if pool is None else pool
        gpu.memory.hold_pool(number)
        self._capture = Capture(gpu.stream, number)

    def capture_end(self) -> None:
        assert self._capture is not None, "capture_begin comes first"
        if here().current.stream is not self._capture.streams[0]:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._capture.end()

    def replay(self) -> None:
        assert self._capture is not None, "capture_begin and capture_end come first"
        self._capture.replay(here().current.stream)

    def pool(self) -> int:
        assert self._capture is not None, "capture_begin comes first"
        return self._capture.pool

    def reset(self) -> None:
        if self._capture is not None and self._gpu is not None:
            self._gpu.memory.drop_pool(self._capture.pool)
            self._capture = None

    def __del__(self) -> None:
        self.reset()


@contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: int | None = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Generator[None]:
    """A stand-in for torch.cuda.graph: waits for the GPU, and captures on a side stream."""
    synchronize()
    with stream_context(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def synchronize(device: Any = None) -> None:
    gpu = _gpu_of(device)
    device_wait("torch.cuda.synchronize()", gpu.device)


def set_device(device: Any) -> None:
    host = here()
    index = device if isinstance(device, int) else torch.device(device).index
    host.of(torch.device("cuda", index))
    host.index = index


def exchange_device(index: int) -> int:
    """Set the current device (unless -1) and return the previous one."""
    previous = here().index
    if index >= 0:
        set_device(index)
    return previous


def _without_autograd(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch.autograd that raises NotImplementedError for SimTensors: torch's
    engine is C++ code that uses the streams of a real GPU."""

    def run_or_raise(*args: Any, **kwargs: Any) -> Any:
        arguments: Any = (args, kwargs)
        if any(isinstance(x, SimTensor) for x in pytree.tree_leaves(arguments)):
            raise NotImplementedError(
                "torch.autograd of tensors on simulated GPUs: its engine asks for a real one.\n"
                "  Fix: call the backward function of the op, or train through dt.train_step"
            )
        return run(*args, **kwargs)

    return run_or_raise


def properties(device: Any = None) -> SimpleNamespace:
    gpu = _gpu_of(device)
    total = gpu.memory.capacity or 80 << 30
    return SimpleNamespace(name=f"simulated {gpu.device}", total_memory=total, major=9, minor=0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    gpu = _gpu_of(device)
    total = properties(device).total_memory
    return total - gpu.memory.nbytes, total


def _through_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `torch.tensor` or the like, but with a copy from the CPU to "cuda": torch creates
    tensors from Python values in C++, without a dispatched op on "cuda"."""

    def make_and_copy(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if kwargs.pop("pin_memory", False):
            return pinned_copy(make(data, *args, **kwargs))
        if device is None or torch.device(device).type != "cuda" or isinstance(data, Tensor):
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return make_and_copy


def pin_memory(x: Tensor, device: Any = None) -> Tensor:
    """Return the tensor if it is pinned, else a pinned copy."""
    if isinstance(x, SimTensor):
        raise RuntimeError(
            f"cannot pin '{x.dtype}' on {x.device}: only memory of the host is pinned"
        )
    return x if is_pinned(x) else pinned_copy(x)


def empty_cache() -> None:
    """Wait for the device, as `cudaFree` does."""
    device_wait("torch.cuda.empty_cache()", here().current.device)


def is_alias_of(x: Tensor, other: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def cached_by_gpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that caches the results of ``make`` for each GPU. A cache of the process
    would share device tensors among hosts, which here are threads of one process."""
    results_by_gpu: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def cached(*args: Any) -> Any:
        results = results_by_gpu.setdefault(here().current.device, {})
        if args not in results:
            results[args] = make(*args)
        return results[args]

    return cached


_capture: Any = capture._capture_graph  # pyright: ignore[reportPrivateUsage]


def capture_alone(*args: Any, **kwargs: Any) -> Any:
    """Capture while all other hosts are idle, because the threads of a process share the state of
    torch's tracer."""
    host = here()
    host.world.wait_for_hosts(host.number)
    return _capture(*args, **kwargs)


PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "_lazy_init", lambda: None),
    (torch.cuda, "is_available", lambda: True),
    (torch.cuda, "is_initialized", lambda: True),
    (torch.cuda, "device_count", lambda: len(here().gpus)),
    (torch.cuda, "current_device", lambda: here().index),
    (torch.cuda, "set_device", set_device),
    (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
    (torch.cuda, "set_rng_state", lambda *_: None),
    (torch.cuda, "_exchange_device", exchange_device),
    (torch.cuda, "_maybe_exchange_device", exchange_device),
    (torch.cuda, "get_device_properties", properties),
    (torch.cuda, "get_device_name", lambda *_: properties(*_).name),
    (torch.cuda, "mem_get_info", mem_get_info),
    (torch.autograd, "backward", _without_autograd(torch.autograd.backward)),
    (torch.autograd, "grad", _without_autograd(torch.autograd.grad)),
    (torch, "tensor", _through_cpu(torch.tensor)),
    (torch, "as_tensor", _through_cpu(torch.as_tensor)),
    (torch, "asarray", _through_cpu(torch.asarray)),
    (cuda_bindings, "_cuda_getDevice", lambda: here().index),
    (torch.cuda, "Stream", Stream),
    (torch.cuda, "Event", Event),
    (torch.cuda, "current_stream", current_stream),
    (torch.cuda, "default_stream", default_stream),
    (torch.cuda, "stream", stream_context),
    (torch.cuda, "CUDAGraph", CUDAGraph),
    (torch.cuda, "graph", graph),
    (torch.cuda, "graph_pool_handle", graph_pool_handle),
    (
        torch.cuda,
        "is_current_stream_capturing",
        lambda: here().current.stream.capture is not None,
    ),
    (torch.cuda, "synchronize", synchronize),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    (torch.cuda, "memory_allocated", lambda *_: here().current.memory.nbytes),
    (torch.cuda, "max_memory_allocated", lambda *_: here().current.memory.peak),
    (torch.cuda, "empty_cache", empty_cache),
    (torch.backends.cuda, "is_flash_attention_available", lambda: True),
    (attention, "_fused_sdp_choice", fused_sdp_choice),
    (state_writes, "is_alias_of", is_alias_of),
    (loaded_program, "compiles", lambda *_: False),
    (capture, "_capture_graph", capture_alone),
    (
        attention_kernels,
        "_zero_and_minus_infinity",
        cached_by_gpu(attention_kernels._zero_and_minus_infinity.__wrapped__),  # pyright: ignore
    ),
    (Tensor, "pin_memory", pin_memory),
    (Tensor, "is_pinned", lambda x, *_: is_pinned(x)),
)


@contextmanager
def patched() -> Generator[None]:
    """A context in which `PATCHES` are applied."""
    with ExitStack() as patches:
        for owner, name, value in PATCHES:
            patches.enter_context(patch.object(owner, name, value, create=True))
        yield
