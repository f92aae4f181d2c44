"""Which messages of an action begin early and are waited for late: the rank computes meanwhile.

    grad_h = mm(grad, w)             grad_h = mm(grad, w)
    grad_w = mm(grad', h)            start  all_reduce(grad_h)
    all_reduce(grad_h)               grad_w = mm(grad', h)
    ... grad_h_reduced ...           wait;  ... grad_h_reduced ...

A plan has a collective where its result is first asked for. `early` puts it right behind what it
reads, and has it waited for before the first step that reads what it makes, where the price says
that this hides more than `CUT_SECONDS`. Local steps keep their order, so their values live as long
as before: all that is held for longer is what the messages under way make. As the same kernels get
the same inputs, the bits are the same.

Reductions of gradients over dp, which stand at the end of a step, begin in its backward by the same
rule, where there are no microbatches: each as soon as the last gradient of its bucket is made. One
of them is under way at a time.

Invariants: the order depends on the plan alone, not on the rank, so that all members of a group
start their collectives in one order. Messages that one reads of another keep their places, and so
do transfers between stages (program.py) and gathers of parameters, whose place the plan has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtensor.sharding.plan.cost.seconds import StepSeconds
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Step

CUT_SECONDS = 2e-6
"""What it costs to cut local code in two: an instruction more, and what it reads and makes."""


def early(
    steps: Sequence[Step], seconds: Callable[[Step], StepSeconds]
) -> tuple[tuple[Step, ...], frozenset[int]]:
    """Return the steps of an action in their new order, and the ids of the steps whose results are
    waited for late."""
    maker_of = {name: at for at, step in enumerate(steps) for name in step.gives}
    read: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in step.reads:
            read.setdefault(name, at)
    before: dict[int, list[Step]] = {}
    late: set[int] = set()
    for at, step in enumerate(steps):
        if not step.may_be_late:
            continue
        sources = [maker_of[name] for name in step.reads if name in maker_of]
        begin = 1 + max(sources, default=-1)
        if any(steps[source].may_be_late for source in sources):
            begin = at
        end = min((read[name] for name in step.gives if name in read), default=len(steps))
        inside = (other for other in steps[begin:end] if other is not step)
        hidden = sum(seconds(other).compute for other in inside)
        if min(hidden, seconds(step).communication) > CUT_SECONDS:
            late.add(id(step))
            before.setdefault(begin, []).append(step)
    order: list[Step] = []
    for at, step in enumerate(steps):
        order += before.get(at, [])
        if id(step) not in late:
            order.append(step)
    return tuple(order), frozenset(late)


def reductions_of(plan: PlanRecord, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Reductions of gradients that the end of a step has, and a backward may begin: all that they
    read is made by its ``steps``. With microbatches it is not, for these add up."""
    results = {name for step in steps for name in step.gives}
    return tuple(s for s in plan.steps if s.reduces_gradients and results.issuperset(s.reads))
