"""What a checkpoint says of its tensors: names, dtypes, global shapes, and where each block lies.

    TensorPiece(path=("model", "w"), shape=(8, 4), offsets=(4, 0), tensor=own)   # rows 4:8 of w
    TensorRecord(path=("model", "w"), dtype=torch.float32, shape=(8, 4), pieces=(...,))

A tensor is global; a piece is a block of it, by `offsets` and `sizes` per dim. Its bytes lie end to
end in row-major order in one file. A shard of several intervals is several pieces.

Invariants: the pieces of a tensor are disjoint and fill it (`check_cover`), each element once. A
record is data: `to_json` and `from_json` are inverse, and nothing in it is ever called or imported.

Checksums are those of zlib.crc32, run on over a piece: the n-th is that of all its bytes up to the
end of its n-th block (`block_bytes`). So a block is checked by its own bytes and two numbers, and
the last number is the checksum of the piece, which zip files want.

Not here: files (`writing`, `reading`) and placements, which say who has which pieces.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import DTYPES

DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, is not what it seems, or cannot be written: the disk's fault or
    another program's, not the call's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A block of a global tensor that a rank is to write.

    ``path`` is where the tensor stands in the state dict that torch's tools make of it, such as
    ``("optimizer", "state", "0.weight", "exp_avg")``; its name is the path joined by dots.
    ``shape`` is the global one, ``offsets`` where the block begins, ``tensor`` the block itself, on
    any device, of any strides: it must not change until it is written.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not (len(self.shape) == len(self.offsets) == len(sizes)) or any(
            at < 0 or at + size > whole
            for at, size, whole in zip(self.offsets, sizes, self.shape, strict=True)
        ):
            raise ValueError(
                f"piece of {self.name}: sizes {sizes} at {self.offsets} are no block of "
                f"{self.shape}"
            )
        if self.tensor.dtype not in DTYPES_BY_NAME.values() or self.tensor.layout != torch.strided:
            raise ValueError(
                f"{self.name} is of dtype {self.tensor.dtype}, layout {self.tensor.layout}: "
                "checkpoints hold dense tensors of the dtypes that ranks compute with"
            )

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    def stored(
        self,
        file: str,
        data_at: int | None = None,
        item: tuple[int, int] | None = None,
        checks: tuple[int, ...] | None = None,
    ) -> TensorRecord:
        """The record of the tensor with this piece alone, which lies there."""
        piece = StoredPiece(
            offsets=self.offsets,
            sizes=self.sizes,
            file=file,
            data_at=data_at,
            nbytes=self.nbytes,
            item=item,
            checks=checks,
        )
        return TensorRecord(
            path=self.path, dtype=self.tensor.dtype, shape=self.shape, pieces=(piece,)
        )

    def data(self) -> memoryview:
        """Its bytes in row-major order, in this process's memory; copied only if they must be."""
        flat = self.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """Where a block of a tensor lies.

    ``file`` is relative to the checkpoint's folder; its data are ``nbytes`` bytes from ``data_at``
    on; None where that is in the item alone, which was written by another.
    ``item`` is the first byte and the length of what torch.save wrote around them. ``checks`` are
    the running checksums of its blocks; None where the format has none.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    data_at: int | None
    nbytes: int
    item: tuple[int, int] | None = None
    checks: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        said = {
            "offsets": self.offsets,
            "sizes": self.sizes,
            "file": self.file,
            "data": [self.data_at, self.nbytes],
            "item": self.item,
        }
        if self.checks is None:
            return said
        packed = struct.pack(f"<{len(self.checks)}I", *self.checks)
        return {**said, "crc32": base64.b64encode(packed).decode()}

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> StoredPiece:
        data_at, nbytes = said["data"]
        item = said["item"]
        checks = None
        if "crc32" in said:
            packed = base64.b64decode(said["crc32"], validate=True)
            checks = struct.unpack(f"<{len(packed) // 4}I", packed)
            if len(checks) != -(-nbytes // block_bytes(nbytes)):
                raise ValueError(f"{len(checks)} checksums for {nbytes} bytes")
        return StoredPiece(
            offsets=tuple(map(int, said["offsets"])),
            sizes=tuple(map(int, said["sizes"])),
            file=plain_name(said["file"]),
            data_at=None if data_at is None else int(data_at),
            nbytes=int(nbytes),
            item=None if item is None else (int(item[0]), int(item[1])),
            checks=checks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor of a checkpoint: its path, dtype, global shape, and pieces."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": self.shape,
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> TensorRecord:
        record = TensorRecord(
            path=tuple(map(str, said["path"])),
            dtype=DTYPES_BY_NAME[said["dtype"]],
            shape=tuple(map(int, said["shape"])),
            pieces=tuple(map(StoredPiece.from_json, said["pieces"])),
        )
        for piece in record.pieces:
            if piece.nbytes != math.prod(piece.sizes) * record.dtype.itemsize:
                raise ValueError(f"a piece of {record.name} has {piece.nbytes} bytes")
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What one rank has written: its files with their sizes in bytes, and its tensors' pieces.

    ``bytes_written`` counts what went to the disk, ``bytes_linked`` what the checkpoint before has
    as well.
    """

    rank: int
    files: Mapping[str, int]
    tensors: tuple[TensorRecord, ...]
    bytes_written: int
    bytes_linked: int

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "files": dict(self.files),
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "bytes_written": self.bytes_written,
            "bytes_linked": self.bytes_linked,
        }

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> PartRecord:
        return PartRecord(
            rank=int(said["rank"]),
            files={plain_name(file): int(nbytes) for file, nbytes in said["files"].items()},
            tensors=tuple(map(TensorRecord.from_json, said["tensors"])),
            bytes_written=int(said["bytes_written"]),
            bytes_linked=int(said["bytes_linked"]),
        )


