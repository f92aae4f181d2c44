"""Indices that are out of range raise before a kernel sees them.

    CHECKS[aten.embedding.default](weight, ids)      # IndexError, or nothing; called as the op is

On a CPU an op looks at its indices itself. On a GPU it asserts in its kernel, and that ends the use
of the GPU by the whole process, with all that it holds: so local code for GPUs checks before each
op in `CHECKS` (`runtime/lower/code.py`), and what ranks run in place of an op checks on every
device, for there an index that is on no rank would give zeros. A check waits for the GPU; a tensor
that nothing has written to since it was checked is not looked at again: layers share positions.

Not here: targets of `dt::ce_loss`, which has its own words for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

aten: Any = torch.ops.aten

_checked: MutableMapping[Tensor, tuple[int, tuple[object, ...]]] = WeakIdKeyDictionary()
"""By tensor: its version when it was in range, and what range that was."""


def check_range(index: Tensor, size: int, low: int = 0, ignored: int | None = None) -> None:
    """IndexError unless all are ``ignored`` or in [low, size). Nothing is known of meta tensors."""
    if index.is_meta or index.numel() == 0:
        return
    asked = size, low, ignored
    known = None if index.is_inference() else _checked.get(index)
    if known is not None and known[0] == index._version and asked in known[1]:
        return
    wrong = (index < low) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    if bool(wrong.any()):
        raise IndexError(
            f"index {int(index[wrong][0])} is out of range for a dim of size {size}, among "
            f"{index.numel()} indices"
        )
    if not index.is_inference():
        others = () if known is None or known[0] != index._version else known[1]
        _checked[index] = index._version, (*others, asked)


def _embedding(weight: Tensor, ids: Tensor, *rest: object) -> None:
    check_range(ids, weight.shape[0])


def _along_dim(x: Tensor, dim: int, index: Tensor, *rest: object, **more: object) -> None:
    """gather, scatter and the like."""
    check_range(index, x.shape[dim] if x.dim() else 1)


def _from_either_end(x: Tensor, dim: int, index: Tensor, *rest: object) -> None:
    check_range(index, x.shape[dim], -x.shape[dim])


def _index(x: Tensor, indices: Sequence[Tensor | None], *rest: object) -> None:
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()  # a mask has the shape of the dims that it takes
            continue
        if index is not None:
            check_range(index, x.shape[dim], -x.shape[dim])
        dim += 1


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> None:
    check_range(target, x.shape[1 if x.dim() > 1 else 0], ignored=ignored)


def _unpool(x: Tensor, index: Tensor, size: Sequence[int], *rest: object) -> None:
    """In one plane of the result, whose sizes these are."""
    check_range(index, math.prod(size))


CHECKS: Mapping[object, Callable[..., None]] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _along_dim,
    aten.index.Tensor: _index,
    aten.index_add.default: _along_dim,
    aten.index_copy.default: _along_dim,
    aten.index_fill.int_Scalar: _from_either_end,
    aten.index_put.default: _index,
    aten.index_select.default: _along_dim,
    aten.max_unpool2d.default: _unpool,
    aten.max_unpool3d.default: _unpool,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_forward.default: _nll,
    aten.scatter.src: _along_dim,
    aten.scatter.value: _along_dim,
    aten.scatter_add.default: _along_dim,
}
