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
from typing import ClassVar, Literal, TypeAlias, TypeVar, assert_never

import torch

from dtensor.collectives import COLLECTIVES, CollectiveKind
from dtensor.daft.ir.label import Label
from dtensor.numerics import DTYPE_NAMES, DTYPES, REDUCTIONS, ReduceOp

Kind: TypeAlias = str
"""A name in `COLLECTIVES`."""
Op: TypeAlias = ReduceOp
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Buffer:
    """The shape and dtype of a tensor that is sent or received; prints as `f32[2,3]`.

    `variable`: a flat buffer whose length only the sender knows, `u8[*]`. The length is sent
    first. Collectives do not use such buffers. `bounded`: dim 0 has at most `shape[0]` rows,
    `f32[<=512,64]`. Only sized collectives use such buffers (`Sizes`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    variable: bool = field(default=False, kw_only=True)
    bounded: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.bounded and (self.variable or not self.shape):
            raise ValueError(f"A bounded buffer has at least one dim, got {self.shape}.")
        if self.variable and self.shape:
            raise ValueError(f"A variable buffer has no shape before it runs, got {self.shape}.")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"A buffer's sizes are 0 or more, got {self.shape}.")
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"A buffer of {self.dtype} cannot be sent; known: {list(DTYPES)}.")

    @property
    def nbytes(self) -> int:
        """The size in bytes: at the bound if bounded, 0 if variable (unknown before the run)."""
        if self.variable:
            return 0
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = "*" if self.variable else ",".join(map(str, self.shape))
        sizes = f"<={sizes}" if self.bounded else sizes
        return f"{DTYPE_NAMES[self.dtype]}[{sizes}]"

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has this shape (at most as many rows if bounded) and dtype."""
        if self.bounded and tensor.dim() and tensor.shape[0] <= self.shape[0]:
            fits = tensor.shape[1:] == self.shape[1:]
        else:
            fits = tensor.dim() == 1 if self.variable else tensor.shape == self.shape
        return fits and tensor.dtype == self.dtype

    def with_rows(self, rows: int) -> Buffer:
        """Return the buffer of a tensor with exactly this number of rows."""
        return Buffer((rows, *self.shape[1:]), self.dtype)

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
class Sizes:
    """The lengths of the pieces of an all_to_all. All members compute them from the same counts.

    `counts`: a value i64[E] for each member: the outputs of one all_gather of the same group,
    delivered in host memory. `parts`: for each member, the positions in a vector of counts that
    belong to the member. Member i sends `sum(counts[i][p] for p in parts[j])` rows to member j.
    `returned`: the pieces travel back, so member j sends these rows to member i. `limit`: if a
    member would receive more rows than this (before `returned`), all lengths are 0.
    """

    counts: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    returned: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.parts):
            raise ValueError(
                f"Each member has one vector of counts and one part, got {len(self.counts)} "
                f"vectors and {len(self.parts)} parts."
            )
        if any(position < 0 for part in self.parts for position in part):
            raise ValueError(f"The positions of parts are 0 or more, got {self.parts}.")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"A limit of rows is 0 or more, got {self.limit}.")

    def rows_received(self, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the rows that each member receives without `limit` and `returned`."""
        totals = [sum(column) for column in zip(*counts, strict=True)]
        return tuple(sum(totals[p] for p in part) for part in self.parts)

    def exceeded(self, counts: Sequence[Sequence[int]]) -> bool:
        """Return whether a member would receive more rows than `limit`."""
        return self.limit is not None and max(self.rows_received(counts), default=0) > self.limit

    def lengths(self, counts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return ``lengths[sender][receiver]``, the rows of each piece. ``counts``: the vector of
        each member, in group order."""
        if self.exceeded(counts):
            return ((0,) * len(self.parts),) * len(self.parts)
        lengths = tuple(tuple(sum(own[p] for p in part) for part in self.parts) for own in counts)
        return tuple(zip(*lengths, strict=True)) if self.returned else lengths


@dataclass(frozen=True, slots=True)
class Collective:
    """Start a collective of the ranks in `group`. Reductions are left folds in the group's order.

    - all_reduce: n inputs, n outputs of the same shapes on all ranks (n > 1: a bucket).
    - all_gather: 1 input (its shape may differ by rank), one output per member, in group order.
    - reduce_scatter: one input per member, 1 output: the fold of all members' inputs for this rank.
    - all_to_all: one input for each member, one output from each. `sizes`: the numbers of their
      rows are data, and all buffers are bounded.
    - broadcast: 1 input on `group[0]` and none elsewhere, 1 output everywhere.
    - shift: n inputs, which go to the member `distance` places later in the group, cyclically, and
      n outputs, from the member as many places earlier. Shapes may differ by rank.

    The sum of 16-bit floats is accumulated in float32 and may be returned so; the sum of float32
    values may be returned rounded to a narrower dtype. `on_host`: an all_gather delivers its
    outputs, which have equal shapes, in host memory; its wait blocks the host.
    """

    kind: Kind
    group: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_buffers: tuple[Buffer, ...]
    out_buffers: tuple[Buffer, ...]
    op: Op | None
    channel: str
    distance: int = field(default=0, kw_only=True)
    sizes: Sizes | None = field(default=None, kw_only=True)
    on_host: bool = field(default=False, kw_only=True)
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def does(self) -> CollectiveKind:
        """The properties of the collective's kind."""
        return COLLECTIVES[self.kind]

    def given(self, values: Sequence[T], source: int, to: int) -> Sequence[T]:
        """Return the part of the inputs of member ``source``, `values`, that member ``to``
        receives."""
        if self.distance:
            return values if (source + self.distance - to) % len(self.group) == 0 else ()
        return self.does.given(values, to)

    def got(self, at: int, of: int) -> Sequence[Buffer]:
        """Return the buffers of the pieces that this member, at position ``at``, receives from
        member ``of``."""
        if self.distance:
            return self.given(self.out_buffers, of, at)
        return self.does.got(self.in_buffers, self.out_buffers, at, of)

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
        buffers = (*self.in_buffers, *self.out_buffers)
        if any(buffer.variable for buffer in buffers):
            raise ValueError(
                f"The members of {self.kind} must know its sizes before it runs, got "
                f"{', '.join(map(str, buffers))}."
            )
        if self.does.rotates != (self.distance > 0):
            needed = "at least 1" if self.does.rotates else "0"
            raise ValueError(f"The distance of {self.kind} is {needed}, got {self.distance}.")
        sized = self.sizes is not None
        if any(buffer.bounded != sized for buffer in buffers):
            raise ValueError(
                f"A collective has bounded buffers if and only if it is sized, got {self.kind} "
                f"with {self.sizes} and {', '.join(map(str, buffers))}."
            )
        if self.sizes is not None and (
            self.kind != "all_to_all" or len(self.sizes.parts) != len(self.group)
        ):
            raise ValueError(
                f"Only an all_to_all is sized, by one vector of counts for each member of "
                f"{self.group}, got {self.kind} with {self.sizes}."
            )
        if self.on_host and (self.kind != "all_gather" or len(set(self.out_buffers)) > 1):
            raise ValueError(
                f"Only an all_gather of equal buffers is delivered in host memory, got "
                f"{self.kind} of {', '.join(map(str, self.out_buffers))}."
            )

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Collective:
        inputs, outputs = _rename_all(self.inputs, names), _rename_all(self.outputs, names)
        group = tuple(ranks[rank] for rank in self.group)
        sizes = self.sizes and replace(self.sizes, counts=_rename_all(self.sizes.counts, names))
        return replace(self, group=group, inputs=inputs, outputs=outputs, sizes=sizes)


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
    """Make `value`, a `WORD`: 1 if a call of this rank has failed in this run, else 0.

    `faults`: the rows i64[3] in which calls record the faults that they find on the device (see
    `Check`). If a row has a fault, the vote is 1, which the host does not know.
    """

    value: str
    faults: tuple[str, ...] = ()
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.faults

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.value,)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Vote:
        value, faults = names.get(self.value, self.value), _rename_all(self.faults, names)
        return replace(self, value=value, faults=faults)


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit point of a rank. `value`: the sum of all votes.

    Without a `predicate` the host reads the sum: if it is not 0, or the rank itself has failed, the
    rank skips its later calls. With one the host reads nothing: `predicate`, f32[] on the device,
    becomes exactly 1 if a rank has failed, else exactly 0, and each later call that writes lasting
    values reads it and writes nothing if it is 1.
    """

    value: str
    predicate: str | None = None
    label: Label | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return () if self.predicate is None else (self.predicate,)

    def renamed(self, names: Mapping[str, str], ranks: Sequence[int]) -> Commit:
        predicate = self.predicate and names.get(self.predicate, self.predicate)
        return replace(self, value=names.get(self.value, self.value), predicate=predicate)


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


def values_read(instruction: Instruction) -> tuple[str, ...]:
    """Return the values that an instruction reads: its inputs, and the counts that size it. The
    counts are read when the collective starts, and are not needed while it is in flight."""
    if isinstance(instruction, Collective) and instruction.sizes is not None:
        return (*instruction.inputs, *instruction.sizes.counts)
    return instruction.inputs


def awaited(start: Start) -> tuple[str, ...]:
    """Return the values by which a `Wait` refers to the start."""
    return (start.value,) if isinstance(start, Send) else start.outputs


def _rename_all(values: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(value, value) for value in values)
