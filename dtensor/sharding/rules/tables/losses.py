"""Rules of losses that are one op.

    huber_loss(x, y, mean)              "..., ... -> "            local sum / global count
    huber_loss_backward(g, x, y, mean)  ", ..., ... -> ..."       the same count
    nll_loss_forward(x, t, w, sum)      "n c!, n, c! -> , "
    balance_sums(p, ids, mask, d, m)    "(d m r) e!, (d m r) k!, (d m r) -> m s! e!"

Invariant: a mean divides by the global count, forward and backward. The mean of nll_loss has no
rule: it divides by a sum over the targets that are not ignored, and torch decomposes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dtensor.sharding.ops.load_balance  # noqa: F401  # pyright: ignore[reportUnusedImport] - ops
from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.rules.build import Groups, make, num_pairs, pattern, retarget
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous, is_split, positional, unless_empty

_NONE, _MEAN, _SUM = 0, 1, 2
_BACKWARD: Groups = ((0,),)


def _mean_localizer(reduction_at: int, count: int, function: Callable[..., Any]) -> Localizer:
    """Return a localizer of a mean: ``function`` calls the op for the sum and divides by ``count``.
    If nothing is split, the call stays as it is. ``reduction_at``: the position of the argument
    that states the reduction."""

    def localize(call: OpCall, local: Local) -> OpCall:
        if not is_split(call, local):
            return call
        args = positional(call)
        args[reduction_at] = _SUM
        return retarget(call, function, call.target, count, *args)

    return localize


def elementwise_loss(
    reduction_at: int, *, backward: bool = False, linear: Groups = _BACKWARD
) -> Builder:
    """Return a builder for a loss of tensors that broadcast against each other, or for its
    backward, whose first operand is the gradient. ``linear``: used only for a backward."""
    function_of_mean = local_forms.loss_backward_over if backward else local_forms.loss_over

    def build(call: OpCall) -> Rule:
        """Return the rule ``..., ... -> `` (backward: ``, ..., ... -> ...``); the loss is a scalar
        unless the call reduces nothing."""
        reduction = positional(call)[reduction_at]
        loss = "..." if reduction == _NONE else ""
        inputs = ", ".join("..." for _ in call.operands[int(backward) :])
        text = f"{loss}, {inputs} -> ..." if backward else f"{inputs} -> {loss}"
        localize = _mean_localizer(reduction_at, num_pairs(call, int(backward)), function_of_mean)
        groups = linear if backward else ()
        return make(call, text, linear=groups, localize=localize if reduction == _MEAN else None)

    return build


def _rows(shape: tuple[int, ...]) -> str:
    """Return the term of rows n of classes c, or of a single row."""
    return "n c!" if len(shape) > 1 else "c!"


def _target(shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Return the term of the target: a class for each row, or a number for each class. The class of
    a single row may have the shape [] or [1]."""
    if len(target) == len(shape):
        return "1" if target == (1,) else _rows(shape)
    return "n" if target else ""


def _row_loss(reduction_at: int, *, two_results: bool = False) -> Builder:
    """Return a builder for (x[n c], target[n] or [n c], weight[c]?) -> loss. ``two_results``: the
    op also returns a tensor of the shape of x."""

    def build(call: OpCall) -> Rule:
        """Return the rule ``n c!, n, c! -> `` (``-> n`` if the call reduces nothing)."""
        x = _rows(call.operands[0].shape)
        n = "n" if "n" in x else ""
        left = [x, _target(call.operands[0].shape, call.operands[1].shape)]
        left += ["c!" for _ in call.operands[2:]]
        right = [x] if two_results else []
        reduction = positional(call)[reduction_at]
        if reduction == _NONE:
            return make(call, f"{', '.join(left)} -> {', '.join([n, *right])}")
        count = call.operands[0].shape[0] if n else 1
        function_of_mean = local_forms.first_over if two_results else local_forms.loss_over
        localize = (
            _mean_localizer(reduction_at, count, function_of_mean) if reduction == _MEAN else None
        )
        text = f"{', '.join(left)} -> {', '.join(['', *right])}"
        return make(call, text, localize=unless_empty(localize))

    return build


def _row_loss_backward(reduction_at: int) -> Builder:
    """Return a builder for (grad, x[n c], target, weight[c]? or is_target[n c]) -> [n c]."""

    def build(call: OpCall) -> Rule:
        """Return the rule ``n, n c!, n, c! -> n c!``. A mean or sum has a scalar gradient."""
        x = _rows(call.operands[1].shape)
        n = "n" if "n" in x else ""
        left = [n if call.operands[0].shape else "", x]
        left.append(_target(call.operands[1].shape, call.operands[2].shape))
        rank = len(x.split())
        left += [x if rank == len(m.shape) and rank > 1 else "c!" for m in call.operands[3:]]
        reduction = positional(call)[reduction_at]
        count = call.operands[1].shape[0] if n else 1
        mean_localizer = _mean_localizer(reduction_at, count, local_forms.loss_backward_over)
        localize = unless_empty(mean_localizer if reduction == _MEAN else None)
        return make(call, f"{', '.join(left)} -> {x}", linear=_BACKWARD, localize=localize)

    return build


