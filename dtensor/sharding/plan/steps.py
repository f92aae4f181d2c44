"""The steps of a plan: a closed sum, taken apart by ``match``.

    Compute                  a local op
    Redistribute             values go from one spec to another, alone or several as one message
    Transfer                 a value goes to another stage
    Accumulate               a sum over microbatches
    Norm, Update             the end of a training step

Values are named; a step reads results of earlier steps, or inputs (`operands_of`, `results_of`).
Every step has a ``phase``, a ``stage`` and says whether it runs ``once`` a training step instead of
once a microbatch; those of the phase "optimizer" run after the last microbatch.
What a step communicates and costs is in cost/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import ClassVar, Literal, TypeVar, assert_never

import torch

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move, MoveKind
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.spec import TensorSpec

StepPhase = Literal["forward", "backward", "optimizer"]
BUCKET_BYTES = 32 * 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compute:
    """One local op on every rank of its stage; ``strategies``: (axis, what was chosen there)."""

    op: Op
    rule: Rule = field(compare=False)  # follows from the op
    operands: tuple[str, ...]
    operand_specs: tuple[TensorSpec, ...]
    results: tuple[str | None, ...]
    result_specs: tuple[TensorSpec | None, ...]
    phase: StepPhase
    stage: int
    once: bool
    strategies: tuple[tuple[str, Strategy], ...]
    flops: int  # of one rank

    def __repr__(self) -> str:
        made = ", ".join(name for name in self.results if name is not None)
        call = f"{self.op.call.name}({', '.join(self.operands)})"
        return f"<compute {made} = {call}, {self.phase}, stage {self.stage}>"

    @property
    def source(self) -> str:
        """The user's line."""
        return self.op.source

    @property
    def is_view(self) -> bool:
        return self.rule.kind == "view"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute:
    """Values go from one spec to another: a move of each, all of one kind on one axis.

    A value that an op or an output wants elsewhere goes alone, and ``why`` says for what. Several
    share one message, the ``bucket`` of that name, ``of`` whose labels: all_reduce and
    reduce_scatter of gradients; with parameters stored split, reduce_scatter in the backward and
    all_gather of the parameters of a layer, both of them once a microbatch. A gather starts where
    the step stands and is waited for at the first use. Without ``results`` it gathers updated
    parameters: the operands are inputs of the plan, of which each rank has its slice, and the whole
    values are written there.

    Gradients of one parameter (``of``) that several stages use are ``tied``: one of each of these
    stages, summed over them. Their specs have the axis of stages, along which they are pending.

    ``source``: the user's lines: that of the op that left a sum pending or needs the value, those
    with which the pins of what is gathered do not line up.
    """

    results: tuple[str, ...]
    operands: tuple[str, ...]
    moves: tuple[Move, ...]
    phase: StepPhase
    stage: int
    once: bool = False
    source: str = ""
    why: str = ""
    of: tuple[str, ...] = ()
    bucket: str = ""
    tied: tuple[int, ...] = ()

    @property
    def kind(self) -> MoveKind:
        return self.moves[0].kind

    @property
    def axis(self) -> str:
        return self.moves[0].axis

    @property
    def name(self) -> str:
        """That of the message, or of the one result."""
        return self.bucket or self.results[0]

    @property
    def label(self) -> str:
        """What its messages are of."""
        return f"the gradients of {self.of[0]}" if self.tied else self.bucket or self.operands[0]

    @property
    def is_alone(self) -> bool:
        """Whether one value goes by itself, because something wants it elsewhere."""
        return not self.bucket and not self.tied

    @property
    def is_free(self) -> bool:
        """Whether nothing is sent."""
        return self.kind in FREE_KINDS

    @property
    def in_place(self) -> bool:
        return not self.results

    @property
    def noun(self) -> str:
        """What a bucket has of each of its labels."""
        return "parameter" if self.kind == "all_gather" else "gradient"

    def specs(self) -> Iterator[tuple[int, TensorSpec, TensorSpec]]:
        """Of each value: its stage, and the specs that it is read and made under."""
        for at, move in enumerate(self.moves):
            if self.tied:
                spec = _on_one_stage(move.dst, move.axis)
                yield self.tied[at], spec, spec
            else:
                yield self.stage, move.dst if self.in_place else move.src, move.dst


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
    phase: ClassVar[StepPhase] = "optimizer"
    once: ClassVar[bool] = False
    source: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The global norm of all gradients, over all axes and stages; they are scaled to it."""

    result: str
    operands: tuple[tuple[int, str, str], ...]  # (stage that counts it, value, parameter)
    specs: tuple[TensorSpec, ...]
    max_norm: float
    phase: ClassVar[StepPhase] = "optimizer"
    once: ClassVar[bool] = False
    source: ClassVar[str] = ""
    stage: ClassVar[int] = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum of squares: float32, or float64 where a gradient is."""
        wide = (accumulation_dtype(spec.dtype) for spec in self.specs)
        return reduce(torch.promote_types, wide, torch.float32)


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
    phase: ClassVar[StepPhase] = "optimizer"
    once: ClassVar[bool] = False
    source: ClassVar[str] = ""


Step = Compute | Redistribute | Transfer | Accumulate | Norm | Update


