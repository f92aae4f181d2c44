"""The memory of simulated GPUs, which finds races and early frees.

    elem, block = memory.allocate(stream, (4, 4), (4, 1), torch.float32, Access(...))
    memory.access(stream, reads=[block], writes=[], access=Access("add", "mine.py:4", "main"))

As in torch's caching allocator, a freed block of a stream is reused by this stream without a wait,
unless `record_stream` names another stream that still uses it; blocks are rounded up to 512 bytes
(c10/core/AllocatorConfig.h:19 of torch 2.13). Reused memory is poisoned: floats are NaN. An access
that no event orders after an earlier access of the block is a `Race`. A free while another stream
may use the block is an `EarlyFree`. A block is reused only for its own size.

A stream that captures allocates from the pool of its graph, whose memory only captures with this
pool reuse. A replay makes the accesses again: with other accesses it can race, and it may not use
memory that was freed since.

Pinned memory of the host has accesses too. A host access that the host has not ordered after an
access of a GPU, by a wait or a passed event, is a `Race`. As torch's CachingHostAllocator does, the
simulator reuses freed pinned memory only after the copies that use it: it never reuses it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import torch

from dtensor.private_torch import disable_current_modes
from dtensor.testing.gpus.world import Clock, Kernel, Stream

_ROUNDED = 512
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Access:
    """A use of a block. ``what``: the op; ``line``: the user's line; ``stream``: its GPU and
    name."""

    what: str
    line: str
    stream: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream} ({self.line})"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of one block, at least one of them a write, that no stream or event orders."""

    earlier: Access
    later: Access
    writes: bool

    def __str__(self) -> str:
        does = "writes" if self.writes else "reads"
        return f"{self.later} {does} what {self.earlier} uses: nothing orders them"


@dataclass(frozen=True, slots=True)
class EarlyFree:
    """A block that was freed, and so can be reused, while another stream may use it."""

    made: Access
    used: Access

    def __str__(self) -> str:
        return f"what {self.made} made is freed while {self.used} may run"


@dataclass(slots=True)
class Use:
    """An access by kernel number ``seq`` of the stream ``number``."""

    number: int
    seq: int
    access: Access


class Uses:
    """The accesses by GPUs of a piece of memory.

    ``reads``: the last read of each stream since the last write; ``write``: the last write;
    ``freed``: the access that allocated it, if it has been freed since.
    """

    __slots__ = ("freed", "reads", "write")

    def __init__(self) -> None:
        self.reads: dict[int, Use] = {}
        self.write: Use | None = None
        self.freed: Access | None = None

    def uses(self) -> list[Use]:
        return [*self.reads.values(), *([self.write] if self.write is not None else [])]


class Block:
    """A block of memory. It is freed when its last tensor is deleted.

    ``made``: the access that allocated it; ``pool``: the number of its graph's pool, or 0;
    ``used``: its accesses; ``recorded``: the streams of `record_stream`, by number.
    """

    __slots__ = ("made", "memory", "nbytes", "pool", "recorded", "storage", "stream", "used")

    def __init__(
        self, memory: Memory, stream: Stream, storage: torch.UntypedStorage, made: Access
    ) -> None:
        self.memory, self.stream, self.storage, self.made = memory, stream, storage, made
        self.pool = 0
        self.used = Uses()
        self.nbytes = storage.nbytes()
        self.recorded: dict[int, Stream] = {}

    def __del__(self) -> None:
        self.memory.free(self)


@dataclass(slots=True)
class _Freed:
    """A freed block that can be reused when these kernels of recorded streams have ended. ``key``:
    the number of its stream, and its bytes."""

    key: tuple[int, int]
    storage: torch.UntypedStorage
    waits_for: list[Kernel]


@dataclass(slots=True)
class _Pool:
    """The memory of one or several graphs.

    ``free``: storages by stream and bytes; ``uses``: by address, also of memory that is reused
    within a graph; ``nbytes``: of all of it; ``graphs``: how many have it.
    """

    free: defaultdict[tuple[int, int], list[torch.UntypedStorage]] = field(
        default_factory=lambda: defaultdict(list)
    )
    uses: dict[int, Uses] = field(default_factory=dict[int, Uses])
    nbytes: int = 0
    graphs: int = 0


