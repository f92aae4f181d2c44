"""Which dims an axis may split: the closure of the pins under the rules (*predictable first*).

A pin on a parameter or an input says that one dim is split over an axis. Each op that touches the
value maps that dim to factors; sharding those factors splits other operands and results, and so
on, until a contraction or an op that needs the dim whole ends it. Nothing outside the closure is
ever split on that axis, so Megatron's pins give Megatron's collectives and nothing else.

    up.weight row -> matmul's f -> gelu -> matmul's contraction -> down.weight column

A pin on a 1-D parameter opens nothing. An annotation opens its factor up to the next contraction.
A pin that does not line up with a view or a split on its way is an error with a proposal that was
tried. The result lists, for every op, the one-axis strategies that the planner may choose from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtensor.errors import PlanningError
from dtensor.sharding.dataflow import Dataflow, Op
from dtensor.sharding.placements import (
    Partial,
    Placement,
    Shard,
    block_sizes,
    index_sets,
    same,
    simplest,
)
from dtensor.sharding.rule import Assignment, Dim, Dims, FactorSharding, Rule, Strategy

Rules = Mapping[str, Rule]  # by op name


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What was stated of one value on one axis; ``by`` is what the user wrote it for."""

    value: str
    placement: Placement
    by: str
    opens: bool = True
    until_contraction: bool = False
    stated: Shard | None = None  # as the user wrote it, for messages


@dataclass(frozen=True, slots=True)
class Opened:
    """One factor that an axis splits: its size, the pin that opened it, what else it splits.

    ``values``: labels of the parameters it splits besides the pinned one; ``label``: the pinned
    value as users call it; ``reached``: every value that the pin reaches, itself first.
    """

    by: str
    dim: int
    size: int
    values: tuple[str, ...]
    label: str
    reached: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """For one axis: the strategies of each op, the shardings of each value, what was opened."""

    strategies: Mapping[str, tuple[Strategy, ...]]
    shardings: Mapping[str, tuple[Shard, ...]]
    opened: tuple[Opened, ...]


@dataclass(slots=True)
class _Closure:
    flow: Dataflow
    rules: Rules
    num: int
    free: bool
    shardings: dict[str, dict[object, Shard]] = field(default_factory=dict)
    strategies: dict[str, dict[Strategy, None]] = field(default_factory=dict)

    def key(self, value: str, shard: Shard) -> object:
        size = self.flow.metas[value].shape[shard.dim]
        return shard.dim, index_sets(shard, size, self.num)

    def has(self, value: str, shard: Shard) -> bool:
        return self.key(value, shard) in self.shardings.get(value, {})

    def open(self, pin: Pin) -> tuple[list[str], tuple[Op, str, Shard] | None]:
        """Follow one pin; the values it reaches, and the first place where it does not line up."""
        assert isinstance(pin.placement, Shard)
        queue = [(pin.value, pin.placement)]
        reached: list[str] = []
        crooked: tuple[Op, str, Shard] | None = None
        while queue:
            value, shard = queue.pop()
            key = self.key(value, shard)
            if key in self.shardings.setdefault(value, {}):
                continue
            shape = self.flow.metas[value].shape
            plain = simplest(shard, shape, self.num)
            assert isinstance(plain, Shard)
            self.shardings[value][key] = plain
            reached.append(value)
            for op, dims in self._uses(value):
                rule = self.rules[op.name]
                assignment = rule.match(dims, plain, self.num)
                if assignment is None:
                    crooked = crooked or (op, value, plain)
                    continue
                strategy = rule.apply(complete(rule, assignment), self.num)
                if strategy is None or (pin.until_contraction and rule.flops > 0):
                    continue
                if strategy in self.strategies.setdefault(op.name, {}):
                    continue
                self.strategies[op.name][strategy] = None
                names = (*op.operands, *op.results)
                for name, placed in zip(
                    names, (*strategy.operands, *strategy.results), strict=True
                ):
                    if name is not None and isinstance(placed, Shard):
                        queue.append((name, placed))
        return reached, crooked

    def _uses(self, value: str) -> Iterator[tuple[Op, Dims]]:
        producer = self.flow.producers.get(value)
        if producer is not None:
            yield producer, self.rules[producer.name].results[producer.results.index(value)]
        for op, index in self.flow.consumers.get(value, ()):
            yield op, self.rules[op.name].operands[index]


