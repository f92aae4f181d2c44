"""The C allocator of an actor's process: freed memory stays with it, for the next step to use.

    keep_freed_memory()      # once, when the process starts

A step frees what it makes, and the next one makes the same again. By default glibc returns a block
of megabytes to the system when it is freed, so that each page of each tensor is faulted in again:
7,700 faults and 9% of a training step of four transformer blocks of width 256. Blocks above
`LARGEST` still come from the system, so that a process keeps no gigabyte that it used once.

Not here: allocators other than glibc's (an LD_PRELOAD of jemalloc, macOS), which are left as they
are; memory of GPUs, which torch caches by itself.
"""

from __future__ import annotations

import ctypes

LARGEST = 1 << 25
"""Bytes: what glibc's own threshold may grow to."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Whether there was something to set."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
