"""Tests the text of plans, their explanations, hints, totals and rounding reports.

Whole plans are compared with tests/golden. After an intended change, rewrite the files with
`python -m tests.sharding.test_plan_text` and read the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import dtensor as dt
from dtensor.api.model.stating.patterns import matches
from dtensor.errors import PlanningError
from dtensor.sharding.plan.hints import Hint
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.rounding import reordered
from dtensor.sharding.plan.text.words import collapse, flop_text, seconds_text, size_text
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from tests.models import GPT, MLP, batch, loss_fn
from tests.plans import MEGATRON, MLP_PINS, Stated, mean_square, plan_model
from tests.training import TWO_STAGES, Placed, Run

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def mlp(ranks: int = 2, microbatches: int = 1) -> Plan:
    return plan_model(
        MLP(bias=False), mean_square, (torch.randn(8, 16),), Mesh(tp=ranks), MLP_PINS,
        microbatches=microbatches, name="mlp",
    )  # fmt: skip


@cache
def gpt() -> Plan:
    return plan_model(
        GPT(layers=2), loss_fn, batch(), Mesh(pp=2, dp=2, tp=2), MEGATRON,
        inputs=dict(dp=Shard(0)), stages=TWO_STAGES, microbatches=2, clip_grad_norm=1.0, name="gpt",
    )  # fmt: skip


@cache
def folded(layers: int, **options: Any) -> Plan:
    mesh = Mesh(dp=2, tp=2)
    return plan_model(
        GPT(layers=layers), loss_fn, batch(), mesh, MEGATRON, inputs=dict(dp=Shard(0)), name="gpt",
        **options,
    )  # fmt: skip


WHOLE: dict[str, Callable[[], Plan]] = {
    "gpt": gpt,
    "mlp_uneven": lambda: mlp(ranks=3),
    "gpt_folded": lambda: folded(12),
    "gpt_folded_microbatches": lambda: folded(4, microbatches=2, clip_grad_norm=1.0),
}


@pytest.mark.parametrize("name", WHOLE)
def test_plan_texts_equal_golden_files(name: str) -> None:
    assert str(WHOLE[name]()) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_plan_text_explains_axis_that_splits_nothing() -> None:
    model, x = MLP(), torch.randn(8, 16)
    text = str(plan_model(model, mean_square, (x,), Mesh(dp=2, tp=1, ep=2), {}))
    assert "axis ep    splits nothing: no pin opens a factor" in text
    assert "axis tp    one rank" in text


# -- words -----------------------------------------------------------------------------------------


def test_plan_text_formats_bytes_flop_and_seconds_with_units() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 2**21, 3 * 2**29, 2**41)] == [
        "0 B", "1023 B", "1.0 KiB", "2.0 MiB", "1.5 GiB", "2.0 TiB",
    ]  # fmt: skip
    assert [flop_text(n) for n in (512, 1000, 2 * 512 * 1024 * 2048)] == [
        "512 FLOP", "1.00 kFLOP", "2.15 GFLOP",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0.0, 2e-9, 1.25e-3, 90.0)] == [
        "0 s", "2.0 ns", "1.25 ms", "90.00 s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a.0.w", "b", "a.1.w"], ["a.{0..1}.w", "b"]),
        (["a.0.w", "a.2.w"], ["a.{0,2}.w"]),
        (["a.9.w", "a.10.w"], ["a.{9..10}.w"]),
        (["a.0.n1", "a.0.n2", "a.1.n1", "a.1.n2"], ["a.{0..1}.n{1..2}"]),
        (["a.0.n1", "a.1.n2"], ["a.0.n1", "a.1.n2"]),
    ],
)
def test_collapse_writes_repeated_layer_names_as_glob(names: list[str], text: list[str]) -> None:
    assert list(collapse(names)) == text
    for name in names:
        assert sum(matches(glob, name) for glob in text) == 1


def test_plan_collectives_and_memory_are_tuples_that_print_as_tables() -> None:
    plan, staged = mlp(), gpt().memory
    assert isinstance(plan.collectives, tuple) and plan.memory == plan.totals.stage_memory
    text = f"{plan.collectives}\n\n{plan.memory}\n\n{staged}\n\n{type(plan.collectives)()}"
    assert_expected_inline(
        text,
        """\
phase    key            name        dtype    source        stage  times  bytes_sent
forward  all_reduce@tp  mm_reduced  float32  models.py:28      0      1       512 B

memory per rank
  parameters      4.0 KiB
  gradients       4.0 KiB
  optimizer       8.0 KiB
  activations     4.0 KiB
  not_at_once    -2.5 KiB
  total          17.5 KiB

