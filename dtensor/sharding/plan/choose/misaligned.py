"""Reports a pin that does not line up with how the program uses its dim, with a fix.

    q.weight f32[352,16] pinned Row() over tp=4, viewed as 22 heads of 16: ranks would hold 88 rows,
    5 heads and a half.  fix: state tp=Shard(0, unit=16)

The fix is another placement of the same dim, or a smaller axis if there are fewer parts than ranks
(2 KV heads over 4 ranks). It is checked against the whole program before it is proposed. The
misaligned uses are found by opened_factors.py. The planner then redistributes the activation before
the op, or, with misaligned="gather", treats the pin as a stored placement (gather_stored.py).
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
from dtensor.sharding.spec.fits import fits
from dtensor.sharding.spec.placements import (
    Shard,
    counted,
    index_sets,
    on_dim,
    one_block,
    with_unit,
)

LinesUp = Callable[[Shard, int], bool]
"""Whether a placement over a number of ranks lines up with the program."""
MisalignedUse = tuple[Op, str, Shard]
"""An op, the value that it reads or writes, and the placement with which it does not line up."""
_MAX_AXES_TRIED = 3
_GATHER_FIX = 'or parallelize(..., misaligned="gather"): stored so, and gathered before use'


@dataclass(frozen=True, slots=True)
class MisalignedPin:
    """A pin over ``num`` ranks of ``axis`` that does not line up with ``uses`` in the program."""

    flow: Dataflow
    rules: Mapping[str, Rule]
    pin: Pin
    uses: Sequence[MisalignedUse]
    axis: str
    num: int

    def record(self) -> Misaligned:
        """Return the record of the pin that the plan prints. The reason is the first op in program
        order with which the pin does not line up."""
        uses = {op.name: (op, value, shard) for op, value, shard in reversed(self.uses)}
        op, value, shard = next(uses[op.name] for op in self.flow.ops if op.name in uses)
        assert isinstance(self.pin.placement, Shard)
        why = _reason(self.rules[op.name], op, value, shard)
        return Misaligned(
            self.axis, self.pin.placement, self.pin.by, why, op.source, ops=tuple(uses)
        )

    def error(self, label: str, lines_up: LinesUp) -> PlanningError:
        """Return the error about the pin. ``label``: the user's name of the pinned value."""
        (op, value, shard), pin, axis, num = self.uses[0], self.pin, self.axis, self.num
        assert isinstance(pin.placement, Shard)
        meta, dim = self.flow.metas[pin.value], pin.placement.dim
        pinned_name = label if pin.by == label else f"{label} ({pin.by})"
        reason = _reason(self.rules[op.name], op, value, shard)
        lines = [
            f"the pin {axis}={pin.stated or pin.placement!r} on {pinned_name} does not line up "
            f"with the program's use of that dim.",
            f"  {label}: {meta}, dim {dim}: {num} ranks hold "
            f"{_shard_lengths(pin.placement, meta.shape[dim], num)} of {meta.shape[dim]}",
            f"  {reason} in {value}: {self.flow.metas[value]}",
        ]
        if op.source:
            lines.append(f"  {op.source}: {op.source_text}")
        fix = self.fix(lines_up)
        parts = _num_parts(self.rules[op.name], _rule_dim(self.rules[op.name], op, value, shard))
        if not fix.startswith(f"{axis}=") and any(not s for s in index_sets(Shard(0), parts, num)):
            lines.append(
                f"  {parts} parts over {num} ranks: {_shard_lengths(Shard(0), parts, num)}"
            )
        lines += [f"fix: {fix or f'{axis}=Replicate(), or another dim'}", f"  {_GATHER_FIX}"]
        return PlanningError("\n".join(lines))

    def fix(self, lines_up: LinesUp) -> str:
        """Return the text of a fix: another placement of the same dim for which ``lines_up`` is
        true, over the axis or over fewer ranks; "" if there is none."""
        (op, value, shard), axis, num = self.uses[0], self.axis, self.num
        rule = self.rules[op.name]
        dim = _rule_dim(rule, op, value, shard)
        for ranks in (num, *_smaller_axes(num, _num_parts(rule, dim))):
            fix = _aligned_placement(self.flow, self.rules, self.pin, dim, rule, ranks, lines_up)
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


