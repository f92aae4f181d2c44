"""Batch norm of each microbatch: its statistics are those of one microbatch, not of the batch.

    batch_norm(x [n c s])   ->   x as [(d m r) c s]      m microbatches of r rows on each of d ranks
                                 wide = [(d r) (m c) s]
                                 batch_norm(wide)        m c channels, each microbatch its own

A microbatch is a part of dim 0, so that with its rows beside its channels no statistic is over
more; on the axis of microbatches the channels are split, and a microbatch has its c of them. So
the rules of batch norm, and its forms where ranks split the rows, serve as they are.

Running statistics move once for each microbatch, in the order of microbatches, whatever the
schedule: after m of them with momentum a

    running (1-a)^m + sum over i of a (1-a)^(m-1-i) statistic_i

which is a sum over microbatches. Batches are counted likewise. A module that is called C times in a
forward moves them m C times, as a loop over microbatches does.

The reference is torch's loop over the microbatches. With one rank these are ``x.chunk(m)``; where
ranks split the batch, the i-th is the i-th chunk of each rank's rows. Microbatches are of one size.
Not here: other ops that mix rows, which stay errors; batch norm in evaluation, which mixes none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.composites import COMPOSITES, OVER_BATCH, expansion
from dtensor.private_torch import FakeTensorMode
from dtensor.sharding.ops.call import Meta, OpCall, Operand
from dtensor.sharding.plan.choose.axis_problem import axis_problem_of, inner_mesh
from dtensor.sharding.plan.choose.opened_factors import reach
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.plan.planner import rules_of
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import unused
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Shard, blocks_of, index_sets, length

aten: Any = torch.ops.aten
_FORWARD = aten._native_batch_norm_legit_functional.default
_WITHOUT_STATS = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default
_TRAINS = {_FORWARD: 5, _WITHOUT_STATS: 3, _BACKWARD: 7}  # which argument says so
_RUNNING = (3, 4)  # results, and operands by the names of arguments, of running statistics


def per_microbatch(request: Request) -> Request:
    """The request whose batch norms over the split batch are each of one microbatch.

    PlanningError where microbatches differ in size, and where running statistics are read.
    """
    if request.num_microbatches == 1:
        return request
    flow = request.flow
    cuts = _cuts(request)
    if not cuts:
        return request
    calls = _Calls(flow, cuts)
    taken = {*flow.metas, *(op.name for op in flow.ops)}
    metas = dict(flow.metas)
    ops: list[Op] = []
    counted = calls.counters()
    for op in flow.ops:
        if op.name in cuts:
            writer = _Writer(op, taken, metas)
            calls.rewrite(op, writer)
            ops += writer.ops
        elif op.name in counted:
            call = replace(op.call, args=(op.call.args[0], request.num_microbatches))
            ops.append(replace(op, call=call))
        else:
            ops.append(op)
    labels = (op.module for op in flow.ops if op.name in cuts and op.phase == "forward")
    changed = replace(flow, ops=tuple(ops))
    return replace(request, flow=changed, by_microbatch=tuple(dict.fromkeys(labels)))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Dim 0 as (ranks, microbatches, rows)."""

    ranks: int
    num: int
    rows: int


def _cuts(request: Request) -> dict[str, _Cut]:
    """By op, how the microbatches cut the rows of each batch norm that would mix them."""
    flow, num = request.flow, request.num_microbatches
    mixing = {
        op.name: op
        for op in flow.ops
        if op.call.target in _TRAINS and op.call.args[_TRAINS[op.call.target]] is True
    }
    if not mixing:
        return {}
    rules = rules_of(flow)
    axis_problem = axis_problem_of(request, inner_mesh(request), rules)
    # for the split to pass them, these too may be cut in their rows
    open_rules = {n: replace(r, whole=frozenset()) if n in mixing else r for n, r in rules.items()}
    pins = list(axis_problem.pins[MICROBATCH_AXIS].values())
    split = reach(flow, open_rules, pins, MICROBATCH_AXIS, num).shardings
    cuts: dict[str, _Cut] = {}
    for name, op in mixing.items():
        value = op.operands[0]
        shards = [shard for shard in split.get(value, ()) if shard.dim == 0]
        if shards:
            cuts[name] = _cut(request, op, shards[0])
    return cuts


