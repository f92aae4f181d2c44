"""ZeRO: how a parameter's state is stored split over an axis (Rajbhandari et al. 2020,
arXiv:1910.02054). Per rank of n, with P bytes of parameters, k optimizer tensors for each parameter
and m microbatches:

    level             0          1          2            3
    parameters        P          P          P            P/n
    gradients         P          P          P/n          P/n
    optimizer state   kP         kP/n       kP/n         kP/n
    sent (P (n-1)/n)  2          2          1 + m        3m

Storage does not change where ops are split. The split over the ZeRO axis is the minor one of its
dim. Gradients are in emit/stored_gradients.py, gathers in passes/gather_stored.py."""

from __future__ import annotations

import re

from dtensor.sharding.spec.placements import REPLICATE, Shard, refine
from dtensor.sharding.spec.spec import TensorSpec

LEVELS = {1: "optimizer state", 2: "gradients, optimizer state"} | {
    3: "parameters, gradients, optimizer state"
}
_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


def stored_spec(spec: TensorSpec, axis: str) -> TensorSpec | None:
    """Return the spec also split over ``axis``, on the dim that makes the largest shard smallest.

    Ties go to a dim that no other axis splits (a rank's slice is then one block of its tensor),
    then to the first dim. Returns None if no split makes the largest shard smaller, or if the axis
    already splits the value.
    """
    if axis not in spec.mesh.axes or spec.placement(axis) != REPLICATE:
        return None
    best: tuple[int, bool, int] | None = None
    chosen: TensorSpec | None = None
    for dim, size in enumerate(spec.shape):
        majors = spec.cuts(dim)
        split = spec.with_placements(**{axis: refine(Shard(dim), majors, size)})
        key = (split.max_local_nbytes, bool(majors), dim)
        if split.max_local_nbytes < spec.max_local_nbytes and (best is None or key < best):
            best, chosen = key, split
    return chosen


def layer_of(label: str) -> str:
    """Return the layer of a parameter: its innermost numbered module, else its own module.
    ``blocks.0.attn.qkv.weight`` belongs to ``blocks.0``, ``embed.weight`` to ``embed``. The
    parameters of a layer are gathered together."""
    numbers = list(_NUMBER.finditer(label))
    return label[: numbers[-1].end()] if numbers else label.rpartition(".")[0]
