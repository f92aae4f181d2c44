"""Rules of ops that make tensors from sizes: every rank makes its own part.

    arange(8)          "-> d0"            localised: the positions that the rank holds
    full([8,16], 0)    "-> d0 d1"         localised: the shard's sizes
    tril               "... m n -> ... m n"   localised: where the rank's rows and columns are

Invariants: no operand is needed to split a result; nothing here is random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dtensor.sharding.local import values
from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import make, names, retarget
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import length


def _rank(call: OpCall) -> int:
    meta = call.results[0]
    assert meta is not None
    return len(meta.shape)


def _sized(call: OpCall) -> Rule:
    return make(call, f"-> {' '.join(names(_rank(call)))}", localize=_local_size)


def _local_size(call: OpCall, local: Local) -> OpCall:
    return call.with_arg(0, list(local.result_shape()))


def _like(call: OpCall) -> Rule:
    """new_zeros(x, sizes): x gives dtype and device; it may be split where the shapes agree."""
    shape = call.operands[0].shape
    result = call.results[0]
    assert result is not None
    alike = shape == result.shape
    source = names(len(shape)) if alike else [f"x{i}!" for i in range(len(shape))]
    text = f"{' '.join(source)} -> {' '.join(names(len(result.shape)))}"
    linear = ((0,),) if call.name == "aten.new_zeros.default" else ()
    return make(call, text, linear=linear, localize=_local_second)


def _local_second(call: OpCall, local: Local) -> OpCall:
    return call.with_arg(1, list(local.result_shape()))


def _strided(call: OpCall) -> Rule:
    """Undefined values: strides are the rank's own affair."""

    def localize(call: OpCall, local: Local) -> OpCall:
        kwargs = {k: v for k, v in call.kwargs if k in ("dtype", "device")}
        target = torch.ops.aten.empty.memory_format
        return retarget(call, target, list(local.result_shape()), **kwargs)

    return make(call, f"-> {' '.join(names(_rank(call)))}", localize=localize)


def _strided_like(call: OpCall) -> Rule:
    rule = _like(call)

    def localize(call: OpCall, local: Local) -> OpCall:
        kwargs = {k: v for k, v in call.kwargs if k in ("dtype", "device")}
        target = torch.ops.aten.new_empty.default
        return retarget(call, target, call.args[0], list(local.result_shape()), **kwargs)

    return replace(rule, localize=localize)


def _zero_tensor(call: OpCall) -> Rule:
    """Zeros without memory, as autograd makes them: ranks make them of memory."""

    def localize(call: OpCall, local: Local) -> OpCall:
        kwargs = {k: v for k, v in call.kwargs if k in ("dtype", "device")}
        target = torch.ops.aten.zeros.default
        return retarget(call, target, list(local.result_shape()), **kwargs)

    return make(call, f"-> {' '.join(names(_rank(call)))}", localize=localize)


def _scalar(call: OpCall) -> Rule:
    return make(call, "-> ")


def _arange(call: OpCall) -> Rule:
    start: Any = 0
    step: Any = 1
    match call.name:
        case "aten.arange.default":
            pass
        case "aten.arange.start":
            start = call.args[0]
        case _:
            start, step = call.args[0], call.arg(2, "step", 1)

    def localize(call: OpCall, local: Local) -> OpCall:
        meta = call.results[0]
        assert meta is not None
        pieces = local.result_intervals(0, 0)
        if length(pieces) == meta.shape[0]:
            return call
        device = dict(call.kwargs).get("device")
        return retarget(
            call, values.arange_pieces, pieces, start, step, dtype=meta.dtype, device=device
        )

    return make(call, "-> n", localize=localize)


def _triangle(call: OpCall) -> Rule:
    return make(call, "... m n -> ... m n", linear=((0,),), localize=_local_triangle)


def _local_triangle(call: OpCall, local: Local) -> OpCall:
    shape = call.operands[0].shape
    if local.operand_shape(0)[-2:] == shape[-2:]:
        return call
    rank = len(shape)
    return retarget(
        call,
        values.triangle,
        call.args[0],
        call.target is torch.ops.aten.triu.default,
        call.arg(1, "diagonal", 0),
        local.operand_intervals(0, rank - 2),
        local.operand_intervals(0, rank - 1),
    )


RULES: dict[str, Builder] = {
    "aten.full.default": _sized,
    "aten.zeros.default": _sized,
    "aten.ones.default": _sized,
    "aten.empty.memory_format": _sized,
    "aten.empty_strided.default": _strided,
    "aten.empty_permuted.default": _strided,
    "aten._efficientzerotensor.default": _zero_tensor,
    "aten.new_empty_strided.default": _strided_like,
    "aten.new_zeros.default": _like,
    "aten.new_ones.default": _like,
    "aten.new_full.default": _like,
    "aten.new_empty.default": _like,
    "aten.scalar_tensor.default": _scalar,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
}
