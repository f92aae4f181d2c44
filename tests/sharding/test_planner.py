"""Tests the planner on random programs: plans are as cheap as enumeration finds, and give the
numbers of one device.

Every plan here is lowered and run on ranks in this process, so a number is wrong unless planner,
emitter and lowering are all right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from benchmarks import planner_loss
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.runtime.lower.program import argument_spec
from dtensor.sharding.ops.call import Meta, OpCall, Operand, RunNumber
from dtensor.sharding.plan.choose import choose_axis, split_through_op
from dtensor.sharding.plan.choose.solve import Node, Price, Solution, solve
from dtensor.sharding.plan.dataflow import layer_groups
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan as plan_again
from dtensor.sharding.rules import registry, rule_for
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import PARTIAL, Placement, Shard
from dtensor.sharding.spec.spec import make_spec
from dtensor.testing.execute import planned, reference, run, trace
from tests.models import GPT, DropoutGPT, batch, loss_fn
from tests.plans import MEGATRON, plan_model
from tests.sharding.programs import (
    Program,
    execute,
    flow_of,
    fused,
    plan_program,
    random_pins,
    random_program,
    random_topology,
)

MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=3, b=2))


# -- the same numbers ----------------------------------------------------------------------------


def check(program: Program, rng: random.Random, mesh: Mesh) -> bool:
    """Return whether the program could be planned, after checking its outputs on every rank."""
    flow = flow_of(program)
    pins = random_pins(rng, flow, mesh)
    results: dict[int, dict[str, Placement]] = {}
    if not program.loss:
        for output in flow.outputs:
            dims = [d for d, s in enumerate(flow.metas[output.value].shape) if s > 1]
            if dims and rng.random() < 0.5:
                placement = rng.choice((Shard(rng.choice(dims)), PARTIAL))
                results[int(output.of)] = {rng.choice(mesh.axes): placement}
    try:
        found = plan_program(
            flow,
            mesh,
            pins,
            free=rng.random() < 0.7,
            topology=random_topology(rng),
            results=results,
        )
    except PlanningError:  # a random pin with a unit or view that does not fit
        return False
    got, expected = execute(found, program), program.reference()
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        where = f"{name} of\n{program}\non {mesh} under {pins}"
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, where=where: f"{where}\n{m}"
        )
    for name, placed in pins.items():
        meta = flow.metas[name]
        stated, used = make_spec(meta.shape, meta.dtype, mesh, placed), argument_spec(found, name)
        for axis in placed:
            assert used.placement(axis) == stated.placement(axis)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("programs", "loss"), [(22, False), (16, True)])
def test_planned_random_programs_match_one_device(programs: int, loss: bool) -> None:
    """At most a fifth of the programs may be refused."""
    planned = 0
    for seed in range(programs):
        rng = random.Random(seed)
        planned += check(random_program(rng, loss=loss), rng, MESHES[seed % len(MESHES)])
    assert planned >= 0.8 * programs


# -- as cheap as enumeration ---------------------------------------------------------------------


@pytest.mark.slow
def test_planning_axis_by_axis_never_beats_planning_jointly() -> None:
    losses: list[float] = []
    for seed in range(16):
        try:
            losses.append(planner_loss.random_loss(seed).relative)
        except PlanningError:
            continue
    assert len(losses) > 10
    assert min(losses) > -1e-9


@pytest.mark.default("attention")
@pytest.mark.parametrize("name", ["Megatron MLP", "attention", "GPT layer"])
def test_planning_axis_by_axis_is_optimal_for_transformer_blocks(name: str) -> None:
    found = planner_loss.loss(planner_loss.blocks()[name])
    assert found.relative == pytest.approx(0.0, abs=1e-9)


CLOSEST_TO_SETTLED = choose_axis._closest_to_settled


def _any_split(
    strategies: Sequence[Strategy],
    known: Sequence[tuple[int, str]],
    settled: Mapping[str, Placement],
    metas: Mapping[str, Meta],
    num: int,
) -> tuple[Strategy, ...]:
    """Return the strategies that read a settled value as it is split, or a value that is not
    settled as split: the minimum that follows the pins."""
    if not any(isinstance(settled[name], Shard) for _, name in known):
        return CLOSEST_TO_SETTLED(strategies, known, settled, metas, num)
    indices = {index for index, _ in known}
    return tuple(
        strategy
        for strategy in strategies
        if choose_axis._count_agreements(strategy, known, settled, metas, num)[0]
        or choose_axis._splits_another(strategy, indices)
    ) or tuple(strategies)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)])
def test_plan_is_cheapest_of_enumerated_plans_that_follow_pins(
    seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one axis. A plan with search="free" is not more expensive."""
    planned = 0
    for seed in seeds:
        rng = random.Random(seed)
        flow = fused(flow_of(random_program(rng, loss=rng.random() < 0.6, num_ops=(3, 8))))
        mesh = Mesh(tp=rng.choice((2, 3)))
        pins, topology = random_pins(rng, flow, mesh), random_topology(rng)
        try:
            found = plan_program(flow, mesh, pins, free=False, topology=topology).cost.seconds
        except PlanningError:  # a random pin with a unit that does not fit
            continue
        free = plan_program(flow, mesh, pins, free=True, topology=topology).cost.seconds
        with monkeypatch.context() as patched:
            patched.setattr(choose_axis, "_closest_to_settled", _any_split)
            best = plan_program(flow, mesh, pins, free=False, topology=topology).cost.seconds
        assert free <= found <= best * 1.0001, f"seed {seed}"
        planned += 1
    assert planned > 0.8 * len(seeds)