def reach(
    flow: Dataflow,
    rules: Rules,
    pins: Sequence[Pin],
    axis: str,
    num: int,
    *,
    free: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Reach:
    """The closure of ``pins`` on an axis of ``num`` ranks.

    ``free`` opens every factor of every op instead (search="free"). Raises PlanningError for a
    parameter's pin that does not line up with what the program does to the dim.
    """
    closure = _Closure(flow, rules, num, free)
    labels = labels or {}
    opened: list[Opened] = []
    for pin in pins:
        if not pin.opens or not isinstance(pin.placement, Shard):
            continue
        if closure.has(pin.value, pin.placement):
            continue
        reached, crooked = closure.open(pin)
        if crooked is not None and pin.value in labels:
            raise _misaligned(flow, rules, pin, crooked, axis, num)
        others = tuple(dict.fromkeys(labels[v] for v in reached if v in labels and v != pin.value))
        size = flow.metas[pin.value].shape[pin.placement.dim]
        label = labels.get(pin.value, pin.value)
        opened.append(
            Opened(
                pin.by, pin.placement.dim, size, others, label, tuple(dict.fromkeys(reached))
            )
        )
    if free:
        _open_everything(closure)
    return Reach(
        _with_pending(flow, rules, closure.strategies),
        {v: tuple(found.values()) for v, found in closure.shardings.items()},
        tuple(opened),
    )


def _open_everything(closure: _Closure) -> None:
    for op in closure.flow.ops:
        rule = closure.rules[op.name]
        for strategy in rule.strategies(closure.num):
            if strategy.shards_work:
                for name, placed in zip(op.operands, strategy.operands, strict=True):
                    if isinstance(placed, Shard):
                        closure.open(Pin(value=name, placement=placed, by="search"))
                for name, placed in zip(op.results, strategy.results, strict=True):
                    if name is not None and isinstance(placed, Shard):
                        closure.open(Pin(value=name, placement=placed, by="search"))


def _with_pending(
    flow: Dataflow, rules: Rules, sharded: Mapping[str, Mapping[Strategy, None]]
) -> dict[str, tuple[Strategy, ...]]:
    """Add replication, and pending sums where one can arise at all."""
    pending: set[str] = set()
    result: dict[str, tuple[Strategy, ...]] = {}
    for op in flow.ops:
        replicate, *linear = rules[op.name].fixed_strategies()
        found = [replicate, *sharded.get(op.name, {})]
        for strategy in linear:
            taken = [
                name
                for name, p in zip(op.operands, strategy.operands, strict=True)
                if isinstance(p, Partial)
            ]
            if any(name in pending for name in taken):
                found.append(strategy)
        for strategy in found:
            for name, p in zip(op.results, strategy.results, strict=True):
                if name is not None and p == Partial("sum"):
                    pending.add(name)
        result[op.name] = tuple(dict.fromkeys(found))
    return result


def complete(rule: Rule, assignment: Assignment) -> Assignment:
    """Extend an assignment to the other parts of every sum that it touches.

    Where q of ``(q + k + v)`` is cut, k and v are cut too: alike where they have q's size, else in
    one block with q's unit where that divides.
    """
    done = dict(assignment)
    sums = [d for dims in (*rule.operands, *rule.results) for d in dims if len(d) > 1]
    for dim in sums:
        have = [next((f for f in product if f in done), None) for product in dim]
        if not any(have) or all(have):
            continue
        at = next(i for i, f in enumerate(have) if f is not None)
        model, model_product = have[at], dim[at]
        assert model is not None
        depth = model_product.index(model)
        for product, factor in zip(dim, have, strict=True):
            if factor is not None or not product:
                continue
            other = product[depth] if depth < len(product) else product[0]
            sharding = done[model]
            size = rule.size[other]
            if size == rule.size[model]:
                done[other] = sharding
            else:
                unit = sharding.unit if size % sharding.unit == 0 else 1
                done[other] = FactorSharding((size,), unit)
    return done


# -- pins that do not line up --------------------------------------------------------------------


def _misaligned(
    flow: Dataflow,
    rules: Rules,
    pin: Pin,
    crooked: tuple[Op, str, Shard],
    axis: str,
    num: int,
) -> PlanningError:
    op, value, shard = crooked
    rule = rules[op.name]
    assert isinstance(pin.placement, Shard)
    stated = pin.stated or pin.placement
    size = flow.metas[pin.value].shape[stated.dim]
    counts = _counts(pin.placement, size, num)
    dim = _dim_of(flow, rule, op, value, shard)
    lines = [
        f"the pin {axis}={stated!r} on {pin.by} does not line up with what the program does "
        f"to that dim.",
        f"  {pin.by}: {flow.metas[pin.value]}, dim {stated.dim} of {size}: "
        f"ranks hold {counts}",
        f"  {op.call.name} sees it as {_describe(rule, dim)} in {value}: {flow.metas[value]}",
    ]
    if op.source:
        lines.append(f"  {op.source}: {op.source_text}")
    fix = _proposal(flow, rules, pin, dim, rule, num)
    if fix is not None:
        lines.append(f"  fix: state {axis}={fix} for {pin.by}; that lines up")
    else:
        small = min((rule.size[f] for product in dim for f in product[:1]), default=1)
        if 1 < small < num and num % small == 0:
            lines.append(
                f"  only {small} parts over {num} ranks: split the axis, for example "
                f"Mesh({axis}={small}, {axis}_rep={num // small}), and pin {axis} alone"
            )
        else:
            lines.append(f"  fix: state {axis}=Replicate() for {pin.by}, or choose another dim")
    return PlanningError("\n".join(lines))


def _counts(shard: Shard, size: int, num: int) -> str:
    lengths = [sum(hi - lo for lo, hi in s) for s in index_sets(shard, size, num)]
    return ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")


def _dim_of(flow: Dataflow, rule: Rule, op: Op, value: str, shard: Shard) -> Dim:
    if value in op.operands:
        return rule.operands[op.operands.index(value)][shard.dim]
    return rule.results[op.results.index(value)][shard.dim]


def _describe(rule: Rule, dim: Dim) -> str:
    parts = [" x ".join(str(rule.size[f]) for f in product) for product in dim]
    return f"{len(parts)} parts of {', '.join(parts)}" if len(parts) > 1 else parts[0]


def _proposal(
    flow: Dataflow, rules: Rules, pin: Pin, dim: Dim, rule: Rule, num: int
) -> Shard | None:
    """A Shard of the same dim that the whole closure accepts: tried, not guessed."""
    assert isinstance(pin.placement, Shard)
    at = pin.placement.dim
    size = flow.metas[pin.value].shape[at]
    parts = tuple(math.prod(rule.size[f] for f in product) for product in dim)
    blocks: list[int | tuple[int, ...]] = [1, pin.placement.blocks]
    if len(parts) > 1:
        blocks.append(parts)
    units = {1}
    for other in rules.values():
        for dims in (*other.operands, *other.results):
            for compound in dims:
                for product in compound:
                    if len(product) > 1:
                        units.update(
                            math.prod(other.size[f] for f in product[i:])
                            for i in range(1, len(product))
                        )
    for block in blocks:
        for unit in sorted(units):
            try:
                trial = Shard(at, block, unit)
                if any(b % unit for b in block_sizes(trial.blocks, size)):
                    continue
                if same(trial, pin.placement, flow.metas[pin.value].shape, num):
                    continue
            except PlanningError:
                continue
            closure = _Closure(flow, rules, num, False)
            moved = Pin(value=pin.value, placement=trial, by=pin.by)
            reached, crooked = closure.open(moved)
            filled = sum(1 for s in index_sets(trial, size, num) if s)
            if crooked is None and reached and filled == num:
                return trial
    return None
