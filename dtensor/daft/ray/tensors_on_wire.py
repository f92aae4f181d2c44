"""Tensors on their way between controller and actors: as numpy bytes, dtype and shape.

Ray moves numpy arrays without copying them, and torch tensors by pickling whole storages; bf16
has no numpy dtype, so everything goes as bytes. What arrives is read-only memory of Ray's: the
worker copies it (`Worker.put`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True, slots=True)
class Packed:
    data: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(value: object) -> object:
    """A tensor as `Packed`; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().cpu().contiguous().reshape(-1)
    return Packed(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def unpack(value: object) -> object:
    """The tensor of a `Packed`, without a copy and not to be written to."""
    if not isinstance(value, Packed):
        return value
    if value.data.size == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    with warnings.catch_warnings():
        # torch warns that the array is read-only: the caller of unpack copies.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(value.data).view(value.dtype).reshape(value.shape)  # pyright: ignore[reportUnknownMemberType]


def pack_all(values: Mapping[int, Mapping[str, object]]) -> dict[int, dict[str, object]]:
    return {r: {name: pack(v) for name, v in named.items()} for r, named in values.items()}


def unpack_all(values: Mapping[int, Mapping[str, object]]) -> dict[int, dict[str, object]]:
    return {r: {name: unpack(v) for name, v in named.items()} for r, named in values.items()}
