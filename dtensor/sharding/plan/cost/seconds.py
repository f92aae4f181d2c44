"""What the steps of a plan communicate, and how long they take: seconds and FLOP of one rank.

    stage_seconds(plan, 0)    # (compute, communication), of one step
    cost_of(plan)             # Cost(compute_seconds=..., communication_seconds=..., ...)
    plan.collectives[0]       # PlannedCollective(name="y", kind="all_reduce", axis="tp", ...)

Rooflines of local ops, the alpha-beta price of each message (redistribute/topology.py), of the rank
at coordinate 0 of every axis, which holds the largest shard of each value. A step that stands for
several messages (a norm over several axes, a tie of several stages) has one entry for each stage
and axis. Not here: overlap, contention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import torch

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    StepPhase,
    Transfer,
    Update,
)
from dtensor.sharding.redistribute.topology import ring_bytes
from dtensor.sharding.spec.spec import TensorSpec


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
        if step.is_on(stage):
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
            if step.results[0] in plan.standing:
                specs = _written_in_place(plan, step)
            moved = sum(spec.max_local_nbytes for spec in specs)
            attention = step.rule.kind == "attention"
            seconds = topology.compute_seconds(
                flops=step.flops, bytes_moved=moved, attention=attention
            )
            return seconds, 0.0
        case Redistribute() if step.is_free:
            return sum(move.seconds(topology) for move in step.moves), 0.0
        case Accumulate():
            moved = step.src.max_local_nbytes + 2 * step.dst.max_local_nbytes
            return topology.compute_seconds(flops=0, bytes_moved=moved), 0.0
        case Update():
            kept = 2 * (step.state_bytes + step.master_bytes)  # read and written
            moved = 3 * step.spec.max_local_nbytes + kept
            return topology.update_seconds(bytes_moved=moved), 0.0
        case Redistribute() | Transfer() | Norm():
            own = (c for c in collectives_of(plan, step) if c.stage == stage)
            return 0.0, sum(message_seconds(plan, step, c) for c in own)
        case _:
            assert_never(step)


def message_seconds(plan: PlanRecord, step: Step, c: PlannedCollective) -> float:
    """Predicted seconds of one of the step's `collectives_of`, each time it runs."""
    # of a tie the axis has the stages that are tied
    mesh = step.moves[0].src.mesh if isinstance(step, Redistribute) else plan.mesh
    num = mesh.axis_size(c.axis)
    return plan.topology.collective_seconds(c.kind, c.axis, num=num, bytes_sent=c.bytes_sent)


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


def _written_in_place(plan: PlanRecord, step: Compute) -> tuple[TensorSpec, ...]:
    """What is read and written where the result is state: as many elements as are changed."""
    from dtensor.sharding.ops.in_place import writes_of  # few programs change state

    result, specs = step.results[0], step.operand_specs
    bases = {name: base for write in plan.state_writes for name, base in write.writes}
    if result not in bases:
        return ()
    others = tuple(spec for at, spec in enumerate(specs) if at != bases[result])
    found = writes_of(step.op.call)
    assert found is not None
    whole = specs[bases[result]]
    return (*others, *others) if found.partial else (*specs, whole)


def step_times(plan: PlanRecord, step: Step) -> int:
    """How often the step runs in one training step."""
    return 1 if step.once or not step.in_microbatch else plan.num_microbatches


def all_collectives(plan: PlanRecord) -> tuple[PlannedCollective, ...]:
    """Every step that communicates, in program order."""
    return tuple(found for step in plan.steps for found in collectives_of(plan, step))


def collectives_of(plan: PlanRecord, step: Step) -> tuple[PlannedCollective, ...]:
    """What one step communicates; of a Norm, or a tie, on each of its stages."""
    return tuple(_messages(plan, step))


def _messages(plan: PlanRecord, step: Step) -> Iterator[PlannedCollective]:
    def message(
        name: str, kind: str, axis: str, dtype: torch.dtype, bytes_sent: int, stage: int
    ) -> PlannedCollective:
        return PlannedCollective(
            name=name,
            kind=kind,
            axis=axis,
            dtype=str(dtype).removeprefix("torch."),
            bytes_sent=bytes_sent,
            times=step_times(plan, step),
            phase=step.phase,
            stage=stage,
            source=step.source,
        )

    across = plan.stage_axis or ""
    match step:
        case Redistribute() if not step.is_free:
            kind, axis, dtype = step.kind, step.axis, step.moves[0].src.dtype
            for name, stage, move in zip(step.results, step.tied, step.moves):
                yield message(name, kind, axis, dtype, move.bytes_sent, stage)
            if not step.tied:
                sent = sum(move.bytes_sent for move in step.moves)
                yield message(step.name, kind, axis, dtype, sent, step.stage)
        case Transfer(spec=spec):
            sent = spec.max_local_nbytes
            yield message(step.result, "transfer", across, spec.dtype, sent, step.stage)
        case Norm():
            for axis, num in plan.mesh.shape.items():
                for stage in range(plan.num_stages) if num > 1 else ():
                    sent = ring_bytes("all_reduce", step.dtype.itemsize, num)
                    yield message(step.result, "all_reduce", axis, step.dtype, sent, stage)
        case Compute() | Redistribute() | Accumulate() | Update():
            return
