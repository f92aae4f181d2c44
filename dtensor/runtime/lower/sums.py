"""Lowering sums over microbatches: each result is added to its total when its action ends.

    F0 B0    total = grad_w.to(float32)        a gradient of bf16: its total is float32
    F1 B1    total = total + grad_w             now in storage of its own
    F2 B2    total = total.add_(grad_w)

The first sum is the gradient itself, which may be a view of what something else reads; the second
is new, and nothing reads it but the next: from then on it grows in place.

Invariants: a left fold in the order of the schedule, which in the published ones is that of
microbatches; later steps find the last sum by `RankLowering.accumulated`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtensor.sharding.plan.steps import Accumulate

if TYPE_CHECKING:
    from dtensor.runtime.lower.rank import RankLowering
    from dtensor.runtime.schedule import Action


def accumulate(rank: RankLowering, action: Action) -> None:
    """Add the outputs that the steps of this action have made to their sums."""
    last = action.microbatch == rank.plan.num_microbatches - 1
    for step in rank.actions.sums(action.kind, action.stage):
        _add(rank, step, action.microbatch, last=last)


def _add(rank: RankLowering, step: Accumulate, microbatch: int, *, last: bool) -> None:
    segment = rank.short_segment(microbatch)
    total = step.result if last else f"{step.result}@{microbatch}"
    segment.table[step.result] = total
    segment.table[step.operand] = rank.value(step.operand, microbatch)
    previous = rank.accumulated.get(step.result)
    if previous is None:
        text = f"{step.result} = {step.operand}"
        if step.src.dtype != step.dst.dtype:
            text += f".to({segment.code.literal(step.dst.dtype, ())})"
        segment.code.line(text, [step.operand], [step.result], None)
    else:  # float32 and bf16 are added in float32
        before = f"{step.result}_before"
        segment.table[before] = previous
        own = step.result in rank.owned
        added = f"{before}.add_({step.operand})" if own else f"{before} + {step.operand}"
        text = f"{step.result} = {added}"
        rank.owned.add(step.result)
        segment.code.line(text, [before, step.operand], [step.result], None)
    rank.price(segment, step)
    rank.accumulated[step.result] = total
    rank.nbytes[total] = step.dst.local_nbytes(rank.at(None))
