"""What comes back from Ray actors: calls under way, and the future of a run.

    calls = [ActorCall(7, actor, actor.actor.run.remote(...)), ...]      # one for each actor
    future = RayFuture(cluster.collect, calls, lambda found: dicts_by_rank(2, found))
    future.get()[0]["y"]

Invariants: a time-out does not consume a future; what it gives is the caller's own memory, not
Ray's, which is read-only and lives as long as the future. It does not say why a call failed:
`collect` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
import torch

from dtensor.daft.cluster.cluster import Finished, Future
from dtensor.daft.errors import DaftError
from dtensor.daft.ray.starting import ActorProcess
from dtensor.daft.ray.tensors_on_wire import pack, unpack, unpack_all

_ray: Any = ray  # Ray's stubs leave most of its types unknown


@dataclass(frozen=True, slots=True)
class ActorCall:
    """A call under way: its number, who was called, Ray's reference to the result."""

    number: int
    actor: ActorProcess
    ref: Any


Arrange: TypeAlias = Callable[[list[Any]], list[Any]]
"""What the actors gave, to what the future gives: an item for each rank."""
Collect: TypeAlias = Callable[[Sequence[ActorCall], float | None], list[Any]]
"""The results of calls, at most so many seconds from now; raises their root cause."""


class RayFuture(Future):
    """The results of one call to every actor."""

    def __init__(self, collect: Collect, calls: Sequence[ActorCall], arrange: Arrange) -> None:
        self._collect = collect
        self._calls = tuple(calls)
        self._arrange = arrange
        self._finished: Finished | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        if self._finished is None:
            try:
                self._finished = Finished(self._arrange(self._collect(self._calls, timeout)))
            except (DaftError, LookupError) as error:
                self._finished = Finished([], error)
            self._calls = ()
        return self._finished.get()

    def done(self) -> bool:
        if self._finished is not None:
            return True
        refs = [call.ref for call in self._calls]
        waited = _ray.wait(refs, num_returns=len(refs), timeout=0)
        return len(waited[0]) == len(refs)


def packed(named: Mapping[str, object]) -> dict[str, object]:
    return {name: pack(value) for name, value in named.items()}


def dicts_by_rank(size: int, found: Sequence[Mapping[int, Mapping[str, object]]]) -> list[Any]:
    merged = {rank: named for part in found for rank, named in part.items()}
    return [
        {name: _own(value) for name, value in named.items()}
        for named in (unpack_all(merged)[rank] for rank in range(size))
    ]


def tuples_by_rank(size: int, found: Sequence[Mapping[int, Sequence[object]]]) -> list[Any]:
    merged = {rank: values for part in found for rank, values in part.items()}
    return [tuple(_own(unpack(value)) for value in merged[rank]) for rank in range(size)]


def _own(value: object) -> object:
    """Out of Ray's read-only memory, which lives as long as the future."""
    return value.clone() if isinstance(value, torch.Tensor) else value
