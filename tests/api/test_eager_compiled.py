"""Eager DTensors and dt.compile give the same bits: the same ops, planned by the same planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor.api.eager import execute_op
from dtensor.sharding.plan.steps import Compute
from tests.api.eager import MESHES, sampled

Shapes = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (y.view(2, 5, 4, 3).transpose(1, 2) for y in F.linear(x, w).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 12)


OPS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "mm": (lambda x, w: x @ w, [(5, 6), (6, 4)]),
    "add": (lambda x, y: x + y, [(5, 6), (6,)]),
    "scale": (lambda x: x * 3.3, [(5, 6)]),
    "gelu": (lambda x: F.gelu(x), [(5, 6)]),
    "softmax": (lambda x: x.softmax(-1), [(5, 6)]),
    "sum": (lambda x: x.sum(0), [(5, 6)]),
    "mean": (lambda x: x.mean(), [(5, 6)]),
    "var": (lambda x: x.var(1), [(5, 6)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(5, 6), (6,), (6,)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 5, 4)] * 3,
    ),
    "cat": (lambda x, y: torch.cat([x, y]), [(5, 6), (3, 6)]),
    "addcdiv": (lambda x, y: torch.addcdiv(x, y, y, value=0.7), [(5, 6), (5, 6)]),
    "logsumexp": (lambda x: x.logsumexp(1), [(5, 6)]),
    "cumsum": (lambda x: x.cumsum(0), [(5, 6)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_each_op_is_bitwise(name: str, mesh: dt.Mesh) -> None:
    fn, shapes = OPS[name]
    for choice in sampled(mesh, shapes, 6):
        inputs = _spread(mesh, shapes, choice)
        eager = fn(*inputs)
        compiled = dt.compile(fn, mesh, out=eager.spec.sharding)
        assert torch.equal(eager.full_tensor(), compiled(*inputs).full_tensor()), choice


PROGRAMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "mlp": (
        lambda x, up, b, down: F.linear(F.gelu(F.linear(x, up, b)), down),
        [(5, 6), (12, 6), (12,), (6, 12)],
    ),
    "residual": (lambda x, w: (x + x @ w) * 3.3, [(7, 6), (6, 6)]),
    "scaled": (lambda x, w: (x @ w) * 3.3 / 7, [(7, 6), (6, 5)]),
    "norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b).softmax(-1), [(5, 6), (6,), (6,)]),
    "attention": (attention, [(2, 5, 12), (36, 12)]),
    "views": (lambda x: x.view(4, 2, 3).transpose(0, 1).reshape(2, 12)[1:] + x[3, 0], [(4, 6)]),
    "variance": (lambda x: (x - x.mean(0)) / x.var(0).add(1e-5).sqrt(), [(7, 6)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_bitwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both run the same ops. A compiled plan looks ahead: it may send less, and later."""
    fn, shapes = PROGRAMS[name]
    plans: list[dt.Plan] = []
    execute = execute_op._run

    def record(session: Any, entry: Any, *rest: Any) -> Any:
        plans.append(entry.planned.plan)
        return execute(session, entry, *rest)

    monkeypatch.setattr(execute_op, "_run", record)
    compared = 0
    for mesh in MESHES:
        for choice in sampled(mesh, shapes, 6):
            inputs = _spread(mesh, shapes, choice)
            plans.clear()
            eager = fn(*inputs)
            ran = _work(plans)
            compiled = dt.compile(fn, mesh, out=eager.spec.sharding)
            got, wanted = eager.full_tensor(), compiled(*inputs).full_tensor()
            torch.testing.assert_close(got, wanted)
            if ran == _work([compiled.plan(*inputs)]):
                compared += 1
                assert torch.equal(got, wanted), choice
    assert compared >= 5


def _work(plans: Sequence[dt.Plan]) -> Counter[str]:
    """The ops and collectives of plans, without what only rearranges."""
    found: Counter[str] = Counter()
    for plan in plans:
        found.update(c.key for c in plan.collectives)
        found.update(s.op.call.name for s in plan.steps if isinstance(s, Compute))
    for name in ("reshape", "permute", "expand", "slice.Tensor", "select.int", "split"):
        found = Counter({k: n for k, n in found.items() if not k.startswith(f"aten.{name}")})
    return found


def _spread(mesh: dt.Mesh, shapes: Shapes, choice: tuple[Any, ...]) -> list[dt.DTensor]:
    plain = [torch.randn(s) for s in shapes]
    return [dt.distribute(x, mesh, **p) for x, p in zip(plain, choice, strict=True)]


@pytest.mark.slow
def test_each_takes_what_the_other_made() -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    x = dt.distribute(torch.randn(8, 6), mesh, dp=dt.Row(), tp=dt.Column())
    double = dt.compile(lambda x: x * 2, mesh)
    y = double(x[2:6].t())  # a view
    z = y + 1
    z.requires_grad_()
    assert torch.equal(double(z * 1).full_tensor(), z.detach().full_tensor() * 2)
    x.zero_()
    assert bool((y.full_tensor() != 0).all())
    assert not double(x).full_tensor().any()


def test_one_program_serves_many_lines_and_launches() -> None:
    x = torch.randn(4, 4)
    for _ in range(2):
        with dt.launch(dt.Mesh(tp=2)) as session:
            d = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
            a = d.relu()
            loaded = session.cluster._next_handle  # type: ignore[attr-defined]
            b = d.relu()
            assert session.cluster._next_handle == loaded  # type: ignore[attr-defined]
            assert torch.equal(a, b)
