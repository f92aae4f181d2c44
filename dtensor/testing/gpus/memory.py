"""Memory of simulated GPUs: handed out again at once and poisoned, its accesses compared.

    elem, block = memory.allocate((4, 4), (4, 1), torch.float32, what="empty", line="mine.py:3")
    memory.access(stream, reads=[block], writes=[], what="add", line="mine.py:4")

As torch's caching allocator, blocks are rounded up to 512 bytes (c10/core/AllocatorConfig.h:19 of
torch 2.13, `kMinBlockSize`), and belong to the stream that was current when they were made: freed
ones are handed out again to that stream, without waiting for any. A block that another stream used
is safe from that only if its last use is ordered before what the own stream does next, or if
`record_stream` named the other one: then it is kept until what was queued there then has ended
(documentation of `torch.Tensor.record_stream`).

`access` compares each access with those before by the streams' clocks. One that no event orders is
a `Race`, whatever order the kernels were drawn in. A block that is freed while another stream may
use it is an `EarlyFree`. What is freed is poisoned when it is handed out again: floats are NaN.

Not modelled: fragments (a block is handed out for its own size alone), `expandable_segments`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from dtensor.private_torch import disable_current_modes
from dtensor.testing.gpus.world import Kernel, Stream

_ROUNDED = 512
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a block: by which op, of which line, on which stream."""

    what: str
    line: str
    stream: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream} ({self.line})"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of one block, one a write at least, that no stream or event orders."""

    earlier: Access
    later: Access
    writes: bool

    def __str__(self) -> str:
        does = "writes" if self.writes else "reads"
        return f"{self.later} {does} what {self.earlier} uses: nothing orders them"


@dataclass(frozen=True, slots=True)
class EarlyFree:
    """A block that its stream may hand out again while another stream uses it."""

    made: Access
    used: Access

    def __str__(self) -> str:
        return f"what {self.made} made is freed while {self.used} may run"


@dataclass(slots=True)
class Use:
    number: int
    seq: int
    access: Access


class Block:
    """What the allocator gave. It is given back when the last tensor of it goes."""

    __slots__ = ("made", "memory", "nbytes", "reads", "recorded", "storage", "stream", "write")

    def __init__(
        self, memory: Memory, stream: Stream, storage: torch.UntypedStorage, made: Access
    ) -> None:
        self.memory, self.stream, self.storage, self.made = memory, stream, storage, made
        self.nbytes = storage.nbytes()
        self.recorded: dict[int, Stream] = {}
        self.reads: dict[int, Use] = {}
        self.write: Use | None = None

    def uses(self) -> list[Use]:
        return [*self.reads.values(), *([self.write] if self.write is not None else [])]

    def __del__(self) -> None:
        self.memory.give_back(self)


@dataclass(slots=True)
class _Freed:
    key: tuple[int, int]
    storage: torch.UntypedStorage
    waits_for: list[Kernel]


@dataclass(slots=True)
class Memory:
    """The allocator of one GPU.

    Attributes:
        capacity: in bytes; None: without a limit.
        fails_at: the number of the allocation, from 1 on, that is out of memory; 0: none.
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

    def allocate(
        self,
        stream: Stream,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        made: Access,
    ) -> tuple[torch.Tensor, Block]:
        """A tensor on the CPU that stands for one of the device, poisoned, and its block."""
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
            self._take_back()
            free = self._free[stream.number, nbytes]
            storage = free.pop() if free else torch.UntypedStorage(nbytes)
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
        with disable_current_modes():
            elem = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
        block = Block(self, stream, storage, made)
        if nbytes:
            stream.put(Kernel("poison", made.line, stream, lambda: raw.fill_(POISON)))
            block.write = Use(stream.number, stream.seq, made)
        return elem, block

    def access(
        self, stream: Stream, reads: Iterable[Block], writes: Iterable[Block], access: Access
    ) -> None:
        """Of the kernel that was put on the stream last."""

        def is_ordered(use: Use) -> bool:
            return use.seq <= stream.clock.get(use.number, 0)

        now = Use(stream.number, stream.seq, access)
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

    def give_back(self, block: Block) -> None:
        stream = block.stream
        with stream.device.world.lock:
            self.nbytes -= block.nbytes
            for use in block.uses():
                known = (
                    stream.clock.get(use.number, 0),
                    stream.device.host_clock.get(use.number, 0),
                )
                foreign = use.number != stream.number and use.number not in block.recorded
                if foreign and use.seq > max(known):
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

    def _take_back(self) -> None:
        """What other streams have ended with since it was freed."""
        waiting: list[_Freed] = []
        for freed in self._recorded:
            if all(kernel.is_done for kernel in freed.waits_for):
                self._free[freed.key].append(freed.storage)
            else:
                waiting.append(freed)
        self._recorded = waiting
