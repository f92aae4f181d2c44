"""The order in which one rank runs steps of a plan, and the places where it waits for messages.

    class _Lowering(StepWalk[moves.Started]): ...    # program.py: emits instructions
    class _RankItems(StepWalk[str]): ...             # timetable.py: emits items of the clock

A message that starts early is completed before the first step that reads one of its results. A send
is completed when all receives of its value have started. Invariant: a program and its predicted
times wait at the same places, because both are emitted by this walk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

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

Message = TypeVar("Message")


class StepWalk(ABC, Generic[Message]):
    """A walk through steps of the ``stages`` of one rank. Subclasses emit what each step needs."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.in_flight: dict[str, Message] = {}  # by plan value, the started message that makes it
        self.sends: list[
            tuple[int, str]
        ] = []  # not complete: (schedule step of the receive, value)
        self.ran_early: set[int] = set()  # ids of reductions of gradients that began in a backward
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
                    if step.phase == "optimizer" and is_late:
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
        """Emit what must precede any step."""

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
