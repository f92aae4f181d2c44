"""Reading a checkpoint: what it holds, and any block of any tensor, by the bytes that it lies in.

    saved = Checkpoint.open("ckpt/100")
    saved.tensors["model.w"].shape, saved.step, saved.extra        # (8, 4), 100, {...}
    saved.read("model.w", (4, 0), (4, 2))                          # [4, 2]; rows 4:8, columns 0:2

Three kinds of directories are read alike: ours, by `manifest.json`; another's of
torch.distributed.checkpoint; Hugging Face's, by the headers of its safetensors files.

Invariants: no file is unpickled but a stranger's `.metadata` and values, by what admits names of
theirs alone. Of ours, each block (`records.block_bytes`, some 64th of a piece) that a read touches
is checked, and no other is read: of columns, whole rows where a row is less than a block; without
checksums, where it is less than a page. ``bytes_read`` counts what came from files. No more than
8 MiB is held beside the result.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtensor.errors import PlanningError, check_kind
from dtensor.runtime.checkpoint.extra import decoded
from dtensor.runtime.checkpoint.foreign_dcp import METADATA, load_whole, locate, read_metadata
from dtensor.runtime.checkpoint.manifest import (
    MANIFEST,
    damaged,
    made_in,
    read_manifest,
)
from dtensor.runtime.checkpoint.records import (
    CheckpointError,
    StoredPiece,
    TensorRecord,
    block_bytes,
)
from dtensor.runtime.checkpoint.safetensors import is_directory, read_directory, read_files

_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 1 << 12


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint.

    ``layout`` is "dtensor", "dcp" (a stranger's) or "hf". ``tensors`` by name, sorted: "model.w",
    "optimizer.state.w.exp_avg"; of Hugging Face's "w". ``tied``, of Hugging Face's: other names of
    tensors, each with the name that is in ``tensors``. ``small`` are the values of the state that
    are no tensors, by path; of a stranger's, each is read when it is asked for. ``step`` and
    ``extra`` are as they were saved, None of a stranger's. ``files`` are the sizes in bytes.
    """

    path: str
    layout: str
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, int]
    step: int | None = None
    extra: Any = None
    small: Mapping[tuple[str, ...], Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    _reads: list[int] = field(default_factory=list, repr=False)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Checkpoint:
        """PlanningError if there is no checkpoint; CheckpointError if it is damaged."""
        check_kind("the path", path, str | os.PathLike, "a path", 'dt.load("ckpt/100", model)')
        folder = Path(path)
        if (folder / MANIFEST).is_file():
            return _open_own(folder)
        if (folder / METADATA).is_file():
            tensors, values = read_metadata(folder)
            return Checkpoint(
                path=str(folder), layout="dcp", tensors=tensors, files={}, small=values
            )
        if is_directory(folder):
            there = read_directory(folder)
            return Checkpoint(
                path=str(folder),
                layout="hf",
                tensors=there.tensors,
                files=there.files,
                tied=there.tied,
            )
        raise PlanningError(_no_checkpoint(folder))

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """The block of the tensor at these offsets: a new tensor on the CPU of shape ``sizes``, of
        the tensor's dtype; the whole of it if they are left out.

        KeyError for a name that is not in `tensors`, ValueError for a block that is not in it;
        CheckpointError if a file is missing, short or changed: it names both.
        """
        record = self.tensors[name]
        start = tuple(offsets) if offsets is not None else (0,) * len(record.shape)
        size = tuple(sizes) if sizes is not None else record.shape
        if not len(start) == len(size) == len(record.shape) or any(
            at < 0 or n < 0 or at + n > whole for at, n, whole in zip(start, size, record.shape)
        ):
            raise ValueError(f"no block of {name} {record.shape}: sizes {size} at {start}")
        result = torch.empty(size, dtype=record.dtype)
        filled = 0
        for piece in record.pieces:
            lo = [max(a, b) for a, b in zip(start, piece.offsets)]
            hi = [min(a + n, b + m) for a, n, b, m in zip(start, size, piece.offsets, piece.sizes)]
            if any(a >= b for a, b in zip(lo, hi)):
                continue
            target = result[tuple(slice(a - s, b - s) for a, b, s in zip(lo, hi, start))]
            within = tuple((a - at, b - at) for a, b, at in zip(lo, hi, piece.offsets))
            data_at = piece.data_at
            if data_at is None:
                data_at, nbytes = locate(Path(self.path), record, piece)
                self.count(nbytes)
            if data_at < 0:
                values, nbytes = load_whole(Path(self.path), record, piece)
                self.count(nbytes)
                target.copy_(values[tuple(slice(a, b) for a, b in within)])
            else:
                with _PieceFile(self, record, piece, data_at) as file:
                    file.fill(target, within, 0, 0)
            filled += target.numel()
        if filled != result.numel():
            raise CheckpointError(
                f"{self.path} holds {filled:,} of the {result.numel():,} elements of {name} at "
                f"{start}, sizes {size}: its pieces do not fill it"
            )
        return result

    def check_files(self) -> None:
        """CheckpointError if a file is missing or has another length than was written. What its
        bytes are shows when they are read."""
        for name, expected in self.files.items():
            path = Path(self.path) / name
            try:
                nbytes = path.stat().st_size
            except OSError as error:
                raise damaged(path, f"it cannot be opened ({error.strerror})") from error
            if nbytes != expected:
                raise damaged(path, f"it has {nbytes:,} bytes, and {expected:,} were written")

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read from files since it was opened, by any thread."""
        return sum(self._reads)

    def count(self, nbytes: int) -> None:
        """Add to ``bytes_read``."""
        self._reads.append(nbytes)


def latest(folder: str | os.PathLike[str], layout: str | None = None) -> str | None:
    """The path of the checkpoint made last in a folder by dtensor, of those in the files of this
    layout ("dcp" or "hf"), if it is stated; None if there is none.

    CheckpointError if a manifest there is damaged: which was the last is not known then.
    """
    try:
        heads = made_in(Path(folder), skip_damaged=False)
    except FileNotFoundError:
        return None
    heads = [head for head in heads if layout in (None, head.layout)]
    return os.path.join(os.fspath(folder), heads[-1].name) if heads else None


class _PieceFile:
    """The file of one piece, open, and its bytes, checked."""

    def __init__(
        self, checkpoint: Checkpoint, record: TensorRecord, piece: StoredPiece, data_at: int
    ) -> None:
        self.checkpoint, self.record, self.piece = checkpoint, record, piece
        self.data_at = data_at
        self.block = _PAGE_BYTES if piece.checks is None else block_bytes(piece.nbytes)
        self.path = Path(checkpoint.path) / piece.file
        self.row_bytes = [
            math.prod(piece.sizes[dim + 1 :]) * record.dtype.itemsize
            for dim in range(len(piece.sizes))
        ]

    def __enter__(self) -> _PieceFile:
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise self._wrong(f"it cannot be opened ({error.strerror})") from error
        nbytes = os.fstat(self.descriptor).st_size
        expected = self.checkpoint.files.get(self.piece.file, nbytes)
        if nbytes != expected:
            os.close(self.descriptor)
            raise self._wrong(f"it has {nbytes:,} bytes, and {expected:,} were written")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def fill(self, target: Tensor, within: Sequence[tuple[int, int]], dim: int, at: int) -> None:
        """``target`` becomes the part ``within`` of the piece, per dim from ``dim`` on; what is at
        those dims begins at byte ``at`` of the piece."""
        if dim == len(within):
            target.copy_(self._values(at, at + self.record.dtype.itemsize).reshape(()))
            return
        lo, hi = within[dim]
        row = self.row_bytes[dim]
        if row > self.block:
            for i in range(lo, hi):
                self.fill(target[i - lo], within, dim + 1, at + i * row)
            return
        inner = tuple(slice(a, b) for a, b in within[dim + 1 :])
        rows = max(1, _CHUNK_BYTES // row)
        for first in range(lo, hi, rows):
            last = min(first + rows, hi)
            values = self._values(at + first * row, at + last * row)
            values = values.view(last - first, *self.piece.sizes[dim + 1 :])
            target[first - lo : last - lo].copy_(values[(slice(None), *inner)])

    def _values(self, begin: int, end: int) -> Tensor:
        """The bytes from ``begin`` to ``end`` of the piece, as numbers."""
        checks = self.piece.checks
        first, stop = begin, end
        if checks is not None:
            first -= begin % self.block
            stop = min(self.piece.nbytes, -(-end // self.block) * self.block)
        data = bytearray(stop - first)
        got = 0
        while got < len(data):
            n = os.preadv(self.descriptor, [memoryview(data)[got:]], self.data_at + first + got)
            if not n:
                raise self._wrong("it ends before the tensor does")
            got += n
        self.checkpoint.count(len(data))
        if checks is not None:
            view = memoryview(data)
            for n in range(first // self.block, -(-stop // self.block)):
                at = n * self.block
                block = view[at - first : at - first + self.block]
                if zlib.crc32(block, checks[n - 1] if n else 0) != checks[n]:
                    raise self._wrong(
                        f"the {len(block):,} bytes from {self.data_at + at:,} on have another "
                        "checksum"
                    )
        values = torch.frombuffer(data, dtype=torch.uint8)[begin - first : end - first]
        return values.view(self.record.dtype)

    def _wrong(self, why: str) -> CheckpointError:
        block = f"{self.piece.sizes} at {self.piece.offsets}"
        return damaged(self.path, f"{why}; it holds {block} of {self.record.name}")


def _open_own(folder: Path) -> Checkpoint:
    head, body = read_manifest(folder)
    try:
        records = {record.name: record for record in map(TensorRecord.from_json, body["tensors"])}
        opened = Checkpoint(
            path=str(folder),
            layout="dtensor",
            tensors=records,
            files={str(file): int(nbytes) for file, nbytes in body["files"].items()},
            step=head.step,
        )
        kept = {n: r for n, r in records.items() if r.path[0] == "extra_tensors"}
        opened.extra = decoded(
            body["extra"], {record.path[1]: opened.read(name) for name, record in kept.items()}
        )
        opened.small = {tuple(path): decoded(value, {}) for path, value in body["small"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(
            folder / MANIFEST, f"dtensor does not write such a file ({error!r})"
        ) from error
    opened.tensors = {n: r for n, r in records.items() if n not in kept}
    if head.layout == "hf":  # by the manifest's files, not by an index: see existing_folder.py
        there = read_files(folder, [name for name in opened.files if name.endswith(".safetensors")])
        opened.layout, opened.tensors, opened.tied = "hf", there.tensors, there.tied
        wrong = [file for file, nbytes in there.files.items() if opened.files.get(file) != nbytes]
        if wrong:
            raise damaged(folder / wrong[0], "it is not the file that was written")
    return opened


def _no_checkpoint(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist.\nfix: the path that was given to dt.save"
    if not folder.is_dir():
        return f"{folder} is a file; a checkpoint is a folder.\nfix: the path given to dt.save"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} holds {pickles[0]}, a pickle, which may run anything when it is read: it is "
            "not.\nfix: where you trust it, AutoModel.from_pretrained(...).save_pretrained(...), "
            "which writes safetensors; or torch.load(..., weights_only=True) and load_state_dict"
        )
    newest = latest(folder)
    if newest is not None:
        return f"{folder} holds checkpoints and is none itself.\nfix: dt.load({newest!r}, ...)"
    return (
        f"{folder} is no checkpoint: there is neither manifest.json, nor .metadata, nor a "
        "safetensors file in it.\nfix: the path that was given to dt.save"
    )
