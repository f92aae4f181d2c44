"""What every layer agrees on about numbers: the names of dtypes, and the one order of reduction.

    dtype_name(torch.bfloat16)                   # "bf16"
    fold([a0, a1, a2], "sum")                    # ((a0 + a1) + a2), in rank order

Invariants: a reduction is a left fold in the order given, whole or in pieces, so every backend
gives the same bits; floats narrower than 32 bits are summed in float32. It imports torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import torch
from torch import Tensor

ReduceOp = Literal["sum", "max", "min"]

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
    """In what a kernel keeps statistics of such values: float32, of float64 float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fold(parts: Sequence[Tensor], op: ReduceOp, dtype: torch.dtype | None = None) -> Tensor:
    """The left fold ((a0 + a1) + a2) + ...: same bits wherever it is done, whole or in pieces.

    Sums of floats narrower than 32 bits accumulate in float32 and are rounded once, at the end; or
    never, where the result is to be of ``dtype`` float32.
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
            case _:
                assert_never(op)
    return total.to(made).contiguous()
