"""The KV cache of all slots: its buffers, and the interface that a model's forward uses.

    slots = KVSlots(layers, rows=8, length=256)  # k0, v0, ...: [rows, heads, length, head dim]
    cache = Decoding(slots, pos)                 # one token of each slot, at pos: int64[8, 1]
    k, v = cache.update(0, k, v)                 # [8, heads, 1, dim] -> [8, heads, 256, dim]
    cache.mask()                                 # bool[8, 1, 1, 256]: up to the slot's position

    cache = Prefill(slots, row, n)               # prompts of n positions into slots, row: int64[b]
    k, v = cache.update(0, k, v)                 # [b, heads, n, dim], unchanged
    cache.mask()                                 # bool[1, 1, n, n]: causal

Invariant: a prefill writes the whole row, with zeros after the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor.sharding.ops.heads  # noqa: F401  (registers torch.ops.dt.pick_heads)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's cache: (heads, head dim) of its keys and of its values, their dtype,
    and the name of the module that updates the cache."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    module: str

    @property
    def bytes_per_position(self) -> int:
        (a, b), (c, d) = self.keys, self.values
        return (a * b + c * d) * self.dtype.itemsize


class KVSlots(nn.Module):
    """The buffers of ``rows`` slots of ``length`` positions. ``request``: each slot's seed and
    top_k; ``knobs``: its temperature and top_p; ``copies``: for layers whose heads are stored
    several times, the head at each index of dim 1; ``positions``: the size of the buffers' dim of
    positions, which is ``length``, or more so that it can be split."""

    request: Tensor
    knobs: Tensor

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        rows: int,
        length: int,
        copies: Mapping[int, Sequence[int]] | None = None,
        positions: int | None = None,
    ) -> None:
        """Register zeros [rows, heads, positions, head dim] as k0, v0, ..., and sampling
        options."""
        super().__init__()
        self.rows: int = rows
        self.length: int = length
        self.positions: int = length if positions is None else positions
        self.copies: dict[int, list[int]] = {n: list(c) for n, c in (copies or {}).items()}
        for number, layer in layers.items():
            for name, (heads, dim) in (("k", layer.keys), ("v", layer.values)):
                heads = len(self.copies.get(number, range(heads)))
                empty = torch.zeros(rows, heads, self.positions, dim, dtype=layer.dtype)
                self.register_buffer(f"{name}{number}", empty)
        self.register_buffer("request", torch.zeros(rows, 2, dtype=torch.int64))
        self.register_buffer("knobs", torch.zeros(rows, 2))

    def copy_heads(self, layer: int, new: Tensor) -> Tensor:
        """Return heads [b, heads, n, dim] with the copies that the layer's cache stores."""
        if layer not in self.copies:
            return new
        return torch.ops.dt.pick_heads(new, list(range(new.shape[1])), self.copies[layer])


class Decoding:
    """The cache of a decode, with one new token in each slot at ``pos``: int64[rows, 1]. Masks and
    indices are computed once for all layers."""

    def __init__(self, slots: KVSlots, pos: Tensor) -> None:
        self.slots = slots
        self.pos: Tensor = pos
        self._masks: dict[int | None, Tensor] = {}
        self._position_indices: dict[torch.Size, Tensor] = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the token's keys and values [rows, heads, 1, dim]. Return the keys and values
        of all positions, [rows, heads, positions, dim]."""
        updated: list[Tensor] = []
        for name, x in (("k", k), ("v", v)):
            buffer, new = self.slots.get_buffer(f"{name}{layer}"), self.slots.copy_heads(layer, x)
            if new.shape not in self._position_indices:
                self._position_indices[new.shape] = self.pos[:, None, :, None].expand(new.shape)
            at = self._position_indices[new.shape]
            written = buffer.scatter_(2, at, new.to(buffer.dtype))
            if layer in self.slots.copies:
                heads = list(range(x.shape[1]))
                written = torch.ops.dt.pick_heads(written, self.slots.copies[layer], heads)
            updated.append(written)
        return updated[0], updated[1]

    def mask(self, window: int | None = None) -> Tensor:
        """Return bool[rows, 1, 1, positions], True where a query attends: up to its position, and
        at most ``window`` positions."""
        if window not in self._masks:
            key = torch.arange(self.slots.positions)
            live = key <= self.pos
            if window is not None and window < self.slots.length:
                live = live & (key > self.pos - window)
            self._masks[window] = live[:, None, None, :]
        return self._masks[window]


class Prefill:
    """The cache of a prefill of one prompt, padded to ``num`` positions, into each slot of ``row``:
    int64[b]. ``num`` may be larger than a slot; a prompt is always smaller."""

    def __init__(self, slots: KVSlots, row: Tensor, num: int) -> None:
        """Set the positions of the prompts, clamped to the last position of a slot."""
        self.slots = slots
        self.row = row
        self.pos = torch.arange(num)[None]
        if num > slots.length:
            self.pos = self.pos.clamp(max=slots.length - 1)
        if row.shape[0] > 1:
            self.pos = self.pos.expand(row.shape[0], num)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values [b, heads, num, dim] into the prompts' rows. Return them."""
        for name, x in (("k", k), ("v", v)):
            buffer, new = self.slots.get_buffer(f"{name}{layer}"), self.slots.copy_heads(layer, x)
            size = self.slots.positions
            cut = new if new.shape[2] <= size else new[:, :, :size]
            padded = F.pad(cut, (0, 0, 0, size - cut.shape[2]))
            buffer.index_copy_(0, self.row, padded.to(buffer.dtype))
        return k, v

    def mask(self, window: int | None = None) -> Tensor:
        """Return bool[1, 1, num, num]: causal, over at most ``window`` positions."""
        return causal(self.pos[0], window)[None, None]


Cache = Decoding | Prefill


def causal(pos: Tensor, window: int | None) -> Tensor:
    """Return bool[n, n] for positions int64[n]: a query attends to its own and earlier positions,
    at most ``window``."""
    key, query = pos[None, :], pos[:, None]
    live = key <= query
    if window is not None and window < len(pos):
        live = live & (key > query - window)
    return live
