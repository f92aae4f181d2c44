"""How a kernel's results lie in memory: as the op's do, which planners and other kernels rely on.

    dx = laid_as(x, dx)                    # with the strides of torch.empty_like(x)

Invariants: nothing is allocated unless the values must be copied. Not here: anything of Triton's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def laid_as(like: Tensor, made: Tensor) -> Tensor:
    """The values of `made` with the strides of `empty_like(like)`; itself where it has them."""
    strides = torch.empty_like(like, device="meta").stride()
    if made.stride() == strides:
        return made
    wanted = torch.empty_strided(like.shape, strides, dtype=made.dtype, device=made.device)
    return wanted.copy_(made)
