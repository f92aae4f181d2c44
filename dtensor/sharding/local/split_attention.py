"""Attention of the queries and the keys that one rank holds, given their positions.

    attention_over(q, k, v, run, ((256, 512),), ((0, 512),), True, scale)     # two calls of `run`
    attention_part(q, k, v, run, queries, keys, out, lse, True, scale, False)    # folds into out

`attention_pieces.cut` cuts the queries and keys into rectangles and triangles, for which ``run``,
the op or a kernel of the device, is called without a mask. Windows and values of the tokens need a
mask, which is made for at most 1,024 queries at a time; a softcap is computed by plain ops.

Fold: the sink first, then the pieces in the order of their keys, then the next part. Two results
(out, lse), of disjoint keys, become lse = log(exp(lse1) + exp(lse2)) and the sum of the outputs
weighted by exp(lse1 - lse) and exp(lse2 - lse), in float32 for 16 bits. A query without keys has
the lse -inf between parts, and at the end the lse 0 and the output 0. The backward reads the final
out and lse, and adds the gradients of the pieces in the same order and precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.local.attention_kernels import (
    Gradients,
    attention_masked,
    attention_masked_backward,
    attention_math,
    attention_math_backward,
    like_output,
)
from dtensor.sharding.local.attention_pieces import Band, Piece, Span, Spans, band_of, cut

Run = Callable[..., tuple[Tensor, Tensor]]
"""Attention without options: (q, k, v, is_causal, scale) -> (out, lse)."""
RunBackward = Callable[..., Gradients]

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
KEY = "key"
"""The comparison without a value of the query: the key's value, a bool, says if it is visible."""

Comparison = tuple[Tensor | None, str, Tensor]
"""Query values [b t] or None, the word of the comparison, key values [b s]."""

_MAX_ROWS, _MIN_ROWS = 1024, 256
_MAX_SCORES = 1 << 25  # that plain ops make at once
_MAX_SCORES_ON_CPU = 1 << 19  # they fit into a cache


def paired(
    query_values: Sequence[Tensor] | None,
    key_values: Sequence[Tensor] | None,
    comparisons: Sequence[str] | None,
) -> tuple[Comparison, ...]:
    """Return the comparisons that these options of `dt.attention` state."""
    left = iter(query_values or ())
    return tuple(
        (None if word == KEY else next(left), word, right)
        for word, right in zip(comparisons or (), key_values or (), strict=True)
    )


def visible_keys(left: Tensor | None, word: str, right: Tensor) -> Tensor:
    """Return whether a comparison lets each key be visible, [b 1 t s]; [b 1 1 s] for `KEY`."""
    keys = right[:, None, None, :]
    return keys if left is None else COMPARISONS[word](left[:, None, :, None], keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Which keys of the rank its queries see: by positions, and by comparisons of token values."""

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    band: Band
    softcap: float
    comparisons: tuple[Comparison, ...]

    def pieces(self, q: Tensor) -> tuple[Piece, ...]:
        """Return the kernel calls of the queries q. They have at most 1,024 queries if they have a
        mask; fewer if a window is narrow or if plain ops would make too many scores."""
        width = self.band.before + max(self.band.after, 0)
        rows = min(_MAX_ROWS, max(_MIN_ROWS, width))
        if self.softcap:
            num_keys = sum(stop - start for start, stop in self.keys)
            by_row = q.shape[0] * q.shape[1] * num_keys
            most = _MAX_SCORES_ON_CPU if q.device.type == "cpu" else _MAX_SCORES
            rows = min(rows, max(1, most // max(1, by_row)))
        masked = bool(self.softcap or self.comparisons)
        return cut(self.queries, self.keys, self.band, rows, masked)

    def mask(self, piece: Piece, device: torch.device) -> Tensor:
        """Return the mask of a piece, [b 1 t s] or [t s], True for the keys that a query sees."""
        at = _positions(self.queries, piece.rows, device)[:, None]
        key = _positions(self.keys, piece.keys, device)[None, :]
        mask = (key <= at + self.band.after) & (key >= at - self.band.before)
        rows, keys = slice(*piece.rows), slice(*piece.keys)
        for left, word, right in self.comparisons:
            left = None if left is None else left[:, rows]
            mask = mask & visible_keys(left, word, right[:, keys])
        return mask


def _visible(
    queries: Spans,
    keys: Spans,
    is_causal: bool,
    window: Sequence[int] = (),
    softcap: float = 0.0,
    query_values: Sequence[Tensor] | None = None,
    key_values: Sequence[Tensor] | None = None,
    comparisons: Sequence[str] | None = None,
) -> _Seen:
    """Return the record of the options of a `dt.attention`."""
    return _Seen(
        queries=tuple((start, stop) for start, stop in queries),
        keys=tuple((start, stop) for start, stop in keys),
        band=band_of(is_causal, window),
        softcap=softcap,
        comparisons=paired(query_values, key_values, comparisons),
    )


def _positions(spans: Spans, rows: Span, device: torch.device) -> Tensor:
    """Return the global positions of local rows."""
    parts: list[Tensor] = []
    at = 0
    for start, stop in spans:
        lo, hi = max(start, start + rows[0] - at), min(stop, start + rows[1] - at)
        if lo < hi:
            parts.append(torch.arange(lo, hi, device=device))
        at += stop - start
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# -- all keys in one call --------------------------------------------------------------------------


def attention_over(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Run,
    queries: Spans,
    keys: Spans,
    is_causal: bool,
    scale: float,
    sinks: Tensor | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the results of `dt.attention` for a rank's queries and keys, whose global positions
    are the intervals ``queries`` and ``keys``. ``run``: see `Run`; ``options``: the window,
    softcap, query values, key values and comparisons of the op."""
    seen = _visible(queries, keys, is_causal, *options)
    if sinks is None and (piece := _only_piece(seen, q)):
        return run(q, k, v, piece.kind == "causal", scale)
    return _folded(q, k, v, None, None, run, seen, scale, sinks, is_last=True)


def attention_over_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: RunBackward,
    queries: Spans,
    keys: Spans,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    *options: Any,
) -> Gradients:
    """Return the gradients of `attention_over` with respect to q, k and v."""
    seen = _visible(queries, keys, is_causal, *options)
    if piece := _only_piece(seen, q):
        return run(grad, q, k, v, out, lse, piece.kind == "causal", scale)
    dq, dk, dv = _gradients(grad, q, k, v, out, lse, None, run, seen, scale)
    return dq.to(q.dtype), dk, dv


