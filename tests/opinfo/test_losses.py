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

from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.testing import execute

REDUCTIONS = ("mean", "sum", "none")


def assert_right(
    fn: Callable[..., Any],
    leaves: Sequence[torch.Tensor],
    options: Sequence[Sequence[Placement]],
) -> None:
    """Values and gradients under each of the options, on 4 ranks, which divide 8, and on 3."""
    traced = execute.trace(fn, tuple(leaves))
    expected = execute.reference(traced)
    assert any(g is not None and bool(g.any()) for g in expected.gradients), "no gradient to check"
    for mesh, option in itertools.product((Mesh(x=4), Mesh(x=3)), options):
        if mesh.size == 3 and len({p for p in option if isinstance(p, Shard)}) != 1:
            continue
        found = execute.run(traced, mesh, [{"x": p} for p in option])
        where = f"{option} on {mesh}"
        for a, b in zip(found.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, w=where: f"{w}: {m}")
        for a, b in zip(found.gradients, expected.gradients, strict=True):
            assert (a is None) == (b is None), where
            if a is not None:
                torch.testing.assert_close(a, b, msg=lambda m, w=where: f"{w}: gradient: {m}")


def drawn(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


R, S0, S1, P = REPLICATE, Shard(0), Shard(1), Partial("sum")
PAIRS = ((S0, S0), (S1, S1), (S0, R), (R, S1), (S0, S1), (P, R), (R, P))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_mse_loss(reduction: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x, y, reduction=reduction)

    assert_right(fn, (drawn(8, 5), drawn(8, 5)), PAIRS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_huber_loss(reduction: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(x, y, reduction=reduction, delta=0.7)

    assert_right(fn, (drawn(8, 5), drawn(8, 5)), PAIRS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_smooth_l1_loss(reduction: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7)

    assert_right(fn, (drawn(8, 5), drawn(8, 5)), PAIRS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_soft_margin_loss(reduction: str) -> None:
    sign = drawn(8, 5, grad=False).sign()

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.soft_margin_loss(x, y, reduction=reduction)

    assert_right(fn, (drawn(8, 5), sign), PAIRS)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy(reduction: str, weighted: bool) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(x, y, weight=w[0] if w else None, reduction=reduction)

    p = torch.rand(8, 5, dtype=torch.float64).clamp(0.1, 0.9).requires_grad_()
    y = torch.rand(8, 5, dtype=torch.float64).round()
    weight = [torch.rand(8, 5, dtype=torch.float64)] if weighted else []
    assert_right(fn, (p, y, *weight), [(*pair, *[R][:weighted]) for pair in PAIRS])


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_with_logits(reduction: str, weighted: bool) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(
            x, y, pos_weight=w[0] if w else None, reduction=reduction
        )

    y = torch.rand(8, 5, dtype=torch.float64).round()
    weight = [torch.rand(5, dtype=torch.float64) + 0.5] if weighted else []
    assert_right(fn, (drawn(8, 5), y, *weight), [(*pair, *[R][:weighted]) for pair in PAIRS])


TRIPLES = ((S0, R, R), (S1, R, R), (R, S0, S0), (R, S1, S1), (S0, S0, S0), (S1, S1, S1))
TRIPLES += ((P, R, R), (S0, S1, R), (R, R, P))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter(dim: int) -> None:
    if dim == 0:  # distinct along the dim, or the result depends on the order of writing
        index = torch.stack([torch.randperm(8)[:6] for _ in range(5)], 1)
    else:
        index = torch.stack([torch.randperm(5)[:4] for _ in range(8)])

    def fn(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return x.scatter(dim, index, src)

    assert_right(fn, (drawn(8, 5), index, drawn(*index.shape)), TRIPLES)


@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_add(dim: int) -> None:
    index = torch.randint(0, 5, (6, 5))  # with repeats

    def fn(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(dim, index, src)

    assert_right(fn, (drawn(8, 5), index, drawn(6, 5)), TRIPLES)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_index_add(dim: int) -> None:
    index = torch.tensor([3, 0, 3, 1, 4, 0])  # with repeats

    def fn(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return x.index_add(dim, index, src, alpha=2)

    src = drawn(6, 5) if dim == 0 else drawn(8, 6)
    options = [(x, R if i == S1 else i, src) for x, i, src in TRIPLES]
    assert_right(fn, (drawn(8, 5), index, src), options)
