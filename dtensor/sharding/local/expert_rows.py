"""Local code of exchanges of rows between tokens and experts.

    to_0, to_1 = pieces_by_expert(rows, counts, 0, parts)      rows of the experts of each member
    rows = rows_by_expert((from_0, from_1), counts, 0, parts)  what arrived, sorted by expert

``counts``: for each member of the group, the numbers of its rows by expert, i64[E] in host memory.
``parts``: for each member, the positions of its experts in such a vector. ``member``: this rank's
position in the group. Rows by expert are sorted by (expert, member that sent them, slot).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor.sharding.local.grouped_matmul import numbers_of, record_numbers

Parts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The rows of experts that a rank may receive in one exchange, or hold without exchanges.

    ``rows`` is ``capacity`` times the ``balanced`` rows. ``ranks`` are the members, and ``parts``
    their positions in a vector of counts, each of which counts the rows of one of ``experts``.
    """

    capacity: float
    rows: int
    balanced: int
    ranks: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]


def check_received(counts: Sequence[Tensor], budget: Budget) -> None:
    """Raise RuntimeError if a member would receive more rows than the budget. ``counts``: of each
    member."""
    _check(torch.stack(list(counts)).sum(0), budget, "receive", " in one exchange")


def check_held(ids: Tensor, budget: Budget) -> None:
    """Raise RuntimeError if a member would hold more rows than the budget. ``ids``: of the tokens,
    which each member has."""
    experts = torch.arange(len(budget.experts) + 1, dtype=ids.dtype, device=ids.device)
    starts = torch.searchsorted(ids.reshape(-1).sort().values, experts)
    _check(starts.diff(), budget, "hold", "")


def _check(counts: Tensor, budget: Budget, verb: str, place: str) -> None:
    every = numbers_of(counts)
    rows = [sum(every[p] for p in part) for part in budget.parts]
    most = max(rows)
    if most <= budget.rows:
        return
    member = rows.index(most)
    fullest = max(budget.parts[member], key=lambda p: every[p])
    enough = math.ceil(100 * most / budget.balanced) / 100
    raise RuntimeError(
        f"Rank {budget.ranks[member]} would {verb} {most:,} rows{place}, and "
        f"capacity={budget.capacity:g} allows {budget.rows:,}: expert {budget.experts[fullest]} "
        f"alone has {every[fullest]:,}.\n"
        f"fix: capacity={enough:.2f}, or dt.drop_tokens, which gives another model"
    )


def pieces_by_expert(
    rows: Tensor, counts: Sequence[Tensor], member: int, parts: Parts, most: Sequence[int]
) -> list[Tensor]:
    """Return the rows of this rank's tokens for each member: the rows of the member's experts.
    ``most``: how many rows each member can get if the ids of each token differ. Raises IndexError
    if a member would get more."""
    lengths = numbers_of(counts[member])
    sent = [sum(lengths[p] for p in part) for part in parts]
    if any(n > limit for n, limit in zip(sent, most, strict=True)):
        raise IndexError(
            f"tokens have {max(sent):,} rows for the experts of one rank, and at most {max(most):,}"
            " if no token names an expert twice.\n"
            "fix: ids that differ within a token, as topk returns them; -1 for no expert"
        )
    chunks = _chunks(rows, lengths)
    return [_joined(rows, [chunks[p] for p in part]) for part in parts]


def rows_by_expert(
    pieces: Sequence[Tensor], counts: Sequence[Tensor], member: int, parts: Parts
) -> Tensor:
    """Return the rows of this rank's experts, from the piece of each member."""
    chunks = [
        _chunks(piece, _of_part(own, parts[member]))
        for piece, own in zip(pieces, counts, strict=True)
    ]
    return _joined(pieces[0], [c for of_expert in zip(*chunks, strict=True) for c in of_expert])


def pieces_by_token(
    rows: Tensor, counts: Sequence[Tensor], member: int, parts: Parts
) -> list[Tensor]:
    """Return the rows of this rank's experts for each member: the rows that the member sent."""
    received = [_of_part(own, parts[member]) for own in counts]
    chunks = _chunks(rows, [n for of_expert in zip(*received, strict=True) for n in of_expert])
    return [_joined(rows, chunks[i :: len(parts)]) for i in range(len(parts))]


def rows_by_token(
    pieces: Sequence[Tensor],
    counts: Sequence[Tensor],
    member: int,
    parts: Parts,
    length: int | None,
) -> Tensor:
    """Return the rows of this rank's tokens, from the piece of each member. Zero rows for slots
    without an expert follow, up to ``length`` rows; None if the rank holds rows by expert on
    another axis, without such slots."""
    own = numbers_of(counts[member])
    chunks: dict[int, Tensor] = {}
    for piece, part in zip(pieces, parts, strict=True):
        chunks.update(zip(part, _chunks(piece, [own[p] for p in part]), strict=True))
    rest = 0 if length is None else length - sum(own)
    zeros = [pieces[0].new_zeros(rest, *pieces[0].shape[1:])] if rest else []
    return _joined(pieces[0], [*(chunks[p] for p in sorted(chunks)), *zeros])


def held_counts(counts: Sequence[Tensor], part: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers of rows of these experts over all members, i64 on ``device``."""
    held = torch.stack(list(counts)).sum(0)[list(part)]
    placed = held.to(device, non_blocking=True)
    record_numbers(placed, numbers_of(held))
    return placed


def _of_part(counts: Tensor, part: Sequence[int]) -> list[int]:
    every = numbers_of(counts)
    return [every[p] for p in part]


def _chunks(rows: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """Return consecutive chunks of rows; rows that follow them are left out."""
    return rows[: sum(lengths)].split_with_sizes(lengths)


def _joined(like: Tensor, chunks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(chunks)) if chunks else like[:0]
