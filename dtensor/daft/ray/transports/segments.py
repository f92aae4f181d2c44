"""Anonymous memory that processes of one host share, with semaphores in it.

    own = Segment.create(place)                      # a memfd; its first bytes are a nonce
    there = Segment.open(card)                       # another process's, from its `own.card`
    window = there.map(1 << 20, 8192)                # tensors and semaphores in it
    window.bytes[:4096].view(torch.float32)          # f32[1024]: the other sees writes to it
    semaphore = window.address + 4096
    take(semaphore, check)                           # until the other has posted it

A segment is a memfd of 4 EiB, of which only written pages exist. Others open it as
`/proc/<pid>/fd/<n>`, and then read its nonce back: so no name can be left over, and no other
process, in this or another namespace, can be mistaken for the owner. Semaphores are POSIX's, shared
by processes, through ctypes: they order memory on all machines, and `sem_trywait` is the only
atomic claim that Python can reach.

Invariants: a window is unmapped when nothing refers to it any more, tensors in it included; a
process's end frees all its memory. `take` never spins for long: it polls a few times, then sleeps
in the kernel, for `SLICE_S` at most before it checks whether there is still a poster. It does not
yield its core in between: a process that yields while others compute gets the core back late, so
that a 4 KB all_reduce of four took 1.2 ms instead of 0.08.

Linux with glibc 2.30 or later; elsewhere `calls` raises `OSError` or `AttributeError`.
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

SIZE = 1 << 62  # of a segment; a limit of offsets, not of memory
MAPPED_BYTES = 1 << 30  # at once, of addresses and not of memory
SLICE_S = 0.2
"""How often a waiting process checks whether those that it waits for are still alive."""

TRIES = 20
"""How often a semaphore is polled before the process sleeps: some microseconds, the time of a
partner on another core for a few kilobytes."""

_NONCE_BYTES = 32
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class CLibrary(NamedTuple):
    """Functions of the C library; semaphores by their addresses. A result of 0 is success."""

    initialise: Callable[[int, int, int], int]
    post: Callable[[int], int]
    take: Callable[[int], int]
    """sem_trywait: 0 if it was claimed."""
    wait: Callable[[int, int, Any], int]
    """sem_clockwait: without the GIL."""
    allocate: Callable[[int, int, int, int], int]
    map: Callable[[int | None, int, int, int, int, int], int | None]
    unmap: Callable[[int, int], int]


@cache
def calls() -> CLibrary:
    # PyDLL keeps the GIL: a call that does not block is faster than a release of the GIL.
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
    """Wait for a post. `check` raises if none can come; it is called every `SLICE_S`."""
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
                if not trywait(semaphore):  # the post came before the failure
                    return
                raise
        elif error != errno.EINTR:
            raise OSError(error, os.strerror(error))


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a segment, u8[nbytes]. Addresses hold while anything refers to the tensor."""

    bytes: torch.Tensor

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """The data with which another process opens a segment. `place`: the namespace of `/proc`."""

    place: str
    pid: int
    descriptor: int
    nonce: str


class Segment:
    """`process`: a pidfd of the owner."""

    def __init__(self, card: SegmentAddress, descriptor: int, process: int) -> None:
        self.card = card
        self.descriptor: int = descriptor
        self._process = process
        self._mapped = range(0)  # of the segment
        self._memory = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def create(place: str) -> Segment:
        """Create a segment of this process."""
        calls()
        with ExitStack() as failing:
            descriptor = os.memfd_create("dtensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            failing.callback(os.close, descriptor)
            os.ftruncate(descriptor, SIZE)
            # seals: no opener can remove pages under another's mapping
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            nonce = token_hex(_NONCE_BYTES // 2)
            os.pwrite(descriptor, nonce.encode(), 0)
            process = os.pidfd_open(os.getpid())
            failing.pop_all()
        return Segment(SegmentAddress(place, os.getpid(), descriptor, nonce), descriptor, process)

    @staticmethod
    def open(card: SegmentAddress) -> Segment | None:
        """Open another process's segment; None if that is impossible."""
        with ExitStack() as failing:
            try:
                process = os.pidfd_open(card.pid)  # before its nonce: both of one process
                failing.callback(os.close, process)
                path = f"/proc/{card.pid}/fd/{card.descriptor}"
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                failing.callback(os.close, descriptor)
                nonce = os.pread(descriptor, _NONCE_BYTES, 0)
            except OSError:
                return None
            if nonce != card.nonce.encode():
                return None
            failing.pop_all()
        return Segment(card, descriptor, process)

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def map(self, begin: int, nbytes: int) -> Window:
        """`begin`: a multiple of `mmap.PAGESIZE`. Windows near each other share a mapping, for each
        of Python's holds a file descriptor."""
        end = begin + nbytes
        if not self._mapped.start <= begin <= end <= self._mapped.stop:
            self._mapped = range(begin, max(end, min(begin + MAPPED_BYTES, SIZE)))
            memory = mmap.mmap(self.descriptor, len(self._mapped), offset=begin)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        first = self._mapped.start
        return Window(self._memory[begin - first : end - first])

    def read(self, begin: int, nbytes: int) -> bytes:
        return os.pread(self.descriptor, nbytes, begin)

    def write(self, begin: int, data: bytes) -> None:
        os.pwrite(self.descriptor, data, begin)

    def drop(self, begin: int, nbytes: int) -> None:
        """Free unused pages."""
        if calls().allocate(self.descriptor, _PUNCH, begin, nbytes):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """Windows stay while they are used."""
        self._mapped, self._memory = range(0), torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)
        os.close(self._process)
