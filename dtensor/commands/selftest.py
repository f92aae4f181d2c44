"""A training run of a few steps, small enough for any machine, whose losses are compared.

    losses("inprocess", dt.Mesh(tp=2))         # the losses of three steps on two ranks
    losses("inprocess", dt.Mesh(tp=2), device="cuda")
    difference(a, b)                           # the largest relative difference

Model, batch and seed are the same for each mesh. So losses of two meshes differ only by the order
of sums, and losses of one mesh in this process and on Ray are equal to the bit.
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
"""The relative tolerance of float32 losses after three steps whose sums of 64 products may be added
in another order."""
GPU_TOLERANCE = 1e-4
"""The relative tolerance of losses of a GPU and a CPU, whose kernels add in other orders."""


def losses(
    backend: Any,
    mesh: Mesh,
    address: str | None = None,
    device: str = "cpu",
    ranks_per_actor: int | None = None,
) -> list[float]:
    """Return the losses of `STEPS` steps. By default all ranks share one GPU on ``cuda``. Raises
    what a launch and a step raise."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x, y = (torch.randn(16, 32, generator=generator) for _ in range(2))
    pins = {"0.weight": {"tp": dt.Row()}, "2.weight": {"tp": dt.Column()}}
    placed = dt.parallelize(model, mesh, pins if mesh.size > 1 else {})
    step = dt.train_step(placed, _loss, torch.optim.AdamW(model.parameters(), lr=0.01))
    if device == "cuda" and ranks_per_actor is None:
        ranks_per_actor = mesh.size
    with dt.launch(
        mesh,
        backend=backend,
        device=device,
        address=address,
        ranks_per_actor=ranks_per_actor,
        deadline_s=30.0,
        bring_home=False,
    ):
        return [float(step(x, y)) for _ in range(STEPS)]


def difference(measured: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference; infinity if a measured loss is NaN."""
    pairs = zip(measured, wanted, strict=True)
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)


def _loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()
