"""A pin that does not line up with the program's use of its dim: the record, or the error.

    q.weight f32[352,16] pinned Row() over tp=4, viewed as 22 heads of 16: ranks would hold 88 rows,
    5 heads and a half.  fix: state tp=Shard(0, unit=16), which was tried on the whole program.

If no blocks and no unit give each rank a part (2 kv heads over 4 ranks), a smaller axis is
proposed, tried likewise. The split ends at the view, and the planner redistributes the activation
before it as for any op that needs it so. With misaligned="gather" the pin is the value's stored
placement: the value is gathered before use as in ZeRO's level 3 (passes/gather_stored.py), and its
gradient and the optimizer's state have the stored placement. The pin and the places are found in
opened_factors.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtensor.errors import PlanningError
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.plan.record import Misaligned
from dtensor.sharding.plan.request import Pin
from dtensor.sharding.rules.rule import Dim, Rule
from dtensor.sharding.spec.placements import (
    Shard,
    counted,
    fits,
    index_sets,
    on_dim,
    one_block,
    with_unit,
)

LinesUp = Callable[[Shard, int], bool]  # whether a shard over so many ranks goes through
Crooked = tuple[Op, str, Shard]  # the op where it shows, the value that it reads or writes
_MAX_AXES_TRIED = 3
_AS_STORAGE = 'or parallelize(..., misaligned="gather"): stored so, and gathered before use'


@dataclass(frozen=True, slots=True)
class MisalignedPin:
    """A pin that does not line up with ``places`` of the program over ``num`` ranks of ``axis``."""

    flow: Dataflow
    rules: Mapping[str, Rule]
    pin: Pin
    places: Sequence[Crooked]
    axis: str
    num: int

    def record(self) -> Misaligned:
        """The pin, with the reason: the first op of the program with which it does not line up."""
        places = {op.name: (op, value, shard) for op, value, shard in reversed(self.places)}
        op, value, shard = next(places[op.name] for op in self.flow.ops if op.name in places)
        assert isinstance(self.pin.placement, Shard)
        why = _why(self.rules[op.name], op, value, shard)
        return Misaligned(
            self.axis, self.pin.placement, self.pin.by, why, op.source, ops=tuple(places)
        )

    def error(self, label: str, lines_up: LinesUp) -> PlanningError:
        """``label``: the user's name of the pinned value."""
        (op, value, shard), pin, axis, num = self.places[0], self.pin, self.axis, self.num
        assert isinstance(pin.placement, Shard)
        meta, at = self.flow.metas[pin.value], pin.placement.dim
        on = label if pin.by == label else f"{label} ({pin.by})"
        lines = [
            f"the pin {axis}={pin.stated or pin.placement!r} on {on} does not line up with the "
            f"program's use of that dim.",
            f"  {label}: {meta}, dim {at}: {num} ranks hold "
            f"{_counts(pin.placement, meta.shape[at], num)} of {meta.shape[at]}",
            f"  {_why(self.rules[op.name], op, value, shard)} in {value}: {self.flow.metas[value]}",
        ]
        if op.source:
            lines.append(f"  {op.source}: {op.source_text}")
        fix = self.fix(lines_up)
        whole = _parts(self.rules[op.name], _dim_of(self.rules[op.name], op, value, shard))
        if not fix.startswith(f"{axis}=") and any(not s for s in index_sets(Shard(0), whole, num)):
            lines.append(f"  {whole} parts over {num} ranks: {_counts(Shard(0), whole, num)}")
        lines += [f"fix: {fix or f'{axis}=Replicate(), or another dim'}", f"  {_AS_STORAGE}"]
        return PlanningError("\n".join(lines))

    def fix(self, lines_up: LinesUp) -> str:
        """A placement of the same dim that ``lines_up``, or that over fewer ranks; "" for none."""
        (op, value, shard), axis, num = self.places[0], self.axis, self.num
        rule = self.rules[op.name]
        dim = _dim_of(rule, op, value, shard)
        for ranks in (num, *_fewer(num, _parts(rule, dim))):
            fix = _proposal(self.flow, self.rules, self.pin, dim, rule, ranks, lines_up)
            if fix is None:
                continue
            if ranks == num:
                return f"{axis}={fix}, which lines up"
            if num % ranks == 0:
                mesh = f"split the axis, as in Mesh({axis}={ranks}, {axis}_rep={num // ranks})"
            else:
                mesh = f"an axis of {ranks} ranks, Mesh({axis}={ranks})"
            return f"{mesh}, and {axis}={fix}, which lines up"
        return ""


