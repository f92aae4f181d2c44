"""What ranks run to read and write at indices along a dim of which they hold a part.

    index_shard(x[4 of 8 rows], index, 0, ((4, 8),), 8)     # rows that are elsewhere give zeros
    write_shard("index_add", x, 0, index, y, ((4, 8),), 8)   # rows that are elsewhere are left out

Indices are global. One row more than the rank holds stands for all that is elsewhere: zeros are
read from it, and what is written to it is dropped. So nothing here has a size that depends on data.

Invariants: as in local_forms.py; an index out of the global range is an error, as it is for torch.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from dtensor.sharding.local.in_range import check_range
from dtensor.sharding.local.local_forms import Pieces

Write = Literal[
    "index_add", "index_copy", "index_fill", "index_put", "index_put_add", "scatter", "scatter_add"
]


def index_shard(x: Tensor, index: Tensor, dim: int, pieces: Pieces, size: int) -> Tensor:
    """x at indices of any shape along ``dim``; of all ranks, the results add up."""
    local = _places(index, pieces, size)
    rows = torch.index_select(_padded(x, dim), dim, local.reshape(-1))
    return rows.reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


def gather_shard(x: Tensor, dim: int, index: Tensor, pieces: Pieces, size: int) -> Tensor:
    """gather along ``dim``; of all ranks, the results add up."""
    return torch.gather(_padded(x, dim), dim, _places(index, pieces, size))


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
    """The rank's part of x after the op of that name."""
    padded, local = _padded(x, dim), _places(index, pieces, size)
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
    """Writes to the rank's part of x alone, and there to nothing but the rows of it.

    How many indices are of such rows depends on data, so on a GPU it waits for them. What adds is
    computed beside it and copied: 16 bits are added up in another order where rows are left out.
    """
    if kind in ("index_add", "index_put_add", "scatter_add"):
        x.copy_(write_shard(kind, x, dim, index, source, pieces, size, alpha))
        return
    check_range(index, size, -size)
    index = torch.where(index < 0, index + size, index).long()
    here, local = local_positions(index, pieces)
    if kind == "scatter":  # an index for each element
        places_here = here.nonzero(as_tuple=True)
        at: list[Tensor | None] = [*places_here]
        at[dim] = local[places_here]
        value = source[places_here] if isinstance(source, Tensor) and source.dim() else source
        x.index_put_(at, value if isinstance(value, Tensor) else x.new_tensor(value))
        return
    if kind == "index_put":
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        assert isinstance(source, Tensor)
        source = source.expand(*before, *index.shape, *after)
        source = source.reshape(*before, index.numel(), *after)
        here, local = here.reshape(-1), local.reshape(-1)
    rows = here.nonzero().flatten()
    if kind == "index_fill":
        x.index_fill_(dim, local[rows], source)
    else:
        assert isinstance(source, Tensor)
        x.index_copy_(dim, local[rows], source.index_select(dim, rows))


def _padded(x: Tensor, dim: int) -> Tensor:
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _places(index: Tensor, pieces: Pieces, size: int) -> Tensor:
    """Global indices as positions in the shard; one past its end for those that are elsewhere."""
    check_range(index, size, -size)
    index = torch.where(index < 0, index + size, index).long()
    here, local = local_positions(index, pieces)
    return torch.where(here, local, sum(hi - lo for lo, hi in pieces))


def local_positions(index: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """(whether a global index is in one of the pieces, its position in them or 0)."""
    here = torch.zeros_like(index, dtype=torch.bool)
    local = torch.zeros_like(index)
    offset = 0
    for lo, hi in pieces:
        inside = (index >= lo) & (index < hi)
        local = torch.where(inside, index - lo + offset, local)
        here |= inside
        offset += hi - lo
    return here, local
