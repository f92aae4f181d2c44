"""Cuts rows of experts into shards, by token and by expert, for the oracle.

    rows = rows_of_call(call, rule, operands, results)      # of dt.expert_mm: from its counts
    rows.shard(x, spec, {"ep": 1})                          # the rows of the second rank's experts

A rank holds the rows of its tokens and experts in the order of the global rows. Its slots count
from its first token on, and its counts are the numbers of the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtensor.private_torch import OpOverload
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.plan.choose.routes import ROUTE
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.placements import Intervals, Ragged, Shard, cuts_experts, index_sets
from dtensor.sharding.spec.shards import block
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a route, sorted by expert. ``expert``: i64[N], the expert of each row, -1 for a
    row that is past the counts. ``slot``: i64[N], token * slots + j of each row."""

    expert: torch.Tensor
    slot: torch.Tensor
    experts: int
    slots: int

    def shard(
        self, x: torch.Tensor, spec: TensorSpec, at: Mapping[str, int], *, is_slot: bool = False
    ) -> torch.Tensor:
        """Return the shard of ``x`` of the rank at these coordinates. ``spec`` has a ragged dim and
        no pending axis. ``is_slot``: ``x`` holds slots."""
        tokens = self._held(spec, at, by_expert=False)
        index = self._index(spec, at, tokens)
        where = tuple(
            ((0, n),) if dim == spec.ragged_dim else spec.intervals(dim, at)
            for dim, n in enumerate(x.shape)
        )
        local = block(x, where).index_select(spec.ragged_dim, index)
        if not is_slot:
            return local.clone()
        positions = torch.searchsorted(tokens, torch.div(local, self.slots, rounding_mode="floor"))
        return positions * self.slots + local % self.slots

    def counts(self, spec: TensorSpec, at: Mapping[str, int], held: torch.Tensor) -> torch.Tensor:
        """Return how many rows of the experts ``held`` a rank has, whose rows are placed as
        ``spec``."""
        index = self._index(spec, at, self._held(spec, at, by_expert=False))
        expert = self.expert[index]
        return torch.bincount(expert[expert >= 0], minlength=self.experts)[held]

    def _index(self, spec: TensorSpec, at: Mapping[str, int], tokens: torch.Tensor) -> torch.Tensor:
        """Return the global rows that a rank holds, ascending."""
        experts = self._held(spec, at, by_expert=True)
        has_token = torch.isin(torch.div(self.slot, self.slots, rounding_mode="floor"), tokens)
        has_expert = torch.isin(self.expert, experts) | (not spec.is_by_expert)
        return (has_token & has_expert).nonzero().squeeze(1)

    def _held(self, spec: TensorSpec, at: Mapping[str, int], *, by_expert: bool) -> torch.Tensor:
        """Return the experts or the tokens whose rows the rank holds, ascending."""
        size = spec.shape[spec.ragged_dim]
        held = torch.arange(self.experts if by_expert else size // self.slots)
        for axis, p in spec.sharding.items():
            if isinstance(p, Shard) and p.ragged is not None and cuts_experts(p) == by_expert:
                sets = index_sets(p, size, spec.mesh.axis_size(axis))
                held = held[torch.isin(held, indices(sets[at[axis]]))]
        return held


def indices(intervals: Intervals) -> torch.Tensor:
    """Return the indices of these intervals, i64."""
    return torch.cat([torch.arange(0), *(torch.arange(lo, hi) for lo, hi in intervals)])


def rows_of_call(
    call: OpCall,
    rule: Rule,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor | None],
    specs: Sequence[TensorSpec | None],
    generator: torch.Generator,
) -> Rows | None:
    """Return the rows that the ragged specs of a call place; None if no spec is ragged. Where the
    call does not determine them, the numbers of rows of the experts and the slots are random."""
    spec = next((s for s in specs if s is not None and s.ragged is not None), None)
    ragged = None if spec is None else spec.ragged
    if spec is None or ragged is None:
        return None
    if call.name == ROUTE:
        counts, _, slot = results
    else:
        counts = operands[min(rule.counts)] if rule.counts else None
        at = slot_operand(call)
        slot = None if at is None else operands[at]
    num = spec.shape[spec.ragged_dim]
    if counts is None:
        expert = _random_experts(num, ragged, generator)
    else:
        expert = torch.arange(ragged.experts).repeat_interleave(counts)
        expert = torch.cat([expert, expert.new_full((num - len(expert),), -1)])
    if slot is None:
        slot = torch.randperm(num, generator=generator)
    return Rows(expert=expert, slot=slot, experts=ragged.experts, slots=ragged.slots)


def _random_experts(num: int, ragged: Ragged, generator: torch.Generator) -> torch.Tensor:
    """Return the expert of each of ``num`` rows, ascending. Some experts have no rows."""
    some = torch.randint(ragged.experts, (max(1, ragged.experts - 1),), generator=generator)
    chosen = some[torch.randint(len(some), (num,), generator=generator)]
    return chosen.sort().values


def slot_operand(call: OpCall) -> int | None:
    """Return the index of the operand that holds the slot of each row; None if there is none."""
    if not isinstance(call.target, OpOverload) or not call.name.startswith("dt."):
        return None
    names = [argument.name for argument in call.target._schema.arguments]
    value = call.args[names.index("slot")] if "slot" in names[: len(call.args)] else None
    return value.index if isinstance(value, Operand) else None
