"""A composite op over a dim that is split: written out where that is cheaper, fused where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan as plan_again
from dtensor.testing.execute import planned, reference, run, trace

Fn = Callable[..., torch.Tensor]
COLUMN = {"tp": dt.Column()}
WIDE = (96, 20001)
SLOW = dt.Topology(bandwidth=20e9)  # between hosts: reducing a number per row costs less than rows


def _ops(plan: Plan) -> set[str]:
    return {step.op.call.name for step in plan.steps if step.op is not None}


FUNCTIONS: dict[str, Fn] = {
    "softmax": lambda x: x.softmax(-1) * x.shape[-1],
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(1, correction=0),
    "logsumexp": lambda x: x.logsumexp(1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("num", [2, 3])
def test_a_split_dim_is_not_gathered(name: str, num: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WIDE, dtype=torch.float64, generator=generator).requires_grad_()
    traced = trace(FUNCTIONS[name], (x,))
    found = run(traced, dt.Mesh(tp=num), [COLUMN], topology=SLOW)
    want = reference(traced)
    torch.testing.assert_close(found.tensors[0], want.tensors[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.gradients[0], want.gradients[0], rtol=1e-9, atol=1e-9)
    assert {c.kind for c in found.plan.collectives} == {"all_reduce"}


def test_short_rows_are_gathered_and_stay_fused() -> None:
    traced = trace(FUNCTIONS["softmax"], (torch.randn(4, 6).requires_grad_(),))
    plan = planned(traced, dt.Mesh(tp=2), [COLUMN]).plan
    assert _ops(plan) >= {"aten._softmax.default"}
    assert any(c.kind == "all_gather" for c in plan.collectives)


def test_a_whole_dim_stays_fused() -> None:
    traced = trace(FUNCTIONS["softmax"], (torch.randn(WIDE).requires_grad_(),))
    plan = planned(traced, dt.Mesh(tp=2), [{"tp": dt.Row()}]).plan
    assert _ops(plan) >= {"aten._softmax.default", "aten._softmax_backward_data.default"}
    assert not plan.collectives


def test_only_the_op_whose_dim_is_split_is_written_out() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1).sum(0) + y.log_softmax(-1).sum(0)

    traced = trace(fn, (torch.randn(WIDE), torch.randn(WIDE)), grads=False)
    plan = planned(traced, dt.Mesh(tp=2), [COLUMN, {"tp": dt.Row()}], topology=SLOW).plan
    assert "aten._softmax.default" not in _ops(plan)
    assert "aten._log_softmax.default" in _ops(plan)
    assert "softmax_amax" in str(plan)


@pytest.mark.slow
def test_it_is_never_dearer() -> None:
    traced = trace(FUNCTIONS["layer_norm"], (torch.randn(WIDE).requires_grad_(),))
    found = run(traced, dt.Mesh(tp=2), [COLUMN], topology=SLOW).planned
    assert found is not None
    flow = found.request.flow
    fused = replace(flow, ops=tuple(replace(op, expand=None) for op in flow.ops))
    dearer = plan_again(replace(found.request, flow=fused))
    assert found.plan.cost.seconds < 0.8 * dearer.cost.seconds
