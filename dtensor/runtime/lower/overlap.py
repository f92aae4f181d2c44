"""The order of a rank's steps: which messages start early, and where the rank waits for them.

    grad_h = mm(grad, w)             grad_h = mm(grad, w)
    grad_w = mm(grad', h)            start  all_reduce(grad_h)
    all_reduce(grad_h)               grad_w = mm(grad', h)
    ... grad_h_reduced ...           wait;  ... grad_h_reduced ...

Reductions of gradients start in a backward, in the last microbatch if there are several, as soon as
their sums are complete. Only messages and the last additions to these sums move, so results are
bitwise equal. The order depends on the plan alone, so all ranks of a group start their collectives
in one order. Programs and predicted times wait at the same places, because `StepWalk` emits both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dtensor.sharding.plan.cost.seconds import StepSeconds
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    MAX_REDUCTIONS,
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
)

CUT_SECONDS = 2e-6
"""The cost of splitting local code in two: one more Call, with its inputs and outputs."""

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class ActionOrder:
    """The steps of an action in the order in which they run, the ids of messages that are waited
    for late, and the sums over microbatches that are added to after the steps."""

    steps: tuple[Step, ...]
    late: frozenset[int]
    sums: tuple[Accumulate, ...]


def early_order(
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


def with_reductions(
    order: ActionOrder,
    reductions: Sequence[Redistribute],
    seconds: Callable[[Step], StepSeconds],
    following: float,
) -> ActionOrder:
    """Return the order with ``reductions`` of gradients: each starts when the last of its operands
    is complete, if this hides more than `CUT_SECONDS`. ``following``: the seconds of computing
    after the action that can hide reductions."""
    steps, late = order.steps, order.late
    maker_of = {name: at for at, step in enumerate(steps) for name in step.gives}
    compute = [seconds(step).compute for step in steps]
    sum_of = {step.result: step for step in order.sums}

    def arrival(at: int) -> int:
        """Return the index of the first step at which the results of a step exist. A late message
        takes as long as the steps before this index."""
        end, left = at + 1, seconds(steps[at]).communication if id(steps[at]) in late else 0.0
        names = steps[at].gives
        while left > 0 and end < len(steps) and not set(names).intersection(steps[end].reads):
            left -= compute[end]
            end += 1
        while end < len(steps) and id(steps[end]) in late:  # messages of the backward start first
            end += 1
        return end

    starts_before: dict[int, list[Step]] = {}
    for step in reductions:
        sums = [sum_of[name] for name in step.reads if name in sum_of]
        operands = (*step.reads, *(total.operand for total in sums))
        begin = max(arrival(maker_of[name]) for name in operands if name in maker_of)
        hidden = following + sum(compute[begin:])
        if min(hidden, seconds(step).communication) > CUT_SECONDS:
            starts_before.setdefault(begin, []).extend((*sums, step))
    started = [step for begun in starts_before.values() for step in begun]
    new_steps = [
        step
        for at in range(len(steps) + 1)
        for step in (*starts_before.get(at, ()), *steps[at : at + 1])
    ]
    ids = frozenset(map(id, started))
    reduced = frozenset(id(step) for step in started if step.reduces_gradients)
    rest = tuple(step for step in order.sums if id(step) not in ids)
    return ActionOrder(tuple(new_steps), late | reduced, rest)


class StepWalk(ABC, Generic[Message]):
    """A walk through steps of the ``stages`` of one rank. Subclasses emit instructions (program.py)
    or items of the clock (timetable.py). A late message is completed before the first step that
    reads one of its results, a send after all receives of its value have started."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.in_flight: dict[str, Message] = {}  # by plan value, the started message that makes it
        self.sends: list[tuple[int, str]] = []  # in flight: (schedule step of the receive, value)
        self.ran_early: set[int] = set()  # ids of reductions of gradients that began in a backward
        self.reducing: deque[tuple[str, ...]] = deque()  # the results of the last reductions
        self.in_round = False  # whether it emits a round of delayed reductions

    def concerns(self, step: Step) -> bool:
        """Whether the rank has a part in the step. Every rank has a part in a norm."""
        return any(map(step.is_on, self.stages))

    def run_ordered(self, order: ActionOrder, stage: int) -> None:
        """Emit an action of ``stage``. Reductions of gradients may be in flight at its end."""
        self.run_steps(order.steps, stage, order.late)
        own = (step for step in order.steps if not step.reduces_gradients)
        self.complete(name for step in own for name in step.gives)
        self.run_steps(order.sums, stage)

    def run_steps(
        self, steps: Iterable[Step], stage: int | None = None, late: Collection[int] = ()
    ) -> None:
        """Emit steps of an action of ``stage``, or of no action if ``stage`` is None. ``late``: ids
        of messages that are waited for only before their results are read."""
        for step in steps:
            self.complete(step.reads)
            self.prepare(step)
            match step:
                case Compute():
                    self.compute(step)
                case Redistribute() if step.tied:
                    self.sum_tied(step)
                case Redistribute() if not step.in_place:
                    is_late = id(step) in late
                    if step.reduces_gradients and step.may_be_late and not self.in_round:
                        if len(self.reducing) == MAX_REDUCTIONS:
                            self.complete(self.reducing.popleft())
                        self.reducing.append(step.results)
                        self.ran_early.update([id(step)] if is_late else [])
                    gathers = bool(step.bucket) and step.kind == "all_gather"
                    message = self.redistribute(step, wait=not (is_late or gathers))
                    if message is not None:
                        self.in_flight |= dict.fromkeys(step.gives, message)
                case Transfer():
                    self.transfer(step, stage)
                case Norm():
                    self.norm(step)
                case Accumulate():
                    self.accumulate(step)
                case Update() | Redistribute():
                    pass  # updates and gathers in place end the step

    def run_round(self, plan: PlanRecord, number: int) -> None:
        """Emit a round of `PlanRecord.delayed_reductions`, without waiting for its messages. They
        have channels of their own, so that messages of actions do not wait for them."""
        for steps in plan.delayed_reductions[number : number + 1]:
            here = [step for step in steps if self.concerns(step)]
            self.in_round = True
            self.run_steps(here, late=set(map(id, here)))
            self.in_round = False
            self.ran_early.update(map(id, here))

    def end_steps(self, plan: PlanRecord) -> list[Step]:
        """Return the rank's steps at the end of a training step that have not run early."""
        end = (s for s in plan.steps if s.phase == "optimizer" and not s.sums_microbatches)
        return [s for s in end if id(s) not in self.ran_early and self.concerns(s)]

    def complete(self, values: Iterable[str]) -> None:
        """Wait for the messages that make these plan values."""
        for value in tuple(values) if self.in_flight else ():
            message = self.in_flight.get(value)
            if message is not None:
                self.wait(message)
                self.in_flight = {v: m for v, m in self.in_flight.items() if m is not message}

    def complete_sends(self, step: int | None) -> None:
        """Wait for the sends whose receives start before ``step`` of the schedule; for all sends if
        it is None.

        A wait depends on earlier steps alone, and the steps are ordered across ranks. So waits form
        no cycle, however many stages a rank has.
        """
        # a wait completes all sends of its value, so it comes when the last receive has started
        latest = {value: at for at, value in sorted(self.sends)}
        due = [value for value, at in latest.items() if step is None or at < step]
        self.sends = [(at, value) for at, value in self.sends if value not in due]
        if due:
            self.wait_sends(due)

    def prepare(self, step: Step) -> None:
        """Emit code that must precede a step."""

    @abstractmethod
    def compute(self, step: Compute) -> None: ...

    @abstractmethod
    def accumulate(self, step: Accumulate) -> None: ...

    @abstractmethod
    def sum_tied(self, step: Redistribute) -> None: ...

    @abstractmethod
    def redistribute(self, step: Redistribute, *, wait: bool) -> Message | None:
        """Return the message if the rank does not wait for it here."""

    @abstractmethod
    def transfer(self, step: Transfer, stage: int | None) -> None: ...

    @abstractmethod
    def norm(self, step: Norm) -> None: ...

    @abstractmethod
    def wait(self, message: Message) -> None: ...

    @abstractmethod
    def wait_sends(self, values: Sequence[str]) -> None: ...
