"""What the steps of a plan communicate, and how long they take: seconds and FLOP of one rank.

    stage_seconds(plan, 0)    # (compute, communication), of one step
    estimated_seconds(plan)   # of the slowest rank, as if no message were hidden
    cost_of(plan)             # Cost(compute_seconds=..., ...): the prediction, by its timetable
    plan.collectives[0]       # PlannedCollective(name="y", kind="all_reduce", axis="tp", ...)

Rooflines of local ops, the alpha-beta price of each message (redistribute/topology.py), of the rank
at coordinate 0 of every axis, which holds the largest shard of each value. A step that stands for
several messages (a norm over several axes, a tie of several stages) has one entry for each stage
and axis. Not here: what is hidden, who waits (runtime/lower/timetable.py); contention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import torch

from dtensor.sharding.plan.record import Cost, PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Step,
    StepPhase,
    TieSum,
    Transfer,
    Update,
    in_microbatch,
    stages_of,
)
from dtensor.sharding.redistribute.moves import FREE_KINDS
from dtensor.sharding.redistribute.topology import ring_bytes
from dtensor.sharding.spec.spec import TensorSpec


def cost_of(plan: PlanRecord) -> Cost:
    """The prediction. Without a timetable, as of one op's plan, all of the slowest rank's work and
    messages one after another."""
    if plan.timetable is not None:
        return plan.timetable.cost(plan)
    compute, communication = max(_ranks(plan), key=sum)
    return Cost(compute, communication, bubble=0.0)


def estimated_seconds(plan: PlanRecord) -> float:
    """An estimate by which candidates are compared: of the slowest rank, all that it computes and
    communicates, one after another."""
    return max(map(sum, _ranks(plan)))


def _ranks(plan: PlanRecord) -> list[tuple[float, float]]:
    """Seconds of (compute, communication), by rank of the stage axis."""
    pairs = [stage_seconds(plan, stage) for stage in range(plan.num_stages)]
    return [
        (sum(pairs[s][0] for s in held), sum(pairs[s][1] for s in held)) for held in plan.hosted
    ]


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
            if step.results[0] in plan.standing:
                specs = _written_in_place(plan, step)
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
            return topology.compute_seconds(flops=0, bytes_moved=moved), 0.0
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
    return 1 if step.once or not in_microbatch(step) else plan.num_microbatches


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
            source=step.source if isinstance(step, Convert | Transfer | Bucket) else "",
        )

    across = plan.stage_axis or ""
    match step:
        case Convert(move=move) if move.kind not in FREE_KINDS:
            sent = move.bytes_sent
            yield message(step.result, move.kind, move.axis, move.src.dtype, sent, step.stage)
        case Transfer(spec=spec):
            sent = spec.max_local_nbytes
            yield message(step.result, "transfer", across, spec.dtype, sent, step.stage)
        case Bucket():
            sent, dtype = sum(move.bytes_sent for move in step.moves), step.moves[0].src.dtype
            yield message(step.name, step.kind, step.axis, dtype, sent, step.stage)
        case TieSum(spec=spec):
            sent = ring_bytes("all_reduce", spec.max_local_nbytes, len(step.stages))
            for name, stage in zip(step.results, step.stages, strict=True):
                yield message(name, "all_reduce", across, spec.dtype, sent, stage)
        case Norm():
            for axis, num in plan.mesh.shape.items():
                for stage in range(plan.num_stages) if num > 1 else ():
                    sent = ring_bytes("all_reduce", step.dtype.itemsize, num)
                    yield message(step.result, "all_reduce", axis, step.dtype, sent, stage)
        case Compute() | Convert() | Accumulate() | Update():
            return
