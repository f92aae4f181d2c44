"""What files of the project's own operators share: the library, `define`, strides, intervals.

    define("ce_count(Tensor target) -> Tensor", run, fake)     # torch.ops.dt.ce_count

Invariants: one `torch.library.Library("dt")` in the process; an op has one implementation for CPU
and CUDA and one for shapes. Not here: any op.
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

LIBRARY = torch.library.Library("dt", "DEF")  # kept alive for the process

PLAIN: dict[object, Callable[..., Any]] = {}
"""Overload to its implementation, for callers without autograd: it takes the same arguments."""


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers one op: `run` for every real device, `fake` for shapes."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"dt::{name}", fake, lib=LIBRARY)
    note_plain(name, run)


def note_plain(name: str, run: Callable[..., Any]) -> None:
    """Let local code call an op's implementation, where actors can import it by its name."""
    if "<" not in run.__qualname__:
        PLAIN[getattr(torch.ops.dt, name).default] = run


def laid_as(like: Tensor, made: Tensor) -> Tensor:
    """The values of `made` with the strides of `empty_like(like)`; itself where it has them."""
    if made.is_contiguous() and made.stride() == like.stride():
        return made  # those of an operand that fills its memory are kept
    strides = torch.empty_like(like, device="meta").stride()  # allocates nothing
    if made.stride() == strides:
        return made
    wanted = torch.empty_strided(like.shape, strides, dtype=made.dtype, device=made.device)
    return wanted.copy_(made)


def sum_rows(x: Tensor) -> Tensor:
    """Over all dims but the last."""
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


def local_index(index: Tensor, intervals: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Global indices -> (whether here, position here or 0), for a dim of local `length`.

    ``intervals``: of the indices that are here, flat; empty: all of them, from 0.
    """
    if not intervals:
        here = (index >= 0) & (index < length)
        return here, torch.where(here, index, 0)
    pieces = list(zip(intervals[::2], intervals[1::2], strict=True))
    held = sum(stop - start for start, stop in pieces)
    if held != length:
        raise ValueError(
            f"the intervals {list(intervals)} hold {held} indices, but the local dim has {length}"
        )
    return local_positions(index, pieces)
