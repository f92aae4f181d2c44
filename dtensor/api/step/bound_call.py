"""A function bound to its arguments: the unit that is captured, planned and run.

    call = BoundCall.of(loss_fn, (model, tokens, targets), {})
    call.leaves          # (model, tokens, targets)
    call.key()           # equal for calls that can share a captured program
    call.graph("loss")   # the captured Graph

A leaf is a tensor (also on the meta device), a DTensor, a TensorSpec that stands for a DTensor, a
module, or any other object, which is a constant of the program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from dtensor.api.model.models import Models
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.statements import CapturedCall, Options
from dtensor.api.step.flatten_arguments import flatten_arguments
from dtensor.api.store.handle import TensorHandle, contiguous_layout
from dtensor.api.values.lazy_parameters import without_hook
from dtensor.errors import check_dense
from dtensor.frontend.capture.autocast import surrounding
from dtensor.frontend.capture.call_as_module import leaf_names
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph
from dtensor.private_torch import pytree
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.signals import act

Grads = Literal["none", "loss", "tangents"]
"""Which gradients a capture adds to the program: "none"; "loss": the gradients of a loss by the
parameters; "tangents": the gradients by leaves that require grad, from cotangents of the results,
which become inputs of the program."""


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A function, and the leaves and the pytree structure of its (args, kwargs)."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Bind the arguments. Raises PlanningError if an argument hides tensors from pytrees."""
        if not kwargs and all(isinstance(arg, _COMMON_LEAVES) for arg in args):
            return BoundCall(fn, args, _flat_tree(len(args)))
        leaves, tree = flatten_arguments(args, dict(kwargs))
        return BoundCall(fn, leaves, tree)

    def key(self) -> object:
        """Return a hashable of all that a captured program depends on in this call: the leaves
        (`leaf_key`), the arrangement of the modules, and the autocast around the call."""
        is_flat = self.tree is _flat_tree(len(self.leaves))
        tree = len(self.leaves) if is_flat else self.tree  # hashing an int is faster
        return (tree, tuple(map(leaf_key, self.leaves)), surrounding(), self.arrangement)

    def modules(self) -> list[ParallelModule]:
        """Return the parallelized modules among the function and the leaves, with repetitions."""
        return [leaf for leaf in (self.fn, *self.leaves) if isinstance(leaf, ParallelModule)]

    def models(self, mesh: Mesh) -> Models:
        """Return the parallelized modules, each with its argument's name. Raises PlanningError if
        they cannot be in one program on ``mesh``."""
        models = list({id(module): module for module in self.modules()}.values())
        names = ["the model"] * len(models)
        if len(models) > 1:
            by_leaf: dict[int, str] = {}
            for leaf, name in zip(self.leaves, self.leaf_names(), strict=True):
                by_leaf.setdefault(id(leaf), name)
            names = [by_leaf.get(id(model), "the model") for model in models]
        return Models.of(models, names, mesh)

    def leaf_names(self) -> list[str]:
        """Return the name of each leaf in messages, such as "tokens" or "batch.ids"."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.tree)
        return leaf_names(self.fn, args, kwargs)

    def look(self) -> None:
        """Update each model's record of its present submodules and parameters."""
        for model in self.modules():
            model.look()

    @property
    def arrangement(self) -> tuple[int, ...]:
        """One number per model, which is the same while the same tensors have the same names."""
        return tuple(model.seen.number for model in self.modules())

    def specs(self) -> dict[int, TensorSpec]:
        """Return the specs of DTensors and the TensorSpecs among the leaves, by leaf index."""
        specs = ((i, spec_of(leaf)) for i, leaf in enumerate(self.leaves))
        return {i: spec for i, spec in specs if spec is not None}

    def absent(self) -> set[str]:
        """Return the names of the arguments that are None, or are None by default."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.tree)
        names = zip(leaf_names(self.fn, args, kwargs), self.leaves, strict=True)
        absent = {name for name, leaf in names if leaf is None}
        values = pytree.tree_leaves((args, kwargs), is_leaf=is_dataclass)
        for name, value in zip(
            leaf_names(self.fn, args, kwargs, is_dataclass), values, strict=True
        ):
            # pytrees have no leaf for a field that is None
            value_fields = fields(value) if is_dataclass(value) else ()
            absent |= {f"{name}.{f.name}" for f in value_fields if getattr(value, f.name) is None}
        with suppress(ValueError, TypeError):  # a builtin without a signature
            fn = self.fn.forward if isinstance(self.fn, nn.Module) else self.fn
            bound = inspect.signature(fn).bind(*args, **kwargs)
            passed = set(bound.arguments)
            bound.apply_defaults()
            arguments = bound.arguments.items()
            absent |= {name for name, value in arguments if value is None and name not in passed}
        return absent

    def on_meta(self, *, keep_strides: bool = False) -> BoundCall:
        """Return this call without data: specs for DTensors, meta tensors for other tensors.

        ``keep_strides``: plain tensors keep their strides; otherwise they become contiguous.
        """

        def without_data(leaf: Any) -> Any:
            """Return the spec of a DTensor, or an empty meta tensor for another tensor."""
            if isinstance(leaf, TensorHandle):
                return leaf.spec
            if keep_strides and type(leaf) is torch.Tensor:
                size, stride, dtype = leaf.shape, leaf.stride(), leaf.dtype
                empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
                return empty.requires_grad_(leaf.requires_grad)
            return to_meta(leaf)

        return replace(self, leaves=tuple(map(without_data, self.leaves)))

    def capture_inputs(
        self,
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], nn.Module | None]:
        """Return the function to capture, its args and kwargs, and the first model's module (or
        None), whose parameters have names without a prefix."""
        leaves = [for_capture(leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        fn = self.fn.module if isinstance(self.fn, ParallelModule) else self.fn
        return fn, args, kwargs, next((model.module for model in self.modules()), None)

    def capture(
        self,
        mesh: Mesh,
        grads: Grads,
        options: Options,
        name: str,
        graph: Graph | None = None,
    ) -> CapturedCall:
        """Capture the call unless ``graph`` is its graph, and return the graph with all that is
        stated about the call. Raises PlanningError. The caller has called `look`."""
        models = self.models(mesh)
        graph = graph or self.graph(grads)
        act()  # on signals that came during the capture
        return CapturedCall(
            name=name,
            graph=graph,
            models=models,
            mesh=mesh,
            options=options,
            specs=self.specs(),
            absent=self.absent(),
        )

    def graph(self, grads: Grads, *, each_call: bool = False) -> Graph:
        """Run the function on tensors without data, and return its graph."""
        fn, args, kwargs, main = self.capture_inputs()
        return capture(fn, args, kwargs, grads=grads, each_call=each_call, main=main)


_COMMON_LEAVES = (torch.Tensor, TensorSpec, ParallelModule)


@cache
def _flat_tree(num_args: int) -> pytree.TreeSpec:
    """Return the structure of a call whose arguments are all leaves."""
    return pytree.tree_structure(((None,) * num_args, {}))


class _ByIdentity:
    """Compares an object by identity, and holds it, so that its id is not reused."""

    __slots__ = ("object",)

    def __init__(self, object: object) -> None:
        self.object = object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


def leaf_key(leaf: Any) -> object:
    """Return the part of a leaf that a captured program depends on: metadata of a tensor, layout of
    a DTensor, value of a number or string, identity of any other object."""
    match leaf:
        case TensorHandle():
            with without_hook():  # otherwise torch calls __torch_function__ for each attribute
                return (leaf.held, leaf.requires_grad)
        case TensorSpec():
            return (contiguous_layout(leaf), leaf.requires_grad)
        case torch.Tensor():
            check_dense("an argument", leaf, name="pass x")
            return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        case float():
            return repr(leaf)  # 0.0 == -0.0, and nan != nan
        case int() | str() | bool() | None:
            return (type(leaf), leaf)
        case _:
            return _ByIdentity(leaf)


def for_capture(leaf: Any) -> Any:
    """Return the leaf that a capture runs on: a plain module, a tensor without placements."""
    match leaf:
        case ParallelModule():
            return leaf.module
        case TensorHandle() | TensorSpec():
            empty = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
            return empty.requires_grad_(leaf.requires_grad)
        case _:
            return leaf


def to_meta(leaf: Any) -> Any:
    """Return a contiguous meta tensor like a tensor, a DTensor or a spec; any other leaf as is."""
    if isinstance(leaf, (TensorSpec, torch.Tensor)):
        with without_hook():
            shape, dtype, grad = tuple(leaf.shape), leaf.dtype, leaf.requires_grad
        return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)
    return leaf


def spec_of(leaf: Any) -> TensorSpec | None:
    """Return the spec of a DTensor, or a spec itself; None for any other leaf."""
    if isinstance(leaf, TensorHandle):
        return leaf.spec
    return leaf if isinstance(leaf, TensorSpec) else None
