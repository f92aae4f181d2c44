"""The verifier accepts every program that a schedule is lowered to, and refuses a broken one.

Each rank is its own host here, as on Ray, so that a wait that is never served is a hang.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dtensor.daft import ProgramError, Recv, Wait, verify
from dtensor.runtime.lower import lower
from dtensor.runtime.schedule import GPipe, OneFOneB
from dtensor.sharding.mesh import Mesh
from dtensor.sharding.plan import Plan
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


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_accepts_gpipe_and_1f1b(stages: int, microbatches: int) -> None:
    plan = pipeline(stages, microbatches)
    hosts = tuple((rank,) for rank in range(stages))
    for schedule in (GPipe(microbatches), OneFOneB(microbatches)):
        program = lower(plan, schedule.grid(stages, stages)).program
        assert verify(program, hosts).peak_bytes


def test_refuses_a_gradient_that_is_waited_for_too_early() -> None:
    """The first stage waits for the first gradient before it has sent an activation."""
    program = lower(pipeline(2, 4), OneFOneB(4).grid(2, 2)).program
    items = list(program.ranks[0].instructions)
    at = next(i for i, item in enumerate(items) if isinstance(item, Recv))
    assert isinstance(items[at + 1], Wait)
    early = [*items[at : at + 2], *items[:at], *items[at + 2 :]]
    broken = replace(
        program, ranks=(replace(program.ranks[0], instructions=tuple(early)), program.ranks[1])
    )
    verify(program, ((0,), (1,)))
    with pytest.raises(ProgramError, match="waits for"):
        verify(broken, ((0,), (1,)))
