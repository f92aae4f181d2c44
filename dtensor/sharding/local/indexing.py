"""Read and write a shard at global indices along its split dim.

    index_shard(x[4 of 8 rows], index, 0, ((4, 8),), 8)     # zeros for rows of other ranks
    write_shard("index_add", x, 0, index, y, ((4, 8),), 8)   # ignores rows of other ranks

``pieces`` are the intervals of the dim that the rank holds, ``size`` is the dim's global size. The
shard is padded with one row that stands for all rows of other ranks: reading it gives zeros, and
writes to it are dropped. So no size depends on data.

Invariants: as in local_forms.py; an index out of the global range raises IndexError.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from dtensor.sharding.local.in_range import check_range
from dtensor.sharding.local.local_forms import Pieces, stride_of

Write = Literal[
    "index_add", "index_copy", "index_fill", "index_put", "index_put_add", "scatter", "scatter_add"
]


def index_shard(x: Tensor, index: Tensor, dim: int, pieces: Pieces, size: int) -> Tensor:
    """Return x at indices of any shape along ``dim``. The sum over the ranks is the result."""
    local = _padded_positions(index, pieces, size)
    rows = torch.index_select(_pad_with_zero_row(x, dim), dim, local.reshape(-1))
    return rows.reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


def gather_shard(x: Tensor, dim: int, index: Tensor, pieces: Pieces, size: int) -> Tensor:
    """Return torch.gather along ``dim``. The sum over the ranks is the result."""
    return torch.gather(_pad_with_zero_row(x, dim), dim, _padded_positions(index, pieces, size))


def write_shard(
    kind: Write,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor | float,
    pieces: Pieces,
    size: int,
    alpha: float = 1,
) -> Tensor:
    """Return the rank's shard of the result of the op ``kind``, which writes ``source`` at global
    indices along ``dim``. ``x`` is the rank's shard, ``pieces`` the intervals of ``dim`` that it
    holds, ``size`` the global size of ``dim``. Writes to rows of other ranks are dropped."""
    padded, local = _pad_with_zero_row(x, dim), _padded_positions(index, pieces, size)
    match kind:
        case "index_add":
            assert isinstance(source, Tensor)
            out = torch.index_add(padded, dim, local, source, alpha=alpha)
        case "index_copy":
            assert isinstance(source, Tensor)
            out = torch.index_copy(padded, dim, local, source)
        case "index_fill":
            out = torch.index_fill(padded, dim, local, source)
        case "index_put" | "index_put_add":
            where = [*[None] * dim, local]
            out = torch.ops.aten.index_put.default(padded, where, source, kind == "index_put_add")
        case "scatter":
            out = torch.scatter(padded, dim, local, source)
        case "scatter_add":
            assert isinstance(source, Tensor)
            out = torch.scatter_add(padded, dim, local, source)
        case _:
            assert_never(kind)
    return out.narrow(dim, 0, x.shape[dim]).contiguous()


def write_shard_in_place(
    kind: Write,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor | float,
    pieces: Pieces,
    size: int,
    alpha: float = 1,
) -> None:
    """Run the op ``kind`` in place on the rank's shard x, writing only the rows that the indices
    name.

    Ops that add are computed out of place and copied: without the other ranks' rows, 16-bit sums
    would be added in another order.
    """
    if kind in ("index_add", "index_put_add", "scatter_add"):
        x.copy_(write_shard(kind, x, dim, index, source, pieces, size, alpha))
        return
    check_range(index, size, -size)
    index = torch.where(index < 0, index + size, index).long()
    is_local, local = local_positions(index, pieces)
    if not x.is_cpu:
        _write_without_wait(kind, x, dim, is_local, local, source)
        return
    if kind == "scatter" and index.shape[dim] == 1 and x.shape[dim]:
        # No two indices name the same element. An index of another rank writes the old value back.
        if isinstance(source, Tensor) and source.dim():
            source = source[tuple(slice(n) for n in index.shape)]
        x.scatter_(dim, local, torch.where(is_local, source, x.gather(dim, local)).to(x.dtype))
        return
    if kind == "scatter":  # an index for each element
        local_elements = is_local.nonzero(as_tuple=True)
        positions: list[Tensor | None] = [*local_elements]
        positions[dim] = local[local_elements]
        value = source[local_elements] if isinstance(source, Tensor) and source.dim() else source
        x.index_put_(positions, value if isinstance(value, Tensor) else x.new_tensor(value))
        return
    if kind == "index_put":
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        assert isinstance(source, Tensor)
        source = source.expand(*before, *index.shape, *after)
        source = source.reshape(*before, index.numel(), *after)
        is_local, local = is_local.reshape(-1), local.reshape(-1)
    rows = is_local.nonzero().flatten()
    if kind == "index_fill":
        x.index_fill_(dim, local[rows], source)
    else:
        assert isinstance(source, Tensor)
        x.index_copy_(dim, local[rows], source.index_select(dim, rows))


def _write_without_wait(
    kind: Write, x: Tensor, dim: int, is_local: Tensor, local: Tensor, source: Tensor | float
) -> None:
    """Write to the shard x as `write_shard_in_place` does, without sizes that depend on data.

    An index of another rank repeats the write of the last index along ``dim`` that this rank holds,
    or writes the old value back if there is none. ``is_local``, ``local``: of `local_positions`.
    """
    if x.shape[dim] == 0 or local.numel() == 0:
        return
    at = dim if kind == "scatter" else 0
    if kind != "scatter":
        if isinstance(source, Tensor) and kind == "index_put":
            source = source.expand(*x.shape[:dim], *local.shape, *x.shape[dim + 1 :])
            source = source.reshape(*x.shape[:dim], local.numel(), *x.shape[dim + 1 :])
        is_local, local = is_local.reshape(-1), local.reshape(-1)
    positions = torch.arange(local.shape[at], device=x.device)
    positions = positions.view([-1 if d == at else 1 for d in range(local.dim())])
    last = torch.where(is_local, positions, -1).amax(at, keepdim=True)
    has_local = last >= 0
    write = torch.where(is_local, positions, last.clamp(min=0))
    local = local.gather(at, write)
    if kind == "scatter":
        if isinstance(source, Tensor) and source.dim():
            source = source[tuple(slice(n) for n in local.shape)].gather(dim, write)
        old = x.gather(dim, local)
        x.scatter_(dim, local, torch.where(has_local, source, old).to(x.dtype))
    else:
        if isinstance(source, Tensor) and source.dim():
            source = source.index_select(dim, write)
        new = torch.where(has_local, source, x.index_select(dim, local)).to(x.dtype)
        x.index_copy_(dim, local, new)


def _pad_with_zero_row(x: Tensor, dim: int) -> Tensor:
    """Return x with one more row of zeros along ``dim``."""
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _padded_positions(index: Tensor, pieces: Pieces, size: int) -> Tensor:
    """Return the positions of global indices in the padded shard: in the pieces that the rank
    holds, or the last row for an index of another rank. Raises IndexError if out of range."""
    check_range(index, size, -size)
    index = torch.where(index < 0, index + size, index).long()
    is_local, local = local_positions(index, pieces)
    return torch.where(is_local, local, sum(hi - lo for lo, hi in pieces))


def local_positions(index: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Return (whether each global index is in the pieces, its position in them or 0)."""
    if len(pieces) > 1 and (stride := stride_of(pieces)):
        lo, hi = pieces[0]
        piece = (index - lo).div(stride, rounding_mode="floor")
        offset = index - lo - piece * stride
        is_local = (piece >= 0) & (piece < len(pieces)) & (offset < hi - lo)
        return is_local, torch.where(is_local, piece * (hi - lo) + offset, 0)
    is_local = torch.zeros_like(index, dtype=torch.bool)
    local = torch.zeros_like(index)
    offset = 0
    for lo, hi in pieces:
        inside = (index >= lo) & (index < hi)
        local = torch.where(inside, index - lo + offset, local)
        is_local |= inside
        offset += hi - lo
    return is_local, local
