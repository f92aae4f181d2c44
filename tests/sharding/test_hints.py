"""Hints: a pin whose opposite is cheaper is named with both prices, and no other is."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

import dtensor as dt
from dtensor.sharding.plan.hints import Hint
from dtensor.sharding.plan.plan import Plan
from tests.models import GPT, MLP, batch, loss_fn
from tests.plans import MEGATRON, MLP_PINS, Stated, mean_square


def plan_of(pins: dict[str, Stated], hints: bool = True) -> Plan:
    model = MLP()
    placed = dt.parallelize(model, dt.Mesh(tp=2), pins)
    step = dt.train_step(placed, mean_square, torch.optim.AdamW(model.parameters()))
    return step.plan(torch.zeros(512, 16), hints=hints)


@pytest.mark.slow
def test_two_columns_in_a_row() -> None:
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
hint: "down.weight" with tp=Shard(1) would cost 20.91 us, 32.0 KiB sent a step; tp=Shard(0) as
stated costs 41.43 us, 145.0 KiB sent""",
    )
    assert "hint" not in str(plan_of(pins, hints=False))


@pytest.mark.parametrize("roles", [False, True])
def test_megatrons_pins_have_none(roles: bool) -> None:
    named = {"*up": dict(tp=dt.ColumnParallel()), "*down": dict(tp=dt.RowParallel())}
    assert plan_of(named if roles else MLP_PINS).hints == ()  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_pattern_for_all_layers_is_one_hint() -> None:
    model = GPT()
    pins: dict[str, Stated] = {"*.down.weight": dict(tp=dt.Row()), **MEGATRON}
    placed = dt.parallelize(model, dt.Mesh(tp=2), pins)
    step = dt.train_step(placed, loss_fn, torch.optim.AdamW(model.parameters()))
    hints = step.plan(*batch(), hints=True).hints
    assert [hint.by for hint in hints] == ["*.down.weight"]
