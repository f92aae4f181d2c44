"""Leaves of a call's arguments: which programs are the same, what capture is shown of each.

    leaf_key(torch.ones(8, 4))    # ((8, 4), torch.float32, False): its numbers do not count
    check_leaf("batch", Batch(x, y))     # PlanningError: its tensors would be constants

A program depends on the shapes of tensors and specs, on the mode and the plain attributes of
modules (a dropout's p, a temperature), on numbers and strings, and on anything else by identity.

Not here: flattening (plan_call.py), what capture makes of them (frontend).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from dtensor.api.eager.tensor import DTensor
from dtensor.api.parallel import ParallelModule
from dtensor.errors import PlanningError
from dtensor.numerics import dtype_name
from dtensor.sharding.spec.spec import TensorSpec

_PLAIN = frozenset({bool, int, float, str})
_DEEPEST = 4  # how far into an unknown object tensors are looked for


class _Same:
    """An object by identity. It is kept alive: the id of one that is gone is given out again."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def leaf_key(leaf: Any) -> object:
    """What the captured program depends on."""
    match leaf:
        case DTensor():
            return (leaf.spec, leaf.requires_grad)
        case TensorSpec():
            return (leaf, leaf.requires_grad)
        case torch.Tensor():
            return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        case ParallelModule():
            return (_Same(leaf), _settings(leaf.module))
        case torch.nn.Module():
            return (_Same(leaf), _settings(leaf))
        case int() | float() | str() | bool() | None:
            return (type(leaf), leaf)
        case _:
            return _Same(leaf)


def _settings(module: torch.nn.Module) -> tuple[object, ...]:
    """``training`` and the other plain attributes, which forward may read; tensors that are no
    buffers are constants of the program."""
    return tuple(
        tuple(
            value if type(value) in _PLAIN else (_Same(value), value._version)
            for value in vars(part).values()
            if type(value) in _PLAIN or type(value) is torch.Tensor  # isinstance of it is slow
        )
        for part in module.modules()
    )


def for_capture(leaf: Any) -> Any:
    """A module, or a tensor without placements, in the leaf's stead."""
    match leaf:
        case ParallelModule():
            return leaf.module
        case DTensor():
            empty = torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype, device="meta")
            return empty.requires_grad_(leaf.requires_grad)
        case TensorSpec():
            empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            return empty.requires_grad_(leaf.requires_grad)
        case _:
            return leaf


def check_leaf(leaf: Any) -> None:
    """PlanningError for an object with tensors inside, which pytrees do not open: they would be
    constants, and a later call's would not be looked at."""
    match leaf:
        case torch.Tensor() | TensorSpec() | ParallelModule() | torch.nn.Module():
            return
        case int() | float() | complex() | str() | bytes() | None:
            return
        case _:
            found = next(_tensors("", leaf, _DEEPEST), None)
    if found is None:
        return
    path, tensor = found
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
