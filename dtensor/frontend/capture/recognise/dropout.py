"""Match a dropout whose result is added to a residual.

    x + dropout(h, 0.1)     ->  dt.dropout_add(h, x, 0.1)[0]

The new op is at the position of the dropout, so it draws the same random numbers (random_ops.py).
Invariants: both terms have the same dtype and shape, and only the sum reads the dropped tensor.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.layers import layer_of
from dtensor.frontend.capture.recognise.constants import Writes
from dtensor.frontend.capture.recognise.matching import (
    NoMatch,
    check_same_checkpoint,
    dtype,
    is_plain,
    is_tensor,
    other_operand,
    replace_node,
    shape,
    sole_user,
)
from dtensor.frontend.capture.refusals import is_idle_dropout
from dtensor.frontend.graph import USERS_META, Writer

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt


def rewrite_dropout_add(graph: fx.Graph, dropout: fx.Node, writes: Writes) -> tuple[str, fx.Node]:
    """Rewrite a dropout and its sum; return the op's name and the new node. Raises NoMatch."""
    total = sole_user(dropout, aten.add.Tensor)
    if total is None or not is_plain(total) or is_idle_dropout(dropout):
        raise NoMatch("")
    residual = other_operand(total, dropout)
    if not is_tensor(residual) or residual is dropout or shape(residual) != shape(dropout):
        raise NoMatch("")
    if dtype(residual) != dtype(dropout):
        raise NoMatch("its two terms have different dtypes")
    if not total.meta["val"].is_contiguous() or layer_of(dropout) != layer_of(total):
        raise NoMatch("")
    if dropout < residual:
        raise NoMatch("its other term is computed later")
    check_same_checkpoint((dropout, total))
    if writes.between(dropout, total):
        raise NoMatch("an op changes a value in place within it")
    call = Writer(graph, dropout)
    x, p = dropout.args[:2]
    pair = call(dt.dropout_add.default, x, residual, p, at_seed=0, at_step=0, op=0)
    y = call(operator.getitem, pair, 0)
    for new in (pair, y):  # named after the line of the sum
        new.meta.update({k: total.meta[k] for k in USERS_META if k in total.meta})
    replace_node(graph, total, y)
    return "dt.dropout_add", y
