"""`dt.rule`: the rule of a user's own op, in one line.

    dt.rule("mylib::scale", "b t d, d -> b t d", linear=("x", "weight"))
    dt.testing.certify("mylib::scale", x, weight)          # forward and backward, by brute force

The pattern names the dims of every tensor operand and result, in einops' notation (see
dtensor.sharding.rules.rule): a factor of the operands alone is contracted, ``k!`` must be whole on
each rank, ``...`` stands for leading dims that broadcast. An op needs a rule for each op that its
backward runs, too: the backward op of a custom op has its own line. Actors on Ray import the module
that registers the op; the kernel of one from the script itself goes to them with the program, with
copies of the globals that it names.

Invariants: an op has one rule; stating the same rule again changes nothing, another one is an
error. Whether a rule is right is not known here: that is what certify is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.errors import PlanningError, check_kind
from dtensor.numerics import REDUCTIONS, ReduceOp, reductions_listed
from dtensor.private_torch import OpOverload, dispatch_get_all_op_names
from dtensor.sharding.ops.call import Localizer, OpCall, Operand
from dtensor.sharding.rules.build import make, with_dtypes
from dtensor.sharding.rules.dtypes import Dtypes
from dtensor.sharding.rules.notation import pattern_terms
from dtensor.sharding.rules.registry import register
from dtensor.sharding.rules.rule import Rule

Group = tuple[str | int, ...]
Linear = str | int | Sequence[str | int | Sequence[str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """A stated rule; called with an OpCall, it is that call's Rule. ``ops``: full names."""

    ops: tuple[str, ...]
    pattern: str
    linear: tuple[Group, ...] = ()
    reduce: ReduceOp = "sum"
    localize: Localizer | None = None
    flops: str = ""
    dtypes: Dtypes = "promote"

    def __call__(self, call: OpCall) -> Rule:
        return with_dtypes(self.dtypes, self._made)(call)

    def _made(self, call: OpCall) -> Rule:
        groups = [g for g in (_indices(call, group) for group in self.linear) if g]
        return make(
            call,
            self.pattern,
            linear=groups,
            reduce=self.reduce,
            localize=self.localize,
            flops=self.flops,
        )


def rule(
    op: str | OpOverload,
    pattern: str,
    *,
    linear: Linear = (),
    reduce: ReduceOp = "sum",
    localize: Localizer | None = None,
    flops: str = "",
    dtypes: Dtypes = "promote",
) -> OpRule:
    """State how an op may be split.

    Args:
        op: "mylib::op" (each of its overloads), "mylib::op.overload", "aten.mm.default" or the
            OpOverload itself.
        pattern: the dims of the tensor operands and results, "m k, k n -> m n".
        linear: names (or numbers among the tensors) of operands in which the op is linear: each on
            its own in ("a", "b"); those of an inner tuple jointly, as in [("x", "bias"), "w"].
        reduce: how the parts of a contracted factor combine, as in `dt.Partial`.
        localize: rewrites the call for one rank, where sizes or counts among its arguments are
            global; see dtensor.sharding.ops.call.
        flops: the factors whose product, doubled, is the number of operations: "m k n".
        dtypes: which dtypes of tensor operands the op takes together: any mix ("promote"), one
            dtype ("same"), or a function of the tuple of them. A call with others is a
            PlanningError with its line, where otherwise the kernel fails on a rank.

    Raises PlanningError where the op is unknown or changes its arguments, where the pattern does
    not fit its schema, and where the op has another rule.
    """
    check_kind("the op", op, str | OpOverload, "an op or its name", '"mylib::scale"')
    check_kind("the pattern", pattern, str, "a text", '"m k, k n -> m n"')
    check_kind("linear", linear, str | int | list | tuple, "operands", 'linear=("x", "weight")')
    overloads = op_overloads(op)
    groups = _groups(linear)
    for overload in overloads:
        _check(overload, pattern, groups, reduce, localize, dtypes)
    stated = OpRule(
        ops=tuple(str(o) for o in overloads),
        pattern=pattern,
        linear=groups,
        reduce=reduce,
        localize=localize,
        flops=flops,
        dtypes=dtypes,
    )
    register(stated.ops, stated)
    return stated


