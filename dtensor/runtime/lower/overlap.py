"""Overlap of messages with computation: which messages of an action start early and end late.

    grad_h = mm(grad, w)             grad_h = mm(grad, w)
    grad_w = mm(grad', h)            start  all_reduce(grad_h)
    all_reduce(grad_h)               grad_w = mm(grad', h)
    ... grad_h_reduced ...           wait;  ... grad_h_reduced ...

Only messages move, so results are bitwise equal and other values live as long as before. Without
microbatches, the reduction of a bucket of gradients starts in the backward, one at a time.
Invariant: the order depends on the plan alone, so all ranks of a group start their collectives in
one order. Transfers between stages and gathers of parameters keep their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtensor.sharding.plan.cost.seconds import StepSeconds
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Step

CUT_SECONDS = 2e-6
"""The cost of splitting local code in two: one more Call, with its inputs and outputs."""


def early(
    steps: Sequence[Step], seconds: Callable[[Step], StepSeconds]
) -> tuple[tuple[Step, ...], frozenset[int]]:
    """Return the steps of an action in their new order, and the ids of messages that are waited for
    late. A message starts after the last step that it reads from and ends before the first step
    that reads its result, if this hides more than `CUT_SECONDS`. A message that reads the result of
    another message keeps its place."""
    maker_of = {name: at for at, step in enumerate(steps) for name in step.gives}
    first_read: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in step.reads:
            first_read.setdefault(name, at)
    starts_before: dict[int, list[Step]] = {}
    late: set[int] = set()
    for at, step in enumerate(steps):
        if not step.may_be_late:
            continue
        sources = [maker_of[name] for name in step.reads if name in maker_of]
        begin = 1 + max(sources, default=-1)
        if any(steps[source].may_be_late for source in sources):
            begin = at
        end = min(
            (first_read[name] for name in step.gives if name in first_read), default=len(steps)
        )
        meanwhile = (other for other in steps[begin:end] if other is not step)
        hidden = sum(seconds(other).compute for other in meanwhile)
        if min(hidden, seconds(step).communication) > CUT_SECONDS:
            late.add(id(step))
            starts_before.setdefault(begin, []).append(step)
    order: list[Step] = []
    for at, step in enumerate(steps):
        order += starts_before.get(at, [])
        if id(step) not in late:
            order.append(step)
    return tuple(order), frozenset(late)


def reductions_of(plan: PlanRecord, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the reductions of gradients that read only results of these ``steps`` of a backward.
    With microbatches there are none, because reductions then read the sums over microbatches."""
    results = {name for step in steps for name in step.gives}
    return tuple(s for s in plan.steps if s.reduces_gradients and results.issuperset(s.reads))
