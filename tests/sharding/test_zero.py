"""Tests ZeRO in the plan: how state is stored, which collectives run when, and memory as in the
paper.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.plan.storage import layer_of, stored_spec
from dtensor.sharding.spec.parse import parse
from dtensor.sharding.spec.spec import make_spec
from tests.models import batch
from tests.plans import mean_square
from tests.training import Placed, Run


class Stack(nn.Module):
    """Three layers of 16 x 16 without biases: 1 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


ONE_AXIS, TWO_AXES = (("dp", 4),), (("dp", 2), ("ep", 2))


@cache
def plan_of(
    level: int,
    microbatches: int = 1,
    axes: tuple[tuple[str, int], ...] = ONE_AXIS,
    topology: dt.Topology | None = None,
) -> Plan:
    placed = Placed(axes=dict(axes), inputs={axis: dt.Row() for axis, _ in axes})
    given = dict(module=Stack(), loss=mean_square, schedule=dt.GPipe(microbatches), clip=None)
    zero = dict.fromkeys(placed.axes, level)
    run = Run.of(placed, zero=zero, topology=topology, **given)
    return run.step.plan(torch.empty(16, 16, device="meta"))


def sent(plan: Plan) -> list[str]:
    return [
        f"{c.phase} {c.kind} {c.bytes_sent}" + (f" x{c.times}" if c.times > 1 else "")
        for c in plan.collectives
        if c.bytes_sent > 100
    ]


# 3/4 of a layer of 1024 bytes is 768, of all three 2304
FORWARD = ["forward all_gather 768"] * 3
SCATTER = "backward reduce_scatter 768"
GOLDEN = {
    0: ["optimizer all_reduce 4608"],
    1: ["optimizer reduce_scatter 2304", "optimizer all_gather 2304"],
    2: [SCATTER, SCATTER, SCATTER, "optimizer all_gather 2304"],
    # the first layer's weight is not read in the backward: its input needs no gradient
    3: [*FORWARD, "backward all_gather 768", "backward all_gather 768", SCATTER, SCATTER, SCATTER],
}