def _only_piece(seen: _Seen, q: Tensor) -> Piece | None:
    """Return the only piece, if one call without a mask computes all queries and keys."""
    pieces = seen.pieces(q)
    if len(pieces) != 1 or pieces[0].kind == "masked" or seen.comparisons or seen.softcap:
        return None
    num_keys = sum(stop - start for start, stop in seen.keys)
    is_all = pieces[0].rows == (0, q.shape[2]) and pieces[0].keys == (0, num_keys)
    return pieces[0] if is_all else None


# -- parts of the keys -----------------------------------------------------------------------------


def attention_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Run,
    queries: Spans,
    keys: Spans,
    out: Tensor | None,
    lse: Tensor | None,
    is_causal: bool,
    scale: float,
    is_last: bool,
    sinks: Tensor | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Fold attention to these keys into ``out`` and ``lse``, the fold of earlier keys or None; see
    `attention_over` and the op `dt.attention_part`."""
    seen = _visible(queries, keys, is_causal, *options)
    return _folded(q, k, v, out, lse, run, seen, scale, sinks, is_last)


def attention_part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: RunBackward,
    queries: Spans,
    keys: Spans,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    is_causal: bool,
    scale: float,
    *options: Any,
) -> Gradients:
    """Return ``dq`` (None: 0) plus the gradient of the queries from these keys, and the gradients
    of these keys and values. ``out`` and ``lse`` are the final results, of all keys."""
    seen = _visible(queries, keys, is_causal, *options)
    return _gradients(grad, q, k, v, out, lse, dq, run, seen, scale)


def _folded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    run: Run,
    seen: _Seen,
    scale: float,
    sinks: Tensor | None,
    is_last: bool,
) -> tuple[Tensor, Tensor]:
    """Return the fold of ``out`` and ``lse`` with all pieces, in new tensors."""
    dtype = accumulation_dtype(q.dtype)
    if out is None or lse is None:
        out = torch.zeros_like(like_output(q, v), dtype=dtype)
        lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
        if sinks is not None:
            lse.copy_(sinks[None, :, None].expand_as(lse))
    else:
        out, lse = out.clone(), lse.clone()
    for piece in seen.pieces(q) if q.numel() and k.numel() else ():
        rows, keys = slice(*piece.rows), slice(*piece.keys)
        part, part_lse = _run(q[:, :, rows], k[:, :, keys], v[:, :, keys], piece, run, seen, scale)
        _fold(out[:, :, rows], lse[:, :, rows], part, part_lse)
    if is_last:
        out, lse = out.to(q.dtype), lse.masked_fill_(lse == -math.inf, 0)
    return out, lse


def _run(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, run: Run, seen: _Seen, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the results of a piece; the lse of queries without a key is -inf."""
    if piece.kind != "masked":
        return run(q, k, v, piece.kind == "causal", scale)
    mask = seen.mask(piece, q.device)
    if seen.softcap:
        return attention_math(q, k, v, mask, scale, seen.softcap)
    out, lse = attention_masked(q, k, v, mask, scale)
    return out, lse.masked_fill(~mask.any(-1), -math.inf)


def _fold(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold the result of further keys into ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, part_lse)
    weight = torch.where(total == -math.inf, 0, (part_lse - total).exp())
    out.lerp_(part.to(out.dtype), weight[..., None])
    lse.copy_(total)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    run: RunBackward,
    seen: _Seen,
    scale: float,
) -> Gradients:
    """Return dq plus the gradient of q, in the accumulation dtype, and the gradients of k and v."""
    dtype = accumulation_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype) if dq is None else dq.clone()
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    for piece in seen.pieces(q) if q.numel() and k.numel() else ():
        rows, keys = slice(*piece.rows), slice(*piece.keys)
        q_, k_, v_ = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        grad_, out_, lse_ = grad[:, :, rows], out[:, :, rows], lse[:, :, rows]
        if piece.kind != "masked":
            parts = run(grad_, q_, k_, v_, out_, lse_, piece.kind == "causal", scale)
        else:
            mask = seen.mask(piece, q.device)
            if seen.softcap:
                parts = attention_math_backward(
                    grad_, q_, k_, v_, out_, lse_, mask, scale, seen.softcap
                )
            else:
                parts = attention_masked_backward(grad_, q_, k_, v_, mask, out_, lse_, scale)
        for total, at, part in ((dq, rows, parts[0]), (dk, keys, parts[1]), (dv, keys, parts[2])):
            total[:, :, at] += part
    return dq, dk.to(k.dtype), dv.to(v.dtype)
