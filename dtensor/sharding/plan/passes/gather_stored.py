"""Parameters that are stored split, gathered before use: ZeRO's level 3, and pins that do not line
up with the program (choose/misaligned.py).

    parameters_dp    all_gather(2 parameters, dp)      before the first step that reads one of them
    mm               mm(x, up_weight_gathered)

A layer's parameters are gathered before their first use in the forward and again in the backward of
each microbatch, the next layer's while one computes, and dropped after the last use of that phase.
A parameter that only steps computed once a step read is gathered once. A cast of a parameter to
fewer bytes happens before the gather. One that is stored split over several axes beside those that
it is used split over is gathered over each in turn.

What repeats forward steps in the backward (recompute.py) comes before this pass, so that a repeated
step reads what its own phase gathers. Not here: how storage is split (plan/storage.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dtensor.sharding.plan.choose.split_through_op import through
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput, PlanRecord
from dtensor.sharding.plan.steps import (
    Compute,
    Redistribute,
    Step,
    StepPhase,
    unused,
)
from dtensor.sharding.plan.storage import layer_of
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.spec import TensorSpec

When = Literal["once", "forward", "backward", "optimizer"]
At = tuple[int, When]  # a stage, and when a step of it runs


def gather_stored(plan: PlanRecord) -> PlanRecord:
    """The plan in which every use of a parameter that is stored split reads a gathered copy.

    Free steps on parameters alone (views, slices, casts) are repeated where they are used: kept
    from forward to backward, they would keep what was gathered.
    """
    split = {item.name: item for item in plan.inputs if item.held != item.spec}
    return _Gathering(plan, split).run() if split else plan


@dataclass(slots=True)
class _Group:
    """What is gathered as one message; ``members``: the values, each a parameter or its cast."""

    members: list[str] = field(default_factory=list[str])
    started: bool = False
    used: bool = False


@dataclass(slots=True)
class _Gathering:
    plan: PlanRecord
    split: Mapping[str, PlannedInput]
    # the free steps by result, groups by layer in order of use, names by value
    makers: dict[str, Compute | Redistribute] = field(
        default_factory=dict[str, Compute | Redistribute]
    )
    groups: dict[At, dict[str, _Group]] = field(default_factory=dict[At, dict[str, _Group]])
    copies: dict[tuple[str, At], str] = field(default_factory=dict[tuple[str, At], str])
    steps: list[Step] = field(default_factory=list[Step])
    names: set[str] = field(default_factory=set[str])

    def run(self) -> PlanRecord:
        kept = [step for step in self.plan.steps if not self._is_free(step)]
        made = set(self.plan.value_specs()) - self.makers.keys()
        self.names = made | {s.bucket for s in kept if isinstance(s, Redistribute)}
        for step in kept:
            for stage, value in _uses(step):
                self._expect(value, stage, _when(step))
        for output in self.plan.outputs:
            for stage, value in output.values:
                self._expect(value, stage, _when_used(output))
        for step in kept:
            reads = [(at, value) for at, value in _uses(step) if self._depends(value)]
            names = {value: self.read(value, at, _when(step)) for at, value in reads}
            self.steps.append(step.reading(names) if names else step)
        outputs = [
            replace(o, values=tuple((s, self.read(v, s, _when_used(o))) for s, v in o.values))
            for o in self.plan.outputs
        ]
        return replace(self.plan, steps=tuple(self.steps), outputs=tuple(outputs))

    def _is_free(self, step: Step) -> bool:
        """Whether the step costs nothing and depends on one stored parameter alone."""
        match step:
            case Compute() if step.is_view or _narrows(step):
                free = len(step.operands) == 1
            case Redistribute():
                free = step.is_free
            case _:
                return False
        if not free or not self._depends(step.reads[0]):
            return False
        self.makers.update((name, step) for name in step.gives)
        return True

    def _depends(self, value: str) -> bool:
        return value in self.split or value in self.makers

    def _base(self, value: str) -> tuple[str, str]:
        """(the parameter, what is gathered of it): itself, or its cast."""
        if value in self.split:
            return value, value
        maker = self.makers[value]
        if isinstance(maker, Redistribute):
            return self._base(maker.operands[0])
        if _narrows(maker) and maker.operands[0] in self.split:
            return maker.operands[0], value
        return self._base(maker.operands[0])

    def _expect(self, value: str, stage: int, when: When) -> None:
        """Take the value's parameter up in the group of its layer, in order of first use."""
        if not self._depends(value):
            return
        parameter, member = self._base(value)
        item = self.split[parameter]
        layer = f"{layer_of(item.label)} {self._dtype(member)} {_axes(item)}"
        group = self.groups.setdefault((stage, when), {}).setdefault(layer, _Group())
        if member not in group.members:
            group.members.append(member)

    def _dtype(self, member: str) -> str:
        if member in self.split:
            return str(self.split[member].spec.dtype)
        return str(self._cast(member).op.call.result.dtype)

    def _cast(self, member: str) -> Compute:
        maker = self.makers[member]
        assert isinstance(maker, Compute)
        return maker

    # -- second walk: the steps -----------------------------------------------------------------

    def read(self, value: str, stage: int, when: When) -> str:
        """The name under which a value can be read there; made where it is not."""
        if not self._depends(value):
            return value
        key: tuple[str, At] = (value, (stage, when))
        if value == self._base(value)[1]:
            self._gather(value, stage, when)
        elif key not in self.copies:
            self._repeat(self.makers[value], stage, when)
        return self.copies[key]

    def _repeat(self, maker: Compute | Redistribute, stage: int, when: When) -> None:
        operands = {name: self.read(name, stage, when) for name in maker.reads}
        results = {name: self._named(name, stage, when) for name in maker.gives}
        repeated = maker.reading(operands).giving(results)
        self.steps.append(replace(repeated, phase=_phase(when), stage=stage, once=when == "once"))

    def _named(self, value: str, stage: int, when: When) -> str:
        name = unused(value, self.names)
        self.copies[value, (stage, when)] = name
        return name

    def _gather(self, member: str, stage: int, when: When) -> None:
        """At the first use of a group, start the group after it; and itself, if it is the first."""
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
        items = [self.split[self._base(member)[0]] for member in group.members]
        values = [self._shard(member, stage, when) for member in group.members]
        for axis in _axes(items[0]):
            moves = [
                Move("all_gather", axis, spec, spec.with_placements(**{axis: used}))
                for (_, spec), item in zip(values, items, strict=True)
                for used in (item.spec.placement(axis),)
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
        """What is gathered of a member, and its spec: the parameter as it is held, or its cast."""
        parameter, _ = self._base(member)
        item = self.split[parameter]
        if member == parameter:
            return parameter, item.held
        cast = self._cast(member)
        spec = cast.result_specs[0]
        assert spec is not None
        held = replace(item.held, dtype=spec.dtype)
        name = unused(f"{member}_shard", self.names)
        self.steps.append(
            replace(
                cast,
                operands=(parameter,),
                operand_specs=(item.held,),
                results=(name,),
                result_specs=(held,),
                phase=_phase(when),
                stage=stage,
                once=when == "once",
                strategies=_on_shard(cast, _axes(item), held),
            )
        )
        return name, held


def _uses(step: Step) -> list[tuple[int, str]]:
    """(stage, value) of what a step uses: updated slices are gathered where they are stored."""
    if isinstance(step, Redistribute) and step.in_place:
        return []
    return [(stage, value) for stage, value, _ in step.reads_as()]


def _axes(item: PlannedInput) -> tuple[str, ...]:
    """The axes over which a parameter is gathered, the last of the mesh first."""
    return tuple(
        axis
        for axis in reversed(item.spec.mesh.axes)
        if item.held.placement(axis) != item.spec.placement(axis)
    )


def _on_shard(
    cast: Compute, axes: Sequence[str], held: TensorSpec
) -> tuple[tuple[str, Strategy], ...]:
    """The strategies of a cast that is made on what is stored, split over ``axes`` too."""
    strategies = dict(cast.strategies)
    for axis in axes:
        placed = held.placement(axis)
        assert isinstance(placed, Shard)
        split = through(cast.rule, 0, placed, held.mesh.axis_size(axis))
        assert isinstance(split, Strategy), "a cast goes through wherever its operand is cut"
        strategies[axis] = split
    return tuple(strategies.items())


def _narrows(step: Compute) -> bool:
    """Whether the step casts a value to as many bytes or fewer."""
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
