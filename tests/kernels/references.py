"""References in plain torch and float64 for the ops that have kernels, with the ops' schemas.

    rms_norm(x.double(), weight.double(), eps, offset, inner, out)

The caller widens the operands. Only the rounding inside an op is done here, to the dtypes that
the op names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIDE = torch.float64


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, inner: torch.dtype, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    n = rounded(x * rstd, inner)
    return rounded(n * (weight + offset), out), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    n = x * rstd
    scaled = grad * (weight + offset)
    dx = rstd * (scaled - n * (scaled * n).mean(-1, keepdim=True))
    return dx, (grad * n).flatten(0, -2).sum(0)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = rounded(x + residual, dtype)
    mean = total.mean(-1, keepdim=True)
    rstd = torch.rsqrt((total - mean).pow(2).mean(-1, keepdim=True) + eps)
    return total, (total - mean) * rstd * weight + bias, mean, rstd


def act(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return x * torch.sigmoid(x)
    return torch.nn.functional.gelu(x, approximate="none" if kind == "gelu" else "tanh")


def act_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(act(leaf, kind), leaf, grad)[0]


def rope(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    left, right = x.chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    return rounded(x * cos, dtype) + rounded(turned * sin, dtype)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = (grad * sin).chunk(2, -1)
    return grad * cos + torch.cat((right, -left), -1)


def column_here(target: Tensor, vocab: Sequence[int], columns: int) -> tuple[Tensor, Tensor]:
    """Return whether a target's column is on this rank, and its local index, or 0."""
    pieces = [i for lo, hi in zip(vocab[::2], vocab[1::2], strict=True) for i in range(lo, hi)]
    known = torch.tensor(pieces or list(range(columns)), dtype=torch.int64)
    equal = target.to(torch.int64)[:, None] == known[None, :]
    return equal.any(1), equal.int().argmax(1)


def ce_stats(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: Sequence[int] = ()
) -> Tensor:
    here, column = column_here(target, vocab, logits.shape[1])
    most = logits.amax(1)
    safe = torch.where(most == float("-inf"), 0, most)
    total = (logits - safe[:, None]).exp().sum(1)
    picked = logits.gather(1, column[:, None])[:, 0]
    return torch.stack((most, total, torch.where(here & (target != ignore_index), picked, 0)), 1)


def ce_backward(
    grad: Tensor,
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    ignore_index: int,
    vocab: Sequence[int] = (),
) -> Tensor:
    here, column = column_here(target, vocab, logits.shape[1])
    p = (logits - stats[:, :1]).exp() / stats[:, 1:2]
    hot = torch.zeros_like(p).scatter_(1, column[:, None], here.to(p.dtype)[:, None])
    return torch.where((target != ignore_index)[:, None], (p - hot) * grad[:, None], 0)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype`` and back; float32 stays as exact as float64."""
    return x if dtype == torch.float32 else x.to(dtype).to(WIDE)
