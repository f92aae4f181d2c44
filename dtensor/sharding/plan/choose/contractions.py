"""What a weight is to the product that it feeds: which of its dims is summed over, which comes out.

    x @ w.t(), w f32[64,16]     Contraction(output_dim=0, contracted_dim=1)     nn.Linear
    x @ w, w f32[16,64]         Contraction(output_dim=1, contracted_dim=0)     the transposed one
    embedding(w, ids)           Contraction(output_dim=1, contracted_dim=0, lookup=True)

Found through the rules, so that a convolution has one too, and through what only reshapes, casts
or adds other weights to the weight. Invariants: of a contraction's two dims each is a whole factor
of the op's rule; a weight that takes part in several has one entry for each, in program order.
Not here: what it means for placements (api/model/stating/roles_of_weights.py,
api/search/derive.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.rules.rule import Dim, Dims, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """``value``: the input's name; ``operand``: where the weight, or what it became, stands in
    ``op``; ``lookup``: rows are picked, not summed with another operand."""

    value: str
    op: Op
    operand: int
    output_dim: int
    contracted_dim: int
    lookup: bool


def contractions_of(
    flow: Dataflow, rules: Mapping[str, Rule], value: str, batch: frozenset[str]
) -> tuple[Contraction, ...]:
    """The forward contractions of the input ``value``; ``batch``: what depends on arguments."""
    contractions: list[Contraction] = []
    dims: tuple[int | None, ...] = tuple(range(len(flow.metas[value].shape)))
    waiting: list[tuple[str, tuple[int | None, ...]]] = [(value, dims)]
    seen: set[tuple[str, int]] = set()
    while waiting:
        name, came_from = waiting.pop(0)
        for op, index in flow.consumers.get(name, ()):
            if op.phase != "forward" or (op.name, index) in seen:
                continue
            seen.add((op.name, index))
            rule = rules[op.name]
            one = _contraction(value, op, index, rule, came_from)
            if one is not None:
                contractions.append(one)
                continue
            if any(n in batch for i, n in enumerate(op.operands) if i != index):
                continue
            for result, placed in zip(op.results, rule.results, strict=True):
                if result is not None:
                    waiting.append((result, _carried(rule.operands[index], placed, came_from)))
    return tuple(contractions)


def _contraction(
    value: str, op: Op, index: int, rule: Rule, came_from: tuple[int | None, ...]
) -> Contraction | None:
    if len(op.operands) < 2:
        return None
    # a vector beside another operand is a bias: it has the output's factor too
    beside = [dims for i, dims in enumerate(rule.operands) if i != index]
    others = {f for dims in beside if len(dims) > 1 or len(beside) == 1 for f in _factors(dims)}
    results = {f for dims in rule.results for f in _factors(dims)}
    contracted: list[tuple[int, str]] = []
    output: list[int] = []
    for dim, origin in zip(rule.operands[index], came_from, strict=True):
        factor = _only_factor(rule, dim)
        if origin is None or factor is None or factor in rule.whole:
            continue
        if factor not in results:
            contracted.append((origin, factor))
        elif factor not in others:
            output.append(origin)
    if not contracted or not output:
        return None
    # of a matrix for each expert, what is multiplied and not what is picked
    dim, factor = min(contracted, key=lambda found: found[1] not in others)
    return Contraction(
        value=value,
        op=op,
        operand=index,
        output_dim=output[-1],
        contracted_dim=dim,
        lookup=factor not in others,
    )


def _only_factor(rule: Rule, dim: Dim) -> str | None:
    """The factor that a dim is, beside factors of size 1 (a convolution's one group)."""
    if len(dim) != 1:
        return None
    large = [factor for factor in dim[0] if rule.size[factor] > 1]
    return large[0] if len(large) == 1 else None


def _carried(
    operand: Dims, result: Dims, came_from: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """For each dim of a result the weight's dim that it is, where it is one whole."""
    at = {dim: origin for dim, origin in zip(operand, came_from, strict=True) if dim != ((),)}
    return tuple(at.get(dim) for dim in result)


def _factors(dims: Dims) -> set[str]:
    return {factor for dim in dims for product in dim for factor in product}
