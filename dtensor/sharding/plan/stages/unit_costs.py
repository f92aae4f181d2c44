"""The costs of a program's units: the chain that is cut into stages.

    whole = plan(request without stages)        # placements, collectives, gradients: all decided
    chain_of(whole, parts, uses={"up.weight": (3,)}, axis="pp", depth=...)

``parts`` is the same program with unit u as its stage u (frontend/dataflow/units.py). Each step of
the plan is priced by `step_cost`, for all its repetitions in one training step, and counts for the
unit of its op: a conversion for the unit that needs it, the optimizer's work on a parameter for the
units that use it. A value that crosses between units is priced as a transfer.

Memory is that of `stage_memory`; for temporary values it counts only the largest op of a unit.

Invariant: on a chain without tensors over dp the prices are those of the plan that stages give;
else within about 1 %, for each stage has its own buckets, sums gradients where they meet, and need
not recompute its last ops.

Not here: the norm of clipping, which every stage pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dtensor.sharding.plan.cost.seconds import step_seconds, step_times
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import Dataflow, Phase
from dtensor.sharding.plan.emit.values import rearranges
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.stages.cut_chain import Chain, Sent, SharedCost
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Redistribute,
    Step,
    Update,
    updates_of,
)
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.spec import TensorSpec

SECOND = 10**15
"""Femtoseconds: prices are integers, so that equal units cost the same."""


def chain_of(
    whole: PlanRecord,
    parts: Dataflow,
    *,
    uses: Mapping[str, tuple[int, ...]],
    reused: tuple[tuple[int, int], ...] = (),
    depth: tuple[int, ...] = (),
    axis: str,
) -> Chain:
    """The chain of a program's units.

    Args:
        whole: the plan of the program without stages.
        parts: its dataflow with as many stages as there are units.
        uses: parameter to the units that use it; ``reused`` and ``depth``: of `Chain`.
        axis: the axis of transfers between stages.
    """
    host_bound = PlanTotals(whole).cost.host_bound
    pricing = UnitPricing(whole, parts, uses, axis, host_bound)
    pricing.walk()
    num = parts.num_stages
    pricing.cross()
    cost_of_unit = [0] * num
    shared: list[SharedCost] = []
    for units, cost in pricing.costs.items():
        if len(units) == 1:
            cost_of_unit[units[0]] += cost
        elif units:
            shared.append(SharedCost(cost, units))
    return Chain(
        own=tuple(cost_of_unit),
        shared=tuple(shared),
        sent=tuple(pricing.sent),
        tied=tuple(pricing.ties()),
        barred=reused,
        depth=depth,
        bytes_held=tuple(SharedCost(n, units) for units, n in pricing.held().items()),
        bytes_kept=tuple(SharedCost(n, units) for units, n in pricing.kept().items()),
        bytes_passing=tuple(pricing.passing.get(u, 0) for u in range(num)),
    )


Units = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that ``unit`` makes and others read, ``times`` in a step; ``phase``: of its maker."""

    spec: TensorSpec
    unit: int
    readers: Units
    phase: Phase
    times: int


