"""Views and in-place ops on DTensors share storage as in PyTorch.

Each program is run on plain tensors and on DTensors, and every tensor that it returns is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from tests.api.eager import MESHES, placements, same

TP2 = dt.Mesh(tp=2)
Program = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


def views_of_views(x: torch.Tensor) -> Any:
    v = x[1:5].t()[1:, ::2]
    v.add_(10)
    w = x[:, :1].squeeze(1).unsqueeze(0)
    w.mul_(2)
    return x, v, w


def base_written(x: torch.Tensor) -> Any:
    v, w = x[2], x.view(2, -1)
    x.mul_(3)
    v.add_(1)
    x[2, 0] = -1
    return x, v, w


def transposes(x: torch.Tensor) -> Any:
    v = x.t()
    w = v.reshape(-1)  # a copy: v is not contiguous
    u = x.reshape(-1)  # a view: x is contiguous
    v.zero_()
    u[3] = 9
    w.fill_(7)
    return x, v, w, u


def copies(x: torch.Tensor) -> Any:
    y, z, w = x.clone(), x.contiguous(), x.to(x.dtype)
    turned = x.t().contiguous(), x.t().clone()
    x.zero_()
    y.add_(1)
    return x, y, z, w, turned, [(t.stride(), t.is_contiguous()) for t in turned]


def set_items(x: torch.Tensor) -> Any:
    x[0] = 5
    x[1:3] = x[3:5]
    x[1:].copy_(x[:-1].clone())
    x.add_(x.t().reshape(x.shape))
    x[:, 1] = x[:, 0] * 2
    x[-1, -1] = torch.tensor(3.5, dtype=x.dtype)
    x[..., 2:4] += 1
    x[5] /= 4
    return x


def chained_in_place(x: torch.Tensor) -> Any:
    y = x.mul_(2).add_(x).sub_(1)
    return x, y, y is x


def splits(x: torch.Tensor) -> Any:
    a, b = x.split(3)
    c, d = x.chunk(2, dim=1)
    e = x.unbind(1)[1]
    a.add_(1)
    d.mul_(2)
    e.fill_(0)
    b.copy_(a)
    return x, a, b, c, d, e


def diagonals(x: torch.Tensor) -> Any:
    d = x[:4, :4].diagonal()
    d.fill_(0)
    return x, d


def expanded(x: torch.Tensor) -> Any:
    v = x[0].expand(3, -1)
    x.add_(1)
    return x, v, v + x[:3]


def detached(x: torch.Tensor) -> Any:
    y, z = x.detach(), x.data
    y.add_(1)
    z[0] = 0
    return x, y, z


def swapped(x: torch.Tensor) -> Any:
    v = x[0]
    x.data = x.data * 2  # v keeps the old storage
    x.add_(1)
    return x, v


def by_index(x: torch.Tensor) -> Any:
    v = x[2:]
    v.clamp_(max=0.25).neg_().abs_().pow_(2)
    x.masked_fill_(x > 0.1, 0.5)
    x[x == 0.5] = -3
    return x, v


def wide_into_narrow(x: torch.Tensor) -> Any:
    y = x.float()
    y.add_(x)  # computed wide, stored narrow
    y[1:].copy_(x[1:])
    n = x.long()
    n[0] = 2.75
    return y, n, y.dtype, n.dtype


PROGRAMS: list[Program] = [
    views_of_views,
    base_written,
    transposes,
    copies,
    set_items,
    chained_in_place,
    splits,
    diagonals,
    expanded,
    detached,
    swapped,
    by_index,
    wide_into_narrow,
]


@pytest.mark.default("detached-mesh(tp=2)", "detached-mesh(tp=3)", "detached-mesh(dp=2, tp=2)")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_views_and_in_place_ops_alias_as_in_torch(program: Program, mesh: dt.Mesh) -> None:
    for p in placements(mesh, 2)[:: 1 if len(mesh.axes) == 1 else 3]:
        x = torch.randn(6, 4, dtype=torch.float64)
        d = dt.distribute(x, mesh, **p)
        same(program(d), program(x), atol=1e-6)


def test_in_place_ops_keep_placement() -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    x = dt.distribute(torch.randn(8, 4), mesh, dp=dt.Row(), tp=dt.Column(unit=2))
    other = dt.distribute(torch.randn(8, 4), mesh, dp=dt.Column())
    for change in (
        lambda: x.add_(1),
        lambda: x.mul_(other),
        lambda: x.addcdiv_(other, other, value=-0.1),
        lambda: x.copy_(other),
        lambda: x.zero_(),
        lambda: x.fill_(2),
        lambda: x[1:3].sub_(other[:2]),
        lambda: x.__setitem__((slice(None), 1), 5),
    ):
        change()
        assert str(x.spec) == "f32[8@dp,2@tp*2]"


@pytest.mark.parametrize("p", placements(TP2, 2), ids=str)
def test_gradients_through_views_and_in_place_ops_match_torch(p: dict[str, dt.Placement]) -> None:
    def program(x: torch.Tensor) -> Any:
        y = x * 2
        y[1:].mul_(3)
        z = y.t()[0]
        z.add_(y[:, 1] * 2)
        y[0] = 1
        w = y.view(-1)[3:].exp()
        return (w.sum() + y[2:].sum() * z.mean(),)

    x = torch.randn(5, 4, dtype=torch.float64).requires_grad_()
    d = dt.distribute(x, TP2, **p)
    (loss,), (wanted,) = program(d), program(x)
    loss.backward()
    wanted.backward()
    assert x.grad is not None
    same([loss, d.grad], [wanted, x.grad])


def test_changing_value_saved_for_backward_raises() -> None:
    """Uses torch's version counters, so that no gradient is computed from a changed value."""
    x = dt.distribute(torch.randn(4), TP2, tp=dt.Row()).requires_grad_()
    y = x.exp()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    z = x * 1
    part = z[:2]
    w = part.exp() * part
    z.add_(1)  # the base of what was saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    v = (x * 1).expand(3, 4)
    with pytest.raises(dt.PlanningError, match="writes one element several times"):
        v.mul_(2)


