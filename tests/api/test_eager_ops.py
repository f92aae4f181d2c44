"""Each op on DTensors, forward and backward, against plain torch, under many placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from tests.api.eager import MESHES, gradients, same, sampled

Shapes = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


def written(y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[1] = b
    y[:, 2:4] *= 2
    y[3:] = 0.5
    y.t()[0].add_(1)
    return y


FUNCTIONS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "add": (lambda a, b: a + b, [(5, 6), (5, 6)]),
    "broadcast": (lambda a, b: a * b + 2, [(5, 6), (6,)]),
    "mm": (lambda a, b: a @ b, [(5, 6), (6, 4)]),
    "bmm": (lambda a, b: a @ b, [(2, 5, 6), (2, 6, 4)]),
    "linear": (lambda a, w, b: F.linear(a, w, b), [(2, 5, 6), (4, 6), (4,)]),
    "gelu": (lambda a: F.gelu(a), [(5, 6)]),
    "softmax": (lambda a: a.softmax(-1), [(5, 6)]),
    "logsumexp": (lambda a: a.logsumexp(0), [(5, 6)]),
    "mean": (lambda a: a.mean(1, keepdim=True) * a.mean(), [(5, 6)]),
    "var": (lambda a: a.var(0), [(5, 6)]),
    "max": (lambda a: a.max(1).values, [(5, 6)]),
    "heads": (lambda a: a.view(4, 2, 3).transpose(0, 1).exp(), [(4, 6)]),
    "flat": (lambda a: a.view(30) * 2, [(5, 6)]),
    "slice": (lambda a: a[1:4, ::2] * 3, [(5, 6)]),
    "select": (lambda a: a[2] * a[:, 1].sum(), [(5, 6)]),
    "cat": (lambda a, b: torch.cat([a, b], 0), [(5, 6), (3, 6)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [(5, 6), (5, 6)]),
    "chunk": (lambda a: a.chunk(3, -1)[1] * a.split([1, 2, 3], 1)[1], [(5, 6)]),
    "unbind": (lambda a: a.unbind(0)[1] * a.unbind(0)[3], [(5, 6)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (6,), w, b), [(5, 6), (6,), (6,)]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (6,), w), [(5, 6), (6,)]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [(5, 6), (5, 6)]),
    "mse_loss": (lambda a, b: F.mse_loss(a, b), [(5, 6), (5, 6)]),
    "huber_loss": (lambda a, b: F.huber_loss(a, b), [(5, 6), (5, 6)]),
    "bce": (lambda a, b: F.binary_cross_entropy_with_logits(a, b), [(5, 6), (5, 6)]),
    "pow": (lambda a: (a**2).sqrt() + a.abs().pow(1.5), [(5, 6)]),
    "cumsum": (lambda a: a.cumsum(1), [(5, 6)]),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), [(5, 6), (4, 6)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 5, 4)] * 3,
    ),
    "attention of groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)],
    ),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        [(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4), (2, 1, 5, 5)],
    ),
    "expand": (lambda a: a[:, None].expand(5, 3, 6) * 2, [(5, 6)]),
    "tril": (lambda a: a.tril(), [(5, 6)]),
    "pad": (lambda a: F.pad(a, (1, 2)), [(5, 6)]),
    "norm": (lambda a: a.norm(), [(5, 6)]),
    "in place": (lambda a: (a * 1).mul_(2).add_(1).relu_(), [(5, 6)]),
    "written": (written, [(5, 6), (6,)]),
    "conv": (lambda a, w: F.conv1d(a, w, padding=1), [(2, 4, 6), (3, 4, 3)]),
    "sort": (lambda a: a.sort(1).values, [(5, 6)]),
    "diagonal": (lambda a: a.diagonal() * 2, [(5, 6)]),
}


@pytest.mark.slow
@pytest.mark.sample(*(f"{name}-{mesh}" for name in FUNCTIONS for mesh in MESHES[1:]))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str, mesh: dt.Mesh) -> None:
    fn, shapes = FUNCTIONS[name]
    for choice in sampled(mesh, shapes, 2):
        plain = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        spread = [dt.distribute(x, mesh, **p) for x, p in zip(plain, choice, strict=True)]
        assert all(x.is_leaf and x.requires_grad for x in spread)
        same(gradients(fn, spread), gradients(fn, plain))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cross_entropy_over_a_split_vocabulary(mesh: dt.Mesh) -> None:
    logits = torch.randn(7, 10, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 10, (7,))
    targets[2] = -100
    ids = dt.distribute(targets, mesh)
    for reduction in ("mean", "sum", "none"):
        for p in ({}, dict(tp=dt.Column()), dict(tp=dt.Row()), dict(tp=dt.Partial())):
            x = dt.distribute(logits, mesh, **p)
            got = gradients(partial(_loss, ids, reduction), [x])
            same(got, gradients(partial(_loss, targets, reduction), [logits]))


def _loss(targets: torch.Tensor, reduction: str, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, targets, reduction=reduction)


def test_embedding() -> None:
    table, ids = torch.randn(10, 4).requires_grad_(), torch.randint(0, 10, (3, 5))
    for p in ({}, dict(tp=dt.Row()), dict(tp=dt.Column())):
        weight = dt.distribute(table, dt.Mesh(tp=3), **p)
        spread = dt.distribute(ids, dt.Mesh(tp=3))
        got = gradients(partial(F.embedding, spread), [weight])
        same(got, gradients(partial(F.embedding, ids), [table]), atol=1e-6)


def test_numbers_mix_freely() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    d = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
    number = torch.tensor(3, dtype=torch.int64)
    wide = torch.tensor(0.5, dtype=torch.float64)
    for fn in (
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x * number / wide,
        lambda x: number * x,
        lambda x: x.long() * wide,
        lambda x: x.long() * 0.5,
        lambda x: torch.full_like(x, 2.5) ** x,
        lambda x: x * True,
        lambda x: x == 1,
        lambda x: x.long() // 2 % 2,
    ):
        same(fn(d), fn(x), atol=0)


def test_a_number_that_changes_is_not_planned_again() -> None:
    """A learning rate, a bias correction: one plan and one program serve all of its values."""
    x = torch.randn(4, 3)
    with dt.launch(dt.Mesh(tp=2)) as session:
        d = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
        loaded: list[int] = []
        for number in (0.5, -1.25, float("inf"), 1e-30):
            y, z = d.clone(), x.clone()
            for t in (y, z):
                t.mul_(number).add_(t, alpha=number).addcdiv_(t, t, value=number)
                t.lerp_(t, number)
            assert torch.equal(
                torch.nan_to_num((y + 0.25).full_tensor()), torch.nan_to_num(z + 0.25)
            )
            loaded.append(session.cluster._next_handle)  # type: ignore[attr-defined]
        assert loaded == loaded[:1] * 4


def test_numbers_are_told_apart() -> None:
    """0.0, -0.0, nan, 1, 1.0 and True hash alike, or unlike themselves."""
    x = torch.tensor([1.0, -1.0])
    d = dt.distribute(x, dt.Mesh(tp=2))
    for number in (0.0, -0.0, float("nan"), 1, 1.0, True, float("-inf")):
        for fn in (
            lambda x, n=number: torch.copysign(x, torch.full_like(x, n)),
            lambda x, n=number: torch.pow(x.long(), n),
            lambda x, n=number: x * n,
        ):
            got, wanted = fn(d), fn(x)
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got.full_tensor(), wanted, equal_nan=True, rtol=0, atol=0)


def test_factories_are_placed_like_their_operand() -> None:
    x = dt.distribute(torch.randn(6, 4), dt.Mesh(tp=2), tp=dt.Row())
    for y, value in (
        (torch.zeros_like(x), 0),
        (torch.ones_like(x), 1),
        (torch.full_like(x, 2.5), 2.5),
        (x.new_full((6, 4), 3), 3),
    ):
        assert str(y.spec) == "f32[6@tp,4]"
        assert torch.equal(y.full_tensor(), torch.full((6, 4), float(value)))
    assert str(torch.zeros_like(x, dtype=torch.int64).spec) == "i64[6@tp,4]"
    assert str(x.new_zeros(3).spec) == "f32[3]"
    pending = dt.distribute(torch.randn(6), dt.Mesh(tp=2), tp=dt.Partial())
    assert str(torch.ones_like(pending).spec) == "f32[6]"
    assert torch.equal(torch.ones_like(pending).full_tensor(), torch.ones(6))


def test_reads() -> None:
    x = dt.distribute(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dt.Mesh(tp=2), tp=dt.Row())
    assert x.sum().item() == float(x.sum()) == 10.0 and int(x.max()) == 4
    assert x.tolist() == [[1, 2], [3, 4]] and x.numpy().tolist() == x.tolist()
    assert bool((x > 0).all()) and not (x > 1).all()
    assert torch.equal(x, x * 1) and not torch.equal(x, x + 1) and torch.allclose(x, x + 1e-9)
    assert len(x) == 2 and [row.tolist() for row in x] == [[1, 2], [3, 4]]
    assert 3.0 in x


@torch.inference_mode()
def test_inference_mode() -> None:
    a, w = torch.randn(2, 5, 6), torch.randn(4, 6)
    x, y = dt.distribute(a, dt.Mesh(tp=2)), dt.distribute(w, dt.Mesh(tp=2), tp=dt.Row())
    same(
        F.linear(x, y).reshape(10, 4).softmax(-1),
        F.linear(a, w).reshape(10, 4).softmax(-1),
        atol=1e-6,
    )


def test_out() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    x, y = (dt.distribute(t, dt.Mesh(tp=2), tp=dt.Row()) for t in (a, b))
    z = torch.empty_like(x)
    assert torch.add(x, y, out=z) is z
    same(z, a + b, atol=1e-6)
