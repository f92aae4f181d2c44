"""What the simulator says that a rank holds is what the plan says, and what shares storage is
counted once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.search.placements import for_model
from dtensor.runtime.schedule import Grid
from dtensor.runtime.simulate.simulator import simulate
from dtensor.sharding.plan.plan import Plan
from tests.models import GPT

pytestmark = pytest.mark.slow

TOKENS = torch.empty(32, 32, dtype=torch.int64, device="meta")
STAGES = {
    "pp": [
        ["embed*", "pos*", "blocks.[0-1].*"],
        ["blocks.[2-3].*"],
        ["blocks.[4-5].*"],
        ["blocks.[6-7].*", "norm*", "head*"],
    ]
}
ROWS: dict[str, Any] = dict(inputs=dict(dp=dt.Row()))
TP = "placements over tp"
FOUR = dict(schedule=dt.OneFOneB(4))
CASES: dict[str, tuple[dt.Mesh, str, dict[str, Any]]] = {
    "one": (dt.Mesh(), "", {}),
    "one, microbatches": (dt.Mesh(), "", FOUR),
    "tp4": (dt.Mesh(tp=4), TP, {}),
    "tp4, microbatches": (dt.Mesh(tp=4), TP, FOUR),
    "dp4": (dt.Mesh(dp=4), "", ROWS),
    "dp4, zero 1": (dt.Mesh(dp=4), "", dict(ROWS, zero={"dp": 1}, clip_grad_norm=1.0)),
    "dp4, zero 2": (dt.Mesh(dp=4), "", dict(ROWS, zero={"dp": 2})),
    "dp4, zero 3": (dt.Mesh(dp=4), "", dict(ROWS, zero={"dp": 3})),
    "dp4, zero 3, microbatches": (dt.Mesh(dp=4), "", dict(ROWS, **FOUR, zero={"dp": 3})),
    "dp2 tp2, microbatches": (dt.Mesh(dp=2, tp=2), TP, dict(ROWS, **FOUR)),
    "recompute": (dt.Mesh(dp=2), "", dict(ROWS, **FOUR, recompute=["blocks.*"])),
    "pp4, 1F1B": (dt.Mesh(pp=4), "", dict(stages=STAGES, schedule=dt.OneFOneB(8))),
    "pp4, GPipe": (dt.Mesh(pp=4), "", dict(stages=STAGES, schedule=dt.GPipe(8))),
    "pp4, ZB-H1": (dt.Mesh(pp=4), "", dict(stages=STAGES, schedule=dt.ZBH1(8))),
    "pp2, interleaved": (
        dt.Mesh(pp=2),
        "",
        dict(stages=STAGES, schedule=dt.Interleaved1F1B(8)),
    ),
    "pp2, ZB-V": (dt.Mesh(pp=2), "", dict(stages=STAGES, schedule=dt.ZBV(8))),
    "pp2 dp2 tp2": (
        dt.Mesh(pp=2, dp=2, tp=2),
        TP,
        dict(ROWS, **FOUR, stages="auto", zero={"dp": 1}),
    ),
}


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@cache
def plans() -> dt.Comparison:
    with torch.device("meta"):
        model = GPT(vocab=128, width=64, heads=4, layers=8, positions=32, tied=False)
    over_tp = dict(for_model(model, (TOKENS,)))
    strategies = {
        name: (mesh, over_tp if placements else {}, options)
        for name, (mesh, placements, options) in CASES.items()
    }
    return dt.compare(model, loss_fn, strategies, TOKENS, TOKENS)


def held(plan: Plan) -> list[tuple[int, int]]:
    """By rank of the stage axis, planned and simulated."""
    trace = simulate(plan, Grid.parse(plan.schedule) if plan.schedule else None)
    planned = (memory.total for memory in plan.totals.rank_memory)
    return list(zip(planned, trace.peak_bytes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_simulated_is_planned(name: str) -> None:
    for planned, simulated in held(plans()[name].plan):
        assert simulated == pytest.approx(planned, rel=0.05)
