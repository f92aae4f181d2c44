"""Eager ops on DTensors: values and gradients match plain torch and are bitwise equal to
dt.compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor.api.eager import execute_op
from dtensor.sharding.plan.steps import Compute
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
    "broadcast": (lambda a, b: a * b, [(5, 6), (6,)]),
    "mm": (lambda a, b: a @ b, [(5, 6), (6, 4)]),
    "linear": (lambda a, w, b: F.linear(a, w, b), [(2, 5, 6), (4, 6), (4,)]),
    "softmax": (lambda a: a.softmax(-1), [(5, 6)]),
    "mean": (lambda a: a.mean(1, keepdim=True) * a.mean(), [(5, 6)]),
    "var": (lambda a: a.var(0), [(5, 6)]),
    "max": (lambda a: a.max(1).values, [(5, 6)]),
    "heads": (lambda a: a.view(4, 2, 3).transpose(0, 1).exp(), [(4, 6)]),
    "select": (lambda a: a[2] * a[:, 1].sum(), [(5, 6)]),
    "cat": (lambda a, b: torch.cat([a, b], 0), [(5, 6), (3, 6)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [(5, 6), (5, 6)]),
    "chunk": (lambda a: a.chunk(3, -1)[1] * a.split([1, 2, 3], 1)[1], [(5, 6)]),
    "unbind": (lambda a: a.unbind(0)[1] * a.unbind(0)[3], [(5, 6)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (6,), w, b), [(5, 6), (6,), (6,)]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [(5, 6), (5, 6)]),
    "cumsum": (lambda a: a.cumsum(1), [(5, 6)]),
    "attention of groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)],
    ),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        [(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4), (2, 1, 5, 5)],
    ),
    "expand": (lambda a: a[:, None].expand(5, 3, 6) * 2, [(5, 6)]),
    "pad": (lambda a: F.pad(a, (1, 2)), [(5, 6)]),
    "in place": (lambda a: (a * 1).mul_(2).add_(1).relu_(), [(5, 6)]),
    "written": (written, [(5, 6), (6,)]),
    "conv": (lambda a, w: F.conv1d(a, w, padding=1), [(2, 4, 6), (3, 4, 3)]),
    "sort": (lambda a: a.sort(1).values, [(5, 6)]),
    "bools": (lambda a: a[[True, False, False, True, True]] * a[:, [0, 2]].sum(), [(5, 6)]),
    "powers": (lambda a: torch.vander(a, 3) * torch.combinations(a).sum(), [(5,)]),
    "diagonal": (lambda a: a.diagonal() * 2, [(5, 6)]),
}


@pytest.mark.default("broadcast-mesh(tp=3)")
@pytest.mark.sample(*(f"{name}-{mesh}" for name in FUNCTIONS for mesh in MESHES[1:]))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_eager_ops_match_torch_values_and_gradients(name: str, mesh: dt.Mesh) -> None:
    fn, shapes = FUNCTIONS[name]
    for choice in sampled(mesh, shapes, 2):
        plain = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        spread = [dt.distribute(x, mesh, **p) for x, p in zip(plain, choice, strict=True)]
        assert all(x.is_leaf and x.requires_grad for x in spread)
        same(gradients(fn, spread), gradients(fn, plain))


@pytest.mark.default("mesh(tp=3)")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_eager_embedding_and_cross_entropy_with_ids_match_torch(mesh: dt.Mesh) -> None:
    """Ids have no gradient."""
    values = torch.randn(7, 10, dtype=torch.float64).requires_grad_()
    targets, rows = torch.randint(0, 10, (7,)), torch.randint(0, 7, (3, 5))
    targets[2] = -100
    functions: list[tuple[Callable[..., Any], torch.Tensor]] = [
        (lambda ids, x: F.cross_entropy(x, ids), targets),
        (lambda ids, x: F.cross_entropy(x, ids, reduction="sum"), targets),
        (lambda ids, x: F.cross_entropy(x, ids, reduction="none"), targets),
        (F.embedding, rows),
    ]
    for fn, ids in functions:
        for p in ({}, dict(tp=dt.Column()), dict(tp=dt.Row()), dict(tp=dt.Partial())):
            x = dt.distribute(values, mesh, **p)
            got = gradients(partial(fn, dt.distribute(ids, mesh)), [x])
            same(got, gradients(partial(fn, ids), [values]))


def test_eager_ops_mix_dtensors_with_python_and_torch_scalars() -> None:
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


def test_eager_op_with_changing_scalar_is_planned_once() -> None:
    """One plan and one program serve all values of a learning rate or a bias correction."""
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


def test_eager_ops_distinguish_scalars_that_compare_equal() -> None:
    """For example 1, 1.0 and True, or 0.0 and -0.0; nan differs from itself."""
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


def test_like_factories_use_placement_of_their_operand() -> None:
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


def test_reading_dtensor_values_as_python_or_numpy_matches_torch() -> None:
    x = dt.distribute(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dt.Mesh(tp=2), tp=dt.Row())
    assert x.sum().item() == float(x.sum()) == 10.0 and int(x.max()) == 4
    assert x.tolist() == [[1, 2], [3, 4]] and x.numpy().tolist() == x.tolist()
    assert bool((x > 0).all()) and not (x > 1).all()
    assert torch.equal(x, x * 1) and not torch.equal(x, x + 1) and torch.allclose(x, x + 1e-9)
    assert len(x) == 2 and [row.tolist() for row in x] == [[1, 2], [3, 4]]
    assert 3.0 in x


@torch.inference_mode()
def test_eager_ops_in_inference_mode_match_torch() -> None:
    a, w = torch.randn(2, 5, 6), torch.randn(4, 6)
    x, y = dt.distribute(a, dt.Mesh(tp=2)), dt.distribute(w, dt.Mesh(tp=2), tp=dt.Row())
    same(
        F.linear(x, y).reshape(10, 4).softmax(-1),
        F.linear(a, w).reshape(10, 4).softmax(-1),
        atol=1e-6,
    )


def test_eager_op_writes_result_to_out_argument() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    x, y = (dt.distribute(t, dt.Mesh(tp=2), tp=dt.Row()) for t in (a, b))
    z = torch.empty_like(x)
    assert torch.add(x, y, out=z) is z
    same(z, a + b, atol=1e-6)


WRONG_OUT: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "add": (lambda x, out: torch.add(x, 1, out=out), torch.int64),
    "exp": (lambda x, out: torch.exp(x, out=out), torch.int64),
    "mm": (lambda x, out: torch.mm(x, x, out=out), torch.float64),
    "cat": (lambda x, out: torch.cat([x[:1], x[1:]], out=out), torch.int64),
    "argmax": (lambda x, out: torch.argmax(x, 0, keepdim=True, out=out), torch.float32),
    "a mask": (lambda x, out: out.__setitem__(x.to(torch.uint8), 7), torch.float32),
}


@pytest.mark.parametrize("name", WRONG_OUT)
def test_out_argument_that_torch_cannot_cast_to_is_refused(name: str) -> None:
    """The error is torch's and may mention fake tensors."""
    call, dtype = WRONG_OUT[name]
    x, out = torch.ones(2, 2), torch.zeros(1 if name == "argmax" else 2, 2, dtype=dtype)
    with pytest.raises((RuntimeError, TypeError)):
        call(x, out)
    ours = dt.distribute(out, dt.Mesh(tp=2))
    with pytest.raises(RuntimeError, match="cast|Expected out tensor|only supports boolean masks"):
        call(dt.distribute(x, dt.Mesh(tp=2)), ours)
    same(ours, torch.zeros_like(out))


