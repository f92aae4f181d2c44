"""Spawned objects in a host, and what they are asked to do.

Example (the controller does this, `session.py`, through `Host.call`):

    objects = Objects(counter)
    objects.create(0, 7, pickled_class, task, arguments)
    kept = objects.call(0, 8, task, arguments, *kept_before)      # Ray resolves these

Invariants: a tensor that a task makes is put into Ray's object store, by this process, and the
controller gets a reference to it in a `Kept`: it can hand on what it never has. Values without
tensors, and failures, come back as they are. Nothing a user's method raises leaves as an exception.
Each compiled function has connections of its own (`joining.py`), so that one that fails leaves the
others as they are.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import ray
import ray.cloudpickle
import ray.exceptions
import torch
from torch import Tensor

from dtensor.daft.errors import ActorLost, Failure
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.raised import interrupts
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.channel.messages import HostFailed
from dtensor.daft.ray.transports.joining import Join, Joined, host_failed
from dtensor.daft.run.engine import Engine, Table
from dtensor.daft.tasks.frozen import SELF
from dtensor.daft.tasks.task import Subject, Task
from dtensor.daft.tasks.values import ValuePickler, encode_failure, has_tensors
from dtensor.daft.undo.undone import Undone

_ray: Any = ray  # Ray's stubs leave most of its types unknown
_cloudpickle: Any = ray.cloudpickle  # pyright: ignore[reportUnknownMemberType]

Bytes: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


class CloudPickler(ValuePickler, _cloudpickle.Pickler):
    """Takes classes and functions of the user's script along, which hosts cannot import."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A message in the object store; `maker` is lost with its process, and the message too."""

    ref: Any
    maker: str


Given: TypeAlias = Kept | Bytes


class Objects:
    def __init__(self, counter: ProgramCounter) -> None:
        self._counter = counter
        self._subjects: dict[int, Subject] = {}
        self._programs: dict[int, tuple[Joined, Engine] | HostFailed] = {}

    def create(
        self, actor: int, number: int, cls: bytes, task: Task, arguments: Bytes, *inputs: Given
    ) -> None:
        subject = self._subjects[actor] = Subject()
        self._counter.begin(-1, number)
        task.create(subject, lambda: pickle.loads(cls), read_only(arguments), _messages(inputs))
        self._counter.end()

    def call(self, actor: int, number: int, task: Task, arguments: Bytes, *inputs: Given) -> Given:
        self._counter.begin(-1, number)
        message = task.run(self._subjects[actor], read_only(arguments), _messages(inputs))
        made = keep(message, task.actor)
        self._counter.end()
        return made

    def load(
        self,
        number: int,
        program: HostProgram,
        actors: Mapping[int, int],
        join: Join,
        index: int,
    ) -> None:
        """`actors`: those of this host, by their rank; `index`: which of the program's hosts it is.
        Blocks until the others have joined."""
        table: Table = {(rank, SELF): self._subjects[actor] for rank, actor in actors.items()}
        try:
            joined = Joined.by(join, index, tuple(actors), torch.device("cpu"))
            engine = Engine(program, table, joined.transport)
        except BaseException as error:  # nobody waits for this: its runs raise it
            if interrupts(error):
                raise
            self._programs[number] = host_failed(error, join.hosts)
        else:
            self._programs[number] = joined, engine

    def run(
        self,
        number: int,
        run: int,
        ranks: Sequence[int],
        wanted: Sequence[tuple[int, str, str]],
        names: Sequence[tuple[int, str]],
        *inputs: Given,
    ) -> Given | tuple[Given, ...] | None:
        """`ranks`: those of this host; `wanted`: (rank, value, name of the actor); `names`: rank
        and name of each input."""
        fed: dict[int, dict[str, object]] = {rank: {} for rank in ranks}
        for (rank, name), message in zip(names, _messages(inputs), strict=True):
            fed[rank][name] = message
        program = self._programs[number]
        if isinstance(program, HostFailed):
            raise program
        joined, engine = program
        joined.check()
        self._counter.begin(number, run)
        with joined.running():
            made = engine.run(fed, self._counter.view)
            if isinstance(made, Undone):
                raise made.faults[0].error
        outcomes = tuple(keep(made[rank][value], maker) for rank, value, maker in wanted)
        self._counter.end()
        return outcomes if len(outcomes) > 1 else next(iter(outcomes), None)

    def failures(self) -> list[Failure]:
        return [failure for subject in self._subjects.values() for failure in subject.failures]


def keep(message: object, maker: str) -> Given:
    assert isinstance(message, Tensor)
    data = message.numpy()
    return Kept(_ray.put(data), maker) if has_tensors(message) else data


def message_of(outcome: Given) -> Tensor:
    """The message, in memory of Ray's: not to be changed. A failure if it was lost."""
    if not isinstance(outcome, Kept):
        return read_only(outcome)
    try:
        return read_only(_ray.get(outcome.ref))
    except ray.exceptions.RayError as error:
        reason = f"a value that it made was lost with its process. {str(error).splitlines()[0]}"
        return encode_failure(ActorLost(Failure(rank=None, actor=outcome.maker, reason=reason)))


def _messages(outcomes: Sequence[Given]) -> list[Tensor]:
    return [message_of(outcome) for outcome in outcomes]


def read_only(data: Bytes) -> Tensor:
    """Bytes in memory of Ray's."""
    with warnings.catch_warnings():
        # torch warns that the array is read-only: whoever reads it copies.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)  # pyright: ignore[reportUnknownMemberType]
