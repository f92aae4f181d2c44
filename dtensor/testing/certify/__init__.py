"""`dt.testing.certify`: is a rule right, forward and backward, under every placement it offers?

    print(dt.testing.certify("mylib::scale", x, weight))      # an op, with sample arguments
    dt.testing.certify("aten.mm.default")                     # with the samples of this library
    dt.testing.certify(torch.nn.functional.mse_loss, x, y)    # every op of forward and backward

By brute force (dtensor.testing.oracle.check): on 2 and 3 ranks and on a 2x2 mesh, every strategy of
the rule is carried out on real shards and compared with the op run whole: plain, in blocks, at
units, pending; with the values given, negated, and at other sizes, which divide and do not, down to
1 and fewer than there are ranks; in half precision its dtypes are compared; and so is each op of
its backward, with a random cotangent. `python -m dtensor.testing.certify` does so for all rules.

Invariants: the same seed gives the same certificate. Not here: whole programs under placements
(`dt.testing.assert_same`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor.api.rule import OpRule, op_overloads
from dtensor.errors import PlanningError
from dtensor.sharding.ops import attention as attention  # the project's own
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules import NoRule, rule_for
from dtensor.sharding.rules.registry import builders
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.whole import reasons
from dtensor.testing.certify.vary import negated, other_sizes, to_half, without_error
from dtensor.testing.oracle.check import Certificate, RuleOf, certify_autograd, certify_call

Given = tuple[tuple[Any, ...], dict[str, Any]]


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
        args, kwargs: of one call, its tensors global, best in float64; without any, the samples of
            this library are taken.
        rule: from an OpCall to its Rule, in place of the registered one.
        seed: of cotangents, of random summands, and of the library's samples.

    Raises PlanningError where no op or no sample has that name.
    """
    match op:
        case OpRule(ops=names):
            targets = [o for name in names for o in op_overloads(name)]
        case str() | OpOverload():
            targets = list(op_overloads(op))
        case _:
            return certify_function(op, args, kwargs, rule=rule or rule_for, seed=seed)
    total = Certificate()
    ruled = [target for target in targets if str(target) in builders()]
    for target in targets if rule or not ruled else ruled:  # "aten::mm" names out= as well
        if args or kwargs:
            total += certify_given(target, args, kwargs, rule=rule, seed=seed)
        else:
            total += certify_samples(str(target), rule=rule, seed=seed)
    return total


def certify_function(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rule: RuleOf = rule_for,
    seed: int = 0,
) -> Certificate:
    """Every op that ``fn`` and its backward run, with two cotangents."""
    total = Certificate()
    for number, square in ((0, True), (1, False)):
        total += certify_autograd(
            fn, *args, seed=2 * seed + number, rule=rule, square=square, **kwargs
        )
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
            total += _or_refused(
                target, values, named, rule=found, seed=2 * seed + 1 + number, square=number == 0
            )
    total += certify_half(target, args, kwargs, found)
    return total + certify_backward(target, args, kwargs, rule, seed)


def certify_samples(
    name: str, *, rule: RuleOf | None = None, seed: int = 0, brief: bool = False
) -> Certificate:
    """One registered op, over this library's samples and their sizes.

    2 ranks first, 3 ranks with other, negated values. ``brief``: one size, on 2 ranks.
    """
    # Samples are many and are not needed by those who certify their own attention.
    from dtensor.testing import samples as known

    if name not in known.SAMPLES:
        raise PlanningError(
            f"this library has no samples of {name}.\n"
            f'fix: give arguments of one call, dt.testing.certify("{name}", x, ...)'
        )
    (target,) = op_overloads(name)
    given = rule or rule_for

    def found(call: OpCall) -> Rule:
        return given(replace(call, target=target))

    stand_in = known.STAND_INS.get(name, target)
    values = name not in known.UNDEFINED
    search = values and name not in known.UNCHECKED and name not in reasons()
    squares = 1 if name in known.POINTWISE else 2  # their rules are all alike
    total = Certificate()
    for sample in known.SAMPLES[name]:
        for variant in range(1 if brief else len(known.VARIANTS)):
            for negate in (False,) if brief else (False, True):
                args, kwargs = sample(known.Draw(variant, negate=negate, seed=seed))
                total += certify_call(
                    stand_in,
                    args,
                    kwargs,
                    nums=(3,) if negate else (2,),
                    rule=found,
                    seed=2 * seed + negate,
                    values=values,
                    square=variant < squares and not negate and not brief,
                    missing=search and variant == 0 and negate,
                )
        if brief:
            continue
        edges = 0 if name in known.UNCHECKED else len(known.EDGES)
        for variant in range(len(known.VARIANTS), len(known.VARIANTS) + edges):
            edge = _edge(sample, known.Draw(variant, seed=seed))
            if edge is not None and without_error(stand_in, *edge):
                total += _or_refused(
                    stand_in, *edge, rule=found, seed=2 * seed, values=values, square=False
                )
        args, kwargs = sample(known.Draw(0, seed=seed))
        if name not in known.NO_HALF:
            total += certify_half(stand_in, args, kwargs, found)
        if stand_in is target and values:
            total += certify_backward(target, args, kwargs, rule, seed)
    return total


def _or_refused(target: Callable[..., Any], *given: Any, **how: Any) -> Certificate:
    """`certify_call`; where the rule has nothing to say of these arguments, that."""
    try:
        return certify_call(target, *given, **how)
    except PlanningError as error:
        return Certificate(refused=(str(error),))


def _edge(sample: Callable[[Any], Given], draw: Any) -> Given | None:
    """The sample at sizes of 0 and 1, where it can be made."""
    try:
        return sample(draw)
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
        return None


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
    if "backward" in str(target) or not _differentiable(target, args, kwargs):
        return Certificate()

    def found(call: OpCall) -> Rule:
        return rule(call) if rule is not None and call.target is target else rule_for(call)

    return certify_autograd(target, *args, seed=seed, rule=found, **kwargs)


def _differentiable(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether plain torch gives a gradient; what it lacks is not this library's to find."""
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), k) for k in keys):
        return False  # torch would warn, and give no gradient

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())

    values, named = tree_map_only(torch.Tensor, leaf, (tuple(args), dict(kwargs)))
    try:
        returned = target(*values, **named)
        outs = [x for x in tree_leaves(returned) if isinstance(x, torch.Tensor) and x.requires_grad]
        asked = [x for x in tree_leaves((values, named)) if isinstance(x, torch.Tensor)]
        asked = [x for x in asked if x.requires_grad]
        if outs and asked:
            torch.autograd.grad(outs, asked, [torch.ones_like(x) for x in outs], allow_unused=True)
        return bool(outs and asked)
    except (RuntimeError, NotImplementedError):
        return False
