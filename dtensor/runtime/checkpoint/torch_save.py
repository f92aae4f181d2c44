"""Files of torch.save, tensor by tensor: what stands around a tensor's bytes, and where they are.

    frame = Frame.of(torch.float32, (4, 8))
    frame.head + data + frame.tail(crc32(data))     # what torch.save writes of that tensor, 128 B

torch.save writes a zip whose entry `data/0` holds the bytes as they are, uncompressed.
`torch.serialization.skip_data` makes it write all but those bytes; so we write them ourselves, from
where they lie, and know their place: a range of rows is a range of bytes.

Invariants: torch.load(weights_only=True) and Python's zipfile read what is written here (the zip's
own checksum is put in). torch's file holds a tensor of the piece's shape, contiguous.
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
    """What torch.save writes before and after a tensor's bytes."""

    head: bytes
    after: bytes

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
        """For a contiguous tensor of this dtype and shape."""
        hole = _Hole()
        with torch.serialization.skip_data():
            # Memory that is never touched: the system gives none.
            torch.save(torch.empty(sizes, dtype=dtype), cast(IO[bytes], hole))
        return Frame(bytes(hole.before), bytes(hole.after))

    def tail(self, crc: int) -> bytes:
        """What stands after the bytes, whose checksum is ``crc``: it is written there twice."""
        if not self.after.startswith(_DESCRIPTOR):
            return self.after  # a tensor without elements: there was no hole
        tail = bytearray(self.after)
        tail[4:8] = crc.to_bytes(4, "little")
        name = tail.index(b"archive/data/0", tail.index(_ENTRY))
        tail[name - 30 : name - 26] = crc.to_bytes(4, "little")
        return bytes(tail)


class _Hole:
    """A file that keeps what is written, and which bytes were passed over."""

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
        """As torch.save asks for."""
