"""Rules: an op's mapping of dims to factors, in einops' notation.

    mm       "m k, k n -> m n"        k is contracted: sharding it gives Partial("sum")
    add      "..., ... -> ..."        built per call: broadcast dims get no factor
    view     "b (h d) -> b h d"       a product of factors, major first
    split    "b (q + k + v) -> b q, b k, b v"     a sum of factors: all parts shard together
    softmax  "b k! -> b k!"           k must be whole on each rank
    sum      "b k -> b 1"             1 is a dim of size 1

From a rule alone follow all choices on one axis (`strategies`), and axis by axis all choices on any
mesh. A *factor sharding* is a choice for one factor, (blocks, unit), as in Shard; it maps to a
Shard of every dim that contains the factor (`Rule.apply`) and back (`Rule.match`).

Invariants: each factor has one size; a factor occurs at most once in a dim; a contracted factor
occurs in operands only. A rule names no mesh and no axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dtensor.errors import PlanningError
from dtensor.numerics import ReduceOp
from dtensor.sharding.ops.call import Local, Localizer, Meta, OpCall
from dtensor.sharding.rules.dtypes import Dtypes
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    block_sizes,
    index_sets,
    largest_part,
    pieces,
    simplest,
)
from dtensor.sharding.spec.spec import TensorSpec

Product = tuple[str, ...]
Dim = tuple[Product, ...]  # a sum of products of factors; ((),) is a dim of size 1
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class FactorSharding:
    """The cut of one factor over an axis: ``blocks`` and ``unit`` as in Shard."""

    blocks: tuple[int, ...]  # sizes, adding up to the factor's
    unit: int = 1

    def of_one_block(self, size: int) -> FactorSharding:
        """The same cut of a factor of another size, in one block, with the unit if that divides
        it."""
        return FactorSharding((size,), self.unit if size % self.unit == 0 else 1)

    def cut_again(self, num: int) -> FactorSharding:
        """The rest of each coordinate of ``num`` after this cut, as blocks of a further axis."""
        major = Shard(0, self.blocks, self.unit), num
        return FactorSharding(pieces([major], sum(self.blocks)), self.unit)


Assignment = Mapping[str, FactorSharding]


Kind = Literal["compute", "view", "cast", "attention", "mark"]
"""Facts that planning needs of an op besides its dims: a view moves no data, a cast changes only
the dtype, attention has its own rate, a mark states placements and computes nothing."""

Parts = Literal["carried"] | Callable[[OpCall], OpCall] | None
"""How an op leaves its part of a pending sum in float32, if its dtype is of 16 bits: by itself, if
an operand is such a part; or by a replacement of the local call."""

StrategyKind = Literal["replicate", "linear", "split", "stated"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on one axis: a placement for each operand and each result.

    ``kind``: nothing is split, pending sums pass through, ``factors`` are split, or placements that
    the user stated on a mark.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    kind: StrategyKind
    factors: tuple[str, ...] = ()

    @property
    def shards_work(self) -> bool:
        """Whether each rank does only its part of the work."""
        return any(isinstance(p, Shard) for p in (*self.operands, *self.results))


def fullest_rank(
    call: OpCall, strategies: Sequence[tuple[Strategy, int]]
) -> tuple[float, list[float]]:
    """The fraction of the op's work that the fullest rank does, and the fraction of each operand
    and result that it holds; 0 for a tensor that is missing.

    ``strategies``: by axis, with the axis' size. An axis that splits work splits a factor of it:
    the fraction is that of a dim with the factor, and counts once however many tensors have it.
    """
    metas = (*call.operands, *call.results)
    cuts: list[dict[int, dict[int, tuple[Shard, int]]]] = [{} for _ in metas]  # by dim, by axis
    missing: set[int] = set()  # axes whose share of the work is not counted yet
    for at, (strategy, num) in enumerate(strategies):
        for index, placement in enumerate((*strategy.operands, *strategy.results)):
            if isinstance(placement, Shard):
                cuts[index].setdefault(placement.dim, {})[at] = placement, num
                missing.add(at)
    work, parts = 1.0, list[float]()
    for index, meta in enumerate(metas):
        if meta is None:
            parts.append(0.0)
            continue
        part = 1.0
        for dim, by_axis in cuts[index].items():
            share = largest_part(tuple(by_axis.values()), meta.shape[dim])
            part *= share
            if not missing.isdisjoint(by_axis):
                work *= share
                missing.difference_update(by_axis)
        parts.append(part)
    return work, parts


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``operands`` and ``results`` list each tensor's dims, as factors.

    linear: the sets of operands in which the op is jointly linear (all of a set may be pending
        sums together, the others replicated, and the results are pending sums).
    addends: operands that are added to a contraction's result (the bias of addmm): if a contracted
    factor is split they must be pending sums, so that they are added once. same: pairs (result,
    factor): the result is the same for every part of the factor, so that splitting the factor does
    not make it pending. A result without elements never is. whole: factors that may not be split.
    reduce: how the parts of a contracted factor combine. localize: rewrites the call for one rank
    if the local form differs from the global one. flops: floating-point operations of the global
    call, 0 if memory traffic dominates. kind: see `Kind`. dtypes: the allowed combinations of
    operands' dtypes (dtypes.py). of_loss: its sums over a split factor are parts of a loss, one
    number a row: they stay pending. parts: how a rank leaves its part of a sum of 16 bits in
    float32; None: it cannot (`Parts`). fallback: the rule for a shard that does not line up with
    the factors of this one; ``localize`` of this rule serves both. narrow: gives a strategy over so
    many ranks the placements of operands of which each rank reads a part.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[tuple[str, int], ...]
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    same: frozenset[tuple[int, str]] = frozenset()
    whole: frozenset[str] = frozenset()
    reduce: ReduceOp = "sum"
    localize: Localizer | None = None
    flops: int = 0
    kind: Kind = "compute"
    dtypes: Dtypes = "promote"
    of_loss: bool = False
    parts: Parts = None
    fallback: Rule | None = None
    narrow: Callable[[Strategy, int], Strategy] | None = None

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def _hash(self) -> int:
        return hash((self.operands, self.results, self.sizes, self.linear, self.whole, self.flops))

    def __hash__(self) -> int:  # computed once: rules are keys of derived facts
        return self._hash

    def __str__(self) -> str:
        def dims_text(dims: Dims) -> str:
            return " ".join(self._dim_text(dim) for dim in dims)

        left = ", ".join(map(dims_text, self.operands))
        right = [dims_text(dims) for dims in self.results]
        for result, factor in sorted(self.same):
            right[result] += f" ~{factor}"
        return f"{left} -> {', '.join(right)}"

    def _dim_text(self, dim: Dim) -> str:
        parts = [" ".join(f + "!" * (f in self.whole) for f in product) for product in dim]
        if len(dim) != 1:
            return f"({' + '.join(parts)})"
        return (f"({parts[0]})" if len(dim[0]) > 1 else parts[0]) or "1"

    # -- between factor shardings and placements --------------------------------------------

    def apply(self, assignment: Assignment, num: int) -> Strategy | None:
        """The strategy that shards the assigned factors over an axis of ``num`` ranks.

        None if the factors cannot be sharded together: one is whole, only some parts of a sum are
        assigned, or two factors of one dim are.
        """
        if any(f in self.whole for f in assignment):
            return None
        tensors: list[Placement] = []
        for dims in (*self.operands, *self.results):
            placement = self._place(dims, assignment, num)
            if placement is None:
                return None
            tensors.append(placement)
        placed, results = tensors[: len(self.operands)], tensors[len(self.operands) :]
        if all(p == REPLICATE for p in placed):
            if all(p == REPLICATE for p in results):
                return None
        elif any(p == REPLICATE for p in results):
            results = [
                Partial(self.reduce) if p == REPLICATE and self._combines(i, assignment) else p
                for i, p in enumerate(results)
            ]
            if any(placed[i] != REPLICATE for i in self.addends):
                return None
            placed = [
                Partial(self.reduce) if i in self.addends else p for i, p in enumerate(placed)
            ]
        strategy = Strategy(tuple(placed), tuple(results), "split", tuple(sorted(assignment)))
        return strategy if self.narrow is None else self.narrow(strategy, num)

    def _combines(self, result: int, assignment: Assignment) -> bool:
        """Whether a result without the assigned factors is combined from the ranks' parts."""
        if any(self.dim_size(dim) == 0 for dim in self.results[result]):
            return False
        return any((result, factor) not in self.same for factor in assignment)

    def _place(self, dims: Dims, assignment: Assignment, num: int) -> Placement | None:
        """The placement of a tensor of these dims, or None if it has no Shard form."""
        placement: Placement = REPLICATE
        for index, dim in enumerate(dims):
            shard = self._place_dim(index, dim, assignment)
            if shard == REPLICATE:
                continue
            if shard is None or placement != REPLICATE:
                return None
            placement = simplest(shard, tuple(self.dim_size(d) for d in dims), num)
        return placement

    def _place_dim(self, index: int, dim: Dim, assignment: Assignment) -> Placement | None:
        touched = [[f for f in product if f in assignment] for product in dim]
        if not any(touched):
            return REPLICATE
        blocks: list[int] = []
        units: set[int] = set()
        for product, factors in zip(dim, touched, strict=True):
            if len(factors) != 1:
                return None
            position = product.index(factors[0])
            before = math.prod(self.size[f] for f in product[:position])
            after = math.prod(self.size[f] for f in product[position + 1 :])
            sharding = assignment[factors[0]]
            blocks.extend([size * after for size in sharding.blocks] * before)
            units.add(sharding.unit * after)
        unit = math.gcd(*units)
        if len(units) > 1 and any(u != unit for u in units):
            return None
        if min(blocks, default=0) < 1:
            return None
        return Shard(index, tuple(blocks), unit)

    def dim_size(self, dim: Dim) -> int:
        return sum(math.prod(self.size[f] for f in product) for product in dim)

    def match(self, dims: Dims, shard: Shard, num: int) -> Assignment | None:
        """The factor shardings whose image is ``shard`` of a tensor with these dims.

        None if the placement does not line up with the factors of its dim.
        """
        dim = dims[shard.dim]
        total = self.dim_size(dim)
        wanted = index_sets(shard, total, num)
        blocks = list(block_sizes(shard.blocks, total))
        parts = self._group(dim, blocks)
        if parts is None:
            return None
        assignment: dict[str, FactorSharding] = {}
        for product, part in zip(dim, parts, strict=True):
            choices = list(self._factor_shardings(product, part, shard.unit))
            if len(dim) == 1:
                for factor, sharding in choices:
                    if self._image(dims, shard.dim, {factor: sharding}, num) == wanted:
                        return {factor: sharding}
                return None
            if not choices:
                return None
            factor, sharding = choices[0]
            assignment[factor] = sharding
        return assignment if self._image(dims, shard.dim, assignment, num) == wanted else None

    def _image(self, dims: Dims, index: int, assignment: Assignment, num: int) -> object:
        placed = self._place_dim(index, dims[index], assignment)
        if not isinstance(placed, Shard):
            return None
        try:
            return index_sets(placed, self.dim_size(dims[index]), num)
        except PlanningError:
            return None

    def _group(self, dim: Dim, blocks: list[int]) -> list[list[int]] | None:
        """The blocks of each part of a sum, or None if one crosses a boundary."""
        if len(dim) == 1:
            return [blocks]
        parts: list[list[int]] = []
        rest = list(blocks)
        for product in dim:
            room = math.prod(self.size[f] for f in product)
            part: list[int] = []
            while room > 0 and rest:
                part.append(rest.pop(0))
                room -= part[-1]
            if room:
                return None
            parts.append(part)
        return None if rest else parts

    def _factor_shardings(
        self, product: Product, blocks: list[int], unit: int
    ) -> Iterator[tuple[str, FactorSharding]]:
        """Candidates, major factor first: those whose image may be these blocks and unit."""
        for position, factor in enumerate(product):
            size = self.size[factor]
            before = math.prod(self.size[f] for f in product[:position])
            after = math.prod(self.size[f] for f in product[position + 1 :])
            if size == 1 or len(blocks) % before:
                continue
            pattern = blocks[: len(blocks) // before]
            if pattern * before != blocks or any(b % after for b in pattern):
                continue
            unit_here = unit // after if unit % after == 0 else 1
            if any(b // after % unit_here for b in pattern):
                continue
            yield factor, FactorSharding(tuple(b // after for b in pattern), unit_here)

    def local_call(self, call: OpCall, local: Local) -> OpCall:
        """The call that one rank runs: the rule's localizer, the replacement that leaves a part in
        float32 if the plan has it so, then the recorded local shapes and dtypes."""
        localized = self.localize(call, local) if self.localize is not None else call
        if callable(self.parts) and leaves_float32(call, local.results):
            localized = self.parts(localized)
        return replace(
            localized,
            operands=tuple(
                Meta(spec.local_shape(local.coordinates), spec.dtype) for spec in local.operands
            ),
            results=tuple(
                None if spec is None else Meta(spec.local_shape(local.coordinates), spec.dtype)
                for spec in local.results
            ),
        )

    # -- the choices on one axis ---------------------------------------------------------------

    @cached_property
    def fixed_strategies(self) -> tuple[Strategy, ...]:
        """Replicate, and a pending sum through each jointly linear set of operands."""
        everything = Strategy(
            (REPLICATE,) * len(self.operands), (REPLICATE,) * len(self.results), "replicate"
        )
        pending = tuple(
            Strategy(
                tuple(
                    Partial("sum") if i in group else REPLICATE for i in range(len(self.operands))
                ),
                (Partial("sum"),) * len(self.results),
                "linear",
            )
            for group in self.linear
        )
        return (everything, *pending)

    def factors(self) -> tuple[str, ...]:
        """The factors that may be split, in order of first appearance."""
        seen: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            for dim in dims:
                for product in dim:
                    seen.update(dict.fromkeys(product))
        return tuple(f for f in seen if f not in self.whole and self.size[f] > 1)

    def strategies(self, num: int) -> tuple[Strategy, ...]:
        """All choices with each factor cut in one block, for comparison with brute force."""
        strategies: dict[Strategy, None] = dict.fromkeys(self.fixed_strategies)
        partners = self.partners()
        for factor in self.factors():
            group = partners.get(factor, frozenset({factor}))
            assignment = {f: FactorSharding((self.size[f],)) for f in group}
            strategy = self.apply(assignment, num)
            if strategy is not None:
                strategies[strategy] = None
        return tuple(strategies)

    def partners(self) -> dict[str, frozenset[str]]:
        """Factors of one sum that can only be split together (majors of each part)."""
        result: dict[str, frozenset[str]] = {}
        for dims in (*self.operands, *self.results):
            for dim in dims:
                if len(dim) > 1:
                    group = frozenset(
                        next((f for f in product if self.size[f] > 1), product[0])
                        for product in dim
                        if product
                    )
                    for factor in group:
                        result[factor] = result.get(factor, frozenset()) | group
        return result


def leaves_float32(call: OpCall, results: Sequence[TensorSpec | None]) -> bool:
    """Whether a plan has a result of 16 bits in float32: as a part of a sum."""
    return any(
        meta is not None and spec is not None and meta.dtype != spec.dtype
        for meta, spec in zip(call.results, results, strict=True)
    )
