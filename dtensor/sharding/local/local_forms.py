"""Functions that ranks run in place of an op whose local form differs from its global one.

    mean_over(x_shard, (0,), False, 8, None)              # a shard of 4 of 8 rows: its sum over 8
    loss_over(aten.huber_loss.default, 8, x, y, 2, 1.0)   # a part of the mean over 8 elements

Localizers name these functions; local graphs call them, so they are plain functions at module
level. Invariants: tensors in, tensors out, no communication; right for shards of size 0; a mean's
part is the local sum over the *global* count, forward and backward. Not here: their callers (the
rules), or the project's own ops (ops/attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype, is_narrow
from dtensor.private_torch import flash_attention_for_cpu

aten: Any = torch.ops.aten

Pieces = Sequence[tuple[int, int]]


def mean_over(
    x: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None
) -> Tensor:
    """The local sum over the global count: the sum of the ranks' results is the mean.

    For 16 bits it is summed and divided in float32, as in torch's kernels, then rounded once."""
    result_dtype = x.dtype if dtype is None else dtype
    wide = torch.float32 if is_narrow(result_dtype) else dtype
    total = torch.sum(x, tuple(dims), keepdim=keepdim, dtype=wide) / count
    return total.to(result_dtype) if is_narrow(result_dtype) else total


