"""What each step of one plan costs, so that it can be said again for other sizes of dp and of the
microbatches.

    prices = StepPrices.of(plan, units, readers)     # a plan on mesh(dp=2, tp=4), two microbatches
    prices.seconds(Scale(dp=8, microbatches=4))      # by step, each time it runs

A value that is split over dp, or runs over microbatches, has as many bytes as they leave it, and
the FLOP of an op follow its values; the price of an op and of a message is the topology's, as in
sharding/plan/cost/seconds.py. So what is assumed is that the planner chooses the same placements
at other sizes. Where it chooses better ones the plan is cheaper than what is said here.

Not here: whose steps they are, stages, schedules (family.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtensor.collectives import COLLECTIVES
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Step,
    TieSum,
    Transfer,
    Update,
    in_microbatch,
)
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.spec import TensorSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of dp, and how many microbatches there are."""

    dp: int
    microbatches: int


def split_class(spec: TensorSpec) -> int:
    """1 where dp splits the value, 2 where it is of one microbatch, 3 for both, else 0."""
    found = 0
    for axis, bit in (("dp", 1), (MICROBATCH_AXIS, 2)):
        if axis in spec.mesh.axes and isinstance(spec.placement(axis), Shard):
            found |= bit
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """One entry for each step; bytes and FLOP are of a rank at the size ``at`` that was planned.

    moved, flops: bytes moved in memory by class of split, FLOP with their class; rate: FLOP per
    second; of messages: starts (times a latency, of which ``ring`` more for each rank of dp), sent
    (bytes by class), bandwidth; over_dp: whether dp is the axis of the message; repeats: whether it
    runs once a microbatch; sums: whether it is only there with microbatches.
    """

    at: Scale
    moved: Floats
    flops: Floats
    flop_class: NDArray[np.int64]
    rate: Floats
    memory_rate: Floats
    overhead: Floats
    starts: Floats
    latency: Floats
    sent: Floats
    bandwidth: Floats
    over_dp: NDArray[np.bool_]
    repeats: NDArray[np.bool_]
    sums: NDArray[np.bool_]

    @staticmethod
    def of(plan: PlanRecord) -> StepPrices:
        num = len(plan.steps)
        found = StepPrices(
            at=Scale(
                plan.inner.shape.get("dp", 1),
                plan.num_microbatches,
            ),
            moved=np.zeros((num, 4)),
            flops=np.zeros(num),
            flop_class=np.zeros(num, np.int64),
            rate=np.full(num, plan.topology.flops),
            memory_rate=np.full(num, plan.topology.memory_bandwidth),
            overhead=np.zeros(num),
            starts=np.zeros(num),
            latency=np.zeros(num),
            sent=np.zeros((num, 4)),
            bandwidth=np.ones(num),
            over_dp=np.zeros(num, np.bool_),
            repeats=np.array([in_microbatch(s) and not s.once for s in plan.steps], np.bool_),
            sums=np.array([isinstance(s, Accumulate) for s in plan.steps], np.bool_),
        )
        for at, step in enumerate(plan.steps):
            found._enter(at, step, plan)
        return found

    def seconds(self, scale: Scale) -> tuple[Floats, Floats]:
        """By step, each time that it runs: what grows with the bytes, and what each message has."""
        factors = self.factors(scale)
        moved = self.moved @ factors
        work = np.maximum(
            self.flops * factors[self.flop_class] / self.rate, moved / self.memory_rate
        )
        before = self.at.dp
        # a ring over n ranks sends (n - 1) / n of what it is about
        part = (scale.dp - 1) / scale.dp * (before / (before - 1)) if before > 1 else 1.0
        hops = (scale.dp - 1) / (before - 1) if before > 1 else 1.0
        sent = (self.sent @ factors) / self.bandwidth * np.where(self.over_dp, part, 1.0)
        starts = self.starts * self.latency * np.where(self.over_dp, hops, 1.0)
        there = 0.0 if scale.microbatches == 1 else 1.0
        return np.where(self.sums, there, 1.0) * (work + self.overhead + sent), starts

    def times(self, scale: Scale) -> NDArray[np.int64]:
        """How often each step runs."""
        return np.where(self.repeats, scale.microbatches, 1)

    def factors(self, scale: Scale) -> Floats:
        """By class, how much larger values are than at the size that was planned."""
        dp = self.at.dp / scale.dp
        microbatches = self.at.microbatches / scale.microbatches
        return np.array([1.0, dp, microbatches, dp * microbatches])

    # -- one step ------------------------------------------------------------------------------

    def _enter(self, at: int, step: Step, plan: PlanRecord) -> None:
        topology = plan.topology
        match step:
            case Compute() if step.is_view:
                self.overhead[at] = topology.op_latency
            case Compute():
                specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
                self._local(at, [(spec, 1) for spec in specs], topology)
                self.flops[at] = step.flops
                self.flop_class[at] = np.bitwise_or.reduce([split_class(s) for s in specs] or [0])
                if step.rule.kind == "attention" and topology.attention_flops:
                    self.rate[at] = topology.attention_flops
            case Convert(move=move) if move.kind in FREE_KINDS:
                moved = [] if move.kind == "relabel" else [(move.dst, 1)]
                self._local(at, moved, topology)
            case Convert(move=move):
                self._message(at, [move], plan)
            case Accumulate():
                self._local(at, [(step.src, 1), (step.dst, 2)], topology)
            case Update():
                self._local(at, [(step.spec, 3)], topology)
                kept = 2 * (step.state_bytes + step.master_bytes)
                self.moved[at, split_class(step.spec)] += kept
                self.memory_rate[at] = topology.update_bandwidth or topology.memory_bandwidth
            case Bucket():
                self._message(at, step.moves, plan)
            case Transfer() | TieSum() | Norm():  # a plan without stages has no other
                pass

    def _local(self, at: int, specs: Iterable[tuple[TensorSpec, int]], topology: Topology) -> None:
        for spec, times in specs:
            self.moved[at, split_class(spec)] += times * spec.max_local_nbytes
        self.overhead[at] = topology.op_latency

    def _message(self, at: int, moves: Iterable[Move], plan: PlanRecord) -> None:
        for move in moves:
            num = plan.inner.axis_size(move.axis)
            over_dp = move.axis == "dp"
            self.over_dp[at] = over_dp
            self.starts[at] = COLLECTIVES[move.kind].steps(num)
            self.latency[at] = plan.topology.latency_of(move.axis)
            self.bandwidth[at] = plan.topology.bandwidth_of(move.axis)
            whole = move.src if isinstance(move.dst.placement(move.axis), Shard) else move.dst
            kind = split_class(whole) & ~1 if over_dp else split_class(move.src)
            self.sent[at, kind] += move.bytes_sent
