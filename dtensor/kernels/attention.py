"""Attention with grouped heads by torch's flash kernels, without repeating keys and values.

    out, lse = attention(q[b h t d], k[b g s d], v[b g s d], is_causal, scale)      # h = g * r
    dq, dk, dv = attention_backward(grad, q, k, v, out, lse, is_causal, scale)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU
(FlashAttention-2: Dao 2023, arXiv:2307.08691). Forward and backward use the same rule to choose the
kernel, because the backward reads the forward's lse.

Invariants: the op computes what flash does not support: float32 and float64, head sizes above 256
or not divisible by 8, values of another width than keys, a causal mask that is not square, which
flash aligns at the other corner, and the options (window and so on). If options are given, or the
queries are split, local code calls these functions for the pieces that need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor.kernels.strides import laid_as

_aten = torch.ops.aten

_SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9))
"""Compute capabilities whose shared memory is too small for the backward of head sizes over 192."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    window: Sequence[int] = (),
    softcap: float = 0.0,
    query_values: Sequence[Tensor] | None = None,
    key_values: Sequence[Tensor] | None = None,
    comparisons: Sequence[str] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out[b h t d] with q's layout and lse[b h t] in float32; q[b h t d], k, v[b g s d]."""
    options = (window, softcap, query_values, key_values, comparisons)
    if any(options) or sinks is not None or not _is_supported(q, k, v, is_causal):
        return torch.ops.dt.attention(q, k, v, is_causal, scale, *options, sinks)
    q_rows, k_rows, v_rows = map(_aligned_rows, (q, k, v))
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
    window: Sequence[int] = (),
    softcap: float = 0.0,
    query_values: Sequence[Tensor] | None = None,
    key_values: Sequence[Tensor] | None = None,
    comparisons: Sequence[str] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq[b h t d], dk[b g s d] and dv[b g s d] with the layouts of q, k and v."""
    options = (window, softcap, query_values, key_values, comparisons)
    if any(options) or not _is_supported(q, k, v, is_causal):
        args = (grad, q, k, v, out, lse, is_causal, scale, *options)
        return torch.ops.dt.attention_backward(*args)
    # The operator requires the random state of dropout, which is not used.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    rows = [_aligned_rows(x) for x in (grad, q, k, v, out)]
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        *rows, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, unused,
        scale=scale,
    )  # fmt: skip
    return laid_as(q, dq), laid_as(k, dk), laid_as(v, dv)


def _is_supported(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Return whether torch's flash kernels support these operands on this GPU."""
    d = q.shape[-1]
    capability = _capability(q.device)
    return (
        capability >= (8, 0)
        and q.dtype in (torch.float16, torch.bfloat16)
        and d % 8 == 0
        and v.shape[-1] == d
        and d <= (192 if capability in _SMALL_SHARED_MEMORY else 256)
        and (q.shape[2] == k.shape[2] or not is_causal)
        and q.numel() > 0
        and k.numel() > 0
    )


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU for which torch has flash kernels, else (0, 0)."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return (0, 0)
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def _aligned_rows(x: Tensor) -> Tensor:
    """Return x, copied if its rows are not contiguous or do not begin on 16-byte boundaries.

    Torch checks only contiguity; an unaligned row makes the GPU unusable for the process.
    """
    starts = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    starts = [start * x.element_size() for start in (*starts, x.storage_offset())]
    is_read = x.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return x if is_read else x.clone(memory_format=torch.contiguous_format)
