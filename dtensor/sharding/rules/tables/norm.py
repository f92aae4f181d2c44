"""Rules of normalisation: the normalised dims are whole, the others split freely.

    layer_norm              "... k0!, k0!, k0! -> ... k0!, ... 1, ... 1"
    layer_norm backward     split rows leave the gradients of weight and bias pending

Not here: a norm over a split dim; written with pow, mean and rsqrt it has one by itself.
"""

from __future__ import annotations

from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import make, operand_index
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.planes import contiguous


def _factors(call: OpCall, position: int) -> tuple[str, str, str]:
    """Rows, normalised dims, and the statistics' dims of size 1, as text."""
    count = len(call.arg(position, "normalized_shape"))
    rank = len(call.operands[0].shape)
    rows = " ".join(f"d{i}" for i in range(rank - count))
    return rows, " ".join(f"k{i}!" for i in range(count)), " ".join("1" for _ in range(count))


def _optional(call: OpCall, *arguments: tuple[int, str]) -> int:
    return sum(operand_index(call, position, name) is not None for position, name in arguments)


def _layer_norm(call: OpCall) -> Rule:
    rows, dims, ones = _factors(call, 1)
    terms = [f"{rows} {dims}"] + [dims] * _optional(call, (2, "weight"), (3, "bias"))
    return make(call, f"{', '.join(terms)} -> {rows} {dims}, {rows} {ones}, {rows} {ones}")


def _layer_norm_backward(call: OpCall) -> Rule:
    rows, dims, ones = _factors(call, 2)
    x = f"{rows} {dims}"
    terms = [x, x, f"{rows} {ones}", f"{rows} {ones}"]
    terms += [dims] * _optional(call, (5, "weight"), (6, "bias"))
    text = f"{', '.join(terms)} -> {x}, {dims}, {dims}"
    # The CPU's kernel reads storage in order, whatever the strides of a shard are.
    return make(call, text, linear=((0,),), localize=contiguous())


def _rms_norm(call: OpCall) -> Rule:
    rows, dims, ones = _factors(call, 1)
    terms = [f"{rows} {dims}"] + [dims] * _optional(call, (2, "weight"))
    return make(call, f"{', '.join(terms)} -> {rows} {dims}, {rows} {ones}")


def _rms_norm_backward(call: OpCall) -> Rule:
    rows, dims, ones = _factors(call, 2)
    x = f"{rows} {dims}"
    terms = [x, x, f"{rows} {ones}"] + [dims] * _optional(call, (4, "weight"))
    return make(call, f"{', '.join(terms)} -> {x}, {dims}", linear=((0,),))


RULES: dict[str, Builder] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}
