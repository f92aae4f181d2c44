"""Rules of ops that create tensors, random tensors too: every rank creates its shard.

    arange(8)          "-> d0"              the localizer passes the rank's global positions
    full([8,16], 0)    "-> d0 d1"           the shard's sizes
    tril               "... m n -> ... m n" the rank's global rows and columns
    random_uniform     "-> d0 d1"           the global shape, and the rank's part of it
    dropout            "... -> ..., ..."    the same; its backward is linear in {grad}

The numbers of random ops (ops/random.py) do not depend on the placement. Dropout is not linear: a
pending sum is reduced first, because the mask, its second result, is not a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.ops.random import encode_pieces
from dtensor.sharding.rules.build import (
    dim_names,
    local_sizes,
    make,
    pattern,
    retarget,
    sized_call,
)
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import length

aten: Any = torch.ops.aten


def _creation_builder(localize: Localizer) -> Builder:
    """Return a builder for an op without operands, whose result splits in every dim."""
    return lambda call: make(
        call, f"-> {' '.join(dim_names(len(call.result.shape)))}", localize=localize
    )


def _like_builder(localize: Localizer) -> Builder:
    """Return a builder for ``new_zeros(x, sizes)``: x determines dtype and device. Its dims may be
    split with the dims of the result that have their sizes."""

    def build(call: OpCall) -> Rule:
        before, after = call.operands[0].shape, call.result.shape
        source = [
            f"d{i}" if i < len(after) and after[i] == n else f"x{i}" for i, n in enumerate(before)
        ]
        linear = ((0,),) if call.name == "aten.new_zeros.default" else ()
        same = [f"~{factor}" for factor in source if factor.startswith("x")]
        text = f"{' '.join(source)} -> {' '.join([*dim_names(len(after)), *same])}"
        return make(call, text, linear=linear, localize=localize)

    return build


def _create_with(target: Callable[..., Any], num_tensors: int = 0) -> Localizer:
    """Return a localizer that calls ``target`` with the shard's sizes instead, for ops that state
    strides or create tensors without memory. ``num_tensors``: how many tensors come first."""

    def localize(call: OpCall, local: Local) -> OpCall:
        # strides and other options of the global call do not fit the shard
        kwargs = {k: v for k, v in call.kwargs if k in ("dtype", "device")}
        return sized_call(call, local, num_tensors, target, *call.args[:num_tensors], **kwargs)

    return localize


def _arange(call: OpCall) -> Rule:
    """Return the rule of arange, "-> n". A rank computes start + step * i for the global positions
    i that it holds."""
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
        pieces = local.result_intervals(0, 0)
        if length(pieces) == call.result.shape[0]:
            return call
        options = dict(dtype=call.result.dtype, device=dict(call.kwargs).get("device"))
        return retarget(call, local_forms.arange_pieces, pieces, start, step, **options)

    return make(call, "-> n", localize=localize)


def _triangle_rule(call: OpCall) -> Rule:
    return make(call, "... m n -> ... m n", linear=((0,),), localize=_local_triangle)


def _local_triangle(call: OpCall, local: Local) -> OpCall:
    """Call `local_forms.triangle` if the rows or columns of the matrices are split."""
    shape = call.operands[0].shape
    if local.operand_shape(0)[-2:] == shape[-2:]:
        return call
    rank = len(shape)
    return retarget(
        call,
        local_forms.triangle,
        call.args[0],
        call.target is torch.ops.aten.triu.default,
        call.arg(1, "diagonal", 0),
        local.operand_intervals(0, rank - 2),
        local.operand_intervals(0, rank - 1),
    )


def _local_random(call: OpCall, local: Local) -> OpCall:
    return _with_global_pieces(call.with_arg(0, list(local.result_shape())), local)


def _with_global_pieces(call: OpCall, local: Local) -> OpCall:
    """Pass the global shape, and the global intervals that the rank holds, to a random op. If the
    rank holds everything, the call stays as it is."""
    shape = call.result.shape
    if local.result_shape() == shape:
        return call
    pieces = [local.result_intervals(0, dim) for dim in range(len(shape))]
    extra = (("shape", list(shape)), ("pieces", encode_pieces(pieces)))
    return replace(call, kwargs=(*call.kwargs, *extra))


_FULL, _NEW = _creation_builder(local_sizes(0)), _like_builder(local_sizes(1))
_EMPTY = _creation_builder(_create_with(aten.empty.memory_format))
_RANDOM = _creation_builder(_local_random)

RULES: dict[str, Builder] = {
    "aten.full.default": _FULL,
    "aten.zeros.default": _FULL,
    "aten.ones.default": _FULL,
    "aten.empty.memory_format": _FULL,
    "aten.empty_strided.default": _EMPTY,
    "aten.empty_permuted.default": _EMPTY,
    # autograd's zeros without memory, for which ranks create plain zeros
    "aten._efficientzerotensor.default": _creation_builder(_create_with(aten.zeros.default)),
    "aten.new_empty_strided.default": _like_builder(_create_with(aten.new_empty.default, 1)),
    "aten.new_zeros.default": _NEW,
    "aten.new_ones.default": _NEW,
    "aten.new_full.default": _NEW,
    "aten.new_empty.default": _NEW,
    "aten.scalar_tensor.default": pattern("-> "),
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.tril.default": _triangle_rule,
    "aten.triu.default": _triangle_rule,
    "dt.dropout.default": pattern("... -> ..., ...", localize=_with_global_pieces),
    "dt.dropout_add.default": pattern("..., ... -> ..., ...", localize=_with_global_pieces),
    "dt.dropout_backward.default": pattern("..., ... -> ...", linear=((0,),)),
    "dt.random_integers.default": _RANDOM,
    "dt.random_normal.default": _RANDOM,
    "dt.random_uniform.default": _RANDOM,
}