# -- shared work -----------------------------------------------------------------------------------


def _planned() -> str:
    model = GPT(layers=4, tied=False)
    inputs = dict(dp=Shard(0))
    return str(plan_model(model, loss_fn, batch(), Mesh(dp=2, tp=2), MEGATRON, inputs=inputs))


@pytest.mark.slow
def test_sharing_work_between_repeated_layers_does_not_change_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans four layers together, and again with a separate rule, walk and choice for every op."""
    found = _planned()
    sizes: list[int] = []

    def alone(nodes: Sequence[Node], price: Price) -> Solution:
        together = solve(nodes, price)
        apart = solve([replace(node, group=node.name) for node in nodes], price)
        sizes.append(apart.num_variables - together.num_variables)
        return apart

    monkeypatch.setattr(registry, "_build", registry._build.__wrapped__)
    monkeypatch.setattr(split_through_op, "through", split_through_op.through.__wrapped__)
    monkeypatch.setattr(choose_axis, "solve", alone)
    assert _planned() == found
    assert sizes and min(sizes) > 0  # some work was shared


@pytest.mark.parametrize("model", [GPT(layers=3), DropoutGPT(layers=3)], ids=["gpt", "dropout"])
def test_ops_that_share_a_choice_are_of_different_layers(model: nn.Module) -> None:
    """Equal calls of one module, as the products for dq and dv are, choose separately."""
    flow = dataflow(capture(loss_fn, (model, *batch()), grads="loss"))
    groups = layer_groups(flow)
    counts = Counter((groups[op.name], op.module) for op in flow.ops if op.module)
    assert max(counts.values()) == 1
    layers = Counter(group for group, _ in counts)
    assert Counter(layers.values())[3] > 50


def _full(value: object) -> OpCall:
    made = Meta((2,), torch.float32)
    x = (Operand(0),)
    return OpCall(
        target=torch.ops.aten.mul.Tensor, args=(*x, value), operands=(made,), results=(made,)
    )


def test_equal_calls_share_one_rule_object_and_different_calls_do_not() -> None:
    assert rule_for(_full(2.0)) is rule_for(_full(2.0))
    zeros = RunNumber.of(0.0, "a"), RunNumber.of(0.0, "b")
    numbers = 0.0, -0.0, 0, False, 1.0, 1, True, float("nan"), *zeros
    rules = [rule_for(_full(number)) for number in numbers]
    assert len({id(rule) for rule in rules}) == len(numbers)


# -- composite ops ---------------------------------------------------------------------------------


Fn = Callable[..., torch.Tensor]
COLUMN = {"tp": dt.Column()}
WIDE = (96, 20001)
SLOW = dt.Topology(
    bandwidth=20e9, launch_latency=0.0
)  # between hosts: reducing a number per row costs less than rows


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


@pytest.mark.default("3-logsumexp")
@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("num", [2, 3])
def test_reduction_over_split_dim_uses_all_reduce_and_matches_reference(
    name: str, num: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WIDE, dtype=torch.float64, generator=generator).requires_grad_()
    traced = trace(FUNCTIONS[name], (x,))
    found = run(traced, dt.Mesh(tp=num), [COLUMN], topology=SLOW)
    want = reference(traced)
    torch.testing.assert_close(found.tensors[0], want.tensors[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.gradients[0], want.gradients[0], rtol=1e-9, atol=1e-9)
    assert {c.kind for c in found.plan.collectives} == {"all_reduce"}


def test_softmax_over_short_split_rows_is_gathered_and_stays_fused() -> None:
    traced = trace(FUNCTIONS["softmax"], (torch.randn(4, 6).requires_grad_(),))
    plan = planned(traced, dt.Mesh(tp=2), [COLUMN]).plan
    assert _ops(plan) >= {"aten._softmax.default"}
    assert any(c.kind == "all_gather" for c in plan.collectives)


def test_softmax_over_unsplit_dim_stays_fused_without_communication() -> None:
    traced = trace(FUNCTIONS["softmax"], (torch.randn(WIDE).requires_grad_(),))
    plan = planned(traced, dt.Mesh(tp=2), [{"tp": dt.Row()}]).plan
    assert _ops(plan) >= {"aten._softmax.default", "aten._softmax_backward_data.default"}
    assert not plan.collectives


def test_only_softmax_over_split_dim_is_decomposed() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1).sum(0) + y.log_softmax(-1).sum(0)

    traced = trace(fn, (torch.randn(WIDE), torch.randn(WIDE)), grads=False)
    plan = planned(traced, dt.Mesh(tp=2), [COLUMN, {"tp": dt.Row()}], topology=SLOW).plan
    assert "aten._softmax.default" not in _ops(plan)
    assert "aten._log_softmax.default" in _ops(plan)
    assert "softmax_amax" in str(plan)


def test_decomposing_layer_norm_over_split_dim_is_cheaper_than_gathering() -> None:
    traced = trace(FUNCTIONS["layer_norm"], (torch.randn(WIDE).requires_grad_(),))
    found = run(traced, dt.Mesh(tp=2), [COLUMN], topology=SLOW).planned
    assert found is not None
    flow = found.request.flow
    fused = replace(flow, ops=tuple(replace(op, expand=None) for op in flow.ops))
    dearer = plan_again(replace(found.request, flow=fused))
    assert found.plan.cost.seconds < 0.8 * dearer.cost.seconds
