"""Facts about numbers that every layer shares: the names of dtypes, contiguous strides, and the
one order of reduction.

    dtype_name(torch.bfloat16)                   # "bf16"
    fold([a0, a1, a2], "sum")                    # ((a0 + a1) + a2), in rank order
    fold([a0, a1], "softmax")                    # [n, 3]: the divisor of a softmax over both parts
    register_reduction(Reduction(name="xor", fold=torch.bitwise_xor, identity=torch.zeros_like))

Invariants: a reduction is a left fold in the order given, whole or in pieces (cut at multiples of
`Reduction.unit`), so every backend gives the same bits; floats narrower than 32 bits are summed in
float32. A name means one reduction as long as the process lives. It imports torch alone.
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
    """``f32`` for torch.float32; torch's own name for rare dtypes."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether sums of it are kept in float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel keeps statistics of such values: float32, for float64 and
    complex128 float64."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A way in which parts combine.

    Args:
        name: a word, its name in placements, rules and programs.
        fold: one step, from the fold so far and the next part: tensors of one shape and dtype,
            which it does not change. It acts on each element alone, and takes any shape.
        identity: for a tensor, one like it that changes no fold. None if a value folded with itself
            is that value (a maximum), so that all ranks may hold it.
        unit: so many elements of the last dim, which has this size, are folded together, and no
            placement splits them; ``fold`` then takes rows, ``[n, unit]``.
        dtypes: the dtypes that it takes; () for all.
        widens: floats narrower than 32 bits are folded in float32, and rounded once.
        numbers: one step of two Python numbers; None: it folds tensors alone.
        parts: so many random parts whose fold is a tensor, for `dt.testing`; None: the tensor and
            identities.
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
        """One of dtensor's reductions is pickled by its name."""
        if self.name in BUILT_IN:
            return _named, (self.name,)
        return object.__reduce_ex__(self, protocol)

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        fits = self.unit == 1 or (len(shape) > 0 and shape[-1] == self.unit)
        return fits and (not self.dtypes or dtype in self.dtypes)

    @property
    def wants(self) -> str:
        """The tensors that it takes, for messages: ``f32[...,3] or f64[...,3]``."""
        sizes = "[...]" if self.unit == 1 else f"[...,{self.unit}]"
        return " or ".join(f"{dtype_name(d)}{sizes}" for d in self.dtypes) or f"any dtype {sizes}"

    def of(self, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The left fold ((a0 + a1) + a2) + ...: the same bits at any place, whole or in pieces,
        flat ones too.

        One that widens accumulates floats narrower than 32 bits in float32 and rounds once, at the
        end; or never, if the result has ``dtype`` float32. A fold of float32 with a narrower result
        is rounded once.
        """
        first = parts[0]
        result_dtype = first.dtype if dtype is None else dtype
        if len(parts) == 1:
            return first.to(result_dtype, copy=True, memory_format=torch.contiguous_format)
        taken: Iterable[Tensor] = parts
        if self.widens and is_narrow(first.dtype):
            taken = (p.float() for p in taken)
        if self.unit > 1:
            rows = (p.reshape(-1, self.unit) for p in taken)
            return (
                functools.reduce(self.fold, rows).to(result_dtype).reshape(first.shape).contiguous()
            )
        return functools.reduce(self.fold, taken).to(result_dtype).contiguous()

    def parts_of(self, x: Tensor, num: int, generator: torch.Generator) -> Sequence[Tensor]:
        """Random tensors whose fold is ``x``."""
        if self.parts is None:
            return [x, *(rest_of(x, self.name) for _ in range(num - 1))]
        return self.parts(x, num, generator)


REDUCTIONS: dict[str, Reduction] = {}
"""The reductions by name."""


def register_reduction(reduction: Reduction) -> Reduction:
    """Register it, so that placements, rules and programs may name it; ValueError if another has
    its name. It is sent to the actors with the programs that name it."""
    if REDUCTIONS.setdefault(reduction.name, reduction) != reduction:
        raise ValueError(
            f"There is a reduction {reduction.name!r} already, which programs may have planned "
            f"with.\nfix: register this one under another name"
        )
    return reduction


def _named(name: str) -> Reduction:
    return REDUCTIONS[name]


def fold(parts: Sequence[Tensor], op: ReduceOp, dtype: torch.dtype | None = None) -> Tensor:
    """The fold of a reduction: see `Reduction.of`."""
    return REDUCTIONS[op].of(parts, dtype)


def rest_of(x: Tensor, op: ReduceOp) -> Tensor:
    """The local value on ranks after the first, for a pending value that the first holds whole: the
    reduction's identity."""
    identity = REDUCTIONS[op].identity
    return x if identity is None else identity(x)


def reductions_listed() -> str:
    """``"sum", "max", "min" or "softmax"``, and the names that users registered."""
    *others, last = (f'"{name}"' for name in REDUCTIONS)
    return f"{', '.join(others)} or {last}"


# -- dtensor's own ---------------------------------------------------------------------------------


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)
    return torch.randint(-3, 4, x.shape, dtype=torch.int64, generator=generator).to(x.dtype)


def _parts_of_sum(x: Tensor, num: int, generator: torch.Generator) -> list[Tensor]:
    rest = [_noise(x, generator) for _ in range(num - 1)]
    return [functools.reduce(operator.sub, rest, x), *rest]


def _parts_of_extreme(sign: int, x: Tensor, num: int, generator: torch.Generator) -> list[Tensor]:
    """One rank has each element, the others smaller values, or larger ones."""
    owner = torch.randint(0, num, x.shape, generator=generator)
    further = (x + sign * _noise(x, generator).abs() for _ in range(num))
    return [torch.where(owner == i, x, other) for i, other in enumerate(further)]


def _fold_softmax(total: Tensor, part: Tensor) -> Tensor:
    """Rows (maximum, sum of exp(x - maximum), sum of picked x) over parts of the x."""
    m0, s0, t0 = total.unbind(1)
    m1, s1, t1 = part.unbind(1)
    top = torch.maximum(m0, m1)
    # The sum of the part with the maximum is unchanged: exact, and no inf - inf.
    s0 = torch.where(m0 == top, s0, s0 * (m0 - top).exp())
    s1 = torch.where(m1 == top, s1, s1 * (m1 - top).exp())
    return torch.stack((top, s0 + s1, t0 + t1), 1)


def _no_row(x: Tensor) -> Tensor:
    return x.new_tensor([-math.inf, 0, 0]).expand(x.shape).contiguous()


def _parts_of_softmax(x: Tensor, num: int, generator: torch.Generator) -> list[Tensor]:
    """Each part has its own maximum, one of them that of x, and a share of the sums."""
    top, total, picked = x.unbind(-1)
    owner = torch.randint(0, num, top.shape, generator=generator)
    shares = torch.rand((num, *top.shape), dtype=x.dtype, generator=generator) + 0.1
    shares /= shares.sum(0)
    parts: list[Tensor] = []
    for i, share in enumerate(shares):
        below = torch.rand(top.shape, dtype=x.dtype, generator=generator).masked_fill(owner == i, 0)
        parts.append(torch.stack((top - below, total * share * below.exp(), picked * share), -1))
    return parts


for _own in (
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
        identity=_no_row,
        unit=3,
        dtypes=(torch.float32, torch.float64),
        parts=_parts_of_softmax,
    ),
):
    register_reduction(_own)
BUILT_IN = frozenset(REDUCTIONS)
"""The reductions that every process has."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
