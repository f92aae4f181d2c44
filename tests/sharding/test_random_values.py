"""Tests random numbers: published vectors, independence of the shards, and moments.

Also tests the tokens that `dt.next_tokens` draws with them.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor.sharding.ops import distributions, sampling
from dtensor.sharding.ops.distributions import integers, inverse_normal, keep_mask, normal, uniform
from dtensor.sharding.ops.philox import Key, Place, philox, words
from dtensor.sharding.ops.sampling import uniform_of
from dtensor.sharding.spec.shards import block
from tests.runtime.test_memory import Meter

CPU = torch.device("cpu")
KEYS: tuple[Any, ...] = (int, torch.tensor)
"""How a seed or a step may be given."""
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_matches_published_test_vectors(
    counter: tuple[int, ...], key: tuple[int, int], words: str
) -> None:
    """The vectors are published with Random123 (kat_vectors, philox4x32 10)."""
    c0, c1 = (torch.full((1, 1), n) for n in counter[:2])
    found = philox(c0, c1, Key(key[0] | key[1] << 32, counter[2], counter[3]))
    assert " ".join(f"{int(w):08x}" for w in found) == words


def _pieces(rng: random.Random, size: int) -> tuple[tuple[int, int], ...]:
    a, b, c, d = sorted(rng.randrange(size + 1) for _ in range(4))
    return tuple(p for p in ((a, b), (c, d)) if p[0] < p[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5, 13), (3, 1), (29,), (2, 40_003)])
def test_random_values_of_shard_equal_same_block_of_full_tensor(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    key, whole, rng = Key(5, 6, 7), Place.whole(shape), random.Random(str(shape))
    for _ in range(8):
        pieces = tuple(_pieces(rng, size) for size in shape)
        place = Place(shape, pieces)
        for draw in (uniform, normal):
            assert torch.equal(
                draw(place, key, dtype, CPU), block(draw(whole, key, dtype, CPU), pieces)
            )
        assert torch.equal(
            keep_mask(place, key, 0.3, CPU), block(keep_mask(whole, key, 0.3, CPU), pieces)
        )


@pytest.mark.parametrize("seed, step", [(0, 0), (2**63 - 1, 2**32 - 1), (0x9123456789AB, 7)])
def test_random_values_of_key_on_device_equal_values_of_numbers(seed: int, step: int) -> None:
    at, on_device = ({"at_seed": make(seed), "at_step": make(step), "op": 3} for make in KEYS)
    place = Place.whole((5, 37))
    for draw in (uniform, normal):
        for dtype in (torch.float32, torch.float64):
            values = [draw(place, Key(make(seed), make(step), 3), dtype, CPU) for make in KEYS]
            assert torch.equal(*values)
    x = torch.randn(4, 9)
    for a, b in zip(
        torch.ops.dt.dropout(x, 0.3, **at), torch.ops.dt.dropout.on_device(x, 0.3, **on_device)
    ):
        assert torch.equal(a, b)


def test_normal_without_wait_has_bits_of_normal() -> None:
    """On a GPU the tails are computed for all elements."""
    u = torch.cat(
        [
            torch.linspace(0, 1, 4099, dtype=torch.float64)[1:-1],
            2.0 ** -torch.arange(20, 60).double(),
        ]
    )
    q = u - 0.5
    middle = distributions._ratio(0.180625 - q * q, distributions._DOUBLE[0]) * q
    tails = distributions._tails(q, u, distributions._DOUBLE)
    assert torch.equal(torch.where(q.abs() > 0.425, tails, middle), inverse_normal(u))


def test_random_values_of_different_keys_are_uncorrelated() -> None:
    place = Place.whole((50, 40))
    keys = [Key(1, 2, 3), Key(2, 2, 3), Key(1 | 1 << 40, 2, 3), Key(1, 3, 3), Key(1, 2, 4)]
    drawn = [uniform(place, key, torch.float32, CPU) for key in keys]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.1


def test_random_values_have_expected_moments() -> None:
    place, key = Place.whole((500, 400)), Key(11, 0, 0)
    count = 500 * 400
    u = uniform(place, key, torch.float32, CPU).double()
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / count)
    assert abs(float(u.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    z = normal(place, key, torch.float32, CPU).double()
    assert abs(float(z.mean())) < 4 / math.sqrt(count)
    assert abs(float(z.var()) - 1) < 4 * math.sqrt(2 / count)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / count)
    kept = keep_mask(place, key, 0.3, CPU).double()
    assert abs(float(kept.mean()) - 0.7) < 4 * math.sqrt(0.21 / count)


def test_normal_of_matches_torch_ndtri() -> None:
    small = 2.0 ** -torch.arange(2.0, 53.0, dtype=torch.float64)
    middle = torch.linspace(1e-6, 1 - 1e-6, 20_001, dtype=torch.float64)
    u = torch.cat([middle, small, 1 - small])
    torch.testing.assert_close(inverse_normal(u), torch.special.ndtri(u), rtol=1e-13, atol=1e-13)


def test_uniform_values_are_below_one_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        drawn = uniform(Place.whole((100, 1000)), Key(1, 0, 0), dtype, CPU)
        assert drawn.dtype == dtype
        assert float(drawn.max()) < 1


@pytest.mark.parametrize("kind", ["keep", "uniform", "integers", "normal"])
def test_random_values_need_little_temporary_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the chunk sizes of a GPU. Without chunks, 8192 x 8192 numbers needed 768 MiB of
    temporary memory there."""
    place, key, meta = Place.whole((8192, 8192)), Key(1, 2, 3), torch.device("meta")
    memory = Meter(1)
    memory.rank = 0
    with memory:
        match kind:
            case "keep":
                made = keep_mask(place, key, 0.1, meta)
            case "uniform":
                made = uniform(place, key, torch.float32, meta)
            case "integers":
                made = integers(place, key, 0, 9, torch.int64, meta)
            case _:
                made = normal(place, key, torch.float32, meta)
    beside = memory.peak[0] - made.nbytes
    assert 1 << 20 < beside < 160 << 20, beside / 2**20


