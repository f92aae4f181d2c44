"""Attention with grouped heads by torch's fused kernels, without repeating keys and values.

    out, lse = attention(q[b h t d], k[b g s d], v[b g s d], is_causal, scale)      # h = g * r
    dq, dk, dv = attention_backward(grad, q, k, v, out, lse, is_causal, scale)

The functions have the arguments and results of the dt ops of these names, local tensors on a GPU.
torch chooses between cuDNN's kernel and flash (FlashAttention-2: Dao 2023, arXiv:2307.08691), in
its order for the device, by shapes, dtypes and the settings of `torch.nn.attention.sdpa_kernel`.
So forward, backward and all ranks run the same kernel.

Invariants: the op, which has the memory-efficient kernel, computes all other calls: if torch
chooses that kernel or none, float32 and float64, values of another width than keys, a causal mask
that is not square, which flash aligns at the other corner, and the options (window and so on). If
options are given, or the queries are split, local code calls these functions for the pieces that
need no mask. torch keeps cuDNN's backward by the strides of q, k and v, so ``out`` and ``grad``
always have the strides of `empty_like(q)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from dtensor.kernels.strides import laid_as

_aten = torch.ops.aten
_fused_sdp_choice = _aten._fused_sdp_choice.default
_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value

_SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities whose shared memory is too small for the backward of flash with head sizes
over 192."""


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
    kernel = None if any(options) or sinks is not None else _kernel(q, k, v, is_causal)
    if kernel is None:
        return torch.ops.dt.attention(q, k, v, is_causal, scale, *options, sinks)
    rows = [_aligned_rows(x) for x in (q, k, v)]
    if kernel == _CUDNN:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *rows, None, True, 0.0, is_causal, False, scale=scale
        )
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            *rows, 0.0, is_causal, False, scale=scale
        )
    return laid_as(q, out), lse.reshape(q.shape[:3]).contiguous()  # cuDNN's lse is [b h t 1]


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
    kernel = None if any(options) else _kernel(q, k, v, is_causal)
    if kernel is None:
        args = (grad, q, k, v, out, lse, is_causal, scale, *options)
        return torch.ops.dt.attention_backward(*args)
    g_rows, q_rows, k_rows, v_rows, o_rows = map(_aligned_rows, (grad, q, k, v, out))
    lengths = (q.shape[2], k.shape[2])
    # Both operators require the random state of dropout, which is not used.
    if kernel == _CUDNN:
        g_rows, o_rows = laid_as(q_rows, g_rows), laid_as(q_rows, o_rows)
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            g_rows, q_rows, k_rows, v_rows, o_rows, lse.contiguous().unsqueeze(-1),
            unused, unused, None, None, None, *lengths, 0.0, is_causal, scale=scale,
        )  # fmt: skip
    else:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            g_rows, q_rows, k_rows, v_rows, o_rows, lse.contiguous(), None, None,
            *lengths, 0.0, is_causal, seed, unused, scale=scale,
        )  # fmt: skip
    return laid_as(q, dq), laid_as(k, dk), laid_as(v, dv)


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> int | None:
    """Return `_CUDNN` or `_FLASH` if torch chooses this kernel for the operands on this GPU and
    both of its directions support them, else None."""
    capability = _capability(q.device)
    if (
        capability < (8, 0)
        or q.dtype not in (torch.float16, torch.bfloat16)
        or v.shape[-1] != q.shape[-1]
        or q.shape[-1] % 8  # torch chooses before it pads heads, and the kernels do not pad
        or (is_causal and q.shape[2] != k.shape[2])
        or not (q.numel() and k.numel())
    ):
        return None
    like = [x if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (q, k, v)]  # fmt: skip
    kernel = _fused_sdp_choice(*like, None, 0.0, is_causal, enable_gqa=True)
    is_flash = kernel == _FLASH and not (q.shape[-1] > 192 and capability in _SMALL_SHARED_MEMORY)
    return kernel if kernel == _CUDNN or is_flash else None


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU for which torch has fused kernels, else (0, 0)."""
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