def _cut(request: Request, op: Op, shard: Shard) -> _Cut:
    meta, num = op.call.operands[0], request.num_microbatches
    size, *_ = meta.shape
    ranks = len(blocks_of(shard, size))
    held = index_sets(shard, size, num)
    batch = request.flow.metas[request.batch[0]].shape[0]
    values = math.prod(meta.shape) // meta.shape[1]  # of a channel
    divisors = [n for n in range(1, num) if batch % (n * ranks) == 0 and values > n]
    if size % (ranks * num) or held != index_sets(Shard(0, ranks), size, num):
        fact = 'batch_norm="per_microbatch" takes microbatches of one size.'
        other = f"a batch that is a multiple of {ranks * num}, as with DataLoader(drop_last=True)"
    elif values == num:
        fact = "a batch norm in training needs more than one value of each channel."
        other = "a larger batch"
    else:
        return _Cut(ranks, num, size // (ranks * num))
    lines = [
        fact,
        f"  {op.operands[0]}: {meta}, its rows in {num} microbatches: "
        f"{', '.join(str(length(each)) for each in held)}",
        *([f"  {op.source}: {op.source_text}"] if op.source else []),
        f"fix: {f'microbatches={divisors[-1]}, or ' if divisors else ''}{other}",
    ]
    raise PlanningError("\n".join(lines))


@dataclass(frozen=True, slots=True)
class _Value:
    name: str
    fake: torch.Tensor


@dataclass(slots=True)
class _Writer:
    """Puts ops in the place of one: ``op``'s line and module are theirs. ``metas``: of what there
    is so far."""

    op: Op
    taken: set[str]
    metas: dict[str, Meta]
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    ops: list[Op] = field(default_factory=list[Op])

    def value(self, name: str) -> _Value:
        with self.mode:
            meta = self.metas[name]
            return _Value(name, torch.empty(meta.shape, dtype=meta.dtype))

    def one(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> _Value:
        """The value of a call of one result; under ``name``, where it is one of the op's own."""
        (made,) = self.all(target, (name,), *args, **kwargs)
        assert made is not None
        return made

    def all(
        self, target: Any, names: tuple[str | None, ...], *args: Any, **kwargs: Any
    ) -> tuple[_Value | None, ...]:
        operands: list[_Value] = []

        def encoded(value: Any) -> Any:
            if isinstance(value, _Value):
                operands.append(value)
                return Operand(len(operands) - 1)
            return tuple(value) if isinstance(value, list) else value

        def fakes(value: Any) -> Any:
            return value.fake if isinstance(value, _Value) else value

        with self.mode:
            out = target(*map(fakes, args), **kwargs)
        multiple = isinstance(out, (tuple, list))
        results = tuple(out) if multiple else (out,)
        op_name = unused(f"{self.op.name}_{target.__name__.split('.')[0].lstrip('_')}", self.taken)
        made = tuple(
            None if fake is None else _Value(name or unused(op_name, self.taken), fake)
            for name, fake in zip(names, results, strict=True)
        )
        call = OpCall(
            target=target,
            args=tuple(encoded(a) for a in args),
            kwargs=tuple(kwargs.items()),
            operands=tuple(_meta(v.fake) for v in operands),
            results=tuple(None if v is None else _meta(v.fake) for v in made),
            multiple=multiple,
        )
        self.metas.update((v.name, _meta(v.fake)) for v in made if v is not None)
        self.ops.append(
            replace(
                self.op,
                name=op_name,
                call=call,
                operands=tuple(v.name for v in operands),
                results=tuple(None if v is None else v.name for v in made),
                expand=expansion if call.name in COMPOSITES else None,
                over_batch=call.name in OVER_BATCH,
            )
        )
        return made

    # -- the dims of a microbatch ---------------------------------------------------------------

    def wide(self, x: _Value, cut: _Cut) -> _Value:
        """[(d m r) c ..] as [(d r) (m c) ..]."""
        rows, channels, *rest = x.fake.shape
        parts = self.one(aten.reshape.default, x, [cut.ranks, cut.num, cut.rows, channels, *rest])
        beside = self.one(aten.permute.default, parts, [0, 2, 1, *range(3, 4 + len(rest))])
        return self.one(aten.reshape.default, beside, [rows // cut.num, cut.num * channels, *rest])

    def narrow(self, y: _Value, cut: _Cut, name: str | None) -> _Value:
        """The way back."""
        rows, channels, *rest = y.fake.shape
        channels_each = channels // cut.num
        parts = self.one(
            aten.reshape.default, y, [cut.ranks, cut.rows, cut.num, channels_each, *rest]
        )
        apart = self.one(aten.permute.default, parts, [0, 2, 1, *range(3, 4 + len(rest))])
        return self.one(
            aten.reshape.default, apart, [rows * cut.num, channels_each, *rest], name=name
        )

    def tiled(self, vector: _Value | None, cut: _Cut) -> _Value | None:
        """[c] as [(m c)]: the same for each microbatch."""
        if vector is None:
            return None
        size = vector.fake.shape[0]
        many = self.one(aten.expand.default, vector, [cut.num, size])
        return self.one(aten.reshape.default, many, [cut.num * size])

    def summed(self, vector: _Value, cut: _Cut, name: str | None) -> _Value:
        """[(m c)] to [c], over microbatches."""
        size = vector.fake.shape[0] // cut.num
        apart = self.one(aten.reshape.default, vector, [cut.num, size])
        return self.one(aten.sum.dim_IntList, apart, [0], name=name)

    # -- running statistics ----------------------------------------------------------------------

    def weights(
        self, num: int, turn: int, turns: int, momentum: float, dtype: torch.dtype
    ) -> _Value:
        """[m 1]: of each microbatch's statistic, by how many moves come after its own."""
        how: dict[str, Any] = dict(dtype=dtype, device=torch.device("cpu"))
        after = self.one(aten.arange.start_step, 0, num, 1, **how)
        after = self.one(aten.mul.Tensor, after, -float(turns))
        after = self.one(aten.add.Tensor, after, float(num * turns - 1 - turn))
        kept = self.one(aten.pow.Scalar, 1.0 - momentum, after)
        return self.one(aten.unsqueeze.default, self.one(aten.mul.Tensor, kept, momentum), 1)

    def moved(
        self, old: _Value, new: _Value, column: _Value, keep: float, name: str | None
    ) -> None:
        """The running statistic ``old``, of which ``keep`` is left, after all microbatches."""
        num, dtype = column.fake.shape[0], new.fake.dtype
        apart = self.one(aten.reshape.default, new, [num, old.fake.shape[0]])
        added = self.one(aten.sum.dim_IntList, self.one(aten.mul.Tensor, apart, column), [0])
        if old.fake.dtype != dtype:
            old = self.one(aten._to_copy.default, old, dtype=dtype)
        if keep != 1.0:
            old = self.one(aten.mul.Tensor, old, keep)
        self.one(aten.add.Tensor, old, added, name=name)


def _meta(fake: torch.Tensor) -> Meta:
    return Meta(tuple(int(s) for s in fake.shape), fake.dtype)


@dataclass(slots=True)
class _Calls:
    """The batch norms of a program that are of one microbatch each."""

    flow: Dataflow
    cuts: Mapping[str, _Cut]
    turns: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def __post_init__(self) -> None:
        """By op with running statistics, which call of its module it is, and of how many."""
        followers: dict[str, str] = {}
        for op in self.flow.ops:
            if op.name in self.cuts and op.call.target == _FORWARD:
                for at in _RUNNING:
                    self._check_unread(op, at)
                maker = self.flow.producers.get(_argument(op, 3))
                if maker is not None:
                    followers[maker.name] = op.name
                self.turns[op.name] = (0, 1)
        for first in set(self.turns) - set(followers.values()):
            chain = [first]
            while chain[-1] in followers:
                chain.append(followers[chain[-1]])
            self.turns.update((name, (turn, len(chain))) for turn, name in enumerate(chain))

    def _check_unread(self, op: Op, at: int) -> None:
        for reader, _ in self.flow.consumers.get(op.results[at] or "", ()):
            if reader.call.target == aten._to_copy.default:  # to the buffer's dtype
                users = self.flow.consumers.get(reader.results[0] or "", ())
                known = all(user.call.target == _BACKWARD for user, _ in users)
            else:
                known = reader.name in self.cuts
            if not known:
                raise PlanningError(
                    f"the running statistics of a batch norm are read in the forward that moves "
                    f"them, and each microbatch moves them.\n"
                    f"  {op.results[at]} is read by {reader.call.name}\n"
                    + (f"  {reader.source}: {reader.source_text}\n" if reader.source else "")
                    + "fix: use microbatches=1, or read them in another program"
                )

    def counters(self) -> set[str]:
        """The ops that count batches, beside running statistics that move with microbatches."""
        labels = {item.name: item.label for item in self.flow.inputs}
        counters: set[str] = set()
        for name, (turn, _) in self.turns.items():
            mean = next(_argument(op, 3) for op in self.flow.ops if op.name == name)
            if turn or mean not in labels:
                continue
            counter = labels[mean].removesuffix("running_mean") + "num_batches_tracked"
            value = next((n for n, label in labels.items() if label == counter), None)
            while value is not None:
                users = self.flow.consumers.get(value, ())
                adds = [op for op, _ in users if _counts(op)]
                counters.update(op.name for op in adds)
                value = adds[0].results[0] if len(adds) == 1 else None
        return counters

    def rewrite(self, op: Op, w: _Writer) -> None:
        cut = self.cuts[op.name]
        args: list[Any] = [
            w.value(op.operands[a.index]) if isinstance(a, Operand) else a for a in op.call.args
        ]
        match op.call.target:
            case target if target == _BACKWARD:
                grad, x, weight, *_ = args
                mean, invstd, train, eps, wanted = args[5:]
                wide = (w.wide(grad, cut), w.wide(x, cut), w.tiled(weight, cut))
                given = (*wide, None, None, mean, invstd, train, eps, wanted)
                dx, *vectors = w.all(target, (None,) * 3, *given)
                if dx is not None and op.results[0] is not None:
                    w.narrow(dx, cut, op.results[0])
                for vector, name in zip(vectors, op.results[1:], strict=True):
                    if vector is not None and name is not None:
                        w.summed(vector, cut, name)
            case target if target == _WITHOUT_STATS:
                x, weight, bias, train, momentum, eps = args
                given = (w.tiled(weight, cut), w.tiled(bias, cut), train, momentum, eps)
                y, *_ = w.all(target, (None, *op.results[1:]), w.wide(x, cut), *given)
                assert y is not None
                w.narrow(y, cut, op.results[0])
            case target:
                x, weight, bias, mean, var, train, momentum, eps = args
                # from nothing, all of the new: what is returned are the statistics themselves
                blank = w.one(
                    aten.full.default,
                    [cut.num * mean.fake.shape[0]],
                    0.0,
                    dtype=mean.fake.dtype,
                    device=torch.device("cpu"),
                )
                given = (w.tiled(weight, cut), w.tiled(bias, cut), blank, blank, train, 1.0, eps)
                made = w.all(target, (None, *op.results[1:3], None, None), w.wide(x, cut), *given)
                y, _, _, *new = (v for v in made if v is not None)
                w.narrow(y, cut, op.results[0])
                turn, turns = self.turns[op.name]
                column = w.weights(cut.num, turn, turns, momentum, new[0].fake.dtype)
                keep = 1.0 if turn else (1.0 - momentum) ** (cut.num * turns)
                for old, one, name in zip((mean, var), new, op.results[3:], strict=True):
                    w.moved(old, one, column, keep, name)


def _argument(op: Op, at: int) -> str:
    """The value that a batch norm is given as that argument."""
    operand = op.call.args[at]
    assert isinstance(operand, Operand)
    return op.operands[operand.index]


def _counts(op: Op) -> bool:
    return op.call.target == aten.add.Tensor and op.call.args[1:] == (1,)
