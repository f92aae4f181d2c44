"""Rules of convolutions.

    convolution    "n (g i) x0! x1!, (g o) i k0! k1!, (g o) -> n (g o) y0! y1!"
    transposed     "n (g i) x0! x1!, (g i) o k0! k1!, (g o) -> n (g o) y0! y1!"

n: images; g: groups; i, o: input and output channels of a group. i is contracted, and the bias is
an addend: it is pending if i is split. A dim of the planes is whole unless the kernel is one point
wide there. The localizer passes the rank's number of groups. The gradient of the bias is the same
for every part of i (``~i``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import make, retarget
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import positional


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of the tensors of a convolution."""

    x: str
    weight: str
    y: str
    channels: str  # of y, and the term of the bias


def _terms(
    call: OpCall, x: tuple[int, ...], weight: tuple[int, ...], arguments: list[Any]
) -> _Terms:
    """Return the terms for these shapes of x and the weight. ``arguments``: stride, padding,
    dilation, transposed, output_padding, groups."""
    stride, padding, _, transposed, output_padding, groups = arguments
    if len(x) != len(weight):
        raise no_rule(call, "it has no batch dim")
    i, o = ("i", "o") if groups == 1 else ("(g i)", "(g o)")
    source: list[str] = []
    kernel: list[str] = []
    result: list[str] = []
    for d, width in enumerate(weight[2:]):
        # A kernel of one point with stride 1 maps each position to itself, so the dim may be split.
        is_point = width == 1 and _setting_of(stride, d) == 1 and _setting_of(padding, d) == 0
        if is_point and _setting_of(output_padding, d) == 0:
            source, kernel, result = [*source, f"s{d}"], [*kernel, "1"], [*result, f"s{d}"]
        else:
            source, kernel = [*source, f"x{d}!"], [*kernel, f"k{d}!"]
            result.append(f"y{d}!")
    # The weight is [o, i / groups, ...], and [i, o / groups, ...] if transposed.
    first, second = (i, "o") if transposed else (o, "i")
    return _Terms(
        f"n {i} {' '.join(source)}",
        f"{first} {second} {' '.join(kernel)}",
        f"n {o} {' '.join(result)}",
        o,
    )


def _setting_of(setting: Any, dim: int) -> int:
    """Return the value for ``dim`` of a setting that lists one value for each dim or for all."""
    return setting[dim] if len(setting) > 1 else setting[0]


def _flops(
    x: tuple[int, ...], weight: tuple[int, ...], y: tuple[int, ...], transposed: bool
) -> int:
    return 2 * math.prod(x if transposed else y) * math.prod(weight[1:])


def _convolution(call: OpCall) -> Rule:
    """Return the rule "n (g i) x, (g o) i k, (g o) -> n (g o) y" of g groups. The bias is added to
    a sum over i, so it must be pending if i is split."""
    args = positional(call)
    x, weight = call.operands[0].shape, call.operands[1].shape
    terms = _terms(call, x, weight, args[3:])
    biased = args[2] is not None
    left = [terms.x, terms.weight, *([terms.channels] if biased else [])]
    rule = make(
        call,
        f"{', '.join(left)} -> {terms.y}",
        linear=((0, 2), (1, 2)) if biased else ((0,), (1,)),
        addends=(2,) if biased else (),
        localize=_local_groups,
        sizes={"g": args[8]},
    )
    return replace(rule, flops=_flops(x, weight, call.result.shape, args[6]))


def _local_groups(call: OpCall, local: Local) -> OpCall:
    """Pass the rank's number of groups, or replace a convolution without elements."""
    args = positional(call)
    x, weight, y = local.operand_shape(0), local.operand_shape(1), local.result_shape()
    if not math.prod(x) * math.prod(weight):
        return retarget(call, local_forms.empty_convolution, args[0], args[2], list(y))
    args[8] = _groups(x, weight, y, args[6])
    return retarget(call, call.target, *args)


def _groups(x: tuple[int, ...], weight: tuple[int, ...], y: tuple[int, ...], swapped: bool) -> int:
    """Return how many groups a rank has: its channels divided by the channels of a group.
    ``swapped``: the convolution is transposed, so dim 1 of the weight is output channels."""
    return (y if swapped else x)[1] // weight[1]


def _convolution_backward(call: OpCall) -> Rule:
    """Return the rule of the gradients of x, the weight and the bias."""
    args = positional(call)
    x, weight = call.operands[1].shape, call.operands[2].shape
    terms = _terms(call, x, weight, args[4:10])
    rule = make(
        call,
        f"{terms.y}, {terms.x}, {terms.weight} -> {terms.x}, {terms.weight}, {terms.channels} ~i",
        linear=((0,),),
        localize=_local_backward,
        sizes={"g": args[9]},
    )
    num = sum(meta is not None for meta in call.results[:2])
    return replace(rule, flops=num * _flops(x, weight, call.operands[0].shape, args[7]))


def _local_backward(call: OpCall, local: Local) -> OpCall:
    """Pass the rank's groups and bias size, or replace a backward without elements."""
    args = positional(call)
    y, x, weight = (local.operand_shape(i) for i in range(3))
    if not math.prod(y) * math.prod(x) * math.prod(weight):
        shapes = [None if m is None else local.result_shape(i) for i, m in enumerate(call.results)]
        return retarget(call, local_forms.empty_convolution_backward, args[0], shapes)
    if args[3] is not None:
        args[3] = [y[1]]
    args[9] = _groups(x, weight, y, args[7])
    return retarget(call, call.target, *args)


RULES: dict[str, Builder] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}
