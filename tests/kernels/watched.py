"""Launches in Triton's interpreter, watched: what each loads and stores, and that it is in its
operands.

    with watched(ends) as launches:            # the first and the last program of each axis alone
        norms.rms_norm(x, weight, ...)
    launches[0].read, launches[0].written      # bytes, each counted once

Tensors may be larger than the machine's memory (`mapped`): they are addresses, of which pages come
into being where something is written; so are those that `torch.empty` makes meanwhile.

Invariants: an access outside all operands of its launch is an AssertionError that says how far it
is from them, and is not made. Whole numbers have the width that Triton's compiler gives them; the
interpreter by itself has 32 bits for arguments between 2**31 and 2**32 and for each variable of a
loop. TRITON_INTERPRET is set before Triton is imported: by sweep.py, large.py, moved.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

_NO_RESERVE = 0x4000
"""Of Linux: pages that are never written need no memory, whatever the size."""
_SMALL = 1 << 26

Choose = Callable[[int], Sequence[int]]


@dataclass(kw_only=True)
class Watched:
    """A launch: its kernel, arguments by name, whole grid, and the bytes that programs touched."""

    kernel: str
    arguments: Mapping[str, Any]
    grid: tuple[int, ...]
    _loaded: list[tuple[Any, int]] = field(default_factory=list)
    _stored: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def read(self) -> int:
        return _distinct(self._loaded)

    @property
    def written(self) -> int:
        return _distinct(self._stored)

    def touch(self, kind: str, addresses: Any, itemsize: int) -> None:
        inside = np.zeros(addresses.shape, bool)
        near: list[tuple[int, str]] = []
        for name, x in self.arguments.items():
            if not isinstance(x, Tensor) or x.numel() == 0:
                continue
            low, high = _extent(x)
            inside |= (addresses >= np.uint64(low)) & (addresses <= np.uint64(high - itemsize))
            near.append((low, name))
        if not inside.all():
            wrong = int(addresses[~inside][0])
            low, name = min(near, key=lambda each: abs(wrong - each[0]))
            raise AssertionError(
                f"{self.kernel} {kind} {(wrong - low) // itemsize} elements from the first of "
                f"{name}, outside all of its operands"
            )
        (self._loaded if kind == "loads" else self._stored).append((addresses, itemsize))


def last_offset(x: Tensor) -> int:
    """Of the last element, in elements from the first."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _extent(x: Tensor) -> tuple[int, int]:
    low = x.data_ptr()
    return low, low + (last_offset(x) + 1) * x.element_size()


def _distinct(touched: Sequence[tuple[Any, int]]) -> int:
    sizes = {size for _, size in touched}
    return sum(
        size * len(np.unique(np.concatenate([a for a, s in touched if s == size])))
        for size in sizes
    )


def every(count: int) -> Sequence[int]:
    return range(count)


def ends(count: int) -> Sequence[int]:
    return sorted({0, count - 1})


def last(count: int) -> Sequence[int]:
    return [count - 1]


def mapped(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, in memory that there is where it is written."""
    if count * dtype.itemsize < _SMALL:
        return torch.zeros(count, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype)


@contextmanager
def watched(choose: Choose = every) -> Iterator[list[Watched]]:
    """Launches within the block, of each axis of a grid the programs that ``choose`` names."""
    found: list[Watched] = []
    builder: Any = interpreter.interpreter_builder

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args))
        named |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        found.append(Watched(kernel=self.fn.__name__, arguments=named, grid=self.grid))
        ids = [list(choose(count)) for count in self.grid]
        self.grid = tuple(len(each) for each in ids)
        ids += [[0]] * (3 - len(ids))

        def set_grid_idx(x: int, y: int, z: int) -> None:
            builder.grid_idx = (ids[0][x], ids[1][y], ids[2][z])

        builder.set_grid_idx = set_grid_idx
        self.fn.__globals__["range"] = _typed_range
        try:
            original["__call__"](self, *args, **kwargs)
        finally:
            del builder.set_grid_idx, self.fn.__globals__["range"]

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        found[-1].touch("loads", ptrs.data[mask.data], _itemsize(ptrs))
        return original["load"](self, ptrs, mask, other, *rest)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found[-1].touch("stores", ptrs.data[mask.data], _itemsize(ptrs))
        return original["store"](self, ptrs, value, mask, *rest)

    def typed(value: Any) -> Any:
        wide = type(value) is int and 2**31 <= value < 2**32
        return _whole(value, 64) if wide else original["typed"](value)

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        return mapped(shape.numel(), dtype or torch.float32).view(shape)

    def empty_like(x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        like = original["empty_like"](
            torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")
        )
        if device == "meta":
            return like
        return mapped(like.numel(), like.dtype).as_strided(like.shape, like.stride())

    executor: Any = interpreter.GridExecutor
    kind: Any = interpreter.InterpreterBuilder
    changes: list[tuple[Any, str, str, Any]] = [
        (executor, "__call__", "__call__", call),
        (executor, "_restore_args_dev", "restore", lambda *args: None),  # copies all of them
        (kind, "create_masked_load", "load", load),
        (kind, "create_masked_store", "store", store),
        (interpreter, "_implicit_cvt", "typed", typed),
        (torch, "empty", "empty", empty),
        (torch, "empty_like", "empty_like", empty_like),
    ]
    original: dict[str, Any] = {key: getattr(owner, name) for owner, name, key, _ in changes}
    for owner, name, _, made in changes:
        setattr(owner, name, made)
    try:
        yield found
    finally:
        for owner, name, key, _ in changes:
            setattr(owner, name, original[key])


def _whole(value: int, bits: int) -> Any:
    kind, dtype = (tl.int64, np.int64) if bits == 64 else (tl.int32, np.int32)
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype), kind), kind)


def _typed_range(*bounds: Any) -> Iterator[Any]:
    """As wide as the widest of its bounds."""
    types = [x.dtype for x in bounds if isinstance(x, tl.tensor)]
    bits = max((kind.primitive_bitwidth for kind in types), default=32)
    return (_whole(value, bits) for value in range(*map(int, bounds)))


def _itemsize(ptrs: Any) -> int:
    return ptrs.get_element_ty().primitive_bitwidth // 8 or 1
