"""Blocks of shards: what a rank cuts out for a peer, and how it puts received blocks together.

    block(x, (((0, 2),), ((0, 4),)))            # x[0:2, 0:4]
    join((a, b), (4, 4), (((0, 2),), ((0, 4),)), (((2, 4),), ((0, 4),)))   # rows of a, then of b

A block is named by one tuple of half-open intervals per dim, in positions of the local tensor.
These functions run on actors, inside generated code, and where the controller cuts and assembles
tensors (shards.py). They know nothing of specs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Where = tuple[tuple[tuple[int, int], ...], ...]


def block(x: torch.Tensor, where: Where) -> torch.Tensor:
    """The block of ``x``; a view where each dim is one interval."""
    for dim, intervals in enumerate(where):
        if intervals == ((0, x.shape[dim]),):
            continue
        if len(intervals) == 1:
            lo, hi = intervals[0]
            x = x.narrow(dim, lo, hi - lo)
        elif not intervals:
            x = x.narrow(dim, 0, 0)
        else:
            x = torch.cat([x.narrow(dim, lo, hi - lo) for lo, hi in intervals], dim)
    return x


def join(pieces: Sequence[torch.Tensor], shape: Sequence[int], *wheres: Where) -> torch.Tensor:
    """A tensor of ``shape`` whose block ``wheres[i]`` is ``pieces[i]``; they fill it."""
    dim = _cat_dim(shape, wheres)
    if dim is not None:
        return torch.cat(list(pieces), dim)
    result = pieces[0].new_empty(list(shape))
    for piece, where in zip(pieces, wheres, strict=True):
        if piece.numel():
            write(result, piece, where)
    return result


def _cat_dim(shape: Sequence[int], wheres: Sequence[Where]) -> int | None:
    """The one dim along which the blocks follow each other, each whole on the other dims."""
    partial = [
        dim for dim, size in enumerate(shape) if any(where[dim] != ((0, size),) for where in wheres)
    ]
    if len(partial) != 1:
        return None
    position = 0
    for where in wheres:
        intervals = where[partial[0]]
        if not intervals:
            continue
        if len(intervals) != 1 or intervals[0][0] != position:
            return None
        position = intervals[0][1]
    return partial[0]


def write(result: torch.Tensor, piece: torch.Tensor, where: Where) -> None:
    """``result``'s block ``where`` becomes ``piece``."""
    if all(len(intervals) == 1 for intervals in where):
        for dim, intervals in enumerate(where):
            lo, hi = intervals[0]
            result = result.narrow(dim, lo, hi - lo)
        result.copy_(piece)
        return
    index: list[torch.Tensor] = []
    for dim, intervals in enumerate(where):
        positions = torch.cat([torch.arange(lo, hi) for lo, hi in intervals])
        shape = [-1 if d == dim else 1 for d in range(len(where))]
        index.append(positions.to(result.device).view(shape))
    result[tuple(index)] = piece