memory per rank   stage 0   stage 1
  parameters      9.6 KiB   8.7 KiB
  gradients       9.6 KiB   8.7 KiB
  optimizer      19.2 KiB  17.4 KiB
  activations    16.1 KiB  19.1 KiB
  total          54.5 KiB  54.0 KiB

no collectives""",
    )


# -- explain ---------------------------------------------------------------------------------------


def test_explain_pending_sum_names_cause_and_its_reduction() -> None:
    assert_expected_inline(
        mlp().explain("mm"),
        """\
mm: f32[8,16]{sum@tp}
  mm = mm(a, permute_1)    forward    models.py:28: return self.down(a)
  on tp: a pending sum: mm contracts factor k, which is split over 2 ranks; follows the pins, opened by *up.weight
  mm_reduced = all_reduce(mm, tp) from f32[8,16]{sum@tp} to f32[8,16], 512 B sent: pow_1 needs it    models.py:28""",
    )


def test_explain_parameter_names_its_pin_or_why_it_has_none() -> None:
    plan = plan_model(
        MLP(), mean_square, (torch.randn(8, 16),), Mesh(dp=2, tp=2), MLP_PINS,
        inputs=dict(dp=Shard(0)),
    )  # fmt: skip
    assert "on tp: Shard(0), pinned by *up.weight" in plan.explain("up.weight")
    assert "on tp: Shard(1), pinned by *down.weight" in plan.explain("down_weight")
    bias = plan.explain("up.bias")
    assert "on tp: Shard(0), no pin; chosen as cheapest" in bias
    assert "opened by *up.weight" in bias
    assert "on dp: Replicate(), no pin; no pin on the axis reaches it" in bias


def test_explain_gradient_names_its_reduction_and_update() -> None:
    plan = gpt()
    text = plan.explain("grad_blocks_0_mlp_up_weight")
    assert "on dp: a pending sum: mm contracts factor k" in text
    assert "on tp: factor m of mm is split over 2 ranks" in text
    assert "summed over microbatches into grad_blocks_0_mlp_up_weight_total" in text
    reduced = plan.explain("grad_blocks_0_mlp_up_weight_total_reduced")
    assert "read by the update of blocks.0.mlp.up.weight (AdamW)" in reduced
    assert "counted in grad_norm" in reduced


def test_explain_covers_every_value_and_suggests_near_names() -> None:
    plan = gpt()
    for name, spec in plan.value_specs().items():
        first, *more = plan.explain(name).splitlines()
        assert first == f"{name}: {spec}" and more
    with pytest.raises(PlanningError, match="no value 'mm_11'; near: mm_1"):
        mlp().explain("mm_11")


# -- memory and time -------------------------------------------------------------------------------


def test_plan_totals_count_flop_and_seconds_per_rank() -> None:
    whole, half, micro = (
        plan.totals.stages[0] for plan in (mlp(1), mlp(2), mlp(2, microbatches=4))
    )
    matmuls = 5  # two forward; one backward for up.weight, two for down
    assert whole.flops == matmuls * 2 * 8 * 16 * 64 == 2 * half.flops == 2 * micro.flops
    assert whole.communication_seconds == 0.0
    latency, num_bytes = 12e-6, 8 * 16 * 4  # an all_reduce of two ranks is one exchange
    assert half.communication_seconds == pytest.approx(latency + num_bytes / 147e9)
    assert micro.communication_seconds == pytest.approx(4 * latency + num_bytes / 147e9)
    vote = latency  # the commit point, which is no step of a plan
    cost = mlp(2).cost
    device = cost.compute_seconds + cost.communication_seconds
    assert device == pytest.approx(half.device_seconds + vote, rel=1e-3)


# -- hints -----------------------------------------------------------------------------------------


def plan_of(pins: dict[str, Stated], hints: bool = True) -> Plan:
    model = MLP()
    placed = dt.parallelize(model, dt.Mesh(tp=2), pins)
    step = dt.train_step(placed, mean_square, torch.optim.AdamW(model.parameters()))
    return step.plan(torch.zeros(512, 16), hints=hints)


def test_hint_proposes_cheaper_pin_for_second_column_layer() -> None:
    pins: dict[str, Stated] = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Row())}
    plan = plan_of(pins)
    (hint,) = plan.hints
    assert isinstance(hint, Hint)
    assert (hint.by, hint.stated, hint.opposite) == ("down.weight", dt.Row(), dt.Shard(1))
    other = plan_of({**pins, hint.by: dict(tp=hint.opposite)})
    assert hint.opposite_seconds == pytest.approx(other.cost.seconds)
    assert hint.opposite_bytes_sent == sum(c.bytes_sent * c.times for c in other.collectives)
    assert hint.seconds == pytest.approx(plan.cost.seconds)
    assert hint.bytes_sent == sum(c.bytes_sent * c.times for c in plan.collectives)
    assert not other.hints
    assert_expected_inline(
        "\n".join(str(plan).splitlines()[-2:]),
        """\
