"""Matrix products by group, for mixtures of experts.

    grouped_mm(rows[m k], experts[g k n], stops[G], [2, 3])   # [m n], of experts 2 and 3 only

The rows of group i are ``stops[i-1]:stops[i]``. The rules of these ops (rules/tables/matmul.py)
import this module lazily.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None, groups: list[int] | None) -> Tensor:
    """Return the products of ``a`` and ``b`` group by group.

    ``offsets``: the end of each group in the dim that joins the groups; None: `a @ b`. ``groups``:
    the groups that the rank holds; None: all. Rows (or columns) of other groups, and those past the
    last offset, are zero. Uses torch's kernel if the rows start on multiples of 16 bytes.
    Raises IndexError if the offsets decrease or exceed the number of rows; torch does not check,
    and a GPU kernel would access memory out of bounds.
    """
    if offsets is None:
        return a @ b
    untyped_offsets: Any = offsets
    stops: list[int] = untyped_offsets.tolist()  # waits for the GPU once
    length = b.shape[1] if a.dim() == 3 else a.shape[0 if b.dim() == 3 else 1]
    if any(start > stop for start, stop in pairwise([0, *stops, length])):
        raise IndexError(
            f"offsets of groups do not decrease, and are in 0:{length}, the rows of all groups; "
            f"got {stops}"
        )
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    held_spans = spans if groups is None else [spans[g] for g in groups]
    uses_kernel = groups is None and a.dtype in _KERNEL_DTYPES and all(x.numel() for x in (a, b))
    if uses_kernel and stops[-1] > 0 and all(_is_aligned(x) for x in (a, b)):
        out = aten._grouped_mm(a, b, offsets)
        match a.dim(), b.dim():
            case 2, 3:
                out[stops[-1] :] = 0
            case 3, 2:
                out[:, stops[-1] :] = 0
            case _:
                pass
        return out
    match a.dim(), b.dim():
        case 2, 3:
            out = a.new_zeros(a.shape[0], b.shape[2])
            for part, (i, j) in zip(b, held_spans, strict=True):
                torch.mm(a[i:j], part, out=out[i:j])
        case 3, 2:
            out = a.new_zeros(a.shape[1], b.shape[1])
            for part, (i, j) in zip(a, held_spans, strict=True):
                out[:, i:j] = part @ b[:, i:j]
        case _:
            out = a.new_zeros(len(held_spans), a.shape[0], b.shape[1])
            for part, (i, j) in zip(out, held_spans, strict=True):
                torch.mm(a[:, i:j], b[i:j], out=part)
    return out


def grouped_mm_backward(
    a: Tensor, b: Tensor, offsets: Tensor, grad: Tensor, groups: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows ``a`` and of ``b``, which has one matrix for each group."""
    rows_grad = grouped_mm(grad, b.transpose(1, 2), offsets, groups)
    return rows_grad, grouped_mm(a.t(), grad, offsets, groups)


def _is_aligned(x: Tensor) -> bool:
    """Return whether rows (or columns of a transposed matrix) start on multiples of 16 bytes."""
    inner, outer = sorted(x.stride()[-2:])
    return inner == 1 and outer * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
