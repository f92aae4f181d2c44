"""Values that stay in a checkpoint's files until they are used, and can be read in parts.

    weight = InCheckpoint("model.up.weight", (64, 16), torch.float32, "/data/ckpt/100")
    weight.part((((0, 32),), ((0, 16),)))      # f32[32,16]: rows 0:32, no other byte is read
    weight.whole()                             # f32[64,16]

They stand for parameters on the meta device (`InitialValues.on_disk`) and for tensors of an
optimizer's state (`LazyOptimizerState.on_disk`). They can be pickled, so each rank reads its own
shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.private_torch import pytree
from dtensor.sharding.ops.philox import Pieces, Place


@dataclass(frozen=True, slots=True)
class OnDisk(ABC):
    """A tensor in files under ``name``, with its shape and the dtype to which it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def part(self, pieces: Pieces) -> torch.Tensor:
        """Return the elements in these intervals of each dim, concatenated, on the CPU."""

    def whole(self) -> torch.Tensor:
        return self.part(Place.whole(self.shape).pieces)


def part_of(stored: OnDisk, pieces: Pieces, device: torch.device) -> torch.Tensor:
    """Return a rank's shard on its device."""
    return stored.part(pieces).to(device)


def read_whole(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state entries, which may be nested, with the full tensors in place of
    `OnDisk` records. Each record is read once."""
    read: dict[int, torch.Tensor] = {}

    def tensor_of(stored: OnDisk) -> torch.Tensor:
        if id(stored) not in read:
            read[id(stored)] = stored.whole()
        return read[id(stored)]

    return pytree.tree_map_only(OnDisk, tensor_of, dict(entries))
