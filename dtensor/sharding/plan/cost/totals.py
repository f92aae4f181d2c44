"""`PlanTotals`: the totals of a plan, from which all texts and comparisons take their figures.

    totals = PlanTotals(plan)       # plan.totals
    totals.cost.seconds             # predicted seconds of a step
    totals.memory.total             # bytes of the fullest rank
    totals.bytes_sent               # in a step, by the rank that sends most
    totals.most_sent(lambda key: key[0])      # {"tp": SentTotals(times=4, bytes_sent=2097152, ...)}

A rank of the stage axis may host several stages, whose figures are added. Along the other axes, the
rank with the largest shards represents all ranks. Each figure is computed when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from dtensor.sharding.plan.cost.memory import Memory, Rows, rank_memory, stage_memory
from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.cost.step_cost import step_cost
from dtensor.sharding.plan.record import Cost, PlanRecord
from dtensor.sharding.plan.steps import StepPhase, norm_of

Key = tuple[str, StepPhase, str]
"""The axis, phase and kind of messages."""
K = TypeVar("K")
A = TypeVar("A", "RankWork", "SentTotals")


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of a rank in a training step: seconds, FLOP, and its host's launch seconds."""

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    flops: int = 0
    host_seconds: float = 0.0

    @property
    def device_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, self.host_seconds)

    def __add__(self, other: RankWork) -> RankWork:
        return RankWork(
            self.compute_seconds + other.compute_seconds,
            self.communication_seconds + other.communication_seconds,
            self.flops + other.flops,
            self.host_seconds + other.host_seconds,
        )


