"""Small tensors in one buffer of bytes, which travels in one copy.

    packed = Packed.of([loss, rows, skip])          # uint8[n] on their device
    host = packed.flat.cpu()
    packed.part(host, loss)                         # the value of the loss; None: it is not in it

Tensors with larger elements come first, so each tensor begins at a multiple of its element's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_BYTES = 1 << 14
"""The largest tensor that is packed with others."""


@dataclass(frozen=True, slots=True)
class Packed:
    """``flat``: the bytes of the tensors; ``begins``: where each tensor begins, by its id. The
    tensors are kept, so that no other tensor gets their ids."""

    flat: Tensor
    begins: dict[int, int]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(tensors: Iterable[object]) -> Packed | None:
        """Return the small tensors among the values in one buffer, or None if there are none."""
        small = {id(x): x for x in tensors if isinstance(x, Tensor) and _nbytes(x) > 0}
        packed = [x for x in small.values() if _nbytes(x) <= SMALL_BYTES]
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
