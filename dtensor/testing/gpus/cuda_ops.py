"""CPU versions of ops that torch has only on CUDA, or whose results have other strides there.

Strides and dtypes are as in torch 2.13: the results of attention are (b t h d) in memory and their
rows begin on 16 bytes (aten/src/ATen/native/transformers/cuda/attention.cu); the memory-efficient
kernel pads `lse` to 32 rows; `native_layer_norm` of a 16-bit input returns float32 statistics
(aten/src/ATen/native/cuda/layer_norm_kernel.cu, `acc_type`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from dtensor.private_torch import OpOverload

_aten = torch.ops.aten
_sgd = _aten._fused_sgd_
_Grads: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _check_rows(*tensors: Tensor) -> None:
    """Raise RuntimeError for rows that do not begin on 16 bytes: a CUDA kernel would read wrong
    addresses, or fail so that the process cannot use the GPU any more."""
    for x in tensors:
        starts = [s * x.element_size() for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
        if x.stride(-1) != 1 or any(start % 16 for start in starts[:-1]) or x.data_ptr() % 16:
            raise RuntimeError(
                f"CUDA error: misaligned address: rows of {x.dtype}{list(x.shape)} with strides "
                f"{x.stride()} do not begin on 16 bytes"
            )


def _weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention weights p[b h t s] and lse[b h t], in float32. ``given``: the lse in a
    backward, which may include other keys; None: compute the lse of these keys."""
    scores = (q.float() @ k.float().mT) * scale
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        is_visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~is_visible, -math.inf)
    lse = scores.logsumexp(-1) if given is None else given
    p = (scores - lse[..., None]).exp()
    return p.where(lse[..., None] > -math.inf, 0), lse  # 0 for rows that are all masked


def _in_rows(x: Tensor, like: Tensor) -> Tensor:
    """Return x[b h t d] in the dtype of ``like``, with the memory order (b t h d)."""
    return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, out: Tensor, scale: float
) -> _Grads:
    """Return the float32 gradients of q, k and v from the attention weights ``p``."""
    g = grad.float()
    inner = (g * out.float()).sum(-1, keepdim=True)
    ds = p * (g @ v.float().mT - inner) * scale
    return ds @ k.float(), ds.mT @ q.float(), p.mT @ g


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_lse: bool,
    dropout: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not dropout
    _check_rows(q, k, v)
    by = q.shape[-1] ** -0.5 if scale is None else scale
    p, lse = _weights(q, k, bias, is_causal, by)
    padded = lse.new_full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), math.inf)
    padded[..., : q.shape[2]] = lse
    none = torch.zeros((), dtype=torch.int64)
    return _in_rows(p @ v.float(), q), padded[..., : None if compute_lse else 0], none, none


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert not dropout and not mask[3], "neither dropout nor a mask's gradient is simulated"
    _check_rows(grad, q, k, v)
    by = q.shape[-1] ** -0.5 if scale is None else scale
    p, _ = _weights(q, k, bias, is_causal, by, lse[..., : q.shape[2]])
    gradients = _backward(grad, q, k, v, p, out, by)
    return (*(_in_rows(x, q) for x in gradients), None)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute flash attention of q[b h t d], k[b g s d] and v[b g s d]; h is a multiple of g."""
    assert not dropout
    _check_rows(q, k, v)
    by = q.shape[-1] ** -0.5 if scale is None else scale
    repeated = q.shape[1] // k.shape[1]
    p, lse = _weights(q, k.repeat_interleave(repeated, 1), None, is_causal, by)
    out = _in_rows(p @ v.repeat_interleave(repeated, 1).float(), q)
    seed = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], *seed, q.new_empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, is_causal: bool,
    seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not dropout
    _check_rows(grad, q, k, v, out)
    by = q.shape[-1] ** -0.5 if scale is None else scale
    groups, repeated = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
    p, _ = _weights(q, keys, None, is_causal, by, lse)
    dq, dk, dv = _backward(grad, q, keys, values, p, out, by)
    folded = [x.reshape(x.shape[0], groups, repeated, *x.shape[2:]).sum(2) for x in (dk, dv)]
    return tuple(_in_rows(x, q) for x in (dq, *folded))


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, compute_lse: bool, dropout: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute cuDNN's attention, whose output has q's layout."""
    assert bias is None and compute_lse
    out, lse, *_ = _flash(q, k, v, dropout, is_causal, scale=scale)
    none = torch.zeros((), dtype=torch.int64)
    out = torch.empty_like(q).copy_(out)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], none, none, None


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, bias: None, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float,
    is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of cuDNN's attention, in the layouts of q, k and v."""
    dims = [dim for dim, size in enumerate(q.shape) if size > 1]
    like, *strides = ([x.stride(dim) for dim in dims] for x in (torch.empty_like(q), grad, out))
    assert strides == [like, like], "torch keeps the kernel by the strides of q, not of these"
    assert bias is None and lse.shape == (*q.shape[:3], 1)
    gradients = _flash_backward(
        grad, q, k, v, out, lse[..., 0], None, None, max_q, max_k, dropout, is_causal,
        seed, offset, scale=scale,
    )  # fmt: skip
    return tuple(torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), gradients, strict=True))


def fused_sdp_choice(q: Tensor, k: Tensor, *_: object, **__: object) -> int:
    """Return the kernel that torch chooses for 16-bit heads on an H100, by the user's settings."""
    cuda = torch.backends.cuda
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if cuda.cudnn_sdp_enabled() and not is_deterministic and k.shape[2] > 1:
        return SDPBackend.CUDNN_ATTENTION.value
    return (SDPBackend.FLASH_ATTENTION if cuda.flash_sdp_enabled() else SDPBackend.MATH).value


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return _aten.native_layer_norm(x, shape, weight, bias, eps)
    y, mean, rstd = _aten.native_layer_norm(x.float(), shape, _float(weight), _float(bias), eps)
    return y.to(x.dtype), mean, rstd


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, mask: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    op = _aten.native_layer_norm_backward
    if x.dtype not in (torch.float16, torch.bfloat16):
        return op(grad, x, shape, mean, rstd, weight, bias, mask)
    gradients = op(grad.float(), x.float(), shape, mean, rstd, _float(weight), _float(bias), mask)
    return tuple(None if each is None else each.to(x.dtype) for each in gradients)


def _fused_sgd(*lists: list[Tensor], op: OpOverload, **options: Any) -> None:
    """Update in float32: torch's kernel for CPUs leaves most 16-bit parameters unchanged."""
    wide = [[x.float() if x.itemsize == 2 else x for x in each] for each in lists]
    op(*wide, **options)
    for x, y in zip(chain(*lists), chain(*wide), strict=True):
        x.copy_(y)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, *more: Any) -> Tensor:
    """Return NaN where torch's kernel for GPUs leaves memory as it was: in products of no rows, and
    past the last group."""
    out = _aten._grouped_mm(a, b, offsets, *more).clone()
    if offsets is not None and a.dim() == b.dim():
        out[offsets.diff(prepend=offsets.new_zeros(1)) == 0] = math.nan
    elif offsets is not None:
        by_row = out if a.dim() == 2 else out.t()
        by_row[int(offsets[-1]) :] = math.nan
    return out


ON_CUDA: Mapping[OpOverload, Callable[..., Any]] = {
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._grouped_mm.default: _grouped_mm,
    **{op: partial(_fused_sgd, op=op) for op in (_sgd.default, _sgd.tensor_lr)},
}
"""For each op, the function that computes it on CPU tensors."""
