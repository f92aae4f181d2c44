"""Digests of values on the ranks, by which copies of one value are compared without being sent.

    handle = cluster.load(digest_program({("model", "w"): StoredTensor("model 0: w", ...)}, 2))
    one, other = cluster.run(handle, [{}, {}]).get()         # {"digests": i64[1,2]} of each rank
    copies(stored)                                           # [(0, 1)]: these ranks have the same

A digest is two sums of integers over the bits of a shard, which wrap around: that of the words, and
that of the words times odd numbers by position. So the order of adding does not matter, shards that
differ in one word differ in the first, and equal shards have equal digests on every device.
"""

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
_AT_ONCE = 1 << 20
"""Words: their 64-bit temporaries are 8 MiB each."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def copies(stored: StoredTensor) -> list[tuple[int, ...]]:
    """The groups of ranks of its mesh that have the same of it; of two ranks or more."""
    if stored.is_pending:
        return []
    alike: dict[Where, list[int]] = {}
    for rank in stored.at:
        alike.setdefault(stored.where(rank), []).append(rank)
    return [tuple(ranks) for ranks in alike.values() if len(ranks) > 1]


def names_on(values: Mapping[tuple[str, ...], StoredTensor], rank: int) -> list[tuple[str, ...]]:
    """The values of which a rank has a copy, in the order of its digests."""
    return [
        path for path, stored in values.items() if any(rank in ranks for ranks in copies(stored))
    ]


def digest_program(values: Mapping[tuple[str, ...], StoredTensor], size: int) -> Program:
    """Each rank gives the digests of those values of which others have copies."""
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
        functions=(call_of,) if any(own.instructions for own in ranks) else (),
        stage_of=(0,) * size,
    )


def unequal(
    values: Mapping[tuple[str, ...], StoredTensor], results: list[Mapping[str, object]]
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The values whose copies are not equal to the bit, with the ranks that have copies."""
    found: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for rank, own in enumerate(results):
        given = own.get(DIGESTS)
        if isinstance(given, Tensor):
            for path, digest in zip(names_on(values, rank), given.tolist(), strict=True):
                found[rank, path] = digest
    for path, stored in values.items():
        for ranks in copies(stored):
            if len({tuple(found[rank, path]) for rank in ranks}) > 1:
                yield path, ranks


# -- the function that ranks call


def digests(*shards: Tensor) -> tuple[Tensor]:
    """i64[len(shards),2], on their device."""
    return (torch.stack([_digest(shard) for shard in shards]),)


def _digest(shard: Tensor) -> Tensor:
    dense = shard.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if dense.dtype.is_complex:
        dense = torch.view_as_real(dense).reshape(-1)
    words = dense.view(_WORDS[dense.itemsize])
    plain = torch.zeros((), dtype=torch.int64, device=shard.device)
    placed = torch.zeros((), dtype=torch.int64, device=shard.device)
    for begin in range(0, words.numel(), _AT_ONCE):
        part = words[begin : begin + _AT_ONCE].to(torch.int64)
        at = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=shard.device)
        plain = plain + part.sum()
        placed = placed + (part * (at * 2 + 1) * _ODD).sum()
    return torch.stack([plain, placed])
