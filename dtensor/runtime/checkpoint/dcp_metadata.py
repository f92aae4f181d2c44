"""Write the `.metadata` file of torch.distributed.checkpoint, for torch's tools.

    metadata_bytes(tensors, values)      # dcp.load(no_dist=True) and dcp_to_torch_save read it

The file is a pickle, and a pickle may run any code, so dtensor never reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtensor.runtime.checkpoint.records import TensorRecord


@dataclass(frozen=True, slots=True)
class ValueItem:
    """A value that torch.save wrote: its path in the state dict (keys and list positions), its
    file, first byte and length in bytes."""

    path: tuple[str | int, ...]
    file: str
    start: int
    length: int


def metadata_bytes(
    tensors: Mapping[str, TensorRecord],
    values: Mapping[str, ValueItem],
) -> bytes:
    """Return the content of `.metadata`, made by torch's classes.

    ``values``: by name, the values that are not tensors.
    """
    # Imported here because it takes half a second and only saves need it.
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import (
        STORAGE_TYPES,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, STORAGE_TYPES] = {}
    storage: dict[MetadataIndex, filesystem._StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, record in tensors.items():
        paths[name] = record.path
        entries[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=record.dtype),
            size=torch.Size(record.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                for piece in record.pieces
            ],
        )
        for piece in record.pieces:
            assert piece.item is not None
            where = MetadataIndex(name, torch.Size(piece.offsets))
            storage[where] = filesystem._StorageInfo(piece.file, *piece.item)
    for name, item in values.items():
        paths[name] = item.path
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = filesystem._StorageInfo(item.file, item.start, item.length)
    return pickle.dumps(
        Metadata(
            state_dict_metadata=entries,
            planner_data=paths,
            storage_data=storage,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )
    )
