"""Rules: an op's mapping of dims to factors, in einops' notation.

    mm       "m k, k n -> m n"        k is contracted: sharding it gives Partial("sum")
    add      "..., ... -> ..."        built per call: broadcast dims get no factor
    view     "b (h d) -> b h d"       a product of factors, major first
    split    "b (q + k + v) -> b q, b k, b v"     a sum of factors: all parts shard together
    softmax  "b k! -> b k!"           k must be whole on each rank
    sum      "b k -> b 1"             1 is a dim of size 1
    experts  "[e t k] d, e d f, e -> [e t k] f"      ragged: rows of k slots of t tokens, by expert

A rule determines all strategies on one axis, and so, axis by axis, on any mesh. A `FactorSharding`
splits one factor; `Rule.apply` maps it to a Shard of every dim with the factor, `Rule.match` back.
Invariants: each factor has one size and occurs at most once in a dim.
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
    Ragged,
    Shard,
    block_sizes,
    blocks_of,
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
    """How one factor is split over an axis. The fields mean the same as the fields of Shard."""

    blocks: tuple[int, ...]  # sizes, adding up to the factor's, or to its tokens or experts
    unit: int = 1
    ragged: Ragged | None = None
    zigzag: bool = False
    shift: int = 0
    sizes: tuple[int, ...] | None = None  # of each rank

    def on_dim(self, dim: int, ragged: Ragged | None) -> Shard:
        """Return the Shard of a dim that is split as the factor."""
        if self.sizes is not None:
            return Shard(dim, shift=self.shift, sizes=self.sizes)
        return Shard(dim, self.blocks, self.unit, ragged, self.zigzag, self.shift)

    def with_one_block(self, size: int) -> FactorSharding:
        """Return the sharding in one block of a factor of ``size``, with this unit if it fits."""
        unit = self.unit if size % self.unit == 0 else 1
        return replace(self, blocks=(size,), unit=unit, ragged=None, sizes=None)

    def minor_sharding(self, num: int) -> FactorSharding:
        """Return the sharding of the same factor over a further, minor axis. Its blocks are the
        pieces that this sharding cuts over ``num`` ranks."""
        shard_and_num = self.on_dim(0, None), num
        return FactorSharding(pieces([shard_and_num], sum(self.blocks)), self.unit, self.ragged)


Assignment = Mapping[str, FactorSharding]
"""The factors that are split over one axis."""

Kind = Literal["compute", "view", "cast", "attention", "mark"]
"""The kind of an op: a view moves no data, a cast changes only the dtype, attention has its own
FLOP rate, a mark states placements and computes nothing."""

Parts = Literal["carried"] | Callable[[OpCall], OpCall] | None
"""How an op of 16 bits returns its part of a pending sum in float32: "carried" if its result is
float32 whenever an operand is; a function that replaces the local call; None if it cannot."""

StrategyKind = Literal["replicate", "linear", "split", "stated", "ring"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on one axis: a placement for each operand and each result.

    ``kind``: "replicate": nothing is split; "linear": pending sums pass through; "split":
    ``factors`` are split; "stated": the placements that the user stated on a mark; "ring": the
    queries and keys of attention are split alike, and several steps carry it out (emit/ring.py).
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    kind: StrategyKind
    factors: tuple[str, ...] = ()

    @property
    def shards_work(self) -> bool:
        """Whether each rank does only a part of the work."""
        return any(isinstance(p, Shard) for p in (*self.operands, *self.results))


Strategies = Sequence[tuple[Strategy, int]]
"""The strategy of an op on each axis, with the axis' size."""


def fullest_rank(call: OpCall, rule: Rule, strategies: Strategies) -> tuple[float, list[float]]:
    """Return the fraction of the op's work that the fullest rank does, and the fraction of each
    operand and result that it holds, 0 for a result that the op does not return.

    An axis that splits a factor reduces the work once, by its share of the first dim with the
    factor; `Rule.imbalance` corrects it if the work is not proportional to the indices.
    """
    metas = (*call.operands, *call.results)
    cuts: list[dict[int, dict[int, tuple[Shard, int]]]] = [{} for _ in metas]  # by dim, by axis
    uncounted: set[int] = set()  # axes whose share of the work is not counted yet
    for axis, (strategy, num) in enumerate(strategies):
        for index, placement in enumerate((*strategy.operands, *strategy.results)):
            if isinstance(placement, Shard):
                cuts[index].setdefault(placement.dim, {})[axis] = placement, num
                uncounted.add(axis)
    work, fractions = 1.0, list[float]()
    for index, meta in enumerate(metas):
        if meta is None:
            fractions.append(0.0)
            continue
        fraction = 1.0
        for dim, by_axis in cuts[index].items():
            share = largest_part(tuple(by_axis.values()), meta.shape[dim])
            fraction *= share
            if not uncounted.isdisjoint(by_axis):
                work *= share
                uncounted.difference_update(by_axis)
        fractions.append(fraction)
    return work if rule.imbalance is None else work * rule.imbalance(strategies), fractions


