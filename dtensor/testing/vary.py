"""Makes arguments of an op: variations of the arguments of one call, or examples from its schema.

    negated((x, 2.0), {})                            # (-x, 2.0): only tensors are negated
    other_sizes(aten.mm.default, (x, w), {}, rule_for)      # 4x6 @ 6x2: 5x7 @ 7x3, 2x2 @ 2x3, ...
    example(aten.mm.default)                         # "torch.randn(4, 4), torch.randn(4, 4)"

Other sizes are sizes of the rule's factors, so the operands still fit together. Larger tensors
repeat the values, so indices stay in range. The op may reject the arguments; see `accepts`.
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
from dtensor.testing.oracle import call_of, run_global

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The args and kwargs of a call."""
_MAX_SINGLES = 4
"""The number of factors that are tried at size 1."""


def accepts(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the op runs with these global arguments."""
    try:
        target(*args, **kwargs)
    except Exception:  # ops raise many types for arguments that they do not support
        return False
    return True


def negated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments with all floating-point and complex tensors negated."""
    return _map(lambda x: -x if x.is_floating_point() or x.is_complex() else x, args, kwargs)


def to_half(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments with all floating-point tensors in bfloat16."""
    return _map(lambda x: x.bfloat16() if x.is_floating_point() else x, args, kwargs)


def _map(
    change: Callable[[torch.Tensor], torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Arguments:
    return pytree.tree_map_only(torch.Tensor, change, (tuple(args), dict(kwargs)))


def other_sizes(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: Callable[[OpCall], Rule],
) -> Iterator[Arguments]:
    """Yield the arguments with other sizes of the factors of the rule: all larger by one, all 2 or
    3, and one factor of size 1."""
    call, operands = call_of(target, args, kwargs)
    call, _ = run_global(call, operands)
    rule_of_call = rule(call)
    if rule_of_call.experts:
        return  # the values of counts and slots determine the sizes of rows
    factors = [f for f, size in rule_of_call.sizes if size > 0]
    changes = [
        {f: rule_of_call.size[f] + 1 for f in factors},
        {f: 2 if rule_of_call.size[f] > 2 else 3 for f in factors},
        *({f: 1} for f in factors[:_MAX_SINGLES]),
    ]
    for change in changes:
        resized = [
            _resize(x, dims, rule_of_call, rule_of_call.size | change)
            for x, dims in zip(operands, rule_of_call.operands, strict=True)
        ]

        def tensor(operand: Operand, tensors: Sequence[torch.Tensor] = resized) -> torch.Tensor:
            return tensors[operand.index]

        yield pytree.tree_map_only(Operand, tensor, (call.args, dict(call.kwargs)))


def _resize(x: torch.Tensor, dims: Dims, rule: Rule, sizes: Mapping[str, int]) -> torch.Tensor:
    """Cut or repeat the values of ``x`` so that its factors have these sizes."""
    for index, dim in enumerate(dims):
        total = sum(math.prod(sizes[factor] for factor in product) for product in dim)
        if total != rule.dim_size(dim):
            x = x.index_select(index, torch.arange(total) % x.shape[index])
    return x


# -- from the schema -----------------------------------------------------------------------------

_SHAPES = ((4, 6), (4, 4), (4,), (2, 4, 4), (2, 4, 6, 6))
_LISTS = ([1], [0, 1], [2, 12])


def example(target: OpOverload) -> str:
    """Return arguments of a call as Python code, which the op accepts on the meta device. If no
    example is accepted, return the names of the arguments that have no default."""
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    for shape, numbers in itertools.product(_SHAPES, _LISTS):
        examples = [_argument(str(a.type), shape, numbers) for a in required]
        values = [example[1] for example in examples if example is not None]
        kwargs = {a.name: v for a, v in zip(required, values) if a.kwarg_only}
        args = values[: len(values) - len(kwargs)]
        if len(values) == len(required) and accepts(target, args, kwargs):
            texts = [example[0] for example in examples if example is not None]
            return ", ".join(
                f"{a.name}={text}" if a.kwarg_only else text for a, text in zip(required, texts)
            )
    return ", ".join(f"{a.name}=..." if a.kwarg_only else a.name for a in required)


def _argument(kind: str, shape: tuple[int, ...], numbers: list[int]) -> tuple[str, Any] | None:
    """Return the code of an example argument of this schema type, and its value with meta tensors;
    None for an unknown type."""
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
