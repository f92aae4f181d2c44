"""The actions of all ranks in one order, and the plan's steps that each of them runs.

    actions = Actions(plan, OneFOneB(2).grid(2, 2))
    actions.of(0)                  # ((0, F0), (1, F1), ...): step and action of pipeline rank 0
    actions.steps("F", 1)          # the forward of stage 1
    actions.received_at(transfer, 0)

Shared by the lowering of all ranks; see split_backward.py for what I and W are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from dtensor.runtime.lower.split_backward import in_weight_half, weight_half
from dtensor.runtime.schedule import Action, Event, Grid, Kind
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Accumulate, Step, Transfer, results_of


class Actions:
    """``grid=None``: a microbatch goes through all stages and, in a plan with a backward, back."""

    def __init__(self, plan: PlanRecord, grid: Grid | None) -> None:
        self.plan = plan
        self.all = tuple(grid.actions() if grid is not None else _one_by_one(plan))
        """(step, pipeline rank, action), by steps."""
        self._steps: dict[tuple[Kind, int], tuple[Step, ...]] = {}
        self._sums: dict[tuple[Kind, int], tuple[Accumulate, ...]] = {}
        self._received: dict[Event, int] = {
            event: step for step, _, action in self.all for event in action.gives()
        }

    def of(self, pipeline_rank: int) -> tuple[tuple[int, Action], ...]:
        return tuple((step, action) for step, rank, action in self.all if rank == pipeline_rank)

    def received_at(self, transfer: Transfer, microbatch: int | None) -> int:
        """The step of the action that receives; -1 where that is before all actions."""
        if microbatch is None:
            return -1
        what = "output" if transfer.phase == "forward" else "gradient"
        return self._received[what, transfer.to_stage, microbatch]

    def steps(self, kind: Kind, stage: int) -> tuple[Step, ...]:
        """The steps of an action, in plan order."""
        key = kind, stage
        if key not in self._steps:
            phase = "forward" if kind == "F" else "backward"
            self._steps[key] = tuple(
                s
                for s in self.plan.steps
                if not s.once
                and s.phase == phase
                and (s.stage == stage or (isinstance(s, Transfer) and s.to_stage == stage))
                and (kind in ("F", "B") or (kind == "W") == in_weight_half(s, self._weights))
            )
        return self._steps[key]

    def sums(self, kind: Kind, stage: int) -> tuple[Accumulate, ...]:
        """The sums over microbatches to which the results of an action are added."""
        key = kind, stage
        if key not in self._sums:
            made = {name for step in self.steps(kind, stage) for name, _ in results_of(step)}
            self._sums[key] = tuple(
                s
                for s in self.plan.steps
                if isinstance(s, Accumulate) and s.stage == stage and s.operand in made
            )
        return self._sums[key]

    @cached_property
    def _weights(self) -> frozenset[str]:
        return weight_half(self.plan)


def _one_by_one(plan: PlanRecord) -> Iterator[tuple[int, int, Action]]:
    # a backward of the identity is a conversion alone
    has_backward = any(s.phase == "backward" and not s.once for s in plan.steps)
    step = 0
    for m in range(plan.num_microbatches):
        forward = [Action("F", m, s) for s in range(plan.num_stages)]
        backward = [Action("B", m, s) for s in reversed(range(plan.num_stages))]
        for action in (*forward, *(backward if has_backward else ())):
            yield step, plan.stage_ranks[action.stage], action
            step += 1
