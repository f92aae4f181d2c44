"""A small model with everything that a copied state may get wrong: tied weights and uneven rows;
subclasses of `Net` in the tests add more.

    loss_fn(Net(), *batch(0))                   # float32[], of tokens and targets int64[4, 6]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH = 50, 12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 22), nn.Linear(22, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.drop(self.down(F.gelu(self.up(self.norm(h)))))


class Net(nn.Module):
    def __init__(self, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def loss_fn(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def batch(i: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(VOCAB, (2, 4, 6), generator=torch.Generator().manual_seed(i))
    return tokens, targets
