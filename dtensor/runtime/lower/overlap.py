"""The order of a rank's steps: which messages start early, and where the rank waits for them.

    grad_h = mm(grad, w)             grad_h = mm(grad, w)
    grad_w = mm(grad', h)            start  all_reduce(grad_h)
    all_reduce(grad_h)               grad_w = mm(grad', h)
    ... grad_h_reduced ...           wait;  ... grad_h_reduced ...

Only messages move, so results are bitwise equal and other values live as long as before. The order
depends on the plan alone, so all ranks of a group start their collectives in one order. Programs
and predicted times wait at the same places, because `StepWalk` emits both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from dtensor.sharding.plan.cost.seconds import StepSeconds
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
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


def reductions_of(plan: PlanRecord, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the reductions of gradients that read only results of these ``steps`` of a backward.
    With microbatches there are none, because reductions then read the sums over microbatches."""
    results = {name for step in steps for name in step.gives}
    return tuple(s for s in plan.steps if s.reduces_gradients and results.issuperset(s.reads))


class StepWalk(ABC, Generic[Message]):
    """A walk through steps of the ``stages`` of one rank. Subclasses emit instructions (program.py)
    or items of the clock (timetable.py). A late message is completed before the first step that
    reads one of its results, a send after all receives of its value have started."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.in_flight: dict[str, Message] = {}  # by plan value, the started message that makes it
        self.sends: list[tuple[int, str]] = []  # in flight: (schedule step of the receive, value)
        self.ran_early: set[int] = set()  # ids of reductions of gradients that began in a backward
        self.in_round = False  # whether it emits a round of delayed reductions
        self._reducing: tuple[str, ...] = ()  # the results of the last of these reductions

    def concerns(self, step: Step) -> bool:
        """Whether the rank has a part in the step. Every rank has a part in a norm."""
        return any(map(step.is_on, self.stages))

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
                    if step.phase == "optimizer" and is_late and stage is not None:
                        self.ran_early.add(id(step))
                        self.complete(self._reducing)  # only one at a time: it frees its operands
                        self._reducing = step.results
                    gathers = bool(step.bucket) and step.kind == "all_gather"
                    message = self.redistribute(step, wait=not (is_late or gathers))
                    if message is not None:
                        self.in_flight |= dict.fromkeys(step.gives, message)
                case Transfer():
                    self.transfer(step, stage)
                case Norm():
                    self.norm(step)
                case Accumulate() | Update() | Redistribute():
                    pass  # sums follow their action; updates and gathers in place end the step

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
        end = (s for s in plan.steps if s.phase == "optimizer" and id(s) not in self.ran_early)
        return [step for step in end if self.concerns(step)]

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
