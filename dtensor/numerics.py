"""Names of dtypes, strides of contiguous tensors, and reductions, for all levels.

    dtype_name(torch.bfloat16)                   # "bf16"
    fold([a0, a1, a2], "sum")                    # ((a0 + a1) + a2), in rank order
    register_reduction(Reduction(name="xor", fold=torch.bitwise_xor, identity=torch.zeros_like))

A reduction is a left fold in the given order, so all backends return the same bits. Tensors may be
folded whole or in pieces, which are cut at multiples of `Reduction.unit`. Floats narrower than 32
bits are summed in float32. The meaning of a reduction's name never changes within a process. This
file imports only torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

ReduceOp = str
"""The name of a `Reduction` in placements, rules, programs and texts."""

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "f32" for torch.float32; torch's own name for a dtype that is not in `DTYPES`."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether sums of this dtype are accumulated in float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether the dtype is an integer dtype; bool is none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels accumulate statistics of values of ``dtype``: float64 for
    float64 and complex128, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A function that combines the parts of a pending value.

    Args:
        name: an identifier: its name in placements, rules and programs.
        fold: combines the fold so far with the next part, without changing them. Both have the same
            shape (any shape) and dtype. It combines each pair of elements on its own.
        identity: returns the identity element, a tensor like its argument. None if the fold of a
            value with itself is that value (a maximum): then all ranks may hold the value.
        unit: the size of the last dim if its elements are folded together. No placement splits this
            dim, and ``fold`` takes rows, ``[n, unit]``.
        dtypes: the allowed dtypes; () for all.
        widens: floats narrower than 32 bits are folded in float32, and rounded once.
        numbers: folds two Python numbers. None if only tensors can be folded.
        parts: (x, num, generator) -> num random tensors whose fold is x, for `dt.testing`. None: x
            and identities.
    """

    name: str
    fold: Callable[[Tensor, Tensor], Tensor]
    identity: Callable[[Tensor], Tensor] | None = None
    unit: int = 1
    dtypes: tuple[torch.dtype, ...] = ()
    widens: bool = False
    numbers: Callable[[Any, Any], Any] | None = None
    parts: Callable[[Tensor, int, torch.Generator], Sequence[Tensor]] | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.unit < 1:
            raise ValueError(
                f"Reduction(name={self.name!r}, unit={self.unit!r}): the name is a word, the unit "
                f'at least 1.\nfix: Reduction(name="xor", fold=torch.bitwise_xor)'
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle a built-in reduction by its name, any other with its functions."""
        if self.name in BUILT_IN:
            return _named, (self.name,)
        return object.__reduce_ex__(self, protocol)

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        fits = self.unit == 1 or (len(shape) > 0 and shape[-1] == self.unit)
        return fits and (not self.dtypes or dtype in self.dtypes)

    @property
    def wants(self) -> str:
        """The allowed shapes and dtypes, for messages: "f32[...,3] or f64[...,3]"."""
        sizes = "[...]" if self.unit == 1 else f"[...,{self.unit}]"
        return " or ".join(f"{dtype_name(d)}{sizes}" for d in self.dtypes) or f"any dtype {sizes}"

    def of(self, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the left fold ((a0 + a1) + a2) + ... as ``dtype`` (default: the parts' dtype).

        If the reduction widens, narrow floats are converted to float32 before the fold, and the
        result is rounded once at the end. The bits do not depend on the rank, nor on whether the
        parts are folded whole, in pieces, or flattened.
        """
        first = parts[0]
        result_dtype = first.dtype if dtype is None else dtype
        if len(parts) == 1:
            return first.to(result_dtype, copy=True, memory_format=torch.contiguous_format)
        wide: Iterable[Tensor] = parts
        if self.widens and is_narrow(first.dtype):
            wide = (p.float() for p in parts)
        if self.unit > 1:
            rows = (p.reshape(-1, self.unit) for p in wide)
            return (
                functools.reduce(self.fold, rows).to(result_dtype).reshape(first.shape).contiguous()
            )
        return functools.reduce(self.fold, wide).to(result_dtype).contiguous()

    def parts_of(self, x: Tensor, num: int, generator: torch.Generator) -> Sequence[Tensor]:
        """Return ``num`` random tensors whose fold is ``x``."""
        if self.parts is None:
            return [x, *(rest_of(x, self.name) for _ in range(num - 1))]
        return self.parts(x, num, generator)


REDUCTIONS: dict[str, Reduction] = {}
"""The reductions by name."""


def register_reduction(reduction: Reduction) -> Reduction:
    """Register a reduction, so that placements, rules and programs can use its name.

    It is sent to the actors with the programs that use it. Raises ValueError if another reduction
    has this name.
    """
    if REDUCTIONS.setdefault(reduction.name, reduction) != reduction:
        raise ValueError(
            f"There is a reduction {reduction.name!r} already, which programs may have planned "
            f"with.\nfix: register this one under another name"
        )
    return reduction


def _named(name: str) -> Reduction:
    return REDUCTIONS[name]


def fold(parts: Sequence[Tensor], op: ReduceOp, dtype: torch.dtype | None = None) -> Tensor:
    return REDUCTIONS[op].of(parts, dtype)


def rest_of(x: Tensor, op: ReduceOp) -> Tensor:
    """Return the part of all ranks but the first, if the part of the first rank is the whole value:
    the reduction's identity, shaped like ``x``."""
    identity = REDUCTIONS[op].identity
    return x if identity is None else identity(x)


def reduction_names_text() -> str:
    """Return the names of all reductions for a message: '"sum", "max", "min" or "softmax"'."""
    *others, last = (f'"{name}"' for name in REDUCTIONS)
    return f"{', '.join(others)} or {last}"


# -- dtensor's own ---------------------------------------------------------------------------------


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)
    return torch.randint(-3, 4, x.shape, dtype=torch.int64, generator=generator).to(x.dtype)


