"""ZeRO: parameters, gradients and optimizer state stored split over an axis, used whole.

    parallelize(model, Mesh(dp=4), zero={"dp": 3})

Level 1 splits the optimizer's state, 2 the gradients too, 3 the parameters too (Rajbhandari et al.
2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054).
Per rank of n, of a model of P bytes and an optimizer that keeps k tensors a parameter:

    level             0          1          2            3
    parameters        P          P          P            P/n
    gradients         P          P          P/n          P/n
    optimizer state   kP         kP/n       kP/n         kP/n
    sent (P (n-1)/n)  2          2          1 + m        3m          m microbatches

At 1 gradients are reduce-scattered once, after the last microbatch; at 2 and 3 in the backward of
each microbatch, as soon as those of a layer are there, so that no rank keeps whole ones: what is
accumulated over microbatches is the shard. At 1 and 2 each rank updates its slice and the slices
are gathered. At 3 a layer's parameters are gathered before their first use in the forward and
again in the backward of each microbatch, the next layer's while one computes, and dropped after
the last use of that phase. A parameter that only steps computed once a step read is gathered once.

Invariants: storage opens no factor: what is used, and so the planner's choice, is as without. The
stored split is the last axis on its dim. A cast of a parameter to fewer bytes happens before the
gather; gradients of 16 bits are scattered as such, into float32 (precision.py). `gather_stored` is
the last pass over a plan: what repeats forward steps in the backward (recomputation) comes before
it, so that a repeated step reads what its own phase gathers. Not here: gradients and updates
(plan/emit/outputs.py), how a gather is lowered (runtime/lower/buckets.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from dtensor.sharding.plan.choose.prices import is_view
from dtensor.sharding.plan.plan import Plan, PlannedInput
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Regather,
    Step,
    StepPhase,
    TieSum,
    Transfer,
    Update,
    phase_of,
    reading,
    runs_once,
    unused,
)
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move
from dtensor.sharding.spec.placements import REPLICATE, Shard, refine
from dtensor.sharding.spec.spec import TensorSpec

When = Literal["once", "forward", "backward", "optimizer"]
LEVELS = {1: "optimizer state", 2: "gradients, optimizer state"} | {
    3: "parameters, gradients, optimizer state"
}
_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


def stored_spec(spec: TensorSpec, axis: str) -> TensorSpec | None:
    """The spec split over ``axis`` too, on the dim that leaves the least on the fullest rank.

    Of equals: a dim that no other axis splits (a rank's slice is then one block of what it uses),
    then the first. None where nothing gets smaller, or where the axis splits the value already.
    """
    if axis not in spec.mesh.axes or spec.placement(axis) != REPLICATE:
        return None
    best: tuple[int, bool, int] | None = None
    chosen: TensorSpec | None = None
    for dim, size in enumerate(spec.shape):
        majors = [
            (p, spec.mesh.axis_size(other))
            for other, p in spec.sharding.items()
            if isinstance(p, Shard) and p.dim == dim
        ]
        split = spec.with_placements(**{axis: refine(Shard(dim), majors, size)})
        key = (split.max_local_nbytes, bool(majors), dim)
        if split.max_local_nbytes < spec.max_local_nbytes and (best is None or key < best):
            best, chosen = key, split
    return chosen


def layer_of(label: str) -> str:
    """The parameters that are gathered together: those of one numbered module, or of one module.

    ``blocks.0.attn.qkv.weight`` is of ``blocks.0``, ``embed.weight`` of ``embed``.
    """
    numbers = list(_NUMBER.finditer(label))
    return label[: numbers[-1].end()] if numbers else label.rpartition(".")[0]


def is_cast(step: Compute) -> bool:
    """Whether the step changes a value's dtype and nothing else."""
    result = step.op.call.results[0]
    return (
        step.op.call.name == "aten._to_copy.default"
        and len(step.operands) == 1
        and result is not None
        and result.dtype != step.op.call.operands[0].dtype
        and result.dtype.itemsize <= step.op.call.operands[0].dtype.itemsize
    )


# -- gathering before use -------------------------------------------------------------------------


def gather_stored(plan: Plan) -> Plan:
    """The plan in which every use of a parameter that is stored split reads a gathered copy.

    Free steps on parameters alone (views, slices, casts) are repeated where they are used: kept
    from forward to backward, they would keep what was gathered.
    """
    split = {item.name: item for item in plan.inputs if item.held != item.spec}
    done = any(isinstance(s, Bucket) and s.kind == "all_gather" for s in plan.steps)
    if not split or done:
        return plan
    return _Gathering(plan, split).run()


@dataclass(slots=True)
class _Group:
    """What is gathered as one message; ``members``: the values, each a parameter or its cast."""

    layer: str
    members: list[str] = field(default_factory=list[str])
    started: bool = False
    used: bool = False


@dataclass(slots=True)
class _Gathering:
    plan: Plan
    split: Mapping[str, PlannedInput]
    makers: dict[str, Compute | Convert] = field(
        default_factory=dict[str, Compute | Convert]
    )  # the free steps, by result
    groups: dict[tuple[int, When], list[_Group]] = field(
        default_factory=dict[tuple[int, When], list[_Group]]
    )
    copies: dict[tuple[str, int, When], str] = field(
        default_factory=dict[tuple[str, int, When], str]
    )
    steps: list[Step] = field(default_factory=list[Step])
    names: set[str] = field(default_factory=set[str])

    def run(self) -> Plan:
        kept = [step for step in self.plan.steps if not self._is_free(step)]
        made = set(self.plan.value_specs()) - self.makers.keys()
        self.names = made | {s.name for s in kept if isinstance(s, Bucket | Regather)}
        for step in kept:
            for stage, value in _reads(step):
                self._expect(value, stage, _when(step))
        wanted = [(o, s, v) for o in self.plan.outputs for s, v in o.values if self._depends(v)]
        for output, stage, value in wanted:
            self._expect(value, stage, "forward" if output.kind == "result" else "optimizer")
        for step in kept:
            when = _when(step)
            found = {v: self.read(v, at, when) for at, v in _reads(step) if self._depends(v)}
            self.steps.append(reading(step, found) if found else step)
        outputs = tuple(
            replace(
                o,
                values=tuple(
                    (s, self.read(v, s, "forward" if o.kind == "result" else "optimizer"))
                    for s, v in o.values
                ),
            )
            for o in self.plan.outputs
        )
        return replace(self.plan, steps=tuple(self.steps), outputs=outputs)

    def _is_free(self, step: Step) -> bool:
        """Whether the step costs nothing and depends on one stored parameter alone."""
        match step:
            case Compute() if is_view(step.op) or is_cast(step):
                free = bool(step.operands) and all(self._depends(v) for v in step.operands)
                free = free and len(step.operands) == 1
            case Convert() if step.move.kind in FREE_KINDS:
                free = self._depends(step.operand)
            case _:
                return False
        if free:
            names = step.results if isinstance(step, Compute) else (step.result,)
            self.makers.update((name, step) for name in names if name is not None)
        return free

    def _depends(self, value: str) -> bool:
        return value in self.split or value in self.makers

    def _base(self, value: str) -> tuple[str, str]:
        """(the parameter, what is gathered of it): itself, or its cast."""
        if value in self.split:
            return value, value
        maker = self.makers[value]
        if isinstance(maker, Convert):
            return self._base(maker.operand)
        if is_cast(maker) and maker.operands[0] in self.split:
            return maker.operands[0], value
        return self._base(maker.operands[0])

    def _expect(self, value: str, stage: int, when: When) -> None:
        """Take the value's parameter up in the group of its layer, in order of first use."""
        if not self._depends(value):
            return
        parameter, member = self._base(value)
        groups = self.groups.setdefault((stage, when), [])
        layer = f"{layer_of(self.split[parameter].label)} {self._dtype(member)}"
        group = next((g for g in groups if g.layer == layer), None)
        if group is None:
            group = _Group(layer)
            groups.append(group)
        if member not in group.members:
            group.members.append(member)

    def _dtype(self, member: str) -> str:
        if member in self.split:
            return str(self.split[member].spec.dtype)
        result = self._cast(member).op.call.results[0]
        assert result is not None
        return str(result.dtype)

    def _cast(self, member: str) -> Compute:
        maker = self.makers[member]
        assert isinstance(maker, Compute)
        return maker

    # -- second walk: the steps -----------------------------------------------------------------

    def read(self, value: str, stage: int, when: When) -> str:
        """The name under which a value can be read there; made where it is not."""
        if not self._depends(value):
            return value
        key = (value, stage, when)
        if value == self._base(value)[1]:
            self._gather(value, stage, when)
        elif key not in self.copies:
            self._repeat(self.makers[value], stage, when)
        return self.copies[key]

    def _repeat(self, maker: Compute | Convert, stage: int, when: When) -> None:
        phase, once = _phase(when), when == "once"
        match maker:
            case Compute():
                operand = self.read(maker.operands[0], stage, when)
                results = tuple(r and self._named(r, stage, when) for r in maker.results)
                self.steps.append(
                    replace(
                        maker,
                        operands=(operand,),
                        results=results,
                        phase=phase,
                        stage=stage,
                        once=once,
                    )
                )
            case Convert():
                operand = self.read(maker.operand, stage, when)
                result = self._named(maker.result, stage, when)
                self.steps.append(
                    replace(
                        maker, operand=operand, result=result, phase=phase, stage=stage, once=once
                    )
                )

    def _named(self, value: str, stage: int, when: When) -> str:
        name = unused(value, self.names)
        self.copies[value, stage, when] = name
        return name

    def _gather(self, member: str, stage: int, when: When) -> None:
        """At the first use of a group, start the group after it; and itself, if it is the first."""
        groups = self.groups[stage, when]
        at = next(i for i, group in enumerate(groups) if member in group.members)
        if groups[at].used:
            return
        groups[at].used = True
        for group in groups[at : at + 2]:
            if not group.started:
                group.started = True
                self._start(group, stage, when)

    def _start(self, group: _Group, stage: int, when: When) -> None:
        assert self.plan.zero is not None
        axis, _ = self.plan.zero
        phase, once = _phase(when), when == "once"
        operands: list[str] = []
        found: list[Move] = []
        results: list[str] = []
        for member in group.members:
            parameter, _ = self._base(member)
            item = self.split[parameter]
            held, used, operand = item.held, item.spec, parameter
            if member != parameter:
                cast = self._cast(member)
                spec = cast.result_specs[0]
                assert spec is not None
                held, used = replace(held, dtype=spec.dtype), replace(used, dtype=spec.dtype)
                operand = unused(f"{member}_shard", self.names)
                self.steps.append(
                    replace(
                        cast,
                        operands=(parameter,),
                        operand_specs=(item.held,),
                        results=(operand,),
                        result_specs=(held,),
                        phase=phase,
                        stage=stage,
                        once=once,
                    )
                )
            operands.append(operand)
            found.append(Move("all_gather", axis, held, used))
            results.append(unused(f"{member}_gathered", self.names))
            self.copies[member, stage, when] = results[-1]
        self.steps.append(
            Bucket(
                name=unused(f"parameters_{axis}", self.names),
                results=tuple(results),
                operands=tuple(operands),
                moves=tuple(found),
                axis=axis,
                stage=stage,
                of=tuple(self.split[self._base(m)[0]].label for m in group.members),
                phase=phase,
                once=once,
            )
        )


def _when(step: Step) -> When:
    if runs_once(step):
        return "once"
    match phase_of(step):
        case "forward":
            return "forward"
        case "backward":
            return "backward"
        case _:
            return "optimizer"


def _phase(when: When) -> StepPhase:
    return "forward" if when == "once" else when


def _reads(step: Step) -> list[tuple[int, str]]:
    """(stage, value) for what the step reads; inputs that a step writes are no reads."""
    match step:
        case Compute() | Bucket():
            return [(step.stage, value) for value in step.operands]
        case Convert() | Transfer() | Accumulate():
            return [(step.stage, step.operand)]
        case TieSum():
            return list(zip(step.stages, step.operands, strict=True))
        case Norm():
            return [(stage, value) for stage, value, _ in step.operands]
        case Update():
            return [(step.stage, step.gradient)]
        case Regather():
            return []
        case _:
            assert_never(step)