def _num_parts(rule: Rule, dim: Dim) -> int:
    """Return how many parts of a dim ranks can hold: the size of its smallest major factor."""
    return min((rule.size[product[0]] for product in dim if product), default=1)


def _smaller_axes(num: int, parts: int) -> list[int]:
    """Return smaller axis sizes to try: first divisors of ``num``, then divisors of ``parts``."""
    dividing_num = [n for n in range(num - 1, 1, -1) if num % n == 0]
    dividing_parts = [n for n in range(num - 1, 1, -1) if parts % n == 0]
    return list(dict.fromkeys((*dividing_num, *dividing_parts)))[:_MAX_AXES_TRIED]


def _shard_lengths(shard: Shard, size: int, num: int) -> str:
    """Return the lengths of the shards on the first 8 ranks as text, ``6, 6, 6, 4``."""
    lengths = [sum(hi - lo for lo, hi in s) for s in index_sets(shard, size, num)]
    return ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")


def _rule_dim(rule: Rule, op: Op, value: str, shard: Shard) -> Dim:
    """Return the factors of the dim of ``value`` that ``shard`` splits, by the op's rule."""
    if value in op.operands:
        return rule.operands[op.operands.index(value)][shard.dim]
    return rule.results[op.results.index(value)][shard.dim]


def _reason(rule: Rule, op: Op, value: str, shard: Shard) -> str:
    """Return how the op uses the dim: ``aten.view.default sees it as 22 x 16``."""
    dim = _rule_dim(rule, op, value, shard)
    parts = [" x ".join(str(rule.size[f]) for f in product) for product in dim]
    factors = f"{len(parts)} parts of {', '.join(parts)}" if len(parts) > 1 else parts[0]
    return f"{op.call.name} sees it as {factors}"


def _aligned_placement(
    flow: Dataflow,
    rules: Mapping[str, Rule],
    pin: Pin,
    dim: Dim,
    rule: Rule,
    num: int,
    lines_up: LinesUp,
) -> Shard | None:
    """Return a placement of the pinned dim for which ``lines_up`` is true over ``num`` ranks and
    which gives each rank a part, or None. Placements that give ranks equal parts are preferred.
    ``dim``: the factors, in ``rule``, of the dim with which the pin does not line up."""
    assert isinstance(pin.placement, Shard)
    pinned_dim, pinned = pin.placement.dim, with_unit(pin.placement, 1)
    size = flow.metas[pin.value].shape[pinned_dim]
    # If the axis cuts the pieces of another axis, its blocks are those pieces, whatever is stated.
    minor = pin.stated is not None and with_unit(on_dim(pin.stated, pinned_dim), 1) != pinned
    cuts = [pinned] if minor else [Shard(pinned_dim), pinned]
    first = dim[0]
    if len(dim) > 1 and not minor:
        parts = tuple(math.prod(rule.size[f] for f in product) for product in dim)
        cuts.append(Shard(pinned_dim, parts))
    elif (rule.whole.intersection(first[:1]) or len(first) > 2) and not minor:
        # a block for each fused projection: (three heads width)
        cuts.append(Shard(pinned_dim, rule.size[first[0]]))
    candidates = (with_unit(cut, unit) for cut in dict.fromkeys(cuts) for unit in _units(rules))
    trials = [counted(trial, size) for trial in candidates if fits(trial, size, num)]
    for trial in sorted(trials, key=lambda trial: not _is_even(trial, size, num)):
        if all(index_sets(trial, size, num)) and lines_up(trial, num):
            return one_block(trial) if minor else trial
    return None


def _is_even(shard: Shard, size: int, num: int) -> bool:
    """Return whether all ranks hold equally many indices."""
    return (
        len({sum(hi - lo for lo, hi in intervals) for intervals in index_sets(shard, size, num)})
        == 1
    )


def _units(rules: Mapping[str, Rule]) -> list[int]:
    """Return the units to try, ascending: 1, and sizes of minor factors of compound dims."""
    units = {1}
    for rule in rules.values():
        for dims in (*rule.operands, *rule.results):
            for product in (product for dim in dims for product in dim):
                sizes = [rule.size[f] for f in product]
                units.update(math.prod(sizes[i:]) for i in range(1, len(sizes)))
    return sorted(units)
