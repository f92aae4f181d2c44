"""What the order of reduction can change: a bound for each sum that placements take apart.

    rounding of loss_fn: placements reorder these sums
      512 terms over tp     h_reduced                    <= 6.1e-05 of the sum of magnitudes

One device adds the n terms of a sum in one order, ranks add their parts and then the parts. In
floating point with unit roundoff u, any order is within (n-1) u times the sum of the magnitudes of
the exact sum, to first order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 4.2), so two orders differ by at most 2(n-1) u = (n-1) eps of it. Sums are accumulated in
float32, eps = 2**-23 (float64: 2**-52); a 16-bit value is also rounded where a part or the whole is
stored, which adds at most 2 eps of its dtype.

Under softmax the sum is of n exponentials exp(x - m), all positive, and the part of each of P ranks
is scaled once in each step of the fold: 2 eps a step for an exponential and a product, and one eps
each for the exponentials of either way. Rounding x - m changes a term by eps/2 |x - m| of it, in
either way; the mean of |x - m|, weighted by the terms, is at most log n (it is the entropy of the
softmax less the log of the sum). So log n + 2P is added to n - 1.

Invariants: it counts the terms that each element of a result is the sum of, from the op that
contracts them to the reduction, whatever is linear between them. It bounds one sum for given terms,
not what its difference becomes further on. Sums that nothing splits are not listed: they keep
their order. max and min are exact, as are softmax's maximum and its sum of which one term is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.numerics import dtype_name
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Redistribute,
    Step,
)
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import PARTIAL, Partial
from dtensor.sharding.spec.spec import TensorSpec

SOFTMAX = Partial("softmax")


@dataclass(frozen=True, slots=True)
class Reordered:
    """One sum that is taken apart: ``terms`` are added over ``axis`` (mb: microbatches);
    ``scaled``: of how many ranks under softmax, 0 for a plain sum."""

    name: str
    axis: str
    terms: int
    dtype: torch.dtype
    scaled: int = 0

    @property
    def bound(self) -> float:
        """Two orders differ by at most this, relative to the sum of the terms' magnitudes."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        stored = 0.0 if self.dtype.itemsize >= 4 else 2 * torch.finfo(self.dtype).eps
        scaling = math.log(self.terms) + 2 * self.scaled if self.scaled else 0.0
        return (self.terms - 1 + scaling) * torch.finfo(wide).eps + stored


def reordered(plan: PlanRecord) -> tuple[Reordered, ...]:
    """The floating-point sums of a plan whose terms several ranks or microbatches add."""
    makers: dict[str, Step] = {name: s for s in plan.steps for name in s.gives}
    counted: dict[str, int] = {}
    for step in plan.steps:  # a step's operands come before it
        for name in step.gives:
            counted[name] = _terms(step, name, counted)
    sums: list[Reordered] = []
    for step in plan.steps:
        for value, result, axis, spec in _sums(step):
            if spec.dtype.is_floating_point:
                terms = counted.get(value, 1)
                if isinstance(step, Accumulate) or value not in makers:
                    terms = max(terms, spec.mesh.axis_size(axis))
                scaled = spec.mesh.axis_size(axis) if spec.placement(axis) == SOFTMAX else 0
                sums.append(Reordered(result, axis, terms, spec.dtype, scaled))
    return tuple(sums)


def rounding_text(plan: PlanRecord) -> str:
    """One line for each kind of sum; names of repeated layers together."""
    groups: dict[tuple[int, str, torch.dtype, int], list[Reordered]] = {}
    for one in reordered(plan):
        groups.setdefault((one.terms, one.axis, one.dtype, one.scaled), []).append(one)
    if not groups:
        return f"rounding of {plan.name}: no sum is taken apart, so no order changes"
    rows = [
        (
            f"{terms} terms over {axis}",
            dtype_name(dtype),
            ", ".join(collapse([one.name for one in members])),
            f"<= {members[0].bound:.1e} of the sum of magnitudes",
        )
        for (terms, axis, dtype, _), members in groups.items()
    ]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1, 3)]
    lines = [f"rounding of {plan.name}: placements reorder these sums"]
    for terms, dtype, names, bound in rows:
        lines.append(f"  {terms:<{wide[0]}}  {dtype:<{wide[1]}}  {bound:<{wide[2]}}  {names}")
    return "\n".join(lines)


def _sums(step: Step) -> list[tuple[str, str, str, TensorSpec]]:
    """(value, result, axis, the value's spec) of what a step adds up over ranks or microbatches."""
    match step:
        case Redistribute() if not step.tied:
            return [
                (value, result, move.axis, move.src)
                for value, result, move in zip(step.operands, step.results, step.moves)
                if _pending(move.src, move.axis) and not _pending(move.dst, move.axis)
            ]
        case Accumulate():
            axes = [a for a in step.src.mesh.axes if _pending(step.src, a)]
            gone = [a for a in axes if not _pending(step.dst, a)]
            return [(step.operand, step.result, axis, step.src) for axis in gone]
        case _:
            return []


def _pending(spec: TensorSpec, axis: str) -> bool:
    return spec.sharding.get(axis) in (PARTIAL, SOFTMAX)


def _any_pending(spec: TensorSpec) -> bool:
    return any(_pending(spec, axis) for axis in spec.mesh.axes)


def _terms(step: Step, name: str, counted: dict[str, int]) -> int:
    """How many terms each element of a result is the sum of, that are still to be added up."""
    match step:
        case Compute():
            spec = next(s for _, n, s in step.gives_as() if n == name)
            if not _any_pending(spec):
                return 1
            pending = [
                counted.get(operand, 1)
                for operand, at in zip(step.operands, step.operand_specs, strict=True)
                if _any_pending(at)
            ]
            return (sum(pending) or 1) * _contracted(step.rule, step.results.index(name))
        case Redistribute() if step.tied:
            return sum(counted.get(operand, 1) for operand in step.operands)
        case _:
            return max((counted.get(operand, 1) for operand in step.reads), default=1)


def _contracted(rule: Rule, result: int) -> int:
    """How many elements of the operands go into one of the result: the sizes of what it lacks."""
    kept = set(_factors(rule.results[result]))
    gone = {factor for dims in rule.operands for factor in _factors(dims)} - kept
    return math.prod(rule.size[factor] for factor in sorted(gone))


def _factors(dims: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    return [factor for dim in dims for product in dim for factor in product]
