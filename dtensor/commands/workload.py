"""What a command is about: a model, its loss and a batch of it.

    work = Workload.of(options, meta=True)     # of `options.model` and those of `add_workload`
    work.title                                 # "gpt2: GPT2LMHeadModel, 124.4 M parameters ..."
    work.graph                                 # its step, captured once for all that ask

A model of Hugging Face's by its configuration (huggingface.py), or a function of the user's
(user_function.py). On the meta device a model needs no memory, and has no values. Not here: how
it is placed (placed_workload.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.api.step.bound_call import BoundCall
from dtensor.commands.user_function import given_by, is_named, named_value
from dtensor.errors import PlanningError
from dtensor.frontend.graph import Graph
from dtensor.numerics import dtype_name
from dtensor.private_torch import pytree

ROWS = 8


@dataclass(kw_only=True, repr=False)
class Workload:
    """``batches``: of `run`, in turn; all others look at the first. ``stated``: what the user's
    function says of placements, stages, inputs and the optimizer."""

    name: str
    model: nn.Module
    loss_fn: Callable[..., Any]
    batches: tuple[tuple[Any, ...], ...]
    batch_words: str
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, options: argparse.Namespace, *, meta: bool) -> Workload:
        if is_named(options.model):
            return _of_function(options, meta=meta)
        return _of_configuration(options, meta=meta)

    @property
    def batch(self) -> tuple[Any, ...]:
        return self.batches[0]

    @property
    def num_rows(self) -> int:
        """Of the batch: the first dim of its first tensor."""
        for leaf in pytree.tree_leaves(self.batch):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                return leaf.shape[0]
        return 1

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def title(self) -> str:
        return f"{self.model_title}; a batch of {self.batch_words}"

    @property
    def model_title(self) -> str:
        num = self.num_parameters
        count = next(
            (f"{num / scale:.1f} {unit}" for scale, unit in _COUNTS if num >= scale), str(num)
        )
        dtypes = {dtype_name(p.dtype) for p in self.model.parameters()}
        kind = type(self.model).__name__
        return f"{self.name}: {kind}, {count} parameters in {', '.join(sorted(dtypes)) or 'none'}"

    @cached_property
    def graph(self) -> Graph:
        """Of a training step; its model and batch may be on the meta device."""
        return BoundCall.of(self.loss_fn, (self.model, *self.batch), {}).graph("loss")


_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _of_configuration(options: argparse.Namespace, *, meta: bool) -> Workload:
    from dtensor.commands.huggingface import batch, configuration, model_of

    what = options.model
    config = configuration(what, dict(options.set))
    built = model_of(config, what, options.head, options.dtype, meta=meta)
    inputs, words = batch(
        config,
        built.head,
        rows=options.batch or ROWS,
        length=options.length,
        meta=meta,
    )
    loss_fn = (_of_pictures if "pixel_values" in inputs else _of_text)()
    name = config.model_type
    loss_fn.__name__ = name
    return Workload(
        name=name,
        model=built.model,
        loss_fn=loss_fn,
        batches=(tuple(inputs.values()),),
        batch_words=words,
    )


# Their arguments' names are what plans and pages show.
def _of_text() -> Callable[..., Any]:
    def loss_fn(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=input_ids, labels=labels).loss

    return loss_fn


def _of_pictures() -> Callable[..., Any]:
    def loss_fn(model: nn.Module, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return model(pixel_values=pixel_values, labels=labels).loss

    return loss_fn


def _of_function(options: argparse.Namespace, *, meta: bool) -> Workload:
    what = options.model
    for name in ("batch", "length", "dtype", "head"):
        if getattr(options, name) is not None:
            raise PlanningError(
                f"--{name}: the result of {what} has its own; it is for models by configuration.\n"
                f"fix: leave it out, or --set NAME=VALUE for an argument of the function"
            )
    value = named_value(what, "a function that returns (model, loss_fn, *batch)")
    given = given_by(value, what, dict(options.set), meta=meta and not options.real)
    shapes = [
        f"{dtype_name(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
        for leaf in pytree.tree_leaves(given.batches[0])
        if isinstance(leaf, torch.Tensor)
    ]
    return Workload(
        name=Path(what.rpartition(":")[0]).stem,
        model=given.model,
        loss_fn=given.loss_fn,
        batches=given.batches,
        batch_words=", ".join(shapes) or "no tensors",
        stated=given.stated,
    )
