"""The steps of a plan: a closed sum, taken apart by ``match``.

    Compute                  a local op
    Redistribute             values go from one spec to another, alone or several as one message
    Transfer                 a value goes to another stage
    Accumulate               a sum over microbatches
    Norm, Update             the end of a training step

Values are named; a step reads results of earlier steps, or inputs. Every step has a ``phase``, a
``stage`` and says whether it runs ``once`` a training step instead of once a microbatch; those of
the phase "optimizer" run after the last microbatch. Questions that many steps share are methods, so
that callers need not match on the class:

    step.reads, step.gives          # ("x", "w"), ("h",): names of values
    step.reads_as()                 # (stage, name, spec) of each; gives_as() likewise
    step.stages, step.is_on(1)      # where it runs
    step.op, step.moves             # its op, and its moves of values; None, or ()
    step.sends, step.label          # whether it communicates, and the label of its messages
    step.labels                     # its modules and parameters

The cost of a step, and its bytes sent, are in cost/.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import ClassVar, Literal, TypeVar

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


class _Step:
    """The questions that a step of any kind answers, with the answers of most kinds."""

    __slots__ = ()
    phase: StepPhase
    stage: int
    once: bool

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        """(stage, value, the spec that it is read under) of each operand."""
        raise NotImplementedError

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        """The same of each result."""
        yield from ()

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for _, name, _ in self.reads_as())

    @property
    def gives(self) -> tuple[str, ...]:
        return tuple(name for _, name, _ in self.gives_as())

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that take part: both for a transfer, for a norm all that count something."""
        return (self.stage,)

    def is_on(self, stage: int) -> bool:
        """Whether ranks of the stage have a part in the step."""
        return stage in self.stages

    @property
    def in_microbatch(self) -> bool:
        """Whether the step belongs to a forward or a backward, not to the end of the step."""
        return self.phase != "optimizer"

    @property
    def sends(self) -> bool:
        return False

    @property
    def may_be_late(self) -> bool:
        """Whether ranks may continue before its messages arrive."""
        return False

    @property
    def reduces_gradients(self) -> bool:
        """Whether it is a reduction of gradients at the end of a training step."""
        return False

    @property
    def sums_microbatches(self) -> bool:
        """Whether it exists only with several microbatches."""
        return False

    @property
    def label(self) -> str:
        """The label of its messages."""
        return ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of its modules or parameters."""
        return ()

    @property
    def viewed(self) -> str | None:
        """The operand whose storage the results share, None where they have their own."""
        return None

    @property
    def may_share(self) -> tuple[str, ...]:
        """The operands whose storage the results may share."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compute(_Step):
    """One local op on every rank of its stage; ``strategies``: (axis, the strategy chosen
    there)."""

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
    flops: int  # of the fullest rank
    moves: ClassVar[tuple[Move, ...]] = ()

    def __repr__(self) -> str:
        call = f"{self.op.call.name}({', '.join(self.operands)})"
        return f"<compute {', '.join(self.gives)} = {call}, {self.phase}, stage {self.stage}>"

    @property
    def source(self) -> str:
        """The user's line."""
        return self.op.source

    @property
    def is_view(self) -> bool:
        return self.rule.kind == "view"

    @property
    def reads(self) -> tuple[str, ...]:
        return self.operands

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        for name, spec in zip(self.operands, self.operand_specs, strict=True):
            yield self.stage, name, spec

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        for name, spec in zip(self.results, self.result_specs, strict=True):
            if name is not None and spec is not None:
                yield self.stage, name, spec

    def reading(self, names: Mapping[str, str]) -> Compute:
        """The step with renamed operands."""
        return replace(self, operands=_renamed(self.operands, names))

    def giving(self, names: Mapping[str, str]) -> Compute:
        """The step with renamed results; one without a new name is not made."""
        return replace(self, results=tuple(names.get(v or "") for v in self.results))

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.op.module,)

    @property
    def viewed(self) -> str | None:
        return self.operands[0] if self.is_view and self.operands else None

    @property
    def may_share(self) -> tuple[str, ...]:
        call = self.op.call
        of_torch = call.name.startswith("aten.") and self.rule.kind == "compute"
        return (
            () if of_torch and call.name.rpartition(".")[0] not in _MAYBE_OPERAND else self.operands
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute(_Step):
    """Values go from one spec to another: a move of each, all of one kind on one axis.

    A value that an op or an output needs under another spec is moved alone; ``why`` names the
    reason. Several values share one message, the ``bucket`` of that name; ``of`` has their labels:
    all_reduce and reduce_scatter of gradients; with parameters stored split, reduce_scatter in the
    backward and all_gather of the parameters of a layer, both of them once a microbatch. A gather
    starts at the step's place and is waited for at the first use. Without ``results`` it gathers
    updated parameters: the operands are inputs of the plan, of which each rank has its slice, and
    the whole values are written there.

    Gradients of one parameter (``of``) that several stages use are ``tied``: one of each of these
    stages, summed over them. Their moves' specs have the axis of stages (`over_stages`).

    ``source``: the user's lines: the line of the op that left a sum pending or needs the value, and
    those with which the pins of gathered parameters do not line up.
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
    op: ClassVar[None] = None

    @property
    def kind(self) -> MoveKind:
        return self.moves[0].kind

    @property
    def axis(self) -> str:
        return self.moves[0].axis

    @property
    def name(self) -> str:
        """The name of the message, or of the one result."""
        return self.bucket or self.results[0]

    @property
    def may_be_late(self) -> bool:
        return not (self.is_free or self.tied or (self.bucket and self.kind == "all_gather"))

    @property
    def reduces_gradients(self) -> bool:
        return bool(self.bucket) and self.phase == "optimizer" and not self.in_place

    @property
    def label(self) -> str:
        return f"the gradients of {self.of[0]}" if self.tied else self.bucket or self.operands[0]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.of

    @property
    def noun(self) -> str:
        """The kind of value that a bucket has for each of its labels."""
        return "parameter" if self.kind == "all_gather" else "gradient"

    @property
    def is_alone(self) -> bool:
        """Whether one value is moved alone, because an op or an output needs it under another
        spec."""
        return not self.bucket and not self.tied

    @property
    def is_free(self) -> bool:
        return self.kind in FREE_KINDS

    @property
    def sends(self) -> bool:
        return not self.is_free

    @property
    def in_place(self) -> bool:
        return not self.results

    @property
    def stages(self) -> tuple[int, ...]:
        return self.tied or (self.stage,)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.operands

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        for at, (name, move) in enumerate(zip(self.operands, self.moves, strict=True)):
            if self.tied:
                yield self.tied[at], name, _on_one_stage(move)
            else:
                yield self.stage, name, move.dst if self.in_place else move.src

    @property
    def gives(self) -> tuple[str, ...]:
        return self.results

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        for at, (name, move) in enumerate(zip(self.results, self.moves)):
            if self.tied:
                yield self.tied[at], name, _on_one_stage(move)
            else:
                yield self.stage, name, move.dst

    def reading(self, names: Mapping[str, str]) -> Redistribute:
        return replace(self, operands=_renamed(self.operands, names))

    def giving(self, names: Mapping[str, str]) -> Redistribute:
        return replace(self, results=tuple(names[v] for v in self.results))

    @property
    def viewed(self) -> str | None:
        return self.operands[0] if self.kind == "relabel" else None

    @property
    def may_share(self) -> tuple[str, ...]:
        return self.operands if self.is_free else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(_Step):
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
    op: ClassVar[None] = None
    moves: ClassVar[tuple[Move, ...]] = ()

    @property
    def sends(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return self.operand

    @property
    def stages(self) -> tuple[int, ...]:
        return (self.stage, self.to_stage)

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        yield self.stage, self.operand, self.spec

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        yield self.to_stage, self.result, self.spec

    def reading(self, names: Mapping[str, str]) -> Transfer:
        return replace(self, operand=names.get(self.operand, self.operand))

    @property
    def may_share(self) -> tuple[str, ...]:
        return (self.operand,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(_Step):
    """The sum over microbatches: a reduction over the axis ``mb``, in time."""

    result: str
    operand: str
    src: TensorSpec
    dst: TensorSpec
    stage: int
    of: str
    phase: StepPhase = "optimizer"
    once: bool = False
    source: ClassVar[str] = ""
    op: ClassVar[None] = None
    moves: ClassVar[tuple[Move, ...]] = ()

    @property
    def sums_microbatches(self) -> bool:
        return True

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.of,)

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        yield self.stage, self.operand, self.src

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        yield self.stage, self.result, self.dst

    def reading(self, names: Mapping[str, str]) -> Accumulate:
        return replace(self, operand=names.get(self.operand, self.operand))

    @property
    def may_share(self) -> tuple[str, ...]:
        return (self.operand,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(_Step):
    """The global norm of all gradients, over all axes and stages; gradients are scaled by it.
    ``max_norm``: inf where they are not clipped. ``scaled``: they come times the loss's scale, by
    which they are divided, and one that is not finite fails the step."""

    result: str
    operands: tuple[tuple[int, str, str], ...]  # (stage that counts it, value, parameter)
    specs: tuple[TensorSpec, ...]
    max_norm: float
    scaled: bool = False
    phase: StepPhase = "optimizer"
    once: bool = False
    stage: int = 0
    source: ClassVar[str] = ""
    op: ClassVar[None] = None
    moves: ClassVar[tuple[Move, ...]] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum of squares: float32, or float64 if a gradient is."""
        wide = (accumulation_dtype(spec.dtype) for spec in self.specs)
        return reduce(torch.promote_types, wide, torch.float32)

    @property
    def sends(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return "the norm and the votes"

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(stage for stage, _, _ in self.operands))

    def is_on(self, stage: int) -> bool:
        return True

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        for (stage, name, _), spec in zip(self.operands, self.specs, strict=True):
            yield stage, name, spec

    def reading(self, names: Mapping[str, str]) -> Norm:
        return replace(self, operands=tuple((s, names.get(v, v), p) for s, v, p in self.operands))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(_Step):
    """The optimizer's step on one parameter's shard, on every stage that holds it."""

    parameter: str  # label
    gradient: str
    spec: TensorSpec
    stage: int
    optimizer: str
    state_bytes: int  # per rank
    master_bytes: int = 0  # of the float32 copy that is updated instead, per rank
    phase: StepPhase = "optimizer"
    once: bool = False
    source: ClassVar[str] = ""
    op: ClassVar[None] = None
    moves: ClassVar[tuple[Move, ...]] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.parameter,)

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        yield self.stage, self.gradient, self.spec

    def reading(self, names: Mapping[str, str]) -> Update:
        return replace(self, gradient=names.get(self.gradient, self.gradient))


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


