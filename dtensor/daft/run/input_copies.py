"""Copy the inputs of runs from the host to a GPU, without a wait of the host.

    copies = InputCopies(torch.device("cuda"))
    copies.of({0: {"x": x, "y": y}})    # {(0, "x"): tensor, (0, "y"): tensor} on the GPU

The copies go through pinned memory on a side stream, which waits for nothing. So the inputs of the
next run are copied while the GPU still computes the last run. All small tensors of a run share one
copy. torch reuses pinned memory, and the memory of a copy, only after the GPU's work that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dtensor.daft.run.packed import SMALL_BYTES

_ALIGNED = 64  # bytes at which each small tensor begins: kernels read vectors of 16 bytes


class InputCopies:
    """The stream on which inputs are copied to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # made for the first copy

    def of(self, inputs: Mapping[int, Mapping[str, object]]) -> dict[tuple[int, str], Tensor]:
        """Return copies on the GPU of the strided CPU tensors among the inputs of each rank."""
        values = {
            (rank, name): value
            for rank, named in inputs.items()
            for name, value in named.items()
            if isinstance(value, Tensor)
            if value.device.type == "cpu" and value.layout is torch.strided
        }
        return dict(zip(values, self.copy(tuple(values.values())))) if values else {}

    def copy(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of strided CPU tensors on the GPU. The caller may change the
        values at once."""
        nbytes = [value.numel() * value.itemsize for value in values]
        shared = [n if n <= SMALL_BYTES else 0 for n in nbytes]
        ends = [math.ceil(n / _ALIGNED) * _ALIGNED for n in shared]
        begins = [sum(ends[:index]) for index in range(len(ends))]
        pinned = _pinned((sum(ends),), torch.uint8)
        small = [i for i, n in enumerate(nbytes) if n <= SMALL_BYTES]

        def part(buffer: Tensor, index: int) -> Tensor:
            """Return the part of a buffer that holds a small tensor."""
            value, begin = values[index], begins[index]
            return buffer[begin : begin + nbytes[index]].view(value.dtype).view(value.shape)

        for index in small:
            part(pinned, index).copy_(values[index].detach())
        current, copies = torch.cuda.current_stream(self._device), dict[int, Tensor]()
        side = self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            on_device = pinned.to(self._device, non_blocking=True)
            on_device.record_stream(current)
            copies.update((index, part(on_device, index)) for index in small)
            for index, value in enumerate(values):
                if index not in copies:
                    source = _pinned(value.shape, value.dtype).copy_(value.detach())
                    copies[index] = source.to(self._device, non_blocking=True)
                    copies[index].record_stream(current)
        current.wait_stream(side)
        return [copies[index] for index in range(len(values))]


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
