"""Checkpoints as files: ranks write parts, one rename publishes them, readers read ranges.

    writing = Writing.begin("ckpt/100", step=100, extra={"epoch": 3})
    part = write_part(writing.folder, 0, [TensorPiece(...)], writing.previous)   # on each rank
    writing.finish([part], keep=3)
    Checkpoint.open("ckpt/100").read("model.w", (4, 0), (4, 4))                  # rows 4:8

The files have the format of torch.distributed.checkpoint (DCP): a `.metadata` for torch's tools,
and a `manifest.json` that dtensor reads. Hugging Face's safetensors are the other format."""

from dtensor.runtime.checkpoint.parts import read_part, write_hf_part, write_part
from dtensor.runtime.checkpoint.reading import Checkpoint, latest
from dtensor.runtime.checkpoint.records import (
    CheckpointError,
    PartRecord,
    StoredPiece,
    TensorPiece,
    TensorRecord,
)
from dtensor.runtime.checkpoint.writing import Writing

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "PartRecord",
    "StoredPiece",
    "TensorPiece",
    "TensorRecord",
    "Writing",
    "latest",
    "read_part",
    "write_hf_part",
    "write_part",
]
