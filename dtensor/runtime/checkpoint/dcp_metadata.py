"""torch.distributed.checkpoint's `.metadata`: written for torch's tools, read of strangers.

    metadata_bytes(tensors, values)      # dcp.load(no_dist=True) and dcp_to_torch_save read it

It is a pickle, and a pickle may run anything. Ours is never read by us. Who reads a
stranger's is `strangers`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch

from dtensor.runtime.checkpoint.records import TensorRecord


def metadata_bytes(
    tensors: Mapping[str, TensorRecord],
    values: Mapping[tuple[str, ...], tuple[str, int, int]],
) -> bytes:
    """The content of `.metadata`, by torch's own classes.

    ``values``: by path, the file, first byte and length of what torch.save wrote of a value that is
    no tensor.
    """
    # Half a second, and needed by those who save alone.
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
    paths: dict[str, tuple[str, ...]] = {}
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
    for path, where in values.items():
        name = ".".join(path)
        paths[name] = path
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = filesystem._StorageInfo(*where)
    return pickle.dumps(
        Metadata(
            state_dict_metadata=entries,
            planner_data=paths,
            storage_data=storage,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )
    )
