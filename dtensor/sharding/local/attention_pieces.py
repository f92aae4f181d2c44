"""Which keys the queries of a rank see by their positions, and how its attention is cut.

    band = band_of(True, [])                          # causal: key <= query
    cut(((256, 512),), ((0, 512),), band, 1024)       # Piece(rows=(0, 256), keys=(0, 256), "all"),
                                                      # Piece((0, 256), (256, 512), "causal")
    visible_pairs(((256, 512),), ((0, 512),), band)   # 256 * 256 + 256 * 257 / 2

Queries and keys are given by the intervals of their global positions. Invariants: each visible pair
is in exactly one piece; the pieces of a query are in the order of the keys; a query sees a key of
each of its pieces, unless the piece is "masked".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

Span = tuple[int, int]
Spans = Sequence[Span]

_FAR = 1 << 40


class Band(NamedTuple):
    """The keys at the positions query - before, ..., query + after are visible to a query."""

    before: int = _FAR
    after: int = _FAR


class Piece(NamedTuple):
    """A kernel call: the local rows of its queries and of its keys. ``kind``: all keys are visible,
    key i to the queries from i on ("causal"; as many keys as queries), or as a mask says."""

    rows: Span
    keys: Span
    kind: Literal["all", "causal", "masked"]


def band_of(is_causal: bool, window: Sequence[int]) -> Band:
    """Return the band of a window [before, after], in which -1 is no limit; [] is no window."""
    before, after = (_FAR if n < 0 else n for n in (window or (-1, -1)))
    return Band(before, min(after, 0) if is_causal else after)


# -- pieces ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def cut(
    queries: tuple[Span, ...], keys: tuple[Span, ...], band: Band, tile: int, masked: bool = False
) -> tuple[Piece, ...]:
    """Return the kernel calls for these queries and keys. ``tile``: the most queries of a piece
    with a mask; ``masked``: every piece has one, because values of the tokens hide keys too."""
    pieces: list[Piece] = []
    row = 0
    scattered = _is_scattered(queries) or _is_scattered(keys)
    for group in (queries,) if scattered else ((span,) for span in queries):
        num = sum(stop - start for start, stop in group)
        if masked or scattered or _is_cut_before(group[0], keys, band):
            positions = _positions(group)
            for lo in range(0, num, tile):
                part = positions[lo : lo + tile]
                seen = int(part[0]) - band.before, int(part[-1]) + band.after + 1
                by_all = int(part[-1]) - band.before, int(part[0]) + band.after + 1
                rows = row + lo, row + lo + len(part)
                pieces += _tile(rows, keys, seen, (0, 0) if masked else by_all)
        else:
            pieces += _below_diagonal(group[0], row, keys, band)
        row += num
    return tuple(pieces if masked else _joined(pieces))


def _positions(spans: Spans) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions in the intervals, which are not empty."""
    ends = np.array(spans, dtype=np.int64)
    lengths = ends[:, 1] - ends[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.repeat(ends[:, 0] - before, lengths) + np.arange(int(lengths.sum()))


def _is_scattered(spans: Spans) -> bool:
    """Return whether the intervals are many and short, as stripes are: masks are then faster than
    many small pieces."""
    num = sum(stop - start for start, stop in spans)
    return len(spans) > 4 and num < 256 * len(spans)


def _is_cut_before(span: Span, keys: Spans, band: Band) -> bool:
    """Return whether the last query does not see the first key that an earlier query sees."""
    start, stop = span
    first = max(keys[0][0], start - band.before) if keys else stop
    return first < stop - 1 - band.before


def _below_diagonal(span: Span, row: int, keys: Spans, band: Band) -> list[Piece]:
    """Return the pieces of queries that all see the same first key: for each interval of keys a
    rectangle before the diagonal, a triangle on it, and a rectangle below it."""
    pieces: list[Piece] = []
    (start, stop), after = span, band.after
    at = 0
    for begin, last in keys:
        first = min(max(begin, stop - 1 - band.before), last)  # no query sees a key before it
        at += first - begin
        lo = min(max(start, first - after), stop)  # the queries lo:hi see a part of the keys,
        hi = min(max(lo, last - after), stop)  # those before lo none, those from hi on all
        diagonal = at + min(lo + after, last) - first
        upper, lower = (row + lo - start, row + hi - start), (row + hi - start, row + stop - start)
        pieces.append(Piece(upper, (at, diagonal), "all"))
        pieces.append(Piece(upper, (diagonal, diagonal + hi - lo), "causal"))
        pieces.append(Piece(lower, (at, at + last - first), "all"))
        at += last - first
    return [p for p in pieces if p.rows[0] < p.rows[1] and p.keys[0] < p.keys[1]]


def _tile(rows: Span, keys: Spans, seen: Span, by_all: Span) -> list[Piece]:
    """Return one piece: these rows, and the keys at positions in ``seen``, which at least one of
    the queries sees. Return [] if the rank has no such key. The piece needs no mask if every query
    sees all its keys, which then lie in ``by_all``."""
    visible: list[Span] = []  # local rows
    is_whole, at = True, 0
    for start, stop in keys:
        lo, hi = max(start, seen[0]), min(stop, seen[1])
        if lo < hi:
            visible.append((at + lo - start, at + hi - start))
            is_whole &= by_all[0] <= lo and hi <= by_all[1]
        at += stop - start
    if not visible:
        return []
    return [Piece(rows, (visible[0][0], visible[-1][1]), "all" if is_whole else "masked")]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces in the order of the keys. Rectangles are joined if they have the same rows
    and adjacent keys, or the same keys and adjacent rows."""
    for axis in (1, 0):
        joined: list[Piece] = []
        for piece in sorted(pieces, key=lambda p: (p[1 - axis], p[axis])):
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.kind == piece.kind == "all"
                and last[1 - axis] == piece[1 - axis]
                and last[axis][1] == piece[axis][0]
            ):
                both = (last[axis][0], piece[axis][1])
                joined[-1] = last._replace(**{("rows", "keys")[axis]: both})
            else:
                joined.append(piece)
        pieces = joined
    return sorted(pieces, key=lambda p: (p.keys, p.rows))


# -- counts ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def visible_pairs(queries: tuple[Span, ...], keys: tuple[Span, ...], band: Band) -> int:
    """Return the number of (query, key) pairs in the band."""
    if len(queries) * len(keys) > 256:  # of stripes: counting by query is then faster
        at, key = (
            np.concatenate([np.arange(*span) for span in spans]) for spans in (queries, keys)
        )
        visible = np.searchsorted(key, at + band.after, side="right")
        return int((visible - np.searchsorted(key, at - band.before)).sum())

    def up_to(after: int) -> int:
        """Return the number of pairs with key <= query + ``after``."""
        return sum(
            _area(stop + after - first, last - first) - _area(start + after - first, last - first)
            for start, stop in queries
            for first, last in keys
        )

    return up_to(band.after) - up_to(-band.before - 1)


def _area(rows: int, most: int) -> int:
    """Return 1 + 2 + ... + rows, in which no term is larger than ``most``; 0 if rows < 1."""
    growing = min(max(rows, 0), most)
    return growing * (growing + 1) // 2 + max(rows - most, 0) * most
