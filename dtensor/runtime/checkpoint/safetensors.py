"""Hugging Face's safetensors files: many ranks write into them in place; reads are by range.

    files = planned_files({"w": (torch.float32, (8, 4))}, tied={})
    files["model.safetensors"].header         # b'{"__metadata__":{"format":"pt"},"w":{...}}  '
    read_directory(Path("gpt2")).tensors      # records, as for any checkpoint

A file is 8 bytes (the length of the header), the header in JSON, and the row-major tensors. The
place of each byte follows from names, dtypes and shapes, so ranks write without a gather.

Invariants: a file has no hole and no overlap; a file that an index names is in the folder. A tied
tensor is written once, and its other names are in the header's metadata. The format has no
checksums, so only sizes are checked.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint.atomic_folder import write_synced
from dtensor.runtime.checkpoint.records import (
    CheckpointError,
    StoredPiece,
    TensorRecord,
    plain_name,
)

SINGLE = "model.safetensors"
"""The file that transformers reads if it exists; otherwise it reads the index."""
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
_MAX_HEADER = 100_000_000  # as the format's own reader

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file: its header, including the 8 bytes of its length, and the file's size in bytes."""

    header: bytes
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsDirectory:
    """The contents of a directory. ``tied``: other names of tensors, each with the stored name."""

    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, int]
    tied: Mapping[str, str]


