"""Lowering: a Plan and a schedule become one daft Program, a list of instructions per rank.

    lowered = lower(plan, OneFOneB(microbatches=4).grid(2, 2))
    lowered.program            # verified by daft, run by any backend
    lowered.inputs[rank]       # which values the controller feeds to that rank

Nothing is decided here: the plan says what, the schedule says when. For each action of a rank's
row, the steps of that stage and phase are laid down in plan order; between two communications
stands one `Call` of straight-line code (code.py). Packing for a collective and putting its pieces
together are lines of that code. A value of microbatch i is called `name@i`.

A receive is posted an action before the one that waits for it. A send is waited for before the
first action whose step in the schedule comes after that of the action which receives it; values are
freed after their last use. Invariants are daft's: `daft.verify` proves that the program cannot
hang.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtensor.daft import Program
from dtensor.errors import PlanningError
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.builder import RankBuilder, Roles, Shared
from dtensor.runtime.lower.code import Functions
from dtensor.runtime.lower.rank import lower_rank
from dtensor.runtime.schedule import Grid
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """``inputs``: per rank, what the controller feeds it; ``outputs``: what it returns."""

    plan: Plan
    program: Program

    @property
    def inputs(self) -> tuple[tuple[str, ...], ...]:
        return tuple(rank.inputs for rank in self.program.ranks)

    @property
    def outputs(self) -> tuple[tuple[str, ...], ...]:
        return tuple(rank.outputs for rank in self.program.ranks)


def lower(
    plan: Plan,
    grid: Grid | None,
    *,
    device: torch.device | None = None,
    roles: Roles | None = None,
) -> Lowered:
    """The program of ``plan``. ``grid=None``: forward only, or one microbatch on one stage."""
    if grid is not None and grid.home() != plan.stage_ranks:
        raise PlanningError(
            f"the schedule has the stages on ranks {list(grid.home())}, and the plan has them on "
            f"{list(plan.stage_ranks)}.\n{grid}\nfix: plan with the step that has this schedule"
        )
    roles = roles or Roles()
    functions = Functions()
    shared = Shared(plan, Actions(plan, grid), device or torch.device("cpu"))
    builders = [
        RankBuilder(shared=shared, rank=rank, functions=functions, roles=roles)
        for rank in range(plan.mesh.size)
    ]
    program = Program(
        name=plan.name,
        ranks=tuple(map(lower_rank, builders)),
        functions=tuple(functions.found.items()),
        stage_of=tuple(builder.stages[0] for builder in builders),
    )
    return Lowered(plan=plan, program=program)


def holders(plan: Plan, item: PlannedInput) -> tuple[int, ...]:
    """The ranks that host a stage which reads an input."""
    if plan.stage_axis is None:
        return tuple(range(plan.mesh.size))
    parts = {plan.stage_ranks[stage] for stage in item.stages}
    return tuple(
        rank
        for rank in range(plan.mesh.size)
        if plan.mesh.coordinates(rank)[plan.stage_axis] in parts
    )


def fed_spec(plan: Plan, name: str) -> TensorSpec:
    """The spec under which an argument is cut for feeding: on the user's mesh, stage axis whole."""
    spec = next(item.spec for item in plan.inputs if item.name == name)
    return on_mesh(plan, spec)


def on_mesh(plan: Plan, spec: TensorSpec) -> TensorSpec:
    """A spec of the inner mesh restated on the user's mesh; replicated along the stage axis."""
    sharding = spec.sharding
    placements = tuple(sharding.get(axis, REPLICATE) for axis in plan.mesh.axes)
    return TensorSpec(spec.shape, spec.dtype, plan.mesh, placements)
