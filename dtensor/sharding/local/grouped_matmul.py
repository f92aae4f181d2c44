"""Products of matrices by group, as mixtures of experts have them: what a rank runs of one.

    grouped_mm(rows[m k], experts[g k n], stops[G], [2, 3])   # [m n], of the experts 2 and 3 alone

The rows of group i are those from stop i - 1 to stop i. Not on the way of other programs: its rules
(rules/tables/matmul.py) load it when they meet such an op.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


_OF_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None, groups: list[int] | None) -> Tensor:
    """Group by group, ``offsets`` being the ends of all of them in the dim that holds them.

    ``groups``: those that the rank holds of the operand or the result with a dim of groups; None:
    all. Rows (or columns) of no group that is held are zero; torch leaves those past the last
    offset uninitialised. Torch's kernel is used where it takes them: rows lie on 16 bytes, which
    shards may not. IndexError for offsets that decrease, or are not among the rows: torch looks at
    none of them, and a GPU's kernel would read and write elsewhere.
    """
    if offsets is None:
        return a @ b
    given: Any = offsets
    stops: list[int] = given.tolist()  # a GPU is waited for once
    length = b.shape[1] if a.dim() == 3 else a.shape[0 if b.dim() == 3 else 1]
    if any(start > stop for start, stop in pairwise([0, *stops, length])):
        raise IndexError(
            f"offsets of groups do not decrease, and are in 0:{length}, the rows of all groups; "
            f"got {stops}"
        )
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    held = spans if groups is None else [spans[g] for g in groups]
    fits = groups is None and a.dtype in _OF_KERNEL and all(x.numel() for x in (a, b))
    if fits and stops[-1] > 0 and all(_aligned(x) for x in (a, b)):
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
            for part, (i, j) in zip(b, held, strict=True):
                torch.mm(a[i:j], part, out=out[i:j])
        case 3, 2:
            out = a.new_zeros(a.shape[1], b.shape[1])
            for part, (i, j) in zip(a, held, strict=True):
                out[:, i:j] = part @ b[:, i:j]
        case _:
            out = a.new_zeros(len(held), a.shape[0], b.shape[1])
            for part, (i, j) in zip(out, held, strict=True):
                torch.mm(a[:, i:j], b[i:j], out=part)
    return out


def grouped_mm_backward(
    a: Tensor, b: Tensor, offsets: Tensor, grad: Tensor, groups: list[int] | None
) -> tuple[Tensor, Tensor]:
    """The gradients of rows ``a`` and of one matrix a group ``b``."""
    of_rows = grouped_mm(grad, b.transpose(1, 2), offsets, groups)
    return of_rows, grouped_mm(a.t(), grad, offsets, groups)


def _aligned(x: Tensor) -> bool:
    """Whether rows (or columns, of a transposed matrix) start on multiples of 16 bytes."""
    inner, outer = sorted(x.stride()[-2:])
    return inner == 1 and outer * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
