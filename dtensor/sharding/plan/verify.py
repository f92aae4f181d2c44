"""The verifier of plans. It runs on every plan; a failure is a bug of the planner.

    verify(record)       # raises AssertionError that names the step

It checks that operands exist on the step's stage with the spec that the step expects; that a step
which runs once per training step reads no value of a single microbatch; that an op's strategies
come from its rule and agree with its specs; that shapes and dtypes are the program's; that a move
changes only the placement on its axis, as its kind says; and that only sums of narrow floats change
dtype. Whether rules are correct is certified in testing; whether programs hang is checked in daft.
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
from dtensor.sharding.redistribute.moves import Move, gather_counts, move_kind
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.fits import splits_rows
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Shard,
    same,
    with_shift,
)
from dtensor.sharding.spec.spec import TensorSpec, alike


def verify(plan: PlanRecord) -> None:
    """Raise AssertionError if the plan contradicts itself."""
    defined = _DefinedValues(plan)
    for step in plan.steps:
        for fault in _faults(defined, step):
            raise AssertionError(f"{fault}; in {step}")
        defined.add_results(step)
    for output in plan.outputs:
        for stage, value in output.values:
            if fault := defined.missing(value, stage):
                raise AssertionError(f"{fault}; it is the {output.kind} {output.of}")


@dataclass(slots=True)
class _DefinedValues:
    """The values that inputs and the steps so far define, with their specs and stages.

    ``once``: the values that exist once per training step, not once per microbatch. ``axes``: axis
    to its (position, size) in specs. ``checked_strategies``: the ids of rules and strategies, and
    numbers of ranks, that were found valid.
    """

    plan: PlanRecord
    specs: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    once: set[str] = field(default_factory=set[str])
    axes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    checked_strategies: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])

    def __post_init__(self) -> None:
        """Add the inputs of the plan."""
        inner = self.plan.inner
        self.axes = {axis: (inner.index(axis), inner.axis_size(axis)) for axis in inner.axes}
        for item in (*self.plan.inputs, *self.plan.delayed):
            self.add_value(item.name, item.held, item.stages)
            self.once.add(item.name)

    def add_value(self, name: str, spec: TensorSpec, stages: tuple[int, ...]) -> None:
        """Record a value. Raises AssertionError if it is defined already."""
        if name in self.specs:
            raise AssertionError(f"{name} is made twice")
        self.specs[name], self.stages[name] = spec, stages

    def add_results(self, step: Step) -> None:
        for stage, name, spec in step.gives_as():
            self.add_value(name, spec, (stage,))
            if step.once or not step.in_microbatch:
                self.once.add(name)

    def missing(self, name: str, stage: int) -> str | None:
        """Return the fault if the value is not defined on the stage, else None."""
        if name not in self.specs:
            return f"{name} is read and nothing makes it"
        if stage not in self.stages[name]:
            return f"{name} is read on stage {stage} and is on {self.stages[name]}"
        return None


def _faults(defined: _DefinedValues, step: Step) -> Iterator[str]:
    """Yield a sentence for each fault: an operand that is not defined with the spec or on the stage
    that the step expects, and a contradiction within the step."""
    for stage, name, spec in step.reads_as():
        if fault := defined.missing(name, stage):
            yield fault
        elif (actual := defined.specs[name]) is not spec and not _can_read_as(step, actual, spec):
            yield f"{name} is {actual} and is read as {spec}"
        elif step.once and name not in defined.once:
            yield f"{name} is of one microbatch and is read once a step"
    match step:
        case Compute():
            yield from _compute_faults(defined, step)
        case Redistribute():
            if len({(move.kind, move.axis, move.distance) for move in step.moves}) != 1:
                yield "the moves of a message are of one kind, one axis and one distance"
            if step.kind != "shift" and len({move.src.dtype for move in step.moves}) != 1:
                yield "the moves of a bucket are of one dtype"
            if len(set(step.tied)) != len(step.tied):
                yield "a stage is counted twice"
            for move in step.moves:
                yield from _move_faults(move)
        case Accumulate():
            pending = step.dst.with_placements(**{MICROBATCH_AXIS: Partial("sum")})
            is_rounded = step.dst.dtype == torch.bfloat16  # accumulate="bf16"
            part = replace(step.src, dtype=torch.bfloat16) if is_rounded else step.src
            if not _can_sum_to(part, pending) or step.dst.placement(MICROBATCH_AXIS) != REPLICATE:
                yield f"{step.dst} is no sum of {step.src} over microbatches"
        case Transfer() | Norm() | Update():
            pass
        case _:
            assert_never(step)


def _can_read_as(step: Step, actual: TensorSpec, spec: TensorSpec) -> bool:
    """Return whether the step may read a value with the spec ``actual`` as ``spec``.

    The dtypes of gradients may differ: a gradient may be narrower than the sum over stages, and
    wider than the parameter that it updates. Their placements may be different statements of the
    same cut (blocks of 12 and 20, in units of 2 or not).
    """
    if isinstance(step, Update) or (isinstance(step, Redistribute) and step.tied):
        return (actual.shape, actual.mesh) == (spec.shape, spec.mesh) and alike(actual, spec)
    return actual == spec


def _can_sum_to(part: TensorSpec, total: TensorSpec) -> bool:
    """Return whether ``total`` may be the spec of a sum of values with the spec ``part``: the same
    spec, or the same spec in float32 if ``part`` is a narrow float."""
    wider = is_narrow(part.dtype) and total.dtype == torch.float32
    return part == total or (wider and replace(part, dtype=total.dtype) == total)


def _move_faults(move: Move) -> Iterator[str]:
    """Yield a fault unless only the placement on the axis changes, as the kind of move says."""
    src, dst, axis = move.src, move.dst, move.axis
    at = src.mesh.index(axis)
    before, after = src.placements[at], dst.placements[at]
    if move.kind == "relabel":
        possible = same(before, after, src.shape, src.mesh.axis_size(axis))
    elif move.kind == "shift":
        possible = (
            isinstance(before, Shard)
            and isinstance(after, Shard)
            and before != after == with_shift(before, after.shift, src.mesh.axis_size(axis))
        )
    else:
        possible = move_kind(before, after) == move.kind
        possible &= not splits_rows(len(src.shape), (before, after))
    unchanged = (p == q for i, (p, q) in enumerate(zip(src.placements, dst.placements)) if i != at)
    dtypes = {src.dtype, dst.dtype}
    if move.reduces:
        if is_narrow(src.dtype):
            dtypes -= {torch.float32}
        elif src.dtype == torch.float32 and is_narrow(dst.dtype) and not is_part(dst):
            dtypes -= {dst.dtype}
    if move.kind == "hold" or move.gathers_counts:
        yield from _counts_faults(move)
        return
    same_tensor = src.shape == dst.shape and src.mesh == dst.mesh and src.on == dst.on
    if not (possible and same_tensor and len(dtypes) == 1 and all(unchanged)):
        yield f"no {move.kind} over {axis} makes {dst} of {src}"


def _counts_faults(move: Move) -> Iterator[str]:
    """Yield a fault unless the move gathers the counts of all ranks of the axis, or makes of the
    gathered counts the total of a rank's experts."""
    on_axis, ends = move.axis, (move.src, move.dst)
    counts = move.dst if move.kind == "hold" else move.src
    pending = counts.with_placements(**{on_axis: Partial("sum")})
    gathered = gather_counts(pending, on_axis).dst
    expected = (gathered, counts) if move.kind == "hold" else (pending, gathered)
    if ends != expected:
        yield f"no {move.kind} of counts over {on_axis} makes {move.dst} of {move.src}"