def merged(parts: Iterable[TensorRecord]) -> dict[str, TensorRecord]:
    """By name, sorted, each tensor with the pieces of all parts, sorted by offsets.

    ValueError if two parts differ about a tensor, or if pieces overlap or leave a gap.
    """
    by_name: dict[str, TensorRecord] = {}
    for part in parts:
        known = by_name.setdefault(part.name, replace(part, pieces=()))
        if (known.path, known.dtype, known.shape) != (part.path, part.dtype, part.shape):
            raise ValueError(
                f"{part.name} is {known.dtype} {known.shape} in one part and {part.dtype} "
                f"{part.shape} in another"
            )
        by_name[part.name] = replace(known, pieces=known.pieces + part.pieces)
    result: dict[str, TensorRecord] = {}
    for name in sorted(by_name):
        record = by_name[name]
        pieces = tuple(sorted(record.pieces, key=lambda piece: (piece.offsets, piece.sizes)))
        if not math.prod(record.shape):
            pieces = pieces[:1]
        result[name] = replace(record, pieces=pieces)
        check_cover(result[name])
    return result


def check_cover(record: TensorRecord) -> None:
    """ValueError unless the pieces are disjoint and fill the tensor.

    Counted on the grid that the pieces' own borders make, so that it costs no more than there are
    pieces where they are a grid.
    """
    if [(p.offsets, p.sizes) for p in record.pieces] == [((0,) * len(record.shape), record.shape)]:
        return
    borders = [
        sorted({0, whole, *(at for p in record.pieces for at in (p.offsets[d], _end(p, d)))})
        for d, whole in enumerate(record.shape)
    ]
    for piece in record.pieces:
        if any(piece.offsets[d] < 0 or _end(piece, d) > n for d, n in enumerate(record.shape)):
            raise ValueError(f"a piece of {record.name} {record.shape} reaches beyond it: {piece}")
    counts = torch.zeros([len(line) - 1 for line in borders], dtype=torch.int32)
    places = [{at: i for i, at in enumerate(line)} for line in borders]
    for piece in record.pieces:
        where = tuple(
            slice(place[piece.offsets[d]], place[_end(piece, d)]) for d, place in enumerate(places)
        )
        counts[where] += 1
    if not bool((counts == 1).all()):
        fault = "lack a part of it" if bool((counts == 0).any()) else "overlap"
        blocks = ", ".join(f"{p.sizes} at {p.offsets}" for p in record.pieces[:8])
        raise ValueError(f"the pieces of {record.name} {record.shape} {fault}: {blocks}")


def block_bytes(nbytes: int) -> int:
    """How many bytes of a piece are checked together: some 64th of it, so that a range read reads
    little beside; from 512 B to 1 MiB, a power of two."""
    return max(1 << 9, min(1 << 20, 1 << (nbytes // 64).bit_length()))


def running_checks(data: memoryview) -> tuple[int, ...]:
    """The checksum of the data up to the end of each block."""
    block = block_bytes(len(data))
    checks: list[int] = []
    crc = 0
    for at in range(0, len(data), block):
        crc = zlib.crc32(data[at : at + block], crc)
        checks.append(crc)
    return tuple(checks)


def plain_name(file: Any) -> str:
    """A file's name inside a checkpoint; ValueError if it would lead out of the folder."""
    parts: Sequence[str] = file.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in file:
        raise ValueError(f"a file named {file!r} does not lie in the checkpoint's folder")
    return file


def _end(piece: StoredPiece, dim: int) -> int:
    return piece.offsets[dim] + piece.sizes[dim]
