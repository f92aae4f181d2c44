"""Records of the tensors in a checkpoint: name, dtype, global shape, and the place of each block.

    TensorPiece(path=("model", "w"), shape=(8, 4), offsets=(4, 0), tensor=own)   # rows 4:8 of w
    TensorRecord(path=("model", "w"), dtype=torch.float32, shape=(8, 4), pieces=(...,))

A piece is a block of a global tensor, given by `offsets` and `sizes`; its bytes are contiguous and
row-major in one file. A shard that consists of several intervals is several pieces.

Invariants: the pieces of a tensor cover each element once (`check_cover`). `to_json` and
`from_json` are inverse. The n-th checksum of a piece is zlib.crc32 of its bytes up to the end of
its n-th block (`block_bytes`): two checksums verify a block, and the last is the checksum of the
whole piece."""

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
    """A checkpoint is damaged, has another format, or cannot be written. The cause is the disk or
    another program, not the user's call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A block of a global tensor that a rank writes.

    ``path``: the keys of the tensor in the state dict that torch's tools read, such as
    ``("optimizer", "state", "0.weight", "exp_avg")``; the name is the path joined by dots.
    ``shape``: the global shape. ``offsets``: where the block begins. ``tensor``: the block, on any
    device, with any strides; it must not change until it is written.
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
                f"piece of {self.name}: sizes {sizes} at {self.offsets} are not a block of "
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
        """Return the record of the tensor with only this piece, at this place in a file."""
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
        """Return the bytes in row-major order, in CPU memory, without a copy if possible."""
        flat = self.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """The place of a block of a tensor in a file.

    ``file``: relative to the checkpoint's folder. ``data_at``: the first of its ``nbytes`` bytes;
    None if another program wrote the file, and only the item knows. ``item``: the first byte and
    the length of what torch.save wrote around the data. ``checks``: the running checksums of its
    blocks; None if the format has none."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    data_at: int | None
    nbytes: int
    item: tuple[int, int] | None = None
    checks: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        record_json = {
            "offsets": self.offsets,
            "sizes": self.sizes,
            "file": self.file,
            "data": [self.data_at, self.nbytes],
            "item": self.item,
        }
        if self.checks is None:
            return record_json
        packed = struct.pack(f"<{len(self.checks)}I", *self.checks)
        return {**record_json, "crc32": base64.b64encode(packed).decode()}

    @staticmethod
    def from_json(record_json: Mapping[str, Any]) -> StoredPiece:
        data_at, nbytes = record_json["data"]
        item = record_json["item"]
        checks = None
        if "crc32" in record_json:
            packed = base64.b64decode(record_json["crc32"], validate=True)
            checks = struct.unpack(f"<{len(packed) // 4}I", packed)
            if len(checks) != -(-nbytes // block_bytes(nbytes)):
                raise ValueError(f"{len(checks)} checksums for {nbytes} bytes")
        return StoredPiece(
            offsets=tuple(map(int, record_json["offsets"])),
            sizes=tuple(map(int, record_json["sizes"])),
            file=plain_name(record_json["file"]),
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
    def from_json(record_json: Mapping[str, Any]) -> TensorRecord:
        record = TensorRecord(
            path=tuple(map(str, record_json["path"])),
            dtype=DTYPES_BY_NAME[record_json["dtype"]],
            shape=tuple(map(int, record_json["shape"])),
            pieces=tuple(map(StoredPiece.from_json, record_json["pieces"])),
        )
        for piece in record.pieces:
            if piece.nbytes != math.prod(piece.sizes) * record.dtype.itemsize:
                raise ValueError(f"a piece of {record.name} has {piece.nbytes} bytes")
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """The part of a checkpoint that one rank wrote: its files with sizes in bytes, and its pieces.

    ``bytes_written``: bytes of new files. ``bytes_linked``: bytes of files that are links to files
    of the previous checkpoint.
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
    def from_json(record_json: Mapping[str, Any]) -> PartRecord:
        return PartRecord(
            rank=int(record_json["rank"]),
            files={plain_name(file): int(nbytes) for file, nbytes in record_json["files"].items()},
            tensors=tuple(map(TensorRecord.from_json, record_json["tensors"])),
            bytes_written=int(record_json["bytes_written"]),
            bytes_linked=int(record_json["bytes_linked"]),
        )


def merged(parts: Iterable[TensorRecord]) -> dict[str, TensorRecord]:
    """Return by name, sorted, each tensor with the pieces of all parts, sorted by offsets.

    Raises ValueError if two parts disagree on a tensor, or if pieces overlap or leave a gap.
    """
    by_name: dict[str, TensorRecord] = {}
    for part in parts:
        first = by_name.setdefault(part.name, replace(part, pieces=()))
        if (first.path, first.dtype, first.shape) != (part.path, part.dtype, part.shape):
            raise ValueError(
                f"{part.name} is {first.dtype} {first.shape} in one part and {part.dtype} "
                f"{part.shape} in another"
            )
        by_name[part.name] = replace(first, pieces=first.pieces + part.pieces)
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
    """Raise ValueError unless the pieces cover each element of the tensor exactly once.

    Cells are counted on the grid of the pieces' borders, so the cost does not depend on the size.
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
    """Return the bytes of a piece that have one checksum: about 1/64 of the piece, a power of two
    from 512 B to 1 MiB. A range read thus reads little more than it needs."""
    return max(1 << 9, min(1 << 20, 1 << (nbytes // 64).bit_length()))


def running_checks(data: memoryview) -> tuple[int, ...]:
    """Return for each block the checksum of the data up to the end of the block."""
    block = block_bytes(len(data))
    checks: list[int] = []
    crc = 0
    for at in range(0, len(data), block):
        crc = zlib.crc32(data[at : at + block], crc)
        checks.append(crc)
    return tuple(checks)


def plain_name(file: Any) -> str:
    """Return a file's name within a checkpoint. Raises ValueError if it is outside the folder."""
    parts: Sequence[str] = file.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in file:
        raise ValueError(f"a file named {file!r} does not lie in the checkpoint's folder")
    return file


def _end(piece: StoredPiece, dim: int) -> int:
    return piece.offsets[dim] + piece.sizes[dim]