def _compute_faults(defined: _DefinedValues, step: Compute) -> Iterator[str]:
    """Yield a sentence for each difference between an op's specs, strategies, rule and program."""
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
        at, num = defined.axes[axis]
        for placement, spec in zip((*strategy.operands, *strategy.results), specs):
            planned = placement if spec is None else spec.placements[at]
            if planned is placement or planned == placement:
                continue
            if spec is not None and not same(planned, placement, spec.shape, num):
                yield f"{spec}, and its strategy has {placement!r} on {axis}"
        key = id(step.rule), id(strategy), num  # both are alive as long as the plan
        if key not in defined.checked_strategies:
            if not _allows(step.rule, strategy, num):
                yield f"the rule {step.rule} has no strategy {strategy} over {num} ranks"
            defined.checked_strategies.add(key)


def _allows(rule: Rule, strategy: Strategy, num: int) -> bool:
    """Return whether the rule has this strategy over ``num`` ranks."""
    match strategy.kind:
        case "replicate" | "linear":
            return strategy in rule.fixed_strategies
        case "stated":
            return rule.kind == "mark"
        case "ring":  # the steps of its body have rules of their own
            return False
        case "split":
            tensors = enumerate((*strategy.operands, *strategy.results))
            return any(
                isinstance(placement, Shard) and through(rule, tensor, placement, num) == strategy
                for tensor, placement in tensors
            )
