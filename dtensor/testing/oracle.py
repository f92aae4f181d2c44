"""Runs the strategies of a rule on real shards and compares the results with the global op.

    case = Case(call=..., rule=..., operands=(x, w), results=(y,), seed=0)  # x: (4, 6), w: (6, 2)
    for strategy in one_axis(case.rule, 3):             # and pairs of them, two_axes(case.rule)
        trial(case, (3,), (strategy,))                  # None, or "result 0: rank 1 has ..."

Each rank runs the local call on its shards. Its result must be its shard of the global result,
after pending results are reduced. Pending operands are random summands, so that a rule that is
right only if one rank has the whole value is found. An op that may write in place must give the
same bits in place. Nothing is communicated; the same seed gives the same shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtensor.frontend.graph import meta_of
from dtensor.numerics import REDUCTIONS, fold
from dtensor.private_torch import pytree
from dtensor.sharding.ops.call import Local, Meta, OpCall, Operand, RowsError
from dtensor.sharding.ops.in_place import in_place, writes_of
from dtensor.sharding.rules.rule import Assignment, FactorSharding, Rule, Strategy
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Ragged
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.testing.rows import Rows, indices, rows_of_call, slot_operand

Tensors = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor | None, ...]

UNDEFINED = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_like.default",
        "empty_permuted.default",
        "empty_strided.default",
        "new_empty.default",
        "new_empty_strided.default",
    )
)
"""Ops whose results have undefined values: only their shapes are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call with the values of its global operands and results. ``seed``: for random summands."""

    call: OpCall
    rule: Rule
    operands: Tensors
    results: Results
    seed: int
    values: bool = True  # whether values are compared; False for `UNDEFINED` ops

    @property
    def tolerance(self) -> float | None:
        """The tolerance of the comparison; None if values are not compared."""
        tensors = (*self.operands, *(r for r in self.results if r is not None))
        return tolerance_of(x.dtype for x in tensors) if self.values else None


def call_of(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, Tensors]:
    """Return the OpCall of a call, without the types of its results, and its tensors."""
    tensors: list[torch.Tensor] = []

    def operand(tensor: torch.Tensor) -> Operand:
        tensors.append(tensor)
        return Operand(len(tensors) - 1)

    new_args = pytree.tree_map_only(torch.Tensor, operand, tuple(args))
    new_kwargs = tuple(
        (k, pytree.tree_map_only(torch.Tensor, operand, v)) for k, v in kwargs.items()
    )
    call = OpCall(
        target=target,
        args=new_args,
        kwargs=new_kwargs,
        operands=tuple(meta_of(t) for t in tensors),
        results=(),
    )
    return call, tuple(tensors)


def run(call: OpCall, operands: Sequence[torch.Tensor]) -> Results:
    """Run a call on these tensors and return its results as a tuple."""
    out = _returned(call, operands)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def run_global(call: OpCall, operands: Sequence[torch.Tensor]) -> tuple[OpCall, Results]:
    """Run a call on global tensors. Return the call with the types of its results, and the
    results."""
    out = _returned(call, operands)
    multiple = isinstance(out, (tuple, list))
    results = tuple(out) if multiple else (out,)
    metas = tuple(None if r is None else meta_of(r) for r in results)
    return replace(call, results=metas, multiple=multiple), results


def _returned(call: OpCall, operands: Sequence[torch.Tensor]) -> Any:
    def tensor(operand: Operand) -> torch.Tensor:
        return operands[operand.index]

    args, kwargs = pytree.tree_map_only(Operand, tensor, (call.args, dict(call.kwargs)))
    return call.target(*args, **kwargs)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- strategies of a trial -------------------------------------------------------------------------


def one_axis(rule: Rule, num: int) -> Iterator[Strategy]:
    """Yield the strategies of the rule on an axis of ``num`` ranks, also with blocks, units and
    sizes."""
    strategies: dict[Strategy, None] = dict.fromkeys(rule.strategies(num))
    for assignment in _assignments(rule, num):
        strategy = rule.apply(assignment, num)
        if strategy is not None:
            strategies[strategy] = None
    yield from strategies


def _assignments(rule: Rule, num: int) -> Iterator[dict[str, FactorSharding]]:
    """Yield ways to split each factor, together with the factors that are concatenated with it in a
    dim: evenly, in two blocks, at units of 2, in blocks of 1 and the other elements, in a zigzag,
    and in sizes that leave the first of ``num`` ranks empty; and alone as rows of experts."""
    for by_token_and_expert in _rows_assignments(rule):
        yield from by_token_and_expert
    for factor in rule.factors():
        group = sorted(rule.partners().get(factor, {factor}))
        sizes = [rule.size[f] for f in group]
        yield {f: FactorSharding((s,)) for f, s in zip(group, sizes, strict=True)}
        if all(s % 2 == 0 for s in sizes):
            yield {f: FactorSharding((s // 2,) * 2) for f, s in zip(group, sizes, strict=True)}
            yield {f: FactorSharding((s,), 2) for f, s in zip(group, sizes, strict=True)}
        if all(s > 2 for s in sizes):
            yield {f: FactorSharding((1, s - 1)) for f, s in zip(group, sizes, strict=True)}
            yield {f: FactorSharding((s,), zigzag=True) for f, s in zip(group, sizes, strict=True)}
        by_rank = [(0,) * (num - 2) + (1, s - 1) if num > 2 else (0, s) for s in sizes]
        yield {
            f: FactorSharding((s,), sizes=n) for f, s, n in zip(group, sizes, by_rank, strict=True)
        }


def _rows_assignments(rule: Rule) -> Iterator[list[dict[str, FactorSharding]]]:
    """Yield ways to split each factor by token and by expert, as the rows of 3 experts."""
    for factor in () if rule.experts else rule.factors():
        if factor not in rule.partners():
            by_token = FactorSharding((rule.size[factor],), ragged=Ragged("token", 3, 1))
            by_expert = FactorSharding((3,), ragged=Ragged("expert", 3, 1))
            yield [{factor: by_token}, {factor: by_expert}]


def two_axes(rule: Rule) -> Iterator[tuple[Strategy, Strategy]]:
    """Yield pairs of strategies for a 2x2 mesh: different strategies on the two axes, and one
    factor that both axes split."""
    split_strategies = rule.strategies(2)[1:]
    yield from itertools.combinations_with_replacement(rule.fixed_strategies[1:], 2)
    yield from itertools.permutations(split_strategies, 2)
    for assignment in _assignments(rule, 2):
        split_again = {f: split.minor_sharding(2) for f, split in assignment.items()}
        yield from _pairs(rule, assignment, split_again)
    for by_token, by_expert in _rows_assignments(rule):
        yield from _pairs(rule, by_token, by_expert)


def _pairs(rule: Rule, *assignments: Assignment) -> Iterator[tuple[Strategy, Strategy]]:
    first, second = (rule.apply(assignment, 2) for assignment in assignments)
    if first is not None and second is not None:
        yield first, second


# -- one trial -----------------------------------------------------------------------------------


def trial(case: Case, shape: tuple[int, ...], strategies: Sequence[Strategy]) -> str | None:
    """Run the call on a mesh of this shape under one strategy for each axis. Return a description
    of the first error in its results, or None. Raises RowsError if the planner refuses the
    strategy, because a local call would depend on the number or the positions of rows."""
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(shape)})
    generator = generator_of(case.seed)
    # A wrong rule can make an op raise anything. The exception is then the result of the trial.
    try:
        specs = [
            TensorSpec(tuple(x.shape), x.dtype, mesh, tuple(s.operands[i] for s in strategies))
            for i, x in enumerate(case.operands)
        ]
        wanted = [
            None
            if x is None
            else TensorSpec(tuple(x.shape), x.dtype, mesh, tuple(s.results[i] for s in strategies))
            for i, x in enumerate(case.results)
        ]
        rows = rows_of_call(
            case.call, case.rule, case.operands, case.results, [*specs, *wanted], generator
        )
        if rows is None:
            shards = [cut(x, s, generator) for x, s in zip(case.operands, specs, strict=True)]
        else:
            shards = _cut_rows(case, rows, specs, wanted, generator)
        outputs: list[Results] = []
        for rank in range(mesh.size):
            local = Local(tuple(specs), tuple(wanted), mesh.coordinates(rank))
            local_call = case.rule.local_call(case.call, local)
            operands = [with_random_strides(s[rank], generator) for s in shards]
            outputs.append(run(local_call, operands))
            for base in _in_place_bases(case.call, specs, wanted):
                # State is contiguous. For other strides torch adds 16-bit numbers in another order.
                copies = [x.clone(memory_format=torch.contiguous_format) for x in operands]
                (result, *_) = run(local_call, copies)
                run(in_place(local_call, base), copies)
                if result is None or not _equal_or_nan(copies[base], result):
                    return f"in place, rank {rank} has other values"
    except RowsError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for i, (global_result, spec) in enumerate(zip(case.results, wanted, strict=True)):
        if global_result is None or spec is None:
            continue
        if any(len(out) != len(case.results) for out in outputs):
            return f"the ranks return {[len(out) for out in outputs]} tensors"
        is_slot = i == 2 and case.call.name == "dt.route.default"
        problem = compare(
            [out[i] for out in outputs], global_result, spec, case.tolerance, rows, is_slot=is_slot
        )
        if problem is not None:
            return f"result {i}: {problem}"
    return None


def _equal_or_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all elements are equal, or NaN in both tensors."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _in_place_bases(
    call: OpCall, specs: Sequence[TensorSpec], results: Sequence[TensorSpec | None]
) -> tuple[int, ...]:
    """Return the indices of the operands into which the op may write its result."""
    writes = writes_of(call)
    return () if writes is None else tuple(i for i in writes.base if specs[i] == results[0])


def with_random_strides(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return ``x`` with other strides, or half of the time unchanged. In a program a shard can be a
    transposed view or a slice."""
    if x.dim() < 2 or torch.randint(2, (), generator=generator) == 0:
        return x
    dim = int(torch.randint(x.dim() - 1, (), generator=generator))
    return x.transpose(dim, -1).contiguous().transpose(dim, -1)


