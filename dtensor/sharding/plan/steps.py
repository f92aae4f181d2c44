"""The steps of a plan: a closed union of six classes.

    Compute                  a local op
    Redistribute             changes the specs of one value, or of several values in one message
    Transfer                 sends a value to another stage
    Accumulate               sums a value over microbatches
    Norm, Update             the end of a training step

A step reads values by name: inputs of the plan, or results of earlier steps. A step of the phase
"optimizer" runs after the last microbatch. Other steps run in each microbatch, or once per training
step if ``once``. The properties of `_Step` answer questions about any kind of step.
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
MAX_REDUCTIONS = 2
"""The most reductions of gradients that a rank has in flight during a backward. They hold their
operands and results."""
T = TypeVar("T")


class _Step:
    """The properties that every kind of step has, with the defaults of most kinds."""

    __slots__ = ()
    phase: StepPhase
    stage: int
    once: bool

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        """Yield (stage, value, spec) of each operand: the spec that the step reads it with."""
        raise NotImplementedError

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        """Yield (stage, value, spec) of each result."""
        yield from ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(name for _, name, _ in self.reads_as())

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of the results."""
        return tuple(name for _, name, _ in self.gives_as())

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that take part: sender and receiver of a transfer; for a norm, all stages
        whose gradients are counted."""
        return (self.stage,)

    def is_on(self, stage: int) -> bool:
        """Return whether ranks of the stage take part in the step."""
        return stage in self.stages

    @property
    def in_microbatch(self) -> bool:
        """Whether the step belongs to a forward or a backward, not to the end of the step."""
        return self.phase != "optimizer"

    @property
    def sends(self) -> bool:
        """Whether the step communicates."""
        return False

    @property
    def may_be_late(self) -> bool:
        """Whether ranks may continue before the messages of the step arrive."""
        return False

    @property
    def reduces_gradients(self) -> bool:
        """Whether the step reduces gradients at the end of a training step, or gathers them."""
        return False

    @property
    def sums_microbatches(self) -> bool:
        """Whether the step is a sum over microbatches."""
        return False

    @property
    def label(self) -> str:
        """The label of the step's messages."""
        return ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the modules or parameters that the step belongs to."""
        return ()

    @property
    def viewed(self) -> str | None:
        """The operand whose storage the results share; None if the results have new storage."""
        return None

    @property
    def may_share(self) -> tuple[str, ...]:
        """The operands whose storage the results may share."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compute(_Step):
    """One local op on every rank of its stage. ``strategies``: (axis, strategy of the op)."""

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
    flops: int  # on the rank with the largest shards
    moves: ClassVar[tuple[Move, ...]] = ()

    def __repr__(self) -> str:
        call = f"{self.op.call.name}({', '.join(self.operands)})"
        return f"<compute {', '.join(self.gives)} = {call}, {self.phase}, stage {self.stage}>"

    @property
    def source(self) -> str:
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
        """Return the step with renamed operands."""
        return replace(self, operands=_rename(self.operands, names))

    def giving(self, names: Mapping[str, str]) -> Compute:
        """Return the step with renamed results. A result without a new name becomes None."""
        return replace(self, results=tuple(names.get(v or "") for v in self.results))

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.op.module,)

    @property
    def viewed(self) -> str | None:
        return self.operands[0] if self.is_view and self.operands else None

    @property
    def may_share(self) -> tuple[str, ...]:
        # Most of torch's computing ops return new storage; views and dtensor's ops may not.
        call = self.op.call
        is_torch_op = call.name.startswith("aten.") and self.rule.kind == "compute"
        return (
            ()
            if is_torch_op and call.name.rpartition(".")[0] not in _MAY_RETURN_OPERAND
            else self.operands
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute(_Step):
    """Changes the specs of values: one move for each, all of the same kind and on the same axis.

    There are six forms:

    - One value, which an op or an output needs under another spec; ``why`` gives the reason.
    - A ``bucket``: one message for several values, whose labels are ``of``. It reduces gradients,
      gathers gradients that were scattered to be reduced, or gathers the parameters of a layer that
      are stored split. A gather starts where the step stands; ranks wait for it at the first use.
    - A bucket without ``results`` gathers updated parameters in place. Its operands are inputs of
      the plan: each rank has updated its slice, and the gathered values are written to the inputs.
      ``into`` are the specs of the inputs if the moves gather only a part of each value.
    - ``tied``: sums the gradients of one parameter over the stages that use it, one operand from
      each. The specs of the moves have the stage axis too (`over_stages`).
    - A shift: sends the shards of one or more values, such as keys and values of attention, to the
      next rank in one message. Their dtypes may differ.
    - With ``counts``: exchanges rows between tokens and experts. ``counts`` is the value with the
      numbers of rows by expert of all ranks, from which each rank knows all sizes.

    ``source``: the user's line of the op that left a sum pending or that needs the value; for a
    gather, the lines with which the pins of the parameters do not line up.
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
    counts: str = ""
    counts_spec: TensorSpec | None = None
    into: tuple[TensorSpec, ...] = ()
    op: ClassVar[None] = None

    @property
    def kind(self) -> MoveKind:
        return self.moves[0].kind

    @property
    def axis(self) -> str:
        return self.moves[0].axis

    @property
    def name(self) -> str:
        """The name of the bucket, or of the first result."""
        return self.bucket or self.results[0]

    @property
    def may_be_late(self) -> bool:
        return not (self.is_free or self.tied or (self.bucket and self.kind == "all_gather"))

    @property
    def reduces_gradients(self) -> bool:
        return bool(self.bucket) and self.phase == "optimizer" and not self.in_place

    @property
    def label(self) -> str:
        if self.tied:
            return f"the gradients of {self.of[0]}"
        return self.bucket or ", ".join(self.operands)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.of

    @property
    def noun(self) -> str:
        """The word for a value of the bucket: "parameter", "updated parameter" or "gradient"."""
        is_updated = self.in_place or self.bucket.startswith("updated")
        parameter = "updated parameter" if is_updated else "parameter"
        return "gradient" if self.bucket.startswith("gradients") else parameter

    @property
    def is_alone(self) -> bool:
        """Whether the step moves a value that an op or an output needs under another spec, or in a
        shift several values."""
        return not self.bucket and not self.tied

    @property
    def is_free(self) -> bool:
        """Whether the moves need no communication."""
        return self.kind in FREE_KINDS

    @property
    def is_for_owner(self) -> bool:
        """Whether the step cuts a parameter or its gradient for its owner, without a message."""
        return self.is_free and bool(self.of)

    @property
    def sends(self) -> bool:
        return not self.is_free

    @property
    def in_place(self) -> bool:
        """Whether the step gathers updated parameters into inputs of the plan."""
        return not self.results

    @property
    def stages(self) -> tuple[int, ...]:
        return self.tied or (self.stage,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.operands, self.counts) if self.counts else self.operands

    @property
    def written_specs(self) -> tuple[TensorSpec, ...]:
        """The specs of the inputs that a gather in place writes."""
        return self.into or tuple(move.dst for move in self.moves)

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        """Yield (stage, name, spec) of each operand as it is read. A gather in place reads the full
        parameters, whose slices it completes."""
        for at, (name, move) in enumerate(zip(self.operands, self.moves, strict=True)):
            if self.tied:
                yield self.tied[at], name, _on_one_stage(move)
            else:
                yield self.stage, name, self.written_specs[at] if self.in_place else move.src
        if self.counts_spec is not None:
            yield self.stage, self.counts, self.counts_spec

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
        counts = names.get(self.counts, self.counts)
        return replace(self, operands=_rename(self.operands, names), counts=counts)

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
    """Sends a value to another stage, shard by shard. It has the same ``spec`` on both stages."""

    result: str
    operand: str
    spec: TensorSpec
    stage: int  # of the sender
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
    """Sums a value over microbatches: a reduction over the virtual axis ``mb``."""

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
    """Computes the norm of all gradients over all axes and stages, to clip the gradients.
    ``max_norm``: inf if gradients are not clipped. ``scaled``: the gradients contain the loss
    scale; they are divided by it, and a gradient that is not finite makes the step fail."""

    result: str
    operands: tuple[tuple[int, str, str], ...]  # (the one stage that counts it, value, parameter)
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
        """The dtype of the sum of squares: float64 if a gradient is float64, else float32."""
        dtypes = (accumulation_dtype(spec.dtype) for spec in self.specs)
        return reduce(torch.promote_types, dtypes, torch.float32)

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
    """The optimizer's step on one parameter on one stage: on the shards of all ranks, or on the
    whole parameter on its owner.

    The owner has these fields besides. ``owner``: (axis, coordinate) of the rank; () if each rank
    updates a parameter that cannot be cut. ``value``: the whole parameter; ``result``: its new
    value; ``written``: the new value as ranks write it into the parameter. ``is_fullest``: whether
    the owner is the rank of the stage whose updates cost most.
    """

    parameter: str  # label
    gradient: str
    spec: TensorSpec
    stage: int
    optimizer: str
    number: int = 0  # the index of the optimizer
    state_bytes: int  # per rank
    master_bytes: int = 0  # per rank, of the float32 master copy; 0 without master weights
    owner: tuple[tuple[str, int], ...] | None = None
    value: str = ""
    result: str = ""
    written: str = ""
    is_fullest: bool = True
    flops: int = 0
    host_reads: str = ""  # why it reads values of a GPU on the host
    phase: StepPhase = "optimizer"
    once: bool = False
    source: ClassVar[str] = ""
    op: ClassVar[None] = None
    moves: ClassVar[tuple[Move, ...]] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.parameter,)

    @property
    def new_bytes(self) -> int:
        """The bytes of the owner's new value and new state, until the step commits."""
        return 0 if self.owner is None else self.spec.nbytes + self.state_bytes + self.master_bytes

    def is_on_rank(self, coordinates: Mapping[str, int]) -> bool:
        """Return whether the rank of the stage at these coordinates makes the update."""
        return all(coordinates[axis] == at for axis, at in self.owner or ())

    def reads_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        yield self.stage, self.gradient, self.spec
        if self.value:
            yield self.stage, self.value, self.spec

    def gives_as(self) -> Iterator[tuple[int, str, TensorSpec]]:
        if self.result:
            yield self.stage, self.result, self.spec

    def reading(self, names: Mapping[str, str]) -> Update:
        gradient, value = (names.get(name, name) for name in (self.gradient, self.value))
        return replace(self, gradient=gradient, value=value)


Step = Compute | Redistribute | Transfer | Accumulate | Norm | Update


def over_stages(spec: TensorSpec, axis: str, num: int) -> Move:
    """Return the move that sums ``num`` values with this spec over stages: an all_reduce on a mesh
    to which the stage axis ``axis`` is added, because ``spec`` is stated without it."""
    mesh = spec.mesh.extended(axis, num)
    src, dst = (
        replace(spec, mesh=mesh, placements=(*spec.placements, on_axis))
        for on_axis in (Partial("sum"), REPLICATE)
    )
    return Move("all_reduce", axis, src, dst)


def _on_one_stage(move: Move) -> TensorSpec:
    """Return the spec of the value on each stage, without the axis that `over_stages` added."""
    spec = move.dst
    return replace(spec, mesh=spec.mesh.without(move.axis), placements=spec.placements[:-1])


def updates_of(steps: Iterable[Step], stages: Collection[int] | None = None) -> tuple[Update, ...]:
    """Return the updates among the steps, on ``stages`` only unless that is None."""
    updates = (step for step in steps if isinstance(step, Update))
    return tuple(step for step in updates if stages is None or step.stage in stages)


def updates_whole(steps: Iterable[Step]) -> bool:
    """Return whether an owner updates a whole parameter."""
    return any(step.owner is not None for step in updates_of(steps))


def on_fullest_rank(updates: Iterable[Update]) -> list[Update]:
    """Return the updates that the fullest rank of their stage makes."""
    return [step for step in updates if step.is_fullest]


def at_the_commit(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Divide the steps at the end of a training step. Return the steps before the commit, and the
    steps after it, which move new values from the owners of parameters."""
    before: list[Step] = []
    after: list[Step] = []
    updated = False
    for step in steps:
        updated = updated or isinstance(step, Update)
        moves_back = updated and isinstance(step, Redistribute) and not step.in_place
        (after if moves_back else before).append(step)
    return before, after


def norm_of(steps: Iterable[Step]) -> Norm | None:
    """Return the Norm among the steps, or None if the plan has none."""
    return next((step for step in steps if isinstance(step, Norm)), None)


def fill_buckets(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Put the items in order into buckets of at most BUCKET_BYTES, larger items alone."""
    buckets: list[list[T]] = []
    size = 0
    for item, nbytes in zip(items, sizes, strict=True):
        if not buckets or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += nbytes
    return buckets


def unused(name: str, used_names: set[str]) -> str:
    """Return ``name``, or the first of `name_2`, `name_3`, ... that is not in ``used_names``. Adds
    the returned name to ``used_names``."""
    candidate, number = name, 1
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    used_names.add(candidate)
    return candidate


def _rename(names: tuple[str, ...], new_names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names, with the new name of each name that has one."""
    return tuple(new_names.get(name, name) for name in names)


_MAY_RETURN_OPERAND = frozenset(
    f"aten.{op}"
    for op in (
        *("_conj", "_to_copy", "alias", "conj", "contiguous", "detach", "dropout", "lift_fresh"),
        *("positive", "real", "resolve_conj", "resolve_neg", "to", "type_as"),
    )
)
"""Ops that return their operand itself if it already has the requested form."""


def roots(value: str, producers: Mapping[str, Step]) -> set[str]:
    """Return the values whose storage ``value`` may share: inputs, and results with new storage;
    {``value``} if it has its own storage."""
    root_values: set[str] = set()
    pending, seen = [value], {value}
    while pending:
        value = pending.pop()
        step = producers.get(value)
        operands = set[str]() if step is None else set(step.may_share)
        root_values |= set() if operands else {value}
        pending += operands - seen
        seen |= operands
    return root_values
