"""What samples are written with: a Draw of random tensors over named sizes, `call`, `of`, `each`.

    "aten.mm.default": [of("m k", "k n")]                       # the same, written out:
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

    def complex(self, dims: str) -> torch.Tensor:
        return torch.complex(self(dims), self(dims))


Call = tuple[tuple[Any, ...], dict[str, Any]]
Sample = Callable[[Draw], Call]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def of(*args: Any, **kwargs: Any) -> Sample:
    """A sample whose positional arguments are drawn where they are texts.

    "a b" is a tensor, "+a b" of positive numbers, "?a b" of bools, "~a b" of complex numbers,
    "a b:9" of integers from 0 to 8, "a b:-9:9" from -9 to 8; in a list, "a" is the size.
    """

    def drawn(d: Draw, value: Any) -> Any:
        if isinstance(value, list):
            return [d.size(x) if isinstance(x, str) else x for x in value]
        if not isinstance(value, str):
            return value
        if ":" in value:
            dims, *low, high = value.split(":")
            return d.ints(dims, int(high), *map(int, low))
        kinds = {"+": d.positive, "?": d.bools, "~": d.complex}
        return kinds[value[0]](value[1:]) if value[:1] in kinds else d(value)

    return lambda d: (tuple(drawn(d, value) for value in args), kwargs)


def each(names: str, *samples: Sample, overload: str = "") -> dict[str, list[Sample]]:
    """Return the same samples for several aten ops; names end in their overload or omit it."""
    end = overload and f".{overload}"
    return {f"aten.{name}{end}": list(samples) for name in names.split()}
