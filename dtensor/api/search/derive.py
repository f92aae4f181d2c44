"""Derive tensor-parallel placements from a forward program: pairs of weights, with boundaries.

    derive(flow, size=2)   # (Choice("up.weight", Shard(0), "column: ..."), ...)

The split of each weight's output dim is followed through the program at boundaries that the program
allows (heads, groups of heads, parts of a fused projection), over axes of 7, 5, 3 and 2 ranks. It
is *blocked* by an op that needs the dim whole or sums over it, and *crooked* if a view or a split
cuts the dim elsewhere. A split is chosen if it reaches weights that contract it, or the loss as a
vocabulary. Splits of heads come first, then splits that reach fewer values. A low-rank adapter
``W x + B A x`` follows the split of W.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.plan.choose.contractions import Contraction, contractions_of
from dtensor.sharding.plan.choose.opened_factors import crooked
from dtensor.sharding.plan.choose.split_through_op import MISALIGNED, around, split_by
from dtensor.sharding.plan.dataflow import Dataflow, Op, without_numbers
from dtensor.sharding.plan.planner import rules_of
from dtensor.sharding.plan.request import Pin
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.fits import fits
from dtensor.sharding.spec.placements import (
    Partial,
    Shard,
    block_sizes,
    blocks_of,
    counted,
    index_sets,
    same,
    simplest,
    units_of,
    with_unit,
)

_SIZES = (7, 5, 3, 2)  # sizes of axes to try: over one size a split may line up by accident
# a cut, the sizes of axes to try it over, whether these sizes stand for axes of any size
_Candidate = tuple[Shard, tuple[int, ...], bool]
_Blocks = int | tuple[int, ...]
_LayerKey = tuple[str, int, bool]  # a name without numbers, a dim, whether groups of heads are cut
_MAX_ADDED = 16  # products that one sum adds: a weight and its adapters
_SOFTMAX = ("softmax", "dt.attention")


@dataclass(frozen=True, slots=True)
class Choice:
    """The placement of a parameter, None if it stays whole, and the reason."""

    label: str
    placement: Shard | None
    why: str


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """An op that blocks a split; ``why``: "cannot split" or "sums over" the dim."""

    op: Op
    why: str


@dataclass(slots=True)
class _FollowedSplit:
    """The path of a split through the program.

    ``shards``: the split values, each along one dim. ``summed``: the weights that contract the
    split, ``ops``: the names of the ops on the path; both in the order in which they were reached.
    """

    shards: dict[str, Shard] = field(default_factory=dict[str, Shard])
    summed: dict[str, None] = field(default_factory=dict[str, None])
    ops: dict[str, None] = field(default_factory=dict[str, None])
    reaches_end: bool = False  # it reaches a loss or a result of the program
    grouped: int | None = None  # the position of the split attention with groups of heads
    obstacle: _Obstacle | None = None
    crooked: bool = False

    @property
    def is_unblocked(self) -> bool:
        return self.obstacle is None and not self.crooked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A split that no op blocks; ``units``: pieces per block that can be spread over ranks."""

    value: str
    shard: Shard
    units: int
    followed: _FollowedSplit
    any_size: bool  # the split is possible over axes of any size, not only over ``size``
    cuts_groups: bool = False  # query heads are split; their keys and values stay whole

    @property
    def in_attention(self) -> bool:
        return any(mark in name for name in self.followed.ops for mark in _SOFTMAX)


def derive(flow: Dataflow, size: int | None, step: Dataflow | None = None) -> tuple[Choice, ...]:
    """Return a choice for each parameter with at least two dims, in the program's order.

    ``step``: the program with its backward, which may cut a dim at other places: the backward of a
    concatenation slices each part's gradient out separately.
    """
    derivation = _Derivation.of(flow, size)
    derivation.choose()
    if step is not None:
        derivation.drop_crooked(step)
    return derivation.choices()


