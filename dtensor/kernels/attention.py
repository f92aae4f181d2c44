"""Attention over grouped heads through torch's flash kernels, which repeat no key and no value.

    out, lse = attention(q[b h t d], k[b g s d], v[b g s d], is_causal, scale)      # h = g * r
    dq, dk, dv = attention_backward(grad, q, k, v, out, lse, is_causal, scale)

The arguments and results are those of the ops of these names, local tensors, on a GPU. Torch's own
kernels reach what one of ours would not (FlashAttention-2: Dao 2023, arXiv:2307.08691); forward and
backward are two of its operators, chosen by the same rule, as the backward reads what the forward
kept.

Invariants: what flash does not take (32-bit floats, heads of more than 256 or of odd sizes, a
causal mask that is not square, which it aligns at the other corner) the op computes. Not here: a
mask other than causal, dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor.kernels.strides import laid_as

_aten = torch.ops.aten

_SMALLER = ((8, 6), (8, 7), (8, 9))
"""Capabilities whose shared memory is too small for the backward of heads of more than 192."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q[b h t d], k[b g s d], v[b g s d] -> out[b h t d] laid out as q, lse[b h t] in float32."""
    if not _flash_takes(q, k, is_causal):
        return torch.ops.dt.attention(q, k, v, is_causal, scale)
    q_rows, k_rows, v_rows = map(_in_rows, (q, k, v))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        q_rows, k_rows, v_rows, 0.0, is_causal, False, scale=scale
    )
    return laid_as(q, out), lse.contiguous()


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq[b h t d], dk[b g s d], dv[b g s d], each laid out as q, k, v."""
    if not _flash_takes(q, k, is_causal):
        args = (grad, q, k, v, out, lse, is_causal, scale)
        return torch.ops.dt.attention_backward(*args)
    # the random state of a dropout that there is not
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    rows = [_in_rows(x) for x in (grad, q, k, v, out)]
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        *rows, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, unused,
        scale=scale,
    )  # fmt: skip
    return laid_as(q, dq), laid_as(k, dk), laid_as(v, dv)


def _flash_takes(q: Tensor, k: Tensor, is_causal: bool) -> bool:
    d = q.shape[-1]
    capability = _capability(q.device)
    return (
        capability >= (8, 0)
        and q.dtype in (torch.float16, torch.bfloat16)
        and d % 8 == 0
        and d <= (192 if capability in _SMALLER else 256)
        and (q.shape[2] == k.shape[2] or not is_causal)
        and q.numel() > 0
        and k.numel() > 0
    )


def _capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU for which torch has flash kernels; else (0, 0)."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return (0, 0)
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def _in_rows(x: Tensor) -> Tensor:
    """As flash reads it: elements of a row adjacent, rows on 16-byte boundaries. Torch checks the
    first alone, and a row that lies elsewhere ends the use of the GPU. Memory begins on one."""
    starts = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    starts = [start * x.element_size() for start in (*starts, x.storage_offset())]
    is_read = x.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return x if is_read else x.clone(memory_format=torch.contiguous_format)
