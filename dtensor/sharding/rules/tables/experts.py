"""Rules of the ops of mixtures of experts (ops/experts.py).

    route         "t k! -> e, [e t k!], [e t k!]"             counts, expert and slot of each row
    take_rows     "t d, [e t k!], e, t k! -> [e t k!] d"      tokens to rows
    add_rows      "[e t k!] d, [e t k!], e, t k! -> t d"      rows to tokens: a sum over e
    slot_grads    "t d, [e t k!] d, [e t k!], e -> t k!"
    expert_mm     "[e t k!] i, e i o, e, e o -> [e t k!] o"   i split: the bias is pending
    expert_outer  "[e t k!] i, [e t k!] o, e -> e i o"        t split: a pending sum
    expert_sum    "[e t k!] o, e -> e o"

Rows ``[e t k]`` are k for each of t tokens, sorted by e. A split of t is by token: the weights are
whole, and the counts pending. A split of e is by expert: a rank has all rows of its experts.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.sharding.ops import experts as experts  # registers torch.ops.dt
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.rules.build import Groups, flatten_intervals, make, retarget
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule

_ROWS = "[e t k!]"


def _rows_rule(
    text: str,
    counts: int,
    *,
    top_k: int | None = None,
    linear: Groups = (),
    addend: int | None = None,
    localize: Localizer | None = None,
    flops: str = "",
) -> Builder:
    """Return a builder for an op on rows. ``rows`` in the text stands for the ragged dim. A last
    term after `|` is for the optional operand. ``counts``: the operand with the counts;
    ``top_k``: the position of the argument k, if the shapes do not determine it; ``addend``: the
    optional operand that is added to the result, and so is pending with the operands of a group."""

    def build(call: OpCall) -> Rule:
        left, right = text.split(" -> ")
        terms, _, optional = left.partition(" | ")
        num = len(call.operands)
        has_optional = bool(optional) and num > terms.count(",") + 1
        terms = f"{terms}, {optional}" if has_optional else terms
        addends = (addend,) if addend is not None and addend < num else ()
        rule = make(
            call,
            f"{terms} -> {right}".replace("rows", _ROWS),
            sizes={} if top_k is None else {"k": int(call.args[top_k])},
            linear=[(*group, *addends) for group in linear if max(group) < num],
            addends=addends,
            localize=localize,
            flops=flops,
        )
        return replace(rule, counts=frozenset({counts}))

    return build


def _route(call: OpCall) -> Rule:
    return make(call, f"t k! -> e, {_ROWS}, {_ROWS}", localize=_held_route)


def _held_route(call: OpCall, local: Local) -> OpCall:
    """Keep the rows of the rank's experts only, if experts are split."""
    held = local.result_intervals(0, 0)
    ids, num_experts, *has_spare_id = call.args
    if sum(hi - lo for lo, hi in held) == num_experts:
        return call
    return retarget(
        call, experts.held_route, ids, num_experts, flatten_intervals(held), *has_spare_id
    )


def _with_local_tokens(call: OpCall, local: Local) -> OpCall:
    return call.with_arg(4, local.result_shape()[0])


RULES: dict[str, Builder] = {
    "dt.route.default": _route,
    "dt.take_rows.default": _rows_rule(
        "t d, rows, e | t k! -> rows d", 2, top_k=4, linear=((0,), (3,))
    ),
    "dt.add_rows.default": _rows_rule(
        "rows d, rows, e | t k! -> t d",
        2,
        top_k=5,
        linear=((0,), (3,)),
        localize=_with_local_tokens,
    ),
    "dt.slot_grads.default": _rows_rule(
        "t d, rows d, rows, e -> t k!",
        3,
        top_k=5,
        linear=((0,), (1,)),
        localize=_with_local_tokens,
    ),
    "dt.expert_mm.default": _rows_rule(
        "rows i, e i o, e | e o -> rows o",
        2,
        top_k=4,
        linear=((0,), (1,)),
        addend=3,
        flops="t k i o",
    ),
    "dt.expert_outer.default": _rows_rule(
        "rows i, rows o, e -> e i o", 2, top_k=3, linear=((0,), (1,)), flops="t k i o"
    ),
    "dt.expert_sum.default": _rows_rule("rows o, e -> e o", 1, top_k=2, linear=((0,),)),
}
