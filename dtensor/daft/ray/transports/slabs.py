"""Messages in memory that the processes of one machine share: written once, and read in place.

    own = Slabs(Segment.create(place), 0)            # in process 0
    message = own.allocate(1 << 26)                  # u8[67108864], in a slab
    begin, nbytes = own.lend(message, 3)             # process 3 may open it
    lent = OpenSlabs.of(own.segment_address, 3).take(begin, nbytes)  # in process 3
    lent.open()                                      # u8, private: a page that is written is copied

A slab is a head and a message. The head counts how often each process has returned the message. A
slab without users is reused, as copying 64 MB takes 8 ms there, and 40 ms in new pages.
Invariants: only the process that made a message writes to it, before it is lent. A process that has
ended counts as having returned everything (`ended`). Several threads may use it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque

import torch
from torch import Tensor

from dtensor.daft.ray.transports.segments import Segment, SegmentAddress, calls

SHARED_BYTES = 1 << 16
"""A smaller message is sent, since mapping it would cost more."""
MAX_PROCESSES = 1 << 12
HEAD_BYTES = 4 * MAX_PROCESSES
KEPT_BYTES = 1 << 29
"""The most bytes of unused slabs that are kept for the next messages."""
KEPT_S = 5.0
"""How long after the last message all unused slabs are freed."""
_FIRST = 1 << 20  # where the first slab of a segment begins


class _Slab:
    """A part of a segment for one message. `given_back`: how often each process has returned the
    message; `lent`: how often it was lent to each."""

    def __init__(self, begin: int, nbytes: int, memory: Tensor) -> None:
        self.begin = begin
        self.nbytes = nbytes  # the capacity
        self.memory = memory
        self.given_back = memory[:HEAD_BYTES].numpy().data.cast("I")
        self.lent: Counter[int] = Counter()
        self.used = 0  # the bytes of the message

    @property
    def address(self) -> int:
        return self.memory.data_ptr() + HEAD_BYTES

    def is_free(self, ended: set[int]) -> bool:
        """Return whether each process has returned the message as often as it was lent, or has
        ended."""
        return all(
            self.given_back[process] == times & 0xFFFFFFFF or process in ended
            for process, times in self.lent.items()
        )


class Slabs:
    """The slabs of process `index` of a launch."""

    def __init__(self, segment: Segment, index: int) -> None:
        self.index = index
        self._segment = segment
        self._lock = threading.Lock()
        self._used: dict[int, _Slab] = {}  # by address of the message
        self._retired: deque[int] = deque()  # addresses of messages that are garbage here
        self._lent: list[_Slab] = []  # slabs whose message is garbage here, but maybe not elsewhere
        self._free: list[_Slab] = []
        self._end = _FIRST
        self._last_use = time.monotonic()
        self._ended: set[int] = set()  # processes

    @property
    def segment_address(self) -> SegmentAddress:
        return self._segment.segment_address

    def allocate(self, nbytes: int) -> Tensor:
        """Return a buffer for a message, in a slab if it is not small."""
        if nbytes < SHARED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._last_use = time.monotonic()
            self._collect(KEPT_BYTES)
            fits = [slab for slab in self._free if nbytes <= slab.nbytes <= 2 * nbytes]
            slab = min(fits, key=lambda slab: slab.nbytes, default=None)
            if slab is not None:
                self._free.remove(slab)
            else:
                slab = self._new(nbytes)
            slab.used = nbytes
            self._used[slab.address] = slab
        memory = (ctypes.c_ubyte * nbytes).from_address(slab.address)
        weakref.finalize(memory, self._retired.append, slab.address).atexit = False
        return _tensor(memory)

    def lend(self, message: Tensor, to: int) -> tuple[int, int] | None:
        """Lend a message to another process. Return its begin and length, or None."""
        slab = self._used.get(message.data_ptr())
        if slab is None or to >= MAX_PROCESSES:
            return None
        slab.lent[to] += 1
        return slab.begin, slab.used

    def open(self, message: Tensor) -> Tensor:
        """Return a private copy of a message, which shares pages until they are written."""
        slab = self._used.get(message.data_ptr())
        if slab is None:
            return message.clone()
        return _private(self._segment, slab.begin, slab.used, message)

    def ended(self, process: int) -> None:
        """Record that a process has ended."""
        self._ended.add(process)

    def close(self) -> None:
        """Close the segment. Messages stay as long as they are used."""
        self._segment.close()

    def _new(self, nbytes: int) -> _Slab:
        size = HEAD_BYTES + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        begin, self._end = self._end, self._end + size
        return _Slab(begin, size - HEAD_BYTES, self._segment.map(begin, size).bytes)

    def collect(self) -> bool:
        """Free unused slabs; return whether there may be more to free later."""
        with self._lock:
            idle = time.monotonic() - self._last_use > KEPT_S
            self._collect(0 if idle else KEPT_BYTES)
            return bool(self._used or self._lent or self._free)

    def _collect(self, max_bytes: int) -> None:
        """Find free slabs, and free the memory of the largest until the others have `max_bytes`
        bytes."""
        while self._retired:
            slab = self._used.pop(self._retired.popleft())
            self._lent.append(slab)
        for slab in [slab for slab in self._lent if slab.is_free(self._ended)]:
            self._lent.remove(slab)
            self._free.append(slab)
        while sum(slab.nbytes for slab in self._free) > max_bytes:
            slab = max(self._free, key=lambda slab: slab.nbytes)
            self._free.remove(slab)
            self._segment.drop(slab.begin, HEAD_BYTES + slab.nbytes)


class OpenSlabs:
    """The slabs of another process, which has `segment`, as process `index` uses them."""

    def __init__(self, segment: Segment, index: int) -> None:
        self._segment = segment
        self._index = index
        self._given_back: Counter[int] = Counter()
        self._lock = threading.RLock()  # reentrant, since a finalizer may run within
        self._closed = False
        self._owner = os.getpid()

    @staticmethod
    def of(segment_address: SegmentAddress, index: int) -> OpenSlabs | None:
        """Open the slabs of another process; None if that is impossible."""
        segment = Segment.open(segment_address)
        return None if segment is None else OpenSlabs(segment, index)

    def take(self, begin: int, nbytes: int) -> Lent:
        return Lent(self, begin, nbytes)

    def open(self, lent: Lent) -> Tensor:
        """Return a private copy of a message. Raises OSError if the memory is closed."""
        with self._lock:
            if self._closed:
                raise OSError("its memory is closed")
            return _private(self._segment, lent.begin, lent.nbytes, lent)

    def give_back(self, begin: int) -> None:
        """Return a message to its process."""
        if os.getpid() != self._owner:  # a fork must not return its parent's messages
            return
        with self._lock:
            if self._closed:  # the descriptor may belong to another file now
                return
            self._given_back[begin] += 1
            times = self._given_back[begin] & 0xFFFFFFFF
            self._segment.write(begin + 4 * self._index, times.to_bytes(4, "little"))

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._segment.close()

    def __del__(self) -> None:
        self.close()


class Lent:
    """A message of another process. It is returned when this object and all tensors of `open` are
    garbage."""

    __slots__ = ("__weakref__", "begin", "nbytes", "slabs")

    def __init__(self, slabs: OpenSlabs, begin: int, nbytes: int) -> None:
        self.slabs = slabs
        self.begin = begin
        self.nbytes = nbytes
        weakref.finalize(self, slabs.give_back, begin).atexit = False

    def open(self) -> Tensor:
        return self.slabs.open(self)


def _private(segment: Segment, begin: int, nbytes: int, keep: object) -> Tensor:
    """Map a message so that writes are private. The mapping keeps `keep` alive."""
    length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    address = calls().map(None, length, protection, flags, segment.descriptor, begin + HEAD_BYTES)
    if address is None or address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, address, length, keep).atexit = False
    return _tensor(memory)


def _unmap(address: int, length: int, keep: object) -> None:
    calls().unmap(address, length)


def _tensor(memory: ctypes.Array[ctypes.c_ubyte]) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
