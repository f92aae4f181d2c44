"""The Ray actor that hosts spawned actors: their objects, and what they are asked to do.

Example (the controller does this, `session.py`):

    process = ray.remote(Host).remote(0, (), "cpu", "/tmp/.../actor0")
    process.create.remote(0, 7, pickled_class, task, arguments)
    kept = process.call.remote(0, 8, task, arguments, *kept_before)      # Ray resolves these

Invariants: a tensor that a task makes is put into Ray's object store, by this process, and the
controller gets a reference to it in a `Kept`: it can hand on what it never has. Values without
tensors, and failures, come back as they are. Nothing a user's method raises leaves as an exception.
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
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.compiled_step import Join, ProgramPart, StepFailed, step_failed
from dtensor.daft.ray.malloc import keep_freed_memory
from dtensor.daft.ray.progress import Counter
from dtensor.daft.ray.starting import own_address
from dtensor.daft.tasks.task import Subject, Task
from dtensor.daft.tasks.values import ValuePickler, encode_failure, has_tensors
from dtensor.daft.verification.pairing import Site

_ray: Any = ray  # Ray's stubs leave most of its types unknown
_cloudpickle: Any = ray.cloudpickle  # pyright: ignore[reportUnknownMemberType]

Bytes: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


class CloudPickler(ValuePickler, _cloudpickle.Pickler):
    """Takes classes and functions of the user's script along, which actors cannot import."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A message in the object store; `maker` is lost with its process, and the message too."""

    ref: Any
    maker: str


Outcome: TypeAlias = Kept | Bytes


class Host:
    def __init__(self, index: int, ranks: tuple[int, ...], device: str, counter: str) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._counter = Counter(counter)
        self._subjects: dict[int, Subject] = {}
        self._programs: dict[int, ProgramPart | StepFailed] = {}

    def create(
        self, actor: int, number: int, cls: bytes, task: Task, arguments: Bytes, *inputs: Outcome
    ) -> None:
        subject = self._subjects[actor] = Subject()
        self._begin(number)
        task.create(subject, lambda: pickle.loads(cls), as_message(arguments), _messages(inputs))
        self._counter.end()

    def call(
        self, actor: int, number: int, task: Task, arguments: Bytes, *inputs: Outcome
    ) -> Outcome:
        self._begin(number)
        message = task.run(self._subjects[actor], as_message(arguments), _messages(inputs))
        made = keep(message, task.actor)
        self._counter.end()
        return made

    def load(
        self,
        number: int,
        program: Program,
        sites: Sequence[Site],
        actors: Mapping[int, int],
        join: Join,
    ) -> None:
        """`actors`: those of this process, by their rank. Blocks until the others have joined."""
        subjects = {rank: self._subjects[actor] for rank, actor in actors.items()}
        try:
            part = ProgramPart(number, program, sites, subjects, join, own_address())
            self._programs[number] = part
        except Exception as error:  # nobody waits for this: its runs raise it
            self._programs[number] = step_failed(error, number)

    def run(
        self,
        number: int,
        run: int,
        wanted: Sequence[tuple[int, str, str]],
        names: Sequence[tuple[int, str]],
        *inputs: Outcome,
    ) -> Outcome | tuple[Outcome, ...] | None:
        """`wanted`: (rank, value, name of the actor); `names`: rank and name of each input."""
        fed: dict[int, dict[str, Tensor]] = {}
        for (rank, name), message in zip(names, _messages(inputs), strict=True):
            fed.setdefault(rank, {})[name] = message
        self._counter.begin(number, run)
        part = self._programs[number]
        if isinstance(part, StepFailed):
            raise part
        made = part.run(fed, self._counter.view)
        outcomes = tuple(keep(made[rank][value], maker) for rank, value, maker in wanted)
        self._counter.end()
        return outcomes if len(outcomes) > 1 else next(iter(outcomes), None)

    def failures(self) -> list[Failure]:
        return [failure for subject in self._subjects.values() for failure in subject.failures]

    def _begin(self, number: int) -> None:
        self._counter.begin(-1, number)
        self._counter.view[0] = 0


def keep(message: object, maker: str) -> Outcome:
    assert isinstance(message, Tensor)
    data = message.numpy()
    return Kept(_ray.put(data), maker) if has_tensors(message) else data


def message_of(outcome: Outcome) -> Tensor:
    """The message, in memory of Ray's: not to be changed. A failure if it was lost."""
    if not isinstance(outcome, Kept):
        return as_message(outcome)
    try:
        return as_message(_ray.get(outcome.ref))
    except ray.exceptions.RayError as error:
        reason = f"a value that it made was lost with its process. {str(error).splitlines()[0]}"
        return encode_failure(ActorLost(Failure(rank=None, actor=outcome.maker, reason=reason)))


def as_message(data: Bytes) -> Tensor:
    with warnings.catch_warnings():
        # torch warns that the array is read-only: `decode` copies.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)  # pyright: ignore[reportUnknownMemberType]


def _messages(outcomes: Sequence[Outcome]) -> list[Tensor]:
    return [message_of(outcome) for outcome in outcomes]
