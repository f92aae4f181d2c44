"""A `Cluster` of ranks that hold values and run programs, and the `Future` of a run.

    with launch_cluster(2) as cluster:                       # or backend="ray"
        cluster.put([{"w": w0}, {"w": w1}])
        handle = cluster.load(program)
        future = cluster.run(handle, [{"x": x0}, {"x": x1}])
        y0 = future.get()[0]["y"]

Invariants: tensors are copied on their way in and out, and come out on the CPU. Runs, puts and
gets take effect in the order of their calls. After a failure in a run the values are lost: every
later call and future raises the same error, the root cause. The same program, inputs and state
give the same bits on every backend and in both modes.

What is fed to ranks is a sequence in rank order, one item per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch

from dtensor.daft.errors import DaftError
from dtensor.daft.ir.program import Program
from dtensor.daft.run.worker import NOTHING_KEPT
from dtensor.daft.verification.verifier import Report

Mode: TypeAlias = Literal["compiled", "interpreted", "timed"]
"""timed: as compiled; each rank's outputs have `TIMES` too."""
Backend: TypeAlias = Literal["inprocess", "ray"]


class Future(ABC):
    """The result of a call that may still be under way."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> list[Any]:
        """The result, one item per rank; again and again, the same.

        `TimeoutError` after `timeout` seconds, which does not consume the future. A failure is
        raised as the root cause, a `DaftError`.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return, or raise a failure, at once."""


@dataclass(frozen=True, slots=True)
class Finished(Future):
    """A future whose call has ended."""

    results: list[Any]
    error: Exception | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        if self.error is not None:
            raise self.error
        return list(self.results)

    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Handle:
    """A program that a cluster has loaded."""

    id: int
    program: Program = field(repr=False)
    report: Report = field(repr=False)


class Cluster(ABC):
    """`calls` counts the calls from the controller to actors; a compiled run makes one to each.

    `runs` counts the runs that were started: the number of the next one, `Failure.step` of its
    failure.
    """

    size: int
    device: torch.device
    calls: int
    runs: int
    failure: DaftError | None

    @abstractmethod
    def put(self, values: Sequence[Mapping[str, object]]) -> None:
        """Store values in each rank's table, as state of programs."""

    @abstractmethod
    def get(self, names: Sequence[Sequence[str]]) -> Future:
        """For each rank, a tuple of the values of these names."""

    @abstractmethod
    def delete(self, names: Sequence[Sequence[str]]) -> None:
        """Drop values from each rank's table; `LookupError` for one that is not there."""

    @abstractmethod
    def load(self, program: Program) -> Handle:
        """Verify a program and ship it, once. `ProgramError` if it is not sound."""

    @abstractmethod
    def unload(self, handle: Handle) -> None:
        """Forget a program; its state stays."""

    @abstractmethod
    def run(
        self,
        handle: Handle,
        inputs: Sequence[Mapping[str, object]],
        *,
        mode: Mode = "compiled",
        keep: Mapping[str, str] = NOTHING_KEPT,
    ) -> Future:
        """Run a program once; for each rank, a dict of its outputs.

        An input may be `Stored(name)`: the value of that name in the rank's table, not copied.
        `keep`: output name to a name under which it stays in the rank's table instead of coming
        back; ranks that do not have the output keep nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop everything that this cluster started. Twice is fine."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_size(size: int, items: Sequence[object], what: str) -> None:
    if len(items) != size:
        raise ValueError(f"{what} takes one item per rank: {size} ranks, got {len(items)} items.")


def check_inputs(handle: Handle, inputs: Sequence[Mapping[str, object]]) -> None:
    """Raises `ValueError` unless every rank is fed exactly the inputs that it declares."""
    program = handle.program
    check_size(program.size, inputs, f"A run of {program.name!r}")
    for rank, (given, own) in enumerate(zip(inputs, program.ranks, strict=True)):
        if set(given) != set(own.inputs):
            raise ValueError(
                f"Rank {rank} of program {program.name!r} takes the inputs "
                f"{sorted(own.inputs)}, got {sorted(given)}."
            )


def hosts_of(size: int, ranks_per_actor: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks share a host: hosts_of(4, 2) == ((0, 1), (2, 3))."""
    if size < 1 or ranks_per_actor < 1:
        raise ValueError(
            f"A cluster has at least 1 rank and 1 rank per actor, got size={size}, "
            f"ranks_per_actor={ranks_per_actor}."
        )
    return tuple(
        tuple(range(first, min(first + ranks_per_actor, size)))
        for first in range(0, size, ranks_per_actor)
    )
