"""What each step of one plan costs, so that it can be said again for other sizes of dp and of the
microbatches.

    prices = StepPrices.of(plan)                     # a plan on mesh(dp=2, tp=4), two microbatches
    prices.seconds(Scale(dp=8, microbatches=4))      # by step, each time it runs

A step's cost (sharding/plan/cost/step_cost.py) is priced at the other sizes, once for all steps
that cost the same, as those of repeated layers do. What is assumed is that the planner chooses the
same placements at other sizes. Where it chooses better ones the plan is cheaper than what is said
here.

Not here: whose steps they are, stages, schedules (strategy_family.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtensor.sharding.plan.cost.step_cost import Resized, StepCost, step_cost
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of dp, and how many microbatches there are."""

    dp: int
    microbatches: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.dp, MICROBATCH_AXIS: self.microbatches}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """Of the steps of a plan without stages. at: the sizes that were planned; costs: those that
    differ, and number: by step, which of them it has; repeats: whether it runs once a microbatch;
    sums: whether it is only there with microbatches."""

    at: Scale
    topology: Topology
    costs: tuple[StepCost, ...]
    number: NDArray[np.int64]
    repeats: NDArray[np.bool_]
    sums: NDArray[np.bool_]

    @staticmethod
    def of(plan: PlanRecord) -> StepPrices:
        numbers: dict[StepCost, int] = {}
        steps = plan.steps
        cost_numbers = [
            numbers.setdefault(step_cost(plan, s, s.stage), len(numbers)) for s in steps
        ]
        return StepPrices(
            at=Scale(plan.inner.shape.get("dp", 1), plan.num_microbatches),
            topology=plan.topology,
            costs=tuple(numbers),
            number=np.array(cost_numbers, np.int64),
            repeats=np.array([s.in_microbatch and not s.once for s in steps], np.bool_),
            sums=np.array([s.sums_microbatches for s in steps], np.bool_),
        )

    def resized(self, scale: Scale) -> Resized:
        return Resized(self.at.sizes, scale.sizes)

    def seconds(self, scale: Scale) -> tuple[Floats, Floats, Floats]:
        """Return by step, for each run of it: the device's seconds that grow with the bytes, the
        seconds of its exchanges, and the host's seconds."""
        to, topology = self.resized(scale), self.topology
        costs = [cost.resized(to) for cost in self.costs]
        starts = np.array([sum(m.starts(topology) for m in cost.messages) for cost in costs])
        seconds_by_step = [
            c.compute_seconds(topology) + c.communication_seconds(topology) for c in costs
        ]
        host = np.array([cost.host_seconds(topology) for cost in costs])
        there = np.where(self.sums, scale.microbatches > 1, True)
        grows = (np.array(seconds_by_step) - starts)[self.number]
        return there * grows, starts[self.number], there * host[self.number]

    def times(self, scale: Scale) -> NDArray[np.int64]:
        """How often each step runs."""
        return np.where(self.repeats, scale.microbatches, 1)
