"""The oracle: a rule's certificate, by brute force.

    certify_call(torch.ops.aten.mm.default, (x, w)).wrong          # ()
    certify_autograd(lambda x: x.softmax(-1), x)                   # forward's and backward's ops

For one op and sample operands, every strategy that the op's rule offers is carried out: operands
are cut to shards, each rank's localised call is run, and each rank's result is compared with its
piece of the global result. Pending operands are cut into *random* summands, so that a rule that
is right only for "rank 0 has it all" is found out. Also tried: factors cut in blocks, at units,
and pairs of strategies on a 2x2 mesh, two of them on one factor.

A strategy that fails is *wrong*. One that the rule does not offer, though raw shards show that it
holds, is *missing*. Invariants: nothing is communicated; the same seed gives the same certificate.
It cannot find rules whose local form differs from the global one: those must be written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor.sharding.call import Local, Meta, OpCall, Operand
from dtensor.sharding.local import fold, local_call, shard_of
from dtensor.sharding.mesh import Mesh
from dtensor.sharding.placements import REPLICATE, Partial, Placement, Shard, pieces
from dtensor.sharding.rule import FactorSharding, Rule, Strategy
from dtensor.sharding.rules import rule_for
from dtensor.sharding.spec import TensorSpec

Tensors = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What brute force says of a rule: strategies that fail, that lack, and how many were run."""

    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    checked: int = 0

    def __add__(self, other: Certificate) -> Certificate:
        return Certificate(
            self.wrong + other.wrong, self.missing + other.missing, self.checked + other.checked
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A call with the values of its operands and of its global results."""

    call: OpCall
    rule: Rule
    operands: Tensors
    results: Results
    seed: int
    values: bool  # compare values, not only shapes: False for empty_like


def certify_call(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    nums: Sequence[int] = (2, 3),
    rule: Callable[[OpCall], Rule] = rule_for,
    seed: int = 0,
    values: bool = True,
    square: bool = True,
    missing: bool = False,
) -> Certificate:
    """The certificate of the rule for ``target(*args, **kwargs)``, tensors among them global.

    ``nums``: the axis sizes tried. ``square``: also pairs of strategies on a 2x2 mesh.
    ``missing``: also look for strategies that the rule lacks, for at most 3 tensors.
    """
    call, operands = call_of(target, args, kwargs or {})
    results = run(call, operands)
    call = replace(call, results=tuple(None if r is None else _meta(r) for r in results))
    found = rule(call)
    case = _Case(
        call=call, rule=found, operands=operands, results=results, seed=seed, values=values
    )
    wrong: list[str] = []
    checked = 0
    plans = itertools.chain(
        (((num,), (s,)) for num in nums for s in _one_axis(found, num)),
        (((2, 2), pair) for pair in _two_axes(found)) if square else (),
    )
    for shape, strategies in plans:
        checked += 1
        problem = _check(case, shape, strategies)
        if problem is not None:
            texts = " x ".join(_text(s) for s in strategies)
            wrong.append(f"{call.name} [{found}] on {shape} ranks: {texts}: {problem}")
    searchable = 1 <= len(operands) <= 3 and any(x.dim() for x in operands)
    lacking = tuple(_missing(case)) if missing and searchable else ()
    return Certificate(tuple(wrong), lacking, checked)


def certify_autograd(
    fn: Callable[..., torch.Tensor], *tensors: torch.Tensor, seed: int = 0
) -> Certificate:
    """Certify every op that ``fn`` and its backward run, each with the values that it really gets.

    The cotangent is random; values that forward saves for backward are consistent.
    """
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    recorder = _Recorder()
    with recorder:
        out = fn(*inputs)
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=_generator(seed))
    with recorder:
        torch.autograd.grad(out, [t for t in inputs if t.requires_grad], cotangent)
    total = Certificate()
    for target, args, kwargs in recorder.calls:
        total += certify_call(target, args, kwargs, seed=seed, square=False)
    return total


class _Recorder(TorchDispatchMode):
    """Notes each op with a copy of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
        if tree_leaves(tree_map_only(torch.Tensor, lambda t: t, kept)):
            self.calls.append((func, *kept))
        return func(*args, **(kwargs or {}))


# -- calls ---------------------------------------------------------------------------------------


def call_of(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, Tensors]:
    """The OpCall with its tensors taken out; its results are not filled in."""
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> Operand:
        tensors.append(tensor)
        return Operand(len(tensors) - 1)

    taken = tree_map_only(torch.Tensor, take, tuple(args))
    named = tuple((k, tree_map_only(torch.Tensor, take, v)) for k, v in kwargs.items())
    call = OpCall(
        target=target,
        args=taken,
        kwargs=named,
        operands=tuple(_meta(t) for t in tensors),
        results=(),
    )
    return call, tuple(tensors)


def run(call: OpCall, operands: Sequence[torch.Tensor]) -> Results:
    """Run a call on these tensors; its results as a tuple."""

    def given(operand: Operand) -> torch.Tensor:
        return operands[operand.index]

    args, kwargs = tree_map_only(Operand, given, (call.args, dict(call.kwargs)))
    out = call.target(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _meta(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tensor.dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- what is tried -------------------------------------------------------------------------------


def _one_axis(rule: Rule, num: int) -> Iterator[Strategy]:
    found: dict[Strategy, None] = dict.fromkeys(rule.strategies(num))
    for assignment in _assignments(rule):
        strategy = rule.apply(assignment, num)
        if strategy is not None:
            found[strategy] = None
    yield from found


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


def _two_axes(rule: Rule) -> Iterator[tuple[Strategy, Strategy]]:
    plain = rule.strategies(2)[1:]
    yield from itertools.combinations_with_replacement(rule.fixed_strategies()[1:], 2)
    yield from itertools.permutations(plain, 2)
    for assignment in _assignments(rule):
        finer = {
            f: FactorSharding(pieces([(Shard(0, c.blocks, c.unit), 2)], rule.size[f]), c.unit)
            for f, c in assignment.items()
        }
        first, second = rule.apply(assignment, 2), rule.apply(finer, 2)
        if first is not None and second is not None:
            yield first, second


def _text(strategy: Strategy) -> str:
    return f"{list(strategy.operands)} -> {list(strategy.results)}"


# -- one trial -----------------------------------------------------------------------------------


def _check(case: _Case, shape: tuple[int, ...], strategies: Sequence[Strategy]) -> str | None:
    """What goes wrong when the call is run under a strategy on each axis; None if nothing."""
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(shape)})
    generator = _generator(case.seed)
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
            here = local_call(case.rule, case.call, local)
            outputs.append(run(here, [s[rank] for s in shards]))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for i, (whole, spec) in enumerate(zip(case.results, wanted, strict=True)):
        if whole is None or spec is None:
            continue
        problem = _compare([out[i] for out in outputs], whole, spec, case.values)
        if problem is not None:
            return f"result {i}: {problem}"
    return None


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
                    _parts(value, placement.op, mesh.axis_size(axis), generator)
                )
            }
    shards: list[torch.Tensor] = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        shards.append(shard_of(values[tuple(here[a] for a in pending)], kept, here))
    return shards


