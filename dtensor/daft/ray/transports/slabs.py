"""Messages in memory that processes of one machine share: written once, read in place.

    own = Slabs(Segment.create(place), 0)            # process 0's
    message = own.room(1 << 26)                      # u8[67108864], in its own slab
    there = own.lend(message, 3)                     # (begin, nbytes): process 3 may open it
    given = OpenSlabs(card, 3).take(*there)          # in process 3
    given.open()                                     # u8, its own: a written page is copied

A slab is a head and a message. The head counts, by process, the returns of the message: once for
each time it was lent, when nothing there refers to it any more. A slab whose message is garbage
here and that all have returned is reused, so that its pages exist already: 64 MB then take 8 ms to
copy, and 40 ms in new pages.

Invariants: the result of `open` is private (MAP_PRIVATE) and may be written to; only its maker
writes to a message of `room`, before it is lent. A process that has ended returns nothing: `ended`
notes that. It is safe for several threads.
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
"""A smaller message is sent: mapping it would cost more."""
MOST_PROCESSES = 1 << 12
HEAD_BYTES = 4 * MOST_PROCESSES
KEPT_BYTES = 1 << 29
"""Bytes of unused slabs that are kept for the next messages; the pages of others are freed."""
KEPT_S = 5.0
"""So long after the last message the pages of all are freed."""
_FIRST = 1 << 20  # of a segment, whose beginning has other uses


class _Slab:
    def __init__(self, begin: int, nbytes: int, memory: Tensor) -> None:
        self.begin = begin
        self.nbytes = nbytes  # capacity for a message
        self.memory = memory
        self.given_back = memory[:HEAD_BYTES].numpy().data.cast("I")
        self.lent: Counter[int] = Counter()
        self.used = 0

    @property
    def address(self) -> int:
        return self.memory.data_ptr() + HEAD_BYTES

    def is_free(self, ended: set[int]) -> bool:
        return all(
            self.given_back[process] == times & 0xFFFFFFFF or process in ended
            for process, times in self.lent.items()
        )


class Slabs:
    """`index`: of this process, in its launch."""

    def __init__(self, segment: Segment, index: int) -> None:
        self.index = index
        self._segment = segment
        self._lock = threading.Lock()
        self._used: dict[int, _Slab] = {}  # by address of the message
        self._retired: deque[int] = deque()  # addresses; finalizers append, in any thread
        self._lent: list[_Slab] = []  # their message is garbage here
        self._free: list[_Slab] = []
        self._end = _FIRST
        self._asked = time.monotonic()
        self._ended: set[int] = set()

    @property
    def card(self) -> SegmentAddress:
        return self._segment.card

    def room(self, nbytes: int) -> Tensor:
        """The buffer for a message; small ones are not shared."""
        if nbytes < SHARED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._asked = time.monotonic()
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
        """Lend a message to another process; returns its begin and length; None if it is in no
        slab."""
        slab = self._used.get(message.data_ptr())
        if slab is None or to >= MOST_PROCESSES:
            return None
        slab.lent[to] += 1
        return slab.begin, slab.used

    def open(self, message: Tensor) -> Tensor:
        """A private copy of the message, as in another process."""
        slab = self._used.get(message.data_ptr())
        if slab is None:
            return message.clone()
        return _private(self._segment, slab.begin, slab.used, message)

    def ended(self, process: int) -> None:
        self._ended.add(process)

    def close(self) -> None:
        """Messages stay while they are used."""
        self._segment.close()

    def _new(self, nbytes: int) -> _Slab:
        size = HEAD_BYTES + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        begin, self._end = self._end, self._end + size
        return _Slab(begin, size - HEAD_BYTES, self._segment.map(begin, size).bytes)

    def collect(self) -> bool:
        """Free unused slabs; returns whether there may be more to free later."""
        with self._lock:
            idle = time.monotonic() - self._asked > KEPT_S
            self._collect(0 if idle else KEPT_BYTES)
            return bool(self._used or self._lent or self._free)

    def _collect(self, most: int) -> None:
        while self._retired:
            slab = self._used.pop(self._retired.popleft())
            self._lent.append(slab)
        for slab in [slab for slab in self._lent if slab.is_free(self._ended)]:
            self._lent.remove(slab)
            self._free.append(slab)
        while sum(slab.nbytes for slab in self._free) > most:
            slab = max(self._free, key=lambda slab: slab.nbytes)
            self._free.remove(slab)
            self._segment.drop(slab.begin, HEAD_BYTES + slab.nbytes)


class OpenSlabs:
    """Another process's slabs, for process `index`; `segment` is the other's."""

    def __init__(self, segment: Segment, index: int) -> None:
        self._segment = segment
        self._index = index
        self._given_back: Counter[int] = Counter()
        self._lock = threading.RLock()  # a finalizer may come in between
        self._closed = False
        self._owner = os.getpid()

    @staticmethod
    def of(card: SegmentAddress, index: int) -> OpenSlabs | None:
        """Open them; None if that is impossible."""
        segment = Segment.open(card)
        return None if segment is None else OpenSlabs(segment, index)

    def take(self, begin: int, nbytes: int) -> Lent:
        return Lent(self, begin, nbytes)

    def open(self, lent: Lent) -> Tensor:
        with self._lock:
            if self._closed:
                raise OSError("its memory is closed")
            return _private(self._segment, lent.begin, lent.nbytes, lent)

    def give_back(self, begin: int) -> None:
        if os.getpid() != self._owner:  # a fork must not return its parent's messages
            return
        with self._lock:
            if self._closed:  # the descriptor may be another file's by now
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
    """A message of another process; returned when this object and all opened tensors are
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
    """A mapping of a message whose writes are private; `keep` is alive as long as it is."""
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
