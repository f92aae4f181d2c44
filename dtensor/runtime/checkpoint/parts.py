"""A rank's part of a checkpoint: its pieces, on the disk when the call returns.

    part = write_part(writing.folder, 0, pieces, writing.previous)   # __0_0.distcp, ...
    part.bytes_written, part.bytes_linked                            # 96 MB, 32 MB

Files of some 64 MB, `__<rank>_<n>.distcp`, of whole items as torch.save writes them, and last
`part-<rank>.json`: who sees that file knows that the part is on the disk. A file of the checkpoint
before whose pieces are all unchanged is linked, not written: found by checksums, then compared byte
for byte. Pieces that did not change since lie in files of their own, so that frozen weights among
trained ones are linked from the third checkpoint on. Into Hugging Face's files, which are made and
have their size before, a rank writes where its pieces belong.

Invariants: the same pieces after the same checkpoint give the same files. No more memory is held
than of one piece, and that only where it is not contiguous or on a device.
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
"""The rank of the part that the controller writes: the tensors of `extra`."""


def write_part(
    folder: str, rank: int, pieces: Sequence[TensorPiece], previous: str | None, tag: str = ""
) -> PartRecord:
    """Write a rank's pieces; returns when they are on the disk.

    ``folder`` and ``previous`` are `Writing`'s; ``tag`` is in the files' names. CheckpointError if
    the disk is full or fails: the files are then left to `Writing.abort`.
    """
    try:
        return _Part(Path(folder), rank, Path(previous) if previous else None, tag).write(pieces)
    except OSError as error:
        raise disk_error(Path(folder), error) from error


def write_hf_part(folder: str, rank: int, pieces: Sequence[TensorPiece]) -> PartRecord:
    """Write a rank's pieces to where they belong in Hugging Face's files; returns when they are on
    the disk. A piece's path is its name alone, ("lm_head.weight",)."""
    root = Path(folder)
    nbytes = 0
    try:
        there = read_directory(root).tensors
        by_file: dict[str, list[TensorPiece]] = {}
        for piece in pieces:
            by_file.setdefault(there[piece.name].pieces[0].file, []).append(piece)
        for file, pieces_of_file in by_file.items():
            descriptor = os.open(root / file, os.O_WRONLY)
            try:
                for piece in pieces_of_file:
                    nbytes += _write_into(descriptor, piece, there[piece.name])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        record = PartRecord(
            rank=rank,
            files={},
            tensors=tuple(piece.stored(there[piece.name].pieces[0].file) for piece in pieces),
            bytes_written=nbytes,
            bytes_linked=0,
        )
        write_synced(root / part_name(rank), json.dumps(record.to_json()).encode())
    except OSError as error:
        raise disk_error(root, error) from error
    return record


def part_name(rank: int) -> str:
    """The file that says that a rank's part is written."""
    return "part-controller.json" if rank == CONTROLLER else f"part-{rank}.json"


def read_part(folder: str, rank: int) -> PartRecord | None:
    """What a rank has written; None while it has not ended."""
    try:
        text = (Path(folder) / part_name(rank)).read_bytes()
    except FileNotFoundError:
        return None
    return PartRecord.from_json(json.loads(text))


def _write_into(descriptor: int, piece: TensorPiece, record: TensorRecord) -> int:
    """Write a piece into its tensor's bytes; returns how many they are."""
    if (piece.tensor.dtype, piece.shape) != (record.dtype, record.shape):
        raise ValueError(
            f"{piece.name} is {piece.tensor.dtype} {piece.shape}, and its place is for "
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
        checks = [running_checks(piece.data()) for piece in pieces]
        todo = {_key(piece, crc): piece for piece, crc in zip(pieces, checks, strict=True)}
        if len(todo) != len(pieces):
            names = [".".join(piece.path) for piece in pieces]
            raise ValueError(f"pieces of rank {self.rank} overlap, of some of {sorted(set(names))}")
        files: dict[str, int] = {}
        records: list[TensorRecord] = []
        for left in self.folder.glob(self._name("*")):
            left.unlink()  # by a process of this rank that was lost while it wrote
        before = _records_by_file(self.previous)
        for old, places in before.items():
            matches = [key for keys in places for key in keys if key in todo]
            if len(matches) == len(places):
                linked = self._link(old, [(todo[key], key[-1]) for key in matches])
                if linked is not None:
                    name, nbytes, new = linked
                    files[name] = nbytes
                    records += new
                    for key in matches:
                        del todo[key]
        known = {key for places in before.values() for keys in places for key in keys}
        for same in (True, False):
            group = [(piece, key[-1]) for key, piece in todo.items() if (key in known) is same]
            for bucket in _buckets(group):
                name = self._new_name()
                new, nbytes = _laid_out(bucket, name)
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

    def _link(
        self, old: str, bucket: list[tuple[TensorPiece, tuple[int, ...]]]
    ) -> tuple[str, int, list[TensorRecord]] | None:
        """Link a file of the checkpoint before, if it has just these bytes."""
        assert self.previous is not None
        name = self._new_name()
        records, nbytes = _laid_out(bucket, name)
        try:
            if not _same(self.previous / old, _content(bucket)):
                return None
            os.link(self.previous / old, self.folder / name, follow_symlinks=False)
        except OSError:
            # Removed meanwhile, on another device, a file system without links, too many of them:
            # written again.
            return None
        self.bytes_linked += nbytes
        return name, nbytes, records


Key = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _key(piece: TensorPiece, checks: tuple[int, ...]) -> Key:
    return piece.name, str(piece.tensor.dtype), piece.shape, piece.offsets, piece.sizes, checks


def _records_by_file(previous: Path | None) -> dict[str, list[list[Key]]]:
    """What a checkpoint's files hold, in the order in which it stands there: at each place what is
    there, several of what has several names."""
    if previous is None:
        return {}
    try:
        _, body = read_manifest(previous)
    except (OSError, CheckpointError):
        return {}  # removed meanwhile, or damaged: nothing is linked
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
    """Runs of pieces of some `BUCKET_BYTES` together, or one piece that has more."""
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


def _laid_out(
    bucket: Iterable[tuple[TensorPiece, tuple[int, ...]]], file: str
) -> tuple[list[TensorRecord], int]:
    """Where everything stands in the file of a bucket, and how long that is."""
    records: list[TensorRecord] = []
    at = 0
    for piece, checks in bucket:
        frame = Frame.of(piece.tensor.dtype, piece.sizes)
        length = len(frame.head) + piece.nbytes + len(frame.after)
        records.append(piece.stored(file, at + len(frame.head), (at, length), checks))
        at += length
    return records, at


def _content(bucket: Iterable[tuple[TensorPiece, tuple[int, ...]]]) -> Iterator[memoryview]:
    """The bytes of the file of a bucket."""
    for piece, checks in bucket:
        frame = Frame.of(piece.tensor.dtype, piece.sizes)
        yield memoryview(frame.head)
        yield piece.data()
        yield memoryview(frame.tail(checks[-1] if checks else 0))


def _same(path: Path, content: Iterable[memoryview]) -> bool:
    with path.open("rb", buffering=0) as file:
        for chunk in content:
            for at in range(0, len(chunk), _COMPARED_BYTES):
                part = chunk[at : at + _COMPARED_BYTES]
                if file.read(len(part)) != part:
                    return False
        return not file.read(1)
