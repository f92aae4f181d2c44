"""Digests of values on the ranks, to compare copies of a value without sending them.

    handle = cluster.load(digest_program({("model", "w"): StoredTensor("model 0: w", ...)}, 2))
    one, other = cluster.run(handle, [{}, {}]).get()         # {"digests": i64[1,2]} of each rank
    copy_groups(stored)                                # [(0, 1)]: these ranks have the same

A digest is two sums of integers, modulo 2**64, over the bits of a shard: the sum of its words, and
the sum of its words times an odd number that depends on the position. The order of addition does
not matter, so equal shards have equal digests on every device, and one changed word changes the
first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dtensor.daft import Call, Function, Label, Program, RankProgram
from dtensor.sharding.spec.shards import Where
from dtensor.sharding.spec.stored import StoredTensor

DIGESTS = "digests"
_WORDS: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,
}
_WORDS_AT_ONCE = 1 << 20
"""Words that are added at a time: their 64-bit temporaries have 8 MiB each."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def copy_groups(stored: StoredTensor) -> list[tuple[int, ...]]:
    """Return the groups of two or more ranks that have the same shard of a value."""
    if stored.is_pending:
        return []
    ranks_by_block: dict[Where, list[int]] = {}
    for rank in stored.at:
        ranks_by_block.setdefault(stored.where(rank), []).append(rank)
    return [tuple(ranks) for ranks in ranks_by_block.values() if len(ranks) > 1]


def names_on(values: Mapping[tuple[str, ...], StoredTensor], rank: int) -> list[tuple[str, ...]]:
    """Return the values of which a rank has a copy, in the order of its digests."""
    return [
        path
        for path, stored in values.items()
        if any(rank in ranks for ranks in copy_groups(stored))
    ]


def digest_program(values: Mapping[tuple[str, ...], StoredTensor], size: int) -> Program:
    """Return the program in which each rank returns the digests of values that other ranks have
    too."""
    call_of = ("digests of copies", Function.of(digests, "digests of copies"))
    ranks: list[RankProgram] = []
    for rank in range(size):
        names = tuple(values[path].label for path in names_on(values, rank))
        if not names:
            ranks.append(RankProgram(instructions=()))
            continue
        call = Call(call_of[0], names, (DIGESTS,), label=Label("compare copies"))
        ranks.append(RankProgram(instructions=(call,), outputs=(DIGESTS,), state=names))
    return Program(
        name="digests of copies",
        ranks=tuple(ranks),
        functions=(call_of,) if any(result.instructions for result in ranks) else (),
        stage_of=(0,) * size,
    )


def unequal_copies(
    values: Mapping[tuple[str, ...], StoredTensor], results: list[Mapping[str, object]]
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield the values whose copies differ in a bit, each with the ranks that have copies."""
    digest_by_copy: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for rank, result in enumerate(results):
        digest_tensor = result.get(DIGESTS)
        if isinstance(digest_tensor, Tensor):
            for path, digest in zip(names_on(values, rank), digest_tensor.tolist(), strict=True):
                digest_by_copy[rank, path] = digest
    for path, stored in values.items():
        for ranks in copy_groups(stored):
            if len({tuple(digest_by_copy[rank, path]) for rank in ranks}) > 1:
                yield path, ranks


# -- the function that ranks call ------------------------------------------------------------------


def digests(*shards: Tensor) -> tuple[Tensor]:
    """Return the digests i64[len(shards),2], on the device of the shards."""
    return (torch.stack([_digest(shard) for shard in shards]),)


def _digest(shard: Tensor) -> Tensor:
    """Return the two sums of a shard, i64[2]."""
    dense = shard.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if dense.dtype.is_complex:
        dense = torch.view_as_real(dense).reshape(-1)
    words = dense.view(_WORDS[dense.itemsize])
    word_sum = torch.zeros((), dtype=torch.int64, device=shard.device)
    weighted_sum = torch.zeros((), dtype=torch.int64, device=shard.device)
    for begin in range(0, words.numel(), _WORDS_AT_ONCE):
        part = words[begin : begin + _WORDS_AT_ONCE].to(torch.int64)
        at = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=shard.device)
        word_sum = word_sum + part.sum()
        weighted_sum = weighted_sum + (part * (at * 2 + 1) * _ODD).sum()
    return torch.stack([word_sum, weighted_sum])
