"""Conditions on operands without which a GPU kernel would assert.

    CONDITIONS[aten.embedding.default](weight, ids)  # [(ids, Range(size=50257, num=12))]
    CHECKS[aten.embedding.default](weight, ids)      # raises IndexError, or returns None
    called_op(target, args)                          # the op whose conditions a rank's call has

On a CPU an op checks its indices, lengths and probabilities itself. On a GPU its kernel asserts,
after which the process can no longer use the GPU; a few kernels do not check and access memory out
of bounds. So local code for GPUs checks the operands before each op in `CONDITIONS`
(runtime/lower/checks.py): in a deferred program on the device, else on the host, which waits for
the GPU. Indices that an op of the program computed, such as the index of a maximum, are not
checked; the indices of `topk` are recorded as checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.local import local_forms
from dtensor.sharding.local.conditions import (
    Condition,
    NotNegative,
    Offsets,
    Places,
    Probabilities,
    Range,
    Repeats,
    require,
)
from dtensor.sharding.local.in_range import record_check, was_checked

aten: Any = torch.ops.aten

Conditions = list[tuple[Tensor, Condition]]
"""Operands with their conditions. They read shapes only, so that they exist for meta tensors."""


def in_range(index: Tensor, size: int, low: int = 0, ignored: int | None = None) -> Conditions:
    """Return the condition that all indices are ``ignored`` or in [low, size)."""
    return [(index, Range(size=size, low=low, ignored=ignored, num=index.numel()))]


def _embedding(weight: Tensor, ids: Tensor, *args: object) -> Conditions:
    return in_range(ids, weight.shape[0])


def _embedding_backward(grad: Tensor, ids: Tensor, num_rows: int, *args: object) -> Conditions:
    return in_range(ids, num_rows)


def _bags(
    weight: Tensor, ids: Tensor, offsets: Tensor, *args: object, **kwargs: object
) -> Conditions:
    offsets_fit = Offsets(num_ids=ids.numel(), num=offsets.numel())
    return [*in_range(ids, weight.shape[0]), (offsets, offsets_fit)]


def _along_dim(x: Tensor, dim: int, index: Tensor, *args: object, **kwargs: object) -> Conditions:
    """Check that indices into one dim (the indices of gather and scatter) are in 0:size."""
    return in_range(index, x.shape[dim] if x.dim() else 1)


def _from_either_end(x: Tensor, dim: int, index: Tensor, *args: object) -> Conditions:
    """Check indices into one dim, which may be negative."""
    return in_range(index, x.shape[dim], -x.shape[dim])


def _index(x: Tensor, indices: Sequence[Tensor | None], *args: object) -> Conditions:
    """Check each index tensor against the dim that it indexes; masks are not checked."""
    dim = 0
    conditions: Conditions = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()  # a mask indexes as many dims as it has
            continue
        if index is not None:
            conditions += in_range(index, x.shape[dim], -x.shape[dim])
        dim += 1
    return conditions


def _nll(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> Conditions:
    return in_range(target, x.shape[1 if x.dim() > 1 else 0], ignored=ignored)


def _flat(x: Tensor, index: Tensor, *args: object) -> Conditions:
    """Check indices into the flattened x, which take and put have; they may be negative."""
    return in_range(index, x.numel(), -x.numel())


def _nll_backward(grad: Tensor, *args: Any) -> Conditions:
    return _nll(*args[:5])


def _margin(x: Tensor, target: Tensor, *args: object) -> Conditions:
    return in_range(target, x.shape[-1] if x.dim() else 1)


def _margin_backward(grad: Tensor, x: Tensor, target: Tensor, *args: object) -> Conditions:
    return _margin(x, target)


def _labels(x: Tensor, target: Tensor, *args: object) -> Conditions:
    """Check class numbers; -1 ends the classes of a row."""
    return in_range(target, x.shape[-1] if x.dim() else 1, -1)


def _repeats(repeats: Tensor, *, output_size: int | None = None) -> Conditions:
    """Check that the repeats are not negative and have the sum ``output_size``."""
    num = repeats.numel()
    conditions: Conditions = [
        (repeats, NotNegative(words="repeats can not be negative", num=num)),
    ]
    if output_size is not None:
        conditions.append((repeats, Repeats(total=output_size, num=num)))
    return conditions


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
) -> Conditions:
    """Check that lengths of segments are not negative if ``unsafe`` skips torch's own check."""
    if not unsafe or lengths is None:
        return []
    return [(lengths, NotNegative(words="lengths contains negative value", num=lengths.numel()))]


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Conditions:
    """Check that the source has an element for each True of the broadcast mask."""
    num_places: int = aten.broadcast_tensors([x, mask])[0].numel()
    if num_places <= source.numel():  # enough for any mask
        return []
    times = num_places // mask.numel()
    return [(mask, Places(times=times, most=source.numel(), num=mask.numel()))]


def _probabilities(x: Tensor, target: Tensor, *args: object) -> Conditions:
    return [
        (x, Probabilities(name="input", num=x.numel())),
        (target, Probabilities(name="target", num=target.numel())),
    ]


def _unpool(x: Tensor, index: Tensor, size: Sequence[int], *args: object) -> Conditions:
    """Check indices into one plane of the result; ``size``: the sizes of the plane."""
    return in_range(index, math.prod(size))


CONDITIONS: Mapping[object, Callable[..., Conditions]] = {
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


def called_op(target: object, args: Sequence[object]) -> tuple[object, int]:
    """Return the op that a rank's call runs, whose conditions the call has, and how many leading
    arguments are not the op's: some functions call an op."""
    first = 0
    while (operands := _CALL_AN_OP.get(target)) is not None:
        target, first = args[first], first + operands
    return target, first


@dataclass(frozen=True, slots=True)
class HostCheck:
    """A function of an op's arguments that raises the error of the first condition that does not
    hold. It waits for the GPU."""

    conditions: Callable[..., Conditions]

    @property
    def __name__(self) -> str:
        return self.conditions.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for x, condition in self.conditions(*args, **kwargs):
            if not (x.is_meta or x.numel() == 0 or was_checked(x, condition.key)):
                require(condition, x)
                record_check(x, condition.key)


CHECKS: Mapping[object, HostCheck] = {
    op: HostCheck(conditions) for op, conditions in CONDITIONS.items()
}