@dataclass(slots=True)
class UnitPricing:
    """The shares of units in a plan; ``readers``: by the index of a step its units, after `walk`.

    ``uses``: parameter to the units that use it; ``axis``: the axis of transfers between stages;
    ``host_bound``: whether a unit costs its launches and not the seconds of its device.
    """

    whole: PlanRecord
    parts: Dataflow
    uses: Mapping[str, Units]
    axis: str
    host_bound: bool = False
    costs: defaultdict[Units, int] = field(default_factory=lambda: defaultdict(int))
    passing: dict[int, int] = field(default_factory=dict[int, int])
    sent: list[Sent] = field(default_factory=list[Sent])
    at: dict[str, Units] = field(default_factory=dict[str, Units])  # op to its units
    made: dict[str, Units] = field(default_factory=dict[str, Units])  # plan value to its units
    readers: dict[int, Units] = field(default_factory=dict[int, Units])  # of a step, by index
    rules: dict[str, Rule] = field(default_factory=dict[str, Rule])  # by op

    # -- seconds -------------------------------------------------------------------------------

    def walk(self) -> None:
        self.rules = {s.op.name: s.rule for s in self.whole.steps if isinstance(s, Compute)}
        stages_of: dict[str, list[int]] = {}
        for op in self.parts.ops:
            stages_of.setdefault(op.copy_of or op.name, []).append(op.stage)
        self.at = {name: tuple(sorted(set(stages))) for name, stages in stages_of.items()}
        waiting: list[int] = []  # conversions, made for the next op
        for index, step in enumerate(self.whole.steps):
            if _converts(step) and step.phase != "optimizer":
                waiting.append(index)
            elif isinstance(step, Compute):
                units = self.at.get(step.op.name, ())
                for one in (*waiting, index):
                    self._count(one, units)
                waiting = []
            else:
                self._count(index, self._units(step))
        for index in waiting:  # of results
            self._count(index, self._units(self.whole.steps[index]))

    def _count(self, index: int, units: Units) -> None:
        step = self.whole.steps[index]
        self.readers[index] = units
        self.made.update(dict.fromkeys(step.gives, units))
        times = step_times(self.whole, step)
        compute, communication, host = step_seconds(self.whole, step, 0)
        seconds = times * (host if self.host_bound else compute + communication)
        for of, part in self._shares(step, units):
            self.costs[of] += round(seconds * part * SECOND)
        if isinstance(step, Compute) and not step.is_view:
            specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
            size = sum(spec.max_local_nbytes for spec in specs)
            for unit in units:
                self.passing[unit] = max(self.passing.get(unit, 0), size)

    def _shares(self, step: Step, units: Units) -> Iterator[tuple[Units, float]]:
        """The units that pay for a step, and their shares: a message is shared by its values."""
        if isinstance(step, Redistribute) and step.bucket:
            sizes = [move.src.max_local_nbytes for move in step.moves]
            for label, size in zip(step.of, sizes, strict=True):
                yield self.uses.get(label, units), size / max(sum(sizes), 1)
        else:
            yield units, 1.0

    def parts_of_steps(self) -> Iterator[tuple[int, list[tuple[Units, float]]]]:
        """By index of a step, the units that pay for it, and their shares."""
        for index, units in self.readers.items():
            yield index, list(self._shares(self.whole.steps[index], units))

    def _units(self, step: Step) -> Units:
        match step:
            case Update(parameter=label) | Accumulate(of=label) if label in self.uses:
                return self.uses[label]
            case Redistribute(of=labels) if step.in_place:
                return tuple(sorted({u for label in labels for u in self.uses.get(label, ())}))
            case Redistribute(operands=(operand,), bucket="") | Accumulate(operand=operand):
                return self.made.get(operand, ())
            case _:
                return ()

    # -- transfers --------------------------------------------------------------------------

    def cross(self) -> None:
        """Price the values that a unit makes and others read."""
        for value in self.crossing():
            seconds = self.whole.topology.collective_seconds(
                "transfer", self.axis, num=2, bytes_sent=value.spec.max_local_nbytes
            )
            cost = round(seconds * value.times * SECOND)
            self.sent.append(Sent(cost, value.unit, value.readers))

    def crossing(self) -> Iterator[Crossing]:
        """Values that a unit makes and others read; for a view, the value that it is a view of."""
        specs, often = self._specs()
        read: dict[str, set[int]] = {}
        makers = {name: op for op in self.parts.ops for name in op.results if name is not None}
        for op in self.parts.ops:
            for name in op.operands:
                root = self._root(name)
                if root in makers and makers[root].stage != op.stage:
                    read.setdefault(root, set()).add(op.stage)
        for name, readers in read.items():
            if name in specs:
                maker = makers[name]
                yield Crossing(
                    spec=specs[name],
                    unit=maker.stage,
                    readers=tuple(sorted(readers)),
                    phase=maker.phase,
                    times=often.get(name, 1),
                )

    def _root(self, name: str) -> str:
        while (op := self.parts.producers.get(name)) is not None:
            rule = self.rules.get(op.copy_of or op.name)
            if rule is None or not rearranges(op, rule):
                break
            name = op.operands[0]
        return name

    def _specs(self) -> tuple[dict[str, TensorSpec], dict[str, int]]:
        """By value of the program the spec of its transfer, and how often it is sent."""
        specs: dict[str, TensorSpec] = {}
        often: dict[str, int] = {}
        for step in self.whole.steps:
            if not isinstance(step, Compute):
                continue
            pairs = zip(step.op.operands, step.operand_specs, strict=True)
            results = zip(step.op.results, step.result_specs, strict=True)
            for name, spec in (*pairs, *results):
                if name is not None and spec is not None:
                    # it is sent where it is smallest between maker and reader
                    known = specs.setdefault(name, spec)
                    if spec.max_local_nbytes < known.max_local_nbytes:
                        specs[name] = spec
            for name in step.op.results:
                if name is not None:
                    often[name] = step_times(self.whole, step)
        return specs, often

    def ties(self) -> Iterator[SharedCost]:
        """Sums over stages of the gradients of parameters that several units use."""
        trained = self._trained()
        for label, units in self.uses.items():
            if len(units) > 1 and label in trained:
                seconds = self.whole.topology.collective_seconds(
                    "all_reduce", self.axis, num=2, bytes_sent=trained[label]
                )
                yield SharedCost(round(seconds * SECOND), units)

    # -- bytes ---------------------------------------------------------------------------------

    def _trained(self) -> dict[str, int]:
        """Parameter to the bytes of its gradient."""
        specs = self.whole.value_specs()
        return {
            str(o.of): specs[o.values[0][1]].max_local_nbytes
            for o in self.whole.outputs
            if o.kind == "gradient"
        }

    def held(self) -> dict[Units, int]:
        """Bytes of parameters, gradients and the optimizer's state, by units that use them."""
        bytes_by_units: defaultdict[Units, int] = defaultdict(int)
        trained = self._trained()
        for item in self.whole.inputs:
            if item.label in self.uses:
                bytes_by_units[self.uses[item.label]] += item.held.max_local_nbytes
                bytes_by_units[self.uses[item.label]] += trained.get(item.label, 0)
        for step in updates_of(self.whole.steps):
            if step.parameter in self.uses:
                bytes_by_units[self.uses[step.parameter]] += step.state_bytes + step.master_bytes
        return bytes_by_units

    def kept(self) -> dict[Units, int]:
        """Bytes of one microbatch that its backward reads, by units of the backward that do."""
        bytes_by_units: defaultdict[Units, int] = defaultdict(int)
        for spec, units in self.kept_values():
            bytes_by_units[units] += spec.max_local_nbytes
        return bytes_by_units

    def kept_values(self) -> Iterator[tuple[TensorSpec, Units]]:
        """The values of a microbatch's forward that its backward reads, and the units that do."""
        storage: dict[str, str] = {}
        specs: dict[str, TensorSpec] = {}
        read: defaultdict[str, set[int]] = defaultdict(set)
        for index, step in enumerate(self.whole.steps):
            if not (isinstance(step, Compute) or _converts(step)):
                continue
            if step.phase == "backward":
                for name in step.reads:
                    if name in storage:
                        read[storage[name]].update(self.readers[index])
            elif not step.once:
                view = isinstance(step, Compute) and step.is_view
                base = storage.get(step.reads[0]) if view else None
                for _, name, spec in step.gives_as():
                    storage[name] = base or name
                    specs.setdefault(storage[name], spec)
        for name, units in read.items():
            if units:
                yield specs[name], tuple(sorted(units))


def _converts(step: Step) -> bool:
    """Whether a step moves one value alone, because an op or an output needs it under another
    spec."""
    return isinstance(step, Redistribute) and step.is_alone
