"""Bounds how much the order of a reduction can change its result, for each sum that is split.

    rounding of loss_fn: placements reorder these sums
      512 terms over tp     h_reduced                    <= 6.1e-05 of the sum of magnitudes

Any order of adding n terms is within (n-1) u of the exact sum, relative to the sum of magnitudes,
where u is the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); so two
orders differ by at most (n-1) eps. 16-bit parts and results are also rounded when stored: 2 eps of
their dtype. For softmax over P ranks, log n + 2P is added to n - 1: each fold step rescales a part,
and rounding x - m changes exp(x - m) by at most eps/2 |x - m|, whose weighted mean is at most
log n. The bound is for one sum with given terms, not for its later effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.numerics import dtype_name, is_narrow
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Accumulate, Compute, Redistribute, Step
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import PARTIAL, Partial
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.showing import table

SOFTMAX = Partial("softmax")


@dataclass(frozen=True, slots=True)
class Reordered:
    """One sum whose terms are split. ``terms``: the number of terms that are added, over ``axis``
    (mb: microbatches); ``scaled``: the number of ranks for softmax, 0 for a plain sum; ``kept``:
    the dtype of the running sum if it is at most 32 bits."""

    name: str
    axis: str
    terms: int
    dtype: torch.dtype
    scaled: int = 0
    kept: torch.dtype = torch.float32

    @property
    def bound(self) -> float:
        """The largest difference between two orders, relative to the sum of magnitudes."""
        accumulator = torch.float64 if self.dtype == torch.float64 else self.kept
        stored = 0.0 if self.dtype.itemsize >= 4 else 2 * torch.finfo(self.dtype).eps
        scaling = math.log(self.terms) + 2 * self.scaled if self.scaled else 0.0
        return (self.terms - 1 + scaling) * torch.finfo(accumulator).eps + stored


def reordered(plan: PlanRecord) -> tuple[Reordered, ...]:
    """Return the floating-point sums whose terms are split over ranks or microbatches."""
    producers: dict[str, Step] = {name: s for s in plan.steps for name in s.gives}
    num_terms: dict[str, int] = {}
    for step in plan.steps:  # a step's operands come before it
        for name in step.gives:
            num_terms[name] = _num_terms(step, name, num_terms)
    sums: list[Reordered] = []
    for step in plan.steps:
        for value, result, axis, spec in _sums(step):
            if spec.dtype.is_floating_point:
                terms = num_terms.get(value, 1)
                if isinstance(step, Accumulate) or value not in producers:
                    terms = max(terms, spec.mesh.axis_size(axis))
                scaled = spec.mesh.axis_size(axis) if spec.placement(axis) == SOFTMAX else 0
                kept = torch.float32
                if isinstance(step, Accumulate) and is_narrow(step.dst.dtype):
                    kept = step.dst.dtype
                sums.append(Reordered(result, axis, terms, spec.dtype, scaled, kept))
    return tuple(sums)


def rounding_text(plan: PlanRecord) -> str:
    """Return the table of bounds, one line for each number of terms, axis and dtype."""
    groups: dict[tuple[int, str, torch.dtype, int, torch.dtype], list[Reordered]] = {}
    for item in reordered(plan):
        key = item.terms, item.axis, item.dtype, item.scaled, item.kept
        groups.setdefault(key, []).append(item)
    if not groups:
        return f"rounding of {plan.name}: no sum is taken apart, so no order changes"
    rows = [
        (
            f"  {terms} terms over {axis}",
            dtype_name(dtype),
            f"<= {members[0].bound:.1e} of the sum of magnitudes",
            ", ".join(collapse([item.name for item in members])),
        )
        for (terms, axis, dtype, *_), members in groups.items()
    ]
    title = f"rounding of {plan.name}: placements reorder these sums"
    return "\n".join([title, *table(rows, "<")])


def _sums(step: Step) -> list[tuple[str, str, str, TensorSpec]]:
    """Return (value, result, axis, value's spec) of each sum over ranks or microbatches."""
    match step:
        case Redistribute() if not step.tied:
            return [
                (value, result, move.axis, move.src)
                for value, result, move in zip(step.operands, step.results, step.moves)
                if _is_pending(move.src, move.axis) and not _is_pending(move.dst, move.axis)
            ]
        case Accumulate():
            axes = [a for a in step.src.mesh.axes if _is_pending(step.src, a)]
            reduced = [a for a in axes if not _is_pending(step.dst, a)]
            return [(step.operand, step.result, axis, step.src) for axis in reduced]
        case _:
            return []


def _is_pending(spec: TensorSpec, axis: str) -> bool:
    return spec.sharding.get(axis) in (PARTIAL, SOFTMAX)


def _any_pending(spec: TensorSpec) -> bool:
    return any(_is_pending(spec, axis) for axis in spec.mesh.axes)


def _num_terms(step: Step, name: str, num_terms: dict[str, int]) -> int:
    """Return how many terms are added to each element of the pending result ``name``: the terms of
    its pending operands, times the number of products that the op sums. Return 1 if the result is
    not pending. ``num_terms``: value -> its number of terms, for earlier values."""
    match step:
        case Compute():
            spec = next(s for _, n, s in step.gives_as() if n == name)
            if not _any_pending(spec):
                return 1
            pending = [
                num_terms.get(operand, 1)
                for operand, operand_spec in zip(step.operands, step.operand_specs, strict=True)
                if _any_pending(operand_spec)
            ]
            return (sum(pending) or 1) * _contracted_size(step.rule, step.results.index(name))
        case Redistribute() if step.tied:
            return sum(num_terms.get(operand, 1) for operand in step.operands)
        case _:
            return max((num_terms.get(operand, 1) for operand in step.reads), default=1)


def _contracted_size(rule: Rule, result: int) -> int:
    """Return the number of products that an op sums for one element of a result: the product of
    the sizes of the factors that the result lacks."""
    result_factors = set(_factors(rule.results[result]))
    operand_factors = {factor for dims in rule.operands for factor in _factors(dims)}
    return math.prod(rule.size[factor] for factor in sorted(operand_factors - result_factors))


def _factors(dims: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    return [factor for dim in dims for product in dim for factor in product]
