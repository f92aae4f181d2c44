"""Where a split goes: from one parameter's dim through the forward program to where it ends.

    follow(flow, rules, Contractions(...), "up_weight", Shard(0), num=2)
    # Followed(parameters={"up_weight": Shard(0), "up_bias": Shard(0), "down_weight": Shard(1)},
    #          summed=("down_weight",), blocked=None, ...)

The same closure as the planner's (opened_factors.py), of the forward alone, with one question more:
does it get through? It is *blocked* by an op that needs the dim whole, or that sums over it where
no weight and no cross entropy does; it is *crooked* where a view or a split cuts the dim at other
places.

Invariants: each value is reached along one dim; following stops at the first obstacle, so that the
many trials of a derivation are cheap. Not here: which splits are worth having (api/derive.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtensor.sharding.plan.choose.split_through_op import CROOKED, through
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.placements import Partial, Shard, index_sets, simplest

Rules = Mapping[str, Rule]
_CROSS_ENTROPY = "dt.ce_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A forward program and what following needs to know of it.

    ``weights``: (op name, operand index) to the input that stands there as a weight;
    ``batch``: the values that depend on arguments; ``results``: those that the program returns.
    """

    flow: Dataflow
    rules: Rules
    weights: Mapping[tuple[str, int], str]
    batch: frozenset[str]
    results: frozenset[str]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The op that a split does not get through, the value that it reads there, and what it does
    with the dim: "cannot split" or "sums over"."""

    op: Op
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """``parameters``: what else is split, and how; ``summed``: the weights that contract the
    split; ``ends``: "loss" and "result", where it comes to those; ``ops``: the names of the ops on
    its way, in the order met."""

    parameters: Mapping[str, Shard]
    summed: tuple[str, ...]
    ends: frozenset[str]
    ops: tuple[str, ...]
    num_values: int
    blocked: Blocked | None
    crooked: bool

    @property
    def gets_through(self) -> bool:
        return self.blocked is None and not self.crooked


@dataclass(slots=True)
class _Walk:
    program: Program
    num: int
    shards: dict[str, Shard] = field(default_factory=dict[str, Shard])
    summed: dict[str, None] = field(default_factory=dict[str, None])
    ends: set[str] = field(default_factory=set[str])
    ops: dict[str, None] = field(default_factory=dict[str, None])
    queue: list[tuple[str, Shard]] = field(default_factory=list[tuple[str, Shard]])
    blocked: Blocked | None = None
    crooked: bool = False

    def visit(self, value: str, shard: Shard) -> None:
        flow = self.program.flow
        plain = simplest(shard, flow.metas[value].shape, self.num)
        assert isinstance(plain, Shard)
        if value in self.shards:
            if not self._same(value, plain):
                self.crooked = True
            return
        self.shards[value] = plain
        if value in self.program.results:
            self.ends.add("result")
        producer = flow.producers.get(value)
        if producer is not None:
            self._through(producer, value, plain, None)
        for op, index in flow.consumers.get(value, ()):
            if op.phase == "forward":
                self._through(op, value, plain, index)

    def _same(self, value: str, shard: Shard) -> bool:
        had = self.shards[value]
        size = self.program.flow.metas[value].shape[had.dim]
        return had.dim == shard.dim and index_sets(had, size, self.num) == index_sets(
            shard, size, self.num
        )

    def _through(self, op: Op, value: str, shard: Shard, index: int | None) -> None:
        """``index``: which operand of ``op`` the value is; None: it is a result."""
        tensor = index if index is not None else len(op.operands) + op.results.index(value)
        strategy = through(self.program.rules[op.name], tensor, shard, self.num)
        if strategy == CROOKED:
            self.crooked = True
            return
        if strategy is None:
            # What depends on no argument (a mask) is made whole, and each rank takes its part.
            if index is not None or value in self.program.batch:
                self.blocked = self.blocked or Blocked(op, value, "cannot split")
            return
        if any(isinstance(p, Partial) for p in strategy.results) and not self._sums(op, strategy):
            self.blocked = self.blocked or Blocked(op, value, "sums over")
            return
        self.ops[op.call.name] = None
        for name, placed in zip(
            (*op.operands, *op.results), (*strategy.operands, *strategy.results), strict=True
        ):
            if name is not None and isinstance(placed, Shard):
                self.queue.append((name, placed))

    def _sums(self, op: Op, strategy: Strategy) -> bool:
        """Whether the pending sum is one that is wanted: of a weight, or of a cross entropy."""
        if op.call.name.startswith(_CROSS_ENTROPY):
            self.ends.add("loss")
            return True
        found = [
            weight
            for index, placed in enumerate(strategy.operands)
            if isinstance(placed, Shard)
            and (weight := self.program.weights.get((op.name, index))) is not None
        ]
        self.summed.update(dict.fromkeys(found))
        return bool(found)


def follow(program: Program, value: str, shard: Shard, num: int) -> Followed:
    """Follow the split of the input ``value`` over an axis of ``num`` ranks."""
    walk = _Walk(program, num, queue=[(value, shard)])
    while walk.queue and walk.blocked is None and not walk.crooked:
        walk.visit(*walk.queue.pop(0))
    inputs = {item.name for item in program.flow.inputs if item.kind == "parameter"}
    return Followed(
        parameters={v: s for v, s in walk.shards.items() if v in inputs},
        summed=tuple(walk.summed),
        ends=frozenset(walk.ends),
        ops=tuple(walk.ops),
        num_values=len(walk.shards),
        blocked=walk.blocked,
        crooked=walk.crooked,
    )
