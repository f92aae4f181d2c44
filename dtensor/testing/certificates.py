"""`dt.testing.certify`: is a rule right, forward and backward, under every placement it offers?

    print(dt.testing.certify("mylib::scale", x, weight))      # an op and the arguments of a call
    dt.testing.certify(torch.nn.functional.mse_loss, x, y)    # every op of forward and backward

By brute force (oracle.py): on 2 and 3 ranks and on a 2x2 mesh, every strategy of the rule is
carried out on real shards and compared with the op run whole: plain, in blocks, at units, pending;
with the values given, negated, and at other sizes, which divide and do not, down to 1 and fewer
than there are ranks; in half precision its dtypes are compared; and so is each op of its backward,
with a random cotangent.

A strategy that fails is *wrong*. One that the rule does not offer, though raw shards show that it
holds, is *missing* (missing.py). An op without a rule, for which torch has no decomposition either,
is *refused*. Invariants: the same seed gives the same certificate. Not here: whole programs under
placements (`dt.testing.assert_same`), samples of this library's ops (its tests have them).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.api.eager.views import functional_form
from dtensor.api.rule import OpRule, op_overloads
from dtensor.errors import PlanningError
from dtensor.private_torch import (
    OpOverload,
    TorchDispatchMode,
    decomposition_table,
    dispatch_has_kernel_for_dispatch_key,
    pytree,
)
from dtensor.sharding.ops import attention as attention  # the project's own
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules import NoRule, rule_for
from dtensor.sharding.rules.registry import builders
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.testing.missing import Missing, missing
from dtensor.testing.oracle import (
    UNDEFINED,
    Case,
    call_of,
    generator_of,
    one_axis,
    run_whole,
    trial,
    two_axes,
)
from dtensor.testing.vary import example, negated, other_sizes, to_half, without_error

RuleOf = Callable[[OpCall], Rule]
_MAX_SHOWN = 8  # of the strategies of a wrong rule, whose other sizes fail alike


@dataclass(frozen=True, slots=True)
class Certificate:
    """What brute force says of rules: strategies that fail, that lack, how many were run, and the
    ops that have no rule."""

    wrong: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
    checked: int = 0
    refused: tuple[str, ...] = ()

    def __add__(self, other: Certificate) -> Certificate:
        return Certificate(
            self.wrong + other.wrong,
            tuple(dict.fromkeys(self.missing + other.missing)),
            self.checked + other.checked,
            tuple(dict.fromkeys(self.refused + other.refused)),
        )

    def __str__(self) -> str:
        head = f"{self.checked} strategies run: {len(self.wrong)} wrong, "
        head += f"{len(self.missing)} missing, {len(self.refused)} ops refused"
        lines = [f"  wrong    {text}" for text in self.wrong[:_MAX_SHOWN]]
        if len(self.wrong) > _MAX_SHOWN:
            lines.append(f"  wrong    and {len(self.wrong) - _MAX_SHOWN} more, in `.wrong`")
        lines += [f"  missing  {strategy}: {strategy.saving}" for strategy in self.missing]
        lines += [f"  refused  {text.partition(chr(10))[0]}" for text in self.refused]
        return "\n".join([head, *lines])


def certify(
    op: str | OpOverload | OpRule | Callable[..., Any],
    *args: Any,
    rule: RuleOf | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Certificate:
    """The certificate of an op's rule, and of the rules of the ops of its backward.

    Args:
        op: an OpOverload, its name ("aten.mm.default", "mylib::scale"), what `dt.rule` returned, or
            a function of tensors, then of every op that it and its backward run.
        args, kwargs: of one call, its tensors global, best in float64.
        rule: from an OpCall to its Rule, in place of the registered one.
        seed: of cotangents and of random summands.

    Raises PlanningError where no op has that name, and for an op without arguments.
    """
    match op:
        case OpRule(ops=names):
            targets = [o for name in names for o in op_overloads(name)]
        case str() | OpOverload():
            targets = list(op_overloads(op))
        case _:  # with two cotangents
            how = {"rule": rule or rule_for, **kwargs}
            first = certify_autograd(op, *args, seed=2 * seed, square=True, **how)
            return first + certify_autograd(op, *args, seed=2 * seed + 1, **how)
    total = Certificate()
    ruled = [target for target in targets if str(target) in builders()]
    for target in targets if rule or not ruled else ruled:  # "aten::mm" names out= as well
        if not args and not kwargs:
            raise PlanningError(
                f"{target} is certified with the arguments of a call, and none are given.\n"
                f"  {target._schema}\n"
                f'fix: give them, as in dt.testing.certify("{target}", {example(target)})'
            )
        total += certify_given(target, args, kwargs, rule=rule, seed=seed)
    return total


def certify_given(
    target: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rule: RuleOf | None = None,
    seed: int = 0,
) -> Certificate:
    """One op, with these arguments and variations of them."""
    found = rule or rule_for
    try:
        total = certify_call(target, args, kwargs, rule=found, seed=2 * seed, missing=True)
    except NoRule as error:
        return Certificate(refused=(str(error),))
    varied = [negated(args, kwargs), *other_sizes(target, args, kwargs, found)]
    for number, (values, named) in enumerate(varied):
        if without_error(target, values, named):
            total += certify_or_refuse(
                target, values, named, rule=found, seed=2 * seed + 1 + number, square=number == 0
            )
    total += certify_half(target, args, kwargs, found)
    return total + certify_backward(target, args, kwargs, rule, seed)


def certify_or_refuse(target: Callable[..., Any], *given: Any, **how: Any) -> Certificate:
    """`certify_call`; where the rule has nothing to say of these arguments, that."""
    try:
        return certify_call(target, *given, **how)
    except PlanningError as error:
        if not isinstance(error.__cause__, PlanningError | None):
            raise  # a builder that fails
        return Certificate(refused=(str(error),))


def certify_half(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], rule: RuleOf
) -> Certificate:
    """Shapes and dtypes in bfloat16, where the op has a kernel for it."""
    values, named = to_half(args, kwargs)
    if not without_error(target, values, named):
        return Certificate()
    return certify_call(target, values, named, nums=(2,), rule=rule, values=False, square=False)


def certify_backward(
    target: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: RuleOf | None,
    seed: int,
) -> Certificate:
    """The ops of the backward of one op, if it has one; a backward op itself is not differentiated.

    ``rule`` is that of ``target`` alone.
    """
    if "backward" in str(target) or not _has_autograd(target):
        return Certificate()

    def found(call: OpCall) -> Rule:
        return rule(call) if rule is not None and call.target is target else rule_for(call)

    try:
        calls, differentiated = _recorded(target, args, kwargs, seed)
    except (RuntimeError, NotImplementedError):
        return Certificate()  # plain torch gives no gradient, which is not this library's to find
    how = {"seed": seed, "rule": found, "square": False}
    return _certified(calls, **how) if differentiated else Certificate()


def _has_autograd(target: OpOverload) -> bool:
    """Where there is none, torch would warn, and give no gradient."""
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    return any(dispatch_has_kernel_for_dispatch_key(target.name(), k) for k in keys)


# -- one call ------------------------------------------------------------------------------------


def certify_call(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    nums: Sequence[int] = (2, 3),
    rule: RuleOf = rule_for,
    seed: int = 0,
    values: bool = True,
    square: bool = True,
    missing: bool = False,
) -> Certificate:
    """The certificate of the rule for ``target(*args, **kwargs)``, tensors among them global.

    ``nums``: the axis sizes tried. ``square``: also pairs of strategies on a 2x2 mesh.
    ``missing``: also look for strategies that the rule lacks, for at most 3 tensors.
    ``values=False``: compare only shapes and dtypes, as of UNDEFINED ops always. NoRule where the
    op has none.
    """
    call, operands = call_of(target, args, kwargs or {})
    call, results = run_whole(call, operands)
    op_rule = rule(call)
    case = Case(
        call=call,
        rule=op_rule,
        operands=operands,
        results=results,
        seed=seed,
        values=values and str(target) not in UNDEFINED,
    )
    wrong: list[str] = []
    checked = 0
    plans = itertools.chain(
        (((num,), (s,)) for num in nums for s in one_axis(op_rule, num)),
        (((2, 2), pair) for pair in two_axes(op_rule)) if square else (),
    )
    for shape, strategies in plans:
        checked += 1
        problem = trial(case, shape, strategies)
        if problem is not None:
            texts = " x ".join(_text(s) for s in strategies)
            ranks = "x".join(map(str, shape))
            metas = ", ".join(map(str, call.operands))
            where = f"{call.name}({metas}) [{op_rule}] on {ranks} ranks"
            wrong.append(f"{where}: {texts}: {problem}")
    lacking = tuple(_missing(case)) if missing and case.values else ()
    return Certificate(tuple(wrong), lacking, checked)


_missing = missing  # certify_call has a parameter of that name


def _text(strategy: Strategy) -> str:
    return f"{list(strategy.operands)} -> {list(strategy.results)}"


# -- forward and backward ------------------------------------------------------------------------


def certify_autograd(
    fn: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    rule: RuleOf = rule_for,
    nums: Sequence[int] = (2, 3),
    square: bool = False,
    **kwargs: Any,
) -> Certificate:
    """Certify every op that ``fn`` and its backward run, each with the values that it really gets.

    The cotangent is random; values that forward saves for backward are consistent, so a backward
    that divides by a local count is found out. An op without a rule is decomposed, if torch can.
    """
    calls, _ = _recorded(fn, args, kwargs, seed)
    return _certified(calls, seed=seed, rule=rule, nums=nums, square=square)


Recorded = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _recorded(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> tuple[list[Recorded], bool]:
    """The calls of forward and, where a result has a gradient, of backward; whether one has."""

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex())

    inputs, named = pytree.tree_map_only(torch.Tensor, leaf, (tuple(args), dict(kwargs)))
    recorder = _CallRecorder()
    with recorder:
        returned = fn(*inputs, **named)
    outs = [
        t for t in pytree.tree_leaves(returned) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    asked = [t for t in pytree.tree_leaves((inputs, named)) if isinstance(t, torch.Tensor)]
    asked = [t for t in asked if t.requires_grad]
    if outs and asked:
        generator = generator_of(seed)
        cotangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outs]
        with recorder:
            torch.autograd.grad(outs, asked, cotangents, allow_unused=True)
    return recorder.calls, bool(outs and asked)


def _certified(calls: Sequence[Recorded], **how: Any) -> Certificate:
    """Each call; one without a rule as what torch makes of it. ``how``: of `certify_call`."""
    total = Certificate()
    for target, args, kwargs in calls:
        target = _functional(target)
        try:
            total += certify_call(target, args, kwargs, **how)
        except NoRule as error:
            refused = Certificate(refused=(str(error),))
            inner = _expanded(target, args, kwargs)
            total += refused if inner is None else _certified(inner, **how)
    return total


def _functional(target: OpOverload) -> OpOverload:
    """The op that returns what this one writes to its first argument, as capture makes of it;
    itself where torch has none, which no rule then knows."""
    if not target._schema.is_mutable or not target._schema.name.endswith("_"):
        return target
    return functional_form(target) or target


def _expanded(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Recorded] | None:
    """The calls of torch's decomposition; None where there is none."""
    # The same table as the planner's: what has no rule is planned as what it is made of.
    table = decomposition_table()
    if target not in table or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    with _CallRecorder() as recorder, torch.no_grad():
        table[target](*args, **kwargs)
    return None if any(inner is target for inner, _, _ in recorder.calls) else recorder.calls


class _CallRecorder(TorchDispatchMode):
    """Notes each op with a copy of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {})
        )
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(kept)):
            self.calls.append((func, *kept))
        return func(*args, **(kwargs or {}))
