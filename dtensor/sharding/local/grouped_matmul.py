"""Matrix products by group, for mixtures of experts.

    grouped_mm(rows[m k], experts[g k n], stops[G], [2, 3])   # [m n], of experts 2 and 3 only
    expert_products(rows[N i], weight[E i o], counts[E], bias[E o])            # [N o]
    expert_outer_products(rows[N i], grad[N o], counts[E])                     # [E i o]

The rows of group i are ``stops[i-1]:stops[i]``. The rules of grouped_mm (rules/tables/matmul.py)
import this module lazily; ops/experts.py uses the other functions. The host waits for a GPU to read
the stops, unless torch's kernel multiplies the rows (`has_kernel`), and the stops are known to be
right: a deferred program checks them on the device, and `route` counts rightly.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from dtensor.sharding.local.conditions import Ends
from dtensor.sharding.local.in_range import was_checked

aten: Any = torch.ops.aten

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_WIDTH = 8
"""The numbers of 16 bits in the 16 bytes at multiples of which rows start in torch's kernel."""
ROUTED = "counts of a route"
"""The check that the result of `route` has passed."""

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
    condition = ends_of(a, b, offsets)
    if was_checked(offsets, condition.key) and has_kernel(a.dtype, widths_of(a.shape, b.shape)):
        return _products_on_device(a, b, offsets.int(), groups)
    stops = numbers_of(offsets)
    if any(start > stop for start, stop in pairwise([0, *stops, condition.length])):
        raise condition.error_of(f"got {stops}")
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    if groups is None and _can_use_kernel(a, b, stops[-1]):
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


def ends_of(a: Tensor, b: Tensor, offsets: Tensor) -> Ends:
    """Return the condition on the offsets of a grouped product."""
    length = b.shape[1] if a.dim() == 3 else a.shape[0 if b.dim() == 3 else 1]
    return Ends(length=length, num=offsets.numel())


def widths_of(a: Sequence[int], b: Sequence[int]) -> Sequence[int]:
    """Return the sizes of a grouped product of these shapes, besides the groups and their rows; ()
    if the groups join columns of the result."""
    if len(a) == 3:
        return ()
    return b[1:] if len(b) == 3 else (a[0], b[1])


def has_kernel(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Return whether a kernel of torch for GPUs multiplies groups of rows of these widths. Without
    a kernel the host multiplies each group, and reads the stops."""
    return dtype is torch.bfloat16 and bool(widths) and all(w % KERNEL_WIDTH == 0 for w in widths)


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
    if rows.is_cuda and has_kernel(rows.dtype, weight.shape[1:]):
        stops = _stops_on_device(counts, rows)
        out = _products_on_device(rows, weight, stops, None)
        if bias is not None:
            row = torch.arange(rows.shape[0], dtype=stops.dtype, device=rows.device)
            group = torch.searchsorted(stops, row, right=True)
            out += pad(bias, (0, 0, 0, 1)).index_select(0, group)  # 0 for rows past the last
        return out
    stops = stops_of(counts, rows.shape[0])
    total = stops[-1] if stops else 0
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
    if rows.is_cuda and has_kernel(rows.dtype, (rows.shape[1], grad.shape[1])):
        return _products_on_device(rows.t(), grad, _stops_on_device(counts, rows), None)
    stops = stops_of(counts, rows.shape[0])
    return _outer_products(rows.t(), grad, list(pairwise([0, *stops])))


def grouped_mm_backward(
    a: Tensor, b: Tensor, offsets: Tensor, grad: Tensor, groups: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows ``a`` and of ``b``, which has one matrix for each group."""
    rows_grad = grouped_mm(grad, b.transpose(1, 2), offsets, groups)
    return rows_grad, grouped_mm(a.t(), grad, offsets, groups)


def _stops_on_device(counts: Tensor, rows: Tensor) -> Tensor:
    """Return where the rows of each expert end, as int32 on the GPU of ``rows``; see `stops_of`."""
    if counts.is_cuda and was_checked(counts, ROUTED):
        return counts.cumsum(0, dtype=torch.int32)
    return _on_device(stops_of(counts, rows.shape[0]), rows)


def _products_on_device(a: Tensor, b: Tensor, stops: Tensor, groups: list[int] | None) -> Tensor:
    """Return the result of `grouped_mm` for operands that torch's kernel takes, after they are
    copied to aligned memory if needed. ``stops``: right ones, as int32. The host does not wait."""
    by_row = b.dim() == 3
    length, order = (a if by_row else b).shape[0], None
    num = stops.shape[0] if groups is None else len(groups)
    if 0 in (num, *a.shape, *b.shape):
        return a.new_zeros((length, b.shape[2]) if by_row else (num, a.shape[0], b.shape[1]))
    if groups is not None:
        order, stops = _held_first(stops, groups, length)
        a = a.index_select(0, order) if by_row else a.t().index_select(0, order).t()
        b = b if by_row else b.index_select(0, order)
    a = _aligned(a) if by_row else _aligned(a.t()).t()
    out = aten._grouped_mm(a, _aligned(b), stops)
    if not by_row:
        is_empty = stops.diff(prepend=stops.new_zeros(1)) == 0
        return out.masked_fill_(is_empty[:, None, None], 0)
    row = torch.arange(length, dtype=stops.dtype, device=stops.device)
    out.masked_fill_((row >= stops[-1:])[:, None], 0)
    return out if order is None else torch.empty_like(out).index_copy_(0, order, out)


def _held_first(stops: Tensor, groups: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Return the order of rows in which the rows of these groups are first, and where the rows of
    each of these groups end in this order."""
    held = _on_device(groups, stops)
    row = torch.arange(length, dtype=stops.dtype, device=stops.device)
    group = torch.searchsorted(stops, row, right=True)
    is_held = stops.new_zeros(stops.shape[0] + 1).index_fill_(0, held.long(), 1)
    _, order = is_held.index_select(0, group).sort(descending=True, stable=True)
    lengths = stops.diff(prepend=stops.new_zeros(1))
    return order, lengths.index_select(0, held).cumsum(0, dtype=stops.dtype)


def _can_use_kernel(a: Tensor, b: Tensor, total: int) -> bool:
    """Return whether torch's kernel takes ``a`` and ``b``. ``total``: the rows of all groups."""
    takes = a.dtype in _KERNEL_DTYPES and all(x.numel() and _is_aligned(x) for x in (a, b))
    return total > 0 and takes


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


def _on_device(numbers: list[int], like: Tensor) -> Tensor:
    """Return the numbers as int32 on the GPU of ``like``, copied without a wait of the host."""
    pinned = torch.tensor(numbers, dtype=torch.int32).pin_memory()
    return pinned.to(like.device, non_blocking=True)


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if torch's kernel does not take its strides."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    """Return whether rows (or columns of a transposed matrix) start on multiples of 16 bytes."""
    inner, outer = sorted(x.stride()[-2:])
    return inner == 1 and outer * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
