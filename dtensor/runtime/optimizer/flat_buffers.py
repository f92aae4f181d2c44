"""Parameters end to end in one buffer, so that a kernel updates them as one tensor.

    bias, scale of 5 and 7 float32      run.parameter  f32[32]: bias 0..5, scale 16..23, zeros

A run is such a tensor with its members. Small shards of a group and dtype share a run: their
tensors become views of its buffer, which is done once; their gradients are gathered at each step,
in one call. A large shard is a run of its own and stays where it is, and so does its gradient.
Only a shard whose elements do not fill whole vectors is in a buffer however large it is, or if it
is a part of a tensor, in one of the step's own.

Invariants: each member begins at a multiple of `WIDTH` bytes and the rest up to the next is zeros.
So a kernel reads whole vectors alone, and the bits of an element do not depend on where a tensor
was cut: torch's fused kernels, and all of its ops on 16-bit floats, round otherwise in the elements
after the last whole vector. Members of a run have had the same steps: where a gradient is missing,
the run is split, for good and without a copy.

Rejected: gradients in one buffer too, for it would have to be there before the backward, when
activations are; and to copy large ones into it takes half as long as the update itself.

Not here: what torch.optim is told (shard_optimizer.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDTH = 64
"""Bytes: the widest vector of a CPU."""

SMALL = 4096
"""Elements. A gather of smaller gradients costs less than another tensor in torch's loop."""


@dataclass(slots=True)
class Member:
    """A shard's place in its run, in elements; `seen`: the shard of the step before, and which
    version it was after that."""

    name: str
    shape: torch.Size
    begin: int
    numel: int
    seen: tuple[weakref.ref[Tensor], int] | None = None