hint: "down.weight" with tp=Shard(1) would cost 1.12 ms, 32.0 KiB sent a step; tp=Shard(0) as stated
costs 1.24 ms, 128.0 KiB sent""",
    )
    assert "hint" not in str(plan_of(pins, hints=False))


@pytest.mark.parametrize("roles", [False, True])
def test_megatron_pins_produce_no_hint(roles: bool) -> None:
    named = {"*up": dict(tp=dt.ColumnParallel()), "*down": dict(tp=dt.RowParallel())}
    assert plan_of(named if roles else MLP_PINS).hints == ()  # type: ignore[arg-type]


def test_pattern_that_matches_all_layers_produces_one_hint() -> None:
    pins: dict[str, Stated] = {"*.down.weight": dict(tp=dt.Row()), **MEGATRON}
    run = Run.of(Placed(axes=dict(tp=2), pins=pins))
    hints = run.step.plan(*batch(), hints=True).hints
    assert [hint.by for hint in hints] == ["*.down.weight"]


# -- rounding --------------------------------------------------------------------------------------


def plan_with(
    microbatches: int = 1, module: torch.nn.Module | None = None, **stated: Any
) -> dt.Plan:
    axes = stated.pop("axes", dict(dp=2))
    placed = Placed(axes=axes, pins=MLP_PINS if "tp" in axes else {}, inputs=dict(dp=dt.Row()))
    given = dict(module=module or MLP(bias=False), loss=mean_square, clip=None)
    run = Run.of(placed, schedule=dt.GPipe(microbatches), **given, **stated)
    rows = 8 if module is not None else 16
    return run.step.plan(torch.empty(12, rows, device="meta"))


def test_rounding_report_lists_reordered_sums_with_bounds() -> None:
    plan = plan_with(3, axes=dict(dp=2, tp=2))
    assert_expected_inline(
        plan.rounding(),
        """\
rounding of mean_square: placements reorder these sums
  64 terms over tp   f32  <= 7.5e-06 of the sum of magnitudes  mm_reduced
  192 terms over mb  f32  <= 2.3e-05 of the sum of magnitudes  mean_total
  12 terms over mb   f32  <= 1.3e-06 of the sum of magnitudes  grad_up_weight_total, grad_down_weight_total
  192 terms over dp  f32  <= 2.3e-05 of the sum of magnitudes  mean_total_reduced
  12 terms over dp   f32  <= 1.3e-06 of the sum of magnitudes  grad_up_weight_total_reduced, grad_down_weight_total_reduced""",
    )


def test_rounding_report_is_empty_on_one_rank() -> None:
    expected = "rounding of mean_square: no sum is taken apart, so no order changes"
    assert plan_with(axes=dict(dp=1, tp=1)).rounding() == expected


def test_rounding_terms_are_counted_through_views_and_additions() -> None:
    mesh = dt.Mesh(tp=2)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a @ b) * 2 + (a @ b).sum(0)).view(-1)

    plan = dt.compile(fn, mesh).plan(dt.spec("f32[6,8@tp]", mesh), dt.spec("f32[8@tp,10]", mesh))
    assert [one.terms for one in reordered(plan)] == [8 + 6 * 8]


def test_rounding_bound_of_sharded_softmax_holds() -> None:
    """The reference is the unsharded vocabulary; covers logits that are far apart and close
    together."""
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


def test_rounding_of_layer_norm_weight_gradient_counts_batch_terms() -> None:
    """The gradient of the norm's weight is one of several results of its op; only its own terms
    count."""
    found = reordered(plan_with(module=torch.nn.LayerNorm(8)))
    assert {one.terms for one in found if one.name.startswith("grad")} == {12}


def test_rounding_bound_of_sharded_matmul_holds() -> None:
    """Compares a matrix product over a split factor with the unsharded product."""
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


def test_rounding_report_omits_gathered_parameters() -> None:
    """At ZeRO level 1 the updated slices are gathered in place, so the step has no results."""
    found = reordered(plan_with(zero={"dp": 1}))
    assert [(one.name, one.axis, one.terms) for one in found] == [
        ("mean_reduced", "dp", 192),
        ("grad_up_weight_scattered", "dp", 12),
        ("grad_down_weight_scattered", "dp", 12),
    ]


def main() -> None:
    """Rewrite the golden files."""
    for name, make in WHOLE.items():
        (GOLDEN / f"{name}.txt").write_text(str(make()) + "\n")


if __name__ == "__main__":
    main()
