"""Writing a checkpoint: the controller begins and finishes it, each rank writes its part.

    writing = Writing.begin("ckpt/100", step=100, extra={"epoch": 3})   # controller; ckpt/.tmp-100-..
    part = write_part(writing.folder, 0, pieces, writing.previous)      # each rank, in any thread
    writing.finish([part, ...], keep=3)                                 # controller; ckpt/100

A part is files of some 64 MB, `__<rank>_<n>.distcp`, of whole items as torch.save writes them, and
last `part-<rank>.json`: who sees that file knows that the part is on the disk. A file of the
checkpoint before whose pieces are all unchanged is linked, not written: found by checksums, then
compared byte for byte. Pieces that did not change since lie in files of their own, so that frozen
weights among trained ones are linked from the third checkpoint on.

Invariants: a checkpoint is published when every file in it is synced, its manifest last, by one
rename; what `keep` removes is removed after that. The same pieces give the same files. A rank holds
no more memory than its largest piece, and that only of pieces that are not contiguous.

Not here: who writes which pieces, and that pieces do not change meanwhile.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtensor.errors import PlanningError, check_kind, check_number
from dtensor.runtime.checkpoint.dcp_metadata import metadata_bytes
from dtensor.runtime.checkpoint.extra import encoded
from dtensor.runtime.checkpoint.folders import (
    Claim,
    claim_folder,
    disk_error,
    remove_folder,
    sync,
    write_synced,
)
from dtensor.runtime.checkpoint.manifest import (
    MANIFEST,
    Head,
    made_in,
    manifest_text,
    read_manifest,
)
from dtensor.runtime.checkpoint.records import (
    CheckpointError,
    PartRecord,
    StoredPiece,
    TensorPiece,
    TensorRecord,
    merged,
    running_checks,
)
from dtensor.runtime.checkpoint.torch_save import Frame

BUCKET_BYTES = 64 << 20
_COMPARED_BYTES = 1 << 20
CONTROLLER = -1
"""The rank of the part that the controller writes: values, and the tensors of `extra`."""


@dataclass(slots=True)
class Writing:
    """A checkpoint being written. Its ``folder`` and ``previous`` are what ranks are told."""

    folder: str
    """Where parts are written: beside the target."""
    previous: str | None
    """The newest checkpoint in the same folder, whose unchanged files are linked."""
    _claim: Claim
    _head: Head
    _extra: tuple[Any, dict[str, torch.Tensor]]
    _small: dict[tuple[str, ...], Any]

    @staticmethod
    def begin(
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        extra: Any = None,
        small: Mapping[tuple[str, ...], Any] | None = None,
    ) -> Writing:
        """Make `.tmp-<name>-<nonce>` beside ``path``; no file of the target yet.

        ``extra`` is the user's: numbers, text, bytes, containers, tensors; it is copied here.
        ``small`` are values of the state that are no tensors, by path, such as an optimizer's
        ("optimizer", "param_groups"). PlanningError if the path exists or cannot be made, or if a
        value cannot be written, which is named.
        """
        check_kind("the path", path, str | os.PathLike, "a path", 'dt.save("ckpt/100", model)')
        if step is not None:
            check_number("step", step, least=0, whole=True, fix="the number of steps taken")
        said = encoded(extra, "extra")
        values = dict(small or {})
        for where, value in values.items():
            _, tensors = encoded(value, ".".join(where))
            if tensors:
                raise PlanningError(
                    f"{'.'.join(where)} holds a tensor: tensors are pieces, not values"
                )
        claim = claim_folder(Path(os.path.abspath(os.fspath(path))), os.fspath(path))
        before = made_in(claim.target.parent)
        head = Head(
            name=claim.target.name,
            sequence=1 + max((head.sequence for head in before), default=0),
            step=None if step is None else int(step),
            layout="dcp",
        )
        linkable = [other.name for other in before if other.layout == "dcp"]
        previous = str(claim.target.parent / linkable[-1]) if linkable else None
        return Writing(str(claim.folder), previous, claim, head, said, values)

    def add(self, path: tuple[str, ...], value: Any) -> None:
        """One more of the ``small`` values of `begin`."""
        encoded(value, ".".join(path))
        self._small[path] = value

    def finish(self, parts: Iterable[PartRecord], *, keep: int | None = None) -> None:
        """Publish what all ranks have written; then remove the oldest beyond ``keep``.

        Removed are checkpoints that dtensor made in this folder and that still have the name under
        which it made them: one that was renamed or copied stays. On an error the folder is removed.
        """
        if keep is not None:
            check_number("keep", keep, least=1, whole=True, fix="keep=3")
        try:
            self._publish(list(parts))
        except OSError as error:
            self.abort()
            raise disk_error(self._claim.target, error) from error
        except BaseException:
            self.abort()
            raise
        if keep is not None:
            for head in made_in(self._claim.target.parent)[:-keep]:
                remove_folder(self._claim.target.parent / head.name)

    def abort(self) -> None:
        """Remove what was written; the checkpoints before are as they were."""
        self._claim.give_up()

    def _publish(self, parts: list[PartRecord]) -> None:
        folder = self._claim.folder
        tree, tensors = self._extra
        extra = [
            TensorPiece(
                path=("extra_tensors", name),
                shape=tuple(tensor.shape),
                offsets=(0,) * tensor.dim(),
                tensor=tensor,
            )
            for name, tensor in tensors.items()
        ]
        parts = [*parts, write_part(self.folder, CONTROLLER, extra, None)]
        records = merged(record for part in parts for record in part.tensors)
        for file, nbytes in ((f, n) for part in parts for f, n in part.files.items()):
            if (folder / file).stat().st_size != nbytes:
                raise CheckpointError(f"{folder / file} is not the {nbytes} bytes written to it")
        values: dict[tuple[str, ...], Any] = dict(self._small)
        if self._head.step is not None:
            values["step",] = self._head.step
        if tree is not None:
            values["extra",] = tree
        file, where = _write_values(folder, values)
        small = [
            [list(path), encoded(value, ".".join(path))[0]] for path, value in self._small.items()
        ]
        write_synced(folder / ".metadata", metadata_bytes(records, where))
        for part in parts:
            (folder / part_name(part.rank)).unlink()
        body = {
            "files": {**{f: n for part in parts for f, n in part.files.items()}, **file},
            "tensors": [record.to_json() for record in records.values()],
            "small": small,
            "extra": tree,
        }
        write_synced(folder / MANIFEST, manifest_text(self._head, body))
        self._claim.publish()


def write_part(
    folder: str, rank: int, pieces: Sequence[TensorPiece], previous: str | None
) -> PartRecord:
    """Write a rank's pieces; returns when they are on the disk.

    ``folder`` and ``previous`` are `Writing`'s. CheckpointError if the disk is full or fails: the
    files are then left to `Writing.abort`.
    """
    try:
        return _Part(Path(folder), rank, Path(previous) if previous else None).write(pieces)
    except OSError as error:
        raise disk_error(Path(folder), error) from error


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


@dataclass(slots=True)
class _Part:
    folder: Path
    rank: int
    previous: Path | None
    num_files: int = 0
    bytes_written: int = 0
    bytes_linked: int = 0

    def write(self, pieces: Sequence[TensorPiece]) -> PartRecord:
        checks = [running_checks(piece.data()) for piece in pieces]
        todo = {_key(piece, crc): piece for piece, crc in zip(pieces, checks, strict=True)}
        files: dict[str, int] = {}
        records: list[TensorRecord] = []
        before = _records_by_file(self.previous)
        for old in before:
            if all(key in todo for key in before[old]):
                linked = self._link(old, [(todo[key], key[-1]) for key in before[old]])
                if linked is not None:
                    name, nbytes, new = linked
                    files[name] = nbytes
                    records += new
                    for key in before[old]:
                        del todo[key]
        known = {key for keys in before.values() for key in keys}
        for same in (True, False):
            group = [(piece, key[-1]) for key, piece in todo.items() if (key in known) is same]
            for bucket in _buckets(group):
                name = self._new_name()
                new, nbytes = _laid_out(bucket, name)
                with (self.folder / name).open("xb", buffering=0) as file:
                    for chunk in _content(bucket):
                        _write_all(file, chunk)
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
        name = f"__{'c' if self.rank == CONTROLLER else self.rank}_{self.num_files}.distcp"
        self.num_files += 1
        return name

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
    sizes = tuple(piece.tensor.shape)
    return piece.name, str(piece.tensor.dtype), piece.shape, piece.offsets, sizes, checks


def _records_by_file(previous: Path | None) -> dict[str, list[Key]]:
    """What a checkpoint's files hold, in the order in which it stands there."""
    if previous is None:
        return {}
    try:
        _, body = read_manifest(previous)
    except (OSError, CheckpointError):
        return {}  # removed meanwhile, or damaged: nothing is linked
    found: dict[str, list[tuple[int, Key]]] = {}
    for record in map(TensorRecord.from_json, body["tensors"]):
        for piece in record.pieces:
            assert piece.checks is not None
            key = (
                record.name,
                str(record.dtype),
                record.shape,
                piece.offsets,
                piece.sizes,
                piece.checks,
            )
            found.setdefault(piece.file, []).append((piece.data_at, key))
    return {file: [key for _, key in sorted(found[file])] for file in sorted(found)}


