"""`dt.next_tokens`: whose numbers it draws, from which distribution, and that rows are alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor.sharding.ops.philox import Key, Place, words
from dtensor.sharding.ops.sampling import uniform_of

CPU = torch.device("cpu")


def drawn(
    logits: Tensor, temperature: float, top_k: int, top_p: float, num: int
) -> tuple[Tensor, Tensor]:
    """From one row of logits, at ``num`` positions."""
    request = torch.tensor([[11, top_k]]).expand(num, 2)
    knobs = torch.tensor([[temperature, top_p]]).expand(num, 2)
    rows = logits.expand(num, -1).contiguous()
    return torch.ops.dt.next_tokens(rows, torch.arange(num), request, knobs)


@pytest.mark.parametrize("seed", [5, 7 << 40 | 9, 2**62 + 12345])
@pytest.mark.parametrize("at", [0, 3, 2**31, 2**32 - 1])
def test_numbers_are_philox_of_seed_and_position(seed: int, at: int) -> None:
    """Those of one key, whatever other rows there are."""
    _, elements = next(words(Place.whole((1, 4)), Key(seed, at, 0), CPU, 1))
    high, low = (int(element[0][0, 0]) for element in elements[:2])
    found = uniform_of(torch.tensor([1, seed, 2]), torch.tensor([4, at, 4]))
    assert float(found[1]) == (high << 21 | low >> 11) * 2.0**-53


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 3, 1.0), (1.5, 0, 0.8), (2.0, 5, 0.7), (1.0, 1, 1.0), (1.0, 99, 1e-6)],
)
def test_the_distribution_is_transformers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    num, logits = 20_000, torch.randn(1, 7) * 2
    scores = logits / temperature
    of_all = scores.log_softmax(1)[0]
    if top_k:
        scores = TopKLogitsWarper(top_k)(torch.empty(0), scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(torch.empty(0), scores)
    want = scores.softmax(1)[0]
    token, logprob = drawn(logits, temperature, top_k, top_p, num)
    counts = torch.bincount(token, minlength=7).double()
    assert counts[want == 0].sum() == 0
    live = want > 0
    expected = want[live] * num
    chi_squared = ((counts[live] - expected) ** 2 / expected).sum()
    assert chi_squared < 30  # of 6 degrees of freedom: once in 25,000
    torch.testing.assert_close(logprob, of_all[token], rtol=0, atol=1e-6)


def test_greedy_rows_are_the_likeliest_and_ties_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, -float("inf"), 0.0]])
    none = torch.zeros(2, 2, dtype=torch.int64)
    token, logprob = torch.ops.dt.next_tokens(logits, none[:, 0], none, torch.zeros(2, 2))
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(logprob, logits.log_softmax(1)[[0, 1], [1, 0]])


def test_a_row_has_the_bits_that_it_has_in_other_company() -> None:
    """Of the same number of rows: NaN, greedy and drawn ones beside it change nothing."""
    logits = torch.randn(6, 300)
    request = torch.tensor([[9, 0], [8, 5], [7, 0], [6, 40], [5, 0], [4, 0]])
    knobs = torch.tensor([[0, 1], [0.7, 1], [1.3, 0.9], [1, 0.5], [2, 1], [0, 1]])
    at = torch.arange(6) + 40
    token, logprob = torch.ops.dt.next_tokens(logits, at, request, knobs)
    others = torch.tensor([[3, 2]]), torch.tensor([[0.9, 0.9]])
    for row in range(6):
        company = torch.full((6, 300), float("nan"))
        asked, how = others[0].repeat(6, 1), others[1].repeat(6, 1)
        to = (row + 2) % 6
        company[to], asked[to], how[to] = logits[row], request[row], knobs[row]
        positions = torch.zeros(6, dtype=torch.int64)
        positions[to] = at[row]
        found = torch.ops.dt.next_tokens(company, positions, asked, how)
        assert found[0][to] == token[row] and found[1][to] == logprob[row]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_logits_are_drawn_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 9).to(dtype)
    token, logprob = drawn(logits, 0.8, 0, 0.9, 4)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert logprob.dtype == kept and token.dtype == torch.int64
    want = (logits.to(kept) / 0.8).log_softmax(1)[0][token]
    torch.testing.assert_close(logprob, want, rtol=0, atol=1e-6)
