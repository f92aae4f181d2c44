"""What the steps of a plan communicate, as data: the lines of `Plan.collectives`.

    plan.collectives[0]    # PlannedCollective(name="y", kind="all_reduce", axis="tp", ...)

A step that stands for several messages (a norm over several axes, a tie of several stages) gives
one entry for each stage and axis. Not here: what a message costs (redistribute/topology.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dtensor.sharding.plan.record import PlanRecord
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
)
from dtensor.sharding.redistribute.moves import FREE_KINDS


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
    return 1 if step.once or not in_microbatch(step) else plan.num_microbatches


def all_collectives(plan: PlanRecord) -> tuple[PlannedCollective, ...]:
    """Every step that communicates, in program order."""
    return tuple(found for step in plan.steps for found in collectives_of(plan, step))


def collectives_of(plan: PlanRecord, step: Step) -> tuple[PlannedCollective, ...]:
    """What one step communicates; of a Norm, or a tie, on each of its stages."""
    return tuple(
        PlannedCollective(
            name=name,
            kind=kind,
            axis=axis,
            dtype=str(dtype).removeprefix("torch."),
            bytes_sent=bytes_sent,
            times=step_times(plan, step),
            phase=step.phase,
            stage=stage,
            source=step.source if isinstance(step, Convert | Transfer) else "",
        )
        for name, kind, axis, dtype, bytes_sent, stage in _messages(plan, step)
    )


_Message = tuple[str, str, str, torch.dtype, int, int]


def _messages(plan: PlanRecord, step: Step) -> Iterator[_Message]:
    """(name, kind, axis, dtype, bytes sent, stage) of each message of a step."""
    across = plan.stage_axis or ""
    match step:
        case Convert(move=move) if move.kind not in FREE_KINDS:
            yield step.result, move.kind, move.axis, move.src.dtype, move.bytes_sent, step.stage
        case Transfer(spec=spec):
            sent = spec.max_local_nbytes
            yield step.result, "transfer", across, spec.dtype, sent, step.stage
        case Bucket():
            sent = sum(move.bytes_sent for move in step.moves)
            yield step.name, step.kind, step.axis, step.moves[0].src.dtype, sent, step.stage
        case TieSum(spec=spec):
            sent = _all_reduced(spec.max_local_nbytes, len(step.stages))
            for name, stage in zip(step.results, step.stages, strict=True):
                yield name, "all_reduce", across, spec.dtype, sent, stage
        case Norm():
            for axis, num in plan.mesh.shape.items():
                for stage in range(plan.num_stages) if num > 1 else ():
                    sent = _all_reduced(torch.float32.itemsize, num)
                    yield step.result, "all_reduce", axis, torch.float32, sent, stage
        case Compute() | Convert() | Accumulate() | Update():
            return


def _all_reduced(nbytes: int, num: int) -> int:
    """Bytes that each of ``num`` ranks sends in a ring."""
    return -(-2 * nbytes * (num - 1) // num)
