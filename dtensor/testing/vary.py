"""Arguments of an op, made from those of one call (negated, resized, halved) or from its schema.

    negated((x, 2.0), {})                            # (-x, 2.0): numbers are not turned
    other_sizes(aten.mm.default, (x, w), {}, rule_for)      # 4x6 @ 6x2: 5x7 @ 7x3, 2x2 @ 2x3, ...
    example(aten.mm.default)                         # "torch.randn(4, 4), torch.randn(4, 4)"

Sizes are changed by the rule's own factors, so operands still belong together; values are repeated,
so indices stay in range. Invariants: nothing here says that the op accepts what is made; see
`without_error`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dtensor.private_torch import OpOverload, pytree
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.rules.rule import Dims, Rule
from dtensor.testing.oracle import call_of, run_whole

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
    return pytree.tree_map_only(torch.Tensor, change, (tuple(args), dict(kwargs)))


def other_sizes(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: Callable[[OpCall], Rule],
) -> Iterator[Given]:
    """The call with each factor of its rule one larger, with all small, and with one of size 1."""
    call, operands = call_of(target, args, kwargs)
    call, _ = run_whole(call, operands)
    rule_of_call = rule(call)
    factors = [f for f, size in rule_of_call.sizes if size > 0]
    changes = [
        {f: rule_of_call.size[f] + 1 for f in factors},
        {f: 2 if rule_of_call.size[f] > 2 else 3 for f in factors},
        *({f: 1} for f in factors[:_SINGLES]),
    ]
    for change in changes:
        resized = [
            _resize(x, dims, rule_of_call, rule_of_call.size | change)
            for x, dims in zip(operands, rule_of_call.operands, strict=True)
        ]

        def given(operand: Operand, tensors: Sequence[torch.Tensor] = resized) -> torch.Tensor:
            return tensors[operand.index]

        yield pytree.tree_map_only(Operand, given, (call.args, dict(call.kwargs)))


def _resize(x: torch.Tensor, dims: Dims, rule: Rule, sizes: Mapping[str, int]) -> torch.Tensor:
    for index, dim in enumerate(dims):
        total = sum(math.prod(sizes[factor] for factor in product) for product in dim)
        if total != rule.dim_size(dim):
            x = x.index_select(index, torch.arange(total) % x.shape[index])
    return x


# -- from the schema -----------------------------------------------------------------------------

_SHAPES = ((4, 6), (4, 4), (4,), (2, 4, 4), (2, 4, 6, 6))
_LISTS = ([1], [0, 1], [2, 12])


def example(target: OpOverload) -> str:
    """Arguments of a call, as code: the first of a few that the op accepts on the meta device.

    Of an op that accepts none of these, the names of the arguments that have no default.
    """
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    for shape, numbers in itertools.product(_SHAPES, _LISTS):
        arguments = [_argument(str(a.type), shape, numbers) for a in required]
        values = [m[1] for m in arguments if m is not None]
        named = {a.name: v for a, v in zip(required, values) if a.kwarg_only}
        given = values[: len(values) - len(named)]
        if len(values) == len(required) and without_error(target, given, named):
            texts = [m[0] for m in arguments if m is not None]
            return ", ".join(
                f"{a.name}={text}" if a.kwarg_only else text for a, text in zip(required, texts)
            )
    return ", ".join(f"{a.name}=..." if a.kwarg_only else a.name for a in required)


def _argument(kind: str, shape: tuple[int, ...], numbers: list[int]) -> tuple[str, Any] | None:
    """Its text and, for a tensor, one without values; None where the type is not one of these."""
    tensor = f"torch.randn({', '.join(map(str, shape))})", torch.empty(shape, device="meta")
    match kind:
        case "Tensor":
            return tensor
        case "List[Tensor]":
            return f"[{tensor[0]}, {tensor[0]}]", [tensor[1], tensor[1]]
        case "List[int]":
            return str(numbers), numbers
        case "int":
            return str(numbers[0]), numbers[0]
        case "float" | "number":
            return "0.5", 0.5
        case "bool":
            return "False", False
        case _ if kind.startswith("Optional"):
            return "None", None
        case _:
            return None
