"""A training run of a few steps that any machine can make, and what its losses must be.

    losses("inprocess", dt.Mesh(tp=2))         # those of two ranks
    losses("inprocess", dt.Mesh(tp=2), device="cuda")
    difference(a, b)                           # the largest, relative

The same model, batch and seed under each mesh: losses differ by no more than the order of their
sums, and one mesh gives the same bits in this process and on Ray. On a GPU all ranks share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.spec.mesh import Mesh

STEPS = 3
TOLERANCE = 1e-5
"""Relative, of float32: the order of a sum of 64 products, three steps on."""


ON_A_GPU = 1e-4
"""The same, of a GPU beside a CPU: its kernels add in another order."""


def losses(
    backend: Any,
    mesh: Mesh,
    address: str | None = None,
    device: str = "cpu",
    ranks_per_actor: int | None = None,
) -> list[float]:
    """Of STEPS steps. Raises what a launch and a step raise."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x, y = (torch.randn(16, 32, generator=generator) for _ in range(2))
    pins = {"0.weight": {"tp": dt.Row()}, "2.weight": {"tp": dt.Column()}}
    placed = dt.parallelize(model, mesh, pins if mesh.size > 1 else {})
    step = dt.train_step(placed, _loss, torch.optim.AdamW(model.parameters(), lr=0.01))
    where: Any = dict(
        backend=backend, device=device, address=address, ranks_per_actor=ranks_per_actor
    )
    if device == "cuda" and ranks_per_actor is None:
        where["ranks_per_actor"] = mesh.size
    with dt.launch(mesh, **where, deadline_s=30.0, bring_home=False):
        return [float(step(x, y)) for _ in range(STEPS)]


def difference(measured: Sequence[float], wanted: Sequence[float]) -> float:
    pairs = zip(measured, wanted, strict=True)
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)


def _loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()
