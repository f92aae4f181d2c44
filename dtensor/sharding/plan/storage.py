"""ZeRO: how a parameter's state is stored split over axes (Rajbhandari et al. 2020,
arXiv:1910.02054). Per rank of n, with P bytes of parameters, k optimizer tensors for each parameter
and m microbatches:

    level             0          1          2            3
    parameters        P          P          P            P/n
    gradients         P          P          P/n          P/n
    optimizer state   kP         kP/n       kP/n         kP/n
    sent (P (n-1)/n)  2          2          1 + m        3m

Storage does not change where ops are split. The split over a ZeRO axis is the minor one of its
dim. Gradients are in emit/stored_gradients.py, gathers in passes/gather_stored.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtensor.sharding.plan.sequence import Alternative
from dtensor.sharding.spec.placements import REPLICATE, Shard, refine
from dtensor.sharding.spec.spec import TensorSpec

AUTO = 0
"""The level of ``zero={"dp": "auto"}`` until a training step has run, whose plan chooses it."""
LEVELS = {1: "optimizer state", 2: "gradients, optimizer state"} | {
    3: "parameters, gradients, optimizer state"
}
_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Zero:
    """A checked ``zero=``: the axes over which state is stored split, in the order of the mesh, and
    the level, 1 to 3, or `AUTO`. The axes have more than one rank. In a plan no level is `AUTO`."""

    axes: tuple[str, ...]
    level: int

    @property
    def is_auto(self) -> bool:
        """Whether the level is still to be chosen."""
        return self.level == AUTO

    def __str__(self) -> str:
        """Return the argument as the user writes it: ``zero={'dp': 1, 'ep': 1}``."""
        return f"zero={dict.fromkeys(self.axes, self.level or 'auto')}"


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The level, 0 to 3, that a plan chose for ``zero={axis: "auto"}``. ``alternatives``: the
    predictions for each level. ``fits``: whether a level fits in the memory of the topology."""

    axes: tuple[str, ...]
    level: int
    alternatives: tuple[Alternative, ...]
    fits: bool


def stored_spec(spec: TensorSpec, axes: Sequence[str]) -> TensorSpec | None:
    """Return the spec also split over each of ``axes`` in turn, on the dim that makes the largest
    shard smallest.

    Ties go to a dim that ``spec`` does not split (a rank's slice is then one block of its tensor),
    then to the first dim. An axis that already splits the value, or whose split does not make the
    largest shard smaller, is left out. Returns None if that leaves no axis.
    """
    stored = spec
    for axis in axes:
        if axis in spec.mesh.axes and spec.placement(axis) == REPLICATE:
            stored = split_over(stored, axis, spec)
    return None if stored is spec else stored


def split_over(stored: TensorSpec, axis: str, spec: TensorSpec) -> TensorSpec:
    """Return ``stored`` also split over the axis, or itself if that makes no shard smaller.
    ``spec``: the spec without ZeRO."""
    best: tuple[int, bool, int] | None = None
    chosen = stored
    for dim, size in enumerate(stored.shape):
        split = stored.with_placements(**{axis: refine(Shard(dim), stored.cuts(dim), size)})
        key = (split.max_local_nbytes, bool(spec.cuts(dim)), dim)
        if split.max_local_nbytes < stored.max_local_nbytes and (best is None or key < best):
            best, chosen = key, split
    return chosen


def layer_of(label: str) -> str:
    """Return the layer of a parameter: its innermost numbered module, else its own module.
    ``blocks.0.attn.qkv.weight`` belongs to ``blocks.0``, ``embed.weight`` to ``embed``. The
    parameters of a layer are gathered together."""
    numbers = list(_NUMBER.finditer(label))
    return label[: numbers[-1].end()] if numbers else label.rpartition(".")[0]