@pytest.mark.parametrize("level", GOLDEN)
def test_zero_level_has_expected_collectives(level: int) -> None:
    """Levels 2 and 3 reduce gradients once per microbatch, lower levels once per step."""
    assert sorted(sent(plan_of(level))) == sorted(GOLDEN[level])
    repeated = [
        text + " x2" if level >= 2 and not text.startswith("optimizer") else text
        for text in GOLDEN[level]
    ]
    assert sorted(sent(plan_of(level, microbatches=2))) == sorted(repeated)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero_memory_matches_paper(microbatches: int) -> None:
    """Rajbhandari et al. 2020, section 5, for n = 4 and AdamW's two tensors, all in float32."""
    whole = 3 * 1024
    found = [plan_of(level, microbatches).memory[0] for level in range(4)]
    assert [(m.parameters, m.gradients, m.optimizer) for m in found] == [
        (whole, whole, 2 * whole),
        (whole, whole, 2 * whole // 4),
        (whole, whole // 4, 2 * whole // 4),
        (whole // 4, whole // 4, 2 * whole // 4),
    ]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_over_two_axes_sends_and_stores_as_over_one_axis(
    level: int, microbatches: int
) -> None:
    """Two axes of 2 ranks: the second reduce_scatter sends half of the bytes of the first."""
    sums: list[Counter[tuple[str, str]]] = []
    plans = [plan_of(level, microbatches, axes) for axes in (ONE_AXIS, TWO_AXES)]
    for plan in plans:
        plan.verify()
        sums.append(Counter())
        for c in plan.collectives:
            if c.kind != "all_reduce":  # of the loss
                sums[-1][c.phase, c.kind] += c.bytes_sent * c.times
    assert sums[0] == sums[1]
    one, two = (plan.memory[0] for plan in plans)
    assert (one.parameters, one.gradients) == (two.parameters, two.gradients)
    assert one.optimizer == two.optimizer


FAST_EP = dt.Topology(bandwidth=dict(dp=25e9, ep=147e9))


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("topology", "first"), [(None, "dp"), (FAST_EP, "ep")])
def test_zero_over_two_axes_sends_most_over_fastest_axis(
    topology: dt.Topology | None, first: str, level: int
) -> None:
    """Gradients are scattered over it first, parameters gathered over it last; of equally fast
    axes the first of the mesh."""
    plan = plan_of(level, axes=TWO_AXES, topology=topology)
    sent: dict[tuple[str, str], list[int]] = {}
    for c in plan.collectives:
        if c.kind != "all_reduce":
            sent.setdefault((c.kind, c.axis), []).append(c.bytes_sent)
    second = "ep" if first == "dp" else "dp"
    for kind in ("reduce_scatter", "all_gather"):
        assert sent[kind, first] == [2 * nbytes for nbytes in sent[kind, second]]
    order = [c.axis for c in plan.collectives if c.kind == "reduce_scatter"]
    assert order[:2] == [first, second]
    order = [c.axis for c in plan.collectives if c.kind == "all_gather"]
    assert order[:2] == [second, first]


SIZES = [(2, 2), (2, 4), (4, 2), (3, 2), (2, 2, 2)]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_pending_over_several_axes_send_as_over_one(
    sizes: tuple[int, ...], microbatches: int
) -> None:
    """Each bucket sends at most 1.05 x 2 P (N-1)/N for P bytes over N ranks. Messages that take
    longer than their bytes stay all_reduces: they are fewer."""
    axes = tuple(zip(("dp", "ep", "cp"), sizes))
    plans = [plan_of(0, microbatches, axes, dt.Topology(latency=s)) for s in (0.0, 1e-3)]
    for plan in plans:
        plan.verify()
    most = 1.05 * 2 * 3 * 1024 * (1 - 1 / math.prod(sizes))
    sums = [[c for c in plan.collectives if c.bytes_sent > 100] for plan in plans]
    assert sum(c.bytes_sent * c.times for c in sums[0]) <= most
    assert [c.kind for c in sums[1]] == ["all_reduce"] * len(sizes)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradient_replicated_on_zero_axis_is_sliced_before_it_is_scattered(level: int) -> None:
    """The ranks of ep compute the same gradients, so each sends a quarter over dp."""
    placed = Placed(axes=dict(TWO_AXES), inputs=dict(dp=dt.Row(), ep=dt.Replicate()))
    given = dict(module=Stack(), loss=mean_square, schedule=dt.GPipe(1), clip=None)
    run = Run.of(placed, zero={"ep": level, "dp": level}, **given)
    plan = run.step.plan(torch.empty(16, 16, device="meta"))
    plan.verify()
    sent = [c for c in plan.collectives if c.kind == "reduce_scatter"]
    assert {c.axis for c in sent} == {"dp"}
    assert sum(c.bytes_sent for c in sent) == 3 * 1024 // 2 // 2


@pytest.mark.parametrize("level", [1, 2, 3])
def test_plan_text_states_zero_storage_and_gathers(level: int) -> None:
    plan = plan_of(level)
    plan.verify()
    text = str(plan)
    what = ["", "optimizer state", "gradients, optimizer state"]
    kept = [*what, "parameters, gradients, optimizer state"][level]
    assert f"zero    dp: {level} ({kept} stored over dp)" in text
    assert ("f32[16@dp,16]  parameter, used as f32[16,16]" in text) == (level == 3)
    assert ("all_gather(3 updated parameters, dp)" in text) == (level < 3)
    assert ("all_gather(1 parameter, dp)" in text) == (level == 3)
    assert f"zero {level}: stores" in plan.explain("layers.1.weight")


def gathers(plan: Plan, phase: str) -> list[tuple[str, ...]]:
    found = [
        s for s in plan.steps if isinstance(s, Redistribute) and s.bucket and s.kind == "all_gather"
    ]
    return [s.of for s in found if s.phase == phase]


def test_zero_3_gathered_parameter_is_not_used_in_another_phase() -> None:
    """No value that the backward reads from the forward is a view of a gathered parameter."""
    for microbatches in (1, 2):
        plan = plan_of(3, microbatches)
        made: dict[str, str] = {}
        for step in plan.steps:
            if isinstance(step, Redistribute) and step.bucket and step.kind == "all_gather":
                made.update(dict.fromkeys(step.results, step.phase))
        for step in plan.steps:
            for name in getattr(step, "operands", ()):
                assert made.get(name, step.phase) == step.phase  # type: ignore[union-attr]
        assert not any(getattr(s, "once", False) for s in plan.steps if "permute" in str(s))


def test_zero_3_gathers_parameters_of_each_numbered_layer_together() -> None:
    assert layer_of("model.layers.3.self_attn.q_proj.weight") == "model.layers.3"
    assert layer_of("embed.weight") == "embed"
    assert layer_of("stages.0.blocks.12.norm.bias") == "stages.0.blocks.12"
    assert layer_of("scale") == ""
    plan = Run.of("dp2", zero={"dp": 3}, schedule=dt.GPipe(1)).step.plan(*batch())
    assert Counter(len(of) for of in gathers(plan, "forward")) == {12: 2, 2: 1, 1: 2}


def test_plan_text_states_zero_axes_and_parameters_stored_over_fewer() -> None:
    module = nn.ModuleDict(dict(up=nn.Linear(16, 32), down=nn.Linear(32, 3)))
    placed = Placed(
        axes=dict(dp=2, ep=2),
        pins={"up.weight": dict(ep=dt.Row()), "down.weight": dict(ep=dt.Column())},
        inputs=dict(dp=dt.Row()),
    )
    run = Run.of(
        placed,
        module=module,
        loss=lambda m, x: m["down"](m["up"](x).tanh()).square().mean(),
        zero={"ep": 2, "dp": 2},
    )
    plan = run.step.plan(torch.empty(16, 16, device="meta"))
    lines = [line.strip() for line in str(plan).partition("\ninputs")[0].splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("zero "))
    assert " ".join(lines[at:]) == (
        "zero    dp, ep: 2 (gradients, optimizer state stored over dp x ep; "
        "over dp alone: up.weight, up.bias, down.weight)"
    )
    assert "gradients, optimizer state stored over dp x ep" in str(plan.summary())
    assert "stores its gradient and optimizer state as f32[3@(dp,ep)]" in plan.explain("down.bias")


SPECS: list[tuple[tuple[int, ...], dict[str, Any], str | None]] = [
    ((8, 16), {}, "f32[8@dp,16]"),
    ((7, 16), {}, "f32[7,16@dp]"),  # 7 rows leave 2 on the fullest rank, 16 columns split evenly
    ((7, 3), {}, "f32[7@dp,3]"),
    ((3,), {}, "f32[3@dp]"),  # one rank holds none
    ((1,), {}, None),
    ((), {}, None),
    ((8, 16), dict(tp=dt.Row()), "f32[8@tp,16@dp]"),  # a dim that no other axis splits
    ((8, 3), dict(tp=dt.Row()), "f32[8@(tp,dp),3]"),  # the stored split is the last on its dim
    ((48,), dict(tp=dt.Row(blocks=3)), "f32[3*16@(tp,dp)]"),
    ((8, 16), dict(dp=dt.Row()), None),  # pinned to the ZeRO axis
]


@pytest.mark.parametrize(("shape", "stated", "expected"), SPECS, ids=str)
def test_stored_spec_splits_expected_dim_over_zero_axis(
    shape: tuple[int, ...], stated: dict[str, Any], expected: str | None
) -> None:
    mesh = dt.Mesh(dp=4, tp=2)
    spec = make_spec(shape, torch.float32, mesh, stated)
    found = stored_spec(spec, ("dp",))
    assert (None if found is None else str(found)) == expected
    if found is not None:
        total = sum(found.local_nbytes(mesh.coordinates(r)) for r in range(8))
        copies = 1 if "tp" in stated else 2
        assert total == copies * spec.nbytes


SPECS_OF_TWO: list[tuple[tuple[int, ...], dict[str, Any], str | None]] = [
    ((64, 16), {}, "f32[64@(dp,ep),16]"),  # a rank's slice is one block
    ((6, 5), {}, "f32[6@dp,5@ep]"),  # 9 elements on the fullest rank; 6@(dp,ep) has 10
    ((7,), {}, "f32[7@(dp,ep)]"),
    ((2,), {}, "f32[2@dp]"),  # ep makes no shard smaller
    ((1,), {}, None),
    ((8, 6, 4), dict(ep=dt.Row()), "f32[8@ep,6@dp,4]"),  # experts on ep
    ((8, 3), dict(tp=dt.Row()), "f32[8@(tp,dp,ep),3]"),
    ((8, 16), dict(dp=dt.Row(), ep=dt.Column()), None),
]


@pytest.mark.parametrize(("shape", "stated", "expected"), SPECS_OF_TWO, ids=str)
def test_stored_spec_splits_over_each_zero_axis_that_is_free(
    shape: tuple[int, ...], stated: dict[str, Any], expected: str | None
) -> None:
    mesh = dt.Mesh(dp=2, ep=2, tp=2)
    found = stored_spec(make_spec(shape, torch.float32, mesh, stated), ("dp", "ep"))
    assert (None if found is None else str(found)) == expected
    if found is not None:
        assert parse(str(found), mesh) == found


# -- zero={"dp": "auto"} ---------------------------------------------------------------------------


@cache
def wide_plan(
    level: int | str, num_dp: int, num_ep: int, width: int, microbatches: int, memory: float
) -> Plan:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    axes = dict(dp=num_dp, ep=num_ep)
    placed = Placed(axes=axes, inputs=dict.fromkeys(axes, dt.Row()))
    given = dict(module=module, loss=mean_square, schedule=dt.GPipe(microbatches), clip=None)
    topology = dt.Topology(memory_bytes=memory)
    run = Run.of(placed, zero=dict.fromkeys(axes, level), topology=topology, **given)
    return run.step.plan(torch.empty(4096, width, device="meta"))


@pytest.mark.parametrize(
    ("expected", "program"),
    [
        (0, (4, 1, 16, 1, 80e9)),  # messages cost more than the update
        (1, (4, 1, 4096, 1, 80e9)),
        (1, (4, 1, 2048, 8, 80e9)),
        (1, (2, 2, 2048, 1, 80e9)),
        (2, (4, 1, 2048, 8, 160e6)),
        (3, (4, 1, 2048, 8, 150e6)),
        (3, (4, 1, 2048, 8, 100e6)),  # none fits
    ],
)
def test_auto_level_is_best_of_all_levels(
    expected: int, program: tuple[int, int, int, int, float]
) -> None:
    chosen = wide_plan("auto", *program)
    plans = [wide_plan(level, *program) for level in range(4)]
    memory = [plan.totals.memory.total for plan in plans]
    fitting = [plan.cost.seconds for plan in plans if plan.totals.fits]
    assert (chosen.zero.level if chosen.zero else 0) == expected
    if fitting:
        assert chosen.cost.seconds <= 1.02 * min(fitting)
    else:
        assert chosen.totals.memory.total == min(memory)
    assert chosen.steps == plans[expected].steps and chosen.inputs == plans[expected].inputs
    text = str(chosen)
    assert (
        f"level   {expected} by auto, the {'fewest seconds' if fitting else 'least memory'}" in text
    )
    assert text.count("(does not fit)") == 4 - len(fitting)
    assert f"zero {expected}" in chosen.summary() and "chosen by auto" in chosen.summary()
