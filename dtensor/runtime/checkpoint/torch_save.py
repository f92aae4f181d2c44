"""The bytes that torch.save writes before and after a tensor's data.

    frame = Frame.of(torch.float32, (4, 8))
    frame.head + data + frame.tail(crc32(data))     # what torch.save writes of that tensor, 128 B

torch.save writes a zip whose entry `data/0` holds the uncompressed data.
`torch.serialization.skip_data` makes it omit the data, so the caller can write them without a copy
and knows their offset: a range of rows is a range of bytes.

Invariants: torch.load(weights_only=True) and Python's zipfile read the result, a contiguous tensor
of the piece's shape; the zip's checksum is filled in.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import IO, cast

import torch

_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = b"PK\x01\x02"


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes that torch.save writes before and after a tensor's data."""

    head: bytes
    after: bytes

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
        """Return the frame of a contiguous tensor of this dtype and shape."""
        hole = _Hole()
        with torch.serialization.skip_data():
            # The memory of the empty tensor is never touched, so the system does not allocate it.
            torch.save(torch.empty(sizes, dtype=dtype), cast(IO[bytes], hole))
        return Frame(bytes(hole.before), bytes(hole.after))

    def tail(self, crc: int) -> bytes:
        """Return the bytes after the data, which contain the data's checksum ``crc`` twice."""
        if not self.after.startswith(_DESCRIPTOR):
            return self.after  # a tensor without elements has no data, so nothing was skipped
        tail = bytearray(self.after)
        tail[4:8] = crc.to_bytes(4, "little")
        name = tail.index(b"archive/data/0", tail.index(_ENTRY))
        tail[name - 30 : name - 26] = crc.to_bytes(4, "little")
        return bytes(tail)


class _Hole:
    """A file object that keeps the bytes written before and after the data that were skipped."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self.skipped = 0

    def write(self, data: bytes) -> int:
        (self.after if self.skipped else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR and not self.skipped
        self.skipped = offset

    def flush(self) -> None:
        """Do nothing; torch.save requires the method."""
