"""Memory that the processes of one machine share, with semaphores in it.

    own = Segment.create(place)                      # a memfd; its first bytes are a nonce
    other = Segment.open(segment_address)            # another process's, from its address
    window = other.map(1 << 20, 8192)
    window.bytes[:4096].view(torch.float32)          # f32[1024]: both processes see writes to it
    take(window.address + 4096, check)               # waits until a semaphore is posted

A segment is a memfd of 4 EiB, of which only written pages exist. Another process opens it as
/proc/<pid>/fd/<n> and checks the nonce. Semaphores are POSIX's (sem_trywait is the only atomic
claim in Python's reach). It needs Linux with glibc 2.30; else `calls` raises OSError or
AttributeError. Invariant: a window is unmapped when nothing refers to it, including tensors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from secrets import token_hex
from typing import Any, NamedTuple

import torch

SIZE = 1 << 62  # the size of a segment: it limits offsets, and takes no memory
MAPPED_BYTES = 1 << 30  # the size of a mapping: it takes addresses, and no memory
SLICE_S = 0.2
"""How often a waiting process checks whether the processes that it waits for are alive."""

TRIES = 20
"""How often a semaphore is polled before the process sleeps: for some microseconds, in which a
partner handles a few kilobytes. It does not yield the core in between: a 4 KB all_reduce of four
then took 1.2 ms instead of 0.08."""

_NONCE_BYTES = 32
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class CLibrary(NamedTuple):
    """Functions of the C library. They take semaphores by address; 0 is success."""

    initialise: Callable[[int, int, int], int]
    post: Callable[[int], int]
    take: Callable[[int], int]  # sem_trywait: 0 if the semaphore was taken
    wait: Callable[[int, int, Any], int]  # sem_clockwait, which releases the GIL
    allocate: Callable[[int, int, int, int], int]
    map: Callable[[int | None, int, int, int, int, int], int | None]
    unmap: Callable[[int, int], int]


@cache
def calls() -> CLibrary:
    """Return the functions. Raises OSError or AttributeError if the system lacks one."""
    # PyDLL keeps the GIL, which is faster for calls that do not block
    short, long = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    short.sem_init.argtypes = (pointer, number, ctypes.c_uint)
    short.sem_post.argtypes = (pointer,)
    short.sem_trywait.argtypes = (pointer,)
    long.sem_clockwait.argtypes = (pointer, number, ctypes.POINTER(_Timespec))
    long.fallocate.argtypes = (number, number, ctypes.c_int64, ctypes.c_int64)
    size, offset = ctypes.c_size_t, ctypes.c_int64
    long.mmap.argtypes = (pointer, size, number, number, number, offset)
    long.mmap.restype = pointer
    long.munmap.argtypes = (pointer, size)
    return CLibrary(
        short.sem_init,
        short.sem_post,
        short.sem_trywait,
        long.sem_clockwait,
        long.fallocate,
        long.mmap,
        long.munmap,
    )


def take(semaphore: int, check: Callable[[], None]) -> None:
    """Wait until a semaphore is posted, and take it. `check()` is called every `SLICE_S`; it raises
    RuntimeError if no post can come."""
    library = calls()
    trywait, wait = library.take, library.wait
    for _ in range(TRIES):
        if not trywait(semaphore):
            return
    while True:
        end = time.monotonic_ns() + int(SLICE_S * 1e9)
        until = _Timespec(end // 1_000_000_000, end % 1_000_000_000)
        if not wait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(until)):
            return
        error = ctypes.get_errno()
        if error == errno.ETIMEDOUT:
            try:
                check()
            except RuntimeError:
                if not trywait(semaphore):  # it was posted before the failure
                    return
                raise
        elif error != errno.EINTR:
            raise OSError(error, os.strerror(error))


@dataclass(frozen=True, slots=True)
class Window:
    """A mapped part of a segment, u8[nbytes]. References to the tensor keep it mapped."""

    bytes: torch.Tensor

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """How another process opens a segment. `place`: see `shared_memory_peers.own_place`."""

    place: str
    pid: int
    descriptor: int
    nonce: str


class Segment:
    """A segment of this process, or an open one of another. `process`: a pidfd of its owner."""

    def __init__(self, segment_address: SegmentAddress, descriptor: int, process: int) -> None:
        self.segment_address = segment_address
        self.descriptor: int = descriptor
        self._process = process
        self._mapped = range(0)  # the part of the segment that `_memory` maps
        self._memory = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def create(place: str) -> Segment:
        """Create a segment of this process."""
        calls()
        with ExitStack() as failing:
            descriptor = os.memfd_create("dtensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            failing.callback(os.close, descriptor)
            os.ftruncate(descriptor, SIZE)
            # sealed, so that no other process can remove pages that are mapped
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            nonce = token_hex(_NONCE_BYTES // 2)
            os.pwrite(descriptor, nonce.encode(), 0)
            process = os.pidfd_open(os.getpid())
            failing.pop_all()
        return Segment(SegmentAddress(place, os.getpid(), descriptor, nonce), descriptor, process)

    @staticmethod
    def open(segment_address: SegmentAddress) -> Segment | None:
        """Open another process's segment; None if that is impossible."""
        with ExitStack() as failing:
            try:
                process = os.pidfd_open(
                    segment_address.pid
                )  # first, so that the nonce is of this process
                failing.callback(os.close, process)
                path = f"/proc/{segment_address.pid}/fd/{segment_address.descriptor}"
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                failing.callback(os.close, descriptor)
                nonce = os.pread(descriptor, _NONCE_BYTES, 0)
            except OSError:
                return None
            if nonce != segment_address.nonce.encode():
                return None
            failing.pop_all()
        return Segment(segment_address, descriptor, process)

    @property
    def ended(self) -> bool:
        """Whether the owner has ended."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def map(self, begin: int, nbytes: int) -> Window:
        """Map a part of the segment. `begin`: a multiple of `mmap.PAGESIZE`. Windows near each
        other share a mapping, since each mapping of Python holds a file descriptor."""
        end = begin + nbytes
        if not self._mapped.start <= begin <= end <= self._mapped.stop:
            self._mapped = range(begin, max(end, min(begin + MAPPED_BYTES, SIZE)))
            memory = mmap.mmap(self.descriptor, len(self._mapped), offset=begin)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        mapped_begin = self._mapped.start
        return Window(self._memory[begin - mapped_begin : end - mapped_begin])

    def read(self, begin: int, nbytes: int) -> bytes:
        return os.pread(self.descriptor, nbytes, begin)

    def write(self, begin: int, data: bytes) -> None:
        os.pwrite(self.descriptor, data, begin)

    def drop(self, begin: int, nbytes: int) -> None:
        """Free the pages of a part that is not used."""
        if calls().allocate(self.descriptor, _PUNCH_HOLE, begin, nbytes):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """Close the segment. Windows stay as long as they are used."""
        self._mapped, self._memory = range(0), torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)
        os.close(self._process)