@dataclass(slots=True, kw_only=True)
class _Derivation:
    flow: Dataflow
    size: int | None
    rules: Mapping[str, Rule]
    cutting: Mapping[str, Rule]  # the rules for splits that cut groups of heads
    batch: frozenset[str]  # the values that depend on arguments
    contractions: Mapping[str, tuple[Contraction, ...]]  # by parameter with at least two dims
    weights: Mapping[tuple[str, int], str]  # by (op, operand), the parameter
    places: Mapping[str, int]  # by op, its position in the program
    grouped: Mapping[str, int]  # the places of attention with fewer key heads than query heads
    chosen: dict[str, Choice] = field(default_factory=dict[str, Choice])
    reasons_whole: dict[str, str] = field(default_factory=dict[str, str])
    # parameters that were placed together, and the sizes of axes that were tried
    placed_together: list[tuple[list[str], tuple[int, ...]]] = field(
        default_factory=list[tuple[list[str], tuple[int, ...]]]
    )
    # of equal layers: the boundaries, or the reason why there are none
    boundaries: dict[_LayerKey, _Candidate] = field(default_factory=dict[_LayerKey, _Candidate])
    refused: dict[_LayerKey, str] = field(default_factory=dict[_LayerKey, str])
    blocks: dict[int, list[_Blocks]] = field(default_factory=dict[int, list[_Blocks]])
    whole_key_weights: set[str] = field(default_factory=set[str])  # every rank has these weights
    adapters: set[str] = field(default_factory=set[str])  # not named in reasons of other weights

    @staticmethod
    def of(flow: Dataflow, size: int | None) -> _Derivation:
        rules, batch = rules_of(flow), flow.batch_values
        contractions = {
            item.name: contractions_of(flow, rules, item.name, batch)
            for item in flow.inputs
            if item.kind == "parameter" and len(item.meta.shape) >= 2
        }
        weights = {
            (c.op.name, c.operand): value for value, found in contractions.items() for c in found
        }
        places = {op.name: i for i, op in enumerate(flow.ops)}
        return _Derivation(
            flow=flow,
            places=places,
            grouped={
                op.name: places[op.name]
                for op in flow.ops
                if rules[op.name].kind == "attention" and _has_groups(op)
            },
            size=size,
            rules={name: replace(rule, fallback=None) for name, rule in rules.items()},
            cutting={name: rule.fallback or rule for name, rule in rules.items()},
            batch=batch,
            contractions=contractions,
            weights=weights,
        )

    def choose(self) -> None:
        """Choose splits of heads first, then other splits, then embeddings."""
        splits = [s for value in self.contractions if (s := self._split(value)) is not None]
        order = {value: i for i, value in enumerate(self.contractions)}
        for split in sorted(splits, key=lambda s: (*_preference(s), order[s.value])):
            base = self._adapted_weight(split)
            if base is None:
                self._place(split)
            else:
                label = self._label(split.value)
                self.reasons_whole[split.value] = (
                    f"it adapts {_list([base], label)}, and fits its split"
                )
                self.adapters |= {split.value, *split.followed.summed}
        for value in self.contractions:
            if value not in self.chosen and self.grouped:
                self._place_contracting_weight(value)
        for value in self.contractions:
            if value not in self.chosen:
                self._place_table(value)

    def drop_crooked(self, step: Dataflow) -> None:
        """Leave weights whole whose split does not line up with the backward of ``step``."""
        rules = rules_of(step)
        names = {item.label: item.name for item in step.inputs if item.kind == "parameter"}
        for values, sizes in self.placed_together:
            pins = [
                Pin(value=names[choice.label], placement=choice.placement, by=choice.label)
                for choice in (self.chosen[value] for value in values)
                if choice.placement is not None and choice.label in names
            ]
            places = (crooked(step, rules, pins, num) for num in sizes)
            place = next((place for place in places if place is not None), None)
            if place is None:
                continue
            op, *_ = place
            line = f" ({op.source})" if op.source else ""
            for value in values:
                self.reasons_whole[value] = f"{op.call.name} cuts its dim at other places{line}"
                del self.chosen[value]

    def choices(self) -> tuple[Choice, ...]:
        return tuple(
            self.chosen.get(value)
            or Choice(
                self._label(value), None, self.reasons_whole.get(value, "it feeds no product")
            )
            for value in self.contractions
        )

    def _label(self, value: str) -> str:
        return next(item.label for item in self.flow.inputs if item.name == value)

    # -- columns, and rows that contract the columns' dim -----------------------------------

    def _matrix_product(self, value: str) -> Contraction | None:
        return next((c for c in self.contractions[value] if not c.lookup), None)

    def _split(self, value: str, *, cuts_groups: bool = False) -> _Split | None:
        """Return the finest split of the weight's output dim that no op blocks, or None; the reason
        for None is put into ``reasons_whole``."""
        product = self._matrix_product(value)
        if product is None:
            return None
        obstacle: _Obstacle | None = None
        alike = without_numbers(self._label(value)), product.output_dim, cuts_groups
        if alike in self.refused:
            self.reasons_whole[value] = self.refused[alike]
            return None
        for shard, sizes, any_size in self._candidates(value, product.output_dim, alike):
            followed = self._follow_over_sizes(value, shard, sizes, cuts_groups=cuts_groups)
            if not followed.is_unblocked:
                obstacle = obstacle or followed.obstacle
                continue
            self.boundaries[alike] = shard, sizes[-1:], any_size
            units = units_of(shard, self.flow.metas[value].shape[shard.dim])
            return _Split(
                value=value,
                shard=shard,
                units=units,
                followed=followed,
                any_size=any_size,
                cuts_groups=cuts_groups,
            )
        if obstacle is None:
            self.reasons_whole[value] = "no boundary of its output dim lines up with the ops on it"
        else:
            line = f" ({obstacle.op.source})" if obstacle.op.source else ""
            self.reasons_whole[value] = (
                f"{obstacle.op.call.name} {obstacle.why} its output dim{line}"
            )
        self.refused[alike] = self.reasons_whole[value]
        return None

    # -- adapters of a weight --------------------------------------------------------

    def _adapted_weight(self, split: _Split) -> str | None:
        """Return the label of the weight W that the split weight A and its row B adapt, else None.

        The pattern is ``W x + B A x``, where A x has fewer features than x and than the sum. The
        placements of A and B follow from the split of W.
        """
        rows = [v for v in split.followed.summed if v != split.value]
        down = self._matrix_product(split.value)
        up = self._matrix_product(rows[0]) if len(rows) == 1 else None
        if down is None or up is None:
            return None
        (first, inner), (_, last) = self._feature_counts(down), self._feature_counts(up)
        if inner >= min(first, last):
            return None
        added = {op.name for op in self._added_products(up.op)}
        for value in self.contractions:
            base = self._matrix_product(value)
            if (
                base is not None
                and base.op.name in added
                and self._feature_counts(base) == (first, last)
                and self._source_value(base) == self._source_value(down)
            ):
                return self._label(value)
        return None

    def _feature_counts(self, product: Contraction) -> tuple[int, int]:
        """Return the numbers of input and output features of a product."""
        shape = self.flow.metas[product.value].shape
        return shape[product.contracted_dim], shape[product.output_dim]

    def _data_operands(self, op: Op) -> list[str]:
        """Return the op's operands that depend on arguments of the program."""
        return [name for name in op.operands if name in self.batch]

    def _source_value(self, product: Contraction) -> str | None:
        """Return the data operand of a product, traced back through ops with one data operand
        (views, a dropout)."""
        value = next(iter(self._data_operands(product.op)), None)
        while value is not None and (op := self.flow.producers.get(value)) is not None:
            inputs = self._data_operands(op)
            if len(inputs) != 1:
                break
            value = inputs[0]
        return value

    def _added_products(self, op: Op) -> list[Op]:
        """Return the products of weights that are added to the result of ``op``, at the first op
        that has another data operand."""
        while len(uses := self.flow.consumers.get(op.results[0] or "", ())) == 1:
            previous, (op, _) = op, uses[0]
            others = [n for n in self._data_operands(op) if n not in previous.results]
            if others:
                return self._products(others)
        return []

    def _products(self, values: list[str]) -> list[Op]:
        """Return the nearest products of weights from which the values are computed."""
        of_weights, products = {op for op, _ in self.weights}, list[Op]()
        waiting = list(values)
        while waiting:
            op = self.flow.producers.get(waiting.pop())
            if op is not None and op.name in of_weights:
                products.append(op)
            elif op is not None and len(products) < _MAX_ADDED:
                waiting += self._data_operands(op)
        return products

    def _follow_over_sizes(
        self, value: str, shard: Shard, sizes: Sequence[int], *, cuts_groups: bool
    ) -> _FollowedSplit:
        """Follow a split over axes of each size; return the first path that is blocked, or the last
        path."""
        for num in sizes:
            followed = self._follow(value, shard, num, cuts_groups=cuts_groups)
            if not followed.is_unblocked:
                break
        return followed

    def _follow(
        self, value: str, shard: Shard, num: int, *, cuts_groups: bool = False
    ) -> _FollowedSplit:
        """Follow the split of a parameter over an axis of ``num`` ranks, up to the first obstacle.

        ``cuts_groups``: an op before an attention may need the dim whole, because the planner
        gathers keys and values there.
        """
        rules = self.cutting if cuts_groups else self.rules
        followed = _FollowedSplit()
        returned = {o.value for o in self.flow.outputs if o.kind == "result"}
        queue = deque([(value, shard)])
        while queue and followed.is_unblocked:
            value, shard = queue.popleft()
            shape = self.flow.metas[value].shape
            plain = simplest(shard, shape, num)
            assert isinstance(plain, Shard)
            if value in followed.shards:
                followed.crooked = not same(followed.shards[value], plain, shape, num)
                continue
            followed.shards[value] = plain
            followed.reaches_end |= value in returned
            for op, tensor, strategy in around(self.flow, rules, value, plain, num):
                if strategy == MISALIGNED:
                    followed.crooked = True
                elif self._is_gathered(op, strategy, followed):
                    continue
                elif strategy is None:
                    # A value that depends on no argument (a mask) is made on each rank.
                    if tensor < len(op.operands) or value in self.batch:
                        followed.obstacle = followed.obstacle or _Obstacle(op, "cannot split")
                elif self._has_pending_sum(op, strategy, followed):
                    followed.obstacle = followed.obstacle or _Obstacle(op, "sums over")
                else:
                    followed.ops[op.call.name] = None
                    if cuts_groups and op.name in self.grouped:
                        followed.grouped = self.grouped[op.name]
                    queue += split_by(op, strategy)
        return followed

    def _is_gathered(self, op: Op, strategy: Strategy | None, followed: _FollowedSplit) -> bool:
        """Return whether the op needs the dim whole and comes before an attention with groups."""
        if followed.grouped is None or self.places[op.name] > followed.grouped:
            return False
        return strategy is None or self._has_pending_sum(op, strategy, followed)

    def _has_pending_sum(self, op: Op, strategy: Strategy, followed: _FollowedSplit) -> bool:
        """Return whether the op leaves a pending sum that comes from neither a weight nor a loss.
        Also records the weights and the loss."""
        if not any(isinstance(p, Partial) for p in strategy.results):
            return False
        if self.rules[op.name].of_loss:
            followed.reaches_end = True
            return False
        weights = [self.weights.get((op.name, i)) for i, _ in enumerate(op.operands)]
        summed = [
            weight
            for weight, placed in zip(weights, strategy.operands, strict=True)
            if weight is not None and isinstance(placed, Shard)
        ]
        followed.summed.update(dict.fromkeys(summed))
        return not summed

    def _candidates(self, value: str, dim: int, alike: _LayerKey) -> Iterator[_Candidate]:
        """Yield cuts of the dim with the sizes of axes to try: first the cut of an equal layer,
        then cuts for axes of any size, then cuts for ``size`` alone; finest first."""
        size = self.flow.metas[value].shape[dim]
        if alike in self.boundaries and _fits(self.boundaries[alike][0], dim, size):
            yield self.boundaries[alike]
        if size not in self.blocks:
            self.blocks[size] = _blocks(self.flow, self.rules, size)
        every_size = _SIZES if self.size in (None, *_SIZES) else (self.size, *_SIZES)
        for sizes, any_size in ((every_size, True), ((self.size or 2,), False)):
            for blocks in self.blocks[size]:
                parts = block_sizes(blocks, size)
                for unit in range(1, min(parts) // 2 + 1):
                    if math.gcd(*parts) % unit == 0:
                        yield Shard(dim, blocks, unit), sizes, any_size

    def _place(self, split: _Split) -> None:
        """Place every weight that the split reaches, unless one of them is already placed."""
        shards = split.followed.shards
        reached = [
            v.name for v in self.flow.inputs if v.name in shards and self.contractions.get(v.name)
        ]
        rows = [v for v in split.followed.summed if v != split.value]
        if split.value in self.chosen or split.value in self.whole_key_weights:
            return
        if not rows and not self._is_vocabulary(split):
            self.reasons_whole[split.value] = "no weight contracts the split of its output dim"
            return
        already_placed = next((v for v in reached if v in self.chosen), None)
        if already_placed is not None:
            self.reasons_whole[split.value] = (
                f"its output dim would also split {self._label(already_placed)}"
            )
            return
        if self._place_query_heads(split, reached):
            return
        if self.size is not None and split.units < self.size:
            for value in reached:
                self.reasons_whole[value] = self._too_few_text(split, self.size)
            return
        columns = [v for v in reached if v not in split.followed.summed or v == split.value]
        for value in reached:
            if value in columns:
                why = self._column_reason(split, value, columns, rows)
            else:
                names = self._names(columns)
                several = "split" if len(names) > 1 else "splits"
                why = f"row: it contracts the dim that {_list(names, self._label(value))} {several}"
            self.chosen[value] = Choice(self._label(value), self._placement(split, value), why)
            self.reasons_whole.pop(value, None)
        any_size = split.any_size and self.size is None
        self.placed_together.append((reached, _SIZES if any_size else (self.size or _SIZES[-1],)))

    def _place_query_heads(self, split: _Split, reached: list[str]) -> bool:
        """Split only the query heads if a rank would have no group of heads. Return whether this
        was done."""
        if self.size is None or split.cuts_groups or not split.in_attention:
            return False
        if all(index_sets(Shard(0), split.units, self.size)):
            return False
        columns = [v for v in reached if v not in split.followed.summed]
        for value in columns:
            heads = self._split(value, cuts_groups=True)
            if heads is None or heads.units < self.size:
                continue
            self._place(heads)
            if value in self.chosen:
                keys = [v for v in columns if v not in self.chosen]
                why = f"each rank has all {split.units} heads, and takes those of its query heads"
                self.reasons_whole |= dict.fromkeys(keys, why)
                self.whole_key_weights.update(keys)
                return True
        return False

    def _place_contracting_weight(self, value: str) -> None:
        """Place a weight that contracts query heads, and the fused projection that makes them. The
        split reaches the projection through the attention."""
        product = self._matrix_product(value)
        if product is None:
            return
        dim, size = product.contracted_dim, self.flow.metas[value].shape[product.contracted_dim]
        alike, num = (without_numbers(self._label(value)), dim, True), self.size or _SIZES[0]
        for candidate, sizes, any_size in self._candidates(value, dim, alike):
            if alike in self.refused or units_of(candidate, size) < num:
                break
            shard = _split_evenly(candidate, size, num) if self.size is not None else candidate
            followed = self._follow_over_sizes(value, shard, (*sizes, num), cuts_groups=True)
            shards = followed.shards
            columns = [v for v in self.contractions if v in shards and v not in followed.summed]
            if not followed.is_unblocked or followed.grouped is None or len(columns) != 1:
                continue
            self.boundaries[alike] = candidate, sizes[-1:], any_size
            self._place(
                _Split(
                    value=columns[0],
                    shard=shards[columns[0]],
                    units=units_of(candidate, size),
                    followed=followed,
                    any_size=False,
                    cuts_groups=True,
                )
            )
            return
        self.refused[alike] = ""

    def _placement(self, split: _Split, value: str) -> Shard:
        """Return the placement, with boundaries, of a weight that the split reaches."""
        shards = split.followed.shards
        shard, shape = shards[value], self.flow.metas[value].shape
        if value == split.value:
            shard = split.shard
        elif split.any_size:
            parts = blocks_of(shard, shape[shard.dim])
            unit = math.gcd(*parts) // split.units if len(set(parts)) == 1 else 1
            trial = with_unit(shard, max(1, unit))
            if fits(trial, shape[shard.dim]) and same(trial, shard, shape, _SIZES[-1]):
                shard = trial
        blocks = {shards[v].blocks for v in self.contractions if v in shards}
        if self.size is not None and split.cuts_groups and blocks == {1}:
            shard = _split_evenly(shard, shape[shard.dim], self.size)
        if self.size is not None:
            plain = simplest(shard, shape, self.size)
            assert isinstance(plain, Shard)
            return plain
        return counted(shard, shape[shard.dim])

    def _column_reason(self, split: _Split, value: str, columns: list[str], rows: list[str]) -> str:
        """Return the reason that is printed for a column-parallel weight."""
        label = self._label(value)
        if not rows:
            tied = any(c.lookup for c in self.contractions[value])
            also = ", and the embedding reads it by its rows" if tied else ""
            return f"vocabulary: the loss is computed on its parts{also}"
        shard = split.followed.shards[value]
        parts = blocks_of(shard, self.flow.metas[value].shape[shard.dim])
        fused = f"; {len(parts)} projections in one" if len(parts) > 1 else ""
        others = self._names([v for v in columns if v != value])
        with_others = f" with {_list(others, label)}" if others else ""
        if split.cuts_groups and len(parts) > 1:
            return f"column: {split.units} query heads, beside keys and values that are gathered"
        if split.in_attention and split.any_size:
            width = min(parts) // split.units
            parts_text = self._parts_text(split)
            return f"column{with_others}: {parts_text}, {width} wide, each attended alone{fused}"
        if split.in_attention:
            over = f"over {self.size or 2} ranks, not over any number"
            return f"column{with_others}: heads, each attended alone; lines up {over}{fused}"
        to = _list(self._names(rows), label)
        return f"column{with_others}: elementwise ops lead to {to}{fused}"

    def _names(self, values: list[str]) -> list[str]:
        """Return the labels that a reason names: without adapters, unless all are adapters."""
        named = [v for v in values if v not in self.adapters]
        return [self._label(v) for v in named or values]

    def _parts_text(self, split: _Split) -> str:
        """Return ``4 heads``, or ``2 groups of heads`` if there are fewer keys than queries."""
        if not split.in_attention:
            return f"{split.units} parts"
        sizes = {
            self.flow.metas[value].shape[shard.dim]
            for value, shard in split.followed.shards.items()
            if self.contractions.get(value) and value not in split.followed.summed
        }
        return f"{split.units} {'groups of ' if len(sizes) > 1 else ''}heads"

    def _too_few_text(self, split: _Split, size: int) -> str:
        """Return the reason for a weight that has fewer parts than ranks, with a size that would
        work."""
        text = f"{self._parts_text(split)} are too few for {size} ranks"
        fewer = max((n for n in range(2, split.units + 1) if size % n == 0), default=None)
        if fewer is None:
            return text
        return f"{text}; fix: size={fewer}, on an axis of {fewer} beside one of {size // fewer}"

    # -- vocabularies ----------------------------------------------------------------------------

    def _is_vocabulary(self, split: _Split) -> bool:
        """Return whether the weight is an output head: its split reaches the end of the program,
        and it has more classes than features or is tied to an embedding."""
        if not split.followed.reaches_end:
            return False
        product = self._matrix_product(split.value)
        assert product is not None
        shape = self.flow.metas[split.value].shape
        tied = any(c.lookup for c in self.contractions[split.value])
        return tied or shape[product.output_dim] > shape[product.contracted_dim]

    def _place_table(self, value: str) -> None:
        """Split an embedding by its rows if arguments of the program select the rows."""
        table = next((c for c in self.contractions[value] if c.lookup), None)
        if table is None:
            return
        rows, features = (
            self.flow.metas[value].shape[d] for d in (table.contracted_dim, table.output_dim)
        )
        given = any(n in self.batch for n in table.op.operands)
        if not given:
            self.reasons_whole[value] = "a table whose rows are not chosen by an argument"
        elif rows <= features:
            self.reasons_whole[value] = f"a table of only {rows} rows of {features}"
        elif self._follow(value, Shard(table.contracted_dim), self.size or 2).is_unblocked:
            why = "vocabulary: rows of other ranks give zeros, and one sum joins them"
            self.chosen[value] = Choice(self._label(value), Shard(table.contracted_dim), why)
            self.placed_together.append(([value], (self.size or _SIZES[-1],)))


def _preference(split: _Split) -> tuple[bool, int]:
    """Return the sort key: splits of heads come first, then splits that reach fewer values."""
    return not split.in_attention, len(split.followed.shards)


def _fits(shard: Shard, dim: int, size: int) -> bool:
    """Return whether the boundaries fit a dim of this size: equal layers may differ in size."""
    return shard.dim == dim and fits(shard, size)


def _has_groups(op: Op) -> bool:
    """Return whether an attention op has fewer key heads than query heads."""
    heads = [meta.shape[1] for meta in op.call.operands[:3] if len(meta.shape) == 4]
    return len(set(heads)) > 1


def _split_evenly(shard: Shard, size: int, num: int) -> Shard:
    """Return the cut of a dim of ``size`` in which the ranks' numbers of units differ by at most 1.
    It has two blocks if one block does not give this."""
    units = size // shard.unit
    each, more = divmod(units, num)
    if -(-units // num) * (num - 1) + each <= units or shard.blocks != 1:
        return shard
    return Shard(shard.dim, (each * num * shard.unit, more * shard.unit), shard.unit)


def _list(labels: Iterable[str], relative_to: str) -> str:
    """Join labels, each without its common prefix with ``relative_to``: ``q_proj and k_proj`` for
    ``attn.v_proj``."""
    base = relative_to.split(".")
    short: list[str] = []
    for label in labels:
        parts = label.removesuffix(".weight").split(".")
        same = next((i for i, (a, b) in enumerate(zip(parts, base)) if a != b), len(parts) - 1)
        short.append(".".join(parts[same:]))
    return " and ".join(dict.fromkeys(short))


def _blocks(flow: Dataflow, rules: Mapping[str, Rule], size: int) -> list[_Blocks]:
    """Return the numbers or sizes of blocks to try for a dim of this size: 1, then the ways in
    which ops of the program divide a dim of this size."""
    blocks: dict[_Blocks, None] = {1: None}
    # nn.MultiheadAttention views its fused projection as (3 e) and takes each of the 3
    selected_sizes = {
        op.call.operands[0].shape[op.call.args[1]]
        for op in flow.ops
        if op.call.name == "aten.select.int"
    }
    for rule in rules.values():
        for dims in (*rule.operands, *rule.results):
            for dim in dims:
                if rule.dim_size(dim) != size:
                    continue
                if len(dim) > 1:
                    parts = tuple(math.prod(rule.size[f] for f in product) for product in dim)
                    blocks[len(parts) if len(set(parts)) == 1 else parts] = None
                for product in dim:
                    major = rule.size[product[0]] if len(product) > 1 else 1
                    if len(dim) == 1 and (len(product) > 2 or major in selected_sizes):
                        blocks[major] = None
    return list(blocks)
