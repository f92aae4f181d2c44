"""Other arguments of the same op, made from one sample call: negated, resized, in half precision.

    negated((x, 2.0), {})                            # (-x, 2.0): numbers are not turned
    other_sizes(aten.mm.default, (x, w), {}, rule_for)      # 4x6 @ 6x2: 5x7 @ 7x3, 2x2 @ 2x2, ...

Sizes are changed by the rule's own factors, so operands still belong together; values are repeated,
so indices stay in range. Invariants: nothing here says that the op accepts what is made; see
`without_error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.rules.rule import Dims, Rule
from dtensor.testing.oracle.trial import call_of, run_whole

Given = tuple[tuple[Any, ...], dict[str, Any]]
_SINGLES = 4  # factors that are tried at size 1


def without_error(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the op accepts these global arguments."""
    # An op may raise anything at arguments that it was not asked for; it is then not certified
    # there, which is what this function answers.
    try:
        target(*args, **kwargs)
    except Exception:
        return False
    return True


def negated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
    return _map(lambda x: -x if x.is_floating_point() or x.is_complex() else x, args, kwargs)


def to_half(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
    return _map(lambda x: x.bfloat16() if x.is_floating_point() else x, args, kwargs)


def _map(
    change: Callable[[torch.Tensor], torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Given:
    return tree_map_only(torch.Tensor, change, (tuple(args), dict(kwargs)))


def other_sizes(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: Callable[[OpCall], Rule],
) -> Iterator[Given]:
    """The call with each factor of its rule one larger, with all small, and with one of size 1."""
    call, operands = call_of(target, args, kwargs)
    call, _ = run_whole(call, operands)
    found = rule(call)
    factors = [f for f, size in found.sizes if size > 0]
    changes = [
        {f: found.size[f] + 1 for f in factors},
        {f: 2 if found.size[f] > 2 else 3 for f in factors},
        *({f: 1} for f in factors[:_SINGLES]),
    ]
    for change in changes:
        resized = [
            _resize(x, dims, found, found.size | change)
            for x, dims in zip(operands, found.operands, strict=True)
        ]

        def given(operand: Operand, tensors: Sequence[torch.Tensor] = resized) -> torch.Tensor:
            return tensors[operand.index]

        yield tree_map_only(Operand, given, (call.args, dict(call.kwargs)))


def _resize(x: torch.Tensor, dims: Dims, rule: Rule, sizes: Mapping[str, int]) -> torch.Tensor:
    for index, dim in enumerate(dims):
        total = 0
        for product in dim:
            part = 1
            for factor in product:
                part *= sizes[factor]
            total += part
        if total != rule.dim_size(dim):
            x = x.index_select(index, torch.arange(total) % x.shape[index])
    return x
