"""`dt.testing.certify`: checks by brute force whether the rule of an op is right.

    print(dt.testing.certify("mylib::scale", x, weight))      # an op and the arguments of a call
    dt.testing.certify(torch.nn.functional.mse_loss, x, y)    # every op of forward and backward

Each strategy of the rule is run on real shards and compared with the op on global tensors
(`oracle.py`), on 2 and 3 ranks and on a 2x2 mesh: with the given values, negated values, other
sizes, and bfloat16, and for each op of the backward. A strategy that gives other values is *wrong*.
A valid strategy that the rule lacks is *missing* (`missing.py`). An op that has neither a rule nor
a decomposition in torch is *refused*. The same seed gives the same certificate.
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
from dtensor.sharding.ops.call import OpCall, RowsError
from dtensor.sharding.rules import NoRule, rule_for
from dtensor.sharding.rules.registry import builders
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.testing.missing import Missing, find_missing
from dtensor.testing.oracle import (
    UNDEFINED,
    Case,
    call_of,
    generator_of,
    one_axis,
    run_global,
    trial,
    two_axes,
)
from dtensor.testing.vary import accepts, example, negated, other_sizes, to_half

RuleOf = Callable[[OpCall], Rule]
_MAX_SHOWN = 8
"""The number of printed wrong strategies. Other sizes of a wrong strategy usually fail alike."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of `certify`: descriptions of wrong strategies, the missing strategies, the number
    of strategies that were run, and descriptions of the ops without a rule."""

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
    """Return the certificate of the rule of an op and of the rules of the ops in its backward.

    Args:
        op: an OpOverload, its name ("aten.mm.default", "mylib::scale"), the result of `dt.rule`, or
            a function of tensors; of a function every op of forward and backward is certified.
        args, kwargs: the arguments of one call, with global tensors, preferably of float64.
        rule: a function from an OpCall to its Rule, to use in place of the registered rule.
        seed: the seed of cotangents and of random summands.

    Raises PlanningError if no op has that name, or if an op is given without arguments.
    """
    match op:
        case OpRule(ops=names):
            targets = [o for name in names for o in op_overloads(name)]
        case str() | OpOverload():
            targets = list(op_overloads(op))
        case _:  # with two cotangents
            options = {"rule": rule or rule_for, **kwargs}
            first = certify_autograd(op, *args, seed=2 * seed, square=True, **options)
            return first + certify_autograd(op, *args, seed=2 * seed + 1, **options)
    total = Certificate()
    with_rule = [target for target in targets if str(target) in builders()]
    for target in (
        targets if rule or not with_rule else with_rule
    ):  # not the out= overload of a name
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
    """Certify one op with these arguments and with variations of them."""
    rule_of = rule or rule_for
    try:
        total = certify_call(target, args, kwargs, rule=rule_of, seed=2 * seed, missing=True)
    except NoRule as error:
        return Certificate(refused=(str(error),))
    variations = [negated(args, kwargs), *other_sizes(target, args, kwargs, rule_of)]
    for number, (new_args, new_kwargs) in enumerate(variations):
        if accepts(target, new_args, new_kwargs):
            total += certify_or_refuse(
                target,
                new_args,
                new_kwargs,
                rule=rule_of,
                seed=2 * seed + 1 + number,
                square=number == 0,
            )
    total += certify_half(target, args, kwargs, rule_of)
    return total + certify_backward(target, args, kwargs, rule, seed)


def certify_or_refuse(target: Callable[..., Any], *args: Any, **options: Any) -> Certificate:
    """Call `certify_call`. If the rule refuses the arguments, return a certificate that says so."""
    try:
        return certify_call(target, *args, **options)
    except PlanningError as error:
        if not isinstance(error.__cause__, PlanningError | None):
            raise  # the rule's builder has a bug
        return Certificate(refused=(str(error),))


def certify_half(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], rule: RuleOf
) -> Certificate:
    """Certify shapes and dtypes of results in bfloat16, if the op has a kernel for bfloat16."""
    args, kwargs = to_half(args, kwargs)
    if not accepts(target, args, kwargs):
        return Certificate()
    return certify_call(target, args, kwargs, nums=(2,), rule=rule, values=False, square=False)


def certify_backward(
    target: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: RuleOf | None,
    seed: int,
) -> Certificate:
    """Certify the ops that the backward of one op runs. An op that is itself a backward op, or that
    has no backward, gives an empty certificate. ``rule`` replaces the rule of ``target`` only."""
    if "backward" in str(target) or not _has_autograd(target):
        return Certificate()

    def rule_of(call: OpCall) -> Rule:
        return rule(call) if rule is not None and call.target is target else rule_for(call)

    try:
        calls, has_gradient = _record_calls(target, args, kwargs, seed)
    except (RuntimeError, NotImplementedError):
        return Certificate()  # torch itself fails to differentiate the op
    if not has_gradient:
        return Certificate()
    return _certify_calls(calls, seed=seed, rule=rule_of, square=False)


def _has_autograd(target: OpOverload) -> bool:
    """Return whether torch can differentiate the op. For other ops torch warns in the backward."""
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
    """Return the certificate of the rule for ``target(*args, **kwargs)`` with global tensors.

    ``nums``: the sizes of the axis. ``square``: also run pairs of strategies on a 2x2 mesh.
    ``missing``: also look for strategies that the rule lacks, for at most 3 tensors. ``values``:
    compare values; if False, and for `UNDEFINED` ops, only shapes and dtypes. Raises NoRule if the
    op has no rule.
    """
    call, operands = call_of(target, args, kwargs or {})
    call, results = run_global(call, operands)
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
    trials = itertools.chain(
        (((num,), (s,)) for num in nums for s in one_axis(op_rule, num)),
        (((2, 2), pair) for pair in two_axes(op_rule)) if square else (),
    )
    for shape, strategies in trials:
        try:
            problem = trial(case, shape, strategies)
        except RowsError:
            continue
        checked += 1
        if problem is not None:
            texts = " x ".join(_text(s) for s in strategies)
            ranks = "x".join(map(str, shape))
            metas = ", ".join(map(str, call.operands))
            title = f"{call.name}({metas}) [{op_rule}] on {ranks} ranks"
            wrong.append(f"{title}: {texts}: {problem}")
    missing_strategies = tuple(find_missing(case)) if missing and case.values else ()
    return Certificate(tuple(wrong), missing_strategies, checked)


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
    """Certify every op that ``fn`` and its backward run, each with the values of this run.

    The cotangent is random. Values that the forward saves for the backward belong together, so a
    backward that wrongly divides by a local count is found. An op without a rule is decomposed if
    torch has a decomposition.
    """
    calls, _ = _record_calls(fn, args, kwargs, seed)
    return _certify_calls(calls, seed=seed, rule=rule, nums=nums, square=square)


RecordedCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An op with its args and kwargs."""


