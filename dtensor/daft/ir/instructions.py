"""The instructions of a program. A rank runs its list one instruction at a time.

    a = call f(x)
    s = all_reduce.sum(a) over (0, 1) on "grads": f32[1] => f32[1]
    wait s
    ok = vote                  # the number of failed ranks, summed before any rank writes state
    all = all_reduce.sum(ok) over (0, 1) on "tp": f32[] => f32[]
    wait all
    commit all                 # if not 0, no rank runs its later calls, so none writes state

`Send`, `Recv` and `Collective` start an operation and never block; `Wait` completes it. All
instructions are frozen, and have ``inputs``, ``outputs`` and ``writes`` (values changed in place).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Literal, TypeAlias, assert_never

import torch

from dtensor.collectives import COLLECTIVES, CollectiveKind
from dtensor.daft.ir.label import Label
from dtensor.numerics import DTYPE_NAMES, DTYPES, REDUCTIONS, ReduceOp

Kind: TypeAlias = str
"""A name in `COLLECTIVES`."""
Op: TypeAlias = ReduceOp


@dataclass(frozen=True, slots=True)
class Buffer:
    """The shape and dtype of a tensor that is sent or received; prints as `f32[2,3]`.

    `variable`: a flat buffer whose length only the sender knows, `u8[*]`. The length is sent
    first. Collectives do not use such buffers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    variable: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.variable and self.shape:
            raise ValueError(f"A variable buffer has no shape before it runs, got {self.shape}.")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"A buffer's sizes are 0 or more, got {self.shape}.")
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"A buffer of {self.dtype} cannot be sent; known: {list(DTYPES)}.")

    @property
    def nbytes(self) -> int:
        """The size in bytes, or 0 if variable (it is unknown before the run)."""
        if self.variable:
            return 0
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = "*" if self.variable else ",".join(map(str, self.shape))
        return f"{DTYPE_NAMES[self.dtype]}[{sizes}]"

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has this shape and dtype."""
        fits = tensor.dim() == 1 if self.variable else tensor.shape == self.shape
        return fits and tensor.dtype == self.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Buffer:
        """Return the buffer with the shape and dtype of a tensor."""
        return Buffer(tuple(tensor.shape), tensor.dtype)


WORD = Buffer((), torch.float32)
"""The buffer of a vote. It equals the buffer of a gradient norm, so one collective can sum both."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call the program's function `fn`. `writes`: the inputs that it changes in place."""

    fn: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...] = ()
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Call:
        inputs, outputs = _rename_all(self.inputs, names), _rename_all(self.outputs, names)
        return replace(self, inputs=inputs, outputs=outputs, writes=_rename_all(self.writes, names))


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending `value` to rank `to`. The k-th `Send` on a channel matches the k-th `Recv` of
    that rank on it."""

    value: str
    to: int
    channel: str
    buffer: Buffer
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    outputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.value,)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Send:
        return replace(self, value=names.get(self.value, self.value), to=ranks[self.to])


@dataclass(frozen=True, slots=True)
class Recv:
    """Start receiving `value` from a rank.

    `lent`: the value may be a view of the transport's memory. It is read only between its wait and
    its free, no call keeps a view of it, and until then the rank starts no message with its key.
    """

    value: str
    source_rank: int
    channel: str
    buffer: Buffer
    lent: bool = field(default=False, kw_only=True)
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    inputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.value,)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Recv:
        value = names.get(self.value, self.value)
        return replace(self, value=value, source_rank=ranks[self.source_rank])


@dataclass(frozen=True, slots=True)
class Collective:
    """Start a collective of the ranks in `group`. Reductions are left folds in the group's order.

    - all_reduce: n inputs, n outputs of the same shapes on all ranks (n > 1: a bucket).
    - all_gather: 1 input (its shape may differ by rank), one output per member, in group order.
    - reduce_scatter: one input per member, 1 output: the fold of all members' inputs for this rank.
    - all_to_all: one input for each member, one output from each.
    - broadcast: 1 input on `group[0]` and none elsewhere, 1 output everywhere.

    The sum of 16-bit floats is accumulated in float32 and may be returned so; the sum of float32
    values may be returned rounded to a narrower dtype.
    """

    kind: Kind
    group: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_buffers: tuple[Buffer, ...]
    out_buffers: tuple[Buffer, ...]
    op: Op | None
    channel: str
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def does(self) -> CollectiveKind:
        """The properties of the collective's kind."""
        return COLLECTIVES[self.kind]

    def __post_init__(self) -> None:
        """Raise ValueError if kind, op, values and buffers do not fit together."""
        if self.kind not in COLLECTIVES:
            kinds = tuple(COLLECTIVES)
            raise ValueError(f"A collective's kind is one of {kinds}, got {self.kind!r}.")
        reduces = self.does.reduces
        reduction = REDUCTIONS.get(self.op or "")
        if reduces != (self.op is not None) or reduces != (reduction is not None):
            wanted = f"needs an op of {tuple(REDUCTIONS)}" if reduces else "takes no op"
            raise ValueError(f"{self.kind} {wanted}, got {self.op!r}.")
        for buffer in (*self.in_buffers, *self.out_buffers):
            if reduction is not None and not reduction.takes(buffer.shape, buffer.dtype):
                raise ValueError(
                    f"{self.kind}.{self.op} needs buffers {reduction.wants}, got {buffer}."
                )
        if len(self.inputs) != len(self.in_buffers) or len(self.outputs) != len(self.out_buffers):
            raise ValueError(
                f"{self.kind} needs one buffer per value, got {len(self.inputs)} inputs with "
                f"{len(self.in_buffers)} buffers and {len(self.outputs)} outputs with "
                f"{len(self.out_buffers)}."
            )
        if any(buffer.variable for buffer in (*self.in_buffers, *self.out_buffers)):
            raise ValueError(
                f"The members of {self.kind} must know its sizes before it runs, got "
                f"{', '.join(map(str, (*self.in_buffers, *self.out_buffers)))}."
            )

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Collective:
        inputs, outputs = _rename_all(self.inputs, names), _rename_all(self.outputs, names)
        group = tuple(ranks[rank] for rank in self.group)
        return replace(self, group=group, inputs=inputs, outputs=outputs)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the starts of these values are complete: the `Recv` or `Collective` that makes a
    value, or the `Send` that reads it.

    One output stands for the whole collective. Waiting again for a completed start does nothing.
    """

    values: tuple[str, ...]
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Wait:
        return replace(self, values=_rename_all(self.values, names))


@dataclass(frozen=True, slots=True)
class Free:
    """Drop values from the rank's table."""

    values: tuple[str, ...]
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Free:
        return replace(self, values=_rename_all(self.values, names))


