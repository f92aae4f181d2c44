"""From global to local and back: cut a tensor into shards, assemble shards, localise a call.

    shard_of(x, parse("f32[8@tp,16]", Mesh(tp=2)), {"tp": 1})    # x[4:8]
    assemble([x0, x1], spec)                                     # x again
    local_call(rule, call, Local(...))                           # view sizes made local, ...

Pending values: a rank's shard of Partial("sum") is the value itself at coordinate 0 of the axis
and zero elsewhere; of max and min it is the value everywhere. These are functions on tensors of
one process; nothing is communicated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.numerics import fold
from dtensor.sharding.ops.call import Local, Meta, OpCall
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.blocks import block, write
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.spec import TensorSpec


def shard_of(x: torch.Tensor, spec: TensorSpec, coordinates: Mapping[str, int]) -> torch.Tensor:
    """The shard of global ``x`` that the rank at ``coordinates`` holds; contiguous, its own."""
    local = block(x, tuple(spec.intervals(dim, coordinates) for dim in range(x.dim())))
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial) and placement.op == "sum" and coordinates[axis] > 0:
            local = torch.zeros_like(local)
    return local.contiguous().clone() if local.data_ptr() == x.data_ptr() else local.contiguous()


def assemble(shards: Sequence[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """The global tensor, from the shards of all ranks of ``spec.mesh`` in rank order.

    Pending values are reduced by a left fold in rank order, one axis at a time, in mesh order.
    """
    return assemble_at(dict(enumerate(shards)), spec)


def assemble_at(shards: Mapping[int, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """The same from the shards by rank, of the ranks that hold the value (``spec.on``)."""
    mesh = spec.mesh
    pieces = dict(shards)
    current = spec
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            for rank in sorted(shards):
                if mesh.coordinates(rank)[axis] == 0:
                    group = mesh.group(rank, axis)
                    total = fold([pieces[r] for r in group], placement.op)
                    pieces.update(dict.fromkeys(group, total))
            current = current.with_placements(**{axis: REPLICATE})
    result = next(iter(shards.values())).new_empty(spec.shape)
    for rank in sorted(shards):
        here = mesh.coordinates(rank)
        if pieces[rank].numel():
            where = tuple(current.intervals(dim, here) for dim in range(len(current.shape)))
            write(result, pieces[rank], where)
    return result


def local_call(rule: Rule, call: OpCall, local: Local) -> OpCall:
    """The call that one rank runs: the rule's localizer, then the local shapes recorded."""
    localized = rule.localize(call, local) if rule.localize is not None else call
    return replace(
        localized,
        operands=tuple(
            Meta(spec.local_shape(local.coordinates), spec.dtype) for spec in local.operands
        ),
        results=tuple(
            None if spec is None else Meta(spec.local_shape(local.coordinates), spec.dtype)
            for spec in local.results
        ),
    )