def _on_one_stage(move: Move) -> TensorSpec:
    """The spec on each stage of a value that `over_stages` sums."""
    spec = move.dst
    return replace(spec, mesh=spec.mesh.without(move.axis), placements=spec.placements[:-1])


def updates_of(steps: Iterable[Step], stages: Collection[int] | None = None) -> tuple[Update, ...]:
    """The updates among the steps, on these stages."""
    updates = (step for step in steps if isinstance(step, Update))
    return tuple(step for step in updates if stages is None or step.stage in stages)


def norm_of(steps: Iterable[Step]) -> Norm | None:
    """The norm among the steps, where gradients are clipped."""
    return next((step for step in steps if isinstance(step, Norm)), None)


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


def _renamed(names: tuple[str, ...], new: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(new.get(name, name) for name in names)


_MAYBE_OPERAND = frozenset(
    f"aten.{op}"
    for op in (
        *("_conj", "_to_copy", "alias", "conj", "contiguous", "detach", "dropout", "lift_fresh"),
        *("positive", "real", "resolve_conj", "resolve_neg", "to", "type_as"),
    )
)
"""Ops that return their operand if it has the requested form already."""


def roots(value: str, producers: Mapping[str, Step]) -> set[str]:
    """The inputs, and the results of messages, whose storage a value may share; or the value
    itself."""
    storages: set[str] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        step = producers.get(value)
        operands = () if step is None else step.may_share
        storages |= set() if operands else {value}
        todo += operands
    return storages
