"""Ops that raise the exceptions of `tests.daft.raisers`, and functions that make anything on hosts
raise; hosts import this module."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import Call, Cluster, Function
from tests.daft.programs import function, program
from tests.daft.raisers import act, act_on


@torch.library.custom_op("raising::forward", mutates_args=())
def forward(x: Tensor, kind: Tensor) -> Tensor:
    act_on(kind)
    return x.clone()


@torch.library.custom_op("raising::backward", mutates_args=())
def backward(x: Tensor, kind: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("raising::backward_of", mutates_args=())
def backward_of(grad: Tensor, kind: Tensor) -> Tensor:
    act_on(kind)
    return grad.clone()


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.kind = inputs[1]


for op in (forward, backward, backward_of):
    op.register_fake(lambda x, kind: torch.empty_like(x))
    dt.rule(f"raising::{op._name}", "b f, k l -> b f")
forward.register_autograd(lambda ctx, grad: (grad, None), setup_context=_keep)
backward.register_autograd(
    lambda ctx, grad: (torch.ops.raising.backward_of(grad, ctx.kind), None), setup_context=_keep
)


NONE = torch.full((4, 4), -1.0)


class Net(nn.Module):
    """A model that raises in its forward or its backward, chosen by two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = torch.ops.raising.forward(self.up(x), first)
        return torch.ops.raising.backward(h, second)


def loss(model: nn.Module, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return model(x, first, second).square().mean()


# -- what hosts run that is not the user's, and may fail all the same ------------------------------

_replaced: list[tuple[Any, str, Any]] = []


def replace_there(name: str) -> tuple[()]:
    """Replace the function at "module:attribute" by one that raises SystemExit."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    _replaced.append((owner, last, getattr(owner, last)))
    setattr(owner, last, _exit)
    return ()


def restore_there() -> tuple[()]:
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)
    return ()


def _exit(*args: object, **kwargs: object) -> None:
    act("SystemExit")


@contextmanager
def replaced(cluster: Cluster, name: str) -> Iterator[None]:
    """Replace a function on all hosts of a launch within the block."""
    source = "def forward():\n    return replace(what)"
    fn = function("replace", source, replace=replace_there, what=name)
    _on_all(cluster, fn)
    try:
        yield
    finally:
        restore_there()
        if cluster.failure is None:
            _on_all(cluster, Function.of(restore_there))


def _on_all(cluster: Cluster, fn: Function) -> None:
    lists = [[Call(fn.name, (), ())]] * cluster.size
    cluster.run(cluster.load(program(*lists, functions=[fn])), [{}] * cluster.size).get()
