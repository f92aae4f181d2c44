"""Directories of torch.distributed.checkpoint from other programs: torchtitan, FSDP, Lightning.

    tensors, values = read_metadata(Path("theirs"))  # records; a mapping that reads on demand
    values["optimizer", "param_groups", "0", "lr"]   # 0.001

Both their `.metadata` and their values are pickles, and a pickle may run any code. In `.metadata`
the names of DCP's metadata classes become inert records here, without torch's code; any other name
is an error, and is not imported. Values and the descriptions of tensors are read by
torch.load(weights_only=True).

Invariants: no function that a file names is called, except those on torch.load's list of harmless
ones. A tensor's bytes are read by range if it is in row-major order, as DCP writes contiguous
shards; else its whole item is read.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from dtensor.runtime.checkpoint.records import (
    DTYPES_BY_NAME,
    CheckpointError,
    StoredPiece,
    TensorRecord,
    check_cover,
    plain_name,
)

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    (f"{_DCP}metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # before torch 2.3
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch.serialization", "_get_layout"),
}
_PLAIN = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
} | {("torch", name): dtype for name, dtype in DTYPES_BY_NAME.items()}
# Errors of unpickling bytes that are no pickle, and of reading a pickle that is not DCP's.
_NOT_AS_WRITTEN = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    ImportError,
    RecursionError,
)


class _Told:
    """The pickled state of an object of a known class."""

    kind = ""

    def __init__(self, *_: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Admitting(pickle.Unpickler):
    """Unpickles objects of DCP's own names; each becomes a class for this reading alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self.path = path
        self.classes: dict[tuple[str, str], type[_Told]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        if key in _PLAIN:
            return _PLAIN[key]
        if key not in _RECORDS:
            raise CheckpointError(
                f"{self.path} names {module_name}.{global_name}, which metadata of "
                "torch.distributed.checkpoint do not use: it may be made to run a program. "
                "Nothing of it was run.\nfix: load it only if you trust who made it, with torch's "
                "own tools, and save it anew"
            )
        if key not in self.classes:
            self.classes[key] = type(global_name, (_Told,), {"kind": global_name})
        return self.classes[key]


def read_metadata(folder: Path) -> tuple[dict[str, TensorRecord], ForeignValues]:
    """Tensors by name, sorted, whose pieces' places in their files are not known yet (`locate`),
    and values that are no tensors, by path. CheckpointError if it is not DCP's."""
    path = folder / METADATA
    try:
        told = _Admitting(path).load()
        return _taken_apart(folder, told)
    except _NOT_AS_WRITTEN as error:
        raise CheckpointError(
            f"{path} is not in torch.distributed.checkpoint's format ({type(error).__name__}: "
            f"{error}).\nfix: copy the checkpoint again, or load another"
        ) from error


class ForeignValues(Mapping[tuple[str, ...], Any]):
    """Values by path, each read at its first use: CheckpointError if it would run something."""

    def __init__(self, folder: Path, items: dict[tuple[str, ...], tuple[str, int, int]]) -> None:
        self._folder, self._items = folder, items

    def __getitem__(self, path: tuple[str, ...]) -> Any:
        file, start, length = self._items[path]
        with _Section(self._folder / file, start, length) as section:
            return _loaded(section, ".".join(path))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def locate(folder: Path, record: TensorRecord, piece: StoredPiece) -> tuple[int, int]:
    """The offset of a piece's first byte in its file, -1 if it must be loaded whole; and the number
    of bytes read for it."""
    assert piece.item is not None
    with _Section(folder / piece.file, *piece.item) as section:
        try:
            with zipfile.ZipFile(section) as entries:
                stored = [e for e in entries.infolist() if "/data/" in e.filename]
                orders = [e for e in entries.infolist() if e.filename.endswith("/byteorder")]
                little = all(e.file_size == 6 and entries.read(e) == b"little" for e in orders)
        except zipfile.BadZipFile:
            return -1, section.bytes_read  # torch.save before 1.6: torch.load knows it
        with torch.serialization.skip_data():
            tensor = _loaded(section, record.name)
        _check(tensor, record, piece, section.path)
        if (
            len(stored) != 1
            or stored[0].compress_type != zipfile.ZIP_STORED
            or stored[0].file_size != tensor.untyped_storage().nbytes()
            or not tensor.is_contiguous()
            or not little
        ):
            return -1, section.bytes_read
        section.seek(stored[0].header_offset + 26)
        name, extra = struct.unpack("<HH", section.read(4))
        at = stored[0].header_offset + 30 + name + extra
        within = at + tensor.storage_offset() * tensor.itemsize
        if within + piece.nbytes > piece.item[1]:
            raise _wrong(section.path, record.name, "its data reach beyond it")
        return piece.item[0] + within, section.bytes_read


def load_whole(folder: Path, record: TensorRecord, piece: StoredPiece) -> tuple[Tensor, int]:
    """A piece by torch.load, and the number of bytes read for it."""
    assert piece.item is not None
    with _Section(folder / piece.file, *piece.item) as section:
        tensor = _loaded(section, record.name)
        _check(tensor, record, piece, section.path)
        return tensor, section.bytes_read


def _check(tensor: Any, record: TensorRecord, piece: StoredPiece, path: Path) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise _wrong(path, record.name, f"it holds a {type(tensor).__name__}")
    if (tensor.dtype, tuple(tensor.shape)) != (record.dtype, piece.sizes):
        raise _wrong(
            path,
            record.name,
            f"it holds {tensor.dtype} {tuple(tensor.shape)}, and .metadata says {record.dtype} "
            f"{piece.sizes}",
        )


def _loaded(section: _Section, name: str) -> Any:
    section.seek(0)
    try:
        return torch.load(cast(IO[bytes], section), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{section.path} holds {name} as a pickle that torch.load(weights_only=True) does not "
            f"admit, for it may run a program. Nothing of it was run: {_first_line(error)}\n"
            "fix: load it only if you trust who made it, with torch's own tools, and save it anew"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, struct.error) as error:
        raise _wrong(section.path, name, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def _wrong(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} contradicts .metadata about {name}: {why}.\nfix: copy the checkpoint again, or "
        "load another"
    )


def _taken_apart(folder: Path, told: Any) -> tuple[dict[str, TensorRecord], ForeignValues]:
    state = _state(told, "Metadata")
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in state["storage_data"].items():
        at, lies = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if lies.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder} holds items that went through {lies['transform_descriptors']}, which "
                "dtensor does not read.\nfix: save it without extensions"
            )
        offset = at.get("offset")
        where = plain_name(lies["relative_path"]), int(lies["offset"]), int(lies["length"])
        places[at["fqn"], None if offset is None else tuple(map(int, offset))] = where
    paths = state.get("planner_data") or {}
    tensors: dict[str, TensorRecord] = {}
    values: dict[tuple[str, ...], tuple[str, int, int]] = {}
    for name, entry in sorted(state["state_dict_metadata"].items()):
        path = tuple(map(str, paths.get(name, (name,))))
        if ".".join(path) != name:
            path = (name,)
        if entry.kind == "BytesStorageMetadata":
            values[path] = places[name, None]
        else:
            tensors[name] = _tensor(path, _state(entry, "TensorStorageMetadata"), places)
    return tensors, ForeignValues(folder, values)


