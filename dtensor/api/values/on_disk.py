"""Values that are in a checkpoint's files until somebody needs them, and are read there, in parts.

    weight = InCheckpoint("model.up.weight", (64, 16), torch.float32, "/data/ckpt/100")
    weight.part((((0, 32),), ((0, 16),)))      # f32[32,16]: rows 0:32, no other byte is read
    weight.whole()                             # f32[64,16]

Such stand for parameters on the meta device (`InitialValues.on_disk`), and for tensors of an
optimizer's state (`LazyOptimizerState.on_disk`); they pickle, so that ranks read their own shards.

Not here: the files, and who checks them against a model (matching.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.sharding.ops.philox import Pieces, Place


@dataclass(frozen=True, slots=True)
class OnDisk(ABC):
    """A tensor that is in files under ``name``: of this shape, and read as this dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def part(self, pieces: Pieces) -> torch.Tensor:
        """What is at these intervals of each dim, one after another, on the CPU."""

    def whole(self) -> torch.Tensor:
        return self.part(Place.whole(self.shape).pieces)


def part_of(stored: OnDisk, pieces: Pieces, device: torch.device) -> torch.Tensor:
    """A rank's shard."""
    return stored.part(pieces).to(device)


def read_whole(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of an optimizer's state, those on disk read."""
    return {key: v.whole() if isinstance(v, OnDisk) else v for key, v in entries.items()}
