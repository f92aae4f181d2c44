"""Ranks in a host: a `Worker`, its connections to the other hosts, and the program counter.

Example (the controller does this, `cluster.py`, through `Host.call`):

    ranks = Ranks(counter, (0,), "cpu")
    ranks.connect(join, 0); ranks.load(7, program, sites, tags); ranks.run(7, 0, inputs, keep={})

Invariants: the first failure of a run closes the connections and is repeated to every later call
(`joining.py`). Tensors go between controller and host as `Packed`; what arrives is read-only memory
of Ray's, and the worker copies it. It does not import Ray.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.joining import Join, Joined
from dtensor.daft.ray.progress import ProgramCounter
from dtensor.daft.run.worker import Names, Values, Worker
from dtensor.daft.verification.pairing import Site


class Ranks:
    def __init__(self, counter: ProgramCounter, ranks: tuple[int, ...], device: str) -> None:
        self._counter = counter
        self._ranks = ranks
        self._device = torch.device(device)
        self._joined: Joined | None = None
        self._connected: Worker | None = None

    def connect(self, join: Join, index: int) -> None:
        self._joined = Joined.by(join, index, self._ranks, self._device)
        self._connected = Worker(self._ranks, self._device, self._joined.transport)

    def put(self, values: Values) -> None:
        self._worker.put(unpack_all(values))

    def get(self, names: Names) -> dict[int, tuple[object, ...]]:
        found = self._worker.get(names)
        return {rank: tuple(map(pack, values)) for rank, values in found.items()}

    def delete(self, names: Names) -> None:
        self._worker.delete(names)

    def load(
        self, handle: int, program: Program, sites: Sequence[Site], tags: Mapping[Key, int]
    ) -> None:
        self._connections.open(tags)
        self._worker.load(handle, program, sites)

    def unload(self, handle: int) -> None:
        self._worker.unload(handle)

    def run(
        self, handle: int, run: int, inputs: Values, keep: Mapping[str, str], timed: bool = False
    ) -> dict[int, dict[str, object]]:
        worker = self._worker
        self._counter.begin(handle, run)
        with self._connections.running(run):
            made = worker.run(handle, unpack_all(inputs), self._counter.view, keep, timed)
            packed = pack_all(made)
        self._counter.end()
        return packed

    def begin(self, handle: int, run: int, inputs: Values) -> None:
        self._worker.begin(handle, unpack_all(inputs))
        self._counter.begin(handle, run)
        self._counter.end()

    def step(self, handle: int, run: int, position: int) -> None:
        self._counter.view[0] = position
        with self._connections.running(run):
            self._worker.step(handle, position)
        self._counter.end()

    def finish(self, handle: int, keep: Mapping[str, str]) -> dict[int, dict[str, object]]:
        return pack_all(self._worker.finish(handle, keep))

    @property
    def _connections(self) -> Joined:
        assert self._joined is not None, "connect comes first"
        return self._joined

    @property
    def _worker(self) -> Worker:
        self._connections.check()
        assert self._connected is not None
        return self._connected


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor's bytes. Ray moves numpy arrays without copying them, and torch tensors by pickling
    whole storages; bf16 has no numpy dtype."""

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
    return read_only(value.data).view(value.dtype).reshape(value.shape)


def read_only(data: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]) -> torch.Tensor:
    """Bytes in memory of Ray's."""
    with warnings.catch_warnings():
        # torch warns that the array is read-only: whoever reads it copies.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)  # pyright: ignore[reportUnknownMemberType]


def pack_all(values: Mapping[int, Mapping[str, object]]) -> dict[int, dict[str, object]]:
    return {r: {name: pack(v) for name, v in named.items()} for r, named in values.items()}


def unpack_all(values: Mapping[int, Mapping[str, object]]) -> dict[int, dict[str, object]]:
    return {r: {name: unpack(v) for name, v in named.items()} for r, named in values.items()}