@dataclass(slots=True)
class Memory:
    """The allocator of one GPU.

    Attributes:
        capacity: the bytes of memory; None: unlimited.
        fails_at: the number of the allocation, counted from 1, that is out of memory; 0: none.
        nbytes: the bytes in use.
        peak: the maximum of ``nbytes`` so far.
    """

    capacity: int | None = None
    fails_at: int = 0
    races: Counter[Race] = field(default_factory=Counter[Race])
    early_frees: Counter[EarlyFree] = field(default_factory=Counter[EarlyFree])
    num_allocations: int = 0
    nbytes: int = 0
    peak: int = 0
    _free: defaultdict[tuple[int, int], list[torch.UntypedStorage]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _recorded: list[_Freed] = field(default_factory=list[_Freed])
    _pools: dict[int, _Pool] = field(default_factory=dict[int, "_Pool"])

    def hold_pool(self, number: int) -> None:
        """Keep the memory of a pool for one more graph."""
        self._pools.setdefault(number, _Pool()).graphs += 1

    def drop_pool(self, number: int) -> None:
        """Free the memory of the pool if no other graph has it."""
        pool = self._pools[number]
        pool.graphs -= 1
        if not pool.graphs:
            self.nbytes -= pool.nbytes
            del self._pools[number]

    def allocate(
        self,
        stream: Stream,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        made: Access,
    ) -> tuple[torch.Tensor, Block]:
        """Return a poisoned CPU tensor that stands for a tensor of the GPU, and its block. Raises
        torch.OutOfMemoryError if the capacity is exceeded."""
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if math.prod(size) else 0
        nbytes = -(-span * dtype.itemsize // _ROUNDED) * _ROUNDED
        with stream.device.world.lock:
            self.num_allocations += 1
            over = self.capacity is not None and self.nbytes + nbytes > self.capacity
            if over or self.num_allocations == self.fails_at:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes} bytes on {stream.device}, "
                    f"which has {self.nbytes} bytes in use"
                )
            self._free_recorded()
            pool = None if stream.capture is None else self._pools[stream.capture.pool]
            free_storages = (self._free if pool is None else pool.free)[stream.number, nbytes]
            reuses = bool(free_storages)
            storage = free_storages.pop() if reuses else torch.UntypedStorage(nbytes)
            if pool is None:
                self.nbytes += nbytes
            elif not reuses:
                self.nbytes += nbytes
                pool.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
        with disable_current_modes():
            elem = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
        block = Block(self, stream, storage, made)
        if pool is not None and stream.capture is not None:
            block.pool = stream.capture.pool
            block.used = pool.uses.setdefault(storage.data_ptr(), block.used)
        if nbytes:
            act = partial(raw.fill_, POISON)
            stream.put(Kernel("poison", made.line, stream, act, is_launch=False))
            self.access(stream, [], [block.used], made)
        return elem, block

    def access(
        self, stream: Stream, reads: Iterable[Uses], writes: Iterable[Uses], access: Access
    ) -> None:
        """Record the accesses of the kernel that was put on the stream last, and count the races
        with earlier accesses."""
        if stream.capture is not None:
            reads, writes = list(reads), list(writes)
            stream.capture.record_access(lambda replay: self.access(replay, reads, writes, access))
            return

        def is_ordered(use: Use) -> bool:
            return use.seq <= stream.clock.get(use.number, 0)

        reads, writes = list(reads), list(writes)
        now = Use(stream.number, stream.seq, access)
        for block in (*reads, *writes):
            if block.freed is not None:  # a replay uses memory that it does not own
                self.early_frees[EarlyFree(block.freed, access)] += 1
        for block in writes:
            for use in block.uses():
                if not is_ordered(use):
                    self.races[Race(use.access, access, writes=True)] += 1
            block.write = now
            block.reads.clear()
        for block in reads:
            if block.write is not None and block.write is not now and not is_ordered(block.write):
                self.races[Race(block.write.access, access, writes=False)] += 1
            block.reads[stream.number] = now

    def host_access(self, memory: Uses, clock: Clock, access: Access, *, writes: bool) -> None:
        """Count the races of a host, which is ordered after the clock, with accesses of pinned
        memory by GPUs."""
        for use in memory.uses() if writes else [memory.write]:
            if use is not None and use.seq > clock.get(use.number, 0):
                self.races[Race(use.access, access, writes)] += 1

    def free(self, block: Block) -> None:
        """Make the block reusable, and count an early free if another stream may use it."""
        stream = block.stream
        with stream.device.world.lock:
            if block.pool:
                self._free_in_pool(block)
                return
            self.nbytes -= block.nbytes
            block.used.freed = block.made
            for use in block.used.uses():
                # the memory is reused after all that recorded streams have waited for so far
                clocks = [each.clock for each in (stream, *block.recorded.values())]
                clocks.append(stream.device.host_clock)
                ordered_seq = max(clock.get(use.number, 0) for clock in clocks)
                foreign = use.number != stream.number and use.number not in block.recorded
                if foreign and use.seq > ordered_seq:
                    self.early_frees[EarlyFree(block.made, use.access)] += 1
            if not block.nbytes:
                return
            key = (stream.number, block.nbytes)
            last = [other.last for other in block.recorded.values()]
            waits_for = [kernel for kernel in last if kernel is not None and not kernel.is_done]
            if waits_for:
                self._recorded.append(_Freed(key, block.storage, waits_for))
            else:
                self._free[key].append(block.storage)

    def _free_in_pool(self, block: Block) -> None:
        """Make memory reusable for the pool's captures. As in torch, a capture does not reuse a
        block of which a stream was recorded."""
        pool = self._pools.get(block.pool)
        if pool is not None and block.nbytes and not block.recorded:
            pool.free[block.stream.number, block.nbytes].append(block.storage)

    def _free_recorded(self) -> None:
        """Make freed blocks reusable if the recorded streams have ended their kernels."""
        waiting: list[_Freed] = []
        for freed in self._recorded:
            if all(kernel.is_done for kernel in freed.waits_for):
                self._free[freed.key].append(freed.storage)
            else:
                waiting.append(freed)
        self._recorded = waiting


# -- pinned memory of the host ---------------------------------------------------------------------


class _PinnedBytes(bytearray):
    """The bytes of a pinned tensor, which its storage keeps alive, and their uses by GPUs."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.used = Uses()


_PINNED: WeakValueDictionary[int, _PinnedBytes] = WeakValueDictionary()  # by address of the storage


def pinned_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CPU tensor in pinned memory, with the same strides."""
    with disable_current_modes():
        if not x.numel():
            return x.clone()
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
        pinned = _PinnedBytes(span * x.dtype.itemsize)
        storage = torch.frombuffer(pinned, dtype=torch.uint8).untyped_storage()
        _PINNED[storage.data_ptr()] = pinned
        return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, x.stride()).copy_(x)


def pinned_uses(x: torch.Tensor) -> Uses | None:
    """Return the uses of the pinned memory of a CPU tensor, or None if its memory is pageable."""
    if not _PINNED or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return None
    try:
        pinned = _PINNED.get(x.untyped_storage().data_ptr())
    except RuntimeError:  # a tensor of a tracer has no memory
        return None
    return None if pinned is None else pinned.used
