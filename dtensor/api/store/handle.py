"""A tensor of a launch as calls take it: its shards stand on the ranks, under a name.

    x.spec, x.held, x.session      # of a DTensor: what plans and programs ask of it

`DTensor` (eager/tensor.py) is the only kind; what plans and loads programs knows but this. Layouts
are interned: equal ones are one object, compared by identity, for specs take longer to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from dtensor.numerics import contiguous_strides
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.api.store.session import MeshSession


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How a whole tensor looks: its spec, and its strides as on one device."""

    spec: TensorSpec
    strides: tuple[int, ...]


@cache
def layout_of(spec: TensorSpec, strides: tuple[int, ...]) -> Layout:
    return Layout(spec, strides)


def contiguous_layout(spec: TensorSpec) -> Layout:
    return layout_of(spec, contiguous_strides(spec.shape))


@cache
def contiguous(layout: Layout) -> Layout:
    """The same spec without other strides; equal specs are told by identity then."""
    return contiguous_layout(layout.spec)


class TensorHandle(torch.Tensor):
    """Global ``shape`` and ``dtype``; the shards are stored under ``name`` on the ranks."""

    @property
    def session(self) -> MeshSession:
        raise NotImplementedError

    @property
    def spec(self) -> TensorSpec:
        raise NotImplementedError

    @property
    def held(self) -> Layout:
        """Its spec as a layout, the same object for equal specs."""
        raise NotImplementedError

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Under which its shards stand in the ranks' tables."""
        raise NotImplementedError
