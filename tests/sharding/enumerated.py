"""Finds the cheapest choice for small graphs by enumeration, to compare `solve` with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from dtensor.sharding.plan.choose.solve import Node, Price
from dtensor.sharding.spec.placements import REPLICATE, Placement


def brute_force(nodes: Sequence[Node], price: Price) -> float:
    """Return the seconds of the cheapest choice; infinity if no choice connects the nodes."""
    best = math.inf
    for combination in itertools.product(*(range(len(n.options)) for n in nodes)):
        chosen = {n.name: k for n, k in zip(nodes, combination, strict=True)}
        best = min(best, evaluate(nodes, chosen, price))
    return best


def evaluate(nodes: Sequence[Node], chosen: Mapping[str, int], price: Price) -> float:
    """Return the seconds of a choice: its options and the conversions that connect them."""
    total = 0.0
    native: dict[str, Placement] = {}
    needed: dict[str, dict[Placement, None]] = {}
    for node in nodes:
        option = node.options[chosen[node.name]]
        total += option.seconds
        native.update(dict(option.writes))
        for value, placement in option.reads:
            needed.setdefault(value, {})[placement] = None
    for value, placements in needed.items():
        total += conversion_seconds(value, native[value], tuple(placements), price)
    return total


def conversion_seconds(
    value: str, native: Placement, needed: Sequence[Placement], price: Price
) -> float:
    """Return the lowest price of having ``value`` at all the ``needed`` placements."""
    rest = [p for p in needed if p != native]
    direct = sum(price(value, native, p) for p in rest)
    if native == REPLICATE or not rest:
        return direct
    whole = price(value, native, REPLICATE)
    via = whole + sum(
        min(price(value, native, p), price(value, REPLICATE, p)) for p in rest if p != REPLICATE
    )
    return min(direct, via)
