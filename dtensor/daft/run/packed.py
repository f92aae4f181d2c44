"""Small tensors in one buffer of bytes, which travels in one copy.

    packed = Packed.of(rows.device, [loss, rows, skip])      # flat: uint8[n]
    host = packed.flat.cpu()
    packed.part(host, loss)         # the value of the loss; None: it is not in it

Tensors with larger elements come first, so each tensor begins at a multiple of its element's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_BYTES = 1 << 14
"""The largest tensor that is packed with others, whose memory it keeps alive."""


@dataclass(frozen=True, slots=True)
class Packed:
    """``flat``: the bytes of the tensors; ``begins``: where each tensor begins, by its id. The
    tensors are kept, so that no other tensor gets their ids."""

    flat: Tensor
    begins: dict[int, int]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(device: torch.device, values: Iterable[object]) -> Packed | None:
        """Return the small tensors of the device among the values in one buffer, or None if there
        are none."""
        tensors = {id(x): x for x in values if isinstance(x, Tensor) and x.device == device}
        packed = [x for x in tensors.values() if 0 < _nbytes(x) <= SMALL_BYTES]
        packed.sort(key=lambda x: -x.itemsize)
        if not packed:
            return None
        begins: dict[int, int] = {}
        end = 0
        for x in packed:
            begins[id(x)], end = end, end + _nbytes(x)
        parts = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in packed]
        return Packed(torch.cat(parts), begins, tuple(packed))

    def part(self, buffer: Tensor, x: Tensor) -> Tensor | None:
        """Return the part of a copy of `flat` that has the values of ``x``."""
        begin = self.begins.get(id(x))
        if begin is None:
            return None
        return buffer[begin : begin + _nbytes(x)].view(x.dtype).view(x.shape)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.itemsize
