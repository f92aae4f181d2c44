"""ZeRO: parameters, gradients and optimizer state stored split over an axis, used whole.

    parallelize(model, Mesh(dp=4), zero={"dp": 3})

Level 1 splits the optimizer's state, 2 the gradients too, 3 the parameters too (Rajbhandari et al.
2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054).
Per rank of n, of a model of P bytes and an optimizer that keeps k tensors a parameter:

    level             0          1          2            3
    parameters        P          P          P            P/n
    gradients         P          P          P/n          P/n
    optimizer state   kP         kP/n       kP/n         kP/n
    sent (P (n-1)/n)  2          2          1 + m        3m          m microbatches

At 1 gradients are reduce-scattered once, after the last microbatch; at 2 and 3 in the backward of
each microbatch, as soon as those of a layer are there, so that no rank keeps whole ones: what is
accumulated over microbatches is the shard. At 1 and 2 each rank updates its slice and the slices
are gathered. At 3 parameters are gathered before use (passes/gather_stored.py).

Invariants: storage opens no factor: what is used, and so the planner's choice, is as without. The
stored split is the last axis on its dim. Gradients of 16 bits are scattered as such, into float32
(precision.py). Not here: gradients and updates (emit/emit.py), how a gather is lowered
(runtime/lower).
"""

from __future__ import annotations

import re

from dtensor.sharding.spec.placements import REPLICATE, Shard, refine
from dtensor.sharding.spec.spec import TensorSpec

LEVELS = {1: "optimizer state", 2: "gradients, optimizer state"} | {
    3: "parameters, gradients, optimizer state"
}
_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


def stored_spec(spec: TensorSpec, axis: str) -> TensorSpec | None:
    """The spec split over ``axis`` too, on the dim that leaves the least on the fullest rank.

    Of equals: a dim that no other axis splits (a rank's slice is then one block of what it uses),
    then the first. None where nothing gets smaller, or where the axis splits the value already.
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
    """The parameters that are gathered together: those of one numbered module, or of one module.

    ``blocks.0.attn.qkv.weight`` is of ``blocks.0``, ``embed.weight`` of ``embed``.
    """
    numbers = list(_NUMBER.finditer(label))
    return label[: numbers[-1].end()] if numbers else label.rpartition(".")[0]
