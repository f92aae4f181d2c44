"""Checkpoints as files: written in parts, published whole, read by ranges. No ranks, no sessions.

    writing = Writing.begin("ckpt/100", step=100, extra={"epoch": 3})
    part = write_part(writing.folder, 0, [TensorPiece(...)], writing.previous)   # on each rank
    writing.finish([part], keep=3)
    Checkpoint.open("ckpt/100").read("model.w", (4, 0), (4, 4))                  # rows 4:8

The files are torch.distributed.checkpoint's, with a `.metadata` for torch's tools and a
`manifest.json`, which is what dtensor reads.

- records.py: pieces of tensors, what is recorded of them, their checksums.
- extra.py: values that users add, as JSON. torch_save.py: a tensor's bytes in torch.save's files.
- atomic_folder.py: folders that are there whole or not at all. manifest.py, dcp_metadata.py: what
says
  what is in one.
- safetensors.py: Hugging Face's directories. foreign_dcp.py: those of torch that others wrote.
- parts.py: what a rank writes. writing.py: what the controller does. reading.py.
"""

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