def test_version_counter_and_base_are_shared_with_views() -> None:
    x = dt.distribute(torch.randn(4), TP2)
    v = x[1:]
    assert x._version == v._version == 0
    v.add_(1)
    assert x._version == v._version == 1
    assert v._base is x and v._is_view()


def test_in_place_ops_that_torch_refuses_raise_torchs_message() -> None:
    x = dt.distribute(torch.arange(6), TP2)
    for op, words in (
        (lambda x: x.mul_(0.5), "can't be cast"),
        (lambda x: x.view(4), "is invalid for input of size 6"),
        (lambda x: x.add_(torch.zeros_like(x)[1:]), "[56]"),
        (lambda x: x.reshape(2, 3).t().view(-1), "view size is not compatible"),
    ):
        plain = torch.arange(6)
        for t in (plain, x):
            with pytest.raises(RuntimeError, match=words):
                op(t)
    assert torch.equal(x.full_tensor(), torch.arange(6))


def test_deepcopy_copies_shards_and_keeps_aliases_and_pickle_is_refused() -> None:
    model = torch.nn.Linear(4, 6)
    model.weight = torch.nn.Parameter(dt.distribute(model.weight.detach(), TP2, tp=dt.Row()))
    model.bias = torch.nn.Parameter(dt.distribute(model.bias.detach(), TP2, tp=dt.Row()))
    model(dt.distribute(torch.randn(2, 4), TP2)).sum().backward()
    before = model.weight.detach().clone()
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, torch.nn.Parameter) and isinstance(twin.weight, dt.DTensor)
    assert str(twin.weight.spec) == "f32[6@tp,4]" and twin.weight.requires_grad
    with torch.no_grad():
        model.weight.zero_()
        assert model.weight.grad is not None and twin.weight.grad is not None
        model.weight.grad.zero_()
    assert torch.equal(twin.weight, before) and bool(twin.weight.grad.ne(0).any())
    base = dt.distribute(torch.randn(4), TP2)
    x, v = copy.deepcopy((base, base[1:]))
    x.zero_()
    assert v.tolist() == [0, 0, 0] and bool(base.ne(0).all())
    with pytest.raises(TypeError, match=r"cannot be pickled: f32\[4\](.|\n)*fix: x.full_tensor"):
        import pickle

        pickle.dumps(base)
