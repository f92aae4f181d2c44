"""Plans that the tests save as pages: an MLP of two layers, and a GPT on a pipeline."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, MLP, square_loss

UP, DOWN = "*up.weight", "*down.weight"


def mlp_plan(*, turned: bool = False, hints: bool = False) -> dt.Plan:
    """Return a plan with Megatron's placements; ``turned``: with the costlier swapped placements,
    for which there are hints."""
    up, down = (dt.Column(), dt.Row()) if turned else (dt.Row(), dt.Column())
    parallel = dt.parallelize(
        MLP(16, 64),
        dt.Mesh(tp=2),
        {UP: dict(tp=up), DOWN: dict(tp=down)},
    )
    step = dt.train_step(parallel, square_loss, torch.optim.AdamW(parallel.parameters()))
    return step.plan(torch.randn(8, 16), torch.randn(8, 16), hints=hints)


def token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@cache
def gpt_plan() -> dt.Plan:
    """Return a plan of six layers on two stages of four ranks, with four microbatches: layers fold,
    and all axes send."""
    model = GPT(32, 16, 4, 6, 8)
    stages = [["embed*", "pos*", "blocks.[0-2].*"], ["blocks.[3-5].*", "norm*", "head*"]]
    parallel = dt.parallelize(
        model,
        dt.Mesh(pp=2, dp=2, tp=2),
        {
            "*qkv.weight": dict(tp=dt.Row(blocks=3)),
            "*proj.weight": dict(tp=dt.Column()),
            UP: dict(tp=dt.Row()),
            DOWN: dict(tp=dt.Column()),
        },
        stages={"pp": stages},
    )
    step = dt.train_step(
        parallel,
        token_loss,
        torch.optim.AdamW(model.parameters()),
        inputs=dict(dp=dt.Row()),
        schedule=dt.OneFOneB(microbatches=4),
        clip_grad_norm=1.0,
    )
    tokens = torch.zeros(16, 8, dtype=torch.long)
    return step.plan(tokens, tokens)
