"""Cross entropy's statistics and gradient, the logits read once each way; in Triton.

    stats = ce_stats(logits[n v], target[n], ignore_index, vocab)      # [n 3]: max, sum, target's
    d = ce_backward(grad[n], logits, stats, target, ignore_index, vocab)

The arguments and results are those of the ops of these names, local tensors, on a GPU; ``vocab``
says which columns of the whole vocabulary are here. A program has a row (of the backward a part of
one) and walks it in blocks; the largest logit of each group of lanes so far scales that group's
sum.

A row of an odd vocabulary begins anywhere: its lanes are laid out from the last boundary of GROUP
elements before it, so that whole groups are read as vectors, and at most GROUP - 1 logits at either
end one by one.

Invariants: computed in float32. What the kernels do not take (float64, no logits at all) the op
computes. Not here: the loss, from n numbers.
"""

# A launch takes numbers for the constants of a kernel.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import rows_of, takes
from dtensor.kernels.launches import CE_BACKWARD, CE_STATS, GROUP, within

_NOWHERE, _IGNORED = -1, -2


def ce_stats(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: Sequence[int] = ()
) -> Tensor:
    """logits[n v], target[n] -> f32[n 3]."""
    if not _fits(logits):
        return torch.ops.dt.ce_stats(logits, target, ignore_index, vocab)
    rows, stride = rows_of(logits)
    num_rows, columns = rows.shape
    stats = torch.empty((num_rows, 3), dtype=torch.float32, device=logits.device)
    target, start, ignored = _local(target, vocab, ignore_index, columns)
    at = CE_STATS.at(num_rows)
    _ce_stats[at.grid](
        rows, target, stats, stride, columns, start, ignored, EDGES=_has_edges(stride, columns),
        **at.options,
    )  # fmt: skip
    return stats


def ce_backward(
    grad: Tensor,
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    ignore_index: int,
    vocab: Sequence[int] = (),
) -> Tensor:
    """grad[n], logits[n v], stats[n 3] of the whole vocabulary, target[n] -> [n v] like logits."""
    if not _fits(logits, grad):
        return torch.ops.dt.ce_backward(grad, logits, stats, target, ignore_index, vocab)
    rows, stride = rows_of(logits)
    num_rows, columns = rows.shape
    d = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    target, start, ignored = _local(target, vocab, ignore_index, columns)
    at = CE_BACKWARD.at(num_rows, columns)
    _ce_backward[at.grid](
        grad, rows, stats.contiguous(), target, d, grad.stride(0), stride, columns, start, ignored,
        at.blocks, EDGES=_has_edges(stride, columns), ALIKE=stride == columns, **at.options,
    )  # fmt: skip
    return d


def _fits(logits: Tensor, *others: Tensor) -> bool:
    if not takes(logits, *others) or logits.numel() == 0:
        return False
    num_rows, columns = logits.shape
    return within(num_rows * CE_BACKWARD.at(1, columns).blocks, columns)


def _has_edges(stride: int, columns: int) -> bool:
    return stride % GROUP != 0 or columns % GROUP != 0


def _local(
    target: Tensor, vocab: Sequence[int], ignore_index: int, columns: int
) -> tuple[Tensor, int, int]:
    """(targets, which of them is column 0 here, which is ignored); no column: not here.

    Columns of several intervals are found beforehand: n numbers.
    """
    target = target.contiguous()
    if len(vocab) <= 2:
        return target, vocab[0] if vocab else 0, ignore_index
    columns_here = torch.full_like(target, _NOWHERE, dtype=torch.int64)
    at = 0
    for start, stop in zip(vocab[::2], vocab[1::2], strict=True):
        columns_here = torch.where(
            (target >= start) & (target < stop), target - start + at, columns_here
        )
        at += stop - start
    return torch.where(target == ignore_index, _IGNORED, columns_here), 0, _IGNORED


