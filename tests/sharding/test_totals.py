"""Tests the costs of a plan: its totals are the sums of its steps by rank, every report prints
the same numbers, and predictions for other sizes and cuts equal the plans made for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.api.model.stating import auto_stages
from dtensor.collectives import SMALL_ALL_REDUCE
from dtensor.commands.json_data import plan_data, row_data
from dtensor.explorer.contents import contents
from dtensor.runtime.schedule.clock import Begin, Stretch, Until, folded, run
from dtensor.sharding.plan.cost.step_cost import Resized, StepCost, step_cost
from dtensor.sharding.plan.stages.cut_chain import Chain, Partition, partition
from dtensor.sharding.plan.stages.unit_costs import SECOND
from dtensor.sharding.plan.steps import Norm, Redistribute
from dtensor.sharding.plan.text.words import seconds_text, size_text
from dtensor.sharding.redistribute.topology import sent_bytes
from tests.models import GPT, MLP, batch, loss_fn, square_loss
from tests.plans import MEGATRON, MLP_PINS, mean_square, plan_model

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
def test_rank_totals_are_sums_over_its_stages() -> None:
    _, plan = interleaved()
    totals = plan.totals
    sent = [[c for c in plan.collectives if c.stage in held] for held in HOSTED]
    assert totals.bytes_sent == max(sum(c.times * c.bytes_sent for c in of) for of in sent)
    assert totals.num_collectives == max(sum(c.times for c in of) for of in sent)
    kinds = totals.max_sent_by(lambda key: (key[0], key[2]))
    for (axis, kind), most in kinds.items():
        each = [[c for c in of if (c.axis, c.kind) == (axis, kind)] for of in sent]
        assert most.bytes_sent == max(sum(c.times * c.bytes_sent for c in of) for of in each)
    for rank, (first, second) in zip(totals.ranks, HOSTED, strict=True):
        assert rank == totals.stages[first] + totals.stages[second]
    memory = [m.total for m in totals.stage_memory]
    for own, (first, second) in zip(totals.rank_memory, HOSTED, strict=True):
        assert own.total < memory[first] + memory[second]  # the stages do not peak at the same time
        assert own.total + own.not_at_once == memory[first] + memory[second]


def test_every_report_of_plan_prints_same_totals() -> None:
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
def test_predicted_step_cost_at_other_sizes_equals_planned_cost(dp: int, microbatches: int) -> None:
    small, large = planned(dt.Mesh(dp=2, tp=2), 2), planned(dt.Mesh(dp=dp, tp=2), microbatches)
    to = Resized({"dp": 2, "mb": 2}, {"dp": dp, "mb": microbatches})
    assert any(isinstance(s, Redistribute) and s.bucket for s in small.steps)
    assert len(set(costs(small))) < len(small.steps)  # steps that are alike cost the same
    for step, before, after in zip(small.steps, costs(small), costs(large), strict=True):
        found = before.resized(to)
        if isinstance(step, Norm):  # a norm is one number, which is not divided
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
        # the end of a stage is not recomputed
        (dt.Mesh(pp=2, tp=2), MEGATRON, dict(recompute=["blocks.*"]), {}, 1e-2),
        (dt.Mesh(pp=3, dp=2), {}, {}, ROWS, 1e-2),  # each stage has its own buckets
        (dt.Mesh(dp=2, pp=2), {}, dict(zero={"dp": 3}), ROWS, 1e-2),
    ],
)
def test_predicted_cost_of_stages_equals_planned_cost(
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


# -- prices ----------------------------------------------------------------------------------------


def test_collective_prices_are_those_of_pairwise_exchanges() -> None:
    """Daft's transports use pairs of sends and receives, not rings."""
    topology = dt.Topology(latency=1.0, bandwidth=1.0)

    def seconds(kind: str, nbytes: int, num: int) -> float:
        sent = sent_bytes(kind, nbytes, num)
        return topology.collective_seconds(kind, "tp", num=num, bytes_sent=sent)

    assert seconds("all_gather", 4, 4) == 1 + 3 * 4
    assert seconds("all_reduce", 4, 2) == 1 + 4
    small, large = SMALL_ALL_REDUCE, 2 * SMALL_ALL_REDUCE
    assert seconds("all_reduce", small, 4) == 1 + 3 * small  # the whole value to each other rank
    assert seconds("all_reduce", large, 4) == 2 + 2 * large * 3 / 4  # pieces, then their sums


