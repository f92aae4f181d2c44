"""Cross entropy as ops with short rules, for class targets without weights or label smoothing.

    stats = ce_stats(logits[n v], target[n])           [n 3]    v split: reduced with "softmax"
    loss = ce_loss(stats, target)                      [n]      0 for an ignored target
    count = ce_count(target)                           []       the divisor of a mean
    d = ce_backward(grad[n], logits, stats, target)    [n v]    nothing is reduced

The statistics of a row are the maximum m, the sum s of exp(logit - m) and the target's logit t; its
loss is log(s) + m - t. Statistics of the parts of a vocabulary reduce to the statistics of all
(Milakov and Gimelshein 2018, arXiv:1805.02867). `cross_entropy_rows` is the forward as one autograd
op, which capture decomposes. A target out of range raises IndexError; this check waits for a GPU
unless the program has checked the target on the device before.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype, rest_of
from dtensor.sharding.local.in_range import was_checked
from dtensor.sharding.ops.library import LIBRARY, define, local_index

PIECE_ELEMENTS = 1 << 17
"""The number of logits that a CPU processes at a time, so that temporaries stay in the cache."""


def _row_pieces(logits: Tensor) -> list[slice]:
    """Return the slices of rows to process one after another; on a GPU, one slice."""
    n, v = logits.shape
    rows = max(1, PIECE_ELEMENTS // max(1, v)) if logits.device.type == "cpu" else max(1, n)
    return [slice(i, min(i + rows, n)) for i in range(0, n, rows)]


def _empty_rows(logits: Tensor, *more: int) -> Tensor:
    shape = (logits.shape[0], *more)
    return logits.new_empty(shape, dtype=accumulation_dtype(logits.dtype))


def _ce_stats(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: Sequence[int] = ()
) -> Tensor:
    """Return the statistics [n, 3] of each row over the local columns: the maximum m, the sum of
    exp(logit - m), and the target's logit, 0 if another rank has it. ``vocab``: the intervals of
    the vocabulary that the columns are; () means all."""
    is_local, local = local_index(target, vocab, logits.shape[1])
    is_local &= target != ignore_index
    stats = _empty_rows(logits, 3)
    if logits.shape[1] == 0:
        return rest_of(stats, "softmax")
    buffer = stats.new_empty(0)
    for rows in _row_pieces(logits):
        piece = logits[rows]
        maximum = piece.amax(1, keepdim=True).to(stats.dtype)
        buffer = torch.sub(piece, maximum, out=buffer.resize_(piece.shape))
        total = buffer.exp_().sum(1, keepdim=True)
        # all logits of this part of the vocabulary may be -inf, and -inf - -inf is NaN
        total.masked_fill_(maximum == -math.inf, 0)
        target_logit = piece.gather(1, torch.where(is_local[rows], local[rows], 0)[:, None])
        target_logit = torch.where(is_local[rows, None], target_logit, 0).to(stats.dtype)
        torch.cat((maximum, total, target_logit), 1, out=stats[rows])
    return stats


def _ce_loss(stats: Tensor, target: Tensor, ignore_index: int, num_classes: int = -1) -> Tensor:
    """Return the loss of each row. Raises IndexError for a target out of range."""
    maximum, total, target_logit = stats.unbind(1)
    counts = target != ignore_index
    loss = torch.where(counts, total.log() + maximum - target_logit, 0)
    if num_classes < 0 or was_checked(target, (num_classes, 0, ignore_index)):
        return loss
    wrong = counts & ((target < 0) | (target >= num_classes))
    if bool(wrong.any()):
        raise IndexError(
            f"Target {int(target[wrong][0])} is out of bounds for {num_classes} classes "
            f"(ignore_index={ignore_index})."
        )
    return loss


def _ce_count(target: Tensor, ignore_index: int) -> Tensor:
    return (target != ignore_index).sum().to(torch.float32)


def _ce_backward(
    grad: Tensor,
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    ignore_index: int,
    vocab: Sequence[int] = (),
) -> Tensor:
    """Return grad * (softmax(logits) - one_hot(target)), 0 for ignored rows."""
    is_ignored = (target == ignore_index)[:, None]
    is_local, local = local_index(target, vocab, logits.shape[1])
    wide = torch.promote_types(logits.dtype, stats.dtype)
    minus_one_hot = torch.where(is_local, -1.0, 0.0).to(wide)[:, None]
    local = torch.where(is_local, local, 0)[:, None]
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    maximum, total, _ = stats.unbind(1)
    buffer = stats.new_empty(0, dtype=wide)
    for rows in _row_pieces(logits) if logits.shape[1] else ():
        gradient = out[rows] if out.dtype == wide else buffer.resize_(out[rows].shape)
        torch.sub(logits[rows], maximum[rows, None], out=gradient)
        gradient.exp_().div_(total[rows, None]).scatter_add_(1, local[rows], minus_one_hot[rows])
        # masked_fill_, not a product with 0: an ignored row has zero gradient even if grad is
        # infinite, as in a mean over no rows
        gradient.mul_(grad[rows, None]).masked_fill_(is_ignored[rows], 0)
        if out.dtype != wide:
            out[rows] = gradient
    return out


_CE_SCHEMAS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "ce_stats(Tensor logits, Tensor target, int ignore_index, int[] vocab=[]) -> Tensor",
        _ce_stats,
        lambda logits, *_: _empty_rows(logits, 3),
    ),
    (
        "ce_loss(Tensor stats, Tensor target, int ignore_index, int num_classes=-1) -> Tensor",
        _ce_loss,
        lambda stats, *_: stats.new_empty(stats.shape[:1]),
    ),
    (
        "ce_count(Tensor target, int ignore_index) -> Tensor",
        _ce_count,
        lambda target, ignore_index: target.new_empty((), dtype=torch.float32),
    ),
    (
        "ce_backward(Tensor grad, Tensor logits, Tensor stats, Tensor target, int ignore_index, "
        "int[] vocab=[]) -> Tensor",
        _ce_backward,
        lambda grad, logits, *_: logits.new_empty(logits.shape),
    ),
)
for _schema, _run, _fake in _CE_SCHEMAS:
    define(_schema, _run, _fake)


def _cross_entropy_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    stats = _ce_stats(logits, target, ignore_index)
    return _ce_loss(stats, target, ignore_index, logits.shape[1]), stats


# The forward as one autograd op, which capture decomposes in the joint graph.
define(
    "cross_entropy_rows(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    _cross_entropy_rows,
    lambda logits, *_: (_empty_rows(logits), _empty_rows(logits, 3)),
)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the tensors of the backward; the statistics are not differentiable."""
    logits, target, ctx.ignore_index = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, stats, target)


def _rows_grad(ctx: Any, grad: Tensor | None, _stats: None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None
    logits, stats, target = ctx.saved_tensors
    return torch.ops.dt.ce_backward(grad, logits, stats, target, ctx.ignore_index), None, None


torch.library.register_autograd(
    "dt::cross_entropy_rows", _rows_grad, setup_context=_rows_setup, lib=LIBRARY
)
