"""The steps of a plan: a closed sum, taken apart by ``match``.

    Compute, Convert, Transfer      the program: local ops, moves of one value, ways between stages
    Accumulate                      a sum over microbatches
    Bucket                          moves of several values as one message
    TieSum, Norm, Update, Regather  the end of a training step

Values are named; a step reads results of earlier steps, or inputs (`operands_of`, `results_of`).
What a step costs stands in plan.py and plan/cost/memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.redistribute.moves import Move, MoveKind
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.spec import TensorSpec

StepPhase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One local op on every rank of its stage."""

    op: Op
    rule: Rule = field(compare=False)  # follows from the op
    operands: tuple[str, ...]
    operand_specs: tuple[TensorSpec, ...]
    results: tuple[str | None, ...]
    result_specs: tuple[TensorSpec | None, ...]
    phase: StepPhase
    stage: int
    once: bool
    why: tuple[str, ...]  # per axis: "tp: f", the strategy's label
    flops: int  # of one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """One move of one value on one axis."""

    result: str
    operand: str
    move: Move
    phase: StepPhase
    stage: int
    once: bool
    source: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value goes to another stage, shard by shard; ``spec`` holds on both sides."""

    result: str
    operand: str
    spec: TensorSpec
    stage: int  # the sender's
    to_stage: int
    phase: StepPhase
    once: bool
    source: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """The sum over microbatches: what a reduction over the axis ``mb`` is, in time."""

    result: str
    operand: str
    src: TensorSpec
    dst: TensorSpec
    stage: int
    of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Moves of one kind on one axis, of several values, as one message.

    all_reduce and reduce_scatter of gradients; with parameters stored split, reduce_scatter in
    the backward and all_gather of the parameters of a layer (``of``: their labels), both of them
    once a microbatch. A gather starts where the step stands and is waited for at the first use.
    """

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    moves: tuple[Move, ...]
    axis: str
    stage: int
    of: tuple[str, ...]
    phase: StepPhase = "optimizer"
    once: bool = False

    @property
    def kind(self) -> MoveKind:
        return self.moves[0].kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TieSum:
    """The gradients of one parameter that several stages use, summed over those stages."""

    results: tuple[str, ...]  # one per stage
    operands: tuple[str, ...]
    stages: tuple[int, ...]
    spec: TensorSpec
    of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The global norm of all gradients, over all axes and stages; they are scaled to it."""

    result: str
    operands: tuple[tuple[int, str, str], ...]  # (stage that counts it, value, parameter)
    specs: tuple[TensorSpec, ...]
    max_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The optimizer's step on one parameter's shard, on every stage that holds it."""

    parameter: str  # label
    gradient: str
    spec: TensorSpec
    stage: int
    optimizer: str
    state_bytes: int  # per rank
    master_bytes: int = 0  # of the float32 copy that is updated instead, per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Regather:
    """Updated parameters, each rank its slice, put together again on every rank: one message.

    ``inputs`` are the plan's inputs that it writes; ``moves`` gather slices to whole values.
    """

    name: str
    inputs: tuple[str, ...]
    moves: tuple[Move, ...]
    axis: str
    stage: int
    of: tuple[str, ...]  # labels


Step = Compute | Convert | Transfer | Accumulate | Bucket | TieSum | Norm | Update | Regather


def unused(name: str, taken: set[str]) -> str:
    """``name``, or `name_2` and so on where it is taken; taken from then on."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate


def results_of(step: Step) -> list[tuple[str, TensorSpec]]:
    match step:
        case Compute():
            return [
                (name, spec)
                for name, spec in zip(step.results, step.result_specs, strict=True)
                if name is not None and spec is not None
            ]
        case Convert():
            return [(step.result, step.move.dst)]
        case Transfer():
            return [(step.result, step.spec)]
        case Accumulate():
            return [(step.result, step.dst)]
        case Bucket():
            return [(name, move.dst) for name, move in zip(step.results, step.moves, strict=True)]
        case TieSum():
            return [(name, step.spec) for name in step.results]
        case Norm() | Update() | Regather():
            return []


def operands_of(step: Step) -> tuple[str, ...]:
    match step:
        case Compute() | Bucket() | TieSum():
            return step.operands
        case Convert() | Transfer() | Accumulate():
            return (step.operand,)
        case Norm():
            return tuple(value for _, value, _ in step.operands)
        case Update():
            return (step.gradient,)
        case Regather():
            return step.inputs


def reading(step: Step, names: Mapping[str, str]) -> Step:
    """The step with its operands renamed."""
    match step:
        case Compute() | Bucket() | TieSum():
            return replace(step, operands=tuple(names.get(v, v) for v in step.operands))
        case Convert() | Transfer() | Accumulate():
            return replace(step, operand=names.get(step.operand, step.operand))
        case Norm():
            renamed = tuple((s, names.get(v, v), p) for s, v, p in step.operands)
            return replace(step, operands=renamed)
        case Update():
            return replace(step, gradient=names.get(step.gradient, step.gradient))
        case Regather():
            return step
        case _:
            assert_never(step)


def stage_of(step: Step) -> int:
    """The stage at which a step stands; of those that concern several, the first."""
    match step:
        case TieSum():
            return step.stages[0]
        case Norm():
            return 0
        case _:
            return step.stage


def runs_once(step: Step) -> bool:
    """Whether a step runs once a training step rather than once a microbatch."""
    return isinstance(step, Compute | Convert | Transfer | Bucket) and step.once


def comes_last(step: Step) -> bool:
    """Whether a step comes after the last microbatch."""
    match step:
        case Accumulate() | TieSum() | Norm() | Update() | Regather():
            return True
        case _:
            return step.phase == "optimizer"


def phase_of(step: Step) -> str:
    """The phase of a step."""
    return step.phase if isinstance(step, Compute | Convert | Transfer | Bucket) else "optimizer"