def op_overloads(op: str | OpOverload) -> tuple[OpOverload, ...]:
    """The overloads that ``op`` names; PlanningError where there are none."""
    if isinstance(op, OpOverload):
        return (op,)
    known = dispatch_get_all_op_names()
    wanted = op
    if "::" not in op:  # "aten.mm.default", "aten.mm"
        namespace, _, rest = op.partition(".")
        wanted = f"{namespace}::{rest}"
    wanted = wanted.removesuffix(".default")
    overloads = [n for n in known if n == wanted]
    if not overloads or (wanted == op and "." not in wanted):
        every = [n for n in known if n == wanted or n.startswith(f"{wanted}.")]
        overloads = [n for n in every if not _overload(n)._schema.is_mutable] or every  # no out=
    if not overloads:
        near = nearest(wanted, known)
        raise PlanningError(
            f"there is no op {op}.\n"
            + (f"  nearest names: {listing(near)}\n" if near else "")
            + "fix: import the module that registers it (torch.library.custom_op) first"
        )
    return tuple(_overload(name) for name in sorted(overloads))


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


# -- linear --------------------------------------------------------------------------------------


def _groups(linear: Linear) -> tuple[Group, ...]:
    if isinstance(linear, (str, int)):
        return ((linear,),)
    return tuple((g,) if isinstance(g, (str, int)) else tuple(g) for g in linear)


def _indices(call: OpCall, group: Group) -> tuple[int, ...]:
    """The operands of a group in this call; () where a non-zero number stands for one of them."""
    indices: list[int] = []
    for member in group:
        if isinstance(member, int):
            indices.append(member)
            continue
        value = _argument(call, member)
        values = value if isinstance(value, (list, tuple)) else (value,)
        for item in values:
            if isinstance(item, Operand):
                indices.append(item.index)
            elif item is not None and item != 0:
                return ()
    return tuple(indices)


def _argument(call: OpCall, name: str) -> Any:
    assert isinstance(call.target, OpOverload)
    names = [a.name for a in call.target._schema.arguments]
    return call.arg(names.index(name), name)


# -- does it fit the schema ------------------------------------------------------------------------


def _check(
    op: OpOverload,
    pattern: str,
    groups: Sequence[Group],
    reduce: ReduceOp,
    localize: Localizer | None,
    dtypes: Dtypes,
) -> None:
    schema = op._schema
    if schema.is_mutable:
        raise PlanningError(
            f"{op} changes its arguments: {schema}\n"
            f"fix: write it as an op that returns new values, and copy the result back"
        )
    if reduce not in REDUCTIONS:
        raise PlanningError(
            f'dt.rule("{schema.name}", reduce={reduce!r}): the parts of a contracted factor '
            f"combine by {reductions_listed()}.\nfix: leave reduce out for a sum"
        )
    if dtypes not in ("promote", "same") and not callable(dtypes):
        raise PlanningError(
            f'dt.rule("{schema.name}", dtypes={dtypes!r}): operands are taken in any mix of '
            f'dtypes ("promote") or in one dtype ("same").\n'
            f'fix: "same", or a function of the tuple of dtypes that says whether they are taken'
        )
    operands, results = pattern_terms(pattern)
    unit = REDUCTIONS[reduce].unit
    if unit > 1 and not all(dims and dims[-1].endswith("!") for dims in results):
        raise PlanningError(
            f'dt.rule("{schema.name}", "{pattern}", reduce="{reduce}"): the last dim of a result '
            f"is of {unit} numbers, which stay together.\n"
            f'fix: mark it as whole, as in "n v -> n k!"'
        )
    tensors = [a for a in schema.arguments if _is_tensor(a.type)]
    operands = operands if tensors or operands != [[]] else []
    least = sum(1 for a in tensors if not _is_optional(a.type) and not _is_list(a.type))
    _check_count(op, pattern, "operands", len(operands), least, [a.name for a in tensors], tensors)
    returns = [r for r in schema.returns if _is_tensor(r.type)]
    labels = [f"result {i}" for i in range(len(returns))]
    _check_count(op, pattern, "results", len(results), len(returns), labels, returns)
    names = [a.name for a in tensors]
    for member in (m for group in groups for m in group):
        if isinstance(member, int) and not 0 <= member < max(len(operands), len(names)):
            raise PlanningError(
                f"dt.rule for {op}: linear names operand {member}, the pattern {pattern!r} has "
                f"{len(operands)}.\nfix: count its tensors from 0, or use names: {listing(names)}"
            )
        if isinstance(member, str) and member not in names:
            near = nearest(member, names)
            raise PlanningError(
                f'dt.rule for {op}: linear names "{member}", which is no tensor argument of it.\n'
                f"  {schema}\n"
                f'fix: use {_quoted(near or names)} for "{member}"'
            )
    _check_new_factors(op, pattern, operands, results, localize)


