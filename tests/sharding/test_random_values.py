"""The generator: known answers, independence of what a rank holds, statistics."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import dtensor.sharding.ops.philox as philox_file
from dtensor.sharding.ops.distributions import integers, keep, normal, normal_of, uniform
from dtensor.sharding.ops.philox import Key, Place, philox
from dtensor.sharding.spec.shards import block
from tests.runtime.test_memory import Meter

CPU = torch.device("cpu")
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
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    """The vectors that the authors publish with Random123 (kat_vectors, philox4x32 10)."""
    c0, c1 = (torch.full((1, 1), n) for n in counter[:2])
    found = philox(c0, c1, Key(key[0] | key[1] << 32, counter[2], counter[3]))
    assert " ".join(f"{int(w):08x}" for w in found) == words


def _pieces(rng: random.Random, size: int) -> tuple[tuple[int, int], ...]:
    a, b, c, d = sorted(rng.randrange(size + 1) for _ in range(4))
    return tuple(p for p in ((a, b), (c, d)) if p[0] < p[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5, 13), (3, 1), (29,), (2, 40_003)])
def test_a_part_is_a_part_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    key, whole, rng = Key(5, 6, 7), Place.whole(shape), random.Random(str(shape))
    for _ in range(8):
        pieces = tuple(_pieces(rng, size) for size in shape)
        place = Place(shape, pieces)
        for draw in (uniform, normal):
            assert torch.equal(
                draw(place, key, dtype, CPU), block(draw(whole, key, dtype, CPU), pieces)
            )
        assert torch.equal(keep(place, key, 0.3, CPU), block(keep(whole, key, 0.3, CPU), pieces))


def test_each_part_of_the_key_matters() -> None:
    place = Place.whole((50, 40))
    keys = [Key(1, 2, 3), Key(2, 2, 3), Key(1 | 1 << 40, 2, 3), Key(1, 3, 3), Key(1, 2, 4)]
    drawn = [uniform(place, key, torch.float32, CPU) for key in keys]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(_correlation(a, b)) < 0.1
            assert not torch.equal(a, b)


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1])


def test_moments() -> None:
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
    kept = keep(place, key, 0.3, CPU).double()
    assert abs(float(kept.mean()) - 0.7) < 4 * math.sqrt(0.21 / count)


def test_neighbours_are_independent() -> None:
    """In the row, in the column, the same element of the next step and of the next op."""
    x = normal(Place.whole((300, 300)), Key(3, 0, 0), torch.float32, CPU)
    next_step = normal(Place.whole((300, 300)), Key(3, 1, 0), torch.float32, CPU)
    next_op = normal(Place.whole((300, 300)), Key(3, 0, 1), torch.float32, CPU)
    bound = 4 / 300
    for lag in (1, 2, 3, 4, 5, 8):
        assert abs(_correlation(x[:, lag:], x[:, :-lag])) < bound
        assert abs(_correlation(x[lag:], x[:-lag])) < bound
    assert abs(_correlation(x, next_step)) < bound
    assert abs(_correlation(x, next_op)) < bound


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_chi_square(seed: int) -> None:
    """Counts of 256 cells, one by one and in pairs of neighbours: within 5 deviations."""
    u = uniform(Place.whole((256, 1024)), Key(seed, 0, 0), torch.float32, CPU)
    singles = (u * 256).long().flatten()
    pairs = ((u[:, ::2] * 16).long() * 16 + (u[:, 1::2] * 16).long()).flatten()
    drawn = integers(Place.whole((256, 1024)), Key(seed, 0, 0), -3, 253, torch.int64, CPU)
    for cells in (singles, pairs, (drawn + 3).flatten()):
        expected = cells.numel() / 256
        chi = float(((torch.bincount(cells, minlength=256) - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


def test_the_inverse_of_the_normal_distribution() -> None:
    small = 2.0 ** -torch.arange(2.0, 53.0, dtype=torch.float64)
    middle = torch.linspace(1e-6, 1 - 1e-6, 20_001, dtype=torch.float64)
    u = torch.cat([middle, small, 1 - small])
    torch.testing.assert_close(normal_of(u), torch.special.ndtri(u), rtol=1e-13, atol=1e-13)


def test_uniform_never_rounds_up_to_one() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        drawn = uniform(Place.whole((100, 1000)), Key(1, 0, 0), dtype, CPU)
        assert drawn.dtype == dtype
        assert float(drawn.max()) < 1


@pytest.mark.parametrize("kind", ["keep", "uniform", "integers", "normal"])
def test_numbers_on_a_gpu_need_little_memory_beside_themselves(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks are those of a GPU: there 8192 x 8192 of them had 768 MiB of temporaries."""
    place, key, meta = Place.whole((8192, 8192)), Key(1, 2, 3), torch.device("meta")
    memory = Meter(1)
    memory.rank = 0
    with memory:
        match kind:
            case "keep":
                made = keep(place, key, 0.1, meta)
            case "uniform":
                made = uniform(place, key, torch.float32, meta)
            case "integers":
                made = integers(place, key, 0, 9, torch.int64, meta)
            case _:  # it asks for values, so on the CPU, for two chunks
                monkeypatch.setattr(philox_file, "_CPU_CHUNK", philox_file._DEVICE_CHUNK)
                few = Place.whole((8, 1 << 20))
                made = normal(few, key, torch.float32, torch.device("cpu"))
    beside = memory.peak[0] - made.nbytes
    assert 1 << 20 < beside < 160 << 20, beside / 2**20
