"""Matrix products by group, for mixtures of experts.

    grouped_mm(rows[m k], experts[g k n], stops[G], [2, 3])   # [m n], of experts 2 and 3 only
    expert_products(rows[N i], weight[E i o], counts[E], bias[E o])            # [N o]
    expert_outer_products(rows[N i], grad[N o], counts[E])                     # [E i o]

The rows of group i are ``stops[i-1]:stops[i]``. The rules of grouped_mm (rules/tables/matmul.py)
import this module lazily; ops/experts.py uses the other functions.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

aten: Any = torch.ops.aten

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GPU_KERNEL_DTYPES = (torch.bfloat16,)  # for others, torch loops on the host and waits for offsets

_read: MutableMapping[Tensor, tuple[int, Sequence[int]]] = WeakIdKeyDictionary()
"""The version of each tensor on a GPU at its last read, and the numbers that were read."""


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
    if groups is None and _can_use_kernel(a, b, stops[-1], _KERNEL_DTYPES):
        return _kernel_products(a, b, offsets, stops)
    held_spans = spans if groups is None else [spans[g] for g in groups]
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
            out = _outer_products(a, b, held_spans)
    return out


def stops_of(counts: Tensor, length: int) -> list[int]:
    """Return where the rows of each expert end, from counts[E]; see `numbers_of`.
    Raises IndexError if a count is negative or the counts exceed ``length``, the number of rows."""
    numbers = numbers_of(counts)
    stops = list(accumulate(numbers))
    if (numbers and min(numbers) < 0) or (stops and stops[-1] > length):
        raise IndexError(
            f"counts of experts are >= 0 and add up to at most {length}, the number of rows; got "
            f"{numbers}"
        )
    return stops


def numbers_of(counts: Tensor) -> list[int]:
    """Return the counts as ints. Waits if they are on a GPU, and only once for all ops that use the
    same tensor, while it is not written to."""
    numbers = known_numbers(counts)
    if numbers is None:
        untyped_counts: Any = counts
        numbers = untyped_counts.tolist()
        record_numbers(counts, numbers)
    return numbers


def known_numbers(counts: Tensor) -> list[int] | None:
    """Return the counts as ints; None if the host would wait for a GPU to read them."""
    if counts.is_cpu:
        untyped_counts: Any = counts
        return untyped_counts.tolist()
    read = None if counts.is_inference() else _read.get(counts)
    return list(read[1]) if read is not None and read[0] == counts._version else None


def record_numbers(counts: Tensor, numbers: Sequence[int]) -> None:
    """Record the numbers of counts on a GPU that the host has read already."""
    if not (counts.is_cpu or counts.is_inference()):
        _read[counts] = counts._version, tuple(numbers)


def expert_products(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows[N i] times weight[E i o], plus bias[E o], expert by expert, as [N o]. The rows of
    an expert follow the rows of the experts before it. Rows past the counts' sum are zero."""
    stops = stops_of(counts, rows.shape[0])
    total = stops[-1] if stops else 0
    if _can_use_kernel(rows, weight, total, _GPU_KERNEL_DTYPES) and rows.is_cuda:
        offsets = _on_device(stops, rows)
        out = _kernel_products(rows, weight, offsets, stops)
        if bias is not None:
            row = torch.arange(total, dtype=offsets.dtype, device=rows.device)
            out[:total] += bias.index_select(0, torch.searchsorted(offsets, row, right=True))
        return out
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for e, (i, j) in enumerate(pairwise([0, *stops])):
        if i < j and bias is not None:
            torch.addmm(bias[e], rows[i:j], weight[e], out=out[i:j])
        elif i < j:
            torch.mm(rows[i:j], weight[e], out=out[i:j])
    out[total:] = 0
    return out


def expert_outer_products(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """Return rows[N i].T @ grad[N o] of the rows of each expert, as [E i o]; zeros for an expert
    without rows."""
    stops = stops_of(counts, rows.shape[0])
    columns, total = rows.t(), stops[-1] if stops else 0
    spans = list(pairwise([0, *stops]))
    if not (_can_use_kernel(columns, grad, total, _GPU_KERNEL_DTYPES) and rows.is_cuda):
        return _outer_products(columns, grad, spans)
    out = aten._grouped_mm(columns, grad, _on_device(stops, rows))
    for e, (i, j) in enumerate(spans):
        if i == j:
            out[e] = 0
    return out


def grouped_mm_backward(
    a: Tensor, b: Tensor, offsets: Tensor, grad: Tensor, groups: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows ``a`` and of ``b``, which has one matrix for each group."""
    rows_grad = grouped_mm(grad, b.transpose(1, 2), offsets, groups)
    return rows_grad, grouped_mm(a.t(), grad, offsets, groups)


def _can_use_kernel(a: Tensor, b: Tensor, total: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return whether torch's kernel takes ``a`` and ``b``. ``total``: the rows of all groups."""
    both = (a, b)
    return total > 0 and a.dtype in dtypes and all(x.numel() and _is_aligned(x) for x in both)


def _kernel_products(a: Tensor, b: Tensor, offsets: Tensor, stops: list[int]) -> Tensor:
    """Return torch's grouped product, with zeros in rows (or columns) past the last offset."""
    out = aten._grouped_mm(a, b, offsets)
    match a.dim(), b.dim():
        case 2, 3:
            out[stops[-1] :] = 0
        case 3, 2:
            out[:, stops[-1] :] = 0
        case _:
            pass
    return out


def _outer_products(a: Tensor, b: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Return a[:, i:j] @ b[i:j] of each span, as [spans m n]."""
    out = a.new_zeros(len(spans), a.shape[0], b.shape[1])
    for part, (i, j) in zip(out, spans, strict=True):
        if i < j:
            torch.mm(a[:, i:j], b[i:j], out=part)
    return out


def _on_device(stops: list[int], like: Tensor) -> Tensor:
    """Return the stops as int32 on the GPU of ``like``, copied without a wait of the host."""
    stops_tensor = torch.tensor(stops, dtype=torch.int32).pin_memory()
    return stops_tensor.to(like.device, non_blocking=True)


def _is_aligned(x: Tensor) -> bool:
    """Return whether rows (or columns of a transposed matrix) start on multiples of 16 bytes."""
    inner, outer = sorted(x.stride()[-2:])
    return inner == 1 and outer * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
