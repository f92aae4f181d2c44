"""Keys and values of every slot: the buffers, and what a model's forward sees of them.

    slots = KVSlots(layers, rows=8, length=256)  # k0, v0, ...: [rows, heads, length, head dim]
    cache = Decoding(slots, pos)                 # one token of each slot, at pos: int64[8, 1]
    k, v = cache.update(0, k, v)                 # [8, heads, 1, dim] -> [8, heads, 256, dim]
    cache.mask()                                 # bool[8, 1, 1, 256]: up to the slot's position

    cache = Prefill(slots, row, n)               # prompts of n positions into slots, row: int64[b]
    k, v = cache.update(0, k, v)                 # [b, heads, n, dim], as they came
    cache.mask()                                 # bool[1, 1, n, n]: causal

Besides, a slot has its request's seed and top_k (``request``), temperature and top_p (``knobs``).

Invariants: a prefill writes the whole row, zeros after the prompt, so nothing of an earlier request
is left, and no position that was never written is read: a mask has at least one live position.
Padding of the prompt is overwritten before it is live. Not here: who sits in which slot.
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
    """Of one layer's cache: (heads, head dim) of keys and of values, their dtype, and the name of
    the module that keeps them."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    module: str

    @property
    def bytes_per_position(self) -> int:
        (a, b), (c, d) = self.keys, self.values
        return (a * b + c * d) * self.dtype.itemsize


class KVSlots(nn.Module):
    """The buffers; ``rows`` slots of ``length`` positions. ``copies``: by layer whose heads lie on
    several ranks each, the head that is kept at each index of dim 1."""

    request: Tensor
    knobs: Tensor

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        rows: int,
        length: int,
        copies: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.rows: int = rows
        self.length: int = length
        self.copies: dict[int, list[int]] = {n: list(c) for n, c in (copies or {}).items()}
        for number, layer in layers.items():
            for name, (heads, dim) in (("k", layer.keys), ("v", layer.values)):
                heads = len(self.copies.get(number, range(heads)))
                empty = torch.zeros(rows, heads, length, dim, dtype=layer.dtype)
                self.register_buffer(f"{name}{number}", empty)
        self.register_buffer("request", torch.zeros(rows, 2, dtype=torch.int64))
        self.register_buffer("knobs", torch.zeros(rows, 2))

    def copied(self, layer: int, new: Tensor) -> Tensor:
        """Heads [b, heads, n, dim] as the layer's cache keeps them."""
        if layer not in self.copies:
            return new
        return torch.ops.dt.pick_heads(new, list(range(new.shape[1])), self.copies[layer])


class Decoding:
    """One new token in each slot. ``pos``: int64[rows, 1]. Layers that ask the same get the same:
    what all share is computed once."""

    def __init__(self, slots: KVSlots, pos: Tensor) -> None:
        self.slots = slots
        self.pos: Tensor = pos
        self._masks: dict[int | None, Tensor] = {}
        self._places: dict[torch.Size, Tensor] = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the token's [rows, heads, 1, dim]; gives [rows, heads, length, dim]."""
        kept: list[Tensor] = []
        for name, given in (("k", k), ("v", v)):
            buffer, new = self.slots.get_buffer(f"{name}{layer}"), self.slots.copied(layer, given)
            if new.shape not in self._places:
                self._places[new.shape] = self.pos[:, None, :, None].expand(new.shape)
            at = self._places[new.shape]
            written = buffer.scatter_(2, at, new.to(buffer.dtype))
            if layer in self.slots.copies:
                heads = list(range(given.shape[1]))
                written = torch.ops.dt.pick_heads(written, self.slots.copies[layer], heads)
            kept.append(written)
        return kept[0], kept[1]

    def mask(self, window: int | None = None) -> Tensor:
        """bool[rows, 1, 1, length], True where a query attends; of ``window`` positions at most."""
        if window not in self._masks:
            key = torch.arange(self.slots.length)
            live = key <= self.pos
            if window is not None and window < self.slots.length:
                live = live & (key > self.pos - window)
            self._masks[window] = live[:, None, None, :]
        return self._masks[window]


class Prefill:
    """Prompts, padded to a bucket, one for each of ``row``. ``pos``: int64[b, num]. Padding may be
    more than a slot has positions, of which a prompt leaves the last one free."""

    def __init__(self, slots: KVSlots, row: Tensor, num: int) -> None:
        self.slots = slots
        self.row = row
        self.pos = torch.arange(num)[None]
        if num > slots.length:
            self.pos = self.pos.clamp(max=slots.length - 1)
        if row.shape[0] > 1:
            self.pos = self.pos.expand(row.shape[0], num)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the prompts' [b, heads, num, dim] into their rows, and gives them back."""
        for name, given in (("k", k), ("v", v)):
            buffer, new = self.slots.get_buffer(f"{name}{layer}"), self.slots.copied(layer, given)
            kept = new if new.shape[2] <= self.slots.length else new[:, :, : self.slots.length]
            padded = F.pad(kept, (0, 0, 0, self.slots.length - kept.shape[2]))
            buffer.index_copy_(0, self.row, padded.to(buffer.dtype))
        return k, v

    def mask(self, window: int | None = None) -> Tensor:
        """bool[1, 1, num, num], causal; of ``window`` positions at most."""
        return causal(self.pos[0], window)[None, None]


Cache = Decoding | Prefill


def causal(pos: Tensor, window: int | None) -> Tensor:
    """bool[n, n] for positions int64[n] from 0 on: a query attends to itself and what is before."""
    key, query = pos[None, :], pos[:, None]
    live = key <= query
    if window is not None and window < len(pos):
        live = live & (key > query - window)
    return live
