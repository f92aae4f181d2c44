"""Estimates for all points with the same tp size and ZeRO level, from the plan of one point.

    family = StrategyFamily.of(program, tp=4, zero=1)  # plans once, on mesh(dp=2, tp=4)
    family.estimate(point)                       # Estimate(seconds=..., memory_bytes=...)

The steps of the plan are priced for the point's dp and microbatches (step_prices.py) and assigned
to units as in stages="auto" (sharding/plan/stages). The chain of units is cut into the point's
stages, and the point's schedule is replayed with the times of these stages. An estimate is close
to the plan's figures, usually below them, but not a bound: `search` allows for observed errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dtensor.api.model.stating.auto_stages import depth_of, units_in
from dtensor.api.search.program import SearchedProgram
from dtensor.api.search.space import SearchPoint
from dtensor.api.search.step_prices import Floats, Scale, StepPrices
from dtensor.runtime.lower.actions import weight_half
from dtensor.runtime.schedule import Costs, Grid, OneFOneB, in_flight, waits
from dtensor.sharding.plan.cost.step_cost import Amount, shard_bytes
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.stages.cut_chain import Chain, Sent, SharedCost, partition
from dtensor.sharding.plan.stages.unit_costs import SECOND, UnitPricing, Units
from dtensor.sharding.plan.steps import updates_of
from dtensor.sharding.redistribute.topology import sent_bytes
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS

KINDS = ("F", "I", "W", "end")
"""The kinds of steps: part of a pipeline action (F, I, W), or work done once per training step."""


_LEAST_FRACTIONS = np.array([0.95, 0.55])
"""The least fractions of estimated permanent and temporary memory that plans were seen to need."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated seconds of a step and bytes of the fullest rank.

    ``least_bytes``: a lower bound that held for all plans so far. ``cut``: whether the program can
    be cut into the point's number of stages.
    """

    seconds: float
    memory_bytes: float
    least_bytes: float
    cut: bool = True


@dataclass(slots=True)
class StrategyFamily:
    """The data for estimates; ``parts``: by whether repeated layers are recomputed."""

    parts: dict[bool, Costing]

    @staticmethod
    def of(program: SearchedProgram, tp: int, zero: int) -> StrategyFamily:
        """Plan one point of the family. Raises PlanningError if the planner refuses it."""
        facts = program.facts
        sizes = range(2, facts.num_ranks + 1) if "dp" in facts.axes else ()
        cut = (n for n in sizes if facts.num_ranks % n == 0 and facts.rows % n == 0)
        dp = next(cut, 1)
        rows = facts.rows // dp
        point = SearchPoint(
            pp=1,
            dp=dp,
            tp=tp,
            zero=zero,
            microbatches=2 if rows % 2 == 0 else 1,
            order="OneFOneB",
            recompute=bool(program.layers),
        )
        plan = program.step.planned(
            f"family {point.name}", program.strategy(point), program.topology
        ).plan
        costings = {point.recompute: Costing.of(program, plan)}
        if point.recompute:
            assert plan.plain is not None
            costings[False] = Costing.of(program, plan.plain)
        return StrategyFamily(costings)

    def estimate(self, point: SearchPoint) -> Estimate:
        return self.parts[point.recompute].estimate(point)

    def floor(self, point: SearchPoint) -> float:
        """Return a lower bound of the point's seconds, at this ZeRO level and higher levels."""
        return self.parts[point.recompute].floor(point)


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes that the stages of ``units`` hold."""

    units: Units
    held: Amount


@dataclass(frozen=True, slots=True)
class UnitMessage:
    """A value that ``unit`` sends to the units ``readers``; ``kind``: F or I."""

    unit: int
    readers: Units
    sent: Amount
    kind: str


@dataclass(slots=True, kw_only=True)
class Costing:
    """One plan without stages as a chain of units that can be priced at other sizes."""

    plan: PlanRecord
    prices: StepPrices
    num_units: int
    kinds: NDArray[np.int64]  # by step, an index of KINDS
    groups: tuple[Units, ...]  # the distinct tuples of units that share a step
    shares: tuple[tuple[int, int, float, float], ...]  # (step, group, share of time, of latency)
    passed: tuple[UnitMessage, ...]
    held: tuple[UnitBytes, ...]
    kept: tuple[UnitBytes, ...]
    transient: Amount  # bytes that a microbatch needs besides its kept values
    barred: tuple[tuple[int, int], ...]
    depth: tuple[int, ...]
    steps: NDArray[np.int64] = field(init=False)
    group: NDArray[np.int64] = field(init=False)
    part: Floats = field(init=False)
    starts: Floats = field(init=False)
    cuts: dict[object, tuple[int, ...] | None] = field(
        default_factory=dict[object, tuple[int, ...] | None]
    )
    tables: dict[tuple[Scale, bool], Floats] = field(
        default_factory=dict[tuple[Scale, bool], Floats]
    )

    def __post_init__(self) -> None:
        self.steps = np.array([s for s, _, _, _ in self.shares], np.int64)
        self.group = np.array([g for _, g, _, _ in self.shares], np.int64)
        self.part = np.array([p for _, _, p, _ in self.shares])
        self.starts = np.array([p for _, _, _, p in self.shares])

    @staticmethod
    def of(program: SearchedProgram, plan: Plan | PlanRecord) -> Costing:
        units = units_in(program.step.model, plan.flow)
        uses = units.of_label()
        pricing = UnitPricing(plan, units.flow, uses, "pp")
        pricing.walk()
        groups: dict[Units, int] = {}
        shares: list[tuple[int, int, float, float]] = []
        for step, parts in pricing.parts_of_steps():
            every = tuple(sorted({u for of, _ in parts for u in of}))
            alone = len(parts) == 1  # else each stage that has a value of the message sends one
            for of, part in parts:
                shares.append((step, groups.setdefault(of, len(groups)), part, float(alone)))
            if not alone:
                shares.append((step, groups.setdefault(every, len(groups)), 0.0, 1.0))
        weight_names = weight_half(plan)
        kinds: list[int] = []
        for step in plan.steps:
            if not step.in_microbatch or step.once:
                kinds.append(3)
            elif step.phase == "forward":
                kinds.append(0)
            else:
                kinds.append(2 if any(name in weight_names for name in step.gives) else 1)
        kept = tuple(UnitBytes(of, shard_bytes(spec)) for spec, of in pricing.kept_values())
        activations = Plan.of(plan).memory[0].activations if isinstance(plan, PlanRecord) else 0
        transient = max(activations - sum(k.held.number for k in kept), 0.0)
        return Costing(
            plan=plan,
            prices=StepPrices.of(plan),
            num_units=len(units.units),
            kinds=np.array(kinds, np.int64),
            groups=tuple(groups),
            shares=tuple(shares),
            passed=tuple(
                UnitMessage(
                    c.unit, c.readers, shard_bytes(c.spec), "F" if c.phase == "forward" else "I"
                )
                for c in pricing.crossing()
            ),
            held=tuple(_held(plan, uses)),
            kept=kept,
            transient=Amount(transient, frozenset({"dp", MICROBATCH_AXIS})),
            barred=units.reused,
            depth=depth_of(units),
        )

    def floor(self, point: SearchPoint) -> float:
        """Return the seconds if all work is shared evenly by the stages; ZeRO divides updates."""
        scale = Scale(point.dp, point.microbatches)
        times = self.prices.times(scale)
        grows, starts, host = self.prices.seconds(scale)
        seconds = (grows + starts) * times
        ids = set(map(id, updates_of(self.plan.steps)))
        updates = sum(seconds[i] for i, s in enumerate(self.plan.steps) if id(s) in ids)
        saved_by_zero = updates * (1 - 1 / point.dp) if point.zero else 0.0
        return float(max(seconds.sum() - saved_by_zero, host @ times)) / point.pp

    # -- estimates -----------------------------------------------------------------------------

    def estimate(self, point: SearchPoint) -> Estimate:
        """Return the estimate of a point; infinite costs if its stages cannot be cut."""
        scale, begin = Scale(point.dp, point.microbatches), self.plan.topology.step_latency
        if point.pp == 1:
            grows, starts, host = self.prices.seconds(scale)
            spent = np.stack([grows + starts, host]) * self.prices.times(scale)
            end = spent[:, self.kinds == 3].sum(1)
            seconds = (spent.sum(1) - end).max() + end.max()
            memory = self._memory(scale, ((0, self.num_units),), (0,), (1,))
            return Estimate(begin + float(seconds) + self._votes(point), *memory)
        grid = _grid(point)
        cut = self._cut(point, scale)
        if cut is None:
            return Estimate(math.inf, math.inf, math.inf, cut=False)
        bounds = tuple(itertools.pairwise(cut))
        homes = grid.home()
        table = self._stages(scale, bounds)
        device = table[:, :, 0]
        costs = Costs(
            forward=tuple(device[:, 0]), input=tuple(device[:, 1]), weight=tuple(device[:, 2])
        )
        span, _ = waits(grid, costs)
        by_rank = np.zeros((point.pp, *table.shape[1:]))
        np.add.at(by_rank, np.array(homes), table)
        launched = by_rank[:, :3, 1].sum(1).max() * scale.microbatches  # hosts wait for no rank
        seconds = max(span, float(launched)) + float(by_rank[:, 3].max())
        memory = self._memory(scale, bounds, homes, in_flight(grid))
        return Estimate(float(begin + seconds + self._votes(point)), *memory)

    def _votes(self, point: SearchPoint) -> float:
        """Return the seconds of the commit point, an all_reduce of 4 bytes over each axis. It is
        not a step of the plan."""
        return sum(
            self.plan.topology.collective_seconds(
                "all_reduce", axis, num=num, bytes_sent=sent_bytes("all_reduce", 4, num)
            )
            for axis, num in point.mesh.shape.items()
            if num > 1
        )

    def _by_group(self, scale: Scale, *, for_cut: bool = False) -> Floats:
        """Return seconds[group, kind, device or host]; for actions, per microbatch.

        ``for_cut``: the latency of a message is divided among its values, as in stages="auto".
        """
        if (scale, for_cut) not in self.tables:
            grows, starts, host = self.prices.seconds(scale)
            share = self.part if for_cut else self.starts
            device = grows[self.steps] * self.part + starts[self.steps] * share
            table = np.zeros((len(self.groups), len(KINDS), 2))
            at = self.group, self.kinds[self.steps]
            np.add.at(table, at, np.stack([device, host[self.steps] * share], axis=1))
            self.tables[scale, for_cut] = table
        return self.tables[scale, for_cut]

    def _sent(self, scale: Scale) -> list[float]:
        """Return the seconds of each message between stages, in the order of ``passed``."""
        topology, to = self.plan.topology, self.prices.resized(scale)
        return [
            topology.collective_seconds(
                "transfer", "pp", num=2, bytes_sent=p.sent.resized(to).number
            )
            for p in self.passed
        ]

    def _cut(self, point: SearchPoint, scale: Scale) -> tuple[int, ...] | None:
        """Return the first unit of each stage, then the number of units; None if there are fewer
        units than stages."""
        key = point.num_stages, scale
        if key not in self.cuts:
            times = np.array([scale.microbatches] * 3 + [1])
            cost_of_unit = [0] * self.num_units
            shared: list[SharedCost] = []
            costs = times @ self._by_group(scale, for_cut=True)  # by group, of device and host
            device, host = costs.sum(0)
            for units, cost in zip(self.groups, costs[:, int(host > device)], strict=True):
                cost = round(float(cost) * SECOND)
                if len(units) == 1:
                    cost_of_unit[units[0]] += cost
                elif units:
                    shared.append(SharedCost(cost, units))
            chain = Chain(
                own=tuple(cost_of_unit),
                shared=tuple(shared),
                sent=tuple(
                    Sent(round(seconds * scale.microbatches * SECOND), p.unit, p.readers)
                    for p, seconds in zip(self.passed, self._sent(scale), strict=True)
                ),
                barred=self.barred,
                depth=self.depth,
            )
            too_few_units = self.num_units < point.num_stages
            partitioned = None if too_few_units else partition(chain, point.num_stages)
            self.cuts[key] = None if partitioned is None else partitioned.bounds
        return self.cuts[key]

    def _stages(self, scale: Scale, bounds: Sequence[tuple[int, int]]) -> Floats:
        """Return seconds[stage, kind, device or host]."""
        table = np.zeros((len(bounds), len(KINDS), 2))
        stage = [k for k, (first, end) in enumerate(bounds) for _ in range(first, end)]
        for units, row in zip(self.groups, self._by_group(scale), strict=True):
            for k in {stage[u] for u in units}:
                table[k] += row
        for passed, seconds in zip(self.passed, self._sent(scale), strict=True):
            others = {stage[u] for u in passed.readers} - {stage[passed.unit]}
            table[stage[passed.unit], KINDS.index(passed.kind), 0] += seconds * len(others)
        return table

    def _memory(
        self,
        scale: Scale,
        bounds: Sequence[tuple[int, int]],
        homes: Sequence[int],
        in_flight_counts: Sequence[int],
    ) -> tuple[float, float]:
        """Return the estimated bytes of the fullest rank, and a lower bound of these bytes."""
        to = self.prices.resized(scale)
        stage = [k for k, (first, end) in enumerate(bounds) for _ in range(first, end)]
        ranks = np.zeros((2, max(homes) + 1))  # permanent, and temporary
        for item in self.held:
            for k in {stage[u] for u in item.units}:
                ranks[0, homes[k]] += item.held.resized(to).number
        for item in self.kept:
            for k in {stage[u] for u in item.units}:
                ranks[1, homes[k]] += item.held.resized(to).number * in_flight_counts[k]
        if len(bounds) == 1:
            ranks[1, 0] += self.transient.resized(to).number
        return float(ranks.sum(0).max()), float((_LEAST_FRACTIONS @ ranks).max())


def _held(plan: PlanRecord, uses: dict[str, Units]) -> Iterator[UnitBytes]:
    """Yield the bytes of parameters, gradients and optimizer state by unit."""
    for item in plan.inputs:
        if item.label in uses:
            yield UnitBytes(uses[item.label], shard_bytes(item.held))
    specs = plan.value_specs()
    for output in plan.outputs:
        if output.kind == "gradient" and str(output.of) in uses:
            yield UnitBytes(uses[str(output.of)], shard_bytes(specs[output.values[0][1]]))
    for step in updates_of(plan.steps):
        if step.parameter in uses:
            kept = Amount(step.state_bytes + step.master_bytes, shard_bytes(step.spec).axes)
            yield UnitBytes(uses[step.parameter], kept)


@lru_cache(maxsize=1024)
def _grid(point: SearchPoint) -> Grid:
    schedule = point.schedule or OneFOneB(1)
    return schedule.grid(point.num_stages, point.pp)