def _parts_of_sum(x: Tensor, num: int, generator: torch.Generator) -> list[Tensor]:
    terms = [_noise(x, generator) for _ in range(num - 1)]
    return [functools.reduce(operator.sub, terms, x), *terms]


def _parts_of_extreme(sign: int, x: Tensor, num: int, generator: torch.Generator) -> list[Tensor]:
    """Return parts whose maximum (``sign`` -1) or minimum (``sign`` 1) is ``x``. A random part has
    the value of each element; the others have smaller (larger) values."""
    owner = torch.randint(0, num, x.shape, generator=generator)
    others = (x + sign * _noise(x, generator).abs() for _ in range(num))
    return [torch.where(owner == i, x, other) for i, other in enumerate(others)]


def _fold_softmax(total: Tensor, part: Tensor) -> Tensor:
    """Combine softmax statistics of two parts of x. Each row is (the maximum, the sum of
    exp(x - maximum), the sum of the picked x)."""
    m0, s0, t0 = total.unbind(1)
    m1, s1, t1 = part.unbind(1)
    top = torch.maximum(m0, m1)
    # The sum of the part with the larger maximum stays exact, and inf - inf is never computed.
    s0 = torch.where(m0 == top, s0, s0 * (m0 - top).exp())
    s1 = torch.where(m1 == top, s1, s1 * (m1 - top).exp())
    return torch.stack((top, s0 + s1, t0 + t1), 1)


def _softmax_identity(x: Tensor) -> Tensor:
    return x.new_tensor([-math.inf, 0, 0]).expand(x.shape).contiguous()


def _parts_of_softmax(x: Tensor, num: int, generator: torch.Generator) -> list[Tensor]:
    """Return parts with random shares of the sums. In each row, a random part has the maximum of x,
    and the others have smaller maxima."""
    top, total, picked = x.unbind(-1)
    owner = torch.randint(0, num, top.shape, generator=generator)
    shares = torch.rand((num, *top.shape), dtype=x.dtype, generator=generator) + 0.1
    shares /= shares.sum(0)
    parts: list[Tensor] = []
    for i, share in enumerate(shares):
        below = torch.rand(top.shape, dtype=x.dtype, generator=generator).masked_fill(owner == i, 0)
        parts.append(torch.stack((top - below, total * share * below.exp(), picked * share), -1))
    return parts


for _reduction in (
    Reduction(
        name="sum",
        fold=torch.add,
        identity=torch.zeros_like,
        widens=True,
        numbers=operator.add,
        parts=_parts_of_sum,
    ),
    Reduction(
        name="max", fold=torch.maximum, numbers=max, parts=functools.partial(_parts_of_extreme, -1)
    ),
    Reduction(
        name="min", fold=torch.minimum, numbers=min, parts=functools.partial(_parts_of_extreme, 1)
    ),
    Reduction(
        name="softmax",
        fold=_fold_softmax,
        identity=_softmax_identity,
        unit=3,
        dtypes=(torch.float32, torch.float64),
        parts=_parts_of_softmax,
    ),
):
    register_reduction(_reduction)
BUILT_IN = frozenset(REDUCTIONS)
"""The names of dtensor's own reductions, which every process has."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
