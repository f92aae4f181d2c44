"""What samples are written with: a Draw of random tensors over named sizes, `call`, `words`.

    "aten.mm.default": [lambda d: call(d("m k"), d("k n"))]

A sample is a function of a Draw, which gives random float64 tensors for named sizes; the names
take other sizes, dividing and not, in each of the Draw's variants. At the EDGES, sizes 1 and 0, an
op or a sample may raise: there it is not tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Sizes by order of first mention: even, odd, and below the number of ranks.
VARIANTS = ((4, 6, 4, 2), (5, 7, 3, 5), (2, 3, 2, 7))
EDGES = ((1, 4, 3, 2), (4, 1, 2, 3), (0, 4, 3, 2), (4, 0, 2, 3))


class Draw:
    """Random tensors over named sizes; ``negate`` turns the sign of the floats.

    ``variant`` counts through VARIANTS and then EDGES.
    """

    def __init__(self, variant: int, *, negate: bool = False, seed: int = 0) -> None:
        self.sizes: dict[str, int] = {}
        self.variant = variant
        self.sign = -1.0 if negate else 1.0
        self.generator = torch.Generator().manual_seed(17 + variant + 100 * negate + 1000 * seed)

    def size(self, name: str) -> int:
        if name.isdigit():
            return int(name)
        variant = (*VARIANTS, *EDGES)[self.variant]
        return self.sizes.setdefault(name, variant[len(self.sizes) % len(variant)])

    def shape(self, dims: str) -> tuple[int, ...]:
        return tuple(self.size(name) for name in dims.split())

    def __call__(self, dims: str) -> torch.Tensor:
        shape = self.shape(dims)
        return self.sign * torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, dims: str) -> torch.Tensor:
        return self(dims).abs() + 0.1

    def ints(self, dims: str, high: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, self.shape(dims), generator=self.generator)

    def bools(self, dims: str) -> torch.Tensor:
        return self(dims) > 0


def words(text: str) -> list[str]:
    return text.split()


Sample = Callable[[Draw], tuple[tuple[Any, ...], dict[str, Any]]]


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs
