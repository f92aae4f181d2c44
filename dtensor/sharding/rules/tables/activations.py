"""Rules of activations that pointwise.py does not have, and of their backwards.

    celu                  "... -> ..."
    hardswish_backward    "..., ... -> ..."          linear in {grad}
    glu                   "a (q! h) b -> a h b"      its halves split together

Invariants: as in pointwise.py.
"""

from __future__ import annotations

from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import Groups, make, names
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.pointwise import first, nowhere, pointwise

_LINEAR: Groups = ((0,),)


def _several(linear: Groups) -> Builder:
    """All results have the operands' common shape."""

    def build(call: OpCall) -> Rule:
        left = ", ".join("..." for _ in call.operands)
        right = ", ".join("..." for _ in call.results)
        return make(call, f"{left} -> {right}", linear=linear)

    return build


def _halves(shape: tuple[int, ...], dim: int) -> tuple[str, str]:
    """The dims of what is gated, and of one half."""
    whole, half = names(len(shape)), names(len(shape))
    at = dim % len(shape)
    whole[at], half[at] = "(q! h)", "h"
    return " ".join(whole), " ".join(half)


def _glu(call: OpCall) -> Rule:
    whole, half = _halves(call.operands[0].shape, call.arg(1, "dim", -1))
    return make(call, f"{whole} -> {half}", sizes={"q": 2})


def _glu_backward(call: OpCall) -> Rule:
    whole, half = _halves(call.operands[1].shape, call.args[2])
    return make(call, f"{half}, {whole} -> {whole}", linear=_LINEAR, sizes={"q": 2})


_POINTWISE = {
    nowhere: "celu selu hardswish hardsigmoid mish softshrink hardshrink threshold _prelu_kernel",
    first: """hardswish_backward hardsigmoid_backward mish_backward softshrink_backward
        hardshrink_backward log_sigmoid_backward native_dropout_backward""",
}

RULES: dict[str, Builder] = {
    "aten.glu.default": _glu,
    "aten.glu_backward.default": _glu_backward,
    "aten.log_sigmoid_forward.default": _several(()),
    "aten._prelu_kernel_backward.default": _several(_LINEAR),
}
for _linearity, _ops in _POINTWISE.items():
    RULES.update({f"aten.{name}.default": pointwise(_linearity) for name in _ops.split()})
