"""The actions of all ranks in the schedule's order, and the plan's steps that each action runs.

    actions = Actions(plan, OneFOneB(2).grid(2, 2))
    actions.of(0)                  # ((0, F0), (1, F1), ...): schedule step and action of rank 0
    actions.steps("F", 1)          # the plan's steps of the forward of stage 1

A schedule may split a backward B into I and W. W: ops that only weight gradients of one module
need. I: all other backward ops, so that every W can run after its I. For mm(mm(x, w), v):

    I    grad_h = mm(grad_y, v'), grad_x = mm(grad_h, w'), and the transfer of grad_x
    W    grad_v = mm(h', grad_y), grad_w = mm(x', grad_h)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
    """The actions of a plan under a schedule. If ``grid`` is None, each microbatch passes all
    stages and, if the plan has a backward, returns before the next one starts."""

    def __init__(self, plan: PlanRecord, grid: Grid | None) -> None:
        self.plan = plan
        self.all = tuple(grid.actions() if grid is not None else _sequential_actions(plan))
        """(schedule step, pipeline rank, action), sorted by step."""
        self._steps: dict[tuple[Kind, int], tuple[Step, ...]] = {}
        self._sums: dict[tuple[Kind, int], tuple[Accumulate, ...]] = {}
        self._steps_of_phase: dict[tuple[StepPhase, int], list[Step]] = defaultdict(list)
        self._accumulations: dict[int, list[Accumulate]] = defaultdict(list)
        for step in plan.steps:
            if isinstance(step, Accumulate):
                self._accumulations[step.stage].append(step)
            elif not step.once:
                stages = (step.to_stage,) if isinstance(step, Transfer) else ()
                for stage in (step.stage, *stages):
                    self._steps_of_phase[step.phase, stage].append(step)
        self._receive_steps: dict[Event, int] = {
            event: step for step, _, action in self.all for event in action.gives()
        }

    def of(self, pipeline_rank: int) -> tuple[tuple[int, Action], ...]:
        """Return the actions of a rank, each with its step in the schedule."""
        return tuple((step, action) for step, rank, action in self.all if rank == pipeline_rank)

    def received_at(self, transfer: Transfer, microbatch: int | None) -> int:
        """Return the schedule step of the action that receives, or -1 if no action does."""
        if microbatch is None:
            return -1
        kind = "output" if transfer.phase == "forward" else "gradient"
        return self._receive_steps[kind, transfer.to_stage, microbatch]

    def steps(self, kind: Kind, stage: int) -> tuple[Step, ...]:
        """Return the plan's steps that an action runs, in plan order."""
        key = kind, stage
        if key not in self._steps:
            steps = self._steps_of_phase["forward" if kind == "F" else "backward", stage]
            if kind in ("I", "W"):  # W makes all results of a step, or none
                weights = self._weight_values
                steps = [s for s in steps if (kind == "W") != weights.isdisjoint(s.gives)]
            self._steps[key] = tuple(steps)
        return self._steps[key]

    def sums(self, kind: Kind, stage: int) -> tuple[Accumulate, ...]:
        """Return the sums over microbatches that results of an action are added to."""
        key = kind, stage
        if key not in self._sums:
            results = {name for step in self.steps(kind, stage) for name in step.gives}
            self._sums[key] = tuple(s for s in self._accumulations[stage] if s.operand in results)
        return self._sums[key]

    @cached_property
    def reductions(self) -> Mapping[Action, tuple[Redistribute, ...]]:
        """The reductions of gradients that can start in a backward, by the last action that makes
        one of their operands or adds to it."""
        steps = [s for s in self.plan.steps if s.reduces_gradients and s.may_be_late]
        missing: dict[int, set[str]] = defaultdict(set)
        for step in steps:
            missing[step.stage].update(step.reads)
        makers = self.steps if self.plan.num_microbatches == 1 else self.sums
        made_at: dict[str, int] = {}  # by value, the index of the last action that makes it
        for at, (_, _, action) in reversed(tuple(enumerate(self.all))):
            if action.kind != "F" and missing[action.stage]:
                gives = {name for s in makers(action.kind, action.stage) for name in s.gives}
                made_at |= dict.fromkeys(missing[action.stage] & gives, at)
                missing[action.stage] -= gives
        reductions: dict[Action, tuple[Redistribute, ...]] = {}
        for step in steps:
            if isinstance(step, Redistribute) and made_at.keys() >= set(step.reads):
                _, _, action = self.all[max(made_at[name] for name in step.reads)]
                reductions[action] = (*reductions.get(action, ()), step)
        return reductions

    @cached_property
    def _weight_values(self) -> frozenset[str]:
        return weight_half(self.plan)


def _sequential_actions(plan: PlanRecord) -> Iterator[tuple[int, int, Action]]:
    """Yield (schedule step, pipeline rank, action) without a schedule: one action at a time."""
    # a backward may have no Compute step: the backward of the identity is only a conversion
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
    """Return the values that a W of the plan computes. The other backward values belong to I: a
    transfer, another output or the gradients of several modules need them."""
    reached = _modules_reached(plan)
    steps = [s for s in plan.steps if s.phase == "backward" and not s.once]
    needed_by_i: set[str] = set()
    for step in reversed(steps):
        names = step.gives
        modules = {module for name in names for module in reached[name]}
        is_bucket = isinstance(step, Redistribute) and bool(step.bucket)
        if (
            isinstance(step, Transfer)
            or any(name in needed_by_i for name in names)
            or (not is_bucket and (len(modules) > 1 or _OTHER in modules))
        ):
            needed_by_i.update(step.reads)
            needed_by_i.update(names)
    return frozenset(name for step in steps for name in step.gives if name not in needed_by_i)


def _modules_reached(plan: PlanRecord) -> dict[str, set[str]]:
    """Return, by value, the modules whose parameter gradients depend on it; `_OTHER` stands for
    outputs that are no gradients."""
    reached: dict[str, set[str]] = defaultdict(set)
    label_of = {item.name: item.label for item in plan.inputs}
    for output in plan.outputs:
        for _, name in output.values:
            label = label_of.get(str(output.of), str(output.of))
            reached[name].add(_module(label) if output.kind in ("gradient", "delayed") else _OTHER)
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


def _module(label: str) -> str:
    return label.rpartition(".")[0]


# -- prices of actions -----------------------------------------------------------------------------


def stage_costs(plan: PlanRecord) -> Costs:
    """Return the predicted seconds of F, I and W of each stage, for the schedule `Searched`. Each
    is the time of the device or of the host, whichever is longer."""
    actions = Actions(plan, None)

    def seconds(kind: Kind, stage: int) -> float:
        spent = [step_seconds(plan, step, stage) for step in actions.steps(kind, stage)]
        return max(sum(s.compute + s.communication for s in spent), sum(s.host for s in spent))

    def by_stage(kind: Kind) -> tuple[float, ...]:
        return tuple(seconds(kind, stage) for stage in range(plan.num_stages))

    return Costs(forward=by_stage("F"), input=by_stage("I"), weight=by_stage("W"))