# -- tokens ----------------------------------------------------------------------------------------


def drawn(
    logits: Tensor, temperature: float, top_k: int, top_p: float, num: int
) -> tuple[Tensor, Tensor]:
    """Return tokens drawn from one row of logits at ``num`` positions."""
    request = torch.tensor([[11, top_k]]).expand(num, 2)
    knobs = torch.tensor([[temperature, top_p]]).expand(num, 2)
    rows = logits.expand(num, -1).contiguous()
    return torch.ops.dt.next_tokens(rows, torch.arange(num), request, knobs)


@pytest.mark.parametrize("seed", [5, 7 << 40 | 9, 2**62 + 12345])
@pytest.mark.parametrize("at", [0, 3, 2**31, 2**32 - 1])
def test_sampling_number_is_philox_of_seed_and_position(seed: int, at: int) -> None:
    """The number of one row does not depend on the other rows."""
    _, elements = next(words(Place.whole((1, 4)), Key(seed, at, 0), CPU, 1))
    high, low = (int(element[0][0, 0]) for element in elements[:2])
    found = uniform_of(torch.tensor([1, seed, 2]), torch.tensor([4, at, 4]))
    assert float(found[1]) == (high << 21 | low >> 11) * 2.0**-53


@pytest.mark.default("1.0-0-1.0")
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 3, 1.0), (1.5, 0, 0.8), (2.0, 5, 0.7), (1.0, 1, 1.0), (1.0, 99, 1e-6)],
)
def test_next_tokens_follow_distribution_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
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
    assert chi_squared < 30  # 6 degrees of freedom: exceeded once in 25,000
    torch.testing.assert_close(logprob, of_all[token], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sample_without_wait_equals_sample_that_reads_filters(dtype: torch.dtype) -> None:
    scaled = torch.randn(50).to(dtype).float() / 4  # bfloat16 has ties
    for k in (0, 1, 3, 50, 99):
        for p in (1.0, 0.9, 0.5, 1e-6):
            filters = torch.tensor(k), torch.tensor(p)
            for number in torch.rand(20, dtype=torch.float64):
                want = sampling._sample(scaled, number, *filters)
                assert torch.equal(sampling._sample_without_wait(scaled, number, *filters), want)


def test_greedy_next_token_is_first_of_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, -float("inf"), 0.0]])
    none = torch.zeros(2, 2, dtype=torch.int64)
    token, logprob = torch.ops.dt.next_tokens(logits, none[:, 0], none, torch.zeros(2, 2))
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(logprob, logits.log_softmax(1)[[0, 1], [1, 0]])
    stated = torch.ops.dt.next_tokens(logits, none[:, 0], none, torch.ones(2, 2), is_greedy=True)
    assert torch.equal(stated[0], token) and torch.equal(stated[1], logprob)


def test_next_tokens_row_is_bitwise_independent_of_other_rows() -> None:
    """Rows with NaN, greedy rows and sampled rows beside it change nothing. The number of rows is
    the same."""
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
def test_next_tokens_of_16_bit_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 9).to(dtype)
    token, logprob = drawn(logits, 0.8, 0, 0.9, 4)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert logprob.dtype == kept and token.dtype == torch.int64
    want = (logits.to(kept) / 0.8).log_softmax(1)[0][token]
    torch.testing.assert_close(logprob, want, rtol=0, atol=1e-6)
