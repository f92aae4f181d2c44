"""The costs of a program's units, as the `Chain` that automatic staging cuts into stages.

    chain_of(plan, parts, uses={"up.weight": (3,)}, axis="pp", depth=...)

``plan`` is the plan of the program without stages; ``parts`` is the same program with unit u as its
stage u (frontend/dataflow/units.py). Each step of the plan is priced for a full training step and
charged to the unit of its op, a conversion to the unit that needs it, the update of a parameter to
the units that use it. A value that one unit makes and another reads is priced as a transfer. The
prices agree with the final plan within about 1%: in that plan, each stage has its own buckets. The
norm is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dtensor.sharding.plan.cost.seconds import step_seconds, step_times
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import Dataflow, Phase
from dtensor.sharding.plan.emit.values import is_full_view
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.stages.cut_chain import Chain, Sent, SharedCost
from dtensor.sharding.plan.steps import Accumulate, Compute, Redistribute, Step, Update, updates_of
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.spec import TensorSpec

SECOND = 10**15
"""Femtoseconds: prices are integers, so that equal units cost the same."""


def chain_of(
    plan: PlanRecord,
    parts: Dataflow,
    *,
    uses: Mapping[str, tuple[int, ...]],
    reused: tuple[tuple[int, int], ...] = (),
    depth: tuple[int, ...] = (),
    axis: str,
) -> Chain:
    """Return the chain of a program's units.

    Args:
        plan: the plan of the program without stages.
        parts: the dataflow of the program, with each unit as a stage.
        uses: parameter label -> the units that use it.
        reused, depth: ``barred`` and ``depth`` of the `Chain`.
        axis: the axis of transfers between stages.
    """
    host_bound = PlanTotals(plan).cost.host_bound
    pricing = UnitPricing(plan, parts, uses, axis, host_bound)
    pricing.walk()
    num = parts.num_stages
    pricing.price_crossings()
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
        bytes_held=tuple(SharedCost(n, units) for units, n in pricing.state_by_units().items()),
        bytes_kept=tuple(SharedCost(n, units) for units, n in pricing.saved_by_units().items()),
        bytes_passing=tuple(pricing.passing.get(u, 0) for u in range(num)),
    )


Units = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that ``unit`` makes in ``phase`` and others read, ``times`` per training step."""

    spec: TensorSpec
    unit: int
    readers: Units
    phase: Phase
    times: int