class FlatRun:
    """`size`: of the buffer, in elements. `master`: it is a float32 copy of narrower shards."""

    __slots__ = ("_at", "_copies", "_owns", "_views", "master", "members", "parameter", "size")

    def __init__(
        self, members: Sequence[Member], size: int, parameter: Tensor, *, master: bool, owns: bool
    ) -> None:
        self.members = tuple(members)
        self.size: int = size
        self.master: bool = master
        self.parameter: torch.nn.Parameter = torch.nn.Parameter(parameter)
        self._copies: list[tuple[Tensor, Tensor]] = []  # shard and what becomes its value
        self._stands(owns=owns)

    def of(self, flat: Tensor, member: Member) -> Tensor:
        """A member's part of a tensor of the run's size, in the member's shape."""
        return flat[member.begin : member.begin + member.numel].view(member.shape)

    def _stands(self, *, owns: bool) -> None:
        """Note where the parameter is now; ``owns``: in a buffer, not in a shard's memory."""
        self._owns = owns
        flat = self.parameter.data
        self._views = [self.of(flat, member) for member in self.members] if owns else [flat]
        self._at = [view.data_ptr() for view in self._views]

    def take(self, shards: Mapping[str, Tensor], parts: Collection[str]) -> None:
        """The parameter becomes the value of the shards, before a step.

        ``parts``: names of shards that are no tensors of the rank's table, but parts of them.
        """
        if self.master:
            self._follow(shards)
            return
        first = shards[self.members[0].name]
        if len(self.members) == 1 and self.size == first.numel() and first.is_contiguous():
            if self._owns or self._at[0] != first.data_ptr():
                self.parameter.data = first.detach().view(-1)
                self._stands(owns=False)
            return
        if not self._owns:
            self.parameter.data = first.new_zeros(self.size)
            self._stands(owns=True)
        for at, member in enumerate(self.members):
            shard = shards[member.name]
            if shard.data_ptr() == self._at[at]:
                continue
            self._views[at].copy_(shard)
            if member.name in parts:
                self._copies.append((shard, self._views[at]))
            else:
                shard.data = self._views[at]

    def _follow(self, shards: Mapping[str, Tensor]) -> None:
        """Shards that are other tensors than at the step before, or were written since, may have
        other values: a master takes those over."""
        self._copies = []
        for member, here in zip(self.members, self._views, strict=True):
            shard = shards[member.name]
            if member.seen is not None:
                before, version = member.seen
                if before() is not shard or version != shard._version:
                    here.copy_(master_of(shard, here))
            self._copies.append((shard, here))

    def give(self) -> None:
        """The shards become the parameter, after a step."""
        for shard, here in self._copies:
            shard.copy_(here)
        if self.master:
            for member, (shard, _) in zip(self.members, self._copies, strict=True):
                member.seen = weakref.ref(shard), shard._version
        if self._copies and len(self.members) == 1 and not self.master:  # a large part of a tensor
            self.parameter.data = self.parameter.data.new_empty(0)
            self._stands(owns=False)
        self._copies = []

    def gradient(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        """The members' gradients as one tensor, and whether it is a copy."""
        gradients_of_members = [gradients[member.name] for member in self.members]
        first = gradients_of_members[0]
        if len(gradients_of_members) == 1 and self.size == first.numel():
            there = first.dtype == self.parameter.dtype and first.is_contiguous()
            return (first if there else first.to(self.parameter.dtype)).reshape(-1), not there
        if self._follow_each_other(gradients_of_members):
            return first.as_strided((self.size,), (1,), first.storage_offset()), False
        pieces: list[Tensor] = []
        for member, gradient in zip(self.members, gradients_of_members, strict=True):
            pieces.append(gradient if gradient.dim() == 1 else gradient.reshape(-1))
            rest = filled(member.numel, self.parameter.dtype) - member.numel
            if rest:
                pieces.append(gradient.new_zeros(rest))
        return torch.cat(pieces).to(self.parameter.dtype), True

    def _follow_each_other(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the gradients stand in one memory as the members do: as parts of a bucket."""
        begin = gradients[0].storage_offset()
        for member, gradient in zip(self.members, gradients, strict=True):
            if (
                gradient.storage_offset() - begin != member.begin
                or gradient.dtype != self.parameter.dtype
                or not gradient.is_contiguous()
                or filled(member.numel, gradient.dtype) != member.numel
            ):
                return False
        return len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1

    def split(self, present: Collection[str]) -> list[tuple[FlatRun, int]]:
        """Runs of neighbours that are all in ``present`` or all not, and where each begins here:
        views of this one's buffer."""
        groups: list[list[Member]] = []
        for member in self.members:
            if not groups or (groups[-1][-1].name in present) != (member.name in present):
                groups.append([])
            groups[-1].append(member)
        ends = [group[0].begin for group in groups[1:]] + [self.size]
        parts: list[tuple[FlatRun, int]] = []
        for group, end in zip(groups, ends, strict=True):
            begin = group[0].begin
            members = [replace(member, begin=member.begin - begin) for member in group]
            flat = self.parameter.data[begin:end]
            run = FlatRun(members, end - begin, flat, master=self.master, owns=True)
            parts.append((run, begin))
        return parts


def filled(numel: int, dtype: torch.dtype) -> int:
    """How many elements the vectors hold that hold this many."""
    lanes = WIDTH // dtype.itemsize
    return -(-numel // lanes) * lanes


def together(sizes: Iterable[int]) -> list[list[int]]:
    """Which of a group's shards share a run, by position: the small ones, and each other alone."""
    small: list[int] = []
    runs: list[list[int]] = [small]
    for at, size in enumerate(sizes):
        if size < SMALL:
            small.append(at)
        else:
            runs.append([at])
    return runs if small else runs[1:]


def run_of(
    names: Sequence[str], shards: Mapping[str, Tensor], masters: Mapping[str, Tensor | None] | None
) -> FlatRun:
    """A run of these shards, which `FlatRun.take` gives it; of their masters, where there are such:
    as they were loaded, or None for none."""
    first = shards[names[0]]
    dtype = first.dtype if masters is None else torch.float32
    members: list[Member] = []
    size = 0
    for name in names:
        shape = shards[name].shape
        members.append(Member(name, shape, size, math.prod(shape)))
        size += filled(members[-1].numel, dtype)
    if masters is None:
        return FlatRun(members, size, first.new_empty(0), master=False, owns=False)
    alone = masters[names[0]] if len(names) == 1 else None
    if alone is not None and alone.numel() == size and _is_as(alone, first, dtype):
        flat = alone.detach().copy_(master_of(first, alone)).view(-1)  # it stays where it is
        return FlatRun(members, size, flat, master=True, owns=True)
    run = FlatRun(members, size, first.new_zeros(size, dtype=dtype), master=True, owns=True)
    for member in members:
        loaded, shard = masters[member.name], shards[member.name]
        value = shard if loaded is None else master_of(shard, loaded.to(shard.device, dtype))
        run.of(run.parameter.data, member).copy_(value)
    return run


def _is_as(x: Tensor, like: Tensor, dtype: torch.dtype) -> bool:
    return x.shape == like.shape and x.device == like.device and x.dtype == dtype


def master_of(shard: Tensor, master: Tensor) -> Tensor:
    """The elements of a master that the shard is the rounding of: where the model was given other
    values since, those count."""
    return torch.where(master.to(shard.dtype) == shard, master, shard.float())
