"""Tests `solve` against enumeration: random graphs with random prices, some of them infinite.

Also tests the tie between repeated layers: on a chain of equal layers it costs nothing, and the
number of variables does not grow with the chain.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.sharding.plan.choose.solve import (
    Infeasible,
    Node,
    Option,
    Price,
    solve,
)
from dtensor.sharding.spec.placements import PARTIAL, REPLICATE, Placement, Shard
from tests.sharding.enumerated import brute_force, evaluate

PLACEMENTS: tuple[Placement, ...] = (REPLICATE, Shard(0), Shard(1), PARTIAL)
SEEDS = st.integers(min_value=0, max_value=2**32)


def random_prices(rng: random.Random, infinite: float) -> Price:
    """Return a random price for each (value, from, to), drawn at the first use and kept."""
    found: dict[tuple[str, Placement, Placement], float] = {}

    def price(value: str, src: Placement, dst: Placement) -> float:
        key = (value, src, dst)
        if key not in found:
            found[key] = math.inf if rng.random() < infinite else rng.randint(0, 50) * 1e-6
        return found[key]

    return price


def random_nodes(rng: random.Random) -> list[Node]:
    """Return a graph in program order: each node reads up to two earlier values and writes one
    or two."""
    values: list[str] = []
    nodes: list[Node] = []
    for number in range(rng.randint(2, 6)):
        reads = [rng.choice(values) for _ in range(rng.randint(0, 2))] if values else []
        writes = [f"v{number}_{i}" for i in range(rng.choice((1, 1, 2)))]
        options = tuple(
            Option(
                tuple((v, rng.choice(PLACEMENTS)) for v in reads),
                tuple((v, rng.choice(PLACEMENTS)) for v in writes),
                rng.randint(0, 30) * 1e-6,
            )
            for _ in range(rng.randint(1, 3))
        )
        nodes.append(Node(f"n{number}", options, f"n{number}"))
        values += writes
    return nodes


@settings(max_examples=80, derandomize=True, deadline=None)
@given(SEEDS)
def test_solve_is_as_cheap_as_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    nodes, price = random_nodes(rng), random_prices(rng, rng.choice((0.0, 0.3, 0.7)))
    best = brute_force(nodes, price)
    if math.isinf(best):
        with pytest.raises(Infeasible):
            solve(nodes, price)
        return
    found = solve(nodes, price)
    assert evaluate(nodes, found.chosen, price) == pytest.approx(best, abs=1e-11)


def layers(rng: random.Random, num: int) -> tuple[list[Node], Price]:
    """Return ``num`` equal layers in a chain, each of two nodes; the first value is free to
    choose."""
    costs = [[rng.randint(0, 30) * 1e-6 for _ in PLACEMENTS] for _ in range(2)]
    shuffles = [rng.sample(PLACEMENTS, len(PLACEMENTS)) for _ in range(2)]
    drawn = random_prices(rng, 0.3)
    nodes = [Node("start", tuple(Option((), (("h0", p),), 0.0) for p in PLACEMENTS), "start")]
    for layer in range(num):
        before, inside, after = f"h{layer}", f"a{layer}", f"h{layer + 1}"
        for part, (read, write) in enumerate(((before, inside), (inside, after))):
            options = tuple(
                Option(((read, p),), ((write, q),), cost)
                for p, q, cost in zip(PLACEMENTS, shuffles[part], costs[part], strict=True)
            )
            nodes.append(Node(f"layer{layer}.{part}", options, ("layer", part)))

    def price(value: str, src: Placement, dst: Placement) -> float:
        # infinite prices become high ones, so that every chain has a solution
        return min(drawn(value[0], src, dst), 1e-3)

    return nodes, price


def _uniform(num: int, first: int, second: int) -> dict[str, int]:
    return {f"layer{i}.{part}": (first, second)[part] for i in range(num) for part in range(2)}


@pytest.mark.slow
@settings(max_examples=40, derandomize=True, deadline=None)
@given(SEEDS)
def test_solve_of_tied_layers_has_constant_number_of_variables(seed: int) -> None:
    rng = random.Random(seed)
    state = rng.getstate()
    sizes: set[int] = set()
    for num in (2, 3, 5):
        rng.setstate(state)
        nodes, price = layers(rng, num)
        tied = solve(nodes, price)
        untied = solve([Node(n.name, n.options, n.name) for n in nodes], price)
        for part in range(2):
            assert len({tied.chosen[f"layer{i}.{part}"] for i in range(num)}) == 1
        alike = min(
            evaluate(nodes, {"start": start, **_uniform(num, first, second)}, price)
            for start, first, second in itertools.product(range(len(PLACEMENTS)), repeat=3)
        )
        seconds = evaluate(nodes, tied.chosen, price)
        assert seconds == pytest.approx(alike, abs=1e-11)
        assert seconds >= evaluate(nodes, untied.chosen, price) - 1e-11
        sizes.add(tied.num_variables)
    assert len(sizes) == 1


def test_solve_unties_layers_that_cannot_choose_alike() -> None:
    """The first layer must read a replicated value, and the second a value that the first has
    split."""
    split = Shard(0)

    def price(value: str, src: Placement, dst: Placement) -> float:
        return math.inf

    def layer(i: int) -> Node:
        reads = (REPLICATE, split)
        options = (Option(((f"h{i}", p),), ((f"h{i + 1}", split),), 1e-6) for p in reads)
        return Node(f"layer{i}", tuple(options), "layer")

    first = Node("input", (Option((), (("h0", REPLICATE),), 0.0),), "input")
    nodes = [first, *map(layer, range(3))]
    found = solve(nodes, price)
    assert [found.chosen[f"layer{i}"] for i in range(3)] == [0, 1, 1]
