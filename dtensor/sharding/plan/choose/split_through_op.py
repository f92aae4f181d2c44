"""From the placement of one tensor of an op to how the op then splits them all.

    through(rule of "m k, k n -> m n", 1, Shard(1), 2)    # the right operand's n
    # Strategy(operands=(Replicate(), Shard(1)), results=(Shard(1),))
    around(flow, rules, "h", Shard(1), 2)                 # the same for each op that has h

It is asked for each op that a pin reaches, so for each layer of a model alike: layers whose calls
are equal share their rules, and the answer is kept for a rule, a tensor, a placement and a number
of ranks. A closure over a program is a loop over `around`: from a split value to those that
`split_by` then names. Not here: which splits are followed, and how far (opened_factors.py,
api/search/derive.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal

from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.rules.rule import Assignment, Dim, Rule, Strategy
from dtensor.sharding.spec.placements import Shard

CROOKED: Literal["crooked"] = "crooked"
Through = Strategy | Literal["crooked"] | None


def around(
    flow: Dataflow, rules: Mapping[str, Rule], value: str, shard: Shard, num: int
) -> Iterator[tuple[Op, int, Through]]:
    """What each op at a value makes of its split, the op that gives it first.

    The op, which of its tensors the value is (operands first, then results), and `through`.
    """
    producer = flow.producers.get(value)
    uses = list(flow.consumers.get(value, ()))
    if producer is not None:
        uses.insert(0, (producer, len(producer.operands) + producer.results.index(value)))
    for op, tensor in uses:
        yield op, tensor, through(rules[op.name], tensor, shard, num)


def split_by(op: Op, strategy: Strategy) -> Iterator[tuple[str, Shard]]:
    """The values of an op that a strategy splits."""
    for name, placed in zip(
        (*op.operands, *op.results), (*strategy.operands, *strategy.results), strict=True
    ):
        if name is not None and isinstance(placed, Shard):
            yield name, placed


@lru_cache(maxsize=1 << 13)
def through(rule: Rule, tensor: int, shard: Shard, num: int) -> Through:
    """The strategy of an op of which ``tensor`` (operands first, then results) lies as ``shard``.

    CROOKED where the shard does not line up with the factors of its dim, by the rule or its
    fallback, or gives ranks other pieces of a fused dim; None where the op cannot be split so.
    """
    dims = (*rule.operands, *rule.results)[tensor]
    assignment = rule.match(dims, shard, num)
    if assignment is None or _splits_pieces(rule, dims[shard.dim], assignment):
        return CROOKED if rule.fallback is None else through(rule.fallback, tensor, shard, num)
    return rule.apply(_complete(rule, assignment), num)


def _splits_pieces(rule: Rule, dim: Dim, assignment: Assignment) -> bool:
    """Whether ranks get different pieces of a dim whose pieces the op needs together, and which a
    placement in blocks would split alike: the halves of glu."""
    return any(
        product[0] in rule.whole and product[0] in assignment and not rule.whole.issuperset(product)
        for product in dim
        if len(product) > 1
    )


def _complete(rule: Rule, assignment: Assignment) -> Assignment:
    """Extend an assignment to the other parts of every sum that it touches.

    Where q of ``(q + k + v)`` is cut, k and v are cut too: alike where they have q's size, else in
    one block with q's unit where that divides.
    """
    done = dict(assignment)
    sums = [d for dims in (*rule.operands, *rule.results) for d in dims if len(d) > 1]
    for dim in sums:
        have = [next((f for f in product if f in done), None) for product in dim]
        if not any(have) or all(have):
            continue
        at = next(i for i, f in enumerate(have) if f is not None)
        model, model_product = have[at], dim[at]
        assert model is not None
        depth = model_product.index(model)
        for product, factor in zip(dim, have, strict=True):
            if factor is not None or not product:
                continue
            other = product[depth] if depth < len(product) else product[0]
            sharding = done[model]
            size = rule.size[other]
            if size == rule.size[model]:
                done[other] = sharding
            else:
                done[other] = sharding.of_one_block(size)
    return done