def _points(shape: tuple[int, ...]) -> tuple[str, str]:
    """Return the term of the logits, and of the targets, which lack the dim of the classes."""
    if len(shape) == 1:
        return "c!", ""
    points = [f"d{i}" for i in range(len(shape) - 2)]
    return " ".join(["n", "c!", *points]), " ".join(["n", *points])


def _nll(call: OpCall) -> Rule:
    """Return the rule of nll_loss. Raises NoRule for its mean over several rows."""
    reduction = call.arg(3, "reduction", _MEAN)
    x, target = _points(call.operands[0].shape)
    if reduction == _MEAN and target:
        raise no_rule(call, "its mean divides by a sum over the targets; torch decomposes it")
    weight = ["c!"] if len(call.operands) > 2 else []
    left = ", ".join([x, target, *weight])
    if reduction == _NONE:  # then the second result, the total weight, is 0
        text = f"{left} -> {target}, {' '.join(f'~{f}' for f in target.split())}"
    else:
        text = f"{left} -> , "
    return make(call, text, localize=unless_empty())


def _nll_backward(call: OpCall) -> Rule:
    """Return the rule of (grad, x, target, weight?, total weight) -> gradient of x."""
    x, target = _points(call.operands[1].shape)
    grad = target if call.operands[0].shape else ""
    weight = ["c!"] if len(call.operands) > 4 else []
    left = ", ".join([grad, x, target, *weight, ""])
    localize = unless_empty(contiguous())
    return make(call, f"{left} -> {x}", linear=_BACKWARD, localize=localize)


# -- the load-balancing loss -----------------------------------------------------------------------


def _balance_sums(call: OpCall, *, backward: bool = False) -> Rule:
    """Return the rule of (probabilities, ids, mask?) -> sums, or of (grad, mask?) -> gradient of
    the probabilities, whose rows are d ranks' parts of m microbatches."""
    ranks, num = positional(call)[-2:]
    sizes = {name: size for name, size in (("d", ranks), ("m", num)) if size > 1}
    rows, experts = f"({' '.join([*sizes, 'r'])})", "e" if backward else "e!"
    sums = f"{'m' if num > 1 else '1'} s! {experts}"
    mask = [rows] if len(call.operands) > (1 if backward else 2) else []
    left = [sums, *mask] if backward else [f"{rows} {experts}", f"{rows} k!", *mask]
    num_rows = (call.result if backward else call.operands[0]).shape[0]
    return make(
        call,
        f"{', '.join(left)} -> {f'{rows} {experts}' if backward else sums}",
        linear=((0,),) if backward else (),
        localize=partial(_local_balance_sums, backward=backward),
        sizes={**sizes, "r": num_rows // (ranks * num)},
    )


def _local_balance_sums(call: OpCall, local: Local, *, backward: bool) -> OpCall:
    """Give the call the numbers of rows, ranks and microbatches that this rank holds."""
    *args, ranks, num = positional(call)
    num_rows = (call.result if backward else call.operands[0]).shape[0]
    intervals = (local.result_intervals if backward else local.operand_intervals)(0, 0)
    span = num_rows // ranks  # rows of one rank
    held = {i for lo, hi in intervals for i in range(lo // span, -(-hi // span))}
    if backward:
        args[2] = local.result_shape()[0]
    if num > 1:
        num = (local.operand_shape(0) if backward else local.result_shape())[0]
    return retarget(call, call.target, *args, len(held), num)


RULES: dict[str, Builder] = {
    "dt.balance_sums.default": _balance_sums,
    "dt.balance_sums_grad.default": partial(_balance_sums, backward=True),
    "dt.balance_loss.default": pattern("m s! e -> "),
    "dt.balance_loss_grad.default": pattern(", m s! e -> m s! e", linear=((0,),)),
    "aten.smooth_l1_loss.default": elementwise_loss(2),
    "aten.smooth_l1_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.huber_loss.default": elementwise_loss(2),
    "aten.huber_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.soft_margin_loss.default": elementwise_loss(2),
    "aten.soft_margin_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.binary_cross_entropy.default": elementwise_loss(3),
    "aten.binary_cross_entropy_backward.default": elementwise_loss(4, backward=True),
    "aten.binary_cross_entropy_with_logits.default": elementwise_loss(4),
    "aten.multi_margin_loss.default": _row_loss(5),
    "aten.multi_margin_loss_backward.default": _row_loss_backward(6),
    "aten.multilabel_margin_loss_forward.default": _row_loss(2, two_results=True),
    "aten.multilabel_margin_loss_backward.default": _row_loss_backward(3),
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss2d_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
}
