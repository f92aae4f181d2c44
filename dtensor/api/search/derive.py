"""Tensor-parallel placements from a forward program: pairs of weights, and their boundaries.

    derive(flow, size=2)   # (Choice("up.weight", Shard(0), "column: ..."), ...)

For each weight it follows the split of its output dim (`_follow`: the planner's closure, of the
forward alone) at the boundaries that the program itself accepts: whole heads where a view makes
heads of the dim, whole groups where queries share keys, the parts of a split where projections are
fused. A split is *blocked* by an op that needs the dim whole, or that sums over it where no weight
and no loss does; it is *crooked* where a view or a split cuts the dim at other places. It is chosen
if it gets through elementwise ops and attention to weights that contract it, or as a vocabulary to
the loss. So column and row pairs, gates, fused and grouped projections come out; no class is named.
A low-rank adapter, ``W x + B A x`` with fewer features between than at both ends, opens no split of
its own: W is placed as without it, and the split of W reaches B where it is a column's, A where it
is a row's.

Invariants: a chosen split was followed through the whole forward program over axes of 7, 5, 3 and 2
ranks, or over ``size`` where no boundaries suit all of these, and met no op that needs the dim
whole; with a backward given, it lines up with that too, as the planner requires of a pin. Splits
of heads are chosen first, then those that reach less: a hidden dim before a residual stream. Not
here: names by pattern, text (api/search/placements.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.plan.choose.contractions import Contraction, contractions_of
from dtensor.sharding.plan.choose.opened_factors import crooked
from dtensor.sharding.plan.choose.split_through_op import CROOKED, around, split_by
from dtensor.sharding.plan.dataflow import Dataflow, Op, without_numbers
from dtensor.sharding.plan.planner import rules_of
from dtensor.sharding.plan.request import Pin
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.placements import (
    Partial,
    Shard,
    block_sizes,
    blocks_of,
    counted,
    fits,
    index_sets,
    same,
    simplest,
    units_of,
    with_unit,
)

_SIZES = (7, 5, 3, 2)  # axes that a split must line up over: over one it may by accident
# a cut, the axes to try it over, whether they represent axes of any size
_Candidate = tuple[Shard, tuple[int, ...], bool]
_Blocks = int | tuple[int, ...]
_Alike = tuple[str, int, bool]  # a name without numbers, a dim, whether groups of heads are cut
_MAX_JOINED = 16  # products that one sum joins: a weight and its adapters
_SOFTMAX = ("softmax", "dt.attention")


@dataclass(frozen=True, slots=True)
class Choice:
    """A parameter's placement, None where it stays whole, and the reason."""

    label: str
    placement: Shard | None
    why: str


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """The op that blocks a split, and its use of the dim: "cannot split" or "sums over"."""

    op: Op
    why: str


