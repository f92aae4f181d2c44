"""The bound on what the order of reduction can change: its text, and that it holds."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

import dtensor as dt
from dtensor.sharding.plan.text.rounding import reordered
from tests.models import MLP


def loss_fn(model: MLP, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def step_of(mesh: dt.Mesh, microbatches: int = 1) -> dt.TrainStep:
    torch.manual_seed(0)
    model = dt.parallelize(
        MLP(bias=False),
        mesh,
        {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = dt.GPipe(microbatches=microbatches)
    inputs = dict(dp=dt.Row())
    return dt.train_step(model, loss_fn, optimizer, inputs=inputs, schedule=schedule)


def test_text() -> None:
    plan = step_of(dt.Mesh(dp=2, tp=2), microbatches=3).plan(torch.empty(12, 16, device="meta"))
    assert_expected_inline(
        plan.rounding(),
        """\
rounding of loss_fn: placements reorder these sums
  64 terms over tp   f32  <= 7.5e-06 of the sum of magnitudes  mm_reduced
  192 terms over mb  f32  <= 2.3e-05 of the sum of magnitudes  mean_total
  12 terms over mb   f32  <= 1.3e-06 of the sum of magnitudes  grad_up_weight_total, grad_down_weight_total
  192 terms over dp  f32  <= 2.3e-05 of the sum of magnitudes  mean_total_reduced
  12 terms over dp   f32  <= 1.3e-06 of the sum of magnitudes  grad_up_weight_total_reduced, grad_down_weight_total_reduced""",  # noqa: E501
    )


def test_what_is_not_taken_apart_is_not_listed() -> None:
    plan = step_of(dt.Mesh(dp=1, tp=1)).plan(torch.empty(12, 16, device="meta"))
    expected = "rounding of loss_fn: no sum is taken apart, so no order changes"
    assert plan.rounding() == expected


def test_terms_are_counted_through_views_and_additions() -> None:
    mesh = dt.Mesh(tp=2)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a @ b) * 2 + (a @ b).sum(0)).view(-1)

    plan = dt.compile(fn, mesh).plan(dt.spec("f32[6,8@tp]", mesh), dt.spec("f32[8@tp,10]", mesh))
    assert [one.terms for one in reordered(plan)] == [8 + 6 * 8]


def test_the_exponentials_of_a_softmax_are_a_sum() -> None:
    """Their bound holds against the vocabulary in one piece; of logits far apart and close."""
    mesh = dt.Mesh(tp=4)

    def stats(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.dt.ce_stats(x, y, -100)

    fn, y = dt.compile(stats, mesh), torch.zeros(50, dtype=torch.int64)
    plan = fn.plan(dt.spec("f32[50,1000@tp]", mesh), dt.spec("i64[50]", mesh))
    (found,) = reordered(plan)
    assert (found.terms, found.scaled) == (1000, 4)
    assert "1000 terms over tp  f32  <= 1.2e-04 of the sum of magnitudes" in plan.rounding()
    for scale in (0.1, 3, 30):
        x = torch.randn(50, 1000) * scale
        given = dt.distribute(x, mesh, tp=dt.Column()), dt.distribute(y, mesh)
        split, whole = fn(*given).full_tensor(), stats(x, y)
        assert torch.equal(split[:, 0], whole[:, 0]) and torch.equal(split[:, 2], whole[:, 2])
        assert ((split - whole)[:, 1].abs() <= found.bound * whole[:, 1]).all()


def test_norms_of_layers_count_the_batch() -> None:
    """The gradient of a norm's weight is one result of several: its own terms count."""
    model = dt.parallelize(torch.nn.LayerNorm(8), dt.Mesh(dp=2), {})
    step = dt.train_step(
        model,
        lambda m, x: m(x).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        inputs=dict(dp=dt.Row()),
    )
    found = {one.name: one.terms for one in reordered(step.plan(torch.empty(6, 8)))}
    assert {n: t for n, t in found.items() if n.startswith("grad")}
    assert all(terms == 6 for name, terms in found.items() if name.startswith("grad"))


def test_the_bound_holds() -> None:
    """A matrix product over a split factor, against the same in one piece and in float64."""
    mesh = dt.Mesh(tp=4)
    torch.manual_seed(0)
    a, b = torch.randn(16, 512), torch.randn(512, 16)
    fn = dt.compile(lambda a, b: a @ b, mesh)
    split = (dt.distribute(a, mesh, tp=dt.Column()), dt.distribute(b, mesh, tp=dt.Row()))
    (one,) = reordered(fn.plan(*split))
    assert (one.terms, one.axis) == (512, "tp")
    difference = (fn(*split).full_tensor() - a @ b).abs()
    assert bool((difference <= one.bound * (a.abs() @ b.abs())).all())
    assert float(difference.max()) > 0


def test_parameters_that_are_gathered_are_no_sums() -> None:
    """At ZeRO's level 1 the updated slices are gathered in place: the step has no results."""
    model = dt.parallelize(MLP(bias=False), dt.Mesh(dp=2), {}, zero={"dp": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, loss_fn, optimizer, inputs=dict(dp=dt.Row()))
    found = reordered(step.plan(torch.empty(12, 16, device="meta")))
    assert [(one.name, one.axis, one.terms) for one in found] == [
        ("mean_reduced", "dp", 192),
        ("grad_up_weight_scattered", "dp", 12),
        ("grad_down_weight_scattered", "dp", 12),
    ]
