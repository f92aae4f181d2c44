"""Rules of Fourier transforms: the transformed dims are whole, the others free.

    _fft_r2c(x, [1])     "d0 d1! -> d0 n1!"      linear in {a}

A transform mixes all of a dim; with the batch split, each rank transforms its own rows.
"""

from __future__ import annotations

import math

import torch

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import make, names, resolve_dims, retarget
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule


def _transform(call: OpCall) -> Rule:
    rank = len(call.operands[0].shape)
    whole = resolve_dims(call.args[1], rank) if call.args[1] else ()
    before = names(rank, whole)
    after = [f"n{d}!" if d in whole else f for d, f in enumerate(before)]
    text = f"{' '.join(before)} -> {' '.join(after)}"
    return make(call, text, linear=((0,),), localize=_nothing)


def _nothing(call: OpCall, local: Local) -> OpCall:
    """The libraries refuse to transform no rows at all."""
    shape, meta = local.result_shape(), call.results[0]
    if math.prod(local.operand_shape(0)) or meta is None or math.prod(meta.shape) == 0:
        return call
    target = torch.ops.aten.new_zeros.default
    return retarget(call, target, call.args[0], list(shape), dtype=meta.dtype)


RULES: dict[str, Builder] = {
    "aten._fft_r2c.default": _transform,
    "aten._fft_c2c.default": _transform,
    "aten._fft_c2r.default": _transform,
}
