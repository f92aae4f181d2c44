"""Concatenate small parameters into flat buffers, so that one kernel call updates all of them.

    bias f32[5], scale f32[7]    ->    buffer.parameter f32[32]: bias at 0, scale at 16, rest zeros

Small shards of one group and dtype become views of a shared buffer; each step gathers their
gradients with one call. A large shard is a buffer by itself and is updated in place.

Invariants: each member begins at a multiple of `WIDTH` bytes and is padded with zeros to the next.
So a kernel reads only whole vectors, and results do not depend on where a tensor was cut (torch's
kernels may round differently in the elements after the last whole vector). All members have had
the same number of steps: a buffer is split, for good and without a copy, if gradients are missing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDTH = 64
"""Bytes of the widest vector register of a CPU."""

SMALL = 4096
"""Elements. Gathering a smaller gradient is faster than one more tensor in torch's loop."""


@dataclass(slots=True)
class Member:
    """The position of one shard in its buffer, in elements. ``last_seen``: the shard tensor of the
    last step, and its version after that step."""

    name: str
    shape: torch.Size
    begin: int
    numel: int
    last_seen: tuple[weakref.ref[Tensor], int] | None = None


class FlatBuffer:
    """One 1-D parameter that holds several small shards, or one large shard.

    ``size``: elements of the buffer with padding. ``master``: the buffer is a float32 copy of
    shards with a narrower dtype. ``owns_memory``: False if the parameter is a view of its shard.
    """

    __slots__ = (
        *("_addresses", "_copies_back", "_owns_memory", "_views"),
        *("master", "members", "parameter", "size"),
    )

    def __init__(
        self,
        members: Sequence[Member],
        size: int,
        parameter: Tensor,
        *,
        master: bool,
        owns_memory: bool,
    ) -> None:
        """Create the buffer of ``members``. ``parameter``: its 1-D tensor, which may still be
        empty."""
        self.members = tuple(members)
        self.size: int = size
        self.master: bool = master
        self.parameter: torch.nn.Parameter = torch.nn.Parameter(parameter)
        self._copies_back: list[tuple[Tensor, Tensor]] = []  # (shard, its part of the buffer)
        self._set_location(owns_memory=owns_memory)

    def member_part(self, flat: Tensor, member: Member) -> Tensor:
        """Return the member's part of ``flat``, a tensor of the buffer's size, in its shape."""
        return flat[member.begin : member.begin + member.numel].view(member.shape)

    def _set_location(self, *, owns_memory: bool) -> None:
        """Recompute the members' views and addresses after the parameter's memory has changed."""
        self._owns_memory = owns_memory
        flat = self.parameter.data
        self._views = (
            [self.member_part(flat, member) for member in self.members] if owns_memory else [flat]
        )
        self._addresses = [view.data_ptr() for view in self._views]

    def load_shards(self, shards: Mapping[str, Tensor], parts: Collection[str]) -> None:
        """Before a step: set the parameter to the values of the shards.

        A whole shard becomes a view of the buffer. A shard named in ``parts`` is only a slice of
        a tensor in the rank's table, so it is copied in here and copied back after the step.
        """
        if self.master:
            self._update_masters(shards)
            return
        first_shard = shards[self.members[0].name]
        if (
            len(self.members) == 1
            and self.size == first_shard.numel()
            and first_shard.is_contiguous()
        ):
            if self._owns_memory or self._addresses[0] != first_shard.data_ptr():
                self.parameter.data = first_shard.detach().view(-1)
                self._set_location(owns_memory=False)
            return
        if not self._owns_memory:
            self.parameter.data = first_shard.new_zeros(self.size)
            self._set_location(owns_memory=True)
        for index, member in enumerate(self.members):
            shard = shards[member.name]
            if shard.data_ptr() == self._addresses[index]:
                continue
            self._views[index].copy_(shard)
            if member.name in parts:
                self._copies_back.append((shard, self._views[index]))
            else:
                shard.data = self._views[index]

    def _update_masters(self, shards: Mapping[str, Tensor]) -> None:
        """Copy the shards that were replaced or written since the last step into their masters."""
        self._copies_back = []
        for member, master in zip(self.members, self._views, strict=True):
            shard = shards[member.name]
            if member.last_seen is not None:
                last_shard, version = member.last_seen
                if last_shard() is not shard or version != shard._version:
                    master.copy_(current_master(shard, master))
            self._copies_back.append((shard, master))

    def store_shards(self) -> None:
        """After a step: copy the parameter's new values back to shards that are not views of it."""
        for shard, value in self._copies_back:
            shard.copy_(value)
        if self.master:
            for member, (shard, _) in zip(self.members, self._copies_back, strict=True):
                member.last_seen = weakref.ref(shard), shard._version
        if (
            self._copies_back and len(self.members) == 1 and not self.master
        ):  # a large slice: free its copy
            self.parameter.data = self.parameter.data.new_empty(0)
            self._set_location(owns_memory=False)
        self._copies_back = []

    def gradient(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        """Return the members' gradients as one flat tensor, and whether that tensor is a copy."""
        gradients_of_members = [gradients[member.name] for member in self.members]
        first_gradient = gradients_of_members[0]
        if len(gradients_of_members) == 1 and self.size == first_gradient.numel():
            fits = first_gradient.dtype == self.parameter.dtype and first_gradient.is_contiguous()
            return (first_gradient if fits else first_gradient.to(self.parameter.dtype)).reshape(
                -1
            ), not fits
        if self._are_adjacent(gradients_of_members):
            return first_gradient.as_strided(
                (self.size,), (1,), first_gradient.storage_offset()
            ), False
        pieces: list[Tensor] = []
        for member, gradient in zip(self.members, gradients_of_members, strict=True):
            pieces.append(gradient if gradient.dim() == 1 else gradient.reshape(-1))
            padding = filled(member.numel, self.parameter.dtype) - member.numel
            if padding:
                pieces.append(gradient.new_zeros(padding))
        return torch.cat(pieces).to(self.parameter.dtype), True

    def _are_adjacent(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether the gradients lie in one storage at the members' offsets, as in a
        bucket."""
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

    def split(self, present: Collection[str]) -> list[tuple[FlatBuffer, int]]:
        """Return buffers that are views of this buffer, and the offset of each in it. Each buffer
        holds consecutive members that are all in ``present``, or all not in it."""
        groups: list[list[Member]] = []
        for member in self.members:
            if not groups or (groups[-1][-1].name in present) != (member.name in present):
                groups.append([])
            groups[-1].append(member)
        ends = [group[0].begin for group in groups[1:]] + [self.size]
        parts: list[tuple[FlatBuffer, int]] = []
        for group, end in zip(groups, ends, strict=True):
            begin = group[0].begin
            members = [replace(member, begin=member.begin - begin) for member in group]
            flat = self.parameter.data[begin:end]
            buffer = FlatBuffer(members, end - begin, flat, master=self.master, owns_memory=True)
            parts.append((buffer, begin))
        return parts


def filled(numel: int, dtype: torch.dtype) -> int:
    """Return ``numel`` rounded up to whole vectors of `WIDTH` bytes."""
    lanes = WIDTH // dtype.itemsize
    return -(-numel // lanes) * lanes


def group_by_size(sizes: Iterable[int]) -> list[list[int]]:
    """Group shards into buffers by their number of elements: all small ones share one buffer, and
    each large one has its own. Return the positions in each buffer."""
    small: list[int] = []
    buffers: list[list[int]] = [small]
    for index, size in enumerate(sizes):
        if size < SMALL:
            small.append(index)
        else:
            buffers.append([index])
    return buffers if small else buffers[1:]


def make_buffer(
    names: Sequence[str], shards: Mapping[str, Tensor], masters: Mapping[str, Tensor | None] | None
) -> FlatBuffer:
    """Make a buffer for these shards.

    If ``masters`` is None, the buffer is empty until `FlatBuffer.load_shards`. Otherwise it is
    filled with float32 masters: the loaded master where there is one, else the converted shard.
    """
    first_shard = shards[names[0]]
    dtype = first_shard.dtype if masters is None else torch.float32
    members: list[Member] = []
    size = 0
    for name in names:
        shape = shards[name].shape
        members.append(Member(name, shape, size, math.prod(shape)))
        size += filled(members[-1].numel, dtype)
    if masters is None:
        return FlatBuffer(members, size, first_shard.new_empty(0), master=False, owns_memory=False)
    master = masters[names[0]] if len(names) == 1 else None
    if master is not None and master.numel() == size and _is_like(master, first_shard, dtype):
        flat = master.detach().copy_(current_master(first_shard, master)).view(-1)  # no new memory
        return FlatBuffer(members, size, flat, master=True, owns_memory=True)
    buffer = FlatBuffer(
        members, size, first_shard.new_zeros(size, dtype=dtype), master=True, owns_memory=True
    )
    for member in members:
        loaded, shard = masters[member.name], shards[member.name]
        value = shard if loaded is None else current_master(shard, loaded.to(shard.device, dtype))
        buffer.member_part(buffer.parameter.data, member).copy_(value)
    return buffer


def _is_like(x: Tensor, like: Tensor, dtype: torch.dtype) -> bool:
    return x.shape == like.shape and x.device == like.device and x.dtype == dtype


def current_master(shard: Tensor, master: Tensor) -> Tensor:
    """Return ``master`` with each element replaced by the shard's where it no longer rounds to the
    shard's: the user has changed the model since the last step."""
    return torch.where(master.to(shard.dtype) == shard, master, shard.float())