def _parts(rule: Rule, dim: Dim) -> int:
    """The size of the smallest major factor of a dim: the parts that ranks may hold."""
    return min((rule.size[product[0]] for product in dim if product), default=1)


def _fewer(num: int, whole: int) -> list[int]:
    """Smaller axes to try: those that this one can be split into, then those that fit the parts."""
    dividing = [n for n in range(num - 1, 1, -1) if num % n == 0]
    fitting = [n for n in range(num - 1, 1, -1) if whole % n == 0]
    return list(dict.fromkeys((*dividing, *fitting)))[:_MAX_AXES_TRIED]


def _counts(shard: Shard, size: int, num: int) -> str:
    lengths = [sum(hi - lo for lo, hi in s) for s in index_sets(shard, size, num)]
    return ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")


def _dim_of(rule: Rule, op: Op, value: str, shard: Shard) -> Dim:
    if value in op.operands:
        return rule.operands[op.operands.index(value)][shard.dim]
    return rule.results[op.results.index(value)][shard.dim]


def _why(rule: Rule, op: Op, value: str, shard: Shard) -> str:
    dim = _dim_of(rule, op, value, shard)
    parts = [" x ".join(str(rule.size[f]) for f in product) for product in dim]
    seen = f"{len(parts)} parts of {', '.join(parts)}" if len(parts) > 1 else parts[0]
    return f"{op.call.name} sees it as {seen}"


def _proposal(
    flow: Dataflow,
    rules: Mapping[str, Rule],
    pin: Pin,
    dim: Dim,
    rule: Rule,
    num: int,
    lines_up: LinesUp,
) -> Shard | None:
    """The placement of the same dim that lines up over ``num`` ranks and gives each a part."""
    assert isinstance(pin.placement, Shard)
    at, given = pin.placement.dim, with_unit(pin.placement, 1)
    size = flow.metas[pin.value].shape[at]
    minor = pin.stated is not None and with_unit(on_dim(pin.stated, at), 1) != given
    # The blocks of a minor axis are the pieces of the major one, for any statement.
    cuts = [given] if minor else [Shard(at), given]
    first = dim[0]
    if len(dim) > 1 and not minor:
        parts = tuple(math.prod(rule.size[f] for f in product) for product in dim)
        cuts.append(Shard(at, parts))
    elif (rule.whole.intersection(first[:1]) or len(first) > 2) and not minor:
        cuts.append(Shard(at, rule.size[first[0]]))  # fused projections: (three heads width)
    every = (with_unit(cut, unit) for cut in dict.fromkeys(cuts) for unit in _units(rules))
    trials = [counted(trial, size) for trial in every if fits(trial, size)]
    for trial in sorted(trials, key=lambda trial: not _is_even(trial, size, num)):
        if all(index_sets(trial, size, num)) and lines_up(trial, num):
            return one_block(trial) if minor else trial
    return None


def _is_even(shard: Shard, size: int, num: int) -> bool:
    return len({sum(hi - lo for lo, hi in held) for held in index_sets(shard, size, num)}) == 1


def _units(rules: Mapping[str, Rule]) -> list[int]:
    """1, and the sizes of the minor factors of the program's compound dims, ascending."""
    units = {1}
    for rule in rules.values():
        for dims in (*rule.operands, *rule.results):
            for product in (product for dim in dims for product in dim):
                sizes = [rule.size[f] for f in product]
                units.update(math.prod(sizes[i:]) for i in range(1, len(sizes)))
    return sorted(units)
