"""Checks of operands that would make a GPU kernel assert.

    CHECKS[aten.embedding.default](weight, ids)      # raises IndexError, or returns None
    check_before(target, args)                       # the check of a rank's call, or None

On a CPU an op checks its indices, lengths and probabilities itself. On a GPU its kernel asserts,
after which the process can no longer use the GPU; a few kernels do not check and access memory out
of bounds. So local code for GPUs checks the operands before each op in `CHECKS`
(runtime/lower/code.py). A check waits for the GPU. Indices that an op of the program computed, such
as the index of a maximum, are not checked; the indices of `topk` are recorded as checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.local import local_forms
from dtensor.sharding.local.in_range import check_range, record_check, was_checked

aten: Any = torch.ops.aten


def _embedding(weight: Tensor, ids: Tensor, *args: object) -> None:
    check_range(ids, weight.shape[0])


def _embedding_backward(grad: Tensor, ids: Tensor, num_rows: int, *args: object) -> None:
    check_range(ids, num_rows)


def _bags(weight: Tensor, ids: Tensor, offsets: Tensor, *args: object, **kwargs: object) -> None:
    """Check that the offsets of the bags start with 0 and do not decrease."""
    check_range(ids, weight.shape[0])
    num_ids = ids.numel()
    check = "offsets", num_ids
    if offsets.is_meta or offsets.numel() == 0 or was_checked(offsets, check):
        return
    starts = torch.cat([offsets.new_zeros(1), offsets, offsets.new_full((1,), num_ids)])
    wrong = starts.diff() < 0
    if bool(wrong.any() | (offsets[0] != 0)):
        raise IndexError(
            f"offsets of bags begin with 0, do not decrease, and are at most the number of "
            f"indices, {num_ids}; got {_excerpt(offsets)}"
        )
    record_check(offsets, check)


def _along_dim(x: Tensor, dim: int, index: Tensor, *args: object, **kwargs: object) -> None:
    """Check that indices into one dim (the indices of gather and scatter) are in 0:size."""
    check_range(index, x.shape[dim] if x.dim() else 1)


def _from_either_end(x: Tensor, dim: int, index: Tensor, *args: object) -> None:
    """Check indices into one dim, which may be negative."""
    check_range(index, x.shape[dim], -x.shape[dim])


def _index(x: Tensor, indices: Sequence[Tensor | None], *args: object) -> None:
    """Check each index tensor against the dim that it indexes; masks are not checked."""
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()  # a mask indexes as many dims as it has
            continue
        if index is not None:
            check_range(index, x.shape[dim], -x.shape[dim])
        dim += 1


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> None:
    check_range(target, x.shape[1 if x.dim() > 1 else 0], ignored=ignored)


def _flat(x: Tensor, index: Tensor, *args: object) -> None:
    """Check indices into the flattened x, which take and put have; they may be negative."""
    check_range(index, x.numel(), -x.numel())


def _nll_backward(grad: Tensor, *args: Any) -> None:
    _nll(*args[:5])


def _margin(x: Tensor, target: Tensor, *args: object) -> None:
    check_range(target, x.shape[-1] if x.dim() else 1)


def _margin_backward(grad: Tensor, x: Tensor, target: Tensor, *args: object) -> None:
    _margin(x, target)


def _labels(x: Tensor, target: Tensor, *args: object) -> None:
    """Check class numbers; -1 ends the classes of a row."""
    check_range(target, x.shape[-1] if x.dim() else 1, -1)


def _repeats(repeats: Tensor, *, output_size: int | None = None) -> None:
    """Check that the repeats are not negative and have the sum ``output_size``."""
    if repeats.is_meta or repeats.numel() == 0:
        return
    if bool((repeats < 0).any()):
        raise RuntimeError(f"repeats can not be negative; got {_excerpt(repeats)}")
    if output_size is not None and (total := int(repeats.sum())) != output_size:
        raise RuntimeError(f"output_size is {output_size}, and the repeats sum to {total}")


def _lengths(
    x: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    **kwargs: object,
) -> None:
    """Raise RuntimeError for negative lengths of segments if ``unsafe`` skips torch's own check."""
    if not unsafe or lengths is None or lengths.is_meta or lengths.numel() == 0:
        return
    if bool((lengths < 0).any()):
        raise RuntimeError(f"lengths contains negative value: {_excerpt(lengths)}")


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> None:
    """Check that the source has an element for each True of the broadcast mask."""
    num_places: int = aten.broadcast_tensors([x, mask])[0].numel()
    if mask.is_meta or num_places <= source.numel():  # enough for any mask
        return
    num_true = num_places // mask.numel() * int(mask.sum())
    if num_true > source.numel():
        raise RuntimeError(
            f"masked_scatter takes an element of the source for each place of the mask that is "
            f"true: {num_true} places, {source.numel()} elements"
        )


