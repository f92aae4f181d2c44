"""What the examples here share: a small GPT, its loss, one batch, and a few steps of training.

Each example is run as `python -m examples.parallelisms.tensor` and differs from `single` in its
placements alone; all print the same losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from examples.gpt import GPT, Config


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(Config(vocab=96, context=16, width=32, heads=4, layers=2))


class Experts(nn.Module):
    """4 experts in place of an MLP; a router sends each token to 2 of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        rows, route = dt.to_experts(tokens, ids, 4)
        h = F.gelu(dt.expert_linear(rows, self.up, route))
        y = dt.from_experts(dt.expert_linear(h, self.down, route), route, weights)
        return y.view_as(x)


def build_with_experts() -> nn.Module:
    model = build()
    for block in model.blocks:
        block.mlp = Experts(32)
    return model


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(96, (8, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def train(model: dt.ParallelModule, **options: Any) -> list[float]:
    """Four steps of AdamW; prints what is communicated in a step, and the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dt.train_step(model, options.pop("loss_fn", loss_fn), optimizer, **options)
    for c in step.plan(*batch()).collectives:
        print(
            f"{c.phase:9}  {c.kind:14}  {c.axis:2}  {c.bytes_sent:6} bytes x{c.times}  {c.source}"
        )
    with dt.launch(model.mesh):
        losses = [float(step(*batch())) for _ in range(4)]
        dt.gather_state_dict(model, optimizer)
    print(*(f"{loss:.5f}" for loss in losses))
    return losses
