"""Ranks in a host: a `Worker`, its connections to the other hosts, and the program counter.

Example (the controller does this, `cluster.py`, through `Host.call`):

    ranks = Ranks(counter, (0,), "cpu")
    ranks.connect(join, 0)
    ranks.ask(Worker.load, 7, sites, program)
    ranks.run(0, Worker.run, 7, {0: {"x": packed}})              # run 0 of program 7

Invariants: the first failure of a run closes the connections and is repeated to every later call
(`joining.py`). Tensors go between controller and host as `Packed`; what arrives is read-only memory
of Ray's, and the worker copies it. It does not import Ray.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.joining import Join, Joined
from dtensor.daft.ray.operators import Needed
from dtensor.daft.ray.progress import ProgramCounter
from dtensor.daft.run.worker import Worker


class Ranks:
    def __init__(self, counter: ProgramCounter, ranks: tuple[int, ...], device: str) -> None:
        self._counter = counter
        self._ranks = ranks
        self._device = torch.device(device)
        self._joined: Joined | None = None
        self._worker: Worker | None = None

    def connect(self, join: Join, index: int) -> None:
        self._joined = Joined.by(join, index, self._ranks, self._device)
        transport, counter = self._joined.transport, self._counter.view
        self._worker = Worker(self._ranks, self._device, transport, counter)

    def open(self, tags: Mapping[Key, int]) -> None:
        self._connected[0].open(tags)

    def provide(self, needed: Needed) -> list[tuple[str, str]]:
        """Make ready for a program that names others than torch's ops; those that cannot be had."""
        return needed.provide()

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of the worker."""
        joined, worker = self._connected
        joined.check()
        return pack(method(worker, *map(unpack, arguments)))

    def run(self, run: int, method: Callable[..., Any], handle: int, *arguments: object) -> Any:
        """Call one that runs a program, or a step of it."""
        joined, worker = self._connected
        joined.check()
        self._counter.begin(handle, run)
        with joined.running(run):
            made = pack(method(worker, handle, *map(unpack, arguments)))
        self._counter.end()
        return made

    @property
    def _connected(self) -> tuple[Joined, Worker]:
        assert self._joined is not None and self._worker is not None, "connect comes first"
        return self._joined, self._worker


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor's bytes. Ray moves numpy arrays without copying them, and torch tensors by pickling
    whole storages; bf16 has no numpy dtype."""

    data: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(by_rank: Any) -> Any:
    """By rank, a mapping or a tuple of values: the tensors as `Packed`. Anything else as it is."""
    return _each(by_rank, _packed)


def unpack(by_rank: Any, *, own: bool = False) -> Any:
    """The inverse, without a copy and not to be written to, unless tensors are to be one's `own`:
    Ray's memory lives as long as anything refers to it."""
    return _each(by_rank, lambda value: _unpacked(value, own))


def _each(by_rank: Any, change: Callable[[Any], Any]) -> Any:
    """Two levels and no more: a walk of pytrees adds 5 % to a small step."""

    def one(own: Any) -> Any:
        if isinstance(own, Mapping):
            named = cast(Mapping[str, Any], own)
            return {name: change(value) for name, value in named.items()}
        return tuple(map(change, cast(tuple[Any, ...], own))) if isinstance(own, tuple) else own

    if not isinstance(by_rank, dict):
        return by_rank
    return {rank: one(own) for rank, own in cast(dict[int, Any], by_rank).items()}


def _packed(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().cpu().contiguous().reshape(-1)
    return Packed(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _unpacked(value: object, own: bool) -> object:
    if not isinstance(value, Packed):
        return value
    if value.data.size == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    tensor = read_only(value.data).view(value.dtype).reshape(value.shape)
    return tensor.clone() if own else tensor


def read_only(data: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]) -> torch.Tensor:
    """Bytes in memory of Ray's."""
    with warnings.catch_warnings():
        # torch warns that the array is read-only: whoever reads it copies.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)  # pyright: ignore[reportUnknownMemberType]
