"""View ops: another DTensor on the same cell, as in PyTorch.

    x[1:].t()      DTensor(cell of x, slice then t)

Parts of a tensor (split, unbind) are slices and selections of it, so that each can be written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dtensor.api.eager.run import Call
from dtensor.api.eager.values import View

if TYPE_CHECKING:
    from dtensor.api.eager.tensor import DTensor

aten = torch.ops.aten

_views: dict[Any, View] = {}


def view(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    rest = args[1:]
    if kwargs:
        names = [a.name for a in target._schema.arguments]
        for name in names[1 + len(rest) :]:
            if name in kwargs:
                rest = (*rest, kwargs[name])
    return view_of(x, target, rest)


def view_of(x: DTensor, target: Any, args: tuple[Any, ...]) -> DTensor:
    from dtensor.api.eager.tensor import DTensor

    parent = x._view
    held = (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) if parent is None else parent
    key = (held, target, Call().key(args))
    found = _views.get(key)
    if found is None:
        # on the meta device, not fake: its errors are those of torch's own kernels
        reach = sum(max(n - 1, 0) * s for n, s in zip(x.shape, x.stride(), strict=True))
        storage = torch.empty(x.storage_offset() + reach + 1, dtype=x.dtype, device="meta")
        with torch.no_grad():
            new = target(storage.as_strided(x.shape, x.stride(), x.storage_offset()), *args)
        found = View(
            parent,
            target,
            args,
            tuple(new.shape),
            tuple(new.stride()),
            int(new.storage_offset()),
            new.dtype,
        )
        _views[key] = found
    return DTensor.of(x._cell, found)


def alias(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0].alias()


def split(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    x, size = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % max(x.dim(), 1)
    length = x.shape[dim]
    if isinstance(size, (list, tuple)):
        sizes = list(size)
    elif length == 0 or size == 0:
        sizes = [length]
    else:
        sizes = [min(size, length - start) for start in range(0, length, size)]
    if sum(sizes) != length:
        raise RuntimeError(f"split sizes {sizes} do not add up to {length}, dim {dim} of {x.spec}")
    parts: list[Any] = []
    start = 0
    for part in sizes:
        parts.append(view_of(x, aten.slice.Tensor, (dim, start, start + part, 1)))
        start += part
    return parts


def unbind(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    return [view_of(x, aten.select.int, (dim, i)) for i in range(x.shape[dim])]
