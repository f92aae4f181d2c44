"""The interface through which plans and programs see a `DTensor`: its shards are on the ranks.

    x.spec, x.held, x.session, x.name

`DTensor` (eager/tensor.py) is the only subclass. Layouts are interned: equal layouts are one
object, so that they are compared by identity, which is faster than comparing specs.
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
    """The spec of a global tensor, and the strides that it would have on one device."""

    spec: TensorSpec
    strides: tuple[int, ...]


@cache
def layout_of(spec: TensorSpec, strides: tuple[int, ...]) -> Layout:
    return Layout(spec, strides)


def contiguous_layout(spec: TensorSpec) -> Layout:
    return layout_of(spec, contiguous_strides(spec.shape))


@cache
def contiguous(layout: Layout) -> Layout:
    """Return the layout of the same spec with contiguous strides."""
    return contiguous_layout(layout.spec)


class TensorHandle(torch.Tensor):
    """A tensor with a global ``shape`` and ``dtype`` whose shards are on the ranks."""

    @property
    def session(self) -> MeshSession:
        raise NotImplementedError

    @property
    def spec(self) -> TensorSpec:
        raise NotImplementedError

    @property
    def held(self) -> Layout:
        """The spec as a contiguous layout: the same object for equal specs."""
        raise NotImplementedError

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the shards in the ranks' tables."""
        raise NotImplementedError
