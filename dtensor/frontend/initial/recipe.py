"""A `Recipe`: how one tensor of a model on the meta device is made, op by op.

    normal_(self, 0.0, 0.02); self[3].fill_(0)      # an embedding with a padding row

Tensors of a recipe are `View`s of numbered storages, so that views and in-place ops mean what they
mean in torch. A recipe is *split* where each op works element by element on tensors of the result's
own shape, or on whole rows of it in place: then a rank makes its shard alone. Otherwise the tensor
is made whole and cut, which `recording` allows for small ones only.

Invariants: frozen, pickles, holds no tensor but small constants. Random steps carry the key of
their numbers, so the values are fixed when the recipe is. Not here: recording, or making.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.sharding.ops.philox import Key


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a storage; offset and strides count elements."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a tensor of this shape that fills its storage in order."""
        return self.size == shape and self.offset == 0 and self.stride == strides_of(shape)

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Which rows of a tensor of this shape it is, filled in order; None for anything else."""
        inner = shape[1:]
        lead = len(self.size) - len(inner)  # 1: a block of rows; 0: one row, selected
        row = math.prod(inner)
        if not shape or lead not in (0, 1) or not row or self.offset % row:
            return None
        if self.size[lead:] != inner or self.stride[lead:] != strides_of(inner):
            return None
        if lead and self.size[0] != 1 and self.stride[0] != row:
            return None
        start = self.offset // row
        return start, start + (self.size[0] if lead else 1)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As torch gives them to a contiguous tensor."""
    return tuple(math.prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor that the initialisation copies from."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call. ``writes``: the view that it fills or changes; ``made``: whether it makes it anew;
    ``key``: of its random numbers."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    writes: tuple[View, ...]
    made: bool
    key: Key | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``storages``: number -> (elements, dtype) of those that steps touch; ``view``: the result."""

    name: str
    view: View
    storages: tuple[tuple[int, int, torch.dtype], ...]
    steps: tuple[Step, ...]
    split: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.size

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype


def truncated_normal(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    """Stands in a recipe for torch.nn.init.trunc_normal_, whose rejections depend on values."""
    raise NotImplementedError("a step of a recipe, which is made and not called")