def _record_calls(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> tuple[list[RecordedCall], bool]:
    """Run ``fn`` and its backward. Return their op calls, and whether there was a backward."""

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex())

    inputs = pytree.tree_map_only(torch.Tensor, leaf, (tuple(args), dict(kwargs)))
    recorder = _CallRecorder()
    with recorder:
        returned = fn(*inputs[0], **inputs[1])

    def differentiable(tree: Any) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(tree)
        return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]

    outputs, leaves = differentiable(returned), differentiable(inputs)
    if outputs and leaves:
        generator = generator_of(seed)
        cotangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]
        with recorder:
            torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return recorder.calls, bool(outputs and leaves)


def _certify_calls(calls: Sequence[RecordedCall], **options: Any) -> Certificate:
    """Certify each call with these options of `certify_call`. A call without a rule is replaced by
    the calls of its decomposition."""
    total = Certificate()
    for target, args, kwargs in calls:
        target = _functional(target)
        try:
            total += certify_call(target, args, kwargs, **options)
        except NoRule as error:
            refused = Certificate(refused=(str(error),))
            inner = _decomposed_calls(target, args, kwargs)
            total += refused if inner is None else _certify_calls(inner, **options)
    return total


def _functional(target: OpOverload) -> OpOverload:
    """Return the functional form of an op that writes to its first argument, as capture uses it;
    the op itself if it does not write or has no such form."""
    if not target._schema.is_mutable or not target._schema.name.endswith("_"):
        return target
    return functional_form(target) or target


def _decomposed_calls(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[RecordedCall] | None:
    """Return the calls of torch's decomposition of the op, or None if it has none."""
    table = decomposition_table()  # the planner uses the same table
    if target not in table or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    with _CallRecorder() as recorder, torch.no_grad():
        table[target](*args, **kwargs)
    return None if any(inner is target for inner, _, _ in recorder.calls) else recorder.calls


class _CallRecorder(TorchDispatchMode):
    """Records each op that has a tensor argument, with a copy of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {})
        )
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(copies)):
            self.calls.append((func, *copies))
        return func(*args, **(kwargs or {}))
