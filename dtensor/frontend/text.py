"""Text of global types and arguments: `f32[8,16]`, `mm(x, permute)`.

Not here: placements in a type (`f32[8@tp,16]`), which belong to sharding's specs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_text(dtype: torch.dtype) -> str:
    """`f32`; dtypes without a short name keep torch's (`float8_e4m3fn`)."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def type_text(value: Any) -> str:
    """`f32[8,16]`; a tuple of values is joined by commas; what is no tensor prints as itself."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}[{','.join(str(int(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return ", ".join(type_text(v) for v in value)
    return repr(value)


def value_text(value: Any) -> str:
    """An argument of a node as it prints: nodes by name, dtypes short."""
    match value:
        case fx.Node():
            return value.name
        case torch.dtype():
            return dtype_text(value)
        case list() | tuple():
            return f"[{', '.join(value_text(v) for v in value)}]"
        case torch.device():
            return str(value)
        case _:
            return repr(value)
