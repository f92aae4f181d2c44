"""`dt.rule`: state how a user's own op may be sharded, in one line.

    dt.rule("mylib::scale", "b t d, d -> b t d", linear=("x", "weight"))
    dt.testing.certify("mylib::scale", x, weight)          # forward and backward, by brute force

The pattern names the dims of all tensor operands and results, in einops' notation (see
dtensor.sharding.rules.rule). A factor that only operands have is contracted; a factor ``k!`` is not
sharded; ``...`` stands for leading dims that broadcast. The ops of the backward need rules too.
Actors on Ray import the module that registers the op. If that is the script itself, the kernel is
sent with the program, with copies of the globals that it names. Stating another rule for an op is
an error. Whether a rule is right is checked by `dt.testing.certify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.errors import PlanningError, check_kind
from dtensor.numerics import REDUCTIONS, ReduceOp, reduction_names_text
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
    """A stated rule. A call with an OpCall returns the Rule of that call. ``ops``: full names."""

    ops: tuple[str, ...]
    pattern: str
    linear: tuple[Group, ...] = ()
    reduce: ReduceOp = "sum"
    localize: Localizer | None = None
    flops: str = ""
    dtypes: Dtypes = "promote"

    def __call__(self, call: OpCall) -> Rule:
        return with_dtypes(self.dtypes, self._make_rule)(call)

    def _make_rule(self, call: OpCall) -> Rule:
        """Return the rule of one call, in which the groups of linear operands are indices."""
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
    """State how an op may be sharded.

    Args:
        op: "mylib::op" (all its overloads), "mylib::op.overload", "aten.mm.default" or the
            OpOverload itself.
        pattern: the dims of the tensor operands and results, "m k, k n -> m n".
        linear: the operands in which the op is linear, by name or by number among the tensors:
            separately in each of ("a", "b"); jointly in the operands of an inner tuple, as in
            [("x", "bias"), "w"].
        reduce: how partial results over a contracted factor combine, as in `dt.Partial`.
        localize: rewrites the call for one rank, if its arguments contain global sizes or counts;
            see dtensor.sharding.ops.call.
        flops: the factors whose product, doubled, is the number of operations: "m k n".
        dtypes: which dtypes of tensor operands the op accepts together: any mix ("promote"), one
            dtype ("same"), or a function of the tuple of dtypes. A call with others raises
            PlanningError with its line; otherwise the kernel would fail on a rank.

    Raises PlanningError if the op is unknown or changes its arguments, if the pattern does not fit
    its schema, or if the op has another rule.
    """
    check_kind("the op", op, str | OpOverload, "an op or its name", '"mylib::scale"')
    check_kind("the pattern", pattern, str, "a text", '"m k, k n -> m n"')
    check_kind("linear", linear, str | int | list | tuple, "operands", 'linear=("x", "weight")')
    overloads = op_overloads(op)
    groups = _operand_groups(linear)
    for overload in overloads:
        _check_statement(overload, pattern, groups, reduce, localize, dtypes)
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
    """Return the overloads that ``op`` names. Raises PlanningError if there are none."""
    if isinstance(op, OpOverload):
        return (op,)
    op_names = dispatch_get_all_op_names()
    full_name = op
    if "::" not in op:  # "aten.mm.default", "aten.mm"
        namespace, _, name = op.partition(".")
        full_name = f"{namespace}::{name}"
    full_name = full_name.removesuffix(".default")
    overloads = [n for n in op_names if n == full_name]
    if not overloads or (full_name == op and "." not in full_name):
        variants = [n for n in op_names if n == full_name or n.startswith(f"{full_name}.")]
        # an overload with out= only if there is no other
        overloads = [n for n in variants if not _overload(n)._schema.is_mutable] or variants
    if not overloads:
        near = nearest(full_name, op_names)
        raise PlanningError(
            f"there is no op {op}.\n"
            + (f"  nearest names: {listing(near)}\n" if near else "")
            + "fix: import the module that registers it (torch.library.custom_op) first"
        )
    return tuple(_overload(name) for name in sorted(overloads))


def _overload(name: str) -> OpOverload:
    namespace, _, op = name.partition("::")
    packet, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


# -- linear --------------------------------------------------------------------------------------


def _operand_groups(linear: Linear) -> tuple[Group, ...]:
    """Return ``linear=`` as groups of operands; the op is jointly linear in each group."""
    if isinstance(linear, (str, int)):
        return ((linear,),)
    return tuple((g,) if isinstance(g, (str, int)) else tuple(g) for g in linear)


def _indices(call: OpCall, group: Group) -> tuple[int, ...]:
    """Return the indices of a group's operands in this call; () if one is a nonzero number, because
    the op is then affine, not linear, in the others."""
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


# -- checks against the schema ---------------------------------------------------------------------


def _check_statement(
    op: OpOverload,
    pattern: str,
    groups: Sequence[Group],
    reduce: ReduceOp,
    localize: Localizer | None,
    dtypes: Dtypes,
) -> None:
    """Raise PlanningError if the arguments of `rule` do not fit the schema of the op."""
    schema = op._schema
    if schema.is_mutable:
        raise PlanningError(
            f"{op} changes its arguments: {schema}\n"
            f"fix: write it as an op that returns new values, and copy the result back"
        )
    if reduce not in REDUCTIONS:
        raise PlanningError(
            f'dt.rule("{schema.name}", reduce={reduce!r}): the parts of a contracted factor '
            f"combine by {reduction_names_text()}.\nfix: leave reduce out for a sum"
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
    terms: str,
    count: int,
    least: int,
    names: Sequence[str],
    items: Sequence[Any],
) -> None:
    """Raise PlanningError if a pattern has too few or too many terms. Optional tensors may be left
    out; a list of tensors may have any length."""
    largest = None if any(_is_list(i.type) for i in items) else len(items)
    if count < least or (largest is not None and count > largest):
        limit = "any number" if largest is None else largest
        expected = str(least) if largest == least else f"{least} to {limit}"
        raise PlanningError(
            f"the pattern {pattern!r} has {count} {terms}, {op} has {expected}: {listing(names)}.\n"
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
    """Raise PlanningError for a factor that only results have, unless it is marked with "!" or
    there is a localizer: every rank would compute all of it."""
    written = [f for tokens in (*operands, *results) for f in _factors(tokens)]
    valid = {f.removesuffix("!") for tokens in operands for f in _factors(tokens)}
    valid |= {f.removesuffix("!") for f in written if f.endswith("!")}
    extra = [f for tokens in results for f in _factors(tokens) if f.removesuffix("!") not in valid]
    if not extra or localize is not None:
        return
    if "..." in extra:
        raise PlanningError(
            f'the pattern {pattern!r} of {op} has "..." in a result and in no operand.\n'
            f"fix: name the result's dims, each with a '!': every rank computes all of them"
        )
    operands_text, _, results_text = pattern.partition("->")
    fixed = " ".join(f"{w}!" if w in extra else w for w in results_text.replace(",", " , ").split())
    fixed = f"{operands_text.rstrip()} -> {fixed.replace(' ,', ',')}"
    raise PlanningError(
        f"the pattern {pattern!r} of {op} splits {listing(list(dict.fromkeys(extra)))}, "
        f"which no operand has: each rank would compute all of it.\n"
        f'fix: "{fixed}", or give a localizer that makes each rank compute its part'
    )


def _factors(tokens: Sequence[str]) -> list[str]:
    """Return the names of the factors in a tensor's dims, with their "!"."""
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