def test_out_argument_of_other_dtype_is_cast_and_of_other_shape_is_refused() -> None:
    a, mesh = torch.full((3, 2), 1.5), dt.Mesh(tp=2)
    for out in (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)):
        ours = dt.distribute(out, mesh)
        torch.sum(dt.distribute(a, mesh), 0, out=ours)
        same(ours, torch.sum(a, 0, out=out))  # the sum of integers, where out has them
    with pytest.raises(dt.PlanningError, match="out= has another shape than the result"):
        torch.add(dt.distribute(a[0], mesh), 1, out=dt.distribute(a, mesh))


# -- beside dt.compile: the same ops, planned by the same planner ----------------------------------

SINGLE = ("broadcast", "mm", "softmax", "var", "layer_norm", "attention of groups", "cat", "cumsum")


@pytest.mark.default("broadcast-mesh(tp=2)")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_each_eager_op_is_bitwise_equal_to_compile(name: str, mesh: dt.Mesh) -> None:
    fn, shapes = FUNCTIONS[name]
    for choice in sampled(mesh, shapes, 6):
        inputs = _spread(mesh, shapes, choice)
        eager = fn(*inputs)
        compiled = dt.compile(fn, mesh, out=eager.spec.sharding)
        assert torch.equal(eager.full_tensor(), compiled(*inputs).full_tensor()), choice


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (y.view(2, 5, 4, 3).transpose(1, 2) for y in F.linear(x, w).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 12)


PROGRAMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "mlp": (
        lambda x, up, b, down: F.linear(F.gelu(F.linear(x, up, b)), down),
        [(5, 6), (12, 6), (12,), (6, 12)],
    ),
    "scaled": (lambda x, w: (x @ w) * 3.3 / 7, [(7, 6), (6, 5)]),
    "attention": (attention, [(2, 5, 12), (36, 12)]),
    "views": (lambda x: x.view(4, 2, 3).transpose(0, 1).reshape(2, 12)[1:] + x[3, 0], [(4, 6)]),
    "variance": (lambda x: (x - x.mean(0)) / x.var(0).add(1e-5).sqrt(), [(7, 6)]),
}


@pytest.mark.default("variance")
@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_programs_are_bitwise_equal_to_compile_if_both_run_same_ops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled plan sees later ops and may therefore send less, or later."""
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
    """Return the ops and collectives of the plans, without ops that only rearrange."""
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


def test_compiled_functions_and_eager_ops_accept_each_others_results() -> None:
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


def test_eager_program_is_reused_across_lines_and_launches() -> None:
    x = torch.randn(4, 4)
    for _ in range(2):
        with dt.launch(dt.Mesh(tp=2)) as session:
            d = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
            a = d.relu()
            loaded = session.cluster._next_handle  # type: ignore[attr-defined]
            b = d.relu()
            assert session.cluster._next_handle == loaded  # type: ignore[attr-defined]
            assert torch.equal(a, b)
