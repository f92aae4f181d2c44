"""Write a rank's part of a checkpoint: its pieces are on the disk when the call returns.

    part = write_part(writing.folder, 0, pieces, writing.previous)   # __0_0.distcp, ...
    part.bytes_written, part.bytes_linked                            # 96 MB, 32 MB

A rank writes files of about 64 MB, `__<rank>_<n>.distcp`, in torch.save's format, and last
`part-<rank>.json`, whose presence means that the part is complete. A file of the previous
checkpoint whose pieces are all unchanged is hard-linked: checksums find it, then its bytes are
compared. Unchanged and changed pieces go to separate files. At most one piece is copied in memory
at a time, and only if it is not contiguous or is on a device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtensor.runtime.checkpoint.atomic_folder import disk_error, sync, write_all, write_synced
from dtensor.runtime.checkpoint.manifest import read_manifest
from dtensor.runtime.checkpoint.records import (
    CheckpointError,
    PartRecord,
    TensorPiece,
    TensorRecord,
    running_checks,
)
from dtensor.runtime.checkpoint.safetensors import read_directory, runs, write_at
from dtensor.runtime.checkpoint.torch_save import Frame

BUCKET_BYTES = 64 << 20
_COMPARED_BYTES = 1 << 20
CONTROLLER = -1
"""The rank number of the controller's part, which has the tensors of `extra`."""


def write_part(
    folder: str, rank: int, pieces: Sequence[TensorPiece], previous: str | None, tag: str = ""
) -> PartRecord:
    """Write a rank's pieces, and return when they are on the disk.

    ``folder`` and ``previous`` are fields of `Writing`; ``tag`` is a part of the file names. Raises
    CheckpointError if the disk is full or fails; `Writing.abort` then removes the files.
    """
    try:
        return _Part(Path(folder), rank, Path(previous) if previous else None, tag).write(pieces)
    except OSError as error:
        raise disk_error(Path(folder), error) from error


def write_hf_part(folder: str, rank: int, pieces: Sequence[TensorPiece]) -> PartRecord:
    """Write a rank's pieces into Hugging Face's files, and return when they are on the disk.

    The files exist with their final sizes. The path of a piece is its name, ("lm_head.weight",).
    """
    root = Path(folder)
    nbytes = 0
    try:
        by_name = read_directory(root).tensors
        by_file: dict[str, list[TensorPiece]] = {}
        for piece in pieces:
            by_file.setdefault(by_name[piece.name].pieces[0].file, []).append(piece)
        for file, pieces_of_file in by_file.items():
            descriptor = os.open(root / file, os.O_WRONLY)
            try:
                for piece in pieces_of_file:
                    nbytes += _write_into(descriptor, piece, by_name[piece.name])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        record = PartRecord(
            rank=rank,
            files={},
            tensors=tuple(piece.stored(by_name[piece.name].pieces[0].file) for piece in pieces),
            bytes_written=nbytes,
            bytes_linked=0,
        )
        write_synced(root / part_name(rank), json.dumps(record.to_json()).encode())
    except OSError as error:
        raise disk_error(root, error) from error
    return record


def part_name(rank: int) -> str:
    """Return the name of the file whose presence means that a rank's part is complete."""
    return "part-controller.json" if rank == CONTROLLER else f"part-{rank}.json"


def read_part(folder: str, rank: int) -> PartRecord | None:
    """Return the record of a rank's part; None if the part is not complete."""
    try:
        text = (Path(folder) / part_name(rank)).read_bytes()
    except FileNotFoundError:
        return None
    return PartRecord.from_json(json.loads(text))


def _write_into(descriptor: int, piece: TensorPiece, record: TensorRecord) -> int:
    """Write a piece into the bytes of its tensor; return the number of bytes."""
    if (piece.tensor.dtype, piece.shape) != (record.dtype, record.shape):
        raise ValueError(
            f"{piece.name} is {piece.tensor.dtype} {piece.shape}, but the file has room for "
            f"{record.dtype} {record.shape}"
        )
    begin, itemsize = record.pieces[0].data_at, record.dtype.itemsize
    assert begin is not None
    data = piece.data()
    at = 0
    for first, number in runs(piece.offsets, piece.sizes, piece.shape):
        write_at(descriptor, data[at : at + number * itemsize], begin + first * itemsize)
        at += number * itemsize
    return at