def fullest_over_mean(call: OpCall, rule: Rule, strategies: Strategies) -> float:
    """Return the work of the fullest rank over the mean of all ranks among which it is split."""
    work, _ = fullest_rank(call, rule, strategies)
    return work * math.prod(num for strategy, num in strategies if strategy.shards_work)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule of one call: ``operands`` and ``results`` list each tensor's dims, as factors.

    sizes: the size of each factor.
    linear: the sets of operands in which the op is jointly linear: all operands of a set may be
        pending sums together with the others replicated, and the results are pending sums.
    addends: operands that are added to a contraction's result (the bias of addmm). If a contracted
        factor is split, they must be pending sums, so that they are added once.
    same: pairs (result, factor): the result is the same for every part of the factor, so splitting
        the factor does not make the result pending. (A result without elements is never pending.)
    whole: factors that may not be split.
    reduce: the reduction that combines the parts of a contracted factor.
    localize: rewrites the call for one rank if the local call differs from the global one.
    flops: floating-point operations of the global call, 0 if memory traffic dominates.
    imbalance: the share of the work of the fullest rank over its share of the indices; None if work
        is proportional to indices.
    kind, dtypes, parts: see `Kind`, dtypes.py and `Parts`.
    of_loss: sums over a split factor are parts of a loss, one number a row, and stay pending.
    fallback: the rule for a shard that does not line up with the factors of this rule; it is
        localized by the ``localize`` of this rule.
    narrow: returns a strategy over a number of ranks with more operands split, if each rank reads
        only a part of them.
    counts: operands that count the rows of each expert. They are pending sums if tokens are split.
    experts: the factor of the experts, if the rule has ragged dims ``[e t k]``: the first factor of
        each. Splitting it splits the rows by expert, and splitting t by token.
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
    imbalance: Callable[[Strategies], float] | None = None
    kind: Kind = "compute"
    dtypes: Dtypes = "promote"
    of_loss: bool = False
    parts: Parts = None
    fallback: Rule | None = None
    narrow: Callable[[Strategy, int], Strategy] | None = None
    counts: frozenset[int] = frozenset()
    experts: str = ""

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def _hash(self) -> int:
        return hash((self.operands, self.results, self.sizes, self.linear, self.whole, self.flops))

    def __hash__(self) -> int:  # computed once: rules are keys of many caches
        return self._hash

    def __str__(self) -> str:
        """Return the rule in the notation of `pattern`: "m k, k n -> m n"."""

        def dims_text(dims: Dims) -> str:
            return " ".join(self._dim_text(dim) for dim in dims)

        left = ", ".join(map(dims_text, self.operands))
        right = [dims_text(dims) for dims in self.results]
        for result, factor in sorted(self.same):
            right[result] += f" ~{factor}"
        return f"{left} -> {', '.join(right)}"

    def _dim_text(self, dim: Dim) -> str:
        """Return a dim in the notation of patterns: ``k``, ``(h d)``, ``(q + k)``, or 1."""
        parts = [" ".join(f + "!" * (f in self.whole) for f in product) for product in dim]
        if self.is_ragged(dim):
            return f"[{parts[0]}]"
        if len(dim) != 1:
            return f"({' + '.join(parts)})"
        return (f"({parts[0]})" if len(dim[0]) > 1 else parts[0]) or "1"

    # -- between factor shardings and placements --------------------------------------------

    def apply(self, assignment: Assignment, num: int) -> Strategy | None:
        """Return the strategy that shards the assigned factors over an axis of ``num`` ranks. None
        if they cannot be sharded together: a factor is whole, a part of a sum is not assigned, or
        two factors of one dim are assigned."""
        if any(f in self.whole for f in assignment):
            return None
        tensors: list[Placement] = []
        for dims in (*self.operands, *self.results):
            placement = self._place(dims, assignment, num)
            if placement is None:
                return None
            tensors.append(placement)
        operands, results = tensors[: len(self.operands)], tensors[len(self.operands) :]
        if all(p == REPLICATE for p in operands):
            if all(p == REPLICATE for p in results):
                return None
        elif any(p == REPLICATE for p in results):
            # The results lack a split factor: each rank computes a part of a sum (or maximum), to
            # which addends are added once, as pending sums.
            results = [
                Partial(self.reduce) if p == REPLICATE and self._is_pending(i, assignment) else p
                for i, p in enumerate(results)
            ]
            if any(operands[i] != REPLICATE for i in self.addends):
                return None
            operands = [
                Partial(self.reduce) if i in self.addends else p for i, p in enumerate(operands)
            ]
        if self.counts and self.experts not in assignment and self._splits_tokens(tensors):
            operands = [Partial("sum") if i in self.counts else p for i, p in enumerate(operands)]
        strategy = Strategy(tuple(operands), tuple(results), "split", tuple(sorted(assignment)))
        return strategy if self.narrow is None else self.narrow(strategy, num)

    @staticmethod
    def _splits_tokens(tensors: Sequence[Placement]) -> bool:
        return any(isinstance(p, Shard) and p.ragged is not None for p in tensors)

    def is_ragged(self, dim: Dim) -> bool:
        """Return whether the dim has a number of rows for each expert: ``[e t k]``."""
        return sized_dim(dim, self.experts) is not dim

    def _is_pending(self, result: int, assignment: Assignment) -> bool:
        """Return whether a result that has none of the assigned factors is pending."""
        if any(self.dim_size(dim) == 0 for dim in self.results[result]):
            return False
        return any((result, factor) not in self.same for factor in assignment)

    def _place(self, dims: Dims, assignment: Assignment, num: int) -> Placement | None:
        """Return Replicate or the Shard of a tensor with these dims; None if two dims are split."""
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
        """Return the placement of dim ``index``: Replicate if it has no assigned factor, None if no
        Shard splits it as assigned."""
        assigned = [[f for f in product if f in assignment] for product in dim]
        if not any(assigned):
            return REPLICATE
        sharding = assignment[next(f for factors in assigned for f in factors)]
        if self.is_ragged(dim):
            (experts, *_, slots), (split, *more) = dim[0], assigned[0]
            if more or split == slots or sharding.sizes is not None:
                return None
            by = "expert" if split == experts else "token"
            ragged = Ragged(by, self.size[experts], self.size[slots])
            return sharding.on_dim(index, ragged)
        if sharding.ragged is not None:
            if len(dim) != 1 or self.dim_size(dim) != self.size[assigned[0][0]]:
                return None
            return sharding.on_dim(index, sharding.ragged)
        zigzag, shift, sizes = sharding.zigzag, sharding.shift, sharding.sizes
        if len(dim) > 1 and any(assignment[f].sizes for factors in assigned for f in factors):
            return None
        blocks: list[int] = []
        units: set[int] = set()
        for product, factors in zip(dim, assigned, strict=True):
            if len(factors) != 1:
                return None
            position = product.index(factors[0])
            before = math.prod(self.size[f] for f in product[:position])
            after = math.prod(self.size[f] for f in product[position + 1 :])
            if sizes is not None:  # only a major factor lets a rank hold one run of the dim
                by_rank = tuple(n * after for n in sizes)
                return Shard(index, shift=shift, sizes=by_rank) if before == 1 else None
            sharding = assignment[factors[0]]
            if (sharding.zigzag, sharding.shift) != (zigzag, shift):
                return None
            # Minor factors enlarge each block; each value of the major factors repeats the blocks.
            blocks.extend([size * after for size in sharding.blocks] * before)
            units.add(sharding.unit * after)
        unit = math.gcd(*units)
        if len(units) > 1 and any(u != unit for u in units):
            return None
        if min(blocks, default=0) < 1:
            return None
        return Shard(index, tuple(blocks), unit, zigzag=zigzag, shift=shift)

    def dim_size(self, dim: Dim) -> int:
        return sum(math.prod(self.size[f] for f in p) for p in sized_dim(dim, self.experts))

    def match(self, dims: Dims, shard: Shard, num: int) -> Assignment | None:
        """Return the factor shardings for which a tensor with these dims is placed as ``shard``;
        None if the blocks of the shard do not line up with the factors of its dim."""
        dim = dims[shard.dim]
        total = self.dim_size(dim)
        if shard.ragged is not None or self.is_ragged(dim):
            return self._match_ragged(dim, shard, total)
        target_sets = index_sets(shard, total, num)
        blocks = list(block_sizes(shard.blocks, total))
        parts = self._group_blocks(dim, blocks)
        if parts is None:
            return None
        assignment: dict[str, FactorSharding] = {}
        for product, part in zip(dim, parts, strict=True):
            choices = list(self._factor_shardings(product, part, shard))
            if len(dim) == 1:  # a plain product: exactly one factor must give the shard's indices
                for factor, sharding in choices:
                    if self._index_sets(dims, shard.dim, {factor: sharding}, num) == target_sets:
                        return {factor: sharding}
                return None
            if not choices:  # each part of a sum must be split
                return None
            factor, sharding = choices[0]
            assignment[factor] = sharding
        return (
            assignment
            if self._index_sets(dims, shard.dim, assignment, num) == target_sets
            else None
        )

    def _match_ragged(self, dim: Dim, shard: Shard, total: int) -> Assignment | None:
        """Return the factor sharding for a split by token or by expert of a dim of ``total`` rows.
        None if the dim is not ragged, and is not one factor either, which has the split then, or if
        another dim of the rule is ragged."""
        ragged = shard.ragged
        if ragged is None or (self.experts and not self.is_ragged(dim)):
            return None
        blocks = blocks_of(shard, total)
        if self.is_ragged(dim):
            experts, tokens, slots = dim[0]
            if (self.size[experts], self.size[slots]) != (ragged.experts, ragged.slots):
                return None
            factor = experts if ragged.by == "expert" else tokens
            return {factor: _factor_sharding(blocks, shard.unit, shard)}
        factors = [f for f in dim[0] if self.size[f] > 1] or list(dim[0])  # or one row in all
        if len(dim) > 1 or len(factors) != 1:
            return None
        return {factors[0]: _factor_sharding(blocks, shard.unit, shard, ragged)}

    def _index_sets(self, dims: Dims, index: int, assignment: Assignment, num: int) -> object:
        """Return the index sets of dim ``index`` under the assignment; None if no Shard splits the
        dim so."""
        placement = self._place_dim(index, dims[index], assignment)
        if not isinstance(placement, Shard):
            return None
        try:
            return index_sets(placement, self.dim_size(dims[index]), num)
        except PlanningError:
            return None

    def _group_blocks(self, dim: Dim, blocks: list[int]) -> list[list[int]] | None:
        """Return the blocks of each part of a sum; None if a block crosses a part's boundary."""
        if len(dim) == 1:
            return [blocks]
        parts: list[list[int]] = []
        remaining = list(blocks)
        for product in dim:
            uncovered = math.prod(self.size[f] for f in product)
            part: list[int] = []
            while uncovered > 0 and remaining:
                part.append(remaining.pop(0))
                uncovered -= part[-1]
            if uncovered:
                return None
            parts.append(part)
        return None if remaining else parts

    def _factor_shardings(
        self, product: Product, blocks: list[int], shard: Shard
    ) -> Iterator[tuple[str, FactorSharding]]:
        """Yield factors of a product, major factor first, with the sharding that may split the
        product into these blocks of ``shard``. `match` checks the candidates exactly."""
        unit, sizes = shard.unit, shard.sizes or ()
        for position, factor in enumerate(product):
            size = self.size[factor]
            before = math.prod(self.size[f] for f in product[:position])
            after = math.prod(self.size[f] for f in product[position + 1 :])
            if size == 1 or len(blocks) % before:
                continue
            # The blocks of a split factor repeat ``before`` times, each ``after`` times its size.
            repeated = blocks[: len(blocks) // before]
            if repeated * before != blocks or any(b % after for b in (*repeated, *sizes)):
                continue
            factor_unit = unit // after if unit % after == 0 else 1
            if any(b // after % factor_unit for b in repeated):
                continue
            split = _factor_sharding(tuple(b // after for b in repeated), factor_unit, shard)
            by_rank = tuple(n // after for n in sizes) or None
            yield factor, replace(split, sizes=by_rank)

    def local_call(self, call: OpCall, local: Local) -> OpCall:
        """Return the call that one rank runs, with the rank's shapes and dtypes. ``localize``
        rewrites it; then ``parts`` does, if the plan keeps the rank's part of a sum in float32."""
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
        """The strategies that split nothing: all operands are replicated, or a linear set is
        pending."""
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
        """Return the factors that may be split, in order of first appearance."""
        factors: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            for dim in dims:
                for product in dim:
                    factors.update(dict.fromkeys(product))
        return tuple(f for f in factors if f not in self.whole and self.size[f] > 1)

    def strategies(self, num: int) -> tuple[Strategy, ...]:
        """Return all strategies that split factors in one block, to compare with brute force."""
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
        """Return, for each factor that can only be split together with others, this group of
        factors: in ``(q d + k e)`` q and k, the major factors of the parts of one sum."""
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


def _factor_sharding(
    blocks: tuple[int, ...], unit: int, shard: Shard, ragged: Ragged | None = None
) -> FactorSharding:
    """Return the sharding of a factor into these blocks, with the zigzag and shift of ``shard``."""
    return FactorSharding(blocks, unit, ragged, shard.zigzag, shard.shift)


def sized_dim(dim: Dim, experts: str) -> Dim:
    """Return the dim whose factors give its size: for a ragged dim ``[e t k]``, t k. ``experts``:
    the factor of the experts, "" if no dim is ragged."""
    is_ragged = bool(experts) and len(dim[0]) > 1 and dim[0][0] == experts
    return (dim[0][1:],) if is_ragged else dim


def leaves_float32(call: OpCall, results: Sequence[TensorSpec | None]) -> bool:
    """Return whether the plan keeps a 16-bit result of the call in float32, as a part of a sum."""
    return any(
        meta is not None and spec is not None and meta.dtype != spec.dtype
        for meta, spec in zip(call.results, results, strict=True)
    )
