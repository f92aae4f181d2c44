"""The verifier accepts every program that a schedule is lowered to, and refuses a broken one.

Each rank is its own host here, as on Ray, so that a wait that is never served is a hang.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dtensor.daft import Call, ProgramError, Recv, Wait, verify
from dtensor.runtime.lower.program import lower
from dtensor.runtime.schedule import GPipe, OneFOneB
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh
from tests.plans import mean_square, plan_model


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


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_accepts_gpipe_and_1f1b(stages: int, microbatches: int) -> None:
    plan = pipeline(stages, microbatches)
    hosts = tuple((rank,) for rank in range(stages))
    for schedule in (GPipe(microbatches), OneFOneB(microbatches)):
        program = lower(plan, schedule.grid(stages, stages))
        assert verify(program, hosts).peak_bytes


def test_a_receive_is_posted_an_action_before_it_is_waited_for() -> None:
    """So that the value comes while the rank computes, and its sender has its buffer back."""
    program = lower(pipeline(2, 4), OneFOneB(4).grid(2, 2))
    between: list[list[str]] = []  # by rank, the actions whose calls stand before the wait
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


def test_refuses_a_gradient_that_is_waited_for_too_early() -> None:
    """The first stage waits for the first gradient before it has sent an activation."""
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
