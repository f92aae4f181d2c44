"""A Plan: every placement and every collective decided, step by step; and what it costs.

    plan.collectives      each reduction, gather, exchange and transfer, as data
    plan.memory           bytes per rank of each stage, by what holds them
    plan.regions          what runs again in the backward; plan.plain is the plan without that
    plan.explain("h")     why a value has its placement, why each collective on it is there
    print(plan)           one step a line (plan/text/render.py)

Steps are in program order. Those marked ``once`` run once a step, the others once a microbatch;
those of the phase "optimizer" run after the last microbatch. Specs carry the virtual axis ``mb``
when there are microbatches: a batch is sharded over it, a gradient pending over it.

Invariants: each step's operands are results of earlier steps, or inputs; consecutive specs of one
value differ only by Convert and Transfer steps. A plan knows no actors and no backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.opened_factors import Opened
from dtensor.sharding.plan.cost.collectives import Collective, collectives_of
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.steps import Step, operands_of, results_of
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.sharding.plan.hints import Hint
    from dtensor.sharding.plan.passes.recompute import Region


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """Where an input lives: its plan value per stage, and the placement that it is used at.

    ``stored``: of a parameter under ``zero`` (its level), the spec of what is kept split: at 1 its
    optimizer state, at 2 its gradient too, at 3 the parameter itself.
    """

    name: str
    label: str
    kind: str
    spec: TensorSpec
    stages: tuple[int, ...]
    stored: TensorSpec | None = None
    zero: int = 0

    @property
    def held(self) -> TensorSpec:
        """The spec under which the ranks hold the input between programs."""
        return self.stored if self.stored is not None and self.zero == 3 else self.spec

    @property
    def state(self) -> TensorSpec:
        """The spec of a parameter's optimizer state."""
        return self.spec if self.stored is None else self.stored


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """Where an output is found when the step has run: (stage, value) pairs."""

    kind: str
    of: int | str
    values: tuple[tuple[int, str], ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank of one stage."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    masters: int = 0  # float32 copies of parameters

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.masters + self.activations


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of one step on the slowest rank, all its stages, without overlap."""

    compute_seconds: float
    communication_seconds: float
    bubble: float  # of the pipeline: the fraction of its ranks' time in which they wait
    waiting_seconds: float = 0.0  # of the slowest rank

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.waiting_seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """See the module docstring. ``mesh`` is the user's; ``inner`` is what specs are stated on:
    the mesh without the stage axis, with the axis ``mb`` where there are microbatches."""

    name: str
    flow: Dataflow
    mesh: Mesh
    inner: Mesh
    stage_axis: str | None
    num_stages: int
    stage_ranks: tuple[int, ...]  # by stage, its coordinate on the stage axis
    num_microbatches: int
    inputs: tuple[PlannedInput, ...]
    steps: tuple[Step, ...]
    outputs: tuple[PlannedOutput, ...]
    opened: tuple[tuple[str, tuple[Opened, ...]], ...]
    topology: Topology
    pinned: tuple[tuple[str, str, str], ...] = ()  # (axis, value, what the user wrote it for)
    bubble: float = 0.0  # of the schedule, with this plan's stages
    waiting: tuple[float, ...] = ()  # seconds of a step, by rank of the stage axis; from these
    auto: tuple[tuple[str, ...], ...] = field(default=(), compare=False)  # chosen stages' patterns
    in_flight: tuple[int, ...] = ()  # microbatches held per stage
    zero: tuple[str, int] | None = None  # the axis over which state is stored split, the level
    schedule: str = ""
    regions: tuple[Region, ...] = ()  # what runs again in the backward
    plain: Plan | None = field(default=None, compare=False, repr=False)  # with nothing run again
    hints: tuple[Hint, ...] = ()  # of hints.py, where they were asked for; printed last

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every step that communicates, in program order."""
        found: list[Collective] = []
        for step in self.steps:
            found.extend(self.collectives_of(step))
        return tuple(found)

    def collectives_of(self, step: Step) -> list[Collective]:
        """What one step communicates; of a Norm, or a tie, on each of its stages."""
        return collectives_of(self, step)

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Per stage; see plan/cost/memory.py for what is counted."""
        from dtensor.sharding.plan.cost.memory import stage_memory

        return tuple(stage_memory(self, stage) for stage in range(self.num_stages))

    @cached_property
    def cost(self) -> Cost:
        """Of the slowest rank; communication and compute are not overlapped."""
        from dtensor.sharding.plan.cost.memory import stage_seconds

        pairs = [stage_seconds(self, stage) for stage in range(self.num_stages)]
        ranks = [
            (sum(pairs[s][0] for s in held), sum(pairs[s][1] for s in held)) for held in self.hosted
        ]
        compute, communication = slowest = max(ranks, key=sum)
        waiting = self.waiting or (0.0,) * len(ranks)
        last = max(sum(rank) + waited for rank, waited in zip(ranks, waiting, strict=True))
        return Cost(compute, communication, self.bubble, last - sum(slowest))

    @property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """By rank of the stage axis, the stages that it hosts, ascending."""
        num = self.mesh.axis_size(self.stage_axis) if self.stage_axis else 1
        return tuple(
            tuple(s for s in range(self.num_stages) if self.stage_ranks[s] == rank)
            for rank in range(num)
        )

    def explain(self, name: str) -> str:
        """Why the value ``name`` has its placement, and why each collective on it is there."""
        from dtensor.sharding.plan.text.render import explain

        return explain(self, name)

    def rounding(self) -> str:
        """A bound on what the order of each reduction can change; see plan/text/rounding.py."""
        from dtensor.sharding.plan.text.rounding import rounding_text

        return rounding_text(self)

    def __str__(self) -> str:
        from dtensor.sharding.plan.text.render import render

        return render(self)

    def value_specs(self) -> Mapping[str, TensorSpec]:
        """Plan value name to spec, inputs included."""
        found = {item.name: item.held for item in self.inputs}
        for step in self.steps:
            for name, spec in results_of(step):
                found[name] = spec
        return found

    def verify(self) -> None:
        """AssertionError where a step reads a value that no earlier step defines."""
        known = {item.name for item in self.inputs}
        for step in self.steps:
            for name in operands_of(step):
                assert name in known, f"{step} reads {name} before it is defined"
            known.update(name for name, _ in results_of(step))


def require_value(plan: Plan, name: str) -> None:
    if name not in plan.value_specs():
        import difflib

        near = difflib.get_close_matches(name, plan.value_specs(), 3)
        raise PlanningError(
            f"the plan has no value {name!r}" + (f"; near: {', '.join(near)}" if near else "")
        )
