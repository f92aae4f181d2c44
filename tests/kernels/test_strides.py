"""Tests that results have the op's strides, and that finding the strides allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.kernels import strides
from dtensor.sharding.ops import library

BOTH = pytest.mark.parametrize(
    "laid_as", [strides.laid_as, library.laid_as], ids=["kernels", "ops"]
)
LIKE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4, 5),
    "transposed": lambda: torch.randn(3, 5, 4).mT,
    "heads": lambda: torch.randn(3, 5, 4).permute(2, 0, 1),
    "every other": lambda: torch.randn(3, 4, 10)[..., ::2],
    "expanded": lambda: torch.randn(3, 1, 5).expand(3, 4, 5),
    "of a wider row": lambda: torch.randn(3, 4, 8)[..., :5],
    "empty": lambda: torch.randn(3, 0, 5).mT,
    "one": lambda: torch.randn(()),
}


class Made(TorchDispatchMode):
    """Count the elements of op results on devices other than meta, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not made.is_meta and not func.is_view:
            self.elements += made.numel()
        return made


@BOTH
@pytest.mark.parametrize("layout", LIKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_laid_as_gives_strides_of_empty_like_without_allocating(
    laid_as: Any, layout: str, dtype: torch.dtype
) -> None:
    like = LIKE[layout]()
    wanted = torch.empty_like(like, dtype=dtype).copy_(like)
    with Made() as made:
        assert laid_as(like, wanted) is wanted
    assert made.elements == 0
    other = torch.empty(like.shape[::-1], dtype=dtype).permute(tuple(range(like.dim()))[::-1])
    found = laid_as(like, other.copy_(like))
    assert found.stride() == wanted.stride() and torch.equal(found, wanted)
    assert found.dtype == dtype
