"""Read checkpoints of torch.distributed.checkpoint (DCP) by torchtitan, FSDP or Lightning.

    tensors, values = read_metadata(Path("theirs"))  # records; a mapping that reads on demand
    values["optimizer", "param_groups", "0", "lr"]   # 0.001

`.metadata` and the values are pickles, which may run any code. So the classes that `.metadata`
names become inert records here, and any other name raises an error without an import; values are
read by torch.load(weights_only=True). No function that a file names is called, except the safe
functions that torch.load allows. A row-major tensor is read by range, another tensor as a whole.
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
_RECORD_NAMES = {
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
_IMPORTED = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
} | {("torch", name): dtype for name, dtype in DTYPES_BY_NAME.items()}
# Errors of unpickling bytes that are not a pickle, and of reading a pickle that is not DCP's.
_FORMAT_ERRORS = (
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


class _PickledState:
    """The pickled state of an object of one of DCP's classes; ``kind``: the class's name."""

    kind = ""

    def __init__(self, *_: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles `.metadata`; each class that it names becomes a subclass of `_PickledState`."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self.path = path
        self.classes: dict[tuple[str, str], type[_PickledState]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the class for a name in the pickle. Raises CheckpointError for an unexpected
        name."""
        key = module_name, global_name
        if key in _IMPORTED:
            return _IMPORTED[key]
        if key not in _RECORD_NAMES:
            raise CheckpointError(
                f"{self.path} names {module_name}.{global_name}, which metadata of "
                "torch.distributed.checkpoint does not use, so the file may run a program. "
                "dtensor ran nothing of it.\nfix: if you trust its author, load it with torch's "
                "tools and save it again"
            )
        if key not in self.classes:
            self.classes[key] = type(global_name, (_PickledState,), {"kind": global_name})
        return self.classes[key]


def read_metadata(folder: Path) -> tuple[dict[str, TensorRecord], ForeignValues]:
    """Read DCP's `.metadata`. Return the tensors by name, sorted, and the other values by path.

    `locate` finds the offset of a piece in its file. Raises CheckpointError for another format.
    """
    path = folder / METADATA
    try:
        metadata = _MetadataUnpickler(path).load()
        return _split_metadata(folder, metadata)
    except _FORMAT_ERRORS as error:
        raise CheckpointError(
            f"{path} is not in torch.distributed.checkpoint's format ({type(error).__name__}: "
            f"{error}).\nfix: copy the checkpoint again, or load another"
        ) from error


class ForeignValues(Mapping[tuple[str, ...], Any]):
    """The values of a checkpoint by path, each read when it is used.

    Raises CheckpointError if reading a value would run code.
    """

    def __init__(self, folder: Path, items: dict[tuple[str, ...], tuple[str, int, int]]) -> None:
        self._folder, self._items = folder, items

    def __getitem__(self, path: tuple[str, ...]) -> Any:
        file, start, length = self._items[path]
        with _Section(self._folder / file, start, length) as section:
            return _load_section(section, ".".join(path))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def locate(folder: Path, record: TensorRecord, piece: StoredPiece) -> tuple[int, int]:
    """Return the offset of a piece's first byte in its file (-1 if the piece cannot be read by
    range), and the number of bytes that were read to find it."""
    assert piece.item is not None
    with _Section(folder / piece.file, *piece.item) as section:
        try:
            with zipfile.ZipFile(section) as entries:
                stored = [e for e in entries.infolist() if "/data/" in e.filename]
                orders = [e for e in entries.infolist() if e.filename.endswith("/byteorder")]
                little = all(e.file_size == 6 and entries.read(e) == b"little" for e in orders)
        except zipfile.BadZipFile:
            return -1, section.bytes_read  # the format before torch 1.6, which torch.load reads
        with torch.serialization.skip_data():
            tensor = _load_section(section, record.name)
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
            raise _contradiction(section.path, record.name, "its data reaches beyond its item")
        return piece.item[0] + within, section.bytes_read


def load_whole(folder: Path, record: TensorRecord, piece: StoredPiece) -> tuple[Tensor, int]:
    """Return a piece, read by torch.load, and the number of bytes read."""
    assert piece.item is not None
    with _Section(folder / piece.file, *piece.item) as section:
        tensor = _load_section(section, record.name)
        _check(tensor, record, piece, section.path)
        return tensor, section.bytes_read


def _check(tensor: Any, record: TensorRecord, piece: StoredPiece, path: Path) -> None:
    """Raise CheckpointError unless the loaded value is a dense tensor of the recorded dtype and
    shape."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise _contradiction(path, record.name, f"it holds a {type(tensor).__name__}")
    if (tensor.dtype, tuple(tensor.shape)) != (record.dtype, piece.sizes):
        raise _contradiction(
            path,
            record.name,
            f"it holds {tensor.dtype} {tuple(tensor.shape)}, but .metadata states {record.dtype} "
            f"{piece.sizes}",
        )


def _load_section(section: _Section, name: str) -> Any:
    """Load a value by torch.load(weights_only=True). Raises CheckpointError if it fails or is
    unsafe."""
    section.seek(0)
    try:
        return torch.load(cast(IO[bytes], section), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{section.path} holds {name} as a pickle that torch.load(weights_only=True) refuses, "
            f"because it may run a program. dtensor ran nothing of it: {_first_line(error)}\n"
            "fix: if you trust its author, load it with torch's tools and save it again"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, struct.error) as error:
        raise _contradiction(section.path, name, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def _contradiction(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} contradicts .metadata about {name}: {why}.\nfix: copy the checkpoint again, or "
        "load another"
    )


def _split_metadata(folder: Path, metadata: Any) -> tuple[dict[str, TensorRecord], ForeignValues]:
    """Return the tensors and the other values that unpickled metadata describes."""
    state = _state(metadata, "Metadata")
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in state["storage_data"].items():
        at, storage = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if storage.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder} holds items that went through {storage['transform_descriptors']}, which "
                "dtensor does not read.\nfix: save it without extensions"
            )
        offset = at.get("offset")
        where = plain_name(storage["relative_path"]), int(storage["offset"]), int(storage["length"])
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
    """Return the record of a tensor from DCP's TensorStorageMetadata."""
    properties = entry["properties"]
    if properties.kind != "TensorProperties":
        raise TypeError(f"{properties.kind} where TensorProperties belong")
    # TensorProperties.__getstate__ returns a tuple whose first item is the dtype.
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


def _state(metadata: Any, kind: str) -> dict[str, Any]:
    """Return the pickled state of an object. Raises TypeError if it is not of class ``kind``."""
    if not isinstance(metadata, _PickledState) or metadata.kind != kind:
        raise TypeError(f"{type(metadata).__name__} where {kind} belongs")
    if not isinstance(metadata.state, dict):
        raise TypeError(f"the state of {kind} is a {type(metadata.state).__name__}")
    return metadata.state


class _Section(io.RawIOBase):
    """Bytes ``start`` to ``start + length`` of a file, as a file that counts the bytes read."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self.path, self.start, self.length = path, start, length
        self.position = self.bytes_read = 0
        self.descriptor = -1  # `close` runs when the object is deleted, also if `open` fails
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if os.fstat(self.descriptor).st_size < start + length:
            self.close()
            raise CheckpointError(
                f"{path} ends before byte {start + length:,}, which .metadata refers to.\n"
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
        count = os.preadv(self.descriptor, [view[:wanted]], self.start + self.position)
        self.position += count
        self.bytes_read += count
        return count

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        super().close()
