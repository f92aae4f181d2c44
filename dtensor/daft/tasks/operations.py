"""Tasks of daft's own: what futures and groups need done where the values are.

    OPERATIONS["fold"]("sum", [grads0, grads1])      # leaf by leaf, a left fold in this order

Values are pytrees. `piece` and `join` cut one into pieces and put them together again, so that a
large all_reduce costs each member 2 (n-1)/n of the value instead of n-1 times; a fold acts on each
element by itself, so that cutting changes no bit.

They run inside an actor's process and know nothing of actors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtensor.daft.ir.instructions import Op
from dtensor.numerics import fold as fold_tensors


def value(given: object) -> object:
    """What it is given: a copy, where the actor is."""
    return given


def item(given: Any, key: object) -> object:
    return given[key]


def fold(op: Op, parts: Sequence[object]) -> object:
    """The parts' leaves, folded; tensors as `transport.fold` does, numbers in the same order."""
    leaves, specs = zip(*map(_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        different = "\n".join(f"  member {i}: {spec}" for i, spec in enumerate(specs))
        raise ValueError(f"The members' values differ in structure.\n{different}")
    return pytree.tree_unflatten(
        [_fold_leaf(op, column) for column in zip(*leaves, strict=True)], specs[0]
    )


def piece(given: object, index: int, num: int) -> tuple[list[Any], object]:
    """Piece `index` of `num`: of each tensor its elements, of anything else all on piece 0."""
    leaves, _ = _flatten(given)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kept.append(leaf.detach().reshape(-1).tensor_split(num)[index])
        else:
            kept.append(leaf if index == 0 else 0)
    return kept, _form(given)


def fold_piece(op: Op, parts: Sequence[tuple[list[Any], object]]) -> list[Any]:
    """The fold of everyone's piece; the forms tell whether the whole values fit together."""
    forms = [form for _, form in parts]
    if any(form != forms[0] for form in forms):
        different = "\n".join(f"  member {i}: {form}" for i, form in enumerate(forms))
        raise ValueError(f"The members' values differ in shape, dtype or structure.\n{different}")
    columns = zip(*(kept for kept, _ in parts), strict=True)
    return [_fold_leaf(op, column) for column in columns]


def join(given: object, pieces: Sequence[list[Any]]) -> object:
    """A value like `given`, of the folded pieces."""
    leaves, spec = _flatten(given)
    joined: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            joined.append(torch.cat([kept[i] for kept in pieces]).reshape(leaf.shape))
        else:
            joined.append(pieces[0][i])
    return pytree.tree_unflatten(joined, spec)


OPERATIONS: Mapping[str, Callable[..., object]] = {
    "value": value,
    "item": item,
    "fold": fold,
    "piece": piece,
    "fold_piece": fold_piece,
    "join": join,
}


def _flatten(given: object) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(given)


def _form(given: object) -> object:
    leaves, spec = _flatten(given)
    return [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ], str(spec)


def _fold_leaf(op: Op, column: Sequence[Any]) -> object:
    first = column[0]
    if all(isinstance(part, Tensor) for part in column):
        if any(part.shape != first.shape or part.dtype != first.dtype for part in column):
            raise ValueError(
                f"The members' tensors differ: "
                f"{[f'{part.dtype}{list(part.shape)}' for part in column]}."
            )
        with torch.no_grad():
            return fold_tensors(column, op)
    if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in column):
        raise TypeError(
            f"Tensors and numbers can be reduced, got {[type(part).__name__ for part in column]}."
        )
    total = first
    for part in column[1:]:
        total = (
            total + part if op == "sum" else max(total, part) if op == "max" else min(total, part)
        )
    return total
