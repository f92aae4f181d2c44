"""What a step costs at other sizes is what it costs in the plan of those sizes."""

from __future__ import annotations

import pytest
import torch

from dtensor.sharding.plan.cost.step_cost import Resized, StepCost, step_cost
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Norm, Redistribute
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from tests.models import MLP, square_loss
from tests.plans import MLP_PINS, plan_model


def planned(mesh: Mesh, microbatches: int) -> Plan:
    batch = torch.zeros(16, 16), torch.zeros(16, 16)
    rows = dict(inputs=dict(dp=Shard(0)), microbatches=microbatches, clip_grad_norm=1.0)
    return plan_model(MLP(16, 64), square_loss, batch, mesh, MLP_PINS, **rows)


def costs(plan: Plan) -> list[StepCost]:
    return [step_cost(plan, step, step.stage) for step in plan.steps]


@pytest.mark.parametrize(("dp", "microbatches"), [(4, 2), (2, 4), (8, 2)])
def test_a_step_at_other_sizes(dp: int, microbatches: int) -> None:
    small, large = planned(Mesh(dp=2, tp=2), 2), planned(Mesh(dp=dp, tp=2), microbatches)
    to = Resized({"dp": 2, "mb": 2}, {"dp": dp, "mb": microbatches})
    assert any(isinstance(s, Redistribute) and s.bucket for s in small.steps)
    for step, before, after in zip(small.steps, costs(small), costs(large), strict=True):
        found = before.resized(to)
        if isinstance(step, Norm):  # of one number, which is not divided
            found, after = ([(m.axis, m.num) for m in c.messages] for c in (found, after))
        assert found == after, step


def test_steps_of_layers_that_are_alike_cost_the_same() -> None:
    plan = planned(Mesh(dp=2, tp=2), 2)
    assert len(set(costs(plan))) < len(plan.steps)
