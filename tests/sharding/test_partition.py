"""Tests that `partition` cuts a chain at the best of all cuts, compared with brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from dtensor.sharding.plan.stages.cut_chain import Chain, Sent, SharedCost, partition


def every_cut(num: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, num) for inner in itertools.combinations(range(1, num), parts - 1)]


def random_chain(seed: int, num: int = 9) -> Chain:
    """Return a chain with shared costs, skip connections, backward sends and tied units."""
    rng = random.Random(seed)

    def units(least: int = 1) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(num), rng.randint(least, 3))))

    def sent() -> Sent:
        unit, *readers = rng.sample(range(num), rng.randint(2, 4))
        return Sent(rng.randint(1, 9), unit, tuple(readers))

    return Chain(
        own=tuple(rng.randint(0, 20) for _ in range(num)),
        shared=tuple(SharedCost(rng.randint(1, 9), units()) for _ in range(3)),
        tied=tuple(SharedCost(rng.randint(1, 9), units(2)) for _ in range(2)),
        sent=tuple(sent() for _ in range(6)),
        barred=((0, 3), (2, 6)),
    )


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_partition_minimizes_most_expensive_part(seed: int, parts: int) -> None:
    chain = random_chain(seed)

    def barred(bounds: tuple[int, ...]) -> bool:
        return any(i <= u < j == v for i, j in itertools.pairwise(bounds) for u, v in chain.barred)

    found = partition(chain, parts)
    least = min(max(chain.costs(b)) for b in every_cut(9, parts) if not barred(b))
    assert found is not None and not barred(found.bounds)
    assert max(found.costs) == least
    assert found.costs == chain.costs(found.bounds)


def test_shared_and_tied_costs_count_once_per_part() -> None:
    chain = Chain(
        own=(1, 1, 1, 1),
        shared=(SharedCost(10, (0, 1, 3)),),
        tied=(SharedCost(100, (0, 1)), SharedCost(1000, (0, 3))),
        sent=(Sent(5, 0, (1, 2, 3)),),
    )
    assert chain.costs((0, 2, 4)) == (2 + 10 + 1000 + 5, 2 + 10 + 1000)
    assert chain.costs((0, 1, 2, 4)) == (1 + 10 + 1100 + 10, 1 + 10 + 100, 2 + 10 + 1000)


def test_equal_partitions_prefer_fewer_bytes_sent_then_even_parts() -> None:
    heavy = Chain(own=(1, 1, 1, 1, 1, 1, 9))
    found = partition(heavy, 3)
    assert found is not None and found.bounds == (0, 3, 6, 7)
    wide = Chain(own=(1, 1, 1, 1, 1, 1, 9), sent=(Sent(1, 2, (3,)), Sent(1, 5, (6,))))
    found = partition(wide, 3)
    assert found is not None and found.bounds == (0, 4, 6, 7)
    layers = Chain(own=(1, 1, 1, 1, 1, 1, 9), depth=(2, 1, 2, 1, 2, 0))
    found = partition(layers, 4)  # layers of two units
    assert found is not None and found.bounds == (0, 2, 4, 6, 7)


def test_partition_respects_memory_limit_of_each_part() -> None:
    held = tuple(SharedCost(4, (u,)) for u in range(6))
    kept = tuple(SharedCost(1, (u,)) for u in range(6))
    chain = Chain(own=(9, 1, 1, 1, 1, 1), bytes_held=held, bytes_kept=kept, bytes_passing=(0,) * 6)
    free = partition(chain, 2)
    assert free is not None and free.bounds == (0, 1, 6)
    tight = partition(chain, 2, in_flight=(2, 1), memory_bytes=20)
    assert tight is not None and tight.fits and tight.bounds == (0, 2, 6)
    none = partition(chain, 2, in_flight=(2, 1), memory_bytes=10)
    assert none is not None and not none.fits
    assert none.bounds == (0, 3, 6)  # 18 and 15 bytes


def test_partition_returns_none_if_no_cut_is_allowed() -> None:
    assert partition(Chain(own=(1, 1)), 3) is None
    assert partition(Chain(own=(1, 1), barred=((0, 1),)), 2) is None
