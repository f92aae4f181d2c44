"""The oracle: a rule's strategies, each carried out on real shards and compared with the op whole.

    case = Case(call=..., rule=..., operands=(x, w), results=(y,), seed=0)  # x: (4, 6), w: (6, 2)
    for strategy in one_axis(case.rule, 3):             # and pairs of them, two_axes(case.rule)
        trial(case, (3,), (strategy,))                  # None, or "result 0: rank 1 has ..."

Operands are cut to shards, pending ones into *random* summands, so that a rule that is right only
for "rank 0 has it all" is found out; each rank's localised call is run; each rank's result is
compared with its piece of the global one, pending results reduced first; what an op may write in
place it is to make so to the same bits. Tried are all that the
rule offers, factors cut in blocks and at units, and two axes, also both on one factor.

Invariants: nothing is communicated; the same seed gives the same shards. It cannot find rules whose
local form differs from the global one: those must be written. Not here: strategies that the rule
does not offer (missing.py), which calls are tried and the backward (certificates.py).
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
from dtensor.sharding.ops.call import Local, Meta, OpCall, Operand
from dtensor.sharding.ops.in_place import in_place, writes_of
from dtensor.sharding.rules.rule import FactorSharding, Rule, Strategy
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec

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
"""Ops whose results are not defined: only their shapes are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call with the values of its operands and of its global results."""

    call: OpCall
    rule: Rule
    operands: Tensors
    results: Results
    seed: int
    values: bool = True  # compare values, not only shapes: False for empty_like

    @property
    def tolerance(self) -> float | None:
        """None where values are not compared."""
        tensors = (*self.operands, *(r for r in self.results if r is not None))
        return tolerance_of(x.dtype for x in tensors) if self.values else None


def call_of(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, Tensors]:
    """The OpCall with its tensors taken out; its results are not filled in."""
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> Operand:
        tensors.append(tensor)
        return Operand(len(tensors) - 1)

    taken = pytree.tree_map_only(torch.Tensor, take, tuple(args))
    named = tuple((k, pytree.tree_map_only(torch.Tensor, take, v)) for k, v in kwargs.items())
    call = OpCall(
        target=target,
        args=taken,
        kwargs=named,
        operands=tuple(meta_of(t) for t in tensors),
        results=(),
    )
    return call, tuple(tensors)


def run(call: OpCall, operands: Sequence[torch.Tensor]) -> Results:
    """Run a call on these tensors; its results as a tuple."""
    out = _returned(call, operands)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def run_whole(call: OpCall, operands: Sequence[torch.Tensor]) -> tuple[OpCall, Results]:
    """The same on global tensors; the call with its results' types filled in."""
    out = _returned(call, operands)
    multiple = isinstance(out, (tuple, list))
    results = tuple(out) if multiple else (out,)
    metas = tuple(None if r is None else meta_of(r) for r in results)
    return replace(call, results=metas, multiple=multiple), results


def _returned(call: OpCall, operands: Sequence[torch.Tensor]) -> Any:
    def given(operand: Operand) -> torch.Tensor:
        return operands[operand.index]

    args, kwargs = pytree.tree_map_only(Operand, given, (call.args, dict(call.kwargs)))
    return call.target(*args, **kwargs)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- what is tried -------------------------------------------------------------------------------


def one_axis(rule: Rule, num: int) -> Iterator[Strategy]:
    strategies: dict[Strategy, None] = dict.fromkeys(rule.strategies(num))
    for assignment in _assignments(rule):
        strategy = rule.apply(assignment, num)
        if strategy is not None:
            strategies[strategy] = None
    yield from strategies


