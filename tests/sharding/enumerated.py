"""The cheapest choice by enumeration, for small graphs: what `solve` is compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dtensor.sharding.plan.choose.solve import Node, Price, Solution, evaluate


def brute_force(nodes: Sequence[Node], price: Price) -> Solution:
    best = math.inf
    winner: dict[str, int] = {}
    for combination in itertools.product(*(range(len(n.options)) for n in nodes)):
        chosen = {n.name: k for n, k in zip(nodes, combination, strict=True)}
        seconds = evaluate(nodes, chosen, price)
        if seconds < best:
            best, winner = seconds, chosen
    return Solution(winner, best, sum(len(n.options) for n in nodes))
