"""`dt::linalg_checked`: the error of torch.linalg for a singular matrix, as an op on values.

    inv, info = linalg_inv_ex(a)             # info[i] != 0: matrix i is singular
    inv = dt.linalg_checked(inv, info, "linalg.inv", False)

Torch checks by an op without a result, which a graph of values would lose, and with it the error.
Here the value passes through the check. Each rank checks its matrices; the error is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.ops.library import define


def _linalg_checked(x: Tensor, info: Tensor, api_name: str, is_matrix: bool) -> Tensor:
    check: Any = torch.ops.aten._linalg_check_errors.default  # pyright: ignore
    check(info.contiguous(), api_name, is_matrix=is_matrix)
    return x.clone()


def _linalg_checked_fake(x: Tensor, info: Tensor, api_name: str, is_matrix: bool) -> Tensor:
    return torch.empty_like(x)


define(
    "linalg_checked(Tensor x, Tensor info, str api_name, bool is_matrix) -> Tensor",
    _linalg_checked,
    _linalg_checked_fake,
)
