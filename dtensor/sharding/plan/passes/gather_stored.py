"""The pass that gathers parameters which are stored split: ZeRO level 3, and misaligned pins.

    parameters_dp    all_gather(2 parameters, dp)      before the first step that reads one of them
    mm               mm(x, up_weight_gathered)

The parameters of a layer are gathered in one message before their first use in the forward, again
in the backward of each microbatch, and dropped after their last use in each. The gather of the next
layer starts while a layer computes. A cast of a parameter to fewer bytes happens before the gather.
This pass runs after recompute.py, so a repeated step reads parameters gathered in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dtensor.sharding.plan.choose.split_through_op import through
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput, PlanRecord
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, StepPhase, unused
from dtensor.sharding.plan.storage import layer_of
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.spec import TensorSpec

When = Literal["once", "forward", "backward", "optimizer"]
StageWhen = tuple[int, When]
"""A stage, and when a step runs on it: once per training step, or in a phase."""


def gather_stored(plan: PlanRecord) -> PlanRecord:
    """Return the plan in which every use of a parameter that is stored split reads a gathered copy.
    Views, slices and casts of parameters are repeated in each phase that uses them: if their
    results were kept from forward to backward, the gathered parameters would be kept too."""
    split = {item.name: item for item in plan.inputs if item.held != item.spec}
    return _Gathering(plan, split).run() if split else plan


@dataclass(slots=True)
class _Group:
    """Parameters that are gathered in one message, or casts of parameters."""

    members: list[str] = field(default_factory=list[str])
    started: bool = False
    used: bool = False


@dataclass(slots=True)
class _Gathering:
    """The state of the pass. ``split``: the parameters to gather, by name."""

    plan: PlanRecord
    split: Mapping[str, PlannedInput]
    # result -> the local step that makes it from a parameter to gather
    local_steps: dict[str, Compute | Redistribute] = field(
        default_factory=dict[str, Compute | Redistribute]
    )
    # layer -> group, in order of first use
    groups: dict[StageWhen, dict[str, _Group]] = field(
        default_factory=dict[StageWhen, dict[str, _Group]]
    )
    # (value, stage and phase) -> the name of its gathered copy there
    copies: dict[tuple[str, StageWhen], str] = field(
        default_factory=dict[tuple[str, StageWhen], str]
    )
    steps: list[Step] = field(default_factory=list[Step])
    names: set[str] = field(default_factory=set[str])

    def run(self) -> PlanRecord:
        """Return the plan with gathers. The first walk forms the groups of parameters that are
        gathered together, the second emits the steps."""
        other_steps = [step for step in self.plan.steps if not self._is_local(step)]
        values = set(self.plan.value_specs()) - self.local_steps.keys()
        self.names = values | {s.bucket for s in other_steps if isinstance(s, Redistribute)}
        for step in other_steps:
            for stage, value in _uses(step, self.split):
                self._add_to_group(value, stage, _when(step))
        for output in self.plan.outputs:
            for stage, value in output.values:
                self._add_to_group(value, stage, _when_used(output))
        for step in other_steps:
            reads = [(at, value) for at, value in _uses(step, self.split) if self._depends(value)]
            names = {value: self._read(value, at, _when(step)) for at, value in reads}
            self.steps.append(step.reading(names) if names else step)
        outputs = [
            replace(o, values=tuple((s, self._read(v, s, _when_used(o))) for s, v in o.values))
            for o in self.plan.outputs
        ]
        return replace(self.plan, steps=tuple(self.steps), outputs=tuple(outputs))

    def _is_local(self, step: Step) -> bool:
        """Return whether the step is a view, slice or narrowing cast of one parameter to gather. If
        so, record it in ``local_steps``."""
        match step:
            case Compute() if step.is_view or _narrows(step):
                is_local = len(step.operands) == 1
            case Redistribute():
                is_local = step.is_free and len(_uses(step, self.split)) == 1
            case _:
                return False
        if not is_local or not self._depends(step.reads[0]):
            return False
        self.local_steps.update((name, step) for name in step.gives)
        return True

    def _axes(self, item: PlannedInput) -> tuple[str, ...]:
        """Return the axes over which a parameter is gathered, in reverse of the order in which
        gradients are scattered: the last axis of the mesh first, unless several are ZeRO axes."""
        return tuple(
            axis
            for axis in reversed(self.plan.scatter_order(item.spec.mesh.axes))
            if item.held.placement(axis) != item.spec.placement(axis)
        )

    def _depends(self, value: str) -> bool:
        """Return whether the value is a parameter to gather, or made from one by local steps."""
        return value in self.split or value in self.local_steps

    def _base(self, value: str) -> tuple[str, str]:
        """Return (the parameter from which local steps make ``value``, the value to gather). The
        value to gather is the parameter itself, or its cast to fewer bytes."""
        if value in self.split:
            return value, value
        step = self.local_steps[value]
        if isinstance(step, Redistribute):
            return self._base(step.operands[0])
        if _narrows(step) and step.operands[0] in self.split:
            return step.operands[0], value
        return self._base(step.operands[0])

    def _add_to_group(self, value: str, stage: int, when: When) -> None:
        """Add the parameter from which ``value`` is made, if it is to be gathered, to the group of
        its layer, which is gathered in one message."""
        if not self._depends(value):
            return
        parameter, member = self._base(value)
        item = self.split[parameter]
        layer = f"{layer_of(item.label)} {self._dtype(member)} {self._axes(item)}"
        group = self.groups.setdefault((stage, when), {}).setdefault(layer, _Group())
        if member not in group.members:
            group.members.append(member)

    def _dtype(self, member: str) -> str:
        """Return the dtype in which the parameter, or its cast, is gathered."""
        if member in self.split:
            return str(self.split[member].spec.dtype)
        return str(self._cast(member).op.call.result.dtype)

    def _cast(self, member: str) -> Compute:
        step = self.local_steps[member]
        assert isinstance(step, Compute)
        return step

    # -- second walk: the steps -----------------------------------------------------------------

    def _read(self, value: str, stage: int, when: When) -> str:
        """Return the name of the gathered copy that a step reads; emit the copy if needed."""
        if not self._depends(value):
            return value
        key: tuple[str, StageWhen] = (value, (stage, when))
        if value == self._base(value)[1]:
            self._gather(value, stage, when)
        elif key not in self.copies:
            self._repeat(self.local_steps[value], stage, when)
        return self.copies[key]

    def _repeat(self, step: Compute | Redistribute, stage: int, when: When) -> None:
        """Emit a local step again, on gathered copies of its operands and with new results."""
        operands = {name: self._read(name, stage, when) for name in step.reads}
        results = {name: self._new_copy_name(name, stage, when) for name in step.gives}
        repeated = step.reading(operands).giving(results)
        self.steps.append(replace(repeated, phase=_phase(when), stage=stage, once=when == "once"))

    def _new_copy_name(self, value: str, stage: int, when: When) -> str:
        """Return an unused name for the copy of the value, and record it."""
        name = unused(value, self.names)
        self.copies[value, (stage, when)] = name
        return name

    def _gather(self, member: str, stage: int, when: When) -> None:
        """Emit, at the first use of the group of ``member``, its gather and the gather of the next
        group, unless they are emitted already."""
        groups = list(self.groups[stage, when].values())
        at = next(i for i, group in enumerate(groups) if member in group.members)
        if groups[at].used:
            return
        groups[at].used = True
        for group in groups[at : at + 2]:
            if not group.started:
                group.started = True
                self._start(group, stage, when)

    def _start(self, group: _Group, stage: int, when: When) -> None:
        """Emit the gather of a group, over each axis in turn."""
        items = [self.split[self._base(member)[0]] for member in group.members]
        values = [self._shard(member, stage, when) for member in group.members]
        for axis in self._axes(items[0]):
            moves = [
                Move("all_gather", axis, spec, spec.with_placements(**{axis: used_placement}))
                for (_, spec), item in zip(values, items, strict=True)
                for used_placement in (item.spec.placement(axis),)
            ]
            lines = (m.source for item in items for m in item.misaligned if m.axis == axis)
            results = [unused(f"{member}_gathered", self.names) for member in group.members]
            self.steps.append(
                Redistribute(
                    bucket=unused(f"parameters_{axis}", self.names),
                    results=tuple(results),
                    operands=tuple(name for name, _ in values),
                    moves=tuple(moves),
                    stage=stage,
                    of=tuple(item.label for item in items),
                    phase=_phase(when),
                    once=when == "once",
                    source=", ".join(dict.fromkeys(lines)),
                )
            )
            values = [(name, move.dst) for name, move in zip(results, moves, strict=True)]
        for member, (name, _) in zip(group.members, values, strict=True):
            self.copies[member, (stage, when)] = name

    def _shard(self, member: str, stage: int, when: When) -> tuple[str, TensorSpec]:
        """Return (name, spec) of the shard to gather: the stored parameter, or an emitted cast."""
        parameter, _ = self._base(member)
        item = self.split[parameter]
        if member == parameter:
            return parameter, item.held
        cast = self._cast(member)
        spec = cast.result_specs[0]
        assert spec is not None
        shard_spec = replace(item.held, dtype=spec.dtype)
        name = unused(f"{member}_shard", self.names)
        self.steps.append(
            replace(
                cast,
                operands=(parameter,),
                operand_specs=(item.held,),
                results=(name,),
                result_specs=(shard_spec,),
                phase=_phase(when),
                stage=stage,
                once=when == "once",
                strategies=_shard_strategies(cast, self._axes(item), shard_spec),
            )
        )
        return name, shard_spec


def _uses(step: Step, split: Mapping[str, PlannedInput]) -> list[tuple[int, str]]:
    """Return (stage, value) of each operand, without parameters that are read as they are stored:
    a parameter that is moved to its owner, or an in-place gather of updated slices."""
    if isinstance(step, Redistribute) and step.in_place:
        return []
    return [
        (stage, value)
        for stage, value, spec in step.reads_as()
        if value not in split or spec != split[value].held
    ]


def _shard_strategies(
    cast: Compute, axes: Sequence[str], shard_spec: TensorSpec
) -> tuple[tuple[str, Strategy], ...]:
    """Return axis -> strategy, as pairs, of a cast of the stored shard. ``axes``: the axes over
    which ``shard_spec`` is split in addition to the operand of ``cast``."""
    strategies = dict(cast.strategies)
    for axis in axes:
        placement = shard_spec.placement(axis)
        assert isinstance(placement, Shard)
        strategy = through(cast.rule, 0, placement, shard_spec.mesh.axis_size(axis))
        assert isinstance(strategy, Strategy), "a cast can be split in any dim"
        strategies[axis] = strategy
    return tuple(strategies.items())


def _narrows(step: Compute) -> bool:
    """Return whether the step is a cast to a dtype of the same size or smaller."""
    result = step.op.call.results[0]
    (operand,) = step.op.call.operands[:1] or (None,)
    narrower = result and operand and result.dtype.itemsize <= operand.dtype.itemsize
    return step.rule.kind == "cast" and bool(narrower)


def _when(step: Step) -> When:
    return "once" if step.once else step.phase


def _when_used(output: PlannedOutput) -> When:
    return "forward" if output.kind == "result" else "optimizer"


def _phase(when: When) -> StepPhase:
    return "forward" if when == "once" else when