def _parts(x: torch.Tensor, op: str, num: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors whose sum (max, min) is x."""

    def noise() -> torch.Tensor:
        if x.dtype.is_floating_point:
            return torch.randn(x.shape, dtype=x.dtype, generator=generator)
        return torch.randint(-3, 4, x.shape, dtype=torch.int64, generator=generator).to(x.dtype)

    if op == "sum":
        rest = [noise() for _ in range(num - 1)]
        total = x
        for part in rest:
            total = total - part
        return [total, *rest]
    owner = torch.randint(0, num, x.shape, generator=generator)
    sign = -1 if op == "max" else 1
    return [torch.where(owner == i, x, x + sign * noise().abs()) for i in range(num)]


def _compare(
    outputs: Sequence[torch.Tensor | None], whole: torch.Tensor, spec: TensorSpec, values: bool
) -> str | None:
    """Each rank's result against its piece of the global one, pending values reduced first."""
    mesh = spec.mesh
    held: list[torch.Tensor] = []
    for rank, out in enumerate(outputs):
        shape = spec.local_shape(mesh.coordinates(rank))
        if out is None or tuple(out.shape) != shape or out.dtype != whole.dtype:
            got = "nothing" if out is None else str(_meta(out))
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
    for rank, out in enumerate(held if values else ()):
        expected = shard_of(whole, final, mesh.coordinates(rank))
        if not equal(out, expected):
            return f"rank {rank} has other values"
    return None


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the order of summation."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return bool(torch.equal(a, b))
    tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


# -- what is missing -----------------------------------------------------------------------------


def _missing(case: _Case) -> Iterator[str]:
    """Strategies on one axis that raw shards show to hold and that the rule does not offer."""
    offered = {num: {(s.operands, s.results) for s in case.rule.strategies(num)} for num in (2, 3)}
    for operands in itertools.product(*(_input_choices(x) for x in case.operands)):
        if all(p == REPLICATE for p in operands):
            continue
        holding = [_holds(case, operands, num) for num in (2, 3)]
        if not all(holding):
            continue
        for results in itertools.product(
            *([p for p in first if p in second] for first, second in zip(*holding, strict=True))
        ):
            if (operands, results) not in offered[2] | offered[3]:
                yield f"{case.call.name}: {list(operands)} -> {list(results)}"


def _input_choices(x: torch.Tensor) -> tuple[Placement, ...]:
    pending = () if x.dtype == torch.bool else (Partial("sum"),)
    return (REPLICATE, *(Shard(d) for d in range(x.dim()) if x.shape[d] > 1), *pending)


def _holds(case: _Case, operands: Sequence[Placement], num: int) -> list[list[Placement]]:
    """For each result, the placements that describe what the ranks hold; empty: none."""
    mesh = Mesh(a=num)
    generator = _generator(case.seed + num)
    shards = [
        cut(x, TensorSpec(tuple(x.shape), x.dtype, mesh, (p,)), generator)
        for x, p in zip(case.operands, operands, strict=True)
    ]
    try:
        outputs = [run(case.call, [s[rank] for s in shards]) for rank in range(num)]
    except (RuntimeError, IndexError, ValueError):
        return []  # the op itself rejects these shards: the placement does not hold
    if any(len(out) != len(case.results) for out in outputs):
        return []
    found: list[list[Placement]] = []
    for i, whole in enumerate(case.results):
        if whole is None:
            found.append([REPLICATE])
            continue
        choices: list[Placement] = [REPLICATE, *(Shard(d) for d in range(whole.dim()))]
        choices += [] if whole.dtype == torch.bool else [Partial("sum")]
        specs = [TensorSpec(tuple(whole.shape), whole.dtype, mesh, (p,)) for p in choices]
        parts = [out[i] for out in outputs]
        found.append([s.placements[0] for s in specs if _compare(parts, whole, s, True) is None])
    return found if all(found) else []