def _buckets(
    pieces: Iterable[tuple[TensorPiece, tuple[int, ...]]],
) -> Iterator[list[tuple[TensorPiece, tuple[int, ...]]]]:
    """Runs of pieces of some `BUCKET_BYTES` together, or one piece that has more."""
    bucket: list[tuple[TensorPiece, tuple[int, ...]]] = []
    size = 0
    for piece, checks in pieces:
        nbytes = piece.tensor.numel() * piece.tensor.itemsize
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((piece, checks))
        size += nbytes
    if bucket:
        yield bucket


def _laid_out(
    bucket: Iterable[tuple[TensorPiece, tuple[int, ...]]], file: str
) -> tuple[list[TensorRecord], int]:
    """Where everything stands in the file of a bucket, and how long that is."""
    records: list[TensorRecord] = []
    at = 0
    for piece, checks in bucket:
        sizes = tuple(piece.tensor.shape)
        frame = Frame.of(piece.tensor.dtype, sizes)
        nbytes = piece.tensor.numel() * piece.tensor.itemsize
        length = len(frame.head) + nbytes + len(frame.after)
        stored = StoredPiece(
            offsets=piece.offsets,
            sizes=sizes,
            file=file,
            data_at=at + len(frame.head),
            nbytes=nbytes,
            item=(at, length),
            checks=checks,
        )
        records.append(
            TensorRecord(
                path=piece.path, dtype=piece.tensor.dtype, shape=piece.shape, pieces=(stored,)
            )
        )
        at += length
    return records, at


def _content(bucket: Iterable[tuple[TensorPiece, tuple[int, ...]]]) -> Iterator[memoryview]:
    """The bytes of the file of a bucket."""
    for piece, checks in bucket:
        frame = Frame.of(piece.tensor.dtype, tuple(piece.tensor.shape))
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


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _write_values(
    folder: Path, values: Mapping[tuple[str, ...], Any]
) -> tuple[dict[str, int], dict[tuple[str, ...], tuple[str, int, int]]]:
    """Values for torch's tools, each as torch.save writes it; dtensor reads the manifest's."""
    name = "__values_0.distcp"
    where: dict[tuple[str, ...], tuple[str, int, int]] = {}
    content = io.BytesIO()
    for path, value in values.items():
        start = content.tell()
        torch.save(value, content)
        where[path] = (name, start, content.tell() - start)
    if not where:
        return {}, {}
    write_synced(folder / name, content.getvalue())
    return {name: len(content.getvalue())}, where
