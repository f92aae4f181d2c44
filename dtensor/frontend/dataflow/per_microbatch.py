"""Rewrite batch norms in training so that each microbatch is normalized by its own statistics.

    batch_norm(x [n c s])   ->   x as [(d m r) c s]      m microbatches of r rows on each of d ranks
                                 wide = [(d r) (m c) s]
                                 batch_norm(wide)        c channels for each microbatch

The reference is torch's loop over the microbatches. If ranks split the batch, microbatch i is chunk
i of each rank's rows. Microbatches have one size. The existing rules and expansions of batch norm
apply to the wide tensor, whose channels the axis of microbatches splits. Running statistics are
updated once per microbatch and call, in order; after m updates with momentum a they are

    running (1-a)^m + sum over i of a (1-a)^(m-1-i) statistic_i
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
_TRAINING_ARGUMENT = {_FORWARD: 5, _WITHOUT_STATS: 3, _BACKWARD: 7}
"""The position of the argument that is True in training."""
_RUNNING = (3, 4)
"""The positions of the running statistics, among the arguments and among the results."""


def per_microbatch(request: Request) -> Request:
    """Return the request with each batch norm over the split batch rewritten for microbatches.

    Raises PlanningError if microbatches differ in size, or if the forward reads running statistics.
    """
    if request.num_microbatches == 1:
        return request
    flow = request.flow
    cuts = _cuts(request)
    if not cuts:
        return request
    batch_norms = _BatchNorms(flow, cuts)
    used_names = {*flow.metas, *(op.name for op in flow.ops)}
    metas = dict(flow.metas)
    ops: list[Op] = []
    counters = batch_norms.counters()
    for op in flow.ops:
        if op.name in cuts:
            writer = _Writer(op, used_names, metas)
            batch_norms.rewrite(op, writer)
            ops += writer.ops
        elif op.name in counters:
            call = replace(op.call, args=(op.call.args[0], request.num_microbatches))
            ops.append(replace(op, call=call))
        else:
            ops.append(op)
    labels = (op.module for op in flow.ops if op.name in cuts and op.phase == "forward")
    new_flow = replace(flow, ops=tuple(ops))
    return replace(request, flow=new_flow, by_microbatch=tuple(dict.fromkeys(labels)))


@dataclass(frozen=True, slots=True)
class Cut:
    """How microbatches cut dim 0: its size is ``ranks * num * rows``, for ``num`` microbatches."""

    ranks: int
    num: int
    rows: int


def _cuts(request: Request) -> dict[str, Cut]:
    """Return how the microbatches cut the rows of each batch norm that would mix them, by op."""
    flow = request.flow
    batch_norms = {
        op.name: op
        for op in flow.ops
        if (position := _TRAINING_ARGUMENT.get(op.call.target)) is not None
        and op.call.args[position] is True
    }
    if not batch_norms:
        return {}
    shards = shards_of_rows(request, batch_norms)
    return {name: _cut(request, batch_norms[name], shard) for name, shard in shards.items()}


def shards_of_rows(request: Request, ops: Mapping[str, Op]) -> dict[str, Shard]:
    """Return how microbatches cut dim 0 of the first operand of each of ``ops`` that they cut, by
    op."""
    flow, rules = request.flow, rules_of(request.flow)
    axis_problem = axis_problem_of(request, inner_mesh(request), rules)
    # Let the split of the rows propagate through batch norms, whose rule forbids it.
    open_rules = {
        name: replace(rule, whole=frozenset()) if name in ops else rule
        for name, rule in rules.items()
    }
    pins = list(axis_problem.pins[MICROBATCH_AXIS].values())
    num = request.num_microbatches
    shardings = reach(flow, open_rules, pins, MICROBATCH_AXIS, num).shardings
    return {
        name: shards[0]
        for name, op in ops.items()
        if (shards := [s for s in shardings.get(op.operands[0], ()) if s.dim == 0])
    }


def _cut(request: Request, op: Op, shard: Shard) -> Cut:
    """Return how a split of the rows into microbatches cuts a batch norm. Raises PlanningError if
    the sizes differ, or if a microbatch has one value for each channel."""
    meta, num = op.call.operands[0], request.num_microbatches
    values_per_channel = math.prod(meta.shape) // meta.shape[1]
    fact = ""
    if values_per_channel == num:
        fact = "a batch norm in training needs more than one value of each channel."
    return cut_of_rows(request, op, shard, "batch_norm", num_values=values_per_channel, fact=fact)


def cut_of_rows(
    request: Request, op: Op, shard: Shard, option: str, *, num_values: int = 0, fact: str = ""
) -> Cut:
    """Return how a split of dim 0 of the first operand into microbatches cuts it. Raises
    PlanningError if the sizes differ, or because of ``fact``.

    ``option``: the argument of `train_step` that states "per_microbatch". ``num_values``: the
    number of microbatches must be smaller, if it is not 0.
    """
    meta, num = op.call.operands[0], request.num_microbatches
    size = meta.shape[0]
    ranks = len(blocks_of(shard, size))
    rows = index_sets(shard, size, num)
    batch = request.flow.metas[request.batch[0]].shape[0]
    counts = [n for n in range(1, num) if not num_values or n < num_values]
    allowed = [n for n in counts if batch % (n * ranks) == 0]
    if size % (ranks * num) or rows != index_sets(Shard(0, ranks), size, num):
        fact = f'{option}="per_microbatch" takes microbatches of one size.'
        other = f"a batch that is a multiple of {ranks * num}, as with DataLoader(drop_last=True)"
    elif fact:
        other = "a larger batch"
    else:
        return Cut(ranks, num, size // (ranks * num))
    lines = [
        fact,
        f"  {op.operands[0]}: {meta}, its rows in {num} microbatches: "
        f"{', '.join(str(length(indices)) for indices in rows)}",
        *([f"  {op.source}: {op.source_text}"] if op.source else []),
        f"fix: {f'microbatches={allowed[-1]}, or ' if allowed else ''}{other}",
    ]
    raise PlanningError("\n".join(lines))


@dataclass(frozen=True, slots=True)
class _Value:
    name: str
    fake: torch.Tensor


@dataclass(slots=True)
class _Writer:
    """Writes the ops that replace ``op``, with its line and module.

    ``used_names`` and ``metas``: the names and the metas of all values so far; both are extended.
    """

    op: Op
    used_names: set[str]
    metas: dict[str, Meta]
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    ops: list[Op] = field(default_factory=list[Op])

    def value(self, name: str) -> _Value:
        with self.mode:
            meta = self.metas[name]
            return _Value(name, torch.empty(meta.shape, dtype=meta.dtype))

    def call(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> _Value:
        """Add a call and return its only result, whose name is ``name`` or a new name."""
        (result,) = self.call_multiple(target, (name,), *args, **kwargs)
        assert result is not None
        return result

    def call_multiple(
        self, target: Any, names: tuple[str | None, ...], *args: Any, **kwargs: Any
    ) -> tuple[_Value | None, ...]:
        """Add a call with several results and return the results."""
        operands: list[_Value] = []

        def encode(value: Any) -> Any:
            if isinstance(value, _Value):
                operands.append(value)
                return Operand(len(operands) - 1)
            return tuple(value) if isinstance(value, list) else value

        def fake_of(value: Any) -> Any:
            return value.fake if isinstance(value, _Value) else value

        with self.mode:
            out = target(*map(fake_of, args), **kwargs)
        multiple = isinstance(out, (tuple, list))
        short_name = target.__name__.split(".")[0].lstrip("_")
        op_name = unused(f"{self.op.name}_{short_name}", self.used_names)
        results = tuple(
            None if fake is None else _Value(name or unused(op_name, self.used_names), fake)
            for name, fake in zip(names, tuple(out) if multiple else (out,), strict=True)
        )
        call = OpCall(
            target=target,
            args=tuple(encode(a) for a in args),
            kwargs=tuple(kwargs.items()),
            operands=tuple(_meta(v.fake) for v in operands),
            results=tuple(None if v is None else _meta(v.fake) for v in results),
            multiple=multiple,
        )
        self.metas.update((v.name, _meta(v.fake)) for v in results if v is not None)
        self.ops.append(
            replace(
                self.op,
                name=op_name,
                call=call,
                operands=tuple(v.name for v in operands),
                results=tuple(None if v is None else v.name for v in results),
                expand=expansion if call.name in COMPOSITES else None,
                over_batch=call.name in OVER_BATCH,
            )
        )
        return results

    # -- the dims of a microbatch ---------------------------------------------------------------

    def widen(self, x: _Value, cut: Cut) -> _Value:
        """Reshape [(d m r) c ..] to [(d r) (m c) ..]."""
        rows, channels, *inner = x.fake.shape
        parts = self.call(aten.reshape.default, x, [cut.ranks, cut.num, cut.rows, channels, *inner])
        swapped = self.call(aten.permute.default, parts, [0, 2, 1, *range(3, 4 + len(inner))])
        shape = [rows // cut.num, cut.num * channels, *inner]
        return self.call(aten.reshape.default, swapped, shape)

    def unwiden(self, y: _Value, cut: Cut, name: str | None) -> _Value:
        """Reshape [(d r) (m c) ..] to [(d m r) c ..]."""
        rows, channels, *inner = y.fake.shape
        channels //= cut.num
        parts = self.call(aten.reshape.default, y, [cut.ranks, cut.rows, cut.num, channels, *inner])
        swapped = self.call(aten.permute.default, parts, [0, 2, 1, *range(3, 4 + len(inner))])
        return self.call(
            aten.reshape.default, swapped, [rows * cut.num, channels, *inner], name=name
        )

    def tile(self, vector: _Value | None, cut: Cut) -> _Value | None:
        """Repeat [c] for each microbatch: [(m c)]."""
        if vector is None:
            return None
        size = vector.fake.shape[0]
        expanded = self.call(aten.expand.default, vector, [cut.num, size])
        return self.call(aten.reshape.default, expanded, [cut.num * size])

    def sum_microbatches(self, vector: _Value, cut: Cut, name: str | None) -> _Value:
        """Sum [(m c)] over microbatches: [c]."""
        size = vector.fake.shape[0] // cut.num
        rows = self.call(aten.reshape.default, vector, [cut.num, size])
        return self.call(aten.sum.dim_IntList, rows, [0], name=name)

    # -- running statistics ----------------------------------------------------------------------

    def weights(
        self, num: int, index: int, num_calls: int, momentum: float, dtype: torch.dtype
    ) -> _Value:
        """Return the weights of the microbatches' statistics in the running statistic, [m 1]:
        momentum * (1 - momentum) ** (number of later updates). This is call ``index`` of
        ``num_calls`` calls of the module."""
        options: dict[str, Any] = dict(dtype=dtype, device=torch.device("cpu"))
        num_later = self.call(aten.arange.start_step, 0, num, 1, **options)
        num_later = self.call(aten.mul.Tensor, num_later, -float(num_calls))
        num_later = self.call(aten.add.Tensor, num_later, float(num * num_calls - 1 - index))
        decay = self.call(aten.pow.Scalar, 1.0 - momentum, num_later)
        return self.call(aten.unsqueeze.default, self.call(aten.mul.Tensor, decay, momentum), 1)

    def update_running(
        self, running: _Value, new: _Value, weights: _Value, decay: float, name: str | None
    ) -> None:
        """Compute ``decay * running`` plus the weighted sum of the microbatches' statistics."""
        num, dtype = weights.fake.shape[0], new.fake.dtype
        rows = self.call(aten.reshape.default, new, [num, running.fake.shape[0]])
        total = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, rows, weights), [0])
        if running.fake.dtype != dtype:
            running = self.call(aten._to_copy.default, running, dtype=dtype)
        if decay != 1.0:
            running = self.call(aten.mul.Tensor, running, decay)
        self.call(aten.add.Tensor, running, total, name=name)


