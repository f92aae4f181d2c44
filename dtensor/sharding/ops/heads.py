"""The op `pick_heads`, which selects key and value heads by number from a cache with copies.

    pick_heads(x[b c s d], have, heads) -> [b len(heads) s d]     x[:, i] is head number have[i]
    copies_for([[0], [0, 1], [1]])      -> [0, 0, 1, 0, 1], (3, 2)   for 3 ranks

If a KV cache is split over more ranks than it has heads, it holds copies, so that each rank has the
heads that its query heads use. The copies of a head are equal, so a rank may read any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtensor.sharding.ops.library import define


def copies_for(used: Sequence[Sequence[int]]) -> tuple[list[int], tuple[int, ...]]:
    """Return the head number at each index of a cache's dim, and the sizes of the blocks by which
    the dim is split over the ranks.

    ``used``: the head numbers that each rank uses: [[0], [0, 1], [1]] gives the heads
    [0, 0, 1, 0, 1] in blocks (3, 2). Block i has the i-th head of each rank. A rank that uses fewer
    heads than a later rank gets its first head again, because a split never gives a rank fewer
    elements of a block than a later rank.
    """
    counts = [max(map(len, used[rank:])) for rank in range(len(used))]
    blocks = tuple(sum(count > i for count in counts) for i in range(counts[0]))
    copies = [
        heads[i] if i < len(heads) else (*heads, 0)[0]
        for i, size in enumerate(blocks)
        for heads in used[:size]
    ]
    return copies, blocks


def positions_of(source_heads: Sequence[int], heads: Sequence[int]) -> list[int]:
    """Return the first index in ``source_heads`` of each head number in ``heads``."""
    index_of = {number: i for i, number in reversed(list(enumerate(source_heads)))}
    return [index_of[number] for number in heads]


def _pick_heads(x: Tensor, source_heads: Sequence[int], heads: Sequence[int]) -> Tensor:
    return x[:, positions_of(source_heads, heads)]


def _fake(x: Tensor, source_heads: Sequence[int], heads: Sequence[int]) -> Tensor:
    return x.new_empty((x.shape[0], len(heads), *x.shape[2:]))


define("pick_heads(Tensor x, int[] have, int[] heads) -> Tensor", _pick_heads, _fake)
