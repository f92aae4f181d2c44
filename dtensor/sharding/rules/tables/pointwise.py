"""Rules of elementwise ops, with broadcasting: "..., ... -> ...".

    relu     "... -> ..."              add      "..., ... -> ..."     linear in {a, b}
    mul      "..., ... -> ..."         linear in {a}, {b}

The rules differ only in the operands in which the ops are linear. None has a localizer. ATen's
random ops have no rule, because their numbers would depend on the placement (see create.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import Groups, full_names, joint_group, make, with_kind
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule

Linearity = Callable[[OpCall], Groups]


def pointwise(linearity: Linearity) -> Builder:
    """Return a builder for an elementwise op. ``linearity`` returns its linear groups."""

    def build(call: OpCall) -> Rule:
        left = ", ".join("..." for _ in call.operands)
        right = ", ".join("..." for _ in call.results)
        return make(call, f"{left} -> {right}", linear=linearity(call))

    return build


def linear_in_none(call: OpCall) -> Groups:
    """Return no linear groups: the op is not linear in any operand."""
    return ()


def linear_in_each(call: OpCall) -> Groups:
    """Return one linear group for each operand: the op is a product of its tensors."""
    return tuple((i,) for i in range(len(call.operands)))


def linear_jointly(*arguments: tuple[int, str]) -> Linearity:
    """Return a function that returns one linear group of these arguments, by position and name; no
    group for a call in which one of them is a literal other than 0."""
    return lambda call: joint_group(call, *arguments)


first = linear_jointly(
    (0, "self")
)  # copies, quotients, and backwards, whose operand 0 is the gradient
first_two: Linearity = linear_jointly((0, "self"), (1, "other"))
branches: Linearity = linear_jointly((1, "self"), (2, "other"))
filled: Linearity = linear_jointly((0, "self"), (2, "value"))
source: Linearity = linear_jointly((1, "src"))
addend_and_quotient = linear_jointly((0, "self"), (1, "tensor1"))  # addcdiv: self + value * a / b


def addend_and_either(call: OpCall) -> Groups:
    """Return the linear groups of addcmul, self + value * a * b: in (self, a) and in (self, b)."""
    return ((0, 1), (0, 2))


def _cast(call: OpCall) -> Rule:
    """Return the rule of _to_copy; its kind is "cast" if it changes the dtype."""
    (result,) = call.results
    same = result is None or result.dtype == call.operands[0].dtype
    return replace(pointwise(first)(call), kind="compute" if same else "cast")


_LINEARITY: dict[Linearity, str] = {
    first_two: """
        add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar""",
    linear_in_each: "mul.Tensor mul.Scalar",
    first: """
        div.Tensor div.Scalar neg clone detach alias lift_fresh lift_fresh_copy positive
        contiguous zeros_like gelu_backward silu_backward threshold_backward tanh_backward
        sigmoid_backward leaky_relu_backward hardtanh_backward elu_backward softplus_backward""",
    branches: "where.self where.ScalarSelf where.ScalarOther where.Scalar",
    filled: "masked_fill.Scalar masked_fill.Tensor",
    source: "copy",
    addend_and_quotient: "addcdiv",
    addend_and_either: "addcmul",
    linear_in_none: """
        pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar sqrt rsqrt exp exp2 expm1 log log2 log10
        log1p sin cos tan tanh sigmoid relu gelu silu leaky_relu hardtanh elu softplus abs sign
        sgn reciprocal square erf floor ceil round trunc isnan isinf nan_to_num atan2 clamp
        clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor maximum minimum
        div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar remainder.Tensor
        remainder.Scalar fmod.Tensor fmod.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar
        lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
        logical_and logical_or logical_xor logical_not bitwise_and.Tensor bitwise_and.Scalar
        bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not
        ones_like full_like empty_like""",
}

RULES: dict[str, Builder] = {
    name: pointwise(linearity) for linearity, ops in _LINEARITY.items() for name in full_names(ops)
}
RULES["aten._to_copy.default"] = _cast
RULES["dt.annotate.default"] = RULES["dt.annotate_backward.default"] = with_kind(
    "mark", pointwise(first)
)
