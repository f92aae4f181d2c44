"""A model and a training loop written for one device, and its parameters as DTensors."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt

Stated = Mapping[str, Mapping[str, dt.Placement]]

MEGATRON: Stated = {
    "*qkv.*": dict(tp=dt.Row(blocks=3)),
    "*proj.weight": dict(tp=dt.Column()),
    "*up.*": dict(tp=dt.Row()),
    "*down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
    "head.weight": dict(tp=dt.Row()),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in qkv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 12, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = Block(width, heads)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def spread(model: nn.Module, mesh: dt.Mesh, stated: Stated) -> nn.Module:
    """A copy whose parameters are DTensors; the first glob that matches a name places it."""
    model = copy.deepcopy(model)
    for name, parameter in list(model.named_parameters()):
        placed = next((p for glob, p in stated.items() if fnmatch.fnmatch(name, glob)), {})
        owner, _, leaf = name.rpartition(".")
        new = nn.Parameter(dt.distribute(parameter.detach(), mesh, **placed))
        setattr(model.get_submodule(owner), leaf, new)
    return model


def train(
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    given: Callable[[torch.Tensor], torch.Tensor],
    steps: int = 3,
    clip: float | None = None,
) -> list[Any]:
    """The loop; it knows nothing of DTensors but that inputs go through ``given``."""
    opt = optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    numbers = torch.Generator().manual_seed(3)
    losses: list[Any] = []
    for _ in range(steps):
        ids = torch.randint(0, 12, (4, 6), generator=numbers)
        logits = model(given(ids[:, :-1].contiguous()))
        loss = F.cross_entropy(logits.flatten(0, 1), given(ids[:, 1:].reshape(-1)))
        opt.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        scheduler.step()
        losses.append(loss.detach())
    return losses


def equal(got: nn.Module, wanted: nn.Module, atol: float) -> None:
    for (name, p), q in zip(got.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            p.detach().full_tensor(),
            q.detach(),
            rtol=atol,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )
