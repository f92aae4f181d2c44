"""Rules of the project's random ops: each rank makes the numbers of the elements that it holds.

    dropout            "... -> ..., ..."        localised: which global elements the rank holds
    dropout_backward   "..., ... -> ..."        linear in {grad}
    random_uniform     "-> d0 d1"               localised; no operand is needed to split it

Invariants: a localizer passes the global shape and the global intervals of each dim, so a number
does not depend on the placement. A pending sum is reduced before dropout: the mask is a result too,
and is no sum.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.ops.random import encode_pieces
from dtensor.sharding.rules.build import make, names, pattern
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule


def _sized(call: OpCall) -> Rule:
    meta = call.results[0]
    assert meta is not None
    return make(call, f"-> {' '.join(names(len(meta.shape)))}", localize=_local_size)


def _local_size(call: OpCall, local: Local) -> OpCall:
    return _placed(call.with_arg(0, list(local.result_shape())), local)


def _placed(call: OpCall, local: Local) -> OpCall:
    """Tells the op the global shape and what the rank holds of it, unless that is all."""
    meta = call.results[0]
    assert meta is not None
    if local.result_shape() == meta.shape:
        return call
    pieces = [local.result_intervals(0, dim) for dim in range(len(meta.shape))]
    where = (("shape", list(meta.shape)), ("pieces", encode_pieces(pieces)))
    return replace(call, kwargs=(*call.kwargs, *where))


RULES: dict[str, Builder] = {
    "dt.dropout.default": pattern("... -> ..., ...", localize=_placed),
    "dt.dropout_backward.default": pattern("..., ... -> ...", linear=((0,),)),
    "dt.random_integers.default": _sized,
    "dt.random_normal.default": _sized,
    "dt.random_uniform.default": _sized,
}
