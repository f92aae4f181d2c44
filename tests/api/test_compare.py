"""`dt.compare`: each row shows what the train step of that strategy plans, and the printed table is
the one in the docs page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.api.step import bound_call
from tests.models import GPT, loss_fn
from tests.training import MEGATRON, TWO_STAGES

TOKENS = torch.empty(8, 8, dtype=torch.int64, device="meta")
FOUR = {
    "pp": [["embed*", "positions*"], ["blocks.0.*"], ["blocks.1.*"], ["norm*", "head*"]],
}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return GPT()


@pytest.mark.slow
def test_compare_rows_equal_plans_of_separate_train_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is captured once; its tensors and hooks are unchanged."""
    captured: list[object] = []
    capture = bound_call.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        captured.append(args)
        return capture(*args, **kwargs)

    monkeypatch.setattr(bound_call, "capture", counted)
    model = gpt()
    before = [(name, id(t)) for name, t in [*model.named_parameters(), *model.named_buffers()]]
    attributes = [sorted(vars(module)) for module in model.modules()]
    options = dict(inputs=dict(dp=dt.Row()), zero={"dp": 2}, clip_grad_norm=1.0)
    found = dt.compare(
        model,
        loss_fn,
        {
            "tp2": (dt.Mesh(tp=2), MEGATRON),
            "zero": (dt.Mesh(dp=2), {}, options),
            "pp2": dict(mesh=dt.Mesh(pp=2), stages=TWO_STAGES, schedule=dt.OneFOneB(2)),
            "pp2 again": dict(
                mesh=dt.Mesh(pp=2),
                stages=TWO_STAGES,
                schedule=dt.OneFOneB(2),
                recompute=["blocks.*"],
            ),
            "pp2 by two": dict(mesh=dt.Mesh(pp=2), stages=FOUR, schedule=dt.GPipe(2)),
        },
        dt.spec("i64[8,8]", dt.Mesh()),
        targets=TOKENS,
    )
    assert len(captured) == 1
    assert found["pp2 again"].memory.activations < found["pp2"].memory.activations
    assert before == [(n, id(t)) for n, t in [*model.named_parameters(), *model.named_buffers()]]
    assert attributes == [sorted(vars(module)) for module in model.modules()]

    parallel = dt.parallelize(model, dt.Mesh(dp=2), {}, zero={"dp": 2})
    step = dt.train_step(
        parallel,
        loss_fn,
        torch.optim.AdamW(model.parameters()),
        inputs=dict(dp=dt.Row()),
        clip_grad_norm=1.0,
    )
    assert str(found["zero"].plan) == str(step.plan(TOKENS, targets=TOKENS))
    assert found["zero"].memory == found["zero"].plan.memory[0]
    sent = sum(c.bytes_sent * c.times for c in found["zero"].plan.collectives)
    assert sum(found["zero"].bytes.values()) == found["zero"].bytes_sent == sent

    one, two = found["pp2"], found["pp2 by two"]
    rows = str(found).splitlines()[2:8]
    assert [row[40:51].strip() for row in rows[:4]] == ["schedule", "", "", "OneFOneB(2)"], rows
    topology = dt.Topology(latency=0.0, bandwidth=1e30, launch_latency=0.0)
    free = replace(one.plan, topology=topology)
    assert free.cost.bubble == pytest.approx(1 / 3, abs=0.02)  # of stages that are nearly equal
    assert 1 / 3 < one.bubble < 1  # and of messages between them
    assert one.memory == max(one.plan.memory, key=lambda m: m.total)
    # a rank hosts stages 0 and 2, or 1 and 3, and all that they hold but for activations adds up
    parameters = [m.parameters for m in two.plan.memory]
    assert two.memory.parameters in (parameters[0] + parameters[2], parameters[1] + parameters[3])
    totals = [m.total for m in two.plan.memory]
    most = max(totals[0] + totals[2], totals[1] + totals[3])
    assert two.memory.total + two.memory.not_at_once == most and two.memory.not_at_once > 0
    assert two.plan.totals.estimate > 0.9 * one.plan.totals.estimate
    assert two.num_collectives > one.num_collectives


def test_strategy_without_plan_keeps_row_with_its_error() -> None:
    small = dt.Topology(memory_bytes=100_000)
    found = dt.compare(
        gpt(),
        loss_fn,
        {
            "tp2": (dt.Mesh(tp=2), MEGATRON, dict(topology=small)),
            "typo": (dt.Mesh(tp=2), {"*.upp.weight": dict(tp=dt.Row())}),
            "one": (dt.Mesh(), {}),
        },
        TOKENS,
        TOKENS,
        optimizer=lambda p: [torch.optim.SGD([next(p)], lr=0.1), torch.optim.SGD(p, lr=0.2)],
    )
    typo = found["typo"]
    assert isinstance(typo.error, dt.PlanningError)
    with pytest.raises(dt.PlanningError, match="matches no parameter"):
        _ = typo.plan
    lines = str(found).splitlines()
    assert lines[0] == "compare loss_fn    SGD, SGD"
    assert [line.split()[0] for line in lines[3:6]] == ["tp2", "typo", "one"]
    assert lines[4].split(maxsplit=1)[1] == f"no plan: {str(typo.error).splitlines()[0]}"
    # tp2 is the faster in nothing here, and it alone does not fit its device
    assert not found["tp2"].fits and found["one"].fits
    assert lines[3].endswith(" !") and lines[5].count("*") == 0
    assert "! above the 97.7 KiB of a rank's device" in lines
    assert found["one"].memory.optimizer == 0 and found["one"].bytes_sent == 0
    with pytest.raises(KeyError, match="tp2, typo, one"):
        found["tp4"]


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ({}, "strategies is {}, not a dict of at least one strategy"),
        ({"a": {"tp": 2}}, "the strategy \"a\" is {'tp': 2}, which has no mesh"),
        (
            {"a": (dt.Mesh(dp=2), {}, dict(shedule=dt.GPipe(2)))},
            "states 'shedule', which is not an option of parallelize or train_step.*fix: schedule=",
        ),
    ],
)
def test_compare_rejects_invalid_strategies(strategies: Any, message: str) -> None:
    with pytest.raises(dt.PlanningError, match=f"(?s){message}"):
        dt.compare(gpt(), loss_fn, strategies, TOKENS, TOKENS)


def test_compare_rejects_parallelized_model() -> None:
    parallel: Any = dt.parallelize(gpt(), dt.Mesh())
    with pytest.raises(dt.PlanningError, match=r"pass the original module, model.module"):
        dt.compare(parallel, loss_fn, {"one": (dt.Mesh(), {})}, TOKENS, TOKENS)
