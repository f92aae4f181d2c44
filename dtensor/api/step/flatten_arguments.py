"""The leaves of a call's arguments, and how they lie in them.

    flatten_arguments((model, {"x": x, "y": y}), {})  # (model, x, y), and the tree
    flatten_arguments((model, BatchEncoding(...)), {})  # its tensors: the function is given another
                                                # BatchEncoding, of those that stand for them
    flatten_arguments((model, numpy_array), {})  # a tensor, of the array's own memory

A mapping that torch's pytrees do not know is made known to them, its class once for the process,
as torch.export asks users to do for dataclasses: it must be made of a dict. Rejected: a wrapper
around it, which each of those who flatten a call again would have to know.

Invariants: no tensor stays inside a leaf, where it would be a constant of the program that no later
call looks at: PlanningError. Not here: what a leaf is to a program (bound_call.py).
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

_DEEPEST = 4  # how far into an unknown object tensors are looked for
_NUMBERS = "biufc"  # kinds of numpy's dtypes that torch has too; not texts and objects


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
    """PlanningError for an argument whose tensors are out of sight."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if any([_learned(leaf) for leaf in leaves]):
        return flatten_arguments(args, kwargs)
    leaves = [_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    for leaf in leaves:
        _check_leaf(leaf)
    return tuple(leaves), tree


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    """Of its memory, where torch can have that; what torch has no dtype for stays an array."""
    if array.dtype.kind not in _NUMBERS or not array.dtype.isnative:
        return array
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError:
        return array


def _learned(leaf: Any) -> bool:
    """Whether it is a mapping whose class pytrees know from now on."""
    kind: type[Any] = type(leaf)
    if not isinstance(leaf, Mapping) or not _has_leaves(leaf):
        return False
    try:
        again = kind(dict(leaf))
        alike = type(again) is kind and list(again) == list(leaf)
    except Exception:  # its __init__ is not known, and may raise anything
        return False
    if alike:
        pytree.register_pytree_node(
            kind,
            lambda held: (list(held.values()), list(held)),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
            flatten_with_keys_fn=_with_keys,
        )
    return alike


def _with_keys(held: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    return [(pytree.MappingKey(key), value) for key, value in held.items()], list(held)


def _has_leaves(leaf: Mapping[Any, Any]) -> bool:
    """Whether tensors, or arrays that become some, are its values."""
    values = pytree.tree_leaves(list(leaf.values()))
    return any(isinstance(x, torch.Tensor | TensorSpec | np.ndarray | Mapping) for x in values)


def _check_leaf(leaf: Any) -> None:
    """PlanningError for an object with tensors inside, which pytrees do not open: they would be
    constants, and a later call's would not be looked at."""
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
            hidden = next(_tensors("", leaf, _DEEPEST), None)
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


def _tensors(path: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are reached through mappings, sequences and attributes, with their paths."""
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
        yield from _tensors(f"{path}{name}", item, depth - 1)
