"""Finds the contractions of a weight: which of its dims a product sums over, and which it outputs.

    x @ w.t(), w f32[64,16]     Contraction(output_dim=0, contracted_dim=1)     nn.Linear
    x @ w, w f32[16,64]         Contraction(output_dim=1, contracted_dim=0)     transposed
    embedding(w, ids)           Contraction(output_dim=1, contracted_dim=0, lookup=True)

The dims are read from the factors of the op's rule, so convolutions have contractions too. The
weight may be reshaped, cast or added to other weights before the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.rules.rule import Dim, Dims, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """A product that reads a weight.

    ``value``: the name of the weight's input; ``operand``: the index of the operand of ``op`` that
    is the weight, or is computed from it; ``lookup``: whether the op picks rows of the contracted
    dim instead of summing over it. The dims are dims of the weight.
    """

    value: str
    op: Op
    operand: int
    output_dim: int
    contracted_dim: int
    lookup: bool


def contractions_of(
    flow: Dataflow, rules: Mapping[str, Rule], value: str, batch: frozenset[str]
) -> tuple[Contraction, ...]:
    """Return the forward contractions of the input ``value``, in program order. ``batch``: the
    values that depend on arguments. The search ends at an op that combines the weight with such a
    value without contracting it."""
    contractions: list[Contraction] = []
    dims: tuple[int | None, ...] = tuple(range(len(flow.metas[value].shape)))
    pending: list[tuple[str, tuple[int | None, ...]]] = [(value, dims)]
    visited: set[tuple[str, int]] = set()
    while pending:
        name, weight_dims = pending.pop(0)
        for op, index in flow.consumers.get(name, ()):
            if op.phase != "forward" or (op.name, index) in visited:
                continue
            visited.add((op.name, index))
            rule = rules[op.name]
            contraction = _contraction(value, op, index, rule, weight_dims)
            if contraction is not None:
                contractions.append(contraction)
                continue
            if any(n in batch for i, n in enumerate(op.operands) if i != index):
                continue
            for result, dims_of_result in zip(op.results, rule.results, strict=True):
                if result is not None:
                    operand_dims = rule.operands[index]
                    pending.append((result, _propagate(weight_dims, operand_dims, dims_of_result)))
    return tuple(contractions)


def _contraction(
    value: str, op: Op, index: int, rule: Rule, weight_dims: tuple[int | None, ...]
) -> Contraction | None:
    """Return the contraction if the op sums over a dim of the weight and outputs another one, else
    None. ``weight_dims[i]`` is the dim of the weight ``value`` that is dim i of the operand at
    ``index``, or None."""
    if len(op.operands) < 2:
        return None
    # a vector next to another operand is a bias, which has the output's factor too
    other_dims = [dims for i, dims in enumerate(rule.operands) if i != index]
    multiplied = [dims for dims in other_dims if len(dims) > 1 or len(other_dims) == 1]
    other_factors = {f for dims in multiplied for f in _factors(dims)}
    result_factors = {f for dims in rule.results for f in _factors(dims)}
    contracted: list[tuple[int, str]] = []
    output: list[int] = []
    for dim, weight_dim in zip(rule.operands[index], weight_dims, strict=True):
        factor = _only_factor(rule, dim)
        if weight_dim is None or factor is None or factor in rule.whole:
            continue
        if factor not in result_factors:
            contracted.append((weight_dim, factor))
        elif factor not in other_factors:
            output.append(weight_dim)
    if not contracted or not output:
        return None
    # in a weight with a matrix for each expert, prefer the summed dim over the dim of experts
    dim, factor = min(contracted, key=lambda dim_and_factor: dim_and_factor[1] not in other_factors)
    return Contraction(
        value=value,
        op=op,
        operand=index,
        output_dim=output[-1],
        contracted_dim=dim,
        lookup=factor not in other_factors,
    )


def _only_factor(rule: Rule, dim: Dim) -> str | None:
    """Return the factor of a dim that is a single factor, disregarding factors of size 1 (such as
    the only group of a convolution); else None."""
    if len(dim) != 1:
        return None
    large = [factor for factor in dim[0] if rule.size[factor] > 1]
    return large[0] if len(large) == 1 else None


def _propagate(
    weight_dims: tuple[int | None, ...], operand: Dims, result: Dims
) -> tuple[int | None, ...]:
    """Return, for each dim of a result, the dim of the weight that it is, or None.

    ``weight_dims``: the same for each dim of an operand. ``operand``, ``result``: their dims in the
    op's rule; dims with the same factors are the same.
    """
    by_dim = {
        dim: weight_dim
        for dim, weight_dim in zip(operand, weight_dims, strict=True)
        if dim != ((),)
    }
    return tuple(by_dim.get(dim) for dim in result)


def _factors(dims: Dims) -> set[str]:
    return {factor for dim in dims for product in dim for factor in product}
