"""Emits the steps of an attention op as a ring (Liu et al. 2023, arXiv:2310.01889).

    k_1, v_1   = shift(k, v)                    to the next rank, under the compute of part 0
    out_0, ... = attention_part(q, k, v)        this rank's keys
    k_2, v_2   = shift(k_1, v_1)                under the compute of part 1
    out_1, ... = attention_part(q, k_1, v_1, out_0, ...)

In part i, rank r has the keys of rank r - i. A chunk that no rank sees is not sent and not used.
The forward folds (out, log-sum-exp) pairs in the order of the parts. The backward receives the
chunks again and computes each part's gradients from the final output and log-sum-exp. The gradients
of a chunk are sent to its rank and added there in float32, in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtensor.numerics import accumulation_dtype
from dtensor.private_torch import pytree
from dtensor.sharding.ops.call import Meta, OpCall, Operand
from dtensor.sharding.plan.choose.sequence_axes import first_query
from dtensor.sharding.plan.choose.split_through_op import through
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.emit.values import Copy, Emitter
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.rules.registry import rule_for
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.rules.tables.attention import OPTIONS, arguments_of, visible_shifts
from dtensor.sharding.spec.placements import Shard, same, with_shift

_dt: Any = torch.ops.dt
_aten: Any = torch.ops.aten


def emit_op(emitter: Emitter, op: Op) -> None:
    """Emit an op of the program: the steps of a ring if its strategy is one, else one step."""
    strategies = emitter.strategies_of(op)
    axis = next((axis for axis, strategy in strategies.items() if strategy.kind == "ring"), None)
    if axis is None:
        emitter.compute(op, op.results, op.stage, op.phase)
    else:
        _Ring(emitter, op, axis, emitter.operands_of(op, op.stage, op.phase)).emit()


@dataclass(slots=True)
class _Ring:
    """The body of one attention op on ``axis``. ``operands``: copies of its operands, whose tokens
    are split over the axis; ``shift``: the present shift; ``chunk``: the operands that travel, at
    this shift, by index.
    """

    emitter: Emitter
    op: Op
    axis: str
    operands: Sequence[Copy]
    shift: int = 0
    chunk: dict[int, Copy] = field(default_factory=dict[int, Copy])

    def emit(self) -> None:
        """Emit the steps, and record the results as copies of the op's values."""
        final = self._backward() if first_query(self.op) else self._forward()
        for value, copy in zip(self.op.results, final, strict=True):
            if value is not None and copy is not None:
                self.emitter.add_copy(value, copy)

    def _forward(self) -> Sequence[Copy | None]:
        """Fold the parts of the output and the log-sum-exp."""
        call = self.op.call
        out_meta, lse_meta = call.results
        wide = Meta(call.result.shape, accumulation_dtype(call.result.dtype))
        out = lse = None
        for part, is_last in self._parts(1):
            args = (*self._tensors(3), out, lse, *self._scores(), self.shift, is_last)
            names = self.op.results if is_last else self._names(f"part{part}")
            metas = (out_meta if is_last else wide, lse_meta)
            kwargs = self._options("sinks") if part == 0 else self._options()
            out, lse = self._compute(_dt.attention_part.default, args, kwargs, metas, names)
        return out, lse

    def _backward(self) -> Sequence[Copy | None]:
        """Add the parts of the gradients: of the queries here, of keys and values at home."""
        call = self.op.call
        q_meta, k_meta, v_meta = call.operands[1:4]
        wide = Meta(q_meta.shape, accumulation_dtype(q_meta.dtype))
        dq: Copy | None = None
        part = 0
        sums: list[Copy] = []
        arriving: list[Copy] = []
        for part, _ in self._parts(2):
            args = (*self._tensors(6), dq, *self._scores(), self.shift)
            names, metas = self._names(f"part{part}"), (wide, k_meta, v_meta)
            target = _dt.attention_part_backward.default
            dq, *gradients = self._compute(target, args, self._options(), metas, names)
            sums = self._added(sums, arriving, part - 1)
            if self.shift:
                home = self._names(f"home{part}")[1:]
                gradients = self._send(gradients, -self.shift, home)
            arriving = gradients
        sums = self._added(sums, arriving, part)
        assert dq is not None
        finals = zip(self.op.results, (dq, *sums), call.results, strict=True)
        return [self._cast(copy, meta, name) for name, copy, meta in finals if copy and meta]

    def _added(self, sums: Sequence[Copy], terms: Sequence[Copy], part: int) -> list[Copy]:
        """Emit the addition of the terms of a part to ``sums``, in float32 for 16 bits."""
        wide = [Meta(t.spec.shape, accumulation_dtype(t.spec.dtype)) for t in terms]
        if not sums:
            return [self._cast(term, meta) for term, meta in zip(terms, wide, strict=True)]
        added: list[Copy] = []
        for total, term, meta, name in zip(
            sums, terms, wide, self._names(f"sum{part}")[1:], strict=True
        ):
            added += self._compute(_aten.add.Tensor, (total, term), {}, (meta,), (name,))
        return added

    def _cast(self, copy: Copy, meta: Meta, name: str | None = None) -> Copy:
        """Return the copy in the dtype of ``meta``; emit the cast if needed."""
        if copy.spec.dtype == meta.dtype:
            return copy
        name = name or self.emitter.fresh(f"{copy.name}_cast")
        kwargs = {"dtype": meta.dtype}
        return self._compute(_aten._to_copy.default, (copy,), kwargs, (meta,), (name,))[0]

    # -- chunks --------------------------------------------------------------------------------

    def _parts(self, first_key: int) -> Iterator[tuple[int, bool]]:
        """Yield (number, whether it is the last) of each part that some rank sees. Its chunk has
        arrived in ``chunk``, and the next chunk is on its way."""
        travelling = [first_key, first_key + 1, *self._token_values()]
        here = {at: self.operands[at] for at in travelling}
        moving = [at for at, x in here.items() if isinstance(x.spec.placement(self.axis), Shard)]
        tokens = self.operands[first_key].spec.placement(self.axis)
        assert isinstance(tokens, Shard)
        shifts = visible_shifts(self.op.call, tokens, self.emitter.mesh.axis_size(self.axis))
        for part, shift in enumerate(shifts):
            self.shift, self.chunk, after = shift, here, dict(here)
            if part + 1 < len(shifts):
                following = shifts[part + 1]
                bases = [self.operands[at].name for at in moving]
                names = [self.emitter.fresh(f"{base}_shifted{following}") for base in bases]
                moved = self._send([here[at] for at in moving], following - shift, names)
                after |= dict(zip(moving, moved, strict=True))
            yield part, part + 1 == len(shifts)
            here = after

    def _token_values(self) -> list[int]:
        """Return the indices of the operands that are values of the key tokens."""
        return [value.index for value in arguments_of(self.op.call)["key_values"] or ()]

    def _scores(self) -> tuple[Any, Any]:
        """Return ``is_causal`` and ``scale``."""
        arguments = arguments_of(self.op.call)
        return arguments["is_causal"], arguments["scale"]

    def _tensors(self, num: int) -> list[Copy]:
        """Return the first operands, with the present chunk."""
        return [self.chunk.get(at, self.operands[at]) for at in range(num)]

    def _options(self, *others: str) -> dict[str, Any]:
        """Return the given options and ``others``, with copies for operands and the present
        chunk."""
        copies, arguments = self._tensors(len(self.operands)), arguments_of(self.op.call)
        given = {name: arguments[name] for name in (*OPTIONS, *others) if arguments[name]}
        return pytree.tree_map_only(Operand, lambda o: copies[o.index], given)

    def _names(self, what: str) -> tuple[str, ...]:
        names = (name or self.op.name for name in self.op.results)
        return tuple(self.emitter.fresh(f"{name}_{what}") for name in names)

    def _send(self, copies: Sequence[Copy], distance: int, names: Sequence[str]) -> list[Copy]:
        """Emit the message that moves the values ``distance`` ranks on."""
        num = self.emitter.mesh.axis_size(self.axis)
        moves: list[Move] = []
        for copy in copies:
            shard = copy.spec.placement(self.axis)
            assert isinstance(shard, Shard)
            moved = with_shift(shard, shard.shift + distance, num)
            dst = copy.spec.with_placements(**{self.axis: moved})
            moves.append(Move("shift", self.axis, copy.spec, dst))
        once = all(copy.once for copy in copies)
        step = Redistribute(
            results=tuple(names),
            operands=tuple(copy.name for copy in copies),
            moves=tuple(moves),
            phase=self.op.phase,
            stage=self.op.stage,
            once=once and self.emitter.request.num_microbatches > 1,
            source=self.op.source,
            why=f"{self.op.name} is a ring over {self.axis}",
        )
        self.emitter.steps.append(step)
        return [
            replace(copy, name=name, spec=move.dst, phase=self.op.phase)
            for copy, name, move in zip(copies, names, moves, strict=True)
        ]

    # -- ops -----------------------------------------------------------------------------------

    def _compute(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        metas: Sequence[Meta | None],
        names: Sequence[str | None],
    ) -> list[Any]:
        """Emit a local op whose arguments contain copies; return copies of its results. On each
        axis the op takes the strategy of its rule that reads the copies without a message."""
        copies: list[Copy] = []

        def operand(copy: Copy) -> Operand:
            copies.append(copy)
            return Operand(len(copies) - 1)

        operand_args, options = pytree.tree_map_only(
            Copy, operand, (tuple(args), {k: v for k, v in kwargs.items() if v is not None})
        )
        call = OpCall(
            target=target,
            args=operand_args,
            kwargs=tuple(options.items()),
            operands=tuple(Meta(copy.spec.shape, copy.spec.dtype) for copy in copies),
            results=tuple(metas),
            multiple=len(metas) > 1,
        )
        name = self.emitter.fresh(f"{self.op.name}_in_ring")  # no name of the program: not repeated
        op = replace(
            self.op, name=name, call=call, results=tuple(names), expand=None, checkpoint=None,
            operands=tuple(copy.name for copy in copies), calls=(),
        )  # fmt: skip
        rule = rule_for(call)
        mesh = self.emitter.mesh
        strategies = {
            axis: _strategy(rule, copies, axis, mesh.axis_size(axis))
            for axis in (choice.axis for choice in self.emitter.chosen)
        }
        specs = tuple(
            None
            if meta is None
            else self.emitter.spec_of(meta, {a: s.results[i] for a, s in strategies.items()})
            for i, meta in enumerate(metas)
        )
        return self.emitter.emit_op(
            op, rule, strategies, copies, specs, names, self.op.stage, self.op.phase
        )


def _strategy(rule: Rule, copies: Sequence[Copy], axis: str, num: int) -> Strategy:
    """Return the strategy of the rule that reads the copies with their placements on the axis."""
    placements = [copy.spec.placement(axis) for copy in copies]
    candidates = [*rule.fixed_strategies] + [
        through(rule, index, placement, num)
        for index, placement in enumerate(placements)
        if isinstance(placement, Shard)
    ]
    for strategy in candidates:
        if isinstance(strategy, Strategy) and all(
            same(a, copy.spec.placement(axis), copy.spec.shape, num)
            for a, copy in zip(strategy.operands, copies, strict=True)
        ):
            return strategy
    raise AssertionError(f"{rule} does not read {placements} on {axis}")
