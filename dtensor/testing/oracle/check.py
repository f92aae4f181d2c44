"""The oracle: a rule's certificate, by brute force.

    certify_call(torch.ops.aten.mm.default, (x, w)).wrong          # ()
    certify_autograd(lambda x: x.softmax(-1), x)                   # forward's and backward's ops

For one op and sample operands, every strategy that the op's rule offers is carried out: operands
are cut to shards, each rank's localised call is run, and each rank's result is compared with its
piece of the global result. Pending operands are cut into *random* summands, so that a rule that
is right only for "rank 0 has it all" is found out. Also tried: factors cut in blocks, at units,
and pairs of strategies on a 2x2 mesh, two of them on one factor.

A strategy that fails is *wrong*. One that the rule does not offer, though raw shards show that it
holds, is *missing*. An op without a rule, for which torch has no decomposition either, is
*refused*. Invariants: nothing is communicated; the same seed gives the same certificate. It cannot
find rules whose local form differs from the global one: those must be written. What users call is
`dtensor.testing.certify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules import NoRule, rule_for
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.testing.oracle.choices import one_axis, two_axes
from dtensor.testing.oracle.missing import Missing, missing
from dtensor.testing.oracle.trial import Case, call_of, generator_of, run_whole, trial

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
        lines += [f"  missing  {found}: {found.saving}" for found in self.missing]
        lines += [f"  refused  {text.partition(chr(10))[0]}" for text in self.refused]
        return "\n".join([head, *lines])


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
    ``values=False``: compare only shapes and dtypes. NoRule where the op has none.
    """
    call, operands = call_of(target, args, kwargs or {})
    call, results = run_whole(call, operands)
    found = rule(call)
    case = Case(call=call, rule=found, operands=operands, results=results, seed=seed, values=values)
    wrong: list[str] = []
    checked = 0
    plans = itertools.chain(
        (((num,), (s,)) for num in nums for s in one_axis(found, num)),
        (((2, 2), pair) for pair in two_axes(found)) if square else (),
    )
    for shape, strategies in plans:
        checked += 1
        problem = trial(case, shape, strategies)
        if problem is not None:
            texts = " x ".join(_text(s) for s in strategies)
            ranks = "x".join(map(str, shape))
            metas = ", ".join(map(str, call.operands))
            where = f"{call.name}({metas}) [{found}] on {ranks} ranks"
            wrong.append(f"{where}: {texts}: {problem}")
    lacking = tuple(_missing(case)) if missing else ()
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
    total = Certificate()
    for target, given, named in _recorded(fn, args, kwargs, seed):
        total += _certify_or_expand(target, given, named, seed, rule, nums, square)
    return total


Recorded = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _recorded(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> list[Recorded]:
    """The calls of forward and, where a result has a gradient, of backward."""

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex())

    inputs, named = tree_map_only(torch.Tensor, leaf, (tuple(args), dict(kwargs)))
    recorder = _Recorder()
    with recorder:
        returned = fn(*inputs, **named)
    outs = [t for t in tree_leaves(returned) if isinstance(t, torch.Tensor) and t.requires_grad]
    asked = [t for t in tree_leaves((inputs, named)) if isinstance(t, torch.Tensor)]
    asked = [t for t in asked if t.requires_grad]
    if outs and asked:
        generator = generator_of(seed)
        cotangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outs]
        with recorder:
            torch.autograd.grad(outs, asked, cotangents, allow_unused=True)
    return recorder.calls


def _certify_or_expand(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    rule: RuleOf,
    nums: Sequence[int],
    square: bool,
) -> Certificate:
    # Samples are many; only the names of ops without a defined result are needed of them.
    from dtensor.testing.samples import UNDEFINED

    target = _functional(target)
    values = str(target) not in UNDEFINED
    try:
        return certify_call(
            target, args, kwargs, seed=seed, rule=rule, nums=nums, square=square, values=values
        )
    except NoRule as error:
        reason = str(error)
    # The same table as the planner's: what has no rule is planned as what it is made of.
    table = global_decomposition_table["post_autograd"]
    if target not in table or torch.Tag.nondeterministic_seeded in target.tags:
        return Certificate(refused=(reason,))
    with _Recorder() as recorder, torch.no_grad():
        table[target](*args, **kwargs)
    if any(inner is target for inner, _, _ in recorder.calls):
        return Certificate(refused=(reason,))
    total = Certificate()
    for inner, given, named in recorder.calls:
        total += _certify_or_expand(inner, given, named, seed, rule, nums, square)
    return total


def _functional(target: OpOverload) -> OpOverload:
    """The op that returns what this one writes to its first argument, as capture makes of it."""
    namespace, _, name = target._schema.name.partition("::")
    if not target._schema.is_mutable or not name.endswith("_"):
        return target
    twin = name.removesuffix("_")
    if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{twin}"):
        return target
    packet = getattr(getattr(torch.ops, namespace), twin)
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found
    return target


class _Recorder(TorchDispatchMode):
    """Notes each op with a copy of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
        if any(isinstance(x, torch.Tensor) for x in tree_leaves(kept)):
            self.calls.append((func, *kept))
        return func(*args, **(kwargs or {}))