def _probabilities(x: Tensor, target: Tensor, *args: object) -> None:
    """Check that all elements are in [0, 1]; NaN is not."""
    if x.is_meta or x.numel() == 0:
        return
    for name, tensor in (("input", x), ("target", target)):
        wrong = ~((tensor >= 0) & (tensor <= 1))
        if bool(wrong.any()):
            raise RuntimeError(
                f"all elements of {name} should be between 0 and 1; {int(wrong.sum())} of "
                f"{tensor.numel()} are not, the first is {tensor[wrong][0].item()}"
            )


def _excerpt(numbers: Tensor) -> str:
    """Return the first 8 numbers as text, ``[1, 2, ...]``."""
    shown = ", ".join(str(number.item()) for number in numbers.flatten()[:8])
    return f"[{shown}{', ...' if numbers.numel() > 8 else ''}]"


def _unpool(x: Tensor, index: Tensor, size: Sequence[int], *args: object) -> None:
    """Check indices into one plane of the result; ``size``: the sizes of the plane."""
    check_range(index, math.prod(size))


CHECKS: Mapping[object, Callable[..., None]] = {
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten._unsafe_index.Tensor: _index,
    aten._unsafe_index_put.default: _index,
    aten.binary_cross_entropy.default: _probabilities,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _along_dim,
    aten.index.Tensor: _index,
    aten.index_add.default: _along_dim,
    aten.index_copy.default: _along_dim,
    aten.index_fill.int_Scalar: _from_either_end,
    aten.index_fill.int_Tensor: _from_either_end,
    aten.index_put.default: _index,
    aten.index_reduce.default: _along_dim,
    aten.index_select.default: _along_dim,
    aten.masked_scatter.default: _masked_scatter,
    aten.max_unpool2d.default: _unpool,
    aten.max_unpool3d.default: _unpool,
    aten.multi_margin_loss.default: _margin,
    aten.multi_margin_loss_backward.default: _margin_backward,
    aten.multilabel_margin_loss_forward.default: _labels,
    aten.nll_loss2d_backward.default: _nll_backward,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss_forward.default: _nll,
    aten.put.default: _flat,
    aten.repeat_interleave.Tensor: _repeats,
    aten.scatter.reduce: _along_dim,
    aten.scatter.src: _along_dim,
    aten.scatter.value: _along_dim,
    aten.scatter.value_reduce: _along_dim,
    aten.scatter_add.default: _along_dim,
    aten.scatter_reduce.two: _along_dim,
    aten.segment_reduce.default: _lengths,
    aten.take.default: _flat,
}

_CALL_AN_OP: Mapping[object, int] = {
    local_forms.contiguously: 1,
    local_forms.first_over: 2,
    local_forms.in_float32: 1,
    local_forms.loss_backward_over: 2,
    local_forms.loss_over: 2,
}
"""Functions that call an op, their first argument; the position of the op's first operand."""


def record_positions(index: Tensor, size: int) -> None:
    """Record that an op computed positions in a dim of this size, which need no check."""
    record_check(index, (size, 0, None))


def check_before(target: object, args: Sequence[object]) -> tuple[Callable[..., None], int] | None:
    """Return the check of a rank's call, and how many leading arguments the check does not take;
    None if the op needs no check. A function that calls an op is checked as this op."""
    first = 0
    while (operands := _CALL_AN_OP.get(target)) is not None:
        target, first = args[first], first + operands
    check = CHECKS.get(target)
    return None if check is None else (check, first)