@dataclass(frozen=True, slots=True)
class SentTotals:
    """The messages that a rank sends in a training step: their number, bytes and seconds."""

    times: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0

    def __add__(self, other: SentTotals) -> SentTotals:
        return SentTotals(
            self.times + other.times,
            self.bytes_sent + other.bytes_sent,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class PlanTotals:
    """The totals of ``plan``; see the module's docstring."""

    plan: PlanRecord

    # -- seconds -------------------------------------------------------------------------------

    @cached_property
    def cost(self) -> Cost:
        """The predicted cost of a step, from the plan's timetable. Without a timetable (a plan of
        one op), the work and messages of the slowest rank are added without overlap."""
        if self.plan.timetable is not None:
            return self.plan.timetable.cost(self.plan)
        slowest = max(self.ranks, key=lambda work: work.seconds)
        return Cost(
            slowest.compute_seconds,
            slowest.communication_seconds,
            bubble=0.0,
            host_wait_seconds=slowest.seconds - slowest.device_seconds,
            host_seconds=slowest.host_seconds,
        )

    @property
    def estimate(self) -> float:
        """Seconds of the slowest device without overlap and waiting, to compare candidates."""
        return max(work.device_seconds for work in self.ranks)

    @cached_property
    def stages(self) -> tuple[RankWork, ...]:
        """The work of one rank of each stage; a transfer counts at its sender."""
        return self._sums_by_stage[0]

    @cached_property
    def ranks(self) -> tuple[RankWork, ...]:
        """The work of each rank of the stage axis, over all its stages."""
        return self._by_rank(self.stages, RankWork())

    # -- memory --------------------------------------------------------------------------------

    @cached_property
    def stage_memory(self) -> tuple[Memory, ...]:
        """The memory of one rank of each stage."""
        return tuple(stage_memory(self.plan, stage) for stage in range(self.plan.num_stages))

    @cached_property
    def rank_memory(self) -> tuple[Memory, ...]:
        """The memory of each rank of the stage axis, over all its stages."""
        each = self.stage_memory
        hosted = self.plan.hosted
        return tuple(rank_memory(self.plan, stages, [each[s] for s in stages]) for stages in hosted)

    def memory_with(self, rows: Rows) -> tuple[tuple[Memory, ...], Memory]:
        """Return the memory of one rank of each stage, and of the fullest rank, if ranks hold
        ``rows`` by expert."""
        plan = self.plan
        each = tuple(stage_memory(plan, stage, rows) for stage in range(plan.num_stages))
        ranks = (rank_memory(plan, s, [each[i] for i in s], rows) for s in plan.hosted)
        return each, max(ranks, key=lambda memory: memory.total)

    @property
    def memory(self) -> Memory:
        """The memory of the fullest rank."""
        return max(self.rank_memory, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits into ``topology.memory_bytes``."""
        return self.memory.total <= self.plan.topology.memory_bytes

    # -- messages ------------------------------------------------------------------------------

    @property
    def sent(self) -> Mapping[Key, tuple[SentTotals, ...]]:
        """(axis, phase, kind) -> the messages of one rank of each stage, in program order."""
        return self._sums_by_stage[1]

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes sent in a step by the rank that sends most."""
        return max((sent.bytes_sent for sent in self._sent_by_rank(_no_key).get("", ())), default=0)

    @cached_property
    def num_collectives(self) -> int:
        """The largest number of collectives, transfers included, that a rank starts in a step."""
        return max((sent.times for sent in self._sent_by_rank(_no_key).get("", ())), default=0)

    def max_sent_by(self, part: Callable[[Key], K]) -> dict[K, SentTotals]:
        """Group the messages by ``part`` of their keys in `sent`; return, for each group, the
        messages of the rank that sends most bytes of it."""
        return {
            key: max(ranks, key=lambda sent: (sent.bytes_sent, sent.seconds))
            for key, ranks in self._sent_by_rank(part).items()
        }

    # -- sums over stages and ranks ------------------------------------------------------------

    def _sent_by_rank(self, part: Callable[[Key], K]) -> dict[K, tuple[SentTotals, ...]]:
        """Group the messages by ``part`` of their keys in `sent`; return, for each group, the
        messages of each rank of the stage axis."""
        sent: dict[K, list[SentTotals]] = {}
        for key, stages in self.sent.items():
            sums = sent.get(part(key), [SentTotals()] * len(stages))
            sent[part(key)] = [a + b for a, b in zip(sums, stages, strict=True)]
        return {key: self._by_rank(stages, SentTotals()) for key, stages in sent.items()}

    def _by_rank(self, stages: Sequence[A], zero: A) -> tuple[A, ...]:
        """Return the sum over the stages that a rank hosts, for each rank of the stage axis."""
        return tuple(sum((stages[s] for s in hosted), zero) for hosted in self.plan.hosted)

    @cached_property
    def _sums_by_stage(self) -> tuple[tuple[RankWork, ...], Mapping[Key, tuple[SentTotals, ...]]]:
        """The work of each stage, and the messages of each stage by key."""
        plan, topology = self.plan, self.plan.topology
        norm = norm_of(plan.steps)
        work = [RankWork()] * plan.num_stages
        sent: dict[Key, list[SentTotals]] = {}
        for step in plan.steps:
            times = step_times(plan, step)
            for stage in range(plan.num_stages) if step is norm else step.stages:
                cost = step_cost(plan, step, stage)
                compute = cost.compute_seconds(topology)
                communication = cost.communication_seconds(topology)
                work[stage] += RankWork(
                    compute * times,
                    communication * times,
                    int(cost.flops.number) * times,
                    cost.host_seconds(topology) * times,
                )
                for message in cost.messages:
                    key = (message.axis, step.phase, message.kind)
                    stages = sent.setdefault(key, [SentTotals()] * plan.num_stages)
                    bytes_sent = times * int(message.bytes_sent)
                    stages[stage] += SentTotals(
                        times, bytes_sent, times * message.seconds(topology)
                    )
        return tuple(work), {key: tuple(stages) for key, stages in sent.items()}


def index_of_best(candidates: Sequence[PlanTotals]) -> int:
    """Return the index of the plan with the least predicted seconds among the plans that fit in
    memory. If no plan fits, return the index of the plan with the least memory. Of equal plans the
    first is taken; six digits of the seconds are compared."""
    fitting = [at for at, totals in enumerate(candidates) if totals.fits]
    if fitting:
        return min(fitting, key=lambda at: float(f"{candidates[at].cost.seconds:.5e}"))
    return min(range(len(candidates)), key=lambda at: candidates[at].memory.total)


def _no_key(key: Key) -> str:
    """Return the same value for every key, so that all messages form one group."""
    return ""
