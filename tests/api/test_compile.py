"""`dt.compile`: functions of DTensors and parallelized modules give the results of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtensor as dt
from tests.models import batch
from tests.training import SIX, make_model

TP2 = dt.Mesh(tp=2)
TP3 = dt.Mesh(tp=3)


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-6)


# -- functions of tensors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.softmax(0),
        lambda x: x.sum(-1, keepdim=True),
        lambda x: x.argmax(-1),
        lambda x: F.layer_norm(x, (x.shape[1],)),
        lambda x: x @ x.t(),
        lambda x: (x - x.mean(0)).square().sum(0).sqrt(),
        lambda x: torch.cat([x, x], 0),
        lambda x: x.transpose(0, 1).contiguous().view(-1),
    ],
)
@pytest.mark.parametrize("placement", [dt.Row(), dt.Column(), dt.Replicate()], ids=str)
def test_compiled_function_of_one_dtensor_matches_torch(
    fn: Callable[[Tensor], Tensor], placement: dt.Placement
) -> None:
    """7 x 5 over 3 ranks: all shards have different shapes."""
    x = torch.randn(7, 5)
    close(dt.compile(fn, TP3)(dt.distribute(x, TP3, tp=placement)), fn(x))


def test_compiled_matmul_on_two_axes_matches_torch() -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    x, w = torch.randn(6, 8), torch.randn(8, 10)
    f = dt.compile(lambda a, b: (a @ b).softmax(-1), mesh, out=dict(dp=dt.Row()))
    y = f(dt.distribute(x, mesh, dp=dt.Row(), tp=dt.Column()), dt.distribute(w, mesh, tp=dt.Row()))
    assert str(y.spec) == "f32[6@dp,10]"
    close(y, (x @ w).softmax(-1))


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "spec"),
    [
        (None, "f32[8,12]"),
        (dict(tp=dt.Replicate()), "f32[8,12]"),
        (dict(tp=dt.Row()), "f32[8@tp,12]"),
        (dict(tp=dt.Column(blocks=3)), "f32[8,3*4@tp]"),
        (dict(tp=dt.Partial("sum")), "f32[8,12]{sum@tp}"),
        ([dict(tp=dt.Column())], "f32[8,12@tp]"),
    ],
)
def test_out_placements_are_applied_to_results(out: Any, spec: str) -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 12)
    f = dt.compile(lambda a, b: a @ b, TP2, out=out)
    y = f(dt.distribute(x, TP2, tp=dt.Column()), dt.distribute(w, TP2, tp=dt.Row()))
    assert str(y.spec) == spec
    close(y, x @ w)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (dict(dp=dt.Row()), "has no axis 'dp'"),
        (dict(tp=1), "tp=1, which is not a placement"),
        ([dict(tp=dt.Row())] * 2, "of 2 results, the function returns 1"),
        (dict(tp=dt.Shard(3)), "does not fit result 0"),
    ],
)
def test_out_placements_that_do_not_fit_raise_planning_error(out: Any, message: str) -> None:
    with pytest.raises(dt.PlanningError, match=message):
        dt.compile(lambda a: a * 2, TP2, out=out)(torch.randn(4, 4))


def test_out_placements_follow_structure_of_result() -> None:
    def fn(a: Any) -> dict[str, Any]:
        return {"double": a * 2, "name": "n", "both": (a + 1, [a.exp(), a.sum()])}

    out = {"double": dict(tp=dt.Row()), "both": (dict(tp=dt.Column()), [{}, None])}
    found = dt.compile(fn, TP2, out=out)(torch.randn(4, 6))
    specs = [found["double"], found["both"][0], *found["both"][1]]
    assert [str(t.spec) for t in specs] == ["f32[4@tp,6]", "f32[4,6@tp]", "f32[4,6]", "f32[]"]
    with pytest.raises(dt.PlanningError, match="out= names 'doubel'") as raised:
        dt.compile(fn, TP2, out={"doubel": dict(tp=dt.Row())})(torch.randn(4, 6))
    assert str(raised.value).endswith('fix: write "double"')


def test_compile_accepts_and_returns_pytrees_with_non_tensors() -> None:
    def fn(parts: Mapping[str, Any], scale: float, *, name: str) -> dict[str, Any]:
        total = parts["a"] + parts["b"][0] * scale
        return {"total": total, "both": (total, parts["b"][1]), "name": name, "rows": len(total)}

    x, y, z = torch.randn(3, 2), torch.randn(3, 2), torch.randn(2)
    parts = {"a": dt.distribute(x, TP2, tp=dt.Row()), "b": [y, z]}
    found = dt.compile(fn, TP2)(parts, 2.0, name="n")
    assert (found["name"], found["rows"], set(found)) == ("n", 3, {"total", "both", "name", "rows"})
    close(found["total"], x + 2 * y)
    assert isinstance(found["both"], tuple)
    close(found["both"][0], x + 2 * y)
    close(found["both"][1], z)


def test_compiled_function_returns_argument_and_constant_unchanged() -> None:
    x = torch.randn(3)
    same, ones = dt.compile(lambda a: (a, torch.ones(2)), TP2)(dt.distribute(x, TP2, tp=dt.Row()))
    close(same, x)
    close(ones, torch.ones(2))


def test_compiled_result_is_argument_of_next_compiled_function() -> None:
    x = torch.randn(6, 4)
    first = dt.compile(lambda a: a.exp(), TP2, out=dict(tp=dt.Row()))
    second = dt.compile(lambda a: a.sum(0), TP2)
    with dt.launch(TP2):
        close(second(first(x)), x.exp().sum(0))


# -- calls -----------------------------------------------------------------------------------------


def test_compile_captures_new_shapes_and_reuses_plans_of_old_ones() -> None:
    f = dt.compile(lambda a, n: a * n, TP2)
    for shape, n, captures in (((2,), 1, 1), ((3,), 1, 2), ((2,), 1, 2), ((2,), 3, 3)):
        x = torch.randn(shape)
        close(f(x, n), x * n)
        assert len(f.plans) == captures
    f(dt.distribute(torch.randn(2), TP2, tp=dt.Row()), 1)
    assert len(f.plans) == 4


@pytest.mark.default("tp2_pp2")
@pytest.mark.parametrize("placed", ["single", "tp2_pp2", "dp2_tp2"])
def test_compiled_model_forward_matches_torch(placed: str) -> None:
    where = SIX[placed]
    plain = make_model()
    model = dt.parallelize(make_model(), where.mesh, where.pins, stages=where.stages)
    tokens, _ = batch()
    with dt.launch(where.mesh):
        close(dt.compile(lambda m, t: m(t), where.mesh)(model, tokens), plain(tokens))
        close(dt.compile(model, where.mesh)(tokens), plain(tokens))


def test_compiled_model_follows_train_and_eval_mode() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.inner = torch.nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w * (2 if self.inner.training else 1)

    model = dt.parallelize(Scaled(), TP2)
    f = dt.compile(lambda m, x: m(x), TP2)
    x = torch.randn(3)
    close(f(model, x), 2 * x)
    close(f(model.eval(), x), x)
    close(f(model.train(), x), 2 * x)


# -- gradients -------------------------------------------------------------------------------------


def _sum(found: Any) -> Any:
    return found.sum() if isinstance(found, Tensor) else sum(x.sum() for x in found)


DIFFERENTIATED: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "a product": (lambda x, w: (x @ w).relu(), _sum),
    "two results": (lambda x, w: (x @ w, x.square().sum()), _sum),
    "one result of two": (lambda x, w: (x * x, x @ w), lambda found: found[0].sum()),
    "an operand that has none": (lambda x, w: x * 2, _sum),
    "a result without one": (lambda x, w: ((x @ w).sum(), x.argmax()), lambda found: found[0]),
    "the operand itself": (lambda x, w: (x, (x @ w).softmax(-1).square()), _sum),
    "a normed row": (lambda x, w: F.layer_norm(x @ w, (5,)).sin(), _sum),
}


@pytest.mark.parametrize("name", list(DIFFERENTIATED))
@pytest.mark.parametrize("placed", [{}, dict(tp=dt.Row()), dict(tp=dt.Column())], ids=str)
def test_gradients_through_compiled_function_match_torch(name: str, placed: dict[str, Any]) -> None:
    """Runs twice; each gradient has the placement of its operand and adds to that of an eager
    op."""
    fn, loss = DIFFERENTIATED[name]
    compiled = dt.compile(fn, TP3)
    for _ in range(2):
        plain = [torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)]
        ours = [dt.distribute(x.detach(), TP3, **placed).requires_grad_() for x in plain]
        with dt.implicit_redistribution("allow"):
            for given, run in ((plain, fn), (ours, compiled)):
                (loss(run(*given)) + given[0].sum()).backward()
        for x, due in zip(ours, plain, strict=True):
            if due.grad is None:
                assert x.grad is None
            else:
                close(x.grad, due.grad)
                assert x.grad.spec == x.spec


def test_compiled_function_gradient_limits_raise_errors_as_torch() -> None:
    def leaf() -> Any:
        return dt.distribute(torch.ones(3), TP2).requires_grad_()

    noise, factor, x = dt.compile(torch.rand_like, TP2), torch.ones(3), leaf()
    f = dt.compile(lambda x: (x * factor).square().sum(), TP2)
    with torch.no_grad():
        assert not f(x).requires_grad
    dropped = dt.compile(lambda x: F.dropout(x, 0.5), TP2)
    with pytest.raises(
        dt.PlanningError, match="(?s)draws random numbers.*fix: call it on x.detach"
    ):
        dropped(x)
    assert not noise(x).requires_grad
    module = torch.nn.Linear(3, 3)
    model = dt.parallelize(module, TP2)
    with pytest.raises(dt.PlanningError, match="reads weight, a tensor of a module, and is called"):
        dt.compile(lambda m, x: m(x), TP2)(model, x)
    y = f(x)
    factor.add_(1)
    with pytest.raises(RuntimeError, match="closes over has changed"):
        y.backward()
    y = f(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with pytest.raises(
        dt.PlanningError, match="(?s)create_graph=True asks .*test_compile.py:.*fix: call lambda w"
    ):
        f(x).backward(create_graph=True)


# -- planning without running ----------------------------------------------------------------------


def test_compile_plan_starts_no_launch_and_accepts_meta_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a session was made")

    monkeypatch.setattr("dtensor.api.eager.compiled.session_for", refuse)
    monkeypatch.setattr("dtensor.api.step.training.session_for", refuse)
    f = dt.compile(lambda a, b: a @ b, TP2)
    specs = dt.spec("f32[8,16@tp]", TP2), dt.spec("f32[16@tp,4]", TP2)
    assert [c.key for c in f.plan(*specs).collectives] == ["all_reduce@tp"]
    huge = torch.empty(1 << 20, 1 << 20, device="meta")
    assert f.plan(huge, huge).collectives == ()
    where = SIX["tp2_pp2"]
    model = dt.parallelize(make_model(), where.mesh, where.pins, stages=where.stages)
    tokens = torch.empty(8, 16, dtype=torch.int64, device="meta")
    plan = dt.compile(model, where.mesh).plan(tokens)
    assert "transfer@pp" in {c.key for c in plan.collectives}
    with pytest.raises(AssertionError, match="a session was made"):
        f(torch.ones(2, 2), torch.ones(2, 2))


# -- what is refused -------------------------------------------------------------------------------


def test_compile_rejects_bad_arguments() -> None:
    x = torch.randn(4, 4)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: dt.compile(lambda a: a, TP2, search="x"), "search='x'"),
        (lambda: dt.compile(lambda a: a + (1 if a.sum() > 0 else 0), TP2)(x), "truth of a tensor"),
        (lambda: dt.compile(lambda m, t: m(t), TP2)(make_model(), batch()[0]), "not parallelized"),
        (lambda: dt.compile(lambda a: a, TP3)(dt.distribute(x, TP2)), r"a is on mesh\(tp=2\)"),
        (
            lambda: dt.compile(lambda m, a: m(a), TP3)(dt.parallelize(make_model(), TP2), x),
            r"parallelized on mesh\(tp=2\), the program is for mesh\(tp=3\)",
        ),
    ]
    for call, message in cases:
        with pytest.raises(dt.PlanningError, match=message):
            call()


@pytest.mark.ray
def test_compiled_function_on_ray_is_bitwise_equal_to_in_process(ray_session: None) -> None:
    x, w = torch.randn(7, 5), torch.randn(5, 4)
    f = dt.compile(lambda a, b: (a @ b).softmax(0), TP2, out=dict(tp=dt.Row()))
    with dt.launch(TP2):
        expected = f(dt.distribute(x, TP2, tp=dt.Column()), w).local_tensors()
    with dt.launch(TP2, backend="ray") as session:
        argument = dt.distribute(x, TP2, tp=dt.Column())
        y = f(argument, w)
        before = session.cluster.calls
        y = f(argument, w)
        assert session.cluster.calls - before == 2  # the program, which drops the garbage y
        for found, wanted in zip(y.local_tensors(), expected, strict=True):
            assert torch.equal(found, wanted)
        assert torch.equal(y.redistribute(tp=dt.Column()).full_tensor(), y.full_tensor())
