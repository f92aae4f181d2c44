"""Rules of ops that make tensors from sizes, random ones too: every rank makes its own part.

    arange(8)          "-> d0"            localised: the positions that the rank holds
    full([8,16], 0)    "-> d0 d1"         localised: the shard's sizes
    tril               "... m n -> ... m n"   localised: where the rank's rows and columns are
    random_uniform     "-> d0 d1"         localised: which global elements the rank holds
    dropout            "... -> ..., ..."  likewise; its backward is linear in {grad}
    dropout_add        "..., ... -> ..., ..."  of a sum's first term

Invariants: no operand is needed to split a result. Random ops are the project's: a localizer passes
the global shape and the global intervals of each dim, so a number does not depend on the placement.
A pending sum is reduced before dropout: the mask is a result too, and is no sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.ops.random import encode_pieces
from dtensor.sharding.rules.build import make, names, pattern, retarget, sized, whole_dims
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import length

aten: Any = torch.ops.aten


def _sized(localize: Localizer) -> Builder:
    """No tensor in: of the result every dim splits."""
    return lambda call: make(
        call, f"-> {' '.join(names(len(call.result.shape)))}", localize=localize
    )


def _like(localize: Localizer) -> Builder:
    """new_zeros(x, sizes): x gives dtype and device; it may be split where the shapes agree."""

    def build(call: OpCall) -> Rule:
        before, after = call.operands[0].shape, call.result.shape
        source = " ".join(names(len(before))) if before == after else whole_dims("x", len(before))
        linear = ((0,),) if call.name == "aten.new_zeros.default" else ()
        text = f"{source} -> {' '.join(names(len(after)))}"
        return make(call, text, linear=linear, localize=localize)

    return build


def _made_by(target: Callable[..., Any], num_tensors: int = 0) -> Localizer:
    """The op that ranks call in place of one whose strides, or lack of memory, are not theirs."""

    def localize(call: OpCall, local: Local) -> OpCall:
        kwargs = {k: v for k, v in call.kwargs if k in ("dtype", "device")}
        args = (*call.args[:num_tensors], list(local.result_shape()))
        return retarget(call, target, *args, **kwargs)

    return localize


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
        pieces = local.result_intervals(0, 0)
        if length(pieces) == call.result.shape[0]:
            return call
        how = dict(dtype=call.result.dtype, device=dict(call.kwargs).get("device"))
        return retarget(call, local_forms.arange_pieces, pieces, start, step, **how)

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
        local_forms.triangle,
        call.args[0],
        call.target is torch.ops.aten.triu.default,
        call.arg(1, "diagonal", 0),
        local.operand_intervals(0, rank - 2),
        local.operand_intervals(0, rank - 1),
    )


def _local_random(call: OpCall, local: Local) -> OpCall:
    return _placed(call.with_arg(0, list(local.result_shape())), local)


def _placed(call: OpCall, local: Local) -> OpCall:
    """Tells the op the global shape and what the rank holds of it, unless that is all."""
    shape = call.result.shape
    if local.result_shape() == shape:
        return call
    pieces = [local.result_intervals(0, dim) for dim in range(len(shape))]
    where = (("shape", list(shape)), ("pieces", encode_pieces(pieces)))
    return replace(call, kwargs=(*call.kwargs, *where))


_FULL, _NEW = _sized(sized(0)), _like(sized(1))
_EMPTY = _sized(_made_by(aten.empty.memory_format))  # undefined values: strides are the rank's own
_RANDOM = _sized(_local_random)

RULES: dict[str, Builder] = {
    "aten.full.default": _FULL,
    "aten.zeros.default": _FULL,
    "aten.ones.default": _FULL,
    "aten.empty.memory_format": _FULL,
    "aten.empty_strided.default": _EMPTY,
    "aten.empty_permuted.default": _EMPTY,
    # zeros without memory, as autograd makes them: ranks make them of memory
    "aten._efficientzerotensor.default": _sized(_made_by(aten.zeros.default)),
    "aten.new_empty_strided.default": _like(_made_by(aten.new_empty.default, 1)),
    "aten.new_zeros.default": _NEW,
    "aten.new_ones.default": _NEW,
    "aten.new_full.default": _NEW,
    "aten.new_empty.default": _NEW,
    "aten.scalar_tensor.default": pattern("-> "),
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "dt.dropout.default": pattern("... -> ..., ...", localize=_placed),
    "dt.dropout_add.default": pattern("..., ... -> ..., ...", localize=_placed),
    "dt.dropout_backward.default": pattern("..., ... -> ...", linear=((0,),)),
    "dt.random_integers.default": _RANDOM,
    "dt.random_normal.default": _RANDOM,
    "dt.random_uniform.default": _RANDOM,
}