@dataclass(slots=True)
class _Part:
    folder: Path
    rank: int
    previous: Path | None
    tag: str = ""
    num_files: int = 0
    bytes_written: int = 0
    bytes_linked: int = 0

    def write(self, pieces: Sequence[TensorPiece]) -> PartRecord:
        """Link unchanged files of the previous checkpoint, write the other pieces, and return the
        record."""
        checks = [running_checks(piece.data()) for piece in pieces]
        unwritten = {_key(piece, crc): piece for piece, crc in zip(pieces, checks, strict=True)}
        if len(unwritten) != len(pieces):
            names = [".".join(piece.path) for piece in pieces]
            raise ValueError(f"pieces of rank {self.rank} overlap, of some of {sorted(set(names))}")
        files: dict[str, int] = {}
        records: list[TensorRecord] = []
        for old_file in self.folder.glob(self._name("*")):
            old_file.unlink()  # written by a process of this rank that then died
        before = _records_by_file(self.previous)
        for old, places in before.items():
            matches = [key for keys in places for key in keys if key in unwritten]
            if len(matches) == len(places):
                linked = self._link_file(old, [(unwritten[key], key[-1]) for key in matches])
                if linked is not None:
                    name, nbytes, new = linked
                    files[name] = nbytes
                    records += new
                    for key in matches:
                        del unwritten[key]
        known_keys = {key for places in before.values() for keys in places for key in keys}
        for is_linkable_later in (True, False):
            group = [
                (piece, key[-1])
                for key, piece in unwritten.items()
                if (key in known_keys) is is_linkable_later
            ]
            for bucket in _buckets(group):
                name = self._new_name()
                new, nbytes = _layout(bucket, name)
                with (self.folder / name).open("xb", buffering=0) as file:
                    for chunk in _content(bucket):
                        write_all(file, chunk)
                    os.fsync(file.fileno())
                self.bytes_written += nbytes
                files[name] = nbytes
                records += new
        sync(self.folder)
        record = PartRecord(
            rank=self.rank,
            files=files,
            tensors=tuple(records),
            bytes_written=self.bytes_written,
            bytes_linked=self.bytes_linked,
        )
        write_synced(self.folder / part_name(self.rank), json.dumps(record.to_json()).encode())
        return record

    def _new_name(self) -> str:
        name = self._name(self.num_files)
        self.num_files += 1
        return name

    def _name(self, number: int | str) -> str:
        return f"__{'c' if self.rank == CONTROLLER else self.rank}_{number}{self.tag}.distcp"

    def _link_file(
        self, old: str, bucket: list[tuple[TensorPiece, tuple[int, ...]]]
    ) -> tuple[str, int, list[TensorRecord]] | None:
        """Link a file of the previous checkpoint if it has exactly these bytes, else return
        None."""
        assert self.previous is not None
        name = self._new_name()
        records, nbytes = _layout(bucket, name)
        try:
            if not _has_content(self.previous / old, _content(bucket)):
                return None
            os.link(self.previous / old, self.folder / name, follow_symlinks=False)
        except OSError:
            # The file was removed, is on another device, has too many links, or the file system has
            # no links: write the pieces again.
            return None
        self.bytes_linked += nbytes
        return name, nbytes, records


Key = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _key(piece: TensorPiece, checks: tuple[int, ...]) -> Key:
    return piece.name, str(piece.tensor.dtype), piece.shape, piece.offsets, piece.sizes, checks


def _records_by_file(previous: Path | None) -> dict[str, list[list[Key]]]:
    """Return by file of the previous checkpoint, for each position in it, the keys of the pieces
    there: several keys if a piece has several names."""
    if previous is None:
        return {}
    try:
        _, body = read_manifest(previous)
    except (OSError, CheckpointError):
        return {}  # the checkpoint was removed or is damaged: link nothing
    keys_by_file: dict[str, dict[int, list[Key]]] = {}
    for record in map(TensorRecord.from_json, body["tensors"]):
        for piece in record.pieces:
            if piece.checks is None or piece.data_at is None:
                continue
            key = (
                record.name,
                str(record.dtype),
                record.shape,
                piece.offsets,
                piece.sizes,
                piece.checks,
            )
            keys_by_file.setdefault(piece.file, {}).setdefault(piece.data_at, []).append(key)
    return {
        file: [keys for _, keys in sorted(keys_by_file[file].items())]
        for file in sorted(keys_by_file)
    }


def _buckets(
    pieces: Iterable[tuple[TensorPiece, tuple[int, ...]]],
) -> Iterator[list[tuple[TensorPiece, tuple[int, ...]]]]:
    """Yield groups of consecutive pieces with at most `BUCKET_BYTES`, or one larger piece."""
    bucket: list[tuple[TensorPiece, tuple[int, ...]]] = []
    size = 0
    for piece, checks in pieces:
        if bucket and size + piece.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((piece, checks))
        size += piece.nbytes
    if bucket:
        yield bucket


def _layout(
    bucket: Iterable[tuple[TensorPiece, tuple[int, ...]]], file: str
) -> tuple[list[TensorRecord], int]:
    """Return the records of the pieces in the file of a bucket, and the file's size in bytes."""
    records: list[TensorRecord] = []
    at = 0
    for piece, checks in bucket:
        frame = Frame.of(piece.tensor.dtype, piece.sizes)
        length = len(frame.head) + piece.nbytes + len(frame.after)
        records.append(piece.stored(file, at + len(frame.head), (at, length), checks))
        at += length
    return records, at


def _content(bucket: Iterable[tuple[TensorPiece, tuple[int, ...]]]) -> Iterator[memoryview]:
    """Yield the bytes of the file of a bucket."""
    for piece, checks in bucket:
        frame = Frame.of(piece.tensor.dtype, piece.sizes)
        yield memoryview(frame.head)
        yield piece.data()
        yield memoryview(frame.tail(checks[-1] if checks else 0))


def _has_content(path: Path, content: Iterable[memoryview]) -> bool:
    """Return whether a file has exactly these bytes."""
    with path.open("rb", buffering=0) as file:
        for chunk in content:
            for at in range(0, len(chunk), _COMPARED_BYTES):
                part = chunk[at : at + _COMPARED_BYTES]
                if file.read(len(part)) != part:
                    return False
        return not file.read(1)
