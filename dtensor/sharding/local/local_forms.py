"""Functions that ranks run in place of an op if its local call differs from the global call.

    mean_over(x_shard, (0,), False, 8, None)              # the sum of 4 of 8 rows, divided by 8
    loss_over(aten.huber_loss.default, 8, x, y, 2, 1.0)   # a part of the mean over 8 elements

Localizers of the rules name these functions, and local code imports them by name. Invariants: they
take and return tensors and do not communicate; they are right for shards of size 0; the part of a
mean is the local sum divided by the *global* count, forward and backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor.numerics import accumulation_dtype, is_narrow
from dtensor.private_torch import flash_attention_for_cpu

aten: Any = torch.ops.aten

Pieces = Sequence[tuple[int, int]]


def mean_over(
    x: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None
) -> Tensor:
    """Return the local sum divided by the global count; the sum over the ranks is the mean. A
    16-bit result is summed and divided in float32 and rounded once, as in torch's kernels."""
    result_dtype = x.dtype if dtype is None else dtype
    wide = torch.float32 if is_narrow(result_dtype) else dtype
    total = torch.sum(x, tuple(dims), keepdim=keepdim, dtype=wide) / count
    return total.to(result_dtype) if is_narrow(result_dtype) else total


def in_float32(op: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run the op on float32 copies of 16-bit operands, so that a part of a sum is not rounded."""
    return op(*map(_wide, args), **kwargs).float()


def _wide(value: Any) -> Any:
    """Return a 16-bit tensor in float32, and any other value as it is."""
    is_tensor = isinstance(value, Tensor)
    return value.float() if is_tensor and is_narrow(value.dtype) else value


def _narrow_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """Return the 16-bit dtype that all float tensors have; None if there is no such dtype."""
    dtypes = {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and all(map(is_narrow, dtypes)) else None


def filled(
    x: Tensor, shape: Sequence[int], value: float | bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a new tensor like x filled with ``value``: the result of an empty reduction."""
    return x.new_full(tuple(shape), value, dtype=dtype)


def arange_pieces(
    pieces: Pieces,
    start: float,
    step: float,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return start + step * i for the global positions i in the intervals ``pieces``."""
    if len(pieces) > 1 and (stride := stride_of(pieces)):
        first = torch.arange(*pieces[0], dtype=torch.int64, device=device)
        starts = torch.arange(0, stride * len(pieces), stride, device=device)
        return ((starts[:, None] + first).flatten() * step + start).to(dtype)
    parts = [torch.arange(lo, hi, dtype=torch.int64, device=device) for lo, hi in pieces]
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    positions = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (positions * step + start).to(dtype)


def stride_of(pieces: Pieces) -> int:
    """Return the distance of the starts of intervals of equal lengths and distances; 0 for other
    intervals."""
    (lo, hi), stride = pieces[0], pieces[1][0] - pieces[0][0]
    shifted = ([lo + i * stride, hi + i * stride] for i in range(len(pieces)))
    return stride if all(map(operator.eq, map(list, pieces), shifted)) else 0


def triangle(x: Tensor, upper: bool, diagonal: int, rows: Pieces, columns: Pieces) -> Tensor:
    """Return tril or triu of a shard that holds these rows and columns of the global matrices."""
    i = arange_pieces(rows, 0, 1, dtype=torch.int64, device=x.device)[:, None]
    j = arange_pieces(columns, 0, 1, dtype=torch.int64, device=x.device)[None, :]
    keep = j - i >= diagonal if upper else j - i <= diagonal
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Return a copy of as_strided of x made contiguous, as the program's strides expect."""
    return x.contiguous().as_strided(size, stride, offset).clone()


def strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """Return a copy of x, made contiguous, with ``source`` at these strides."""
    return torch.as_strided_scatter(x.contiguous(), source, size, stride, offset)


def part_of_reshape(
    x: Tensor, whole: Sequence[int], shape: Sequence[int], dim: int, positions: Sequence[int]
) -> Tensor:
    """Return x reshaped to ``whole``, at these positions of a dim, and reshaped to ``shape``."""
    return picked(x.reshape(tuple(whole)), dim, positions).reshape(tuple(shape))


def filled_reshape(
    x: Tensor, whole: Sequence[int], shape: Sequence[int], dim: int, positions: Sequence[int]
) -> Tensor:
    """Return zeros of shape ``whole`` to which x is added at these positions of a dim, reshaped to
    ``shape``."""
    return _add_at(x, x.new_zeros(tuple(whole)), dim, positions).reshape(tuple(shape))


def heads_at(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the heads of x [b h s d] at these positions; a view if all are the same head."""
    if len(positions) > 1 and len(set(positions)) == 1:
        return x.narrow(1, positions[0], 1).expand(-1, len(positions), -1, -1)
    return picked(x, 1, positions)


def picked(x: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """Return x at these positions of a dim; a view if they are consecutive."""
    parts = [x.narrow(dim, start, num) for start, num in _runs(positions)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _add_at(x: Tensor, total: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """Add x to ``total`` in place at these positions of a dim, which may repeat; return it."""
    at = 0
    for start, num in _runs(positions):
        total.narrow(dim, start, num).add_(x.narrow(dim, at, num))
        at += num
    return total


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first position and the length of each run of consecutive positions; one empty run
    if there are no positions."""
    runs = list[tuple[int, int]]()
    for position in positions:
        if runs and position == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((position, 1))
    return runs or [(0, 0)]


# -- layers and losses -----------------------------------------------------------------------------


def zeros(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the result of a rank without elements: empty, or a part of a sum that is 0."""
    return x.new_zeros(tuple(shape), dtype=dtype)


def many_zeros(
    x: Tensor, shapes: Sequence[Sequence[int] | None], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor | None, ...]:
    """Return `zeros` for each result of an op; None for a result that the op does not return."""
    return tuple(
        None if shape is None else zeros(x, shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def empty_convolution(x: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Return a convolution without images or channels: the bias, or zeros."""
    y = x.new_zeros(tuple(shape))
    return y if bias is None else y + bias.view(1, -1, *(1 for _ in shape[2:]))


def empty_convolution_backward(
    grad: Tensor, shapes: Sequence[Sequence[int] | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a convolution without images or channels. Only the bias's can
    be other than zero."""
    x, weight, bias = shapes
    dims = [d for d in range(grad.dim()) if d != 1]
    return (
        None if x is None else grad.new_zeros(tuple(x)),
        None if weight is None else grad.new_zeros(tuple(weight)),
        None if bias is None else grad.sum(dims),
    )


def contiguously(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an op with contiguous tensors, for kernels that silently ignore strides."""
    return op(*[a.contiguous() if isinstance(a, Tensor) else a for a in args], **kwargs)


def sized_by(
    rows: Tensor, dim: int, op: Callable[..., Any], position: int, *args: Any, **kwargs: Any
) -> Any:
    """Call an op with these arguments. The argument at ``position`` is sizes, in which -1 stands
    for the size of ``dim`` of ``rows``."""
    sizes = [rows.shape[dim] if size == -1 else size for size in args[position]]
    return op(*args[:position], sizes, *args[position + 1 :], **kwargs)


def loss_over(loss: Callable[..., Tensor], count: int, *args: Any) -> Tensor:
    """Return the rank's part of the mean of a loss. ``args`` request the sum of the loss. A 16-bit
    result is rounded once."""
    dtype = _narrow_dtype(args)
    if dtype is None:
        return loss(*args) / count
    return (loss(*map(_wide, args)) / count).to(dtype)


def first_over(loss: Callable[..., Any], count: int, *args: Any) -> tuple[Tensor, ...]:
    """Return the rank's part of the mean of a loss, then the other results of the op, which returns
    its loss first. ``args`` request the sum of the loss. A 16-bit loss is rounded once."""
    dtype = _narrow_dtype(args)
    if dtype is None:
        value, *others = loss(*args)
        return (value / count, *others)
    value, *others = loss(*map(_wide, args))
    return (
        (value / count).to(dtype),
        *(x.to(dtype) if x.dtype == value.dtype else x for x in others),
    )


def loss_backward_over(
    backward: Callable[..., Tensor], count: int, grad: Tensor, *args: Any
) -> Tensor:
    """Return the gradient of the mean of a loss. ``args`` request the gradient of the sum. A 16-bit
    gradient is rounded once."""
    dtype = _narrow_dtype((grad, *args))
    if dtype is None:
        return backward(grad / count, *args)
    return backward(_wide(grad) / count, *map(_wide, args)).to(dtype)


_flash_attention = flash_attention_for_cpu  # calling it is faster than calling the op's overload


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Call the CPU kernel of attention, which is right only if the last dim has stride 1. If keys
    and values have different widths, which it does not take, they are padded with zeros."""
    width = v.shape[-1]
    if q.shape[-1] != width:
        q, k, v = _of_one_width(q, k, v)
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    out, lse = _flash_attention(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return out if out.shape[-1] == width else out[..., :width], lse


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with their last dims padded with zeros to the largest one."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the backward of the CPU kernel. It also needs a last dim of stride 1 and one width, and
    assumes that lse [b h t] has the memory of a contiguous [b t h], as its forward returns it."""
    widths = [x.shape[-1] for x in (q, k, v)]
    if widths[0] != widths[2]:
        grad, q, k, v, out = _of_one_width(grad, q, k, v, out)
    grad, q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out))
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    if dq.shape[-1] != widths[0] or dv.shape[-1] != widths[2]:
        dq, dk, dv = (dx[..., :n] for dx, n in zip((dq, dk, dv), widths, strict=True))
    return dq, dk, dv


def attention_of_heads(
    op: Callable[..., Any], kv_heads: Sequence[int], q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> Any:
    """Call an attention op with these heads of k and v [b g s d], shared evenly by query heads."""
    return op(q, picked(k, 1, kv_heads), picked(v, 1, kv_heads), *args)


def attention_of_heads_backward(
    op: Callable[..., Any],
    kv_heads: Sequence[int],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attention_of_heads`. The gradients of k and v are the rank's parts
    of sums, with 0 for the heads that it does not use."""
    dq, dk, dv = op(grad, q, picked(k, 1, kv_heads), picked(v, 1, kv_heads), *args)
    grads: list[Tensor] = []
    for x, dx in ((k, dk), (v, dv)):
        total = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
        grads.append(_add_at(dx, total, 1, kv_heads).to(x.dtype))
    return dq, grads[0], grads[1]