def _cut_rows(
    case: Case,
    rows: Rows,
    specs: Sequence[TensorSpec],
    results: Sequence[TensorSpec | None],
    generator: torch.Generator,
) -> list[list[torch.Tensor]]:
    """Return the shards of each operand in rank order, of a call on rows of experts."""
    ragged = next(s for s in (*specs, *results) if s is not None and s.ragged is not None)
    mesh, slots = ragged.mesh, slot_operand(case.call)
    shards: list[list[torch.Tensor]] = []
    for i, (x, spec) in enumerate(zip(case.operands, specs, strict=True)):
        if i not in case.rule.counts:
            shards.append(cut(x, spec, generator, rows, is_slot=i == slots))
            continue
        at = [mesh.coordinates(rank) for rank in range(mesh.size)]
        shards.append([rows.counts(ragged, c, indices(spec.intervals(0, c))) for c in at])
    return shards


def cut(
    x: torch.Tensor,
    spec: TensorSpec,
    generator: torch.Generator,
    rows: Rows | None = None,
    *,
    is_slot: bool = False,
) -> list[torch.Tensor]:
    """Return the shards of the global tensor ``x`` in rank order. On pending axes the ranks get
    random values whose reduction is ``x``. ``rows``: the rows of experts, if the spec is ragged;
    ``is_slot``: whether ``x`` holds their slots."""
    mesh = spec.mesh
    values: dict[tuple[int, ...], torch.Tensor] = {(): x}  # by coordinates on the pending axes
    reduced = spec
    pending: list[str] = []
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            pending.append(axis)
            reduced = reduced.with_placements(**{axis: REPLICATE})
            values = {
                (*coordinates, i): part
                for coordinates, value in values.items()
                for i, part in enumerate(
                    REDUCTIONS[placement.op].parts_of(value, mesh.axis_size(axis), generator)
                )
            }
    shards: list[torch.Tensor] = []
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        value = values[tuple(coordinates[axis] for axis in pending)]
        shards.append(_shard(value, reduced, coordinates, rows, is_slot=is_slot))
    return shards


