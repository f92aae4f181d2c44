"""Heads of keys and values by their numbers: copies of them for ranks, and repeats for queries.

    pick_heads(x[b c s d], have, heads) -> [b len(heads) s d]     head i of x is number have[i]
    copies_for([[0], [0, 1], [1]])      -> [0, 0, 1, 0, 1], (3, 2)   for 3 ranks

A cache that lies on more ranks than it has heads keeps copies: each rank has the heads that its
query heads use. `copies_for` numbers the heads of such a dim and gives the blocks of its cut.

Invariants: where a number occurs several times in ``have``, the copies are equal, so a rank may
read any of them. Not here: the rule (rules/tables/matmul.py), the cache (api/generation).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtensor.sharding.ops.library import define


def copies_for(used: Sequence[Sequence[int]]) -> tuple[list[int], tuple[int, ...]]:
    """The head number at each index of a dim in which every rank finds the heads that it uses, and
    the sizes of the blocks by which the dim is cut. A rank may get a head twice, since no rank has
    fewer heads than a later one."""
    counts = [max(map(len, used[rank:])) for rank in range(len(used))]
    blocks = tuple(sum(count > i for count in counts) for i in range(counts[0]))
    copies = [
        heads[i] if i < len(heads) else (*heads, 0)[0]
        for i, size in enumerate(blocks)
        for heads in used[:size]
    ]
    return copies, blocks


def positions_of(have: Sequence[int], heads: Sequence[int]) -> list[int]:
    """Where the heads of these numbers stand."""
    places = {number: i for i, number in reversed(list(enumerate(have)))}
    return [places[number] for number in heads]


def _pick_heads(x: Tensor, have: Sequence[int], heads: Sequence[int]) -> Tensor:
    return x[:, positions_of(have, heads)]


def _fake(x: Tensor, have: Sequence[int], heads: Sequence[int]) -> Tensor:
    return x.new_empty((x.shape[0], len(heads), *x.shape[2:]))


define("pick_heads(Tensor x, int[] have, int[] heads) -> Tensor", _pick_heads, _fake)
