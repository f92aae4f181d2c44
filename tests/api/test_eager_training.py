"""A training loop written for one device, with torch's own optimizer, runs on DTensor parameters.
On Ray it gives the same numbers, runs asynchronously, and a failure names the line."""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from dtensor.daft import Call
from tests.api.eager import same
from tests.chaos.actors import wait_for_file
from tests.daft.programs import function, program
from tests.models import Block

Stated = Mapping[str, Mapping[str, dt.Placement]]

MEGATRON: Stated = {
    "*qkv.*": dict(tp=dt.Row(blocks=3)),
    "*proj.weight": dict(tp=dt.Column()),
    "*up.*": dict(tp=dt.Row()),
    "*down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
    "head.weight": dict(tp=dt.Row()),
}


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 12, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = Block(width, heads, bias=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def spread(model: nn.Module, mesh: dt.Mesh, stated: Stated) -> nn.Module:
    """Return a copy of the model with DTensor parameters; the first glob that matches a name places
    it."""
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
    clip: float | None = None,
) -> list[Any]:
    """Run a plain training loop; inputs go through ``given``, and nothing else is specific to
    DTensors."""
    opt = optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    numbers = torch.Generator().manual_seed(3)
    losses: list[Any] = []
    for _ in range(3):
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


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "Adam amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "SGD momentum": functools.partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2),
}


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_eager_transformer_training_matches_one_device(optimizer: str) -> None:
    """In float64, because Adam divides by the size of gradients, and the gradients of k's bias are
    only rounding errors."""
    mesh = dt.Mesh(dp=2, tp=2)
    model = Transformer().double()
    parallel = spread(model, mesh, MEGATRON)
    clip, make = 0.1 if optimizer == "SGD foreach" else None, OPTIMIZERS[optimizer]
    wanted = train(model, make, lambda x: x, clip)
    got = train(parallel, make, lambda x: dt.distribute(x, mesh, dp=dt.Row()), clip)
    same(got, wanted, atol=1e-5)
    equal(parallel, model, 1e-5)
    assert str(parallel.block.attn.qkv.weight.spec) == "f64[3*8@tp,8]"  # type: ignore[union-attr]
    assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in parallel.parameters())


def test_eager_gradients_accumulate_and_optimizer_state_follows_placement() -> None:
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


def test_eager_hooks_and_double_backward_match_torch() -> None:
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


def test_redistribute_is_differentiable() -> None:
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
    (g,) = torch.autograd.grad((x.full_tensor() ** 3).sum(), [x], create_graph=True)
    (second,) = torch.autograd.grad(g.full_tensor().sum(), [x])
    same(second, 6 * a, atol=1e-5)
    w = dt.distribute(torch.randn(4, 3), mesh).requires_grad_()
    p = x.detach().redistribute(tp=dt.Column()) @ w.redistribute(tp=dt.Row())
    assert str(p.spec) == "f32[6,3]{sum@tp}"
    p.redistribute(tp=dt.Replicate()).sum().backward()
    same(w.grad, a.sum(0)[:, None].expand(4, 3), atol=1e-5)


def test_eager_batch_norm_running_statistics_match_torch() -> None:
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


@pytest.mark.default("False")
@pytest.mark.parametrize("masked", [False, True])
def test_eager_transformer_encoder_layer_matches_torch(masked: bool) -> None:
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


# -- on Ray ----------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_eager_training_and_views_on_ray_match_in_process(tmp_path: Path) -> None:
    """One launch serves all checks that need no failure, because starting actors takes seconds."""
    model = Transformer().double()
    x = torch.randn(6, 4)
    here = _written(x)
    with dt.launch(dt.Mesh(tp=2), backend="ray") as session:
        parallel = spread(model, dt.Mesh(tp=2), MEGATRON)
        wanted = train(model, OPTIMIZERS["AdamW foreach"], lambda x: x)
        got = train(
            parallel, OPTIMIZERS["AdamW foreach"], lambda x: dt.distribute(x, dt.Mesh(tp=2))
        )
        same(got, wanted, atol=1e-5)
        equal(parallel, model, 1e-5)

        assert torch.equal(_written(x), here)

        _an_op_returns_before_it_has_run(session, tmp_path / "go")


def _written(x: torch.Tensor) -> torch.Tensor:
    d = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
    d[1:].t()[0].mul_(2)
    d[0] = d.sum(0) * 0.3
    return (d @ d.t()).softmax(0).full_tensor()


def _an_op_returns_before_it_has_run(session: Any, go: Path) -> None:
    """Issue 40 ops while the actors wait for a file; an op that waited would block forever."""
    x = torch.randn(4, 4)
    big, y = (dt.distribute(x, dt.Mesh(tp=2)) for _ in range(2))
    source = "def forward():\n    wait_for_file(go)\n    return ()"
    wait = function("wait", source, wait_for_file=wait_for_file, go=str(go))
    handle = session.cluster.load(program(*[[Call("wait", (), ())]] * 2, functions=[wait]))
    held = session.cluster.run(handle, [{}, {}])
    for _ in range(40):
        y = (big @ y).mul_(1e-2).add_(1)
    assert not held.done()
    go.touch()
    expected = x
    for _ in range(40):
        expected = (x @ expected).mul_(1e-2).add_(1)
    torch.testing.assert_close(y.full_tensor(), expected)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_eager_failure_on_ray_names_line_that_issued_op() -> None:
    with pytest.raises(dt.daft.DaftError) as error, dt.launch(dt.Mesh(tp=2), backend="ray"):
        table = dt.distribute(torch.randn(4, 3), dt.Mesh(tp=2))
        good = dt.distribute(torch.tensor([0, 1]), dt.Mesh(tp=2))
        bad = dt.distribute(torch.tensor([0, 7]), dt.Mesh(tp=2))
        F.embedding(good, table)
        rows = F.embedding(bad, table)
        later = rows * 2
        later.full_tensor()
    text = str(error.value)
    assert "embedding" in text and "index out of range" in text and "rank" in text
    assert "test_eager_training.py" in text and "rows = F.embedding(bad, table)" in text
