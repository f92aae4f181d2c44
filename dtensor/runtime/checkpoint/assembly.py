"""Tensors that consist of blocks of other tensors, such as stacked experts of per-expert tensors.

    w1, w2 = (Assembly.of(f"experts.{i}.w1", torch.float32, (16, 8)) for i in range(2))
    experts = stack([w1, w2], 0)                         # f32[2,16,8]
    experts.within((1, 0, 0), (1, 16, 8)).parts             # one part, of experts.1.w1
    read_block(checkpoint, experts, (1, 0, 0), (1, 4, 8))   # reads rows 0:4 of experts.1.w1

A model may stack what a checkpoint's files have apart, or the reverse. Both directions are
assemblies: of a file's tensors for a load, of the model's tensors for a save. Invariant: the parts
of an assembly cover each of its elements once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A block of the tensor ``name``, and its place in an assembly.

    ``offsets`` and ``sizes`` are the place in the assembly. ``begin``: where the block begins in
    the tensor. ``dims``: for each dim of the assembly the tensor's dim, or -1 for a dim of size 1
    that the tensor lacks. The block has size 1 in the tensor's other dims.
    """

    name: str
    offsets: Numbers
    sizes: Numbers
    begin: Numbers
    dims: Numbers

    @property
    def block_sizes(self) -> Numbers:
        """The sizes of the block in the dims of the tensor."""
        sizes = dict(zip(self.dims, self.sizes, strict=True))
        return tuple(sizes.get(dim, 1) for dim in range(len(self.begin)))

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Part | None:
        """Return the part of this part that lies in a block of the assembly, or None."""
        place = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        ends = [(max(a, b), min(a + n, b + m)) for a, n, b, m in place]
        if any(lo >= hi for lo, hi in ends):
            return None
        begin = list(self.begin)
        for dim, (lo, _), at in zip(self.dims, ends, self.offsets, strict=True):
            if dim >= 0:
                begin[dim] += lo - at
        return replace(
            self,
            offsets=tuple(lo for lo, _ in ends),
            sizes=tuple(hi - lo for lo, hi in ends),
            begin=tuple(begin),
        )

    def inverse(self, name: str) -> Part:
        """Return the same elements as a part of the tensor, taken from the assembly ``name``."""
        return Part(
            name=name,
            offsets=self.begin,
            sizes=self.block_sizes,
            begin=self.offsets,
            dims=tuple(
                self.dims.index(dim) if dim in self.dims else -1 for dim in range(len(self.begin))
            ),
        )

    def arranged(self, block: Tensor) -> Tensor:
        """Return the block of the tensor with the dims of the assembly, a view if possible."""
        order = [dim for dim in self.dims if dim >= 0]
        return block.permute(order + sorted(set(range(block.dim())) - set(order))).reshape(
            self.sizes
        )


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor that consists of parts of tensors of its dtype."""

    dtype: torch.dtype
    shape: Numbers
    parts: tuple[Part, ...]

    @staticmethod
    def of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Assembly:
        """Return a whole tensor as an assembly."""
        zeros = (0,) * len(shape)
        part = Part(
            name=name, offsets=zeros, sizes=tuple(shape), begin=zeros, dims=(*range(len(shape)),)
        )
        return Assembly(dtype, tuple(shape), (part,))

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Assembly:
        """Return an assembly of the same shape with only the parts that lie in a block of it."""
        parts = (part.within(offsets, sizes) for part in self.parts)
        return replace(self, parts=tuple(part for part in parts if part is not None))

    def narrow(self, dim: int, begin: int, size: int) -> Assembly:
        """Return the slice ``begin`` to ``begin + size`` of a dim."""
        at = replaced((0,) * len(self.shape), dim, begin)
        shape = replaced(self.shape, dim, size)
        return replace(self.within(at, shape), shape=shape)._moved(dim, -begin)

    def squeeze(self, dim: int) -> Assembly:
        """Return the assembly without a dim of size 1."""
        if self.shape[dim] != 1:
            raise ValueError(f"dim {dim} of {self.shape} has not size 1")
        return self._each(lambda numbers: (*numbers[:dim], *numbers[dim + 1 :]))

    def transpose(self, dim: int, other: int) -> Assembly:
        """Return the assembly with two dims exchanged."""
        order = [*range(len(self.shape))]
        order[dim], order[other] = order[other], order[dim]
        return self._each(lambda numbers: tuple(numbers[i] for i in order))

    def _unsqueeze(self, dim: int) -> Assembly:
        """Return the assembly with a new dim of size 1 before ``dim``."""

        def added(numbers: Numbers, new: int) -> Numbers:
            return (*numbers[:dim], new, *numbers[dim:])

        parts = (
            replace(
                part,
                offsets=added(part.offsets, 0),
                sizes=added(part.sizes, 1),
                dims=added(part.dims, -1),
            )
            for part in self.parts
        )
        return Assembly(self.dtype, added(self.shape, 1), tuple(parts))

    def _moved(self, dim: int, by: int) -> Assembly:
        """Add ``by`` to the offsets of all parts in a dim."""
        parts = (
            replace(part, offsets=replaced(part.offsets, dim, part.offsets[dim] + by))
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    def _each(self, change: Callable[[Numbers], Numbers]) -> Assembly:
        """Apply a change of the dims to everything that has a number for each dim."""
        parts = (
            replace(
                part,
                offsets=change(part.offsets),
                sizes=change(part.sizes),
                dims=change(part.dims),
            )
            for part in self.parts
        )
        return Assembly(self.dtype, change(self.shape), tuple(parts))


def cat(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """Concatenate assemblies. Raises ValueError if dtypes or other dims differ."""
    first = assemblies[0]
    rest = replaced(first.shape, dim, 0)
    if any(
        (a.dtype, replaced(a.shape, dim, 0)) != (first.dtype, rest) or len(a.shape) != len(rest)
        for a in assemblies
    ):
        raise ValueError(f"shapes or dtypes differ: {[(a.dtype, a.shape) for a in assemblies]}")
    begins = [*itertools.accumulate((a.shape[dim] for a in assemblies), initial=0)]
    parts = (
        part for a, at in zip(assemblies, begins, strict=False) for part in a._moved(dim, at).parts
    )
    return Assembly(first.dtype, replaced(first.shape, dim, begins[-1]), tuple(parts))


def stack(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """Concatenate assemblies along a new dim. Raises ValueError if dtypes or shapes differ."""
    return cat([a._unsqueeze(dim) for a in assemblies], dim)


def inverted(assemblies: Mapping[str, Assembly]) -> dict[str, list[Part]]:
    """Return for each tensor that assemblies consist of, by name, its parts in the assemblies."""
    parts: dict[str, list[Part]] = {}
    for name, assembly in assemblies.items():
        for part in assembly.parts:
            parts.setdefault(part.name, []).append(part.inverse(name))
    return parts


@dataclass(frozen=True, slots=True)
class InFiles:
    """The tensors of Hugging Face's files, which consist of a model's values.

    ``parts``: the same by the name of the value, as parts of the files' tensors. ``tied``: other
    names of tensors, each with its name in ``tensors``.
    """

    tensors: Mapping[str, Assembly]
    parts: Mapping[str, Sequence[Part]]
    tied: Mapping[str, str]

    @staticmethod
    def of(tensors: Mapping[str, Assembly], tied: Mapping[str, str]) -> InFiles:
        """Return the record for these tensors of the files."""
        return InFiles(tensors, inverted(tensors), tied)


class _Reads(Protocol):
    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor: ...


def read_block(
    files: _Reads,
    source: Assembly,
    offsets: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return a block of an assembly of tensors in files, by default all of it. Only the parts that
    the block touches are read."""
    offsets = (0,) * len(source.shape) if offsets is None else offsets
    sizes = source.shape if sizes is None else sizes
    parts = source.within(offsets, sizes).parts
    if len(parts) == 1:
        return parts[0].arranged(files.read(parts[0].name, parts[0].begin, parts[0].block_sizes))
    block = torch.empty(tuple(sizes), dtype=source.dtype)
    for part in parts:
        place = zip(part.offsets, part.sizes, offsets, strict=True)
        target = block[tuple(slice(at - first, at - first + n) for at, n, first in place)]
        target.copy_(part.arranged(files.read(part.name, part.begin, part.block_sizes)))
    if sum(math.prod(part.sizes) for part in parts) != block.numel():
        raise ValueError(f"the parts of {source.shape} do not fill {sizes} at {offsets}")
    return block


def replaced(numbers: Numbers, dim: int, number: int) -> Numbers:
    """Return the numbers with another number for a dim."""
    return (*numbers[:dim], number, *numbers[dim + 1 :])