def over_stages(spec: TensorSpec, axis: str, num: int) -> Move:
    """The sum of ``num`` tied values of a spec: pending along the axis of stages, which the spec
    lacks."""
    mesh = spec.mesh.extended(axis, num)
    src, dst = (
        replace(spec, mesh=mesh, placements=(*spec.placements, along))
        for along in (Partial("sum"), REPLICATE)
    )
    return Move("all_reduce", axis, src, dst)


def _on_one_stage(spec: TensorSpec, axis: str) -> TensorSpec:
    """Without the axis that `over_stages` adds."""
    return replace(spec, mesh=spec.mesh.without(axis), placements=spec.placements[:-1])


def filled(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """The items in order, in buckets of at most BUCKET_BYTES, or of one item that is larger."""
    buckets: list[list[T]] = []
    size = 0
    for item, nbytes in zip(items, sizes, strict=True):
        if not buckets or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += nbytes
    return buckets


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
        case Redistribute():
            return [(name, dst) for name, (_, _, dst) in zip(step.results, step.specs())]
        case Transfer():
            return [(step.result, step.spec)]
        case Accumulate():
            return [(step.result, step.dst)]
        case Norm() | Update():
            return []


def reads_of(step: Step) -> Iterator[tuple[int, str, TensorSpec]]:
    """(stage, value, the spec that it is read under) of each operand."""
    match step:
        case Compute():
            for name, spec in zip(step.operands, step.operand_specs, strict=True):
                yield step.stage, name, spec
        case Redistribute():
            for name, (stage, src, _) in zip(step.operands, step.specs(), strict=True):
                yield stage, name, src
        case Transfer():
            yield step.stage, step.operand, step.spec
        case Accumulate():
            yield step.stage, step.operand, step.src
        case Norm():
            for (stage, name, _), spec in zip(step.operands, step.specs, strict=True):
                yield stage, name, spec
        case Update():
            yield step.stage, step.gradient, step.spec
        case _:
            assert_never(step)


def operands_of(step: Step) -> tuple[str, ...]:
    """The values that a step reads."""
    return tuple(name for _, name, _ in reads_of(step))


def reading(step: Step, names: Mapping[str, str]) -> Step:
    """The step with its operands renamed."""
    match step:
        case Compute() | Redistribute():
            return replace(step, operands=tuple(names.get(v, v) for v in step.operands))
        case Transfer() | Accumulate():
            return replace(step, operand=names.get(step.operand, step.operand))
        case Norm():
            renamed = tuple((s, names.get(v, v), p) for s, v, p in step.operands)
            return replace(step, operands=renamed)
        case Update():
            return replace(step, gradient=names.get(step.gradient, step.gradient))
        case _:
            assert_never(step)


def renamed(
    step: Compute | Redistribute, operands: Mapping[str, str], results: Mapping[str, str]
) -> Compute | Redistribute:
    """The step with other operands and results; a result that has no other name is not made."""
    read = tuple(operands.get(v, v) for v in step.operands)
    match step:
        case Compute():
            return replace(
                step, operands=read, results=tuple(results.get(v or "") for v in step.results)
            )
        case Redistribute():
            return replace(step, operands=read, results=tuple(results[v] for v in step.results))


def stages_of(step: Step) -> tuple[int, ...]:
    """The stages that a step concerns: of a transfer both, of a norm all that count something."""
    match step:
        case Transfer():
            return (step.stage, step.to_stage)
        case Redistribute() if step.tied:
            return step.tied
        case Norm():
            return tuple(dict.fromkeys(stage for stage, _, _ in step.operands))
        case Compute() | Redistribute() | Accumulate() | Update():
            return (step.stage,)


def in_microbatch(step: Step) -> bool:
    """Whether the step belongs to a forward or a backward, not to the end of the step."""
    return step.phase != "optimizer"


def viewed_operand(step: Step) -> str | None:
    """The operand whose storage the results of the step share, None where they have their own."""
    match step:
        case Compute() if step.is_view and step.operands:
            return step.operands[0]
        case Redistribute() if step.kind == "relabel":
            return step.operands[0]
        case _:
            return None


_MAYBE_OPERAND = frozenset(
    f"aten.{op}"
    for op in (
        *("_conj", "_to_copy", "alias", "conj", "contiguous", "detach", "dropout", "lift_fresh"),
        *("positive", "real", "resolve_conj", "resolve_neg", "to", "type_as"),
    )
)
"""Ops that return their operand where it is already what is asked for."""


def roots(value: str, producers: Mapping[str, Step]) -> set[str]:
    """The inputs, and the results of messages, whose storage a value may share; or itself."""
    found: set[str] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        step = producers.get(value)
        operands = () if step is None else may_share(step)
        found |= set() if operands else {value}
        todo += operands
    return found


def may_share(step: Step) -> tuple[str, ...]:
    """The operands whose storage the results of the step may share."""
    match step:
        case Compute():
            call = step.op.call
            own = call.name.startswith("aten.") and step.rule.kind == "compute"
            maybe = call.name.rpartition(".")[0] in _MAYBE_OPERAND
            return () if own and not maybe else step.operands
        case Redistribute():
            return step.operands if step.is_free else ()
        case Transfer() | Accumulate():
            return (step.operand,)
        case Norm() | Update():
            return ()
        case _:
            assert_never(step)