def test_simulated_device_waits_for_host_launches() -> None:
    """The host launches in order, one second each, and waits for nothing."""
    items = [
        Stretch.of(2.0, 1.0),  # launched at 1
        Stretch.of(0.125, 1.0),  # launched at 2, before the device is free
        Begin("sum", (0,), "tp", 0.5, host=1.0),
        Until(("sum",)),
        Stretch.of(0.125, 2.0),  # launched at 5
    ]
    (times,) = run({0: items}).values()
    assert times[:2] == [(0.0, 3.0), (3.0, 3.125)]
    assert times[2] == (3.125, 3.625) and times[4] == (3.625, 5.125)
    (together,) = folded(0, items)
    assert isinstance(together, Stretch) and together.computes == 2.25
    for device, host in ((0.0, 0.0), (4.0, 0.0), (0.0, 4.0)):
        ends = [run({0: of}, device, host)[0][-1][1] for of in (items, [together])]
        assert ends[0] == ends[1]


def test_plan_of_small_model_reports_host_bound() -> None:
    def plan_of(width: int) -> dt.Plan:
        with torch.device("meta"):
            model, x = MLP(width, width), torch.empty(width, width)
        parallel = dt.parallelize(model, dt.Mesh(tp=2), MLP_PINS)
        optimizer = torch.optim.AdamW(model.parameters())
        return dt.train_step(parallel, mean_square, optimizer).plan(x)

    small, large = plan_of(64), plan_of(16384)
    assert small.cost.host_bound and not large.cost.host_bound
    assert small.cost.host_wait_seconds > 0.9 * small.cost.seconds
    for plan, words in ((small, "NVLink), host-bound"), (large, "NVLink)")):
        assert any(line.rstrip().endswith(words) for line in plan.summary().splitlines())
        assert f"{words}: compute" in plan.text()
    # a step takes at least its launches, and at most its launches plus the device's work
    for cost in (small.cost, large.cost):
        device = cost.compute_seconds + cost.communication_seconds
        assert max(device, cost.host_seconds) <= cost.seconds
        assert cost.seconds <= device + cost.host_seconds + small.topology.step_latency


def test_compare_and_search_rank_host_bound_plans_by_host_time() -> None:
    """Four microbatches launch four times as many ops; the device computes as long as for one."""
    with torch.device("meta"):
        model, x = MLP(256, 1024), torch.empty(4096, 256)
    parts = {f"of {n}": dict(mesh=dt.Mesh(), schedule=dt.GPipe(microbatches=n)) for n in (1, 4)}
    found = dt.compare(model, mean_square, parts, x)
    assert found["of 4"].seconds > 3 * found["of 1"].seconds
    assert "host-bound, launches take longer than the device: all" in str(found)
    searched = dt.search(model, mean_square, 2, x)
    assert "best, host-bound" in str(searched)
    assert searched.best.seconds == min(row.seconds for row in searched.rows)


@pytest.mark.parametrize(
    ("unit", "num", "share"), [(16, 4, 1 / 4), (32, 4, 1 / 2), (16, 3, 1 / 2), (1, 3, 22 / 64)]
)
def test_totals_of_uneven_shards_are_those_of_largest_rank(
    unit: int, num: int, share: float
) -> None:
    """Of 2 units of 32 over 4 ranks, two ranks have one unit each and the others none."""
    pins = {"up.weight": dict(tp=dt.Row(unit=unit)), "down.weight": dict(tp=dt.Column(unit=unit))}
    given = (torch.empty(8, 16, device="meta"),)
    with torch.device("meta"):
        model = MLP(16, 64)
    plan = plan_model(model, mean_square, given, dt.Mesh(tp=num), pins)
    whole = plan_model(model, mean_square, given, dt.Mesh(), {})
    assert plan.totals.ranks[0].flops == pytest.approx(share * whole.totals.ranks[0].flops)