@dataclass(slots=True)
class UnitPricing:
    """Distributes the costs of a plan's steps over units. Call `walk` first.

    ``uses``: parameter label -> the units that use it. ``axis``: the axis of transfers between
    stages. ``host_bound``: whether a unit costs the seconds of its launches instead of the seconds
    of its device. After `walk`, ``readers`` has the units of each step, by the step's index.
    """

    plan: PlanRecord
    parts: Dataflow
    uses: Mapping[str, Units]
    axis: str
    host_bound: bool = False
    costs: defaultdict[Units, int] = field(default_factory=lambda: defaultdict(int))
    passing: dict[int, int] = field(default_factory=dict[int, int])
    sent: list[Sent] = field(default_factory=list[Sent])
    units_of_op: dict[str, Units] = field(default_factory=dict[str, Units])
    units_of_value: dict[str, Units] = field(default_factory=dict[str, Units])  # values of the plan
    readers: dict[int, Units] = field(default_factory=dict[int, Units])
    rules: dict[str, Rule] = field(default_factory=dict[str, Rule])  # by op

    # -- seconds -------------------------------------------------------------------------------

    def walk(self) -> None:
        """Charge the seconds of every step to its units: a conversion before an op to the units of
        this op, other steps to the units that make or use their values."""
        self.rules = {s.op.name: s.rule for s in self.plan.steps if isinstance(s, Compute)}
        stages_of: dict[str, list[int]] = {}
        for op in self.parts.ops:
            stages_of.setdefault(op.copy_of or op.name, []).append(op.stage)
        self.units_of_op = {name: tuple(sorted(set(stages))) for name, stages in stages_of.items()}
        conversions: list[int] = []  # for the next op
        for index, step in enumerate(self.plan.steps):
            if _converts(step) and step.phase != "optimizer":
                conversions.append(index)
            elif isinstance(step, Compute):
                units = self.units_of_op.get(step.op.name, ())
                for charged in (*conversions, index):
                    self._charge(charged, units)
                conversions = []
            else:
                self._charge(index, self._units(step))
        for index in conversions:  # of results
            self._charge(index, self._units(self.plan.steps[index]))

    def _charge(self, index: int, units: Units) -> None:
        """Charge the step with this index to ``units``."""
        step = self.plan.steps[index]
        self.readers[index] = units
        self.units_of_value.update(dict.fromkeys(step.gives, units))
        times = step_times(self.plan, step)
        compute, communication, host = step_seconds(self.plan, step, 0)
        seconds = times * (host if self.host_bound else compute + communication)
        for payers, share in self._shares(step, units):
            self.costs[payers] += round(seconds * share * SECOND)
        if isinstance(step, Compute) and not step.is_view:
            specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
            size = sum(spec.max_local_nbytes for spec in specs)
            for unit in units:
                self.passing[unit] = max(self.passing.get(unit, 0), size)

    def _shares(self, step: Step, units: Units) -> Iterator[tuple[Units, float]]:
        """Yield (units that pay, their share of the cost). A bucket's values share its cost."""
        if isinstance(step, Redistribute) and step.bucket:
            sizes = [move.src.max_local_nbytes for move in step.moves]
            for label, size in zip(step.of, sizes, strict=True):
                yield self.uses.get(label, units), size / max(sum(sizes), 1)
        else:
            yield units, 1.0

    def parts_of_steps(self) -> Iterator[tuple[int, list[tuple[Units, float]]]]:
        """Yield (index of a step, the units that pay for it with their shares)."""
        for index, units in self.readers.items():
            yield index, list(self._shares(self.plan.steps[index], units))

    def _units(self, step: Step) -> Units:
        """Return the units of a step other than an op, from its parameters or its operand."""
        match step:
            case Update(parameter=label) | Accumulate(of=label) if label in self.uses:
                return self.uses[label]
            case Redistribute(of=labels) if step.in_place:
                return tuple(sorted({u for label in labels for u in self.uses.get(label, ())}))
            case (
                Redistribute(operands=(operand, *_), bucket="", tied=())
                | Accumulate(operand=operand)
            ):
                return self.units_of_value.get(operand, ())
            case _:
                return ()

    # -- transfers --------------------------------------------------------------------------

    def price_crossings(self) -> None:
        """Price the transfers of values that one unit makes and others read."""
        for value in self.crossing():
            seconds = self.plan.topology.collective_seconds(
                "transfer", self.axis, num=2, bytes_sent=value.spec.max_local_nbytes
            )
            cost = round(seconds * value.times * SECOND)
            self.sent.append(Sent(cost, value.unit, value.readers))

    def crossing(self) -> Iterator[Crossing]:
        """Yield the values that one unit makes and others read; a view counts as its base."""
        specs, times = self._transfer_specs()
        readers_of: dict[str, set[int]] = {}
        producers = {name: op for op in self.parts.ops for name in op.results if name is not None}
        for op in self.parts.ops:
            for name in op.operands:
                root = self._root(name)
                if root in producers and producers[root].stage != op.stage:
                    readers_of.setdefault(root, set()).add(op.stage)
        for name, readers in readers_of.items():
            if name in specs:
                producer = producers[name]
                yield Crossing(
                    spec=specs[name],
                    unit=producer.stage,
                    readers=tuple(sorted(readers)),
                    phase=producer.phase,
                    times=times.get(name, 1),
                )

    def _root(self, name: str) -> str:
        """Return the value that ``name`` is a view of, through chains of views, or itself."""
        while (op := self.parts.producers.get(name)) is not None:
            rule = self.rules.get(op.copy_of or op.name)
            if rule is None or not is_full_view(op, rule):
                break
            name = op.operands[0]
        return name

    def _transfer_specs(self) -> tuple[dict[str, TensorSpec], dict[str, int]]:
        """Return value -> the spec of its transfer, and value -> transfers per training step."""
        specs: dict[str, TensorSpec] = {}
        times: dict[str, int] = {}
        for step in self.plan.steps:
            if not isinstance(step, Compute):
                continue
            pairs = zip(step.op.operands, step.operand_specs, strict=True)
            results = zip(step.op.results, step.result_specs, strict=True)
            for name, spec in (*pairs, *results):
                if name is not None and spec is not None:
                    # a value is transferred with its smallest spec between producer and reader
                    smallest = specs.setdefault(name, spec)
                    if spec.max_local_nbytes < smallest.max_local_nbytes:
                        specs[name] = spec
            for name in step.op.results:
                if name is not None:
                    times[name] = step_times(self.plan, step)
        return specs, times

    def ties(self) -> Iterator[SharedCost]:
        """Yield the costs of summing gradients of shared parameters over stages."""
        gradients = self._gradient_bytes()
        for label, units in self.uses.items():
            if len(units) > 1 and label in gradients:
                seconds = self.plan.topology.collective_seconds(
                    "all_reduce", self.axis, num=2, bytes_sent=gradients[label]
                )
                yield SharedCost(round(seconds * SECOND), units)

    # -- bytes ---------------------------------------------------------------------------------

    def _gradient_bytes(self) -> dict[str, int]:
        """Return parameter label -> bytes of its gradient."""
        specs = self.plan.value_specs()
        return {
            str(o.of): specs[o.values[0][1]].max_local_nbytes
            for o in self.plan.outputs
            if o.kind == "gradient"
        }

    def state_by_units(self) -> dict[Units, int]:
        """Return the bytes of parameters, gradients and optimizer state, by their units."""
        bytes_by_units: defaultdict[Units, int] = defaultdict(int)
        gradients = self._gradient_bytes()
        for item in self.plan.inputs:
            if item.label in self.uses:
                bytes_by_units[self.uses[item.label]] += item.held.max_local_nbytes
                bytes_by_units[self.uses[item.label]] += gradients.get(item.label, 0)
        for step in updates_of(self.plan.steps):
            if step.parameter in self.uses:
                bytes_by_units[self.uses[step.parameter]] += step.state_bytes + step.master_bytes
        return bytes_by_units

    def saved_by_units(self) -> dict[Units, int]:
        """Return the bytes of forward values that the backward reads, by the reading units."""
        bytes_by_units: defaultdict[Units, int] = defaultdict(int)
        for spec, units in self.kept_values():
            bytes_by_units[units] += spec.max_local_nbytes
        return bytes_by_units

    def kept_values(self) -> Iterator[tuple[TensorSpec, Units]]:
        """Yield (spec, readers) of forward values that a backward reads; a view is its base."""
        storage: dict[str, str] = {}
        specs: dict[str, TensorSpec] = {}
        read: defaultdict[str, set[int]] = defaultdict(set)
        for index, step in enumerate(self.plan.steps):
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
    """Return whether the step converts one value that an op or an output needs under another
    spec."""
    return isinstance(step, Redistribute) and step.is_alone
