"""What the oracle tries: the strategies of a rule, and placements that the rule may lack.

one_axis(rule, 3)      # replicate, pending through each linear set, each factor in blocks, units
two_axes(rule)         # pairs of them on a 2x2 mesh, also two on one factor
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dtensor.sharding.rules.rule import FactorSharding, Rule, Strategy
from dtensor.sharding.spec.placements import Shard, pieces


def one_axis(rule: Rule, num: int) -> Iterator[Strategy]:
    found: dict[Strategy, None] = dict.fromkeys(rule.strategies(num))
    for assignment in _assignments(rule):
        strategy = rule.apply(assignment, num)
        if strategy is not None:
            found[strategy] = None
    yield from found


def _assignments(rule: Rule) -> Iterator[dict[str, FactorSharding]]:
    """Each factor, with those it stands in a sum with, cut plainly, in blocks and at units."""
    for factor in rule.factors():
        group = sorted(rule.partners().get(factor, {factor}))
        sizes = [rule.size[f] for f in group]
        yield {f: FactorSharding((s,)) for f, s in zip(group, sizes, strict=True)}
        if all(s % 2 == 0 for s in sizes):
            yield {f: FactorSharding((s // 2,) * 2) for f, s in zip(group, sizes, strict=True)}
            yield {f: FactorSharding((s,), 2) for f, s in zip(group, sizes, strict=True)}
        if all(s > 2 for s in sizes):
            yield {f: FactorSharding((1, s - 1)) for f, s in zip(group, sizes, strict=True)}


def two_axes(rule: Rule) -> Iterator[tuple[Strategy, Strategy]]:
    plain = rule.strategies(2)[1:]
    yield from itertools.combinations_with_replacement(rule.fixed_strategies[1:], 2)
    yield from itertools.permutations(plain, 2)
    for assignment in _assignments(rule):
        finer = {
            f: FactorSharding(pieces([(Shard(0, c.blocks, c.unit), 2)], rule.size[f]), c.unit)
            for f, c in assignment.items()
        }
        first, second = rule.apply(assignment, 2), rule.apply(finer, 2)
        if first is not None and second is not None:
            yield first, second
