"""Tests lowering: the instructions of each rank, the source lines of its code, and that the
verifier accepts lowered programs of every schedule and refuses a broken one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from dtensor.daft import Call, Collective, Program, ProgramError, Recv, Send, Wait
from dtensor.daft.verification.verifier import verify
from dtensor.runtime.lower.program import lower
from dtensor.runtime.lower.rank_builder import MAX_LINES, Roles
from dtensor.runtime.schedule import OneFOneB
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh
from tests.models import GPT, batch, loss_fn
from tests.plans import MEGATRON, mean_square, plan_model
from tests.training import TWO_STAGES

TP2_PP2 = Mesh(pp=2, tp=2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_model(
        GPT(),
        loss_fn,
        batch(),
        TP2_PP2,
        MEGATRON,
        microbatches=4,
        stages=TWO_STAGES,
        clip_grad_norm=1.0,
    )


@pytest.fixture(scope="module")
def lowered(plan: Plan) -> Program:
    return lower(plan, OneFOneB(4).grid(2, 2), roles=Roles(optimizer="optimizer"))


def test_lowered_program_starts_as_many_collectives_as_planned(
    plan: Plan, lowered: Program
) -> None:
    """Counts, per rank, the starts of each kind against those that the plan counts for the rank's
    stage."""
    for rank, own in enumerate(lowered.ranks):
        stage = rank // 2
        counts = Counter(type(i) for i in own.instructions)
        planned = [c for c in plan.collectives if c.kind != "transfer"]
        transfers = [c for c in plan.collectives if c.kind == "transfer"]
        assert counts[Collective] == sum(c.times for c in planned if c.stage == stage), rank
        assert counts[Send] == sum(c.times for c in transfers if c.stage == stage), rank
        assert counts[Recv] == sum(c.times for c in transfers if c.stage != stage), rank


def test_lowered_calls_are_short_and_name_model_lines(lowered: Program) -> None:
    for name, function in lowered.functions:
        lines = function.source.splitlines()
        assert len(lines) <= 4 * MAX_LINES, name
        assert len(function.lines) == len(lines)
    calls = [i for own in lowered.ranks for i in own.instructions if isinstance(i, Call)]
    forward = [call for call in calls if call.label and call.label.action == "F" and call.source]
    assert forward and all("models.py:" in str(call.source) for call in forward)


# -- the verifier ----------------------------------------------------------------------------------


def pipeline(stages: int, microbatches: int) -> Plan:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))
    return plan_model(
        model,
        mean_square,
        (torch.randn(microbatches, 4),),
        Mesh(pp=stages),
        {},
        microbatches=microbatches,
        stages={"pp": [[f"{i}.*"] for i in range(stages)]},
    )


def test_receive_is_posted_one_action_before_its_wait() -> None:
    """The value arrives while the rank computes, and the sender can free its buffer."""
    program = lower(pipeline(2, 4), OneFOneB(4).grid(2, 2))
    between: list[list[str]] = []  # by rank: the actions between the receive and its wait
    for rank in program.ranks:
        items = rank.instructions
        between.append([])
        for at, item in enumerate(items):
            if isinstance(item, Recv):
                waits = (i for i in items[at:] if isinstance(i, Wait) and i.values == (item.value,))
                until = items.index(next(waits))
                calls = [i.label for i in items[at:until] if isinstance(i, Call)]
                between[-1].append(" ".join(dict.fromkeys(c.numbered for c in calls if c)))
    assert between[0] == ["F1", "F2", "F3", "B2"]  # the gradients of B0, B1, B2, B3
    assert between[1][1:] == ["B0", "B1", "B2"]  # the activations of F1, F2, F3


def test_verifier_refuses_wait_for_gradient_before_sending_activation() -> None:
    """The first stage waits for its first gradient before it has sent an activation."""
    program = lower(pipeline(2, 4), OneFOneB(4).grid(2, 2))
    items = list(program.ranks[0].instructions)
    receive = next(item for item in items if isinstance(item, Recv))
    wait = next(i for i in items if isinstance(i, Wait) and i.values == (receive.value,))
    early = [receive, wait, *(item for item in items if item not in (receive, wait))]
    broken = replace(
        program, ranks=(replace(program.ranks[0], instructions=tuple(early)), program.ranks[1])
    )
    verify(program, ((0,), (1,)))
    with pytest.raises(ProgramError, match="waits for"):
        verify(broken, ((0,), (1,)))
