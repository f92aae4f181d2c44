"""What the steps of a plan communicate, as data: the lines of `Plan.collectives`.

    plan.collectives[0]    # Collective(name="y", kind="all_reduce", axis="tp", bytes_sent=64, ...)

A step that stands for several messages (a norm over several axes, a tie of several stages) gives
one entry for each stage and axis. Not here: what a message costs (redistribute/topology.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtensor.sharding.plan.steps import (
    Bucket,
    Convert,
    Norm,
    Regather,
    Step,
    StepPhase,
    TieSum,
    Transfer,
)
from dtensor.sharding.redistribute.moves import FREE_KINDS

if TYPE_CHECKING:
    from dtensor.sharding.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
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


def collectives_of(plan: Plan, step: Step) -> list[Collective]:
    """What one step communicates; of a Norm, or a tie, on each of its stages."""
    m = plan.num_microbatches
    match step:
        case Convert(move=move) if move.kind not in FREE_KINDS:
            return [
                Collective(
                    name=step.result,
                    kind=move.kind,
                    axis=move.axis,
                    dtype=str(move.src.dtype).removeprefix("torch."),
                    bytes_sent=move.bytes_sent,
                    times=1 if step.once or step.phase == "optimizer" else m,
                    phase=step.phase,
                    stage=step.stage,
                    source=step.source,
                )
            ]
        case Transfer(spec=spec):
            return [
                Collective(
                    name=step.result,
                    kind="transfer",
                    axis=plan.stage_axis or "",
                    dtype=str(spec.dtype).removeprefix("torch."),
                    bytes_sent=spec.max_local_nbytes,
                    times=1 if step.once else m,
                    phase=step.phase,
                    stage=step.stage,
                    source=step.source,
                )
            ]
        case Bucket():
            return [
                Collective(
                    name=step.name,
                    kind=step.kind,
                    axis=step.axis,
                    dtype=str(step.moves[0].src.dtype).removeprefix("torch."),
                    bytes_sent=sum(move.bytes_sent for move in step.moves),
                    times=1 if step.once or step.phase == "optimizer" else m,
                    phase=step.phase,
                    stage=step.stage,
                    source="",
                )
            ]
        case Regather():
            return [
                Collective(
                    name=step.name,
                    kind="all_gather",
                    axis=step.axis,
                    dtype=str(step.moves[0].src.dtype).removeprefix("torch."),
                    bytes_sent=sum(move.bytes_sent for move in step.moves),
                    times=1,
                    phase="optimizer",
                    stage=step.stage,
                    source="",
                )
            ]
        case TieSum(spec=spec):
            num = len(step.stages)
            each = -(-2 * spec.max_local_nbytes * (num - 1) // num)
            return [
                Collective(
                    name=name,
                    kind="all_reduce",
                    axis=plan.stage_axis or "",
                    dtype=str(spec.dtype).removeprefix("torch."),
                    bytes_sent=each,
                    times=1,
                    phase="optimizer",
                    stage=stage,
                    source="",
                )
                for name, stage in zip(step.results, step.stages, strict=True)
            ]
        case Norm():
            return [
                Collective(
                    name=step.result,
                    kind="all_reduce",
                    axis=axis,
                    dtype="float32",
                    bytes_sent=-(-2 * 4 * (num - 1) // num),
                    times=1,
                    phase="optimizer",
                    stage=stage,
                    source="",
                )
                for axis, num in plan.mesh.shape.items()
                if num > 1
                for stage in range(plan.num_stages)
            ]
        case _:
            return []
