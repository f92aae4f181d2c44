"""The op `next_tokens`, which chooses the next token of each row, greedily or at random.

    token, logprob = next_tokens(logits[n v], at[n], request[n 2], knobs[n 2], is_greedy)

``at``: the position of the token; ``request``: seed and top_k (0: all), int64; ``knobs``:
temperature (0: greedy) and top_p (1: all), float32. Filters are applied as in transformers:
temperature, then top_k (ties with the k-th stay), then top_p. ``logprob`` is the logarithm of
softmax(logits / temperature) before filters, with temperature 1 for a greedy row. ``is_greedy``:
all temperatures are 0, so that a GPU computes no random rows.

Invariant: the bits of a row's result depend on the row's inputs alone, so random rows are computed
one at a time. The random number depends on the seed and the position (philox.py). The host does not
wait for a GPU.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import define
from dtensor.sharding.ops.philox import Key, philox


def uniform_of(seed: Tensor, at: Tensor) -> Tensor:
    """Return float64[n] in [0, 1) with 53 random bits, one number for each (seed, position)."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=seed.device)
    column = zero.expand(seed.shape[0], 1)
    high, low, _, _ = philox(zero, column, Key(seed[:, None], at[:, None], 0))
    bits = ((high << 21) | (low >> 11))[:, 0]
    return bits.to(torch.float64) * 2.0**-53


def _next_tokens(
    logits: Tensor, at: Tensor, request: Tensor, knobs: Tensor, is_greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the token that is chosen for each row [n], and its log-probability [n]. Rows with
    temperature 0 are greedy. ``request``: seed and top_k; ``knobs``: temperature and top_p."""
    scaled = logits.to(accumulation_dtype(logits.dtype))
    token = scaled.max(1).indices
    temperature, top_p = knobs.unbind(1)
    is_random = temperature > 0
    rows = range(0) if is_greedy else range(len(token))
    if logits.is_cpu:
        rows = [row for row, t in zip(rows, temperature.tolist(), strict=False) if t > 0]
    if rows:
        scaled = scaled / torch.where(is_random, temperature, 1)[:, None]
        seed, top_k = request.unbind(1)
        number = uniform_of(seed, at)
        sample = _sample if logits.is_cpu else _sample_without_wait
        for row in rows:
            sampled = sample(scaled[row], number[row], top_k[row], top_p[row])
            token[row] = torch.where(is_random[row], sampled, token[row])
    return token, scaled.log_softmax(1).gather(1, token[:, None])[:, 0]


def _sample(scaled: Tensor, number: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Return the token that ``number``, random in [0, 1), selects by the inverse of the cumulative
    distribution, after the filters top_k ``k`` and top_p ``p``. ``scaled``: the row's logits
    divided by the temperature."""
    top_k, top_p = int(k), float(p)
    weights = (scaled.double() - scaled.max().double()).exp_()
    if 0 < top_k < len(scaled):
        weights.masked_fill_(scaled < scaled.topk(top_k).values[-1], 0)
    if top_p < 1:
        ordered, order = weights.sort(descending=True, stable=True)
        before = ordered.cumsum(0).sub_(ordered)
        ordered.masked_fill_(before >= top_p * weights.sum(), 0)
        weights = torch.empty_like(weights).scatter_(0, order, ordered)
    return _select(weights, number)


def _sample_without_wait(scaled: Tensor, number: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Return the result of `_sample`; the host does not read the filters from a GPU."""
    weights = (scaled.double() - scaled.max().double()).exp_()
    least = scaled.sort(descending=True).values.gather(0, (k[None] - 1).clamp(0, len(scaled) - 1))
    weights.masked_fill_((k > 0) & (scaled < least), 0)
    ordered, order = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(0).sub_(ordered)
    ordered.masked_fill_((p < 1) & (before >= p.double() * weights.sum()), 0)
    return _select(torch.empty_like(weights).scatter_(0, order, ordered), number)


def _select(weights: Tensor, number: Tensor) -> Tensor:
    """Return the token that ``number`` selects by these weights."""
    total = weights.cumsum(0)
    # number * total[-1] < total[-1], because number < 1: so the token's weight is above 0
    index = torch.searchsorted(total, number * total[-1], right=True)
    return index.clamp_(max=len(weights) - 1)  # for NaN logits the result is an arbitrary token


def _fake(logits: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    n = logits.shape[:1]
    logprob_dtype = accumulation_dtype(logits.dtype)
    return logits.new_empty(n, dtype=torch.int64), logits.new_empty(n, dtype=logprob_dtype)


define(
    "next_tokens(Tensor logits, Tensor at, Tensor request, Tensor knobs, bool is_greedy=False) "
    "-> (Tensor, Tensor)",
    _next_tokens,
    _fake,
)
