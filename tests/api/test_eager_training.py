"""A training loop written for one device, with torch's own optimizer, on DTensor parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from tests.api.eager import same
from tests.api.eager_training import MEGATRON, Transformer, equal, spread, train

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "Adam amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": functools.partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_transformer_is_trained_as_on_one_device(optimizer: str) -> None:
    """In float64: Adam divides by the size of gradients, and those of k's bias are rounding."""
    mesh = dt.Mesh(dp=2, tp=2)
    model = Transformer().double()
    parallel = spread(model, mesh, MEGATRON)
    wanted = train(model, OPTIMIZERS[optimizer], lambda x: x)
    got = train(parallel, OPTIMIZERS[optimizer], lambda x: dt.distribute(x, mesh, dp=dt.Row()))
    same(got, wanted, atol=1e-5)
    equal(parallel, model, 1e-5)
    assert str(parallel.block.qkv.weight.spec) == "f64[3*8@tp,8]"  # type: ignore[union-attr]
    assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in parallel.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dt.Mesh(tp=2), dt.Mesh(tp=3)], ids=str)
def test_an_mlp_in_float32(mesh: dt.Mesh) -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.down = (
                nn.Embedding(12, 7),
                nn.Linear(7, 10),
                nn.Linear(10, 12),
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.down(F.relu(self.up(self.embed(ids))))

    model = MLP()
    parallel = spread(model, mesh, MEGATRON)
    for name in ("AdamW", "SGD momentum"):
        wanted = train(model, OPTIMIZERS[name], lambda x: x)
        got = train(parallel, OPTIMIZERS[name], lambda x: dt.distribute(x, mesh))
        same(got, wanted, atol=1e-5)
    equal(parallel, model, 1e-5)


@pytest.mark.slow
def test_clipping() -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    model = Transformer().double()
    parallel = spread(model, mesh, MEGATRON)
    adamw = OPTIMIZERS["AdamW"]
    wanted = train(model, adamw, lambda x: x, clip=0.1)
    got = train(parallel, adamw, lambda x: dt.distribute(x, mesh, dp=dt.Row()), clip=0.1)
    same(got, wanted, atol=1e-5)
    equal(parallel, model, 1e-5)


def test_gradients_accumulate_and_the_state_is_placed_like_its_parameter() -> None:
    mesh = dt.Mesh(tp=2)
    w = nn.Parameter(dt.distribute(torch.randn(6, 4), mesh, tp=dt.Row()))
    x = dt.distribute(torch.randn(3, 4), mesh)
    for _ in range(2):
        F.linear(x, w).sum().backward()
    assert w.grad is not None
    same(w.grad, 2 * x.full_tensor().sum(0).expand(6, 4), atol=1e-5)
    opt = torch.optim.AdamW([w])
    opt.step()
    state = opt.state[w]
    assert [str(state[k].spec) for k in ("exp_avg", "exp_avg_sq")] == ["f32[6@tp,4]"] * 2
    opt.zero_grad(set_to_none=False)
    assert not w.grad.any()


def test_hooks_and_double_backward() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    results = []
    for t in (x, dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())):
        t = t.requires_grad_()
        seen: list[torch.Tensor] = []
        y = (t**3).sum()
        t.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        (g,) = torch.autograd.grad(y, t, create_graph=True)
        g.pow(2).sum().backward()
        results.append([g.detach(), t.grad, *seen])
    same(results[1], results[0])


def test_moves_are_differentiable() -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    a = torch.randn(6, 4)
    x = dt.distribute(a, mesh, tp=dt.Row()).requires_grad_()
    y = (x * 2).redistribute(tp=dt.Column(), dp=dt.Row())
    assert str(y.spec) == "f32[6@dp,4@tp]"
    z = (y * y).redistribute(tp=dt.Replicate()).full_tensor()
    assert type(z) is torch.Tensor
    z.sum().backward()
    assert x.grad is not None and str(x.grad.spec) == "f32[6@tp,4]"
    same(x.grad, 8 * a, atol=1e-5)
    w = dt.distribute(torch.randn(4, 3), mesh).requires_grad_()
    p = x.detach().redistribute(tp=dt.Column()) @ w.redistribute(tp=dt.Row())
    assert str(p.spec) == "f32[6,3]{sum@tp}"
    p.redistribute(tp=dt.Replicate()).sum().backward()
    same(w.grad, a.sum(0)[:, None].expand(4, 3), atol=1e-5)


def test_batch_norm_keeps_its_statistics() -> None:
    plain = nn.BatchNorm1d(3).double()
    layer = spread(plain, dt.Mesh(tp=2), {})
    for name, buffer in list(layer.named_buffers()):
        setattr(layer, name, dt.distribute(buffer, dt.Mesh(tp=2)))
    for _ in range(2):
        x = torch.randn(6, 3, dtype=torch.float64)
        same(layer(dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())), plain(x))
    same(list(layer.buffers()), list(plain.buffers()))
    plain.eval(), layer.eval()
    x = torch.randn(6, 3, dtype=torch.float64)
    same(layer(dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())), plain(x))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_of_torchs_own(masked: bool) -> None:
    mesh = dt.Mesh(tp=2)
    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    layer = spread(
        plain, mesh, {"linear1.*": dict(tp=dt.Row()), "linear2.weight": dict(tp=dt.Column())}
    )
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5).double() if masked else None
    wanted = plain(x, src_mask=mask)
    got = layer(
        dt.distribute(x, mesh), src_mask=None if mask is None else dt.distribute(mask, mesh)
    )
    same(got, wanted)
    wanted.sin().sum().backward()
    got.sin().sum().backward()
    same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])