def _meta(fake: torch.Tensor) -> Meta:
    return Meta(tuple(int(s) for s in fake.shape), fake.dtype)


@dataclass(slots=True)
class _BatchNorms:
    """The batch norms of a program that are rewritten for microbatches.

    ``calls``: (i, n) for each op with running statistics, which is call i of n of its module.
    """

    flow: Dataflow
    cuts: Mapping[str, Cut]
    calls: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def __post_init__(self) -> None:
        """Number the calls of each chain of batch norms that update the same running statistics."""
        next_calls: dict[str, str] = {}
        for op in self.flow.ops:
            if op.name in self.cuts and op.call.target == _FORWARD:
                for position in _RUNNING:
                    self._check_unread(op, position)
                producer = self.flow.producers.get(_argument(op, 3))
                if producer is not None:  # the previous call updates the running mean
                    next_calls[producer.name] = op.name
                self.calls[op.name] = (0, 1)
        for first in set(self.calls) - set(next_calls.values()):
            chain = [first]
            while chain[-1] in next_calls:
                chain.append(next_calls[chain[-1]])
            self.calls.update((name, (i, len(chain))) for i, name in enumerate(chain))

    def _check_unread(self, op: Op, position: int) -> None:
        """Raise PlanningError if another op than a batch norm reads this running statistic."""
        for reader, _ in self.flow.consumers.get(op.results[position] or "", ()):
            if reader.call.target == aten._to_copy.default:  # to the buffer's dtype
                users = self.flow.consumers.get(reader.results[0] or "", ())
                is_batch_norm = all(user.call.target == _BACKWARD for user, _ in users)
            else:
                is_batch_norm = reader.name in self.cuts
            if not is_batch_norm:
                raise PlanningError(
                    f"the running statistics of a batch norm are read in the forward that moves "
                    f"them, and each microbatch moves them.\n"
                    f"  {op.results[position]} is read by {reader.call.name}\n"
                    + (f"  {reader.source}: {reader.source_text}\n" if reader.source else "")
                    + "fix: use microbatches=1, or read them in another program"
                )

    def counters(self) -> set[str]:
        """Return the names of the ops that count batches (num_batches_tracked += 1)."""
        labels = {item.name: item.label for item in self.flow.inputs}
        counters: set[str] = set()
        for name, (index, _) in self.calls.items():
            mean = next(_argument(op, 3) for op in self.flow.ops if op.name == name)
            if index or mean not in labels:
                continue
            counter = labels[mean].removesuffix("running_mean") + "num_batches_tracked"
            value = next((n for n, label in labels.items() if label == counter), None)
            while value is not None:
                adds = [op for op, _ in self.flow.consumers.get(value, ()) if _adds_one(op)]
                counters.update(op.name for op in adds)
                value = adds[0].results[0] if len(adds) == 1 else None
        return counters

    def rewrite(self, op: Op, w: _Writer) -> None:
        """Write the ops that replace a batch norm; their results get the names of its results."""
        cut = self.cuts[op.name]
        args: list[Any] = [
            w.value(op.operands[a.index]) if isinstance(a, Operand) else a for a in op.call.args
        ]
        match op.call.target:
            case target if target == _BACKWARD:
                grad, x, weight, *_ = args
                mean, invstd, train, eps, output_mask = args[5:]
                tensors = (w.widen(grad, cut), w.widen(x, cut), w.tile(weight, cut))
                new_args = (*tensors, None, None, mean, invstd, train, eps, output_mask)
                dx, *vectors = w.call_multiple(target, (None,) * 3, *new_args)
                if dx is not None and op.results[0] is not None:
                    w.unwiden(dx, cut, op.results[0])
                for vector, name in zip(vectors, op.results[1:], strict=True):
                    if vector is not None and name is not None:
                        w.sum_microbatches(vector, cut, name)
            case target if target == _WITHOUT_STATS:
                x, weight, bias, train, momentum, eps = args
                vectors = (w.tile(weight, cut), w.tile(bias, cut))
                new_args = (w.widen(x, cut), *vectors, train, momentum, eps)
                y, *_ = w.call_multiple(target, (None, *op.results[1:]), *new_args)
                assert y is not None
                w.unwiden(y, cut, op.results[0])
            case target:
                x, weight, bias, mean, var, train, momentum, eps = args
                # With momentum 1 and zeros, the op returns the statistics of each microbatch.
                zeros = w.call(
                    aten.full.default,
                    [cut.num * mean.fake.shape[0]],
                    0.0,
                    dtype=mean.fake.dtype,
                    device=torch.device("cpu"),
                )
                vectors = (w.tile(weight, cut), w.tile(bias, cut))
                new_args = (w.widen(x, cut), *vectors, zeros, zeros, train, 1.0, eps)
                names = (None, *op.results[1:3], None, None)
                results = w.call_multiple(target, names, *new_args)
                y, _, _, *statistics = (v for v in results if v is not None)
                w.unwiden(y, cut, op.results[0])
                index, num_calls = self.calls[op.name]
                dtype = statistics[0].fake.dtype
                weights = w.weights(cut.num, index, num_calls, momentum, dtype)
                # The first call decays the running statistic, for all updates of all calls.
                decay = 1.0 if index else (1.0 - momentum) ** (cut.num * num_calls)
                for running, new, name in zip((mean, var), statistics, op.results[3:], strict=True):
                    w.update_running(running, new, weights, decay, name)


def _argument(op: Op, position: int) -> str:
    """Return the name of the value that is this argument of an op."""
    operand = op.call.args[position]
    assert isinstance(operand, Operand)
    return op.operands[operand.index]


def _adds_one(op: Op) -> bool:
    return op.call.target == aten.add.Tensor and op.call.args[1:] == (1,)
