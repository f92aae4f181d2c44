"""A tiny GPT for one device, which trains on whole texts and generates a token at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, layer: int, cache: Any) -> Tensor:
        heads = "b t (three h d) -> three b h t d"
        q, k, v = rearrange(self.qkv(self.norm1(x)), heads, three=3, d=self.head_width)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.update(layer, k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask())
        x = x + self.proj(rearrange(y, "b h t d -> b t (h d)"))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """tokens [b, t] -> logits [b, t, vocab]; with a cache, at the positions pos [b, t]."""

    def __init__(self, *, vocab: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, cache: Any = None, pos: Tensor | None = None) -> Tensor:
        at = torch.arange(tokens.shape[1]) if pos is None else pos
        x = self.embed(tokens) + self.pos(at)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache)
        return self.head(self.norm(x))