def _tensor(
    path: tuple[str, ...],
    entry: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]],
) -> TensorRecord:
    properties = entry["properties"]
    if properties.kind != "TensorProperties":
        raise TypeError(f"{properties.kind} where TensorProperties belong")
    # A tuple, dtype first, since it has its own __getstate__.
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} where a dtype belongs")
    pieces: list[StoredPiece] = []
    for chunk in entry["chunks"]:
        block = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = (tuple(map(int, block[key])) for key in ("offsets", "sizes"))
        file, start, length = places[".".join(path), offsets]
        nbytes = dtype.itemsize
        for size in sizes:
            nbytes *= size
        pieces.append(
            StoredPiece(
                offsets=offsets,
                sizes=sizes,
                file=file,
                data_at=None,
                nbytes=nbytes,
                item=(start, length),
            )
        )
    shape = tuple(map(int, entry["size"]))
    record = TensorRecord(path=path, dtype=dtype, shape=shape, pieces=tuple(pieces))
    if 0 not in shape:
        check_cover(record)
    return record


def _state(told: Any, kind: str) -> dict[str, Any]:
    if not isinstance(told, _Told) or told.kind != kind:
        raise TypeError(f"{type(told).__name__} where {kind} belongs")
    if not isinstance(told.state, dict):
        raise TypeError(f"the state of {kind} is a {type(told.state).__name__}")
    return told.state


class _Section(io.RawIOBase):
    """Bytes ``start`` to ``start + length`` of a file, as a file; it counts the bytes read."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self.path, self.start, self.length = path, start, length
        self.position = self.bytes_read = 0
        self.descriptor = -1  # until it is open: the end of the object closes it
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if os.fstat(self.descriptor).st_size < start + length:
            self.close()
            raise CheckpointError(
                f"{path} ends before byte {start + length:,}, which .metadata says it has.\n"
                "fix: copy the checkpoint again, or load another"
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError(f"a position before the beginning: {base + offset}")
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.length - self.position))
        got = os.preadv(self.descriptor, [view[:wanted]], self.start + self.position)
        self.position += got
        self.bytes_read += got
        return got

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        super().close()
