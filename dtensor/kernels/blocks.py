"""Functions that kernels share: the rows of a tensor, and sums of partial results.

    matrix, stride = rows_of(x)            # x[4,512,1024] -> [2048,1024], its rows 1024 apart
    total = sum_rows(partial)              # f32[512,1024] -> f32[1024]

Elementwise kernels and kernels of logits, whose rows may have odd lengths, arrange their lanes in
groups of GROUP elements, [BLOCK // GROUP, GROUP], and mask whole groups, so that the compiler loads
16 bytes at a time. A second masked load handles the fewer than GROUP elements at the edges.

Invariants: grids and blocks depend only on shapes, nothing is added by atomics, and each launch
states whether a product and a sum are fused, so results have the same bits on every device.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.launches import SUM_ROWS

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def takes(*tensors: Tensor) -> bool:
    """Return whether the kernels support the dtypes: floats of at most 32 bits, because kernels
    compute in float32."""
    return all(x.dtype in _TYPES for x in tensors)


def triton_type(dtype: torch.dtype) -> tl.dtype:
    return _TYPES[dtype]


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """Return x[... k] as a matrix [rows, k] with contiguous rows, and the stride of its rows.

    The matrix is a copy if x has no such view.
    """
    matrix = x.reshape(-1, x.shape[-1])
    if matrix.stride(1) != 1 and matrix.shape[1] != 1:
        matrix = matrix.contiguous()
    return matrix, matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum [k] over p of x f32[p, k], in an order that depends only on p."""
    total = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    at = SUM_ROWS.at(x.shape[1])
    _sum_rows[at.grid](x, total, x.shape[0], x.shape[1], **at.options)
    return total


@triton.jit
def _sum_rows(X, TOTAL, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, num_rows, ROWS):
        inside = ((first + r) < num_rows)[:, None] & (c < num_columns)[None, :]
        at = (first + r).to(tl.int64)[:, None] * num_columns + c[None, :]
        total += tl.sum(tl.load(X + at, mask=inside, other=0.0), 0)
    tl.store(TOTAL + c, total.to(TOTAL.dtype.element_ty), mask=c < num_columns)
