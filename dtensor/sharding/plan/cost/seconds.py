"""How long the steps of a plan take on one rank, and what they communicate.

    step_seconds(plan, step, 0)    # StepSeconds(compute=..., communication=..., host=...)
    plan.collectives[0]            # PlannedCollective(name="y", kind="all_reduce", axis="tp", ...)

Rooflines of local ops, the alpha-beta price of each message (redistribute/topology.py), of the rank
at coordinate 0 of every axis, which holds the largest shard of each value. A step that stands for
several messages (a norm over several axes, a tie of several stages) has one entry for each stage
and axis. Not here: what is hidden, who waits (runtime/lower/timetable.py); contention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dtensor.sharding.plan.cost.step_cost import messages_of, step_cost
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Norm, Redistribute, Step, StepPhase, Transfer


class StepSeconds(NamedTuple):
    """Seconds of a step: the device computes and communicates, and the ``host`` launches."""

    compute: float
    communication: float
    host: float


def step_seconds(plan: PlanRecord, step: Step, stage: int) -> StepSeconds:
    """Return the predicted seconds of a rank of ``stage``, each time that the step runs."""
    cost, topology = step_cost(plan, step, stage), plan.topology
    return StepSeconds(
        cost.compute_seconds(topology),
        cost.communication_seconds(topology),
        cost.host_seconds(topology),
    )


# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One line of `Plan.collectives`. ``bytes_sent``: per rank and time; it runs ``times``."""

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
    """How often the step runs in one training step."""
    return 1 if step.once or not step.in_microbatch else plan.num_microbatches


def all_collectives(plan: PlanRecord) -> tuple[PlannedCollective, ...]:
    """Every step that communicates, in program order."""
    return tuple(collective for step in plan.steps for collective in collectives_of(plan, step))


def collectives_of(plan: PlanRecord, step: Step) -> tuple[PlannedCollective, ...]:
    """What one step communicates; of a Norm, or a tie, on each of its stages."""
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