@dataclass(slots=True)
class _Followed:
    """``shards``: every value that is split, along one dim each; ``summed``: the weights that
    contract the split; ``ops``: the names of the ops on its path; both in the order met."""

    shards: dict[str, Shard] = field(default_factory=dict[str, Shard])
    summed: dict[str, None] = field(default_factory=dict[str, None])
    ops: dict[str, None] = field(default_factory=dict[str, None])
    ends: bool = False  # in a loss, or in a result of the program
    grouped: int | None = None  # the place of the attention of groups of heads that is split
    obstacle: _Obstacle | None = None
    crooked: bool = False

    @property
    def gets_through(self) -> bool:
        return self.obstacle is None and not self.crooked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A split that gets through: ``units`` pieces may be dealt to ranks, per block."""

    value: str
    shard: Shard
    units: int
    followed: _Followed
    any_size: bool  # it lines up over axes of any size, not only over ``size``
    cuts_groups: bool = False  # query heads are split, and their keys and values stay whole

    @property
    def in_attention(self) -> bool:
        return any(mark in name for name in self.followed.ops for mark in _SOFTMAX)


def derive(flow: Dataflow, size: int | None, step: Dataflow | None = None) -> tuple[Choice, ...]:
    """One choice for each parameter with at least two dims, in the program's order.

    ``step``: the same program with its backward, which may cut a dim at other places: from a join
    of several parts each gradient is cut out separately.
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
    cutting: Mapping[str, Rule]  # the rules of a split that cuts groups of heads
    batch: frozenset[str]  # the values that depend on arguments
    contractions: Mapping[str, tuple[Contraction, ...]]  # of each parameter of two dims and more
    weights: Mapping[tuple[str, int], str]  # (op, operand) to the parameter that it contracts
    places: Mapping[str, int]  # of each op in the program
    grouped: Mapping[str, int]  # the same of attention of fewer key heads than query heads
    chosen: dict[str, Choice] = field(default_factory=dict[str, Choice])
    whole: dict[str, str] = field(default_factory=dict[str, str])
    # labels chosen together, and the axes over which they line up
    taken: list[tuple[list[str], tuple[int, ...]]] = field(
        default_factory=list[tuple[list[str], tuple[int, ...]]]
    )
    # of equal layers: the boundaries found, the reasons for none
    boundaries: dict[_Alike, _Candidate] = field(default_factory=dict[_Alike, _Candidate])
    refused: dict[_Alike, str] = field(default_factory=dict[_Alike, str])
    blocks: dict[int, list[_Blocks]] = field(default_factory=dict[int, list[_Blocks]])
    shared: set[str] = field(default_factory=set[str])  # weights of keys that every rank has
    adapters: set[str] = field(default_factory=set[str])  # other weights' reasons omit them

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
        splits = [s for value in self.contractions if (s := self._split(value)) is not None]
        order = {value: i for i, value in enumerate(self.contractions)}
        for split in sorted(splits, key=lambda s: (*_preference(s), order[s.value])):
            base = self._adapted(split)
            if base is None:
                self._take(split)
            else:
                label = self._label(split.value)
                self.whole[split.value] = f"it adapts {_list([base], label)}, and fits its split"
                self.adapters |= {split.value, *split.followed.summed}
        for value in self.contractions:
            if value not in self.chosen and self.grouped:
                self._take_row(value)
        for value in self.contractions:
            if value not in self.chosen:
                self._look_up(value)

    def drop_crooked(self, step: Dataflow) -> None:
        """Leave whole the weights that do not line up with the backward, over the axes of their
        trial."""
        rules = rules_of(step)
        names = {item.label: item.name for item in step.inputs if item.kind == "parameter"}
        for values, sizes in self.taken:
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
                self.whole[value] = f"{op.call.name} cuts its dim at other places{line}"
                del self.chosen[value]

    def choices(self) -> tuple[Choice, ...]:
        return tuple(
            self.chosen.get(value)
            or Choice(self._label(value), None, self.whole.get(value, "it feeds no product"))
            for value in self.contractions
        )

    def _label(self, value: str) -> str:
        return next(item.label for item in self.flow.inputs if item.name == value)

    # -- columns, and the rows that contract their split -----------------------------------

    def _product(self, value: str) -> Contraction | None:
        return next((c for c in self.contractions[value] if not c.lookup), None)

    def _split(self, value: str, *, cuts_groups: bool = False) -> _Split | None:
        """The finest split of the weight's output dim that gets through; else why there is none."""
        product = self._product(value)
        if product is None:
            return None
        obstacle: _Obstacle | None = None
        alike = without_numbers(self._label(value)), product.output_dim, cuts_groups
        if alike in self.refused:
            self.whole[value] = self.refused[alike]
            return None
        for shard, sizes, any_size in self._candidates(value, product.output_dim, alike):
            followed = self._through(value, shard, sizes, cuts_groups=cuts_groups)
            if not followed.gets_through:
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
            self.whole[value] = "no boundary of its output dim lines up with the ops on it"
        else:
            line = f" ({obstacle.op.source})" if obstacle.op.source else ""
            self.whole[value] = f"{obstacle.op.call.name} {obstacle.why} its output dim{line}"
        self.refused[alike] = self.whole[value]
        return None

    # -- adapters beside a weight ----------------------------------------------------

    def _adapted(self, split: _Split) -> str | None:
        """The label of the weight W that the split weight A and its one row B adapt, in
        ``W x + B A x``, where A x has fewer features than both ends. Their placements follow from
        that of W, as of any weight that its split reaches."""
        rows = [v for v in split.followed.summed if v != split.value]
        down = self._product(split.value)
        up = self._product(rows[0]) if len(rows) == 1 else None
        if down is None or up is None:
            return None
        (first, inner), (_, last) = self._ends(down), self._ends(up)
        if inner >= min(first, last):
            return None
        beside = {op.name for op in self._joined(up.op)}
        for value in self.contractions:
            base = self._product(value)
            if (
                base is not None
                and base.op.name in beside
                and self._ends(base) == (first, last)
                and self._source(base) == self._source(down)
            ):
                return self._label(value)
        return None

    def _ends(self, product: Contraction) -> tuple[int, int]:
        """The numbers of input and output features of a product."""
        shape = self.flow.metas[product.value].shape
        return shape[product.contracted_dim], shape[product.output_dim]

    def _inputs(self, op: Op) -> list[str]:
        """Its operands that depend on arguments of the program."""
        return [name for name in op.operands if name in self.batch]

    def _source(self, product: Contraction) -> str | None:
        """The value that a product takes, before ops of that value alone (views, a dropout)."""
        value = next(iter(self._inputs(product.op)), None)
        while value is not None and (op := self.flow.producers.get(value)) is not None:
            inputs = self._inputs(op)
            if len(inputs) != 1:
                break
            value = inputs[0]
        return value

    def _joined(self, op: Op) -> list[Op]:
        """The products of weights that are added to the result of this one, at the first op that
        takes another value too."""
        while len(uses := self.flow.consumers.get(op.results[0] or "", ())) == 1:
            came, (op, _) = op, uses[0]
            others = [n for n in self._inputs(op) if n not in came.results]
            if others:
                return self._products(others)
        return []

    def _products(self, values: list[str]) -> list[Op]:
        """The nearest products of weights that the values come from."""
        of_weights, products = {op for op, _ in self.weights}, list[Op]()
        waiting = list(values)
        while waiting:
            op = self.flow.producers.get(waiting.pop())
            if op is not None and op.name in of_weights:
                products.append(op)
            elif op is not None and len(products) < _MAX_JOINED:
                waiting += self._inputs(op)
        return products

    def _through(
        self, value: str, shard: Shard, sizes: Sequence[int], *, cuts_groups: bool
    ) -> _Followed:
        for num in sizes:
            followed = self._follow(value, shard, num, cuts_groups=cuts_groups)
            if not followed.gets_through:
                break
        return followed

    def _follow(
        self, value: str, shard: Shard, num: int, *, cuts_groups: bool = False
    ) -> _Followed:
        """The split of a parameter over an axis of ``num`` ranks, up to the first obstacle: the
        many trials of a derivation must be cheap. ``cuts_groups``: an op before an attention that
        needs the dim whole is no obstacle, since the planner gathers keys and values there."""
        rules = self.cutting if cuts_groups else self.rules
        followed = _Followed()
        returned = {o.value for o in self.flow.outputs if o.kind == "result"}
        queue = deque([(value, shard)])
        while queue and followed.gets_through:
            value, shard = queue.popleft()
            shape = self.flow.metas[value].shape
            plain = simplest(shard, shape, num)
            assert isinstance(plain, Shard)
            if value in followed.shards:
                followed.crooked = not same(followed.shards[value], plain, shape, num)
                continue
            followed.shards[value] = plain
            followed.ends |= value in returned
            for op, tensor, strategy in around(self.flow, rules, value, plain, num):
                if strategy == CROOKED:
                    followed.crooked = True
                elif self._is_gathered(op, strategy, followed):
                    continue
                elif strategy is None:
                    # A value without arguments (a mask) is made whole; each rank takes its part.
                    if tensor < len(op.operands) or value in self.batch:
                        followed.obstacle = followed.obstacle or _Obstacle(op, "cannot split")
                elif self._sums_unasked(op, strategy, followed):
                    followed.obstacle = followed.obstacle or _Obstacle(op, "sums over")
                else:
                    followed.ops[op.call.name] = None
                    if cuts_groups and op.name in self.grouped:
                        followed.grouped = self.grouped[op.name]
                    queue += split_by(op, strategy)
        return followed

    def _is_gathered(self, op: Op, strategy: Strategy | None, followed: _Followed) -> bool:
        """Whether an op before an attention of groups of heads takes the dim whole."""
        if followed.grouped is None or self.places[op.name] > followed.grouped:
            return False
        return strategy is None or self._sums_unasked(op, strategy, followed)

    def _sums_unasked(self, op: Op, strategy: Strategy, followed: _Followed) -> bool:
        """Whether there is a pending sum of neither a weight nor a loss."""
        if not any(isinstance(p, Partial) for p in strategy.results):
            return False
        if self.rules[op.name].of_loss:
            followed.ends = True
            return False
        weights = [self.weights.get((op.name, i)) for i, _ in enumerate(op.operands)]
        summed = [
            weight
            for weight, placed in zip(weights, strategy.operands, strict=True)
            if weight is not None and isinstance(placed, Shard)
        ]
        followed.summed.update(dict.fromkeys(summed))
        return not summed

    def _candidates(self, value: str, dim: int, alike: _Alike) -> Iterator[_Candidate]:
        """Cuts of the dim and the axes of their trials: first the cut of an equal layer, then cuts
        for axes of any size, then for ``size`` alone; finest first."""
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

    def _take(self, split: _Split) -> None:
        """Place every weight that the split reaches, unless one of them is placed already."""
        shards = split.followed.shards
        reached = [
            v.name for v in self.flow.inputs if v.name in shards and self.contractions.get(v.name)
        ]
        rows = [v for v in split.followed.summed if v != split.value]
        if split.value in self.chosen or split.value in self.shared:
            return
        if not rows and not self._is_vocabulary(split):
            self.whole[split.value] = "no weight contracts the split of its output dim"
            return
        taken = next((v for v in reached if v in self.chosen), None)
        if taken is not None:
            self.whole[split.value] = f"its output dim would also split {self._label(taken)}"
            return
        if self._take_heads(split, reached):
            return
        if self.size is not None and split.units < self.size:
            for value in reached:
                self.whole[value] = self._too_few(split, self.size)
            return
        columns = [v for v in reached if v not in split.followed.summed or v == split.value]
        for value in reached:
            if value in columns:
                why = self._column(split, value, columns, rows)
            else:
                names = self._names(columns)
                several = "split" if len(names) > 1 else "splits"
                why = f"row: it contracts the dim that {_list(names, self._label(value))} {several}"
            self.chosen[value] = Choice(self._label(value), self._placement(split, value), why)
            self.whole.pop(value, None)
        any_size = split.any_size and self.size is None
        self.taken.append((reached, _SIZES if any_size else (self.size or _SIZES[-1],)))

    def _take_heads(self, split: _Split, reached: list[str]) -> bool:
        """If a rank would have no group of heads, split the query heads alone, as evenly as
        possible."""
        if self.size is None or split.cuts_groups or not split.in_attention:
            return False
        if all(index_sets(Shard(0), split.units, self.size)):
            return False
        columns = [v for v in reached if v not in split.followed.summed]
        for value in columns:
            heads = self._split(value, cuts_groups=True)
            if heads is None or heads.units < self.size:
                continue
            self._take(heads)
            if value in self.chosen:
                keys = [v for v in columns if v not in self.chosen]
                why = f"each rank has all {split.units} heads, and takes those of its query heads"
                self.whole |= dict.fromkeys(keys, why)
                self.shared.update(keys)
                return True
        return False

    def _take_row(self, value: str) -> None:
        """Place a weight that contracts query heads, and the fused projection that they are sliced
        from: the split reaches the projection through the attention."""
        product = self._product(value)
        if product is None:
            return
        dim, size = product.contracted_dim, self.flow.metas[value].shape[product.contracted_dim]
        alike, num = (without_numbers(self._label(value)), dim, True), self.size or _SIZES[0]
        for candidate, sizes, any_size in self._candidates(value, dim, alike):
            if alike in self.refused or units_of(candidate, size) < num:
                break
            shard = _dealt_evenly(candidate, size, num) if self.size is not None else candidate
            followed = self._through(value, shard, (*sizes, num), cuts_groups=True)
            shards = followed.shards
            columns = [v for v in self.contractions if v in shards and v not in followed.summed]
            if not followed.gets_through or followed.grouped is None or len(columns) != 1:
                continue
            self.boundaries[alike] = candidate, sizes[-1:], any_size
            self._take(
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
        """The placement of the split on a weight that it reaches, with its boundaries stated."""
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
            shard = _dealt_evenly(shard, shape[shard.dim], self.size)
        if self.size is not None:
            plain = simplest(shard, shape, self.size)
            assert isinstance(plain, Shard)
            return plain
        return counted(shard, shape[shard.dim])

    def _column(self, split: _Split, value: str, columns: list[str], rows: list[str]) -> str:
        label = self._label(value)
        if not rows:
            tied = any(c.lookup for c in self.contractions[value])
            also = ", and the embedding reads it by its rows" if tied else ""
            return f"vocabulary: the loss is computed on its parts{also}"
        shard = split.followed.shards[value]
        parts = blocks_of(shard, self.flow.metas[value].shape[shard.dim])
        fused = f"; {len(parts)} projections in one" if len(parts) > 1 else ""
        others = self._names([v for v in columns if v != value])
        beside = f" with {_list(others, label)}" if others else ""
        if split.cuts_groups and len(parts) > 1:
            return f"column: {split.units} query heads, beside keys and values that are gathered"
        if split.in_attention and split.any_size:
            width = min(parts) // split.units
            return (
                f"column{beside}: {self._pieces(split)}, {width} wide, each attended alone{fused}"
            )
        if split.in_attention:
            over = f"over {self.size or 2} ranks, not over any number"
            return f"column{beside}: heads, each attended alone; lines up {over}{fused}"
        to = _list(self._names(rows), label)
        return f"column{beside}: elementwise ops lead to {to}{fused}"

    def _names(self, values: list[str]) -> list[str]:
        """Names for a reason: without adapters, if there are others."""
        named = [v for v in values if v not in self.adapters]
        return [self._label(v) for v in named or values]

    def _pieces(self, split: _Split) -> str:
        """``4 heads``; ``2 groups of heads`` where fewer keys than queries come out."""
        if not split.in_attention:
            return f"{split.units} parts"
        sizes = {
            self.flow.metas[value].shape[shard.dim]
            for value, shard in split.followed.shards.items()
            if self.contractions.get(value) and value not in split.followed.summed
        }
        return f"{split.units} {'groups of ' if len(sizes) > 1 else ''}heads"

    def _too_few(self, split: _Split, size: int) -> str:
        text = f"{self._pieces(split)} are too few for {size} ranks"
        fewer = max((n for n in range(2, split.units + 1) if size % n == 0), default=None)
        if fewer is None:
            return text
        return f"{text}; fix: size={fewer}, on an axis of {fewer} beside one of {size // fewer}"

    # -- vocabularies ----------------------------------------------------------------------------

    def _is_vocabulary(self, split: _Split) -> bool:
        """A head of more classes than features, or tied to a table, that ends the program."""
        if not split.followed.ends:
            return False
        product = self._product(split.value)
        assert product is not None
        shape = self.flow.metas[split.value].shape
        tied = any(c.lookup for c in self.contractions[split.value])
        return tied or shape[product.output_dim] > shape[product.contracted_dim]

    def _look_up(self, value: str) -> None:
        """Split a table by its rows where the program's arguments say which rows are read."""
        table = next((c for c in self.contractions[value] if c.lookup), None)
        if table is None:
            return
        rows, features = (
            self.flow.metas[value].shape[d] for d in (table.contracted_dim, table.output_dim)
        )
        given = any(n in self.batch for n in table.op.operands)
        if not given:
            self.whole[value] = "a table whose rows are not chosen by an argument"
        elif rows <= features:
            self.whole[value] = f"a table of only {rows} rows of {features}"
        elif self._follow(value, Shard(table.contracted_dim), self.size or 2).gets_through:
            why = "vocabulary: rows of other ranks give zeros, and one sum joins them"
            self.chosen[value] = Choice(self._label(value), Shard(table.contracted_dim), why)
            self.taken.append(([value], (self.size or _SIZES[-1],)))


def _preference(split: _Split) -> tuple[bool, int]:
    """Return the sort key: splits of heads come first, then splits that reach fewer values."""
    return not split.in_attention, len(split.followed.shards)


def _fits(shard: Shard, dim: int, size: int) -> bool:
    """Whether these boundaries fit a dim of this size: equal names may differ in size."""
    return shard.dim == dim and fits(shard, size)


def _has_groups(op: Op) -> bool:
    """Whether an attention op has fewer key heads than query heads."""
    heads = [meta.shape[1] for meta in op.call.operands[:3] if len(meta.shape) == 4]
    return len(set(heads)) > 1


def _dealt_evenly(shard: Shard, size: int, num: int) -> Shard:
    """The cut of a dim of ``size`` at the same units, in two blocks if ``num`` ranks would else
    have numbers of units that differ by more than 1."""
    units = size // shard.unit
    each, more = divmod(units, num)
    if -(-units // num) * (num - 1) + each <= units or shard.blocks != 1:
        return shard
    return Shard(shard.dim, (each * num * shard.unit, more * shard.unit), shard.unit)


def _list(labels: Iterable[str], beside: str) -> str:
    """Short names relative to ``beside``: ``q_proj and k_proj`` beside ``attn.v_proj``."""
    here = beside.split(".")
    short: list[str] = []
    for label in labels:
        parts = label.removesuffix(".weight").split(".")
        same = next((i for i, (a, b) in enumerate(zip(parts, here)) if a != b), len(parts) - 1)
        short.append(".".join(parts[same:]))
    return " and ".join(dict.fromkeys(short))


def _blocks(flow: Dataflow, rules: Mapping[str, Rule], size: int) -> list[_Blocks]:
    """One block, then the ways in which the program takes a dim of this size apart."""
    blocks: dict[_Blocks, None] = {1: None}
    # nn.MultiheadAttention views its fused projection as (3 e) and takes each of the 3
    taken = {
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
                    if len(dim) == 1 and (len(product) > 2 or major in taken):
                        blocks[major] = None
    return list(blocks)
