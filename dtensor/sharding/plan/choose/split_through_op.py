"""Propagates a split through an op: from the placement of one of its tensors to a strategy.

    through(rule of "m k, k n -> m n", 1, Shard(1), 2)    # the right operand's n
    # Strategy(operands=(Replicate(), Shard(1)), results=(Shard(1),))
    around(flow, rules, "h", Shard(1), 2)                 # for each op that reads or makes h

To propagate a split through a program, loop over `around` for a split value, then over the values
that `split_by` yields for each strategy. Equal layers share their rules, so results are cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal

from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.rules.rule import Assignment, Dim, Rule, Strategy
from dtensor.sharding.spec.placements import Shard

MISALIGNED: Literal["crooked"] = "crooked"
"""The result of `through` for a placement that does not line up with the op."""
Through = Strategy | Literal["crooked"] | None


def around(
    flow: Dataflow, rules: Mapping[str, Rule], value: str, shard: Shard, num: int
) -> Iterator[tuple[Op, int, Through]]:
    """Propagate a split of ``value`` through its producer and then through each of its consumers.
    Yields (op, the index of the value among the op's operands and results, result of `through`)."""
    producer = flow.producers.get(value)
    uses = list(flow.consumers.get(value, ()))
    if producer is not None:
        uses.insert(0, (producer, len(producer.operands) + producer.results.index(value)))
    for op, tensor in uses:
        yield op, tensor, through(rules[op.name], tensor, shard, num)


def split_by(op: Op, strategy: Strategy) -> Iterator[tuple[str, Shard]]:
    """Yield (value, placement) of each operand and result that the strategy splits."""
    for name, placement in zip(
        (*op.operands, *op.results), (*strategy.operands, *strategy.results), strict=True
    ):
        if name is not None and isinstance(placement, Shard):
            yield name, placement


@lru_cache(maxsize=1 << 13)
def through(rule: Rule, tensor: int, shard: Shard, num: int) -> Through:
    """Return the strategy in which the tensor with index ``tensor`` (operands first, then results)
    has the placement ``shard``.

    Returns CROOKED if the shard does not line up with the factors of its dim, both in the rule and
    in its fallback, or would give ranks different pieces of a fused dim. Returns None if the op
    cannot be split over this dim.
    """
    dims = (*rule.operands, *rule.results)[tensor]
    assignment = rule.match(dims, shard, num)
    if assignment is None or _splits_pieces(rule, dims[shard.dim], assignment):
        return MISALIGNED if rule.fallback is None else through(rule.fallback, tensor, shard, num)
    return rule.apply(_extend_to_sums(rule, assignment), num)


def _splits_pieces(rule: Rule, dim: Dim, assignment: Assignment) -> bool:
    """Return whether ranks would get different pieces of a dim whose pieces the op needs together,
    such as the two halves of glu. A placement in blocks splits each piece instead."""
    return any(
        product[0] in rule.whole and product[0] in assignment and not rule.whole.issuperset(product)
        for product in dim
        if len(product) > 1
    )


def _extend_to_sums(rule: Rule, assignment: Assignment) -> Assignment:
    """Extend an assignment to the other parts of every concatenated dim that it splits. If q of
    ``(q + k + v)`` is split, k and v are split too: in the same way if they have q's size, else in
    one block, with q's unit if the unit divides the size."""
    extended = dict(assignment)
    sums = [d for dims in (*rule.operands, *rule.results) for d in dims if len(d) > 1]
    for dim in sums:
        split_factors = [next((f for f in product if f in extended), None) for product in dim]
        if not any(split_factors) or all(split_factors):
            continue
        at = next(i for i, f in enumerate(split_factors) if f is not None)
        model, model_product = split_factors[at], dim[at]
        assert model is not None
        depth = model_product.index(model)  # parts are split at the same position of their product
        for product, factor in zip(dim, split_factors, strict=True):
            if factor is not None or not product:
                continue
            other = product[depth] if depth < len(product) else product[0]
            sharding = extended[model]
            size = rule.size[other]
            if size == rule.size[model]:
                extended[other] = sharding
            else:
                extended[other] = sharding.with_one_block(size)
    return extended
