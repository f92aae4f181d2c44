"""Tests `assert_collectives` for known modules under known placements, and the text of its
failure.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.parse import parse as spec
from dtensor.sharding.spec.placements import Column, Replicate, Row, Shard
from dtensor.testing import assert_collectives, plan_of
from dtensor.testing.collectives import counts
from tests.models import GPT, MLP, Llama, SwiGLU

TP = Mesh(tp=2)
MEGATRON = {"*up.weight": dict(tp=Row()), "*down.weight": dict(tp=Column())}
ATTENTION = {"*.qkv.weight": dict(tp=Row(blocks=3)), "*.proj.weight": dict(tp=Column())}


def squared(y: Tensor) -> Tensor:
    return y.pow(2).mean()


X = spec("f32[8,16]", TP)
DIFFERENTIABLE = spec("f32[8,16]", TP, requires_grad=True)
TOKENS = spec("i64[4,8]", TP)


@pytest.mark.parametrize(
    ("make", "placements", "x", "forward", "backward"),
    [
        pytest.param(MLP, MEGATRON, DIFFERENTIABLE, 1, 1, id="Megatron"),
        pytest.param(MLP, MEGATRON, X, 1, 0, id="an input that needs no gradient"),
        pytest.param(
            SwiGLU, {"gate.weight": dict(tp=Row()), **MEGATRON}, DIFFERENTIABLE, 1, 1,
            id="two columns, whose gradients are summed once",
        ),
        pytest.param(
            lambda: GPT(layers=1), {**ATTENTION, **MEGATRON}, TOKENS, 2, 2,
            id="GPT",
        ),
        pytest.param(
            lambda: Llama(layers=1), {}, TOKENS, 0, 0, id="nothing pinned"
        ),
    ],
)  # fmt: skip
def test_assert_collectives_counts_all_reduces_of_model(
    make: Any, placements: Any, x: Any, forward: int, backward: int
) -> None:
    assert_collectives(
        make(),
        TP,
        placements,
        x,
        forward={"all_reduce@tp": forward},
        backward={"all_reduce@tp": backward},
        loss=squared if x is TOKENS else None,
    )


def test_assert_collectives_counts_gradient_reductions_in_backward() -> None:
    mesh = Mesh(dp=2)
    plan = assert_collectives(
        nn.Linear(16, 4, bias=False),
        mesh,
        {},
        spec("f32[8@dp,16]", mesh),
        forward={"all_reduce@dp": 1},  # the loss
        backward={"all_reduce@dp": 1},
        loss=squared,
    )
    assert {c.name for c in plan.collectives} == {"mean_reduced", "grad_weight_reduced"}


def test_assert_collectives_result_may_be_sharded_but_not_partial() -> None:
    x = spec("f32[8,16]", TP)
    linear = nn.Linear(16, 32)
    assert_collectives(linear, TP, {"weight": dict(tp=Row())}, x, forward={})
    assert_collectives(linear, TP, {"weight": dict(tp=Column())}, x, forward={"all_reduce@tp": 1})


def test_assert_collectives_takes_placements_of_function_from_specs() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(x @ w)

    assert_collectives(
        fn,
        TP,
        {},
        spec("f32[8,16@tp]", TP),
        spec("f32[16@tp,32]", TP),
        forward={"all_reduce@tp": 1},
    )
    plan = assert_collectives(
        fn,
        TP,
        {"w": dict(tp=Row())},
        spec("f32[8,16@tp]", TP),
        spec("f32[16,32]", TP),
        forward={"all_reduce@tp": 1},
    )
    assert plan.inputs[1].spec == spec("f32[16@tp,32]", TP)


def test_plan_of_keeps_order_of_two_axes_on_one_dim() -> None:
    mesh = Mesh(dp=2, tp=2)
    for text in ("f32[8@(tp,dp),16]", "f32[8@(dp,tp),16]", "f32[8@dp,16@tp]", "f32[2*4@tp,16]"):
        plan = plan_of(lambda x: x * 2, mesh, {}, spec(text, mesh))
        assert plan.inputs[0].spec == spec(text, mesh)


def test_plan_of_keeps_argument_names_with_loss() -> None:
    plan = plan_of(MLP(), TP, {}, spec("f32[8,16]", TP, requires_grad=True), loss=squared)
    assert "x" in {i.label for i in plan.inputs}


def test_plan_of_accepts_pytrees_and_numbers() -> None:
    def fn(pair: dict[str, Tensor], scale: float) -> Tensor:
        return pair["a"] @ pair["b"] * scale

    plan = plan_of(fn, TP, {}, {"a": spec("f32[4,8@tp]", TP), "b": spec("f32[8@tp,4]", TP)}, 2.0)
    assert counts(plan, "forward") == {"all_reduce@tp": 1}
    assert [i.label for i in plan.inputs] == ["pair.a", "pair.b"]


def test_assert_collectives_failure_shows_found_collectives_and_plan() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_collectives(
            MLP(),
            TP,
            MEGATRON,
            spec("f32[8,16]", TP, requires_grad=True),
            forward={"all_reduce@tp": 2, "all_gather@tp": 1},
            backward={},
        )
    lines = str(caught.value).splitlines()
    assert lines[:8] == [
        "MLP does not communicate as expected.",
        "  forward all_gather@tp: expected 1, found 0",
        "  forward all_reduce@tp: expected 2, found 1",
        "  backward all_reduce@tp: expected 0, found 1",
        "collectives:",
        "  forward   all_reduce@tp  mm_1_reduced  512 bytes sent  models.py:28",
        "  backward  all_reduce@tp  grad_x_reduced  512 bytes sent  models.py:26",
        "",
    ]
    assert "plan MLP" in lines[8]


def test_assert_collectives_adds_no_log_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("torch.__trace")
    log.debug("")
    seen = len(caplog.records)  # 1 from pytest 9.2 on, which listens to this logger too
    assert_collectives(MLP(), TP, MEGATRON, spec("f32[2,16]", TP))
    assert len(caplog.records) == seen
    assert not log.disabled


def test_assert_collectives_checks_only_stated_phases() -> None:
    assert_collectives(MLP(), TP, MEGATRON, spec("f32[8,16]", TP), backward={})
    with pytest.raises(AssertionError, match="expected 0, found 1"):
        assert_collectives(MLP(), TP, MEGATRON, spec("f32[8,16]", TP), forward={})


def test_plan_of_refuses_wrong_mesh_unknown_name_and_bad_placement() -> None:
    x = spec("f32[8,16]", TP)
    with pytest.raises(PlanningError, match="stated on another mesh"):
        plan_of(MLP(), Mesh(tp=4), {}, x)
    with pytest.raises(PlanningError, match='placements names "y", which is no tensor argument'):
        plan_of(lambda x: x * 2, TP, {"y": dict(tp=Row())}, x)
    with pytest.raises(PlanningError, match="x is placed twice on the axis tp"):
        plan_of(lambda x: x * 2, TP, {"x": dict(tp=Shard(1))}, spec("f32[8@tp,16]", TP))
    with pytest.raises(PlanningError, match="does not fit x: it has 2 dims"):
        plan_of(lambda x: x * 2, TP, {"x": dict(tp=Shard(2))}, x)


def test_plan_of_accepts_replicate_for_plain_spec() -> None:
    plan = plan_of(lambda x: x * 2, TP, {"x": dict(tp=Replicate())}, spec("f32[8,16]", TP))
    assert plan.collectives == ()


def test_plan_of_starts_no_process_group_and_no_ray() -> None:
    plan_of(MLP(), TP, MEGATRON, spec("f32[8,16]", TP))
    assert not torch.distributed.is_initialized()
    assert "ray" not in vars(sys.modules["dtensor.testing.collectives"])