def _check_count(
    op: OpOverload,
    pattern: str,
    what: str,
    count: int,
    least: int,
    names: Sequence[str],
    items: Sequence[Any],
) -> None:
    """Optional tensors may be left out, a list of tensors may have any length."""
    most = None if any(_is_list(i.type) for i in items) else len(items)
    if count < least or (most is not None and count > most):
        wanted = (
            str(least) if most == least else f"{least} to {'any number' if most is None else most}"
        )
        raise PlanningError(
            f"the pattern {pattern!r} has {count} {what}, {op} has {wanted}: {listing(names)}.\n"
            f"  {op._schema}\n"
            f"fix: write the dims of each tensor, in this order, with commas between them"
        )


def _check_new_factors(
    op: OpOverload,
    pattern: str,
    operands: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    localize: Localizer | None,
) -> None:
    """A factor that no operand has: every rank computes all of it, unless a localizer helps."""
    written = [f for tokens in (*operands, *results) for f in _factors(tokens)]
    held = {f.removesuffix("!") for tokens in operands for f in _factors(tokens)}
    held |= {f.removesuffix("!") for f in written if f.endswith("!")}
    new = [f for tokens in results for f in _factors(tokens) if f.removesuffix("!") not in held]
    if not new or localize is not None:
        return
    if "..." in new:
        raise PlanningError(
            f'the pattern {pattern!r} of {op} has "..." in a result and in no operand.\n'
            f"fix: name the result's dims, each with a '!': every rank computes all of them"
        )
    left, _, right = pattern.partition("->")
    fixed = " ".join(f"{w}!" if w in new else w for w in right.replace(",", " , ").split())
    fixed = f"{left.rstrip()} -> {fixed.replace(' ,', ',')}"
    raise PlanningError(
        f"the pattern {pattern!r} of {op} splits {listing(list(dict.fromkeys(new)))}, which no "
        f"operand has: each rank would compute all of it.\n"
        f'fix: "{fixed}", or give a localizer that makes each rank compute its part'
    )


def _factors(tokens: Sequence[str]) -> list[str]:
    """The names in a tensor's dims, each with its "!"."""
    factors: list[str] = []
    for token in tokens:
        inner = token.strip("()").replace("+", " ").split()
        factors += [f for f in inner if f != "1" and not f.startswith("~")]
    return factors


def _is_tensor(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _is_optional(kind: Any) -> bool:
    return str(kind).startswith("Optional")


def _is_list(kind: Any) -> bool:
    return str(kind).startswith("List")


def _quoted(names: Sequence[str]) -> str:
    return " or ".join(f'"{n}"' for n in names)
