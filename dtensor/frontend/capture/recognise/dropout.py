"""A dropout before a residual is added, found by the dropout.

    x + dropout(h, 0.1)     ->  dt.dropout_add(h, x, 0.1)[0]

It takes the place of the dropout among the random ops, which are counted later (random_ops.py): the
same numbers are drawn. Invariants: both have one dtype and one shape, and what is dropped from is
read by the sum alone. Not here: what is dropped in place; sums whose other term comes later.
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
    check_together,
    dtype,
    is_plain,
    is_tensor,
    other,
    shape,
    sole_user,
    take_place,
)
from dtensor.frontend.capture.refusals import is_idle_dropout
from dtensor.frontend.graph import USERS_META, Writer

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt


def dropped_sum(graph: fx.Graph, dropout: fx.Node, writes: Writes) -> tuple[str, fx.Node]:
    """In place. Raises NoMatch."""
    total = sole_user(dropout, aten.add.Tensor)
    if total is None or not is_plain(total) or is_idle_dropout(dropout):
        raise NoMatch("")
    residual = other(total, dropout)
    if not is_tensor(residual) or residual is dropout or shape(residual) != shape(dropout):
        raise NoMatch("")
    if dtype(residual) != dtype(dropout):
        raise NoMatch("the two that it adds have other dtypes")
    if not total.meta["val"].is_contiguous() or layer_of(dropout) != layer_of(total):
        raise NoMatch("")
    if dropout < residual:
        raise NoMatch("what it is added to is computed later")
    check_together((dropout, total))
    if writes.between(dropout, total):
        raise NoMatch("an op changes a value in place within it")
    call = Writer(graph, dropout)
    x, p = dropout.args[:2]
    pair = call(dt.dropout_add.default, x, residual, p, at_seed=0, at_step=0, op=0)
    y = call(operator.getitem, pair, 0)
    for new in (pair, y):  # its line, and so its name, is that of the sum
        new.meta.update({k: total.meta[k] for k in USERS_META if k in total.meta})
    take_place(graph, total, y)
    return "dt.dropout_add", y
