"""The instructions of a program, which a rank runs one at a time.

`Send`, `Recv` and `Collective` *start* and never block; `Wait` completes. Example, rank 0 of a
program that adds one number over two ranks (`str` gives the same text that `text.py` parses):

    a = call f(x)
    s = all_reduce.sum(a) over (0, 1) on "grads": f32[1] => f32[1]
    wait s
    free a

A run is undone as a whole, or not at all: each rank votes whether any of its calls has failed, and
the votes are summed over all ranks before the first of them writes to its state:

    ok = vote
    all = all_reduce.sum(ok) over (0, 1) on "tp": f32[] => f32[]
    wait all
    commit all                 # not 0: from here on no rank makes a call, so none writes

Each has the values that it reads (``inputs``), makes (``outputs``) and changes in place
(``writes``), and a copy with other names of values and ranks (``renamed``).

Invariants: instructions are frozen values; a started operation has one buffer for each value that
it reads or makes. Checks that need the whole program are in `verification/verifier.py`.
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

    A `variable` one is flat, and only its sender knows its length: `u8[*]`. The length is sent
    first. Collectives have none.
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
        """0 for a variable one: unknown before it runs."""
        if self.variable:
            return 0
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = "*" if self.variable else ",".join(map(str, self.shape))
        return f"{DTYPE_NAMES[self.dtype]}[{sizes}]"

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of this shape and dtype."""
        fits = tensor.dim() == 1 if self.variable else tensor.shape == self.shape
        return fits and tensor.dtype == self.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Buffer:
        """The buffer of a tensor."""
        return Buffer(tuple(tensor.shape), tensor.dtype)


WORD = Buffer((), torch.float32)
"""The buffer of a vote: like a norm's sum of squares, so that one collective takes both."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run function `fn` of the program on values; `writes` are the inputs it changes in place."""

    fn: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...] = ()
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Call:
        inputs, outputs = _all(self.inputs, names), _all(self.outputs, names)
        return replace(self, inputs=inputs, outputs=outputs, writes=_all(self.writes, names))


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending `value` to a rank. The k-th on a channel meets the k-th `Recv` there."""

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

    A `lent` value need not have its own memory: calls read it, and keep no view of it, between its
    wait and its free, and the rank starts no other message with its key before that.
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
    """Start a collective of `group`, whose order is the order of reduction (a left fold).

    - all_reduce: n inputs, n outputs of the same shapes on all ranks (n > 1: a bucket).
    - all_gather: 1 input (its shape may differ by rank), one output per member, in group order.
    - reduce_scatter: one input per member, 1 output: the fold of all members' inputs for this rank.
    - all_to_all: one input for each member, one output from each.
    - broadcast: 1 input on `group[0]` and none elsewhere, 1 output everywhere.

    A sum of floats narrower than 32 bits may have a result in float32, in which it is accumulated;
    one of float32 may have a rounded narrower result.
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
        """The properties of its kind."""
        return COLLECTIVES[self.kind]

    def __post_init__(self) -> None:
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
        inputs, outputs = _all(self.inputs, names), _all(self.outputs, names)
        group = tuple(ranks[rank] for rank in self.group)
        return replace(self, group=group, inputs=inputs, outputs=outputs)


@dataclass(frozen=True, slots=True)
class Wait:
    """Complete the starts that produce (`Recv`, `Collective`) or read (`Send`) these values.

    One output of a collective represents all of it. A value whose start is complete may be waited
    for again, at no cost.
    """

    values: tuple[str, ...]
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Wait:
        return replace(self, values=_all(self.values, names))


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
        return replace(self, values=_all(self.values, names))


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
    """The commit point of a rank: `value` is the sum of all votes. If it is not 0, or the rank has
    failed itself, the rank makes none of its later calls."""

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
"""The key of an order of starts: (ranks, channel, kind); the ranks of a transfer are (from, to).
The k-th start of a rank with a key meets the k-th start of each other rank of it."""


def key_of(rank: int, start: Start) -> Key:
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
    """The values by which a `Wait` names the start."""
    return (start.value,) if isinstance(start, Send) else start.outputs


def _all(values: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(value, value) for value in values)
