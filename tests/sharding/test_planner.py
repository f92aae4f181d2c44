"""The planner on random programs: as cheap as enumeration, and the same numbers as one device.

Every plan here is lowered and run on ranks in this process: planner, emitter and lowering are right
together, or a number is wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks import planner_loss
from dtensor.errors import PlanningError
from dtensor.runtime.lower.program import fed_spec
from dtensor.sharding.plan.choose import choose_axis
from dtensor.sharding.plan.choose.solve import Node, Price, Solution, solve
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import PARTIAL, Placement, Shard
from dtensor.sharding.spec.spec import make_spec
from tests.sharding.enumerated import brute_force, evaluate
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
MAX_ENUMERATED = 2000  # choices


# -- the same numbers ----------------------------------------------------------------------------


def check(program: Program, rng: random.Random, mesh: Mesh, *, microbatches: int) -> bool:
    """Whether the program could be planned; if so, its outputs are right on every rank."""
    flow = flow_of(program)
    pins = random_pins(rng, flow, mesh)
    if microbatches > 1:
        for item in flow.inputs:
            if item.kind == "argument":
                first = mesh.axes[0]
                split = mesh.axis_size(first) == 2 and rng.random() < 0.5
                pins[item.name] = {first: Shard(0)} if split else {}
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
            microbatches=microbatches,
            topology=random_topology(rng),
            results=results,
        )
    except PlanningError:  # a random pin whose unit or view does not fit
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
        stated, used = make_spec(meta.shape, meta.dtype, mesh, placed), fed_spec(found, name)
        for axis in placed:
            assert used.placement(axis) == stated.placement(axis)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("programs", "made"),
    [
        (22, {}),
        (16, dict(loss=True)),
        (6, dict(loss=True, batch=True, num_ops=(3, 5))),
    ],
    ids=["forward", "gradients", "microbatches"],
)
def test_random_programs_have_the_same_numbers(programs: int, made: dict[str, Any]) -> None:
    """Few are refused: the others would prove nothing."""
    planned = 0
    for seed in range(programs):
        rng = random.Random(seed)
        program = random_program(rng, **made)
        microbatches = 2 if "batch" in made else 1
        planned += check(program, rng, MESHES[seed % len(MESHES)], microbatches=microbatches)
    assert planned >= 0.8 * programs


# -- as cheap as enumeration ---------------------------------------------------------------------


@pytest.mark.slow
def test_no_choice_on_one_axis_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all strategies of all ops; and what is emitted costs what was promised."""
    enumerated = 0
    promised: list[float] = []

    def compared(nodes: Sequence[Node], price: Price) -> Solution:
        nonlocal enumerated
        found = solve(nodes, price)
        seconds = evaluate(nodes, found.chosen, price)
        if math.prod(len(n.options) for n in nodes) <= MAX_ENUMERATED:
            enumerated += 1
            assert seconds == pytest.approx(brute_force(nodes, price), rel=1e-9, abs=1e-12)
        ops = [n for n in nodes if not n.name.startswith(("input ", "result "))]
        computed = sum(n.options[found.chosen[n.name]].seconds for n in ops)
        promised.append(seconds - computed)
        return found

    monkeypatch.setattr(choose_axis, "solve", compared)
    for seed in range(18):
        rng = random.Random(seed)
        mesh = MESHES[seed % 2]
        flow = fused(flow_of(random_program(rng, loss=seed % 3 == 0)))
        topology = random_topology(rng)
        try:
            found = plan_program(flow, mesh, random_pins(rng, flow, mesh), topology=topology)
        except PlanningError:
            continue
        moved = sum(
            s.moves[0].seconds(topology) for s in found.steps if isinstance(s, Redistribute)
        )
        assert moved <= promised[-1] + 1e-12
    assert enumerated > 10


@pytest.mark.slow
def test_axis_after_axis_is_never_better_than_both_at_once() -> None:
    losses: list[float] = []
    for seed in range(16):
        try:
            losses.append(planner_loss.random_loss(seed).relative)
        except PlanningError:
            continue
    assert len(losses) > 10
    assert min(losses) > -1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Megatron MLP", "attention", "GPT layer"])
def test_axis_after_axis_loses_nothing_on_transformer_blocks(name: str) -> None:
    found = planner_loss.loss(planner_loss.blocks()[name])
    assert found.relative == pytest.approx(0.0, abs=1e-9)
