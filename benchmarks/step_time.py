"""Time of a small training step, as its user sees it: a call and its loss.

    python -m benchmarks.step_time [--backend inprocess ray] [--steps 150]

An MLP of width 64 at tp=2, and a GPT of 4 layers of width 32 at tp=2 x pp=2 under 1F1B with 2
microbatches, both with AdamW; the least of six means over the steps, in microseconds. To compare
two versions, run them in turns, each from its own checkout (PYTHONPATH). Not here: planning
(plan_time.py), large steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.daft import Backend
from tests.models import GPT, batch, loss_fn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def least(step: Callable[[], object], num_steps: int) -> float:
    """Microseconds of a step."""
    for _ in range(10):
        step()
    means: list[float] = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(num_steps):
            step()
        means.append((time.perf_counter() - begin) / num_steps)
    return min(means) * 1e6


def mlp_us(backend: Backend, num_steps: int) -> float:
    mesh = dt.Mesh(tp=2)
    pins = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    model = dt.parallelize(MLP(), mesh, pins)
    step = dt.train_step(model, mse, torch.optim.AdamW(model.parameters()))
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    with dt.launch(mesh, backend=backend):
        return least(lambda: float(step(x, y)), num_steps)


def gpt_us(backend: Backend, num_steps: int) -> float:
    mesh = dt.Mesh(tp=2, pp=2)
    halves = [["embed*", "positions*", "blocks.{0..1}.*"], ["blocks.{2..3}.*", "norm*", "head*"]]
    gpt = GPT(vocab=64, width=32, positions=32, layers=4)
    model = dt.parallelize(gpt, mesh, {}, stages={"pp": halves})
    optimizer = torch.optim.AdamW(model.parameters())
    step = dt.train_step(model, loss_fn, optimizer, schedule=dt.OneFOneB(microbatches=2))
    one = batch(size=4, length=16, vocab=64)
    with dt.launch(mesh, backend=backend):
        return least(lambda: float(step(*one)), max(2, num_steps // 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["inprocess", "ray"])
    parser.add_argument("--steps", type=int, default=150)
    given = parsed(parser, backend=["inprocess"], steps=2)
    torch.set_num_threads(1)
    for backend in given.backend:
        mlp, gpt = mlp_us(backend, given.steps), gpt_us(backend, given.steps)
        print(f"{backend}: MLP {mlp:.0f} us, GPT {gpt:.0f} us")


if __name__ == "__main__":
    main()
