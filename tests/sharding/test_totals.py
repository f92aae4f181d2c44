"""A plan's totals are what its steps add up to, by the rank that hosts them; all print the same."""

from __future__ import annotations

from functools import cache

import torch

import dtensor as dt
from dtensor.commands.json_data import plan_data
from dtensor.explorer.contents import contents
from dtensor.sharding.plan.text.words import seconds_text, size_text
from tests.models import GPT, loss_fn
from tests.plans import MEGATRON

STAGES = [["embed*", "pos*", "blocks.0.*"], *([f"blocks.{n}.*"] for n in (1, 2))]


@cache
def interleaved() -> dt.Plan:
    """Rank 0 of the stage axis hosts stages 0 and 2, rank 1 stages 1 and 3."""
    with torch.device("meta"):
        model = GPT(layers=4, tied=False)
        tokens = torch.zeros(16, 8, dtype=torch.long)
    stages = [*STAGES, ["blocks.3.*", "norm*", "head*"]]
    parallel = dt.parallelize(model, dt.Mesh(pp=2, tp=2), MEGATRON, stages={"pp": stages})
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = dt.Interleaved1F1B(4)
    return dt.train_step(parallel, loss_fn, optimizer, schedule=schedule).plan(tokens, tokens)


def test_what_a_rank_sends_is_what_its_stages_send() -> None:
    plan = interleaved()
    hosted = [(0, 2), (1, 3)]
    sent = [[c for c in plan.collectives if c.stage in held] for held in hosted]
    assert plan.totals.bytes_sent == max(sum(c.times * c.bytes_sent for c in of) for of in sent)
    assert plan.totals.num_collectives == max(sum(c.times for c in of) for of in sent)
    kinds = plan.totals.most_sent(lambda key: (key[0], key[2]))
    for (axis, kind), most in kinds.items():
        each = [[c for c in of if (c.axis, c.kind) == (axis, kind)] for of in sent]
        assert most.bytes_sent == max(sum(c.times * c.bytes_sent for c in of) for of in each)


def test_what_a_rank_computes_and_holds_is_that_of_its_stages() -> None:
    totals = interleaved().totals
    for rank, (first, second) in zip(totals.ranks, [(0, 2), (1, 3)], strict=True):
        assert rank == totals.stages[first] + totals.stages[second]
    memory = [m.total for m in totals.stage_memory]
    for own, (first, second) in zip(totals.rank_memory, [(0, 2), (1, 3)], strict=True):
        assert own.total < memory[first] + memory[second]  # they are not at their peaks at once
        assert own.total + own.not_at_once == memory[first] + memory[second]


def test_one_number_each_everywhere() -> None:
    plan = interleaved()
    totals, head, data = plan.totals, contents(plan)["head"], plan_data(plan)
    row = dt.Compared(name="", mesh=plan.mesh, found=plan)
    seconds = totals.cost.seconds
    assert seconds == plan.cost.seconds == head["seconds"] == data["seconds"] == row.seconds
    assert totals.cost.bubble == head["bubble"] == data["bubble"] == row.bubble
    assert totals.memory == row.memory
    assert totals.memory.total == sum(head["memory"].values()) == data["memory"]["total"]
    assert totals.bytes_sent == head["sent"] == data["bytes_sent"] == row.bytes_sent
    for text in (plan.text(), plan.summary()):
        assert seconds_text(seconds) in text and f"bubble {totals.cost.bubble:.0%}" in text
    assert size_text(totals.memory.total) in plan.summary()