def in_float32(op: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The op on float32 copies of its 16-bit operands: a part of a sum that is not rounded yet."""
    return op(*map(_wide, args), **kwargs).float()


def _wide(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return value.float() if is_tensor and is_narrow(value.dtype) else value


def _narrow_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """The dtype of floats that are all of 16 bits; None if some are not."""
    dtypes = {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and all(map(is_narrow, dtypes)) else None


def filled(
    x: Tensor, shape: Sequence[int], value: float | bool, dtype: torch.dtype | None = None
) -> Tensor:
    """A new tensor on x's device: a reduction's identity, for ranks without elements to reduce."""
    return x.new_full(tuple(shape), value, dtype=dtype)


def arange_pieces(
    pieces: Pieces,
    start: float,
    step: float,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """The elements of arange at these global positions."""
    parts = [torch.arange(lo, hi, dtype=torch.int64, device=device) for lo, hi in pieces]
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    where = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (where * step + start).to(dtype)


def triangle(x: Tensor, upper: bool, diagonal: int, rows: Pieces, columns: Pieces) -> Tensor:
    """tril or triu of a shard that holds these rows and columns of the global matrices."""
    i = arange_pieces(rows, 0, 1, dtype=torch.int64, device=x.device)[:, None]
    j = arange_pieces(columns, 0, 1, dtype=torch.int64, device=x.device)[None, :]
    keep = j - i >= diagonal if upper else j - i <= diagonal
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """as_strided of a contiguous tensor, for any strides of x here."""
    return x.contiguous().as_strided(size, stride, offset).clone()


def strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """as_strided_scatter into a contiguous tensor."""
    return torch.as_strided_scatter(x.contiguous(), source, size, stride, offset)


def part_of_reshape(
    x: Tensor, whole: Sequence[int], shape: Sequence[int], dim: int, positions: Sequence[int]
) -> Tensor:
    """These positions of a dim of x reshaped to ``whole``, as ``shape``."""
    return picked(x.reshape(tuple(whole)), dim, positions).reshape(tuple(shape))


def filled_reshape(
    x: Tensor, whole: Sequence[int], shape: Sequence[int], dim: int, positions: Sequence[int]
) -> Tensor:
    """x at these positions of a dim of zeros [whole], reshaped to ``shape``."""
    return _placed(x, x.new_zeros(tuple(whole)), dim, positions).reshape(tuple(shape))


def heads_at(x: Tensor, positions: Sequence[int]) -> Tensor:
    """The heads of x [b h s d] at these positions, without a copy where all are one head."""
    if len(positions) > 1 and len(set(positions)) == 1:
        return x.narrow(1, positions[0], 1).expand(-1, len(positions), -1, -1)
    return picked(x, 1, positions)


def picked(x: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """These positions of a dim, without a copy where they are neighbours."""
    parts = [x.narrow(dim, start, num) for start, num in _runs(positions)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _placed(x: Tensor, total: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """``total`` with x added at these positions of a dim, of which one may occur twice."""
    at = 0
    for start, num in _runs(positions):
        total.narrow(dim, start, num).add_(x.narrow(dim, at, num))
        at += num
    return total


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """The first position and the length of each run of neighbours; one empty run if there are
    no positions."""
    runs = list[tuple[int, int]]()
    for position in positions:
        if runs and position == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((position, 1))
    return runs or [(0, 0)]


# -- layers and losses -----------------------------------------------------------------------------


def zeros(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The result of a rank without elements: its shard is empty, its part of a sum is 0."""
    return x.new_zeros(tuple(shape), dtype=dtype)


def many_zeros(
    x: Tensor, shapes: Sequence[Sequence[int] | None], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor | None, ...]:
    """The same for an op with several results; None for a result that it does not return."""
    return tuple(
        None if shape is None else zeros(x, shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def empty_convolution(x: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """The result without images, input or output channels: the bias alone."""
    y = x.new_zeros(tuple(shape))
    return y if bias is None else y + bias.view(1, -1, *(1 for _ in shape[2:]))


def empty_convolution_backward(
    grad: Tensor, shapes: Sequence[Sequence[int] | None]
) -> tuple[Tensor | None, ...]:
    """The gradients without images, input or output channels: the bias's gradient needs no
    input."""
    x, weight, bias = shapes
    dims = [d for d in range(grad.dim()) if d != 1]
    return (
        None if x is None else grad.new_zeros(tuple(x)),
        None if weight is None else grad.new_zeros(tuple(weight)),
        None if bias is None else grad.sum(dims),
    )


def contiguously(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For kernels that read storage in order despite the strides, and are silently wrong."""
    return op(*[a.contiguous() if isinstance(a, Tensor) else a for a in args], **kwargs)


def loss_over(loss: Callable[..., Tensor], count: int, *args: Any) -> Tensor:
    """The local part of a mean: ``args`` request the sum. For 16 bits it is rounded once."""
    dtype = _narrow_dtype(args)
    if dtype is None:
        return loss(*args) / count
    return (loss(*map(_wide, args)) / count).to(dtype)


def first_over(loss: Callable[..., Any], count: int, *args: Any) -> tuple[Tensor, ...]:
    """The same for a loss that returns its value first, and other results."""
    dtype = _narrow_dtype(args)
    if dtype is None:
        value, *rest = loss(*args)
        return (value / count, *rest)
    value, *rest = loss(*map(_wide, args))
    return (
        (value / count).to(dtype),
        *(x.to(dtype) if x.dtype == value.dtype else x for x in rest),
    )


def loss_backward_over(
    backward: Callable[..., Tensor], count: int, grad: Tensor, *args: Any
) -> Tensor:
    """The gradient of a mean: ``args`` request that of the sum. For 16 bits it is rounded once."""
    dtype = _narrow_dtype((grad, *args))
    if dtype is None:
        return backward(grad / count, *args)
    return backward(_wide(grad) / count, *map(_wide, args)).to(dtype)


_flash_attention = flash_attention_for_cpu  # faster than its overload


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The CPU's kernel, which is right for strides of 1 in the last dim only."""
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    return _flash_attention(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)


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
    """Its gradients, under the same condition."""
    grad, q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return dq, dk, dv


def attention_of_heads(
    op: Callable[..., Any], kv_heads: Sequence[int], q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> Any:
    """The attention op with these heads of k and v [b g s d]: one for each query head, or for as
    many query heads each."""
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
    """The gradients of `attention_of_heads`. Those of k and v are this rank's part of a sum, with 0
    for the heads that it does not use."""
    dq, dk, dv = op(grad, q, picked(k, 1, kv_heads), picked(v, 1, kv_heads), *args)
    grads: list[Tensor] = []
    for x, dx in ((k, dk), (v, dv)):
        total = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
        grads.append(_placed(dx, total, 1, kv_heads).to(x.dtype))
    return dq, grads[0], grads[1]