def planned_files(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tied: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
    tag: str = "",
) -> dict[str, SafetensorsFile]:
    """Return the files by name, with at most ``shard_bytes`` of tensors each, or one tensor.

    ``tied``: for a name that is not written, the name under which its tensor is written. ``tag``: a
    part of the file names, for a folder that has files with the usual names: "-1f0c" gives
    `model-1f0c-00001-of-00001.safetensors`, which transformers recognizes as a shard. Raises
    PlanningError for a dtype that the format lacks.
    """
    groups: list[list[str]] = []
    size = shard_bytes
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise PlanningError(
                f"{name} is of dtype {dtype}, which safetensors files cannot hold.\n"
                'fix: dt.save(...) without format="hf"'
            )
        nbytes = math.prod(shape) * dtype.itemsize
        if size + nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    number = max(len(groups), 1)
    names = [f"model{tag}-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]
    if number == 1 and not tag:
        names = [SINGLE]
    return {
        file: _file({name: tensors[name] for name in group}, tied)
        for file, group in zip(names, groups or [[]])
    }


def make_files(folder: Path, files: Mapping[str, SafetensorsFile]) -> None:
    """Write the headers and the index, and allocate the disk space of all tensors."""
    for name, file in files.items():
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, file.nbytes)
            write_at(descriptor, memoryview(file.header), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    records_by_file = [_read_file(folder / name)[0] for name in files]
    weight_map = {name: file for file, records in zip(files, records_by_file) for name in records}
    total = sum(
        p.nbytes
        for records in records_by_file
        for record in records.values()
        for p in record.pieces
    )
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_synced(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def is_directory(folder: Path) -> bool:
    """Return whether the folder has safetensors files or an index of them."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def read_directory(folder: Path) -> SafetensorsDirectory:
    """Return the contents of a directory, by its index or by all its files. Reads only headers.

    Raises CheckpointError if an index or a header is invalid, or a file is missing.
    """
    weight_map: dict[str, str] | None = None
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if (folder / INDEX) in indexes:
        indexes = [folder / INDEX]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} has several indexes: {[i.name for i in indexes]}")
    if indexes:
        weight_map = index_map(indexes[0])
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE).exists():
        files = [SINGLE]
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        _check_shards_complete(folder, files)
    return read_files(folder, files, weight_map)


def read_files(
    folder: Path, files: Sequence[str], weight_map: Mapping[str, str] | None = None
) -> SafetensorsDirectory:
    """Return the contents of these files; ``weight_map``: from an index, the file of each
    tensor."""
    tensors: dict[str, TensorRecord] = {}
    sizes: dict[str, int] = {}
    tied: dict[str, str] = {}
    for file in files:
        records_of_file, metadata, sizes[file] = _read_file(folder / file)
        for name, record in records_of_file.items():
            if weight_map is not None and weight_map.get(name) != file:
                continue  # the index decides which file a tensor is read from, as in transformers
            if name in tensors:
                raise CheckpointError(
                    f"{folder} has {name} in two files, {tensors[name].pieces[0].file} and {file}, "
                    "and no index.\nfix: keep only the files of one model in it"
                )
            tensors[name] = record
        tied |= metadata
    missing = sorted(set(weight_map or ()) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{folder}'s index names {missing[0]} in {(weight_map or {})[missing[0]]}, which does "
            f"not hold it ({len(missing)} such names).\nfix: download or copy the directory again"
        )
    return SafetensorsDirectory(
        tensors=dict(sorted(tensors.items())),
        files=sizes,
        tied={
            name: written_name
            for name, written_name in tied.items()
            if written_name in tensors and name not in tensors
        },
    )


_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


def _check_shards_complete(folder: Path, files: Sequence[str]) -> None:
    """Raise CheckpointError if a file is named shard i of n and another of the n is missing."""
    for file in files:
        if shard := _SHARD.fullmatch(file):
            begin, _, number = shard.groups()
            for i in range(1, int(number) + 1):
                other = f"{begin}{i:05}-of-{number}.safetensors"
                if other not in files:
                    raise CheckpointError(
                        f"{folder} has {file} and no {other}, and no index.\n"
                        "fix: download or copy the directory again"
                    )


def runs(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of a block's elements in its tensor, as (first, number), in the
    block's row-major order; ``first`` is a position in the tensor."""
    if 0 in sizes:
        return
    dims = len(shape)
    first_whole_dim = dims  # the block has all of this dim and of the dims after it
    while first_whole_dim > 0 and sizes[first_whole_dim - 1] == shape[first_whole_dim - 1]:
        first_whole_dim -= 1
    outer = max(first_whole_dim - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(dims)]
    length = math.prod(sizes[outer:])
    begin = sum(at * stride for at, stride in zip(offsets, strides))
    for index in itertools.product(*(range(size) for size in sizes[:outer])):
        yield begin + sum(i * stride for i, stride in zip(index, strides)), length


def write_at(descriptor: int, data: memoryview, at: int) -> None:
    """Write all of the data to the file, beginning at byte ``at``."""
    while len(data):
        n = os.pwrite(descriptor, data, at)
        data, at = data[n:], at + n


@runtime_checkable
class _SavesPretrained(Protocol):
    def save_pretrained(self, save_directory: Any, /) -> Any: ...


@runtime_checkable
class _WritesJson(Protocol):
    def to_json_file(self, json_file_path: Any, /) -> Any: ...


@runtime_checkable
class _HasConfig(Protocol):
    config: Any


def write_config(folder: Path, model: nn.Module) -> bool:
    """Write `config.json` of a transformers model or of another model with such a ``config``;
    return False if there is none. The file has the class and the present dtype of the parameters,
    as transformers writes them."""
    if not isinstance(model, _HasConfig):
        return False
    path = folder / "config.json"
    if isinstance(model.config, _SavesPretrained):
        model.config.save_pretrained(folder)
    elif isinstance(model.config, _WritesJson):
        model.config.to_json_file(path)
    else:
        return False
    if not path.exists():
        return False
    said = json.loads(path.read_text())
    if not said.get("architectures"):
        said["architectures"] = [type(model).__name__]
    dtypes = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    dtype = next(dtypes, None)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in said else "dtype"
        said[key] = str(dtype).removeprefix("torch.")
    path.unlink()
    write_synced(path, json.dumps(said, indent=2, sort_keys=True).encode() + b"\n")
    return True


def _file(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tied: Mapping[str, str]
) -> SafetensorsFile:
    """Lay out a file with wide dtypes first, so that each tensor is aligned."""
    names = {
        name: written_name for name, written_name in sorted(tied.items()) if written_name in tensors
    }
    header: dict[str, Any] = {"__metadata__": {**names, "format": "pt"}}
    at = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return SafetensorsFile(len(text).to_bytes(8, "little") + text, 8 + len(text) + at)


def index_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor from an index. Raises CheckpointError if it is not an
    index."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {str(name): plain_name(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not an index of safetensors files: {error!r}.\nfix: download or copy the "
            "directory again"
        ) from error


def _read_file(path: Path) -> tuple[dict[str, TensorRecord], dict[str, str], int]:
    """Return a file's tensors by name, its header's metadata, and its size in bytes."""
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or length > min(nbytes - 8, _MAX_HEADER):
                raise ValueError(f"its header would have {length:,} bytes, the file has {nbytes:,}")
            header = json.loads(file.read(length))
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        tensors = {
            name: _record(name, entry, path.name, 8 + length) for name, entry in header.items()
        }
        end = 8 + length
        for begin, stop in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
            if 8 + length + begin != end:
                raise ValueError(f"tensors overlap or leave a hole at byte {end:,}")
            end = 8 + length + stop
        if end != nbytes:
            raise ValueError(f"it has {nbytes:,} bytes, and its header states {end:,}")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}.\nfix: download or copy it again"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}.\nfix: download or copy it again"
        ) from error
    return tensors, metadata, nbytes


def _record(name: str, entry: Mapping[str, Any], file: str, data: int) -> TensorRecord:
    """Return the record of a tensor from its header entry; ``data``: where the tensors begin in the
    file."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"{name} is of dtype {entry['dtype']}, which dtensor does not compute with"
        )
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"the header states {end - begin:,} bytes for {name} {shape}")
    piece = StoredPiece(
        offsets=(0,) * len(shape),
        sizes=shape,
        file=file,
        data_at=data + begin,
        nbytes=end - begin,
    )
    return TensorRecord(path=(name,), dtype=dtype, shape=shape, pieces=(piece,))
