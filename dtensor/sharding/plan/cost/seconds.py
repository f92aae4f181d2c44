"""The predicted seconds of a plan's steps on one rank, and the list of its collectives.

    step_seconds(plan, step, 0)    # StepSeconds(compute=..., communication=..., host=...)
    plan.collectives[0]            # PlannedCollective(name="y", kind="all_reduce", axis="tp", ...)

Ops are priced by roofline, messages by the alpha-beta model (redistribute/topology.py), on the rank
with the largest shards. Overlap and waiting are predicted in runtime/lower/timetable.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dtensor.sharding.plan.cost.step_cost import messages_of, step_cost
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Norm, Redistribute, Step, StepPhase, Transfer


class StepSeconds(NamedTuple):
    """Seconds of a step: computation and communication of the device, and launches of the host."""

    compute: float
    communication: float
    host: float


def step_seconds(plan: PlanRecord, step: Step, stage: int) -> StepSeconds:
    """Return the predicted seconds of one execution of the step on a rank of ``stage``."""
    cost, topology = step_cost(plan, step, stage), plan.topology
    return StepSeconds(
        cost.compute_seconds(topology),
        cost.communication_seconds(topology),
        cost.host_seconds(topology),
    )


# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One line of `Plan.collectives`. ``bytes_sent`` is for one of the ``times`` executions."""

    name: str
    kind: str
    axis: str
    dtype: str
    bytes_sent: int
    times: int
    phase: StepPhase
    stage: int
    source: str

    @property
    def key(self) -> str:
        """``all_reduce@tp``."""
        return f"{self.kind}@{self.axis}"


def step_times(plan: PlanRecord, step: Step) -> int:
    """Return how often the step runs in one training step."""
    return 1 if step.once or not step.in_microbatch else plan.num_microbatches


def all_collectives(plan: PlanRecord) -> tuple[PlannedCollective, ...]:
    """Return the messages of all steps, in program order."""
    return tuple(collective for step in plan.steps for collective in collectives_of(plan, step))


def collectives_of(plan: PlanRecord, step: Step) -> tuple[PlannedCollective, ...]:
    """Return the messages of the step, one for each axis and stage that it involves."""
    match step:
        case Redistribute(tied=(_, *_)):
            names, source = dict(zip(step.tied, step.results, strict=True)), ""
        case Redistribute(name=name, source=source) | Transfer(result=name, source=source):
            names = {step.stage: name}
        case Norm():
            names, source = dict.fromkeys(range(plan.num_stages), step.result), ""
        case _:
            return ()
    return tuple(
        PlannedCollective(
            name=name,
            kind=message.kind,
            axis=message.axis,
            dtype=str(message.dtype).removeprefix("torch."),
            bytes_sent=int(message.bytes_sent),
            times=step_times(plan, step),
            phase=step.phase,
            stage=stage,
            source=source,
        )
        for stage, name in names.items()
        for message in messages_of(plan, step, stage)
    )