# -- in Triton -------------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(x):
    """What is subtracted for a maximum: 0 for that of nothing."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _edge(before, columns, GROUP: tl.constexpr):
    """Lanes of the logits that lie in no whole group: (where, which of the lanes there are).

    Positions count from the boundary ``before`` elements ahead of the row.
    """
    e = tl.arange(0, 2 * GROUP)
    end = before + columns
    last = end // GROUP
    at = tl.where(e < GROUP, e, last * GROUP + e - GROUP)
    first_is_whole = (before == 0) & (end >= GROUP)
    there = tl.where(e < GROUP, (e + first_is_whole * GROUP) < GROUP, (e * 0 + last) > 0)
    return at, there & (at >= before) & (at < end)


@triton.jit
def _ce_stats(
    LOGITS, TARGET, STATS, stride, columns, start, ignored,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * stride // GROUP * GROUP
    before = (row * stride % GROUP).to(tl.int32)
    lane = tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    top = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    for at in range(0, before + columns, BLOCK):
        group = at // GROUP + lane
        whole = (group * GROUP >= before) & ((group + 1) * GROUP <= before + columns)
        x = tl.load(
            LOGITS + (group[:, None] * GROUP + e),
            mask=whole[:, None] & (e >= 0),
            other=float("-inf"),
        ).to(tl.float32)
        now = _larger(top, tl.reduce(x, 1, _larger))
        safe = _finite(now)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
        top = now
    most = tl.reduce(top, 0, _larger)
    if EDGES:
        at, there = _edge(before, columns, GROUP)
        x = tl.load(LOGITS + at, mask=there, other=float("-inf")).to(tl.float32)
        most = _larger(most, tl.reduce(x, 0, _larger))
        safe = _finite(most)
        sum_ = tl.sum(total * tl.exp(top - safe), 0) + tl.sum(tl.exp(x - safe), 0)
    else:
        sum_ = tl.sum(total * tl.exp(top - _finite(most)), 0)
    target = tl.load(TARGET + row).to(tl.int64)
    column = target - start
    here = (target != ignored) & (column >= 0) & (column < columns)
    picked = tl.load(LOGITS + before + tl.where(here, column, 0)).to(tl.float32)
    tl.store(STATS + row * 3, most)
    tl.store(STATS + row * 3 + 1, sum_)
    tl.store(STATS + row * 3 + 2, tl.where(here, picked, 0.0))


@triton.jit
def _ce_backward_some(LOGITS, D, at, inside, grad, most, total, hot, used):
    x = tl.load(LOGITS + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp(x - most) / total
    d = tl.where(used, tl.where(at == hot, p - 1.0, p) * grad, 0.0)
    tl.store(D + at, d.to(D.dtype.element_ty), mask=inside)


@triton.jit
def _ce_backward(
    GRAD, LOGITS, STATS, TARGET, D, grad_stride, stride, columns, start, ignored, blocks,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // blocks
    block = (tl.program_id(0) % blocks).to(tl.int32)
    LOGITS += row * stride // GROUP * GROUP
    before = (row * stride % GROUP).to(tl.int32)
    if ALIKE:
        D += row * stride // GROUP * GROUP
    else:
        D += row * columns - before
    grad = tl.load(GRAD + row * grad_stride).to(tl.float32)
    most = tl.load(STATS + row * 3)
    total = tl.load(STATS + row * 3 + 1)
    target = tl.load(TARGET + row).to(tl.int64)
    column = target - start
    used = target != ignored
    here = used & (column >= 0) & (column < columns)
    hot = tl.where(here, column + before, -1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    whole = (group * GROUP >= before) & ((group + 1) * GROUP <= before + columns)
    inside = whole[:, None] & (e >= 0)
    at = group[:, None] * GROUP + e
    _ce_backward_some(LOGITS, D, at, inside, grad, most, total, hot, used)
    if EDGES:
        at, there = _edge(before, columns, GROUP)
        there = there & (at * 0 + block == 0)
        _ce_backward_some(LOGITS, D, at, there, grad, most, total, hot, used)
