"""Read a checkpoint: its contents, and blocks of its tensors by byte ranges.

    saved = Checkpoint.open("ckpt/100")
    saved.tensors["model.w"].shape, saved.step, saved.extra        # (8, 4), 100, {...}
    saved.read("model.w", (4, 0), (4, 2))                          # [4, 2]; rows 4:8, columns 0:2

It reads dtensor's checkpoints (by `manifest.json`), DCP checkpoints by other programs, and Hugging
Face's safetensors. Only DCP's `.metadata` and values are unpickled, by `foreign_dcp.py`.

Invariants: a read of a dtensor checkpoint reads only the blocks (`records.block_bytes`) that it
touches, and checks each. Without checksums it reads in pages. At most 8 MiB is held besides the
result.
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

    ``layout``: "dtensor", "dcp" (by another program) or "hf". ``tensors``: by name, sorted, such as
    "model.w" or "optimizer.state.w.exp_avg"; for "hf" just "w". ``tied``: for "hf", the other names
    of tensors, each with its name in ``tensors``. ``small``: by path, the values of the state that
    are not tensors; for "dcp" each is read when it is used. ``step``, ``extra``: as saved, None for
    other programs' checkpoints. ``files``: by name, the sizes in bytes.
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
        """Open a checkpoint. Raises PlanningError if there is none, CheckpointError if it is
        damaged."""
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
            files_found = read_directory(folder)
            return Checkpoint(
                path=str(folder),
                layout="hf",
                tensors=files_found.tensors,
                files=files_found.files,
                tied=files_found.tied,
            )
        raise PlanningError(_no_checkpoint(folder))

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the block of a tensor at ``offsets`` of shape ``sizes``, by default all of it.

        The result is a new tensor on the CPU of the tensor's dtype. Raises KeyError for an unknown
        name, ValueError if the block exceeds the tensor, and CheckpointError, naming file and
        tensor, if a file is missing, short or changed.
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
        """Raise CheckpointError if a file is missing or has another length than was written. The
        bytes are checked when they are read."""
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
        """Bytes of tensors that were read from files since the checkpoint was opened, by any
        thread."""
        return sum(self._reads)

    def count(self, nbytes: int) -> None:
        """Add to ``bytes_read``."""
        self._reads.append(nbytes)


def latest(folder: str | os.PathLike[str], layout: str | None = None) -> str | None:
    """Return the path of dtensor's newest checkpoint in a folder; None if there is none.

    ``layout``: only checkpoints in this format, "dcp" or "hf". Raises CheckpointError if a manifest
    is damaged, because then the newest checkpoint is not known.
    """
    try:
        heads = made_in(Path(folder), skip_damaged=False)
    except FileNotFoundError:
        return None
    heads = [head for head in heads if layout in (None, head.layout)]
    return os.path.join(os.fspath(folder), heads[-1].name) if heads else None


class _PieceFile:
    """The open file of one piece; it reads and checks the piece's bytes."""

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
            raise self._damage(f"it cannot be opened ({error.strerror})") from error
        nbytes = os.fstat(self.descriptor).st_size
        expected = self.checkpoint.files.get(self.piece.file, nbytes)
        if nbytes != expected:
            os.close(self.descriptor)
            raise self._damage(f"it has {nbytes:,} bytes, and {expected:,} were written")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def fill(self, target: Tensor, within: Sequence[tuple[int, int]], dim: int, at: int) -> None:
        """Copy a part of the piece into ``target``.

        ``within``: the part, as (begin, end) for each dim. ``dim``: the first dim of ``target``;
        the dims before it are fixed, and the piece's data for them begins at byte ``at``."""
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
        """Return bytes ``begin`` to ``end`` of the piece as a tensor of the record's dtype."""
        checks = self.piece.checks
        first, stop = begin, end
        if checks is not None:
            first -= begin % self.block
            stop = min(self.piece.nbytes, -(-end // self.block) * self.block)
        data = bytearray(stop - first)
        received = 0
        while received < len(data):
            n = os.preadv(
                self.descriptor, [memoryview(data)[received:]], self.data_at + first + received
            )
            if not n:
                raise self._damage("it ends before the tensor does")
            received += n
        self.checkpoint.count(len(data))
        if checks is not None:
            view = memoryview(data)
            for n in range(first // self.block, -(-stop // self.block)):
                at = n * self.block
                block = view[at - first : at - first + self.block]
                if zlib.crc32(block, checks[n - 1] if n else 0) != checks[n]:
                    raise self._damage(
                        f"the {len(block):,} bytes from {self.data_at + at:,} on have another "
                        "checksum"
                    )
        values = torch.frombuffer(data, dtype=torch.uint8)[begin - first : end - first]
        return values.view(self.record.dtype)

    def _damage(self, why: str) -> CheckpointError:
        block = f"{self.piece.sizes} at {self.piece.offsets}"
        return damaged(self.path, f"{why}; it holds {block} of {self.record.name}")


def _open_own(folder: Path) -> Checkpoint:
    """Open a checkpoint that dtensor saved, by its manifest."""
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
        extra_records = {n: r for n, r in records.items() if r.path[0] == "extra_tensors"}
        opened.extra = decoded(
            body["extra"],
            {record.path[1]: opened.read(name) for name, record in extra_records.items()},
        )
        opened.small = {tuple(path): decoded(value, {}) for path, value in body["small"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(
            folder / MANIFEST, f"dtensor does not write such a file ({error!r})"
        ) from error
    opened.tensors = {n: r for n, r in records.items() if n not in extra_records}
    if head.layout == "hf":  # by the manifest's files, not by an index: see existing_folder.py
        files_found = read_files(
            folder, [name for name in opened.files if name.endswith(".safetensors")]
        )
        opened.layout, opened.tensors, opened.tied = "hf", files_found.tensors, files_found.tied
        wrong = [
            file for file, nbytes in files_found.files.items() if opened.files.get(file) != nbytes
        ]
        if wrong:
            raise damaged(folder / wrong[0], "it is not the file that was written")
    return opened


def _no_checkpoint(folder: Path) -> str:
    """Return the message for a path that is not a checkpoint, with a fix."""
    if not folder.exists():
        return f"{folder} does not exist.\nfix: the path that was given to dt.save"
    if not folder.is_dir():
        return f"{folder} is a file; a checkpoint is a folder.\nfix: the path given to dt.save"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} holds {pickles[0]}, a pickle, which may run anything when it is read: it is "
            "not.\nfix: if you trust it, AutoModel.from_pretrained(...).save_pretrained(...), "
            "which writes safetensors; or torch.load(..., weights_only=True) and load_state_dict"
        )
    newest = latest(folder)
    if newest is not None:
        return f"{folder} holds checkpoints and is none itself.\nfix: dt.load({newest!r}, ...)"
    return (
        f"{folder} is not a checkpoint: it has no manifest.json, no .metadata and no safetensors "
        "file.\nfix: the path that was given to dt.save"
    )
