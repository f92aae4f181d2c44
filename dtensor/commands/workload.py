"""The model, loss function and batches of a command.

    work = Workload.of(options, meta=True)     # from the options of `add_workload`
    work.title                                 # "gpt2: GPT2LMHeadModel, 124.4 M parameters ..."
    work.graph                                 # the graph of a training step, captured once

The model comes from a Hugging Face configuration (`huggingface.py`) or from a user's function
(`user_function.py`). On the meta device it needs no memory and has no values.
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
from dtensor.commands.user_function import call_workload_function, import_value, is_value_path
from dtensor.errors import PlanningError
from dtensor.frontend.graph import Graph
from dtensor.numerics import dtype_name
from dtensor.private_torch import pytree

ROWS = 8


@dataclass(kw_only=True, repr=False)
class Workload:
    """``batches``: `run` uses them in turn, the other commands use the first. ``stated``: the
    placements, stages, inputs, attention and optimizer of the user's function, by key."""

    name: str
    model: nn.Module
    loss_fn: Callable[..., Any]
    batches: tuple[tuple[Any, ...], ...]
    batch_text: str
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, options: argparse.Namespace, *, meta: bool) -> Workload:
        if is_value_path(options.model):
            return _workload_of_function(options, meta=meta)
        return _workload_of_configuration(options, meta=meta)

    @property
    def batch(self) -> tuple[Any, ...]:
        return self.batches[0]

    @property
    def num_rows(self) -> int:
        """The size of the first dim of the first tensor of the batch."""
        for leaf in pytree.tree_leaves(self.batch):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                return leaf.shape[0]
        return 1

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def title(self) -> str:
        return f"{self.model_title}; a batch of {self.batch_text}"

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
        """The graph of a training step."""
        return BoundCall.of(self.loss_fn, (self.model, *self.batch), {}).graph("loss")


_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _workload_of_configuration(options: argparse.Namespace, *, meta: bool) -> Workload:
    from dtensor.commands.huggingface import configuration, model_of, random_batch

    config = configuration(options.model, dict(options.set))
    model, head = model_of(config, options.model, options.head, options.dtype, meta=meta)
    inputs, batch_text = random_batch(
        config, head, rows=options.batch or ROWS, length=options.length, meta=meta
    )
    loss_fn = (_image_loss if "pixel_values" in inputs else _text_loss)()
    loss_fn.__name__ = config.model_type
    return Workload(
        name=config.model_type,
        model=model,
        loss_fn=loss_fn,
        batches=(tuple(inputs.values()),),
        batch_text=batch_text,
    )


# Plans and pages show the names of the arguments of these loss functions. Each call makes a new
# function, because the caller names it after its model.
def _text_loss() -> Callable[..., Any]:
    def loss_fn(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=input_ids, labels=labels).loss

    return loss_fn


def _image_loss() -> Callable[..., Any]:
    def loss_fn(model: nn.Module, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return model(pixel_values=pixel_values, labels=labels).loss

    return loss_fn


def _workload_of_function(options: argparse.Namespace, *, meta: bool) -> Workload:
    path = options.model
    for name in ("batch", "length", "dtype", "head"):
        if getattr(options, name) is not None:
            raise PlanningError(
                f"--{name}: the result of {path} has its own; it is for models by configuration.\n"
                f"fix: leave it out, or --set NAME=VALUE for an argument of the function"
            )
    function = import_value(path, "a function that returns (model, loss_fn, *batch)")
    meta = meta and not options.real
    result = call_workload_function(function, path, dict(options.set), meta=meta)
    shapes = [
        f"{dtype_name(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
        for leaf in pytree.tree_leaves(result.batches[0])
        if isinstance(leaf, torch.Tensor)
    ]
    return Workload(
        name=Path(path.rpartition(":")[0]).stem,
        model=result.model,
        loss_fn=result.loss_fn,
        batches=result.batches,
        batch_text=", ".join(shapes) or "no tensors",
        stated=result.stated,
    )
