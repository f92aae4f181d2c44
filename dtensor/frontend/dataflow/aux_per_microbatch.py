"""Rewrite load-balancing losses so that the loss is the mean of the losses of all microbatches.

    balance_sums(p [T E], ids [T k])   ->   balance_sums(p [(d m r) E], ids, d, m)
    balance_loss(sums [1 3 E], E)      ->   balance_loss(sums [m 3 E], E / m)

There are m microbatches of r rows on each of d ranks. The reference is torch's loop over the
microbatches, each with its own loss divided by m. The axis of microbatches splits m, so that each
microbatch computes its own loss, from sums over the rows of all ranks. Microbatches have one size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.per_microbatch import Cut, cut_of_rows, shards_of_rows
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.request import Request

_OPS: Any = torch.ops.dt
_SUMS, _SUMS_GRAD = _OPS.balance_sums.default, _OPS.balance_sums_grad.default
_LOSSES = (_OPS.balance_loss.default, _OPS.balance_loss_grad.default)
_ADD = torch.ops.aten.add.Tensor  # of the sums of several layers


def aux_per_microbatch(request: Request) -> Request:
    """Return the request with each load-balancing loss over the split batch rewritten for
    microbatches. Raises PlanningError if microbatches differ in size."""
    if request.num_microbatches == 1:
        return request
    sums = {op.name: op for op in request.flow.ops if op.call.target == _SUMS}
    if not sums:
        return request
    shards = shards_of_rows(request, sums)
    cuts = [cut_of_rows(request, sums[name], shard, "aux_loss") for name, shard in shards.items()]
    by_size = {cut.ranks * cut.num * cut.rows: cut for cut in cuts}
    wide: dict[str, Meta] = {}  # values of each microbatch
    ops = [_rewritten(op, by_size, wide) for op in request.flow.ops]
    return replace(request, flow=replace(request.flow, ops=tuple(ops)))


def _rewritten(op: Op, cuts: dict[int, Cut], wide: dict[str, Meta]) -> Op:
    """Return the op for microbatches. ``cuts``: how microbatches cut T rows, by T. ``wide``: the
    new metas of values with a dim of microbatches, which is extended."""
    call, args = op.call, op.call.args
    operands = tuple(
        wide.get(name, meta) for name, meta in zip(op.operands, call.operands, strict=True)
    )
    num = next((wide[name].shape[0] for name in op.operands if name in wide), 0)
    match call.target:
        case target if target == _SUMS:
            cut = cuts.get(operands[0].shape[0])
            if cut is None:  # microbatches do not split these rows
                return op
            num, args = cut.num, (*args[:3], cut.ranks, cut.num)
        case _ if not num:
            return op
        case target if target == _SUMS_GRAD:
            cut = cuts[args[2]]
            args = (*args[:4], cut.ranks, cut.num)
        case target if target in _LOSSES:
            *tensors, scale = args
            args = (*tensors, scale / num)
        case target if target == _ADD:
            pass
        case _:
            raise _read_elsewhere(op)
    result = call.result
    if call.target != _SUMS_GRAD and result.shape:
        result = Meta((num, *result.shape[1:]), result.dtype)
        wide[op.results[0] or ""] = result
    return replace(op, call=replace(call, args=args, operands=operands, results=(result,)))


def _read_elsewhere(op: Op) -> PlanningError:
    """Return the error for an op that reads a sum of a load-balancing loss besides the loss."""
    return PlanningError(
        f"{op.call.name} reads a sum over all rows that a load-balancing loss makes, and with "
        f'aux_loss="per_microbatch" there is one for each microbatch.\n'
        + (f"  {op.source}: {op.source_text}\n" if op.source else "")
        + "fix: microbatches=1"
    )
