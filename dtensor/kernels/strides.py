"""Give a kernel's results the strides of the op's results, on which other kernels rely.

dx = laid_as(x, dx)                    # with the strides of torch.empty_like(x)
"""

from __future__ import annotations

import torch
from torch import Tensor


def laid_as(like: Tensor, made: Tensor) -> Tensor:
    """Return `made` with the strides of `empty_like(like)`, copied only if its strides differ."""
    strides = torch.empty_like(like, device="meta").stride()
    if made.stride() == strides:
        return made
    wanted = torch.empty_strided(like.shape, strides, dtype=made.dtype, device=made.device)
    return wanted.copy_(made)
