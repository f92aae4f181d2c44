"""Statistics and gradient of cross entropy in Triton; each reads the logits once.

    stats = ce_stats(logits[n v], target[n], ignore_index, vocab)   # [n 3]: max, sum, target logit
    d = ce_backward(grad[n], logits, stats, target, ignore_index, vocab)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU;
``vocab``: the intervals of the vocabulary that this rank has. A program reads a row in blocks and
scales the sum of each group of lanes by the group's running maximum. If the vocabulary is odd, rows
are unaligned: lanes count from the last multiple of GROUP elements before the row, and at most
GROUP - 1 logits at each end are read singly. Float64 and empty logits go to the op.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import rows_of, takes
from dtensor.kernels.launches import CE_BACKWARD, CE_STATS, GROUP, within

_ELSEWHERE, _IGNORED = -1, -2


def ce_stats(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: Sequence[int] = ()
) -> Tensor:
    """Return f32[n 3] of logits[n v] and target[n]: the row's maximum, sum and target logit."""
    if not _is_supported(logits):
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
    """Return the gradient of logits[n v], of their dtype; grad[n], target[n], and stats[n 3] over
    the whole vocabulary."""
    if not _is_supported(logits, grad):
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


def _is_supported(logits: Tensor, *others: Tensor) -> bool:
    if not takes(logits, *others) or logits.numel() == 0:
        return False
    num_rows, columns = logits.shape
    return within(num_rows * CE_BACKWARD.at(1, columns).blocks, columns)


def _has_edges(stride: int, columns: int) -> bool:
    return stride % GROUP != 0 or columns % GROUP != 0


def _local(
    target: Tensor, vocab: Sequence[int], ignore_index: int, columns: int
) -> tuple[Tensor, int, int]:
    """Return (targets, the target of this rank's column 0, the target that is ignored).

    If this rank has several intervals of the vocabulary, targets are first mapped to local columns.
    """
    target = target.contiguous()
    if len(vocab) <= 2:
        return target, vocab[0] if vocab else 0, ignore_index
    columns_here = torch.full_like(target, _ELSEWHERE, dtype=torch.int64)
    at = 0
    for start, stop in zip(vocab[::2], vocab[1::2], strict=True):
        columns_here = torch.where(
            (target >= start) & (target < stop), target - start + at, columns_here
        )
        at += stop - start
    return torch.where(target == ignore_index, _IGNORED, columns_here), 0, _IGNORED


# -- in Triton -------------------------------------------------------------------------------------


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _zero_if_minus_inf(x):
    """Return x, or 0 if it is -inf, the maximum of nothing."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _edge(before, columns, GROUP: tl.constexpr):
    """Return (positions, mask) of the logits at the row's edges, which are in no whole group.

    Positions count from the boundary ``before`` elements before the row.
    """
    e = tl.arange(0, 2 * GROUP)
    end = before + columns
    last = end // GROUP
    at = tl.where(e < GROUP, e, last * GROUP + e - GROUP)
    first_is_whole = (before == 0) & (end >= GROUP)
    is_lane = tl.where(e < GROUP, (e + first_is_whole * GROUP) < GROUP, (e * 0 + last) > 0)
    return at, is_lane & (at >= before) & (at < end)


@triton.jit
def _ce_stats(
    LOGITS, TARGET, STATS, stride, columns, start, ignored,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Compute maximum, sum of exp(x - maximum), and target logit of one row in one pass."""
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * stride // GROUP * GROUP
    before = (row * stride % GROUP).to(tl.int32)
    lane = tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    running_max = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    for at in range(0, before + columns, BLOCK):
        group = at // GROUP + lane
        whole = (group * GROUP >= before) & ((group + 1) * GROUP <= before + columns)
        x = tl.load(
            LOGITS + (group[:, None] * GROUP + e),
            mask=whole[:, None] & (e >= 0),
            other=float("-inf"),
        ).to(tl.float32)
        new_max = _maximum(running_max, tl.reduce(x, 1, _maximum))
        safe = _zero_if_minus_inf(new_max)
        total = total * tl.exp(running_max - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
        running_max = new_max
    row_max = tl.reduce(running_max, 0, _maximum)
    if EDGES:
        at, is_lane = _edge(before, columns, GROUP)
        x = tl.load(LOGITS + at, mask=is_lane, other=float("-inf")).to(tl.float32)
        row_max = _maximum(row_max, tl.reduce(x, 0, _maximum))
        safe = _zero_if_minus_inf(row_max)
        sum_ = tl.sum(total * tl.exp(running_max - safe), 0) + tl.sum(tl.exp(x - safe), 0)
    else:
        sum_ = tl.sum(total * tl.exp(running_max - _zero_if_minus_inf(row_max)), 0)
    target = tl.load(TARGET + row).to(tl.int64)
    column = target - start
    is_here = (target != ignored) & (column >= 0) & (column < columns)
    picked = tl.load(LOGITS + before + tl.where(is_here, column, 0)).to(tl.float32)
    tl.store(STATS + row * 3, row_max)
    tl.store(STATS + row * 3 + 1, sum_)
    tl.store(STATS + row * 3 + 2, tl.where(is_here, picked, 0.0))


@triton.jit
def _ce_backward_lanes(LOGITS, D, at, inside, grad, row_max, total, target_column, used):
    x = tl.load(LOGITS + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp(x - row_max) / total
    d = tl.where(used, tl.where(at == target_column, p - 1.0, p) * grad, 0.0)
    tl.store(D + at, d.to(D.dtype.element_ty), mask=inside)


@triton.jit
def _ce_backward(
    GRAD, LOGITS, STATS, TARGET, D, grad_stride, stride, columns, start, ignored, blocks,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Compute (softmax - one_hot(target)) * grad for a block of one row."""
    row = tl.program_id(0).to(tl.int64) // blocks
    block = (tl.program_id(0) % blocks).to(tl.int32)
    LOGITS += row * stride // GROUP * GROUP
    before = (row * stride % GROUP).to(tl.int32)
    if ALIKE:
        D += row * stride // GROUP * GROUP
    else:
        D += row * columns - before
    grad = tl.load(GRAD + row * grad_stride).to(tl.float32)
    row_max = tl.load(STATS + row * 3)
    total = tl.load(STATS + row * 3 + 1)
    target = tl.load(TARGET + row).to(tl.int64)
    column = target - start
    used = target != ignored
    is_here = used & (column >= 0) & (column < columns)
    target_column = tl.where(is_here, column + before, -1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    whole = (group * GROUP >= before) & ((group + 1) * GROUP <= before + columns)
    inside = whole[:, None] & (e >= 0)
    at = group[:, None] * GROUP + e
    _ce_backward_lanes(LOGITS, D, at, inside, grad, row_max, total, target_column, used)
    if EDGES:
        at, is_lane = _edge(before, columns, GROUP)
        is_lane = is_lane & (at * 0 + block == 0)
        _ce_backward_lanes(LOGITS, D, at, is_lane, grad, row_max, total, target_column, used)
