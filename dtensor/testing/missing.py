"""Valid strategies that a rule does not offer, each with its saving.

    found = next(missing(case))
    str(found)        # 'aten.linear.default: [Shard(1), Shard(1), Partial("sum")] -> [...]'
    found.instead     # ('all_reduce of operand 2',): needed by the cheapest offered strategy
    found.bytes       # 192, on 2 ranks, per rank

Every product of one-axis placements of the operands is run, on 2 and on 3 ranks, and every
placement of the results that describes the ranks' values is compared with the rule's strategies.
Invariants: a strategy that is valid only for one number of ranks is not listed, nor one that
follows from an offered one without communication. It cannot find strategies whose local form
differs from the global one.
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
_TRIALS = 400  # placements of the operands that are worth the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """One strategy that a rule lacks. ``instead``: the collectives that are needed without it, on 2
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
        """``saves all_reduce of operand 0 (192 bytes)``."""
        if not self.instead:
            return "saves no communication"
        return f"saves {', '.join(self.instead)} ({self.bytes} bytes per rank)"


def missing(case: Case) -> Iterator[Missing]:
    """The missing strategies of a call, for at most 3 tensors."""
    # Not all kernels check indices: random summands of some, and those of a dim that must be whole
    # and is split, point outside of it.
    integers = [not x.is_floating_point() and x.dtype != torch.bool for x in case.operands]
    whole = case.rule.whole if any(integers) else frozenset[str]()
    choices = [
        _input_choices(x, dims, whole, pending=not integer or all(integers))
        for x, dims, integer in zip(case.operands, case.rule.operands, integers, strict=True)
    ]
    few = math.prod(map(len, choices)) <= _TRIALS
    if not (1 <= len(choices) <= 3 and few and any(x.dim() for x in case.operands)):
        return
    # Every placement is valid for a result of zeros, or for none: it proves nothing.
    telling = [r is not None and bool(r.any()) for r in case.results]
    offered = {
        (s.operands, *itertools.compress(s.results, telling))
        for num in NUMS
        for s in case.rule.strategies(num)
    }
    for operands in itertools.product(*choices):
        if all(p == REPLICATE for p in operands):
            continue
        holding = [_holds(case, operands, num) for num in NUMS]
        if not all(holding):
            continue
        for results in itertools.product(
            *(
                [p for p in first if p in second][: None if tells else 1]
                for first, second, tells in zip(*holding, telling, strict=True)
            )
        ):
            if (operands, *itertools.compress(results, telling)) in offered:
                continue
            instead, total = _saved(case, operands, results)
            if total:
                yield Missing(
                    op=case.call.name,
                    operands=operands,
                    results=results,
                    instead=instead,
                    bytes=total,
                )


def _input_choices(
    x: torch.Tensor, dims: Dims, whole: frozenset[str], *, pending: bool
) -> tuple[Placement, ...]:
    """``whole``: factors that are not split."""
    kept = [any(f in whole for product in dim for f in product) for dim in dims]
    split = [Shard(d) for d in range(x.dim()) if x.shape[d] > 1 and not kept[d]]
    sums = [Partial("sum")] if pending and x.dtype != torch.bool else []
    return (REPLICATE, *split, *sums)


def _holds(case: Case, operands: Sequence[Placement], num: int) -> list[list[Placement]]:
    """For each result, the placements that describe the ranks' values; empty if there are none."""
    mesh = Mesh(a=num)
    generator = generator_of(case.seed + num)
    shards = [
        cut(x, _spec(x, p, mesh), generator) for x, p in zip(case.operands, operands, strict=True)
    ]
    if not all(_agree(case.rule, [s[rank] for s in shards]) for rank in range(num)):
        return []
    # An op that raises rejects these shards, which need not belong together: the placement does not
    # hold, and that is this function's answer.
    try:
        outputs = [run(case.call, [s[rank] for s in shards]) for rank in range(num)]
    except Exception:
        return []
    if any(len(out) != len(case.results) for out in outputs):
        return []
    held: list[list[Placement]] = []
    for i, result in enumerate(case.results):
        if result is None:
            held.append([REPLICATE])
            continue
        choices: list[Placement] = [REPLICATE, *(Shard(d) for d in range(result.dim()))]
        choices += [] if result.dtype == torch.bool else [Partial("sum")]
        parts = [out[i] for out in outputs]
        held.append(
            [
                p
                for p in choices
                if compare(parts, result, _spec(result, p, mesh), case.tolerance) is None
            ]
        )
    return held if all(held) else []


def _agree(rule: Rule, shards: Sequence[torch.Tensor]) -> bool:
    """Whether each factor has one size in all of a rank's shards, and a whole one some size.

    Kernels that do not check shapes write out of bounds, or divide by zero, otherwise.
    """
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


def _saved(
    case: Case, operands: Sequence[Placement], results: Sequence[Placement]
) -> tuple[tuple[str, ...], int]:
    """The communication that the rule's cheapest strategy needs from these operands to these
    results."""
    topology = Topology()
    ways = [_way(case, strategy, operands, results) for strategy in case.rule.strategies(2)]
    prices = [sum(seconds(src, dst, topology) for _, src, dst in way) for way in ways]
    best = ways[prices.index(min(prices))]
    if math.isinf(min(prices)):
        return (), 0  # not reachable from the rule's strategies: max and min cannot be made
    needed: list[tuple[str, Move]] = [
        (what, move) for what, src, dst in best for move in moves(src, dst, topology)
    ]
    sent = [(what, move) for what, move in needed if move.kind not in FREE_KINDS]
    return tuple(f"{m.kind} of {what}" for what, m in sent), sum(m.bytes_sent for _, m in sent)


def _way(
    case: Case, strategy: Strategy, operands: Sequence[Placement], results: Sequence[Placement]
) -> list[tuple[str, TensorSpec, TensorSpec]]:
    mesh = Mesh(a=2)
    there = [
        (f"operand {i}", _spec(x, p, mesh), _spec(x, q, mesh))
        for i, (x, p, q) in enumerate(zip(case.operands, operands, strategy.operands, strict=True))
    ]
    back = [
        (f"result {i}", _spec(x, q, mesh), _spec(x, p, mesh))
        for i, (x, p, q) in enumerate(zip(case.results, results, strategy.results, strict=True))
        if x is not None
    ]
    return there + back
