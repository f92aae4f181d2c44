"""What is kept for equal calls changes no plan, and calls that differ share nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dtensor.sharding.ops.call import Meta, OpCall, Operand, RunNumber
from dtensor.sharding.plan.choose import choose_axis, solve, split_through_op
from dtensor.sharding.plan.choose.solve import Node, Price, Solution
from dtensor.sharding.rules import registry, rule_for
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from tests.models import GPT, batch, loss_fn
from tests.plans import MEGATRON, plan_model


def _planned() -> str:
    model = GPT(layers=4, tied=False)
    inputs = dict(dp=Shard(0))
    return str(plan_model(model, loss_fn, batch(), Mesh(dp=2, tp=2), MEGATRON, inputs=inputs))


@pytest.mark.slow
def test_each_layer_by_itself_has_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers planned together, then with a rule, a walk and a choice for every op alone."""
    found = _planned()
    sizes: list[int] = []

    def alone(nodes: Sequence[Node], price: Price) -> Solution:
        together = solve.solve(nodes, price)
        apart = solve.solve([replace(node, group=node.name) for node in nodes], price)
        sizes.append(apart.num_variables - together.num_variables)
        return apart

    monkeypatch.setattr(registry, "_built", registry._built.__wrapped__)
    monkeypatch.setattr(split_through_op, "through", split_through_op.through.__wrapped__)
    monkeypatch.setattr(choose_axis, "solve", alone)
    assert _planned() == found
    assert sizes and min(sizes) > 0  # there was something to share


def _full(value: object) -> OpCall:
    made = Meta((2,), torch.float32)
    x = (Operand(0),)
    return OpCall(
        target=torch.ops.aten.mul.Tensor, args=(*x, value), operands=(made,), results=(made,)
    )


def test_equal_calls_share_a_rule_and_others_do_not() -> None:
    assert rule_for(_full(2.0)) is rule_for(_full(2.0))
    zeros = RunNumber.of(0.0, "a"), RunNumber.of(0.0, "b")
    numbers = 0.0, -0.0, 0, False, 1.0, 1, True, float("nan"), *zeros
    rules = [rule_for(_full(number)) for number in numbers]
    assert len({id(rule) for rule in rules}) == len(numbers)
