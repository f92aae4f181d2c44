"""Flatten the arguments of a call into leaves and a pytree structure.

    flatten_arguments((model, {"x": x, "y": y}), {})    # (model, x, y), and the structure
    flatten_arguments((model, BatchEncoding(...)), {})  # the tensors in it are leaves
    flatten_arguments((model, numpy_array), {})         # a tensor that shares the array's memory

A Mapping class that pytrees do not know is registered with them, once per process, if an instance
can be made from a dict. No leaf may contain tensors: they would be constants of the program, and
later calls would ignore their new values. Such an argument raises PlanningError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dtensor.api.model.parallel import ParallelModule
from dtensor.daft import Future, GroupFuture
from dtensor.errors import PlanningError
from dtensor.numerics import dtype_name
from dtensor.private_torch import pytree
from dtensor.sharding.spec.spec import TensorSpec

_MAX_DEPTH = 4  # of the search for tensors in an unknown object
_TENSOR_KINDS = "biufc"  # kinds of numpy dtypes that torch has too; not strings and objects


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
    """Return the leaves and the structure of ``(args, kwargs)``. Raises PlanningError if an
    argument contains tensors that pytrees do not find."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if any([_register_mapping(leaf) for leaf in leaves]):
        return flatten_arguments(args, kwargs)
    leaves = [_as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    for leaf in leaves:
        _check_leaf(leaf)
    return tuple(leaves), tree


def _as_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor of the array's elements, which shares its memory if it is contiguous and
    writable. An array without a torch dtype is returned as is."""
    if array.dtype.kind not in _TENSOR_KINDS or not array.dtype.isnative:
        return array
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError:
        return array


def _register_mapping(leaf: Any) -> bool:
    """Register the class of a mapping with tensors as a pytree node, if it can be made from a dict.
    Return whether it was registered."""
    kind: type[Any] = type(leaf)
    if not isinstance(leaf, Mapping) or not _has_tensors(leaf):
        return False
    try:
        copy = kind(dict(leaf))
        is_same = type(copy) is kind and list(copy) == list(leaf)
    except Exception:  # the class may refuse a dict with any exception
        return False
    if is_same:
        pytree.register_pytree_node(
            kind,
            lambda mapping: (list(mapping.values()), list(mapping)),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
            flatten_with_keys_fn=_with_keys,
        )
    return is_same


def _with_keys(mapping: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    return [(pytree.MappingKey(key), value) for key, value in mapping.items()], list(mapping)


def _has_tensors(leaf: Mapping[Any, Any]) -> bool:
    values = pytree.tree_leaves(list(leaf.values()))
    return any(isinstance(x, torch.Tensor | TensorSpec | np.ndarray | Mapping) for x in values)


def _check_leaf(leaf: Any) -> None:
    """Raise PlanningError if a leaf has tensors inside: they would be constants of the program."""
    match leaf:
        case torch.Tensor() | TensorSpec() | ParallelModule() | torch.nn.Module():
            return
        case int() | float() | complex() | str() | bytes() | None:
            return
        case Future() | GroupFuture():
            raise PlanningError(
                f"an argument is {leaf!r}, whose value is not here yet.\n"
                f"fix: wait for it, as in future.get()"
            )
        case _:
            hidden = next(_tensors_in("", leaf, _MAX_DEPTH), None)
    if hidden is None:
        return
    path, tensor = hidden
    kind = type(leaf).__name__
    fix = f"torch.export.register_dataclass({kind})" if dataclasses.is_dataclass(leaf) else ""
    if isinstance(leaf, Mapping):
        fix = "pass dict(...) of it"
    shape = ",".join(map(str, tensor.shape))
    raise PlanningError(
        f"an argument is a {kind}, and tensors inside one are not seen as arguments.\n"
        f"  {kind}{path}: {dtype_name(tensor.dtype)}[{shape}]\n"
        f"fix: {fix or 'pass the tensors themselves, alone or in a dict, list or named tuple'}"
    )


def _tensors_in(path: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that mappings, sequences and attributes of a value reach, with paths."""
    inside: Iterable[tuple[str, Any]] = ()
    match value:
        case torch.Tensor():
            yield path, value
        case type() | torch.nn.Module() | str() | bytes():
            pass
        case Mapping():
            inside = [(f"[{key!r}]", item) for key, item in value.items()]
        case list() | tuple():
            inside = [(f"[{i}]", item) for i, item in enumerate(value)]
        case _ if not callable(value):
            names: dict[str, None] = dict.fromkeys(getattr(value, "__dict__", ()))
            if dataclasses.is_dataclass(value):  # with slots it has no __dict__
                names.update(dict.fromkeys(f.name for f in dataclasses.fields(value)))
            inside = [(f".{name}", getattr(value, name, None)) for name in names]
        case _:
            pass
    for name, item in inside if depth else ():
        yield from _tensors_in(f"{path}{name}", item, depth - 1)
