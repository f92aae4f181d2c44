"""Losses and scatters of which PyTorch's own DTensor gets gradients or values wrong, each by name.

There the backward of a mean divides by the number of *local* elements, so on W ranks the gradients
come out W times too large; and a scatter along a split dim writes at local places. Here values and
gradients under split, pending and uneven inputs are those of one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.testing import execute

R, S0, S1, P = REPLICATE, Shard(0), Shard(1), Partial("sum")


def assert_right(
    fn: Callable[..., Any], leaves: Sequence[Tensor], options: Sequence[Sequence[Placement]]
) -> None:
    """Values and gradients under each of the options, on 4 ranks, which divide 8, and on 3."""
    traced = execute.trace(fn, tuple(leaves))
    expected = execute.reference(traced)
    assert any(g is not None and bool(g.any()) for g in expected.gradients), "no gradient to check"
    for mesh, option in itertools.product((Mesh(x=4), Mesh(x=3)), options):
        if mesh.size == 3 and len({p for p in option if isinstance(p, Shard)}) != 1:
            continue
        found = execute.run(traced, mesh, [{"x": p} for p in option])
        for a, b in zip(
            (*found.tensors, *found.gradients),
            (*expected.tensors, *expected.gradients),
            strict=True,
        ):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, msg=lambda m, w=f"{option} on {mesh}": f"{w}: {m}")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "mse_loss": (F.mse_loss, lambda: (drawn(8, 5), drawn(8, 5))),
    "huber_loss": (
        lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.7),
        lambda: (drawn(8, 5), drawn(8, 5)),
    ),
    "smooth_l1_loss": (
        lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7),
        lambda: (drawn(8, 5), drawn(8, 5)),
    ),
    "soft_margin_loss": (F.soft_margin_loss, lambda: (drawn(8, 5), drawn(8, 5).detach().sign())),
    "binary_cross_entropy": (
        F.binary_cross_entropy,
        lambda: (rand(8, 5).clamp(0.1, 0.9).requires_grad_(), rand(8, 5).round()),
    ),
    "binary_cross_entropy, weighted": (
        lambda x, y, w, reduction: F.binary_cross_entropy(x, y, weight=w, reduction=reduction),
        lambda: (rand(8, 5).clamp(0.1, 0.9).requires_grad_(), rand(8, 5).round(), rand(8, 5)),
    ),
    "with_logits": (
        F.binary_cross_entropy_with_logits,
        lambda: (drawn(8, 5), rand(8, 5).round()),
    ),
    "with_logits, weighted": (
        lambda x, y, w, reduction: F.binary_cross_entropy_with_logits(
            x, y, pos_weight=w, reduction=reduction
        ),
        lambda: (drawn(8, 5), rand(8, 5).round(), rand(5) + 0.5),
    ),
}
PAIRS = ((S0, S0), (S1, S1), (S0, R), (R, S1), (S0, S1), (P, R), (R, P))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, reduction: str) -> None:
    loss, draw = LOSSES[name]

    def fn(*tensors: Tensor) -> Tensor:
        return loss(*tensors, reduction=reduction)

    leaves = draw()
    assert_right(fn, leaves, [(*pair, *[R] * (len(leaves) - 2)) for pair in PAIRS])


TRIPLES = ((S0, R, R), (S1, R, R), (R, S0, S0), (R, S1, S1), (S0, S0, S0), (S1, S1, S1))
TRIPLES += ((P, R, R), (S0, S1, R), (R, R, P))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_writes_at_indices(dim: int) -> None:
    # scatter's indices are distinct along the dim, or the result depends on the order of writing
    size, kept = (8, 6) if dim == 0 else (5, 4)
    perms = [torch.randperm(size)[:kept] for _ in range(5 if dim == 0 else 8)]
    distinct = torch.stack(perms, 1 - dim)
    repeated = torch.randint(0, 5, (6, 5))
    rows = torch.tensor([3, 0, 3, 1, 4, 0])

    def scatter(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return x.scatter(dim, index, src)

    def scatter_add(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return x.scatter_add(dim, index, src)

    def index_add(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return x.index_add(dim, index, src, alpha=2)

    assert_right(scatter, (drawn(8, 5), distinct, drawn(*distinct.shape)), TRIPLES)
    assert_right(scatter_add, (drawn(8, 5), repeated, drawn(6, 5)), TRIPLES)
    options = [(x, R if i == S1 else i, src) for x, i, src in TRIPLES]
    assert_right(index_add, (drawn(8, 5), rows, drawn(6, 5) if dim == 0 else drawn(8, 6)), options)