def _shard(
    x: torch.Tensor,
    spec: TensorSpec,
    at: Mapping[str, int],
    rows: Rows | None,
    *,
    is_slot: bool = False,
) -> torch.Tensor:
    if rows is None or spec.ragged is None:
        return shard_of(x, spec, at)
    return rows.shard(x, spec, at, is_slot=is_slot)


def compare(
    outputs: Sequence[torch.Tensor | None],
    global_result: torch.Tensor,
    spec: TensorSpec,
    tolerance: float | None,
    rows: Rows | None = None,
    *,
    is_slot: bool = False,
) -> str | None:
    """Compare the result of each rank with its shard of the global result, after pending results
    are reduced. Return the first difference, or None. ``tolerance``: None to compare only shapes
    and dtypes. ``rows``, ``is_slot``: see `cut`."""
    mesh = spec.mesh
    reduced = spec.with_placements(
        **{axis: REPLICATE for axis, p in spec.sharding.items() if isinstance(p, Partial)}
    )
    expected = [
        _shard(global_result, reduced, mesh.coordinates(r), rows, is_slot=is_slot)
        for r in range(mesh.size)
    ]
    shards: list[torch.Tensor] = []
    for rank, out in enumerate(outputs):
        shape = tuple(expected[rank].shape)
        if out is None or tuple(out.shape) != shape or out.dtype != global_result.dtype:
            found = "nothing" if out is None else str(meta_of(out))
            return f"rank {rank} has {found}, its shard is {Meta(shape, global_result.dtype)}"
        shards.append(out)
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            shards = [
                fold([shards[r] for r in mesh.group(rank, axis)], placement.op)
                for rank in range(mesh.size)
            ]
    if tolerance is None:
        return None
    for rank, shard in enumerate(shards):
        if not equal(shard, expected[rank], tolerance):
            return f"rank {rank} has other values"
    return None


# For values of a magnitude of about 1, by the dtype of a call that has the least precision.
_TOLERANCES = (
    (1e-1, (torch.bfloat16,)),
    (1e-2, (torch.float16,)),
    (1e-4, (torch.float32, torch.complex64)),
)


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return how much the order of a sum may change results of operands of these dtypes."""
    all_dtypes = set(dtypes)
    return next((t for t, coarse in _TOLERANCES if all_dtypes & set(coarse)), 1e-9)


def equal(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Return whether floats are equal within the tolerance, and integers and bools exactly."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))
