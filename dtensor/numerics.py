"""What every layer agrees on about numbers: the names of dtypes, and the one order of reduction.

    dtype_name(torch.bfloat16)                   # "bf16"
    fold([a0, a1, a2], "sum")                    # ((a0 + a1) + a2), in rank order
    fold([a0, a1], "softmax")                    # [n, 3]: what a softmax over both parts divides by

Invariants: a reduction is a left fold in the order given, whole or in pieces (cut at multiples of
`piece_unit`), so every backend gives the same bits; floats narrower than 32 bits are summed in
float32. It imports torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

ReduceOp = Literal["sum", "max", "min", "softmax"]
"""How parts combine. "softmax" takes the last dim, of size 3, together: see `fold`."""

OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)

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
    """In what a kernel keeps statistics of such values: float32, of float64 and complex128
    float64."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def fold(parts: Sequence[Tensor], op: ReduceOp, dtype: torch.dtype | None = None) -> Tensor:
    """The left fold ((a0 + a1) + a2) + ...: same bits wherever it is done, whole or in pieces.

    Sums of floats narrower than 32 bits accumulate in float32 and are rounded once, at the end; or
    never, where the result is to be of ``dtype`` float32. Sums of float32 are rounded once where it
    is to be narrower.

    "softmax" folds rows (maximum, sum of exp(x - maximum), sum of picked x) over parts of the x, of
    which (-inf, 0, 0) stands for none; the elements are triples end to end, whatever the shape.
    """
    first = parts[0]
    made = first.dtype if dtype is None else dtype
    if len(parts) == 1:
        return first.to(made, copy=True, memory_format=torch.contiguous_format)
    wide = op == "sum" and is_narrow(first.dtype)
    total = first.float() if wide else first
    for part in parts[1:]:
        match op:
            case "sum":
                total = total + part.float() if wide else total + part
            case "max":
                total = torch.maximum(total, part)
            case "min":
                total = torch.minimum(total, part)
            case "softmax":
                total = _fold_softmax(total, part)
            case _:
                assert_never(op)
    return total.to(made).contiguous()


def rest_of(x: Tensor, op: ReduceOp) -> Tensor:
    """What ranks after the first hold of a pending value of which that one holds all."""
    if op == "sum":
        return torch.zeros_like(x)
    if op == "softmax":
        return x.new_tensor([-math.inf, 0, 0]).expand(x.shape).contiguous()
    return x


def are_triples(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether "softmax" folds such tensors: the last dim is of 3, of float32 or float64."""
    return len(shape) > 0 and shape[-1] == 3 and dtype in (torch.float32, torch.float64)


def piece_unit(op: ReduceOp) -> int:
    """At multiples of how many elements, from the first one, a reduction may be cut in pieces."""
    return 3 if op == "softmax" else 1


def _fold_softmax(total: Tensor, part: Tensor) -> Tensor:
    """One step of `fold`'s "softmax", the elements taken as rows of 3."""
    m0, s0, t0 = total.reshape(-1, 3).unbind(1)
    m1, s1, t1 = part.reshape(-1, 3).unbind(1)
    top = torch.maximum(m0, m1)
    # Where a part has the maximum its sum stays as it is: exact, and no inf - inf.
    s0 = torch.where(m0 == top, s0, s0 * (m0 - top).exp())
    s1 = torch.where(m1 == top, s1, s1 * (m1 - top).exp())
    return torch.stack((top, s0 + s1, t0 + t1), 1).view(total.shape)
