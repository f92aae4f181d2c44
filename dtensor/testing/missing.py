"""Finds valid strategies that a rule does not offer, and the communication that each would save.

    strategy = next(find_missing(case))
    str(strategy)     # 'aten.linear.default: [Shard(1), Shard(1), Partial("sum")] -> [...]'
    strategy.instead  # ('all_reduce of operand 2',): needed by the cheapest offered strategy
    strategy.bytes    # 192, on 2 ranks, per rank

Each combination of placements of the operands is run on 2 and 3 ranks. A placement of the results
that describes the local results for both numbers is valid. A strategy that follows from an offered
one without communication is not listed. Strategies whose local op differs from the global op are
not found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dtensor.sharding.redistribute.moves import FREE_KINDS, Move, moves, seconds
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.rules.rule import Dims, Rule, Strategy
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.testing.oracle import Case, compare, cut, generator_of, run

NUMS = (2, 3)
_MAX_TRIALS = 400
"""Calls with more combinations of operand placements are not searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A strategy that a rule lacks. ``instead``: the collectives that are needed without it, on 2
    ranks; ``bytes``: the bytes that they send per rank."""

    op: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    instead: tuple[str, ...] = field(default=(), compare=False)
    bytes: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.op}: {list(self.operands)} -> {list(self.results)}"

    @property
    def saving(self) -> str:
        """A text, as "saves all_reduce of operand 0 (192 bytes per rank)"."""
        if not self.instead:
            return "saves no communication"
        return f"saves {', '.join(self.instead)} ({self.bytes} bytes per rank)"


def find_missing(case: Case) -> Iterator[Missing]:
    """Yield the missing strategies of a call with at most 3 tensors."""
    # Not all kernels check indices. A random summand of an index, or a shard of a dim that must not
    # be split, would make an index point outside of its dim.
    integers = [not x.is_floating_point() and x.dtype != torch.bool for x in case.operands]
    unsplit = case.rule.whole if any(integers) else frozenset[str]()
    choices = [
        _input_choices(x, dims, unsplit, pending=not integer or all(integers))
        for x, dims, integer in zip(case.operands, case.rule.operands, integers, strict=True)
    ]
    few = math.prod(map(len, choices)) <= _MAX_TRIALS
    if not (1 <= len(choices) <= 3 and few and any(x.dim() for x in case.operands)):
        return
    # Each placement is valid for a result that is None or all zeros, so such results are ignored.
    nonzero = [r is not None and bool(r.any()) for r in case.results]
    offered = {
        (s.operands, *itertools.compress(s.results, nonzero))
        for num in NUMS
        for s in case.rule.strategies(num)
    }
    for operands in itertools.product(*choices):
        if all(p == REPLICATE for p in operands):
            continue
        valid_by_num = [_valid_results(case, operands, num) for num in NUMS]
        if not all(valid_by_num):
            continue
        for results in itertools.product(
            *(
                [p for p in first if p in second][: None if is_nonzero else 1]
                for first, second, is_nonzero in zip(*valid_by_num, nonzero, strict=True)
            )
        ):
            if (operands, *itertools.compress(results, nonzero)) in offered:
                continue
            instead, total = _saved_communication(case, operands, results)
            if total:
                yield Missing(
                    op=case.call.name,
                    operands=operands,
                    results=results,
                    instead=instead,
                    bytes=total,
                )


def _input_choices(
    x: torch.Tensor, dims: Dims, unsplit: frozenset[str], *, pending: bool
) -> tuple[Placement, ...]:
    """Return the placements to try for an operand. Dims of ``unsplit`` factors are not sharded;
    ``pending``: also try `Partial("sum")`."""
    has_unsplit = [any(f in unsplit for product in dim for f in product) for dim in dims]
    shards = [Shard(d) for d in range(x.dim()) if x.shape[d] > 1 and not has_unsplit[d]]
    sums = [Partial("sum")] if pending and x.dtype != torch.bool else []
    return (REPLICATE, *shards, *sums)


def _valid_results(case: Case, operands: Sequence[Placement], num: int) -> list[list[Placement]]:
    """Run the call on ``num`` shards. Return for each result the placements that describe the local
    results; return [] if a result has no such placement or the call fails."""
    mesh = Mesh(a=num)
    generator = generator_of(case.seed + num)
    shards = [
        cut(x, _spec(x, p, mesh), generator) for x, p in zip(case.operands, operands, strict=True)
    ]
    if not all(_sizes_agree(case.rule, [s[rank] for s in shards]) for rank in range(num)):
        return []
    # The shards need not belong together, so the op may raise anything. Then the placements are
    # not valid.
    try:
        outputs = [run(case.call, [s[rank] for s in shards]) for rank in range(num)]
    except Exception:
        return []
    if any(len(out) != len(case.results) for out in outputs):
        return []
    valid: list[list[Placement]] = []
    for i, result in enumerate(case.results):
        if result is None:
            valid.append([REPLICATE])
            continue
        choices: list[Placement] = [REPLICATE, *(Shard(d) for d in range(result.dim()))]
        choices += [] if result.dtype == torch.bool else [Partial("sum")]
        parts = [out[i] for out in outputs]
        valid.append(
            [
                p
                for p in choices
                if compare(parts, result, _spec(result, p, mesh), case.tolerance) is None
            ]
        )
    return valid if all(valid) else []


def _sizes_agree(rule: Rule, shards: Sequence[torch.Tensor]) -> bool:
    """Return whether each factor has the same size in all shards of a rank, and a factor that the
    rule does not split is not empty. Otherwise a kernel that does not check shapes could write out
    of bounds or divide by zero."""
    sizes: dict[str, int] = {}
    for dims, shard in zip(rule.operands, shards, strict=True):
        for dim, size in zip(dims, shard.shape, strict=True):
            if len(dim) != 1 or len(dim[0]) != 1:
                continue
            (factor,) = dim[0]
            if sizes.setdefault(factor, size) != size:
                return False
            if size == 0 and factor in rule.whole:
                return False
    return True


def _spec(x: torch.Tensor, placement: Placement, mesh: Mesh) -> TensorSpec:
    return TensorSpec(tuple(x.shape), x.dtype, mesh, (placement,))


# -- savings --------------------------------------------------------------------------


def _saved_communication(
    case: Case, operands: Sequence[Placement], results: Sequence[Placement]
) -> tuple[tuple[str, ...], int]:
    """Return the collectives and the bytes that the rule's cheapest strategy needs to compute these
    results from these operands."""
    topology = Topology()
    options = [
        _redistributions(case, strategy, operands, results) for strategy in case.rule.strategies(2)
    ]
    prices = [sum(seconds(src, dst, topology) for _, src, dst in option) for option in options]
    cheapest = options[prices.index(min(prices))]
    if math.isinf(min(prices)):
        return (), 0  # no redistribution gives these results, such as a pending max
    sent: list[tuple[str, Move]] = [
        (name, move)
        for name, src, dst in cheapest
        for move in moves(src, dst, topology)
        if move.kind not in FREE_KINDS
    ]
    return tuple(f"{m.kind} of {name}" for name, m in sent), sum(m.bytes_sent for _, m in sent)


def _redistributions(
    case: Case, strategy: Strategy, operands: Sequence[Placement], results: Sequence[Placement]
) -> list[tuple[str, TensorSpec, TensorSpec]]:
    """Return name, source and target of each redistribution around the op if it runs under the
    strategy, but starts from these operands and ends with these results."""
    mesh = Mesh(a=2)
    before = [
        (f"operand {i}", _spec(x, p, mesh), _spec(x, q, mesh))
        for i, (x, p, q) in enumerate(zip(case.operands, operands, strategy.operands, strict=True))
    ]
    after = [
        (f"result {i}", _spec(x, q, mesh), _spec(x, p, mesh))
        for i, (x, p, q) in enumerate(zip(case.results, results, strategy.results, strict=True))
        if x is not None
    ]
    return before + after
