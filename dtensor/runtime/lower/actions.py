"""The actions of all ranks in one order, and the plan's steps that each of them runs.

    actions = Actions(plan, OneFOneB(2).grid(2, 2))
    actions.of(0)                  # ((0, F0), (1, F1), ...): step and action of pipeline rank 0
    actions.steps("F", 1)          # the forward of stage 1

A backward B may stand as two halves, I and W: what other stages wait for, and what nobody does.

    backward of a stage x -> mm(x, w) -> mm(., v):
      I    grad_h = mm(grad_y, v'), grad_x = mm(grad_h, w'), and its transfer
      W    grad_v = mm(h', grad_y), grad_w = mm(x', grad_h)

A step belongs to W where all that becomes of it are gradients of one module's parameters, and to I
otherwise: where a transfer, another output or the gradients of several modules hang from it. So the
first stage, which sends no gradient, has an I too. What an I needs is in I, so every W can run
after it; gradients that one op makes together with an input's (a norm's) are made in I.

Not here: when they run (runtime/schedule), what becomes of their steps (program.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from dtensor.runtime.schedule import Action, Costs, Event, Grid, Kind
from dtensor.sharding.plan.cost.seconds import step_seconds
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Norm,
    Redistribute,
    Step,
    StepPhase,
    Transfer,
    Update,
)

_OTHER = "an output that is no gradient"


class Actions:
    """``grid=None``: a microbatch goes through all stages and, in a plan with a backward, back."""

    def __init__(self, plan: PlanRecord, grid: Grid | None) -> None:
        self.plan = plan
        self.all = tuple(grid.actions() if grid is not None else _one_by_one(plan))
        """(step, pipeline rank, action), by steps."""
        self._steps: dict[tuple[Kind, int], tuple[Step, ...]] = {}
        self._sums: dict[tuple[Kind, int], tuple[Accumulate, ...]] = {}
        self._of: dict[tuple[StepPhase, int], list[Step]] = defaultdict(list)
        self._totals: dict[int, list[Accumulate]] = defaultdict(list)
        for step in plan.steps:
            if isinstance(step, Accumulate):
                self._totals[step.stage].append(step)
            elif not step.once:
                stages = (step.to_stage,) if isinstance(step, Transfer) else ()
                for stage in (step.stage, *stages):
                    self._of[step.phase, stage].append(step)
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
            self._steps[key] = tuple(
                s
                for s in self._of["forward" if kind == "F" else "backward", stage]
                if kind in ("F", "B") or (kind == "W") == self._in_weight_half(s)
            )
        return self._steps[key]

    def sums(self, kind: Kind, stage: int) -> tuple[Accumulate, ...]:
        """The sums over microbatches to which the results of an action are added."""
        key = kind, stage
        if key not in self._sums:
            results = {name for step in self.steps(kind, stage) for name in step.gives}
            self._sums[key] = tuple(s for s in self._totals[stage] if s.operand in results)
        return self._sums[key]

    @cached_property
    def _weights(self) -> frozenset[str]:
        return weight_half(self.plan)

    def _in_weight_half(self, step: Step) -> bool:
        """All results of a step are made there, or none."""
        return any(name in self._weights for name in step.gives)


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


# -- the halves of a backward ----------------------------------------------------------------------


def weight_half(plan: PlanRecord) -> frozenset[str]:
    """The values that the W of the plan's stages make."""
    reached = _modules_reached(plan)
    steps = [s for s in plan.steps if s.phase == "backward" and not s.once]
    needed: set[str] = set()  # by I
    for step in reversed(steps):
        names = step.gives
        modules = {module for name in names for module in reached[name]}
        if (
            isinstance(step, Transfer)
            or any(name in needed for name in names)
            or (not _is_bucket(step) and (len(modules) > 1 or _OTHER in modules))
        ):
            needed.update(step.reads)
            needed.update(names)
    return frozenset(name for step in steps for name in step.gives if name not in needed)


def _modules_reached(plan: PlanRecord) -> dict[str, set[str]]:
    """By value, the modules whose parameters' gradients it has a part in."""
    reached: dict[str, set[str]] = defaultdict(set)
    label_of = {item.name: item.label for item in plan.inputs}
    for output in plan.outputs:
        for _, name in output.values:
            known = output.kind == "gradient"
            reached[name].add(
                _module(label_of.get(str(output.of), str(output.of))) if known else _OTHER
            )
    for step in reversed(plan.steps):
        match step:
            case Update():
                reached[step.gradient].add(_module(step.parameter))
            case Norm():
                for _, value, parameter in step.operands:
                    reached[value].add(_module(parameter))
            case Redistribute() if not step.tied:
                for operand, result in zip(step.operands, step.results):
                    reached[operand] |= reached[result]
            case _:
                modules = {m for name in step.gives for m in reached[name]}
                for name in step.reads:
                    reached[name] |= modules
    return reached


def _is_bucket(step: Step) -> bool:
    return isinstance(step, Redistribute) and bool(step.bucket)


def _module(label: str) -> str:
    return label.rpartition(".")[0]


# -- prices of actions -----------------------------------------------------------------------------


def stage_costs(plan: PlanRecord) -> Costs:
    """Predicted seconds of each stage's F, I and W, as `Searched` takes them: of the device or, if
    that is longer, of the host."""
    actions = Actions(plan, None)

    def seconds(kind: Kind, stage: int) -> float:
        spent = [step_seconds(plan, step, stage) for step in actions.steps(kind, stage)]
        return max(sum(s.compute + s.communication for s in spent), sum(s.host for s in spent))

    def by_stage(kind: Kind) -> tuple[float, ...]:
        return tuple(seconds(kind, stage) for stage in range(plan.num_stages))

    return Costs(forward=by_stage("F"), input=by_stage("I"), weight=by_stage("W"))
