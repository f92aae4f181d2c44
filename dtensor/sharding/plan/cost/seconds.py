"""How long the steps of a plan take: predicted seconds and FLOP of one rank.

    stage_seconds(plan, 0)    # (compute, communication), of one step
    cost_of(plan)             # Cost(compute_seconds=..., communication_seconds=..., ...)

Rooflines of local ops, the alpha-beta price of each message, of the rank at coordinate 0 of every
axis, which holds the largest shard of each value. Not here: overlap, contention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from dtensor.sharding.plan.cost.collectives import collectives_of, step_times
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Step,
    TieSum,
    Transfer,
    Update,
    stages_of,
)
from dtensor.sharding.redistribute.moves import FREE_KINDS


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


def cost_of(plan: PlanRecord) -> Cost:
    """Of the slowest rank; communication and compute are not overlapped."""
    pairs = [stage_seconds(plan, stage) for stage in range(plan.num_stages)]
    ranks = [
        (sum(pairs[s][0] for s in held), sum(pairs[s][1] for s in held)) for held in plan.hosted
    ]
    compute, communication = slowest = max(ranks, key=sum)
    waiting = plan.waiting or (0.0,) * len(ranks)
    last = max(sum(rank) + waited for rank, waited in zip(ranks, waiting, strict=True))
    return Cost(compute, communication, plan.bubble, last - sum(slowest))


def stage_flops(plan: PlanRecord, stage: int) -> int:
    """FLOP of one rank of ``stage`` in one step."""
    return sum(
        step.flops * step_times(plan, step)
        for step in plan.steps
        if isinstance(step, Compute) and step.stage == stage
    )


def stage_seconds(plan: PlanRecord, stage: int) -> tuple[float, float]:
    """Predicted seconds of (compute, communication) of one rank of ``stage`` in one step.

    A transfer counts at its sender.
    """
    compute = communication = 0.0
    for step in plan.steps:
        if stage in stages_of(step) or isinstance(step, Norm):
            local, sent = step_seconds(plan, step, stage)
            times = step_times(plan, step)
            compute += local * times
            communication += sent * times
    return compute, communication


def step_seconds(plan: PlanRecord, step: Step, stage: int) -> tuple[float, float]:
    """Predicted seconds of (compute, communication) of a rank of ``stage``, each time it runs."""
    topology = plan.topology
    match step:
        case Compute():
            if step.is_view:
                return topology.op_latency, 0.0
            specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
            moved = sum(spec.max_local_nbytes for spec in specs)
            attention = step.rule.kind == "attention"
            seconds = topology.compute_seconds(
                flops=step.flops, bytes_moved=moved, attention=attention
            )
            return seconds, 0.0
        case Convert(move=move):
            seconds = move.seconds(topology)
            return (seconds, 0.0) if move.kind in FREE_KINDS else (0.0, seconds)
        case Accumulate():
            moved = step.src.max_local_nbytes + 2 * step.dst.max_local_nbytes
            return _streamed(plan, moved), 0.0
        case Update():
            kept = 2 * (step.state_bytes + step.master_bytes)  # read and written
            moved = 3 * step.spec.max_local_nbytes + kept
            return topology.update_seconds(bytes_moved=moved), 0.0
        case Transfer():
            if step.stage != stage:
                return 0.0, 0.0
            return 0.0, topology.collective_seconds(
                "transfer", plan.stage_axis or "", num=2, bytes_sent=step.spec.max_local_nbytes
            )
        case Bucket() | TieSum() | Norm():
            return 0.0, _reductions(plan, step, stage)
        case _:
            assert_never(step)


def _streamed(plan: PlanRecord, num_bytes: int) -> float:
    return plan.topology.compute_seconds(flops=0, bytes_moved=num_bytes)


def _reductions(plan: PlanRecord, step: Bucket | TieSum | Norm, stage: int) -> float:
    """Seconds of the step's collectives on one rank of the stage."""
    total = 0.0
    for item in collectives_of(plan, step):
        if item.stage == stage:
            num = len(step.stages) if isinstance(step, TieSum) else plan.mesh.axis_size(item.axis)
            total += plan.topology.collective_seconds(
                item.kind, item.axis, num=num, bytes_sent=item.bytes_sent
            )
    return total
