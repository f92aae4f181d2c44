"""The verifier of plans: no step reads what is not there, or as what it is not.

    verify(record)       # AssertionError that names the step; it runs on every plan

Checked of every step: its operands are inputs or results of earlier steps, on its stage, under the
specs that those have; what runs once a step reads nothing of a microbatch; a local op's strategies
are its rule's, its specs are what they say, shapes and dtypes are the program's; a move changes the
placement on its axis alone, as its kind says; only sums of narrow floats change their dtype, and
only parts of them are in float32 where the program is not. Of outputs: they are made. A failure is
a fault of the planner, never of its user.

Not here: whether a rule is right (its certificate), whether a program can hang (daft).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch

from dtensor.numerics import is_narrow
from dtensor.sharding.plan.choose.split_through_op import through
from dtensor.sharding.plan.precision import is_part
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
)
from dtensor.sharding.redistribute.moves import Move, move_kind
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import REPLICATE, Partial, Shard, same, splits_rows
from dtensor.sharding.spec.spec import TensorSpec, alike


def verify(plan: PlanRecord) -> None:
    """AssertionError where the plan contradicts itself."""
    seen = _SoFar(plan)
    for step in plan.steps:
        for fault in _faults(seen, step):
            raise AssertionError(f"{fault}; in {step}")
        seen.make(step)
    for output in plan.outputs:
        for stage, value in output.values:
            if fault := seen.missing(value, stage):
                raise AssertionError(f"{fault}; it is the {output.kind} {output.of}")


@dataclass(slots=True)
class _SoFar:
    """The values so far: their specs, the stages that have them, whether they are of all
    microbatches. ``axes``: by axis of specs, its position and size."""

    plan: PlanRecord
    specs: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    once: set[str] = field(default_factory=set[str])
    axes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    licensed: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])

    def __post_init__(self) -> None:
        inner = self.plan.inner
        self.axes = {axis: (inner.index(axis), inner.axis_size(axis)) for axis in inner.axes}
        for item in self.plan.inputs:
            self.add(item.name, item.held, item.stages)
            self.once.add(item.name)

    def add(self, name: str, spec: TensorSpec, stages: tuple[int, ...]) -> None:
        if name in self.specs:
            raise AssertionError(f"{name} is made twice")
        self.specs[name], self.stages[name] = spec, stages

    def make(self, step: Step) -> None:
        for stage, name, spec in step.gives_as():
            self.add(name, spec, (stage,))
            if step.once or not step.in_microbatch:
                self.once.add(name)

    def missing(self, name: str, stage: int) -> str | None:
        if name not in self.specs:
            return f"{name} is read and nothing makes it"
        if stage not in self.stages[name]:
            return f"{name} is read on stage {stage} and is on {self.stages[name]}"
        return None


def _faults(seen: _SoFar, step: Step) -> Iterator[str]:
    for stage, name, spec in step.reads_as():
        if fault := seen.missing(name, stage):
            yield fault
        elif (have := seen.specs[name]) is not spec and not _read_as(step, have, spec):
            yield f"{name} is {have} and is read as {spec}"
        elif step.once and name not in seen.once:
            yield f"{name} is of one microbatch and is read once a step"
    match step:
        case Compute():
            yield from _computed(seen, step)
        case Redistribute():
            if len({(move.kind, move.axis, move.src.dtype) for move in step.moves}) != 1:
                yield "the moves of a bucket are of one kind, one axis and one dtype"
            if len(set(step.tied)) != len(step.tied):
                yield "a stage is counted twice"
            for move in step.moves:
                yield from _moved(move)
        case Accumulate():
            pending = step.dst.with_placements(**{MICROBATCH_AXIS: Partial("sum")})
            if not _sums(step.src, pending) or step.dst.placement(MICROBATCH_AXIS) != REPLICATE:
                yield f"{step.dst} is no sum of {step.src} over microbatches"
        case Transfer() | Norm() | Update():
            pass
        case _:
            assert_never(step)


def _read_as(step: Step, have: TensorSpec, spec: TensorSpec) -> bool:
    """Whether the step may read a value of one spec as of another: gradients may be narrower than
    their sum, and wider than what they update; those of tied stages may be cut alike by other words
    (blocks of 12 and 20, in units of 2 or not)."""
    if isinstance(step, Update) or (isinstance(step, Redistribute) and step.tied):
        return (have.shape, have.mesh) == (spec.shape, spec.mesh) and alike(have, spec)
    return have == spec


def _sums(part: TensorSpec, total: TensorSpec) -> bool:
    """Whether sums of such values are such: alike, but that narrow floats become float32."""
    wider = is_narrow(part.dtype) and total.dtype == torch.float32
    return part == total or (wider and replace(part, dtype=total.dtype) == total)


def _moved(move: Move) -> Iterator[str]:
    src, dst, axis = move.src, move.dst, move.axis
    at = src.mesh.index(axis)
    before, after = src.placements[at], dst.placements[at]
    if move.kind == "relabel":
        possible = same(before, after, src.shape, src.mesh.axis_size(axis))
    else:
        possible = move_kind(before, after) == move.kind
        possible &= not splits_rows(len(src.shape), (before, after))
    others = (p == q for i, (p, q) in enumerate(zip(src.placements, dst.placements)) if i != at)
    dtypes = {src.dtype, dst.dtype}
    if move.reduces:
        if is_narrow(src.dtype):
            dtypes -= {torch.float32}
        elif src.dtype == torch.float32 and is_narrow(dst.dtype) and not is_part(dst):
            dtypes -= {dst.dtype}
    alike = src.shape == dst.shape and src.mesh == dst.mesh and src.on == dst.on
    if not (possible and alike and len(dtypes) == 1 and all(others)):
        yield f"no {move.kind} over {axis} makes {dst} of {src}"


def _computed(seen: _SoFar, step: Compute) -> Iterator[str]:
    specs = (*step.operand_specs, *step.result_specs)
    takes_parts = step.rule.parts is not None or step.rule.kind == "view"
    for meta, spec in zip((*step.op.call.operands, *step.op.call.results), specs):
        if spec is None:
            continue
        if meta is not None and meta.shape == spec.shape:
            in_float32 = takes_parts and is_part(spec) and is_narrow(meta.dtype)
            if meta.dtype == spec.dtype or (in_float32 and spec.dtype == torch.float32):
                continue
        yield f"the program has {meta} where the plan has {spec}"
    for axis, strategy in step.strategies:
        at, num = seen.axes[axis]
        for placement, spec in zip((*strategy.operands, *strategy.results), specs):
            own = placement if spec is None else spec.placements[at]
            if own is placement or own == placement:
                continue
            if spec is not None and not same(own, placement, spec.shape, num):
                yield f"{spec}, and its strategy has {placement!r} on {axis}"
        key = id(step.rule), id(strategy), num  # both are alive as long as the plan
        if key not in seen.licensed:
            if not _licensed(step.rule, strategy, num):
                yield f"the rule {step.rule} has no strategy {strategy} over {num} ranks"
            seen.licensed.add(key)


def _licensed(rule: Rule, strategy: Strategy, num: int) -> bool:
    match strategy.kind:
        case "replicate" | "linear":
            return strategy in rule.fixed_strategies
        case "stated":
            return rule.kind == "mark"
        case "split":
            tensors = enumerate((*strategy.operands, *strategy.results))
            return any(
                isinstance(placement, Shard) and through(rule, tensor, placement, num) == strategy
                for tensor, placement in tensors
            )
