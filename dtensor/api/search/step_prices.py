"""Prices of the steps of a plan at other sizes of dp and other numbers of microbatches.

    prices = StepPrices.of(plan)                     # a plan on mesh(dp=2, tp=4), two microbatches
    prices.seconds(Scale(dp=8, microbatches=4))      # by step, for each run of the step

Steps with equal costs (sharding/plan/cost/step_cost.py), as in repeated layers, are priced once.
The prices assume that the planner chooses the same placements at the other sizes. If it chooses
better placements, the plan costs less than predicted here.
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
    """The size of dp and the number of microbatches."""

    dp: int
    microbatches: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.dp, MICROBATCH_AXIS: self.microbatches}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """The prices of the steps of a plan without stages.

    at: the sizes of the plan. costs: the distinct costs. number: by step, the index of its cost.
    repeats: by step, whether it runs for each microbatch. sums: by step, whether it adds up
    microbatches, so that it exists only with several microbatches.
    """

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
        """Return three arrays by step, in seconds per run: the device's time that grows with the
        sizes, the latency of its messages, and the host's time."""
        to, topology = self.resized(scale), self.topology
        costs = [cost.resized(to) for cost in self.costs]
        starts = np.array([sum(m.starts(topology) for m in cost.messages) for cost in costs])
        seconds_by_step = [
            c.compute_seconds(topology) + c.communication_seconds(topology) for c in costs
        ]
        host = np.array([cost.host_seconds(topology) for cost in costs])
        runs = np.where(self.sums, scale.microbatches > 1, True)
        grows = (np.array(seconds_by_step) - starts)[self.number]
        return runs * grows, starts[self.number], runs * host[self.number]

    def times(self, scale: Scale) -> NDArray[np.int64]:
        """Return by step how often it runs in a training step."""
        return np.where(self.repeats, scale.microbatches, 1)