@dataclass(frozen=True, slots=True)
class Vote:
    """Make `value`, a `WORD`: 1 if a call of this rank has failed in this run, else 0."""

    value: str
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    inputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.value,)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Vote:
        return replace(self, value=names.get(self.value, self.value))


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit point of a rank. `value`: the sum of all votes. If it is not 0, or the rank itself
    has failed, the rank skips its later calls."""

    value: str
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    outputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.value,)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Commit:
        return replace(self, value=names.get(self.value, self.value))


Instruction: TypeAlias = Call | Send | Recv | Collective | Wait | Free | Vote | Commit
Start: TypeAlias = Send | Recv | Collective

Key: TypeAlias = tuple[tuple[int, ...], str, Literal["transfer", "collective"]]
"""The key by which starts are matched: (ranks, channel, kind). The ranks of a transfer are (from,
to). The k-th start of a rank with a key matches the k-th start of each other rank with it."""


def key_of(rank: int, start: Start) -> Key:
    """Return the key of a start of ``rank``."""
    match start:
        case Send(to=to, channel=channel):
            return ((rank, to), channel, "transfer")
        case Recv(source_rank=source, channel=channel):
            return ((source, rank), channel, "transfer")
        case Collective(group=group, channel=channel):
            return (group, channel, "collective")
        case _:
            assert_never(start)


def awaited(start: Start) -> tuple[str, ...]:
    """Return the values by which a `Wait` refers to the start."""
    return (start.value,) if isinstance(start, Send) else start.outputs


def _rename_all(values: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(value, value) for value in values)
