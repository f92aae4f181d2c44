"""Costs: a plan's totals are what its steps add up to, by the rank that hosts them, and all print
the same; what is predicted of other sizes and cuts is what the plans of these say."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.api.model.stating import auto_stages
from dtensor.commands.json_data import plan_data, row_data
from dtensor.explorer.contents import contents
from dtensor.sharding.plan.cost.step_cost import Resized, StepCost, step_cost
from dtensor.sharding.plan.stages.cut_chain import Chain, Partition, partition
from dtensor.sharding.plan.stages.unit_costs import SECOND
from dtensor.sharding.plan.steps import Norm, Redistribute
from dtensor.sharding.plan.text.words import seconds_text, size_text
from tests.models import GPT, MLP, batch, loss_fn, square_loss
from tests.plans import MEGATRON, MLP_PINS, plan_model

STAGES = [["embed*", "pos*", "blocks.0.*"], *([f"blocks.{n}.*"] for n in (1, 2))]
HOSTED = [(0, 2), (1, 3)]  # by rank of the stage axis


@cache
def interleaved() -> tuple[dt.TrainStep, dt.Plan]:
    with torch.device("meta"):
        model = GPT(layers=4, tied=False)
        tokens = torch.zeros(16, 8, dtype=torch.long)
    stages = [*STAGES, ["blocks.3.*", "norm*", "head*"]]
    parallel = dt.parallelize(model, dt.Mesh(pp=2, tp=2), MEGATRON, stages={"pp": stages})
    optimizer = torch.optim.AdamW(model.parameters())
    step = dt.train_step(parallel, loss_fn, optimizer, schedule=dt.Interleaved1F1B(4))
    return step, step.plan(tokens, tokens)


@pytest.mark.slow
def test_what_a_rank_sends_computes_and_holds_is_that_of_its_stages() -> None:
    _, plan = interleaved()
    totals = plan.totals
    sent = [[c for c in plan.collectives if c.stage in held] for held in HOSTED]
    assert totals.bytes_sent == max(sum(c.times * c.bytes_sent for c in of) for of in sent)
    assert totals.num_collectives == max(sum(c.times for c in of) for of in sent)
    kinds = totals.most_sent(lambda key: (key[0], key[2]))
    for (axis, kind), most in kinds.items():
        each = [[c for c in of if (c.axis, c.kind) == (axis, kind)] for of in sent]
        assert most.bytes_sent == max(sum(c.times * c.bytes_sent for c in of) for of in each)
    for rank, (first, second) in zip(totals.ranks, HOSTED, strict=True):
        assert rank == totals.stages[first] + totals.stages[second]
    memory = [m.total for m in totals.stage_memory]
    for own, (first, second) in zip(totals.rank_memory, HOSTED, strict=True):
        assert own.total < memory[first] + memory[second]  # they are not at their peaks at once
        assert own.total + own.not_at_once == memory[first] + memory[second]


def test_one_number_each_everywhere() -> None:
    step, plan = interleaved()
    totals, page, data = plan.totals, contents(plan), plan_data(plan)
    head = page["head"]
    row = dt.Compared(name="", mesh=plan.mesh, found=plan)
    seconds = totals.cost.seconds
    assert seconds == plan.cost.seconds == head["seconds"] == data["seconds"] == row.seconds
    assert seconds == row_data(row)["seconds"] == pytest.approx(page["timeline"]["seconds"])
    assert seconds == pytest.approx(dt.simulate(step).seconds)
    assert totals.cost.bubble == head["bubble"] == data["bubble"] == row.bubble
    assert totals.memory == row.memory
    assert totals.memory.total == sum(head["memory"].values()) == data["memory"]["total"]
    assert totals.bytes_sent == head["sent"] == data["bytes_sent"] == row.bytes_sent
    for text in (plan.text(), plan.text(full=True), plan.summary()):
        assert f"{seconds_text(seconds)} a step" in text
        assert f"bubble {totals.cost.bubble:.0%}" in text
    assert size_text(totals.memory.total) in plan.summary()


# -- other sizes -----------------------------------------------------------------------------------


def planned(mesh: dt.Mesh, microbatches: int) -> dt.Plan:
    given = torch.zeros(16, 16), torch.zeros(16, 16)
    rows = dict(inputs=dict(dp=dt.Row()), microbatches=microbatches, clip_grad_norm=1.0)
    return plan_model(MLP(16, 64), square_loss, given, mesh, MLP_PINS, **rows)


def costs(plan: dt.Plan) -> list[StepCost]:
    return [step_cost(plan, step, step.stage) for step in plan.steps]


@pytest.mark.parametrize(("dp", "microbatches"), [(4, 2), (2, 4), (8, 2)])
def test_a_step_at_other_sizes(dp: int, microbatches: int) -> None:
    small, large = planned(dt.Mesh(dp=2, tp=2), 2), planned(dt.Mesh(dp=dp, tp=2), microbatches)
    to = Resized({"dp": 2, "mb": 2}, {"dp": dp, "mb": microbatches})
    assert any(isinstance(s, Redistribute) and s.bucket for s in small.steps)
    assert len(set(costs(small))) < len(small.steps)  # steps that are alike cost the same
    for step, before, after in zip(small.steps, costs(small), costs(large), strict=True):
        found = before.resized(to)
        if isinstance(step, Norm):  # of one number, which is not divided
            found, after = ([(m.axis, m.num) for m in c.messages] for c in (found, after))
        assert found == after, step


# -- cuts into stages ------------------------------------------------------------------------------

TOPOLOGY = dt.Topology(
    latency=1e-6, bandwidth=1e9, flops=1e9, memory_bandwidth=1e10, launch_latency=0.0
)
ROWS = dict(inputs=dict(dp=dt.Row()))


@pytest.mark.default("mesh0-pins0-placed0-stepped0-1e-06")
@pytest.mark.parametrize(
    ("mesh", "pins", "placed", "stepped", "within"),
    [
        (dt.Mesh(pp=2, tp=2), MEGATRON, {}, {}, 1e-6),
        # what ends a stage is not computed again
        (dt.Mesh(pp=2, tp=2), MEGATRON, dict(recompute=["blocks.*"]), {}, 1e-2),
        (dt.Mesh(pp=3, dp=2), {}, {}, ROWS, 1e-2),  # buckets are the stages' own
        (dt.Mesh(dp=2, pp=2), {}, dict(zero={"dp": 3}), ROWS, 1e-2),
    ],
)
def test_a_predicted_cut_is_planned(
    mesh: dt.Mesh, pins: Any, placed: Any, stepped: Any, within: float, monkeypatch: Any
) -> None:
    found: list[Partition] = []

    def noted(chain: Chain, num_parts: int, **options: Any) -> Partition | None:
        made = partition(chain, num_parts, **options)
        assert made is not None
        found.append(made)
        return made

    monkeypatch.setattr(auto_stages, "partition", noted)
    module = GPT(layers=2, vocab=128)
    model = dt.parallelize(module, mesh, pins, stages="auto", **placed)
    optimizer = torch.optim.AdamW(module.parameters())
    given = dict(schedule=dt.OneFOneB(2), topology=TOPOLOGY, **stepped)
    plan = dt.train_step(model, loss_fn, optimizer, **given).plan(*batch(0, 8, 8))
    (predicted,) = found
    expected = [work.seconds for work in plan.totals.stages]
    assert [cost / SECOND for cost in predicted.costs] == pytest.approx(expected, rel=within)