def _assignments(rule: Rule) -> Iterator[dict[str, FactorSharding]]:
    """Each factor, with those it stands in a sum with, cut plainly, in blocks and at units."""
    for factor in rule.factors():
        group = sorted(rule.partners().get(factor, {factor}))
        sizes = [rule.size[f] for f in group]
        yield {f: FactorSharding((s,)) for f, s in zip(group, sizes, strict=True)}
        if all(s % 2 == 0 for s in sizes):
            yield {f: FactorSharding((s // 2,) * 2) for f, s in zip(group, sizes, strict=True)}
            yield {f: FactorSharding((s,), 2) for f, s in zip(group, sizes, strict=True)}
        if all(s > 2 for s in sizes):
            yield {f: FactorSharding((1, s - 1)) for f, s in zip(group, sizes, strict=True)}


def two_axes(rule: Rule) -> Iterator[tuple[Strategy, Strategy]]:
    plain = rule.strategies(2)[1:]
    yield from itertools.combinations_with_replacement(rule.fixed_strategies[1:], 2)
    yield from itertools.permutations(plain, 2)
    for assignment in _assignments(rule):
        finer = {f: c.cut_again(2) for f, c in assignment.items()}
        first, second = rule.apply(assignment, 2), rule.apply(finer, 2)
        if first is not None and second is not None:
            yield first, second


# -- one trial -----------------------------------------------------------------------------------


def trial(case: Case, shape: tuple[int, ...], strategies: Sequence[Strategy]) -> str | None:
    """What goes wrong when the call is run under a strategy on each axis; None if nothing."""
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(shape)})
    generator = generator_of(case.seed)
    # Whatever a rule makes fail is this function's answer, so every exception is caught here.
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
        shards = [cut(x, s, generator) for x, s in zip(case.operands, specs, strict=True)]
        outputs: list[Results] = []
        for rank in range(mesh.size):
            local = Local(tuple(specs), tuple(wanted), mesh.coordinates(rank))
            here = case.rule.local_call(case.call, local)
            operands = [restrided(s[rank], generator) for s in shards]
            outputs.append(run(here, operands))
            for base in _bases(case.call, specs, wanted):
                # state is contiguous, and torch adds up 16 bits otherwise where it is not
                changed = [x.clone(memory_format=torch.contiguous_format) for x in operands]
                (result, *_) = run(here, changed)
                run(in_place(here, base), changed)
                if result is None or not _same_bits(changed[base], result):
                    return f"in place, rank {rank} has other values"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for i, (whole, spec) in enumerate(zip(case.results, wanted, strict=True)):
        if whole is None or spec is None:
            continue
        if any(len(out) != len(case.results) for out in outputs):
            return f"the ranks return {[len(out) for out in outputs]} tensors"
        problem = compare([out[i] for out in outputs], whole, spec, case.tolerance)
        if problem is not None:
            return f"result {i}: {problem}"
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are equal, NaN to NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _bases(
    call: OpCall, specs: Sequence[TensorSpec], results: Sequence[TensorSpec | None]
) -> tuple[int, ...]:
    """The operands that the op may change in place."""
    writes = writes_of(call)
    return () if writes is None else tuple(at for at in writes.base if specs[at] == results[0])


def restrided(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``x`` under other strides, one time in two: a shard may be a transposed view or a slice."""
    if x.dim() < 2 or torch.randint(2, (), generator=generator) == 0:
        return x
    dim = int(torch.randint(x.dim() - 1, (), generator=generator))
    return x.transpose(dim, -1).contiguous().transpose(dim, -1)


def cut(x: torch.Tensor, spec: TensorSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """The shards of global ``x`` in rank order; pending values are cut into random parts."""
    mesh = spec.mesh
    # By the coordinates on the pending axes only: along the others a value is the same.
    values: dict[tuple[int, ...], torch.Tensor] = {(): x}
    kept = spec
    pending: list[str] = []
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            pending.append(axis)
            kept = kept.with_placements(**{axis: REPLICATE})
            values = {
                (*where, i): part
                for where, value in values.items()
                for i, part in enumerate(
                    REDUCTIONS[placement.op].parts_of(value, mesh.axis_size(axis), generator)
                )
            }
    shards: list[torch.Tensor] = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        shards.append(shard_of(values[tuple(here[a] for a in pending)], kept, here))
    return shards


def compare(
    outputs: Sequence[torch.Tensor | None],
    whole: torch.Tensor,
    spec: TensorSpec,
    tolerance: float | None,
) -> str | None:
    """Each rank's result against its piece of the global one, pending values reduced first.

    ``tolerance=None``: only shapes and dtypes.
    """
    mesh = spec.mesh
    held: list[torch.Tensor] = []
    for rank, out in enumerate(outputs):
        shape = spec.local_shape(mesh.coordinates(rank))
        if out is None or tuple(out.shape) != shape or out.dtype != whole.dtype:
            got = "nothing" if out is None else str(meta_of(out))
            return f"rank {rank} has {got}, its shard is {Meta(shape, whole.dtype)}"
        held.append(out)
    final = spec
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            final = final.with_placements(**{axis: REPLICATE})
            held = [
                fold([held[r] for r in mesh.group(rank, axis)], placement.op)
                for rank in range(mesh.size)
            ]
    for rank, out in enumerate(held if tolerance is not None else ()):
        assert tolerance is not None
        expected = shard_of(whole, final, mesh.coordinates(rank))
        if not equal(out, expected, tolerance):
            return f"rank {rank} has other values"
    return None


# By the coarsest dtype of a call, relative to its values, whose magnitude is about 1.
_TOLERANCES = (
    (1e-1, (torch.bfloat16,)),
    (1e-2, (torch.float16,)),
    (1e-4, (torch.float32, torch.complex64)),
)


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """What the order of summation may change in results, with operands of these dtypes."""
    held = set(dtypes)
    return next((t for t, coarse in _TOLERANCES if held & set(coarse)), 1e-9)


def equal(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Equal up to the order of summation."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))
