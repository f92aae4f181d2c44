"""Match rotary position embeddings that a program writes out, around their cat of two halves.

    half = x.shape[-1] // 2
    x * cos + cat((-x[..., half:], x[..., :half]), -1) * sin       ->  dt.rope(x, cos, sin)

The halves may be slices, or items of a chunk or a split. Invariants: cos and sin have the same
shape and dtype and broadcast to x; intermediate values are not used elsewhere."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.recognise.constants import Writes
from dtensor.frontend.capture.recognise.matching import (
    NoMatch,
    check_same_checkpoint,
    dtype,
    is_op,
    is_plain,
    is_tensor,
    other_operand,
    replace_node,
    shape,
    sole_user,
    users,
)
from dtensor.frontend.graph import Writer, bound

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt


def rewrite_rope(graph: fx.Graph, cat: fx.Node, writes: Writes) -> tuple[str, fx.Node]:
    """Rewrite a rotary embedding in place; return the op's name and its output. Raises NoMatch."""
    a = bound(cat)
    parts = a["tensors"]
    if len(parts) != 2 or not is_op(parts[0], aten.neg.default):
        raise NoMatch("")
    negated, first = parts
    second = negated.args[0]
    x = _source_of_halves(first, second)
    if x is None or a["dim"] not in (-1, x.meta["val"].dim() - 1):
        raise NoMatch("it does not join the two halves of one tensor")
    rotated = sole_user(cat, aten.mul.Tensor)
    total = None if rotated is None else sole_user(rotated, aten.add.Tensor)
    if rotated is None or total is None or not is_plain(total):
        raise NoMatch("the joined halves are not multiplied and added, or are used elsewhere")
    scaled, sin = other_operand(total, rotated), other_operand(rotated, cat)
    if not is_op(scaled, aten.mul.Tensor) or len(users(scaled)) > 1 or x not in scaled.args:
        raise NoMatch("the other term is not a multiple of the same tensor")
    cos = other_operand(scaled, x)
    if any(len(users(node)) > 1 for node in (negated, first, second)):
        raise NoMatch("a half is used elsewhere")
    _check_angles(x, cos, sin, total)
    nodes = sorted((first, second, negated, cat, rotated, scaled, total))
    check_same_checkpoint(nodes)
    if writes.between(nodes[0], total):
        raise NoMatch("an op changes a value in place within it")
    call = Writer(graph, total)
    new = call(dt.rope.default, x, cos, sin)
    replace_node(graph, total, new)
    return "dt.rope", new


def _check_angles(x: fx.Node, cos: Any, sin: Any, total: fx.Node) -> None:
    """Raise NoMatch unless cos and sin fit x."""
    if not (is_tensor(cos) and is_tensor(sin)):
        raise NoMatch("its angles are numbers")
    if dtype(cos) != dtype(sin) or shape(cos) != shape(sin):
        raise NoMatch("its sines and cosines have different dtypes or shapes")
    if shape(total) != shape(x) or shape(cos)[-1:] != shape(x)[-1:]:
        raise NoMatch("its sines and cosines do not have the size of a row")
    if not (dtype(x).is_floating_point and dtype(cos).is_floating_point):
        raise NoMatch("it has complex operands")


def _source_of_halves(first: Any, second: Any) -> fx.Node | None:
    """Return the value whose halves in the last dim are ``first`` and ``second``, or None."""
    if is_op(first, operator.getitem) and is_op(second, operator.getitem):
        pieces: Any = first.args[0]
        if second.args[0] is not pieces or (first.args[1], second.args[1]) != (0, 1):
            return None
        if not is_op(pieces, aten.chunk.default, aten.split.Tensor) or len(pieces.meta["val"]) != 2:
            return None
        x: Any = pieces.args[0]
        same_shape = shape(first) == shape(second)
        return x if same_shape and _is_last(x, bound(pieces)["dim"]) else None
    if not is_op(first, aten.slice.Tensor) or not is_op(second, aten.slice.Tensor):
        return None
    a, b = bound(first), bound(second)
    x, size = a["self"], shape(a["self"])[-1]
    if b["self"] is not x or not (_is_last(x, a["dim"]) and _is_last(x, b["dim"])):
        return None
    ends = [slice(v["start"], v["end"], v["step"]).indices(size) for v in (a, b)]
    return x if ends == [(0, size // 2, 1), (size // 2, size, 1)] and size % 2 == 0 else None


def _is_last(x: fx.Node, dim: int) -> bool:
    return dim in (-1, x.meta["val"].dim() - 1)
