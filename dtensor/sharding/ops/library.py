"""Helpers that the files of dt ops share: the library, `define`, strides, intervals.

    define("ce_count(Tensor target) -> Tensor", run, fake)     # torch.ops.dt.ce_count

Each dt op is a plain `torch.library` op, so that it is one node in a captured graph. An op has one
implementation for CPU and CUDA, and one for shapes.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.local.indexing import local_positions

LIBRARY = torch.library.Library("dt", "DEF")  # torch unregisters the ops if it is collected

PLAIN: dict[object, Callable[..., Any]] = {}
"""The implementation of each overload, which takes the same arguments and bypasses autograd."""


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register one op, implemented by ``run`` on every device and by ``fake`` for shapes."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"dt::{name}", fake, lib=LIBRARY)
    note_plain(name, run)


def note_plain(name: str, run: Callable[..., Any]) -> None:
    """Record the op's implementation in `PLAIN` if actors can import it by its name."""
    if "<" not in run.__qualname__:
        packet, _, overload = name.partition(".")
        PLAIN[getattr(getattr(torch.ops.dt, packet), overload or "default")] = run


def laid_as(like: Tensor, result: Tensor) -> Tensor:
    """Return ``result`` with the strides of ``empty_like(like)``, copied only if necessary."""
    if result.is_contiguous() and result.stride() == like.stride():
        return result  # empty_like keeps the strides of a dense tensor
    strides = torch.empty_like(like, device="meta").stride()  # allocates nothing
    if result.stride() == strides:
        return result
    copy = torch.empty_strided(like.shape, strides, dtype=result.dtype, device=result.device)
    return copy.copy_(result)


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum over all dims but the last."""
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


def local_index(index: Tensor, intervals: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Return, for each global index of a dim, whether it is local, and its local position or 0.
    ``intervals``: the local indices as a flat list [start, stop, start, ...]; [] means 0:length.
    ``length``: their number. Raises ValueError if it differs."""
    if not intervals:
        is_local = (index >= 0) & (index < length)
        return is_local, torch.where(is_local, index, 0)
    pieces = list(zip(intervals[::2], intervals[1::2], strict=True))
    num_local = sum(stop - start for start, stop in pieces)
    if num_local != length:
        raise ValueError(
            f"the intervals {list(intervals)} hold {num_local} indices, but the local dim has "
            f"{length}"
        )
    return local_positions(index, pieces)
