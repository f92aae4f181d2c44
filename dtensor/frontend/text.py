"""Text of global types and arguments: `f32[8,16]`, `mm(x, permute)`.

Not here: placements in a type (`f32[8@tp,16]`), which belong to sharding's specs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dtensor.numerics import dtype_name


def type_text(value: Any) -> str:
    """`f32[8,16]`; a tuple of values is joined by commas; what is no tensor prints as itself."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(str(int(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return ", ".join(type_text(v) for v in value)
    return repr(value)


def value_text(value: Any) -> str:
    """An argument of a node as it prints: nodes by name, dtypes short."""
    match value:
        case fx.Node():
            return value.name
        case torch.dtype():
            return dtype_name(value)
        case list() | tuple():
            return f"[{', '.join(value_text(v) for v in value)}]"
        case torch.device():
            return str(value)
        case _:
            return repr(value)
