"""The spawned objects (actors) in a process, and their calls.

    objects = Objects(counter, meeting, 3)                  # the controller calls these methods
    objects.create(0, 7, pickled_class, task, arguments, ())
    objects.call(0, 8, task, arguments, ((5, 2),), ())      # value 5 comes from process 2
    objects.send(8, 4)                                      # process 4 needs the result

Invariants: the result of a call stays in this process's object store under the call's number, and
is sent directly to the processes that need it; the controller gets small values with the answer. No
exception is raised: a failure is a value, so that no process waits for a value that never comes.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtensor.daft.errors import DaftError, Failure, HostError, error_to_send
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ray.actors.object_store import (
    CONTROLLER,
    HostGone,
    Key,
    ObjectStore,
    StoreMeeting,
)
from dtensor.daft.ray.actors.value_transport import ValueTransport, lost
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.channel.messages import Payload
from dtensor.daft.remote_exceptions import RemoteException, interrupts, reason_of
from dtensor.daft.run.device_commit import DeferredRun
from dtensor.daft.run.engine import Engine, Table
from dtensor.daft.tasks.lower_tasks import SELF
from dtensor.daft.tasks.task import HostedObject, Task
from dtensor.daft.tasks.values import encode_failure
from dtensor.daft.undo.failed_run import UndoneRun

SMALL_BYTES = 1 << 12
"""A value of at most this size is sent to the controller with the answer."""

Given: TypeAlias = tuple[Key, int | None]
"""An argument that is a value: its key, and the process that holds it, None for this process."""
Packed: TypeAlias = bytes | Given
"""An argument from the controller: its message, or, if it is large, a value."""
Answer: TypeAlias = tuple[int, bytes | None]
"""The length of a result's message, and the message if it is small."""
Answers: TypeAlias = tuple[int, tuple[Answer, ...]]
"""The answer to a call: the bytes that were sent to other processes, and its results."""


class Objects:
    """The objects of process `index`. Arguments named `dropped` are values to drop first."""

    def __init__(self, counter: ProgramCounter, meeting: StoreMeeting, index: int) -> None:
        self._counter = counter
        self._store = ObjectStore(meeting, index)
        self._subjects: dict[int, HostedObject] = {}
        self._programs: dict[int, tuple[ValueTransport, Engine | DaftError]] = {}

    def create(
        self,
        actor: int,
        number: int,
        cls: bytes,
        task: tuple[Any, ...],
        arguments: Packed,
        inputs: Sequence[Given],
    ) -> Payload:
        """Make an actor: an object of a pickled class. A failure is kept for its later calls."""
        subject = self._subjects[actor] = HostedObject(allocate=self._store.allocate)
        with self._failure_as_results() as failed:
            messages, arguments_message = list(map(self._message, inputs)), self._message(arguments)
            self._counter.begin(-1, number)
            Task.of(task).create(subject, lambda: pickle.loads(cls), arguments_message, messages)
            self._counter.end()
        if failed:
            subject.failure_message = failed[0]
        return _answered(0, ())

    def call(
        self,
        actor: int,
        number: int,
        task: tuple[Any, ...],
        arguments: Packed,
        inputs: Sequence[Given],
        dropped: Sequence[Key],
    ) -> Payload:
        """Call a method of an actor, as call `number`; keep the result as a value."""
        with self._failure_as_results() as results:
            if dropped:
                self._store.drop(dropped)
            messages, arguments_message = list(map(self._message, inputs)), self._message(arguments)
            self._counter.begin(-1, number)
            subject, all_inputs = self._subjects[actor], range(len(messages))
            results.append(Task.of(task).run(subject, arguments_message, messages, all_inputs))
            self._counter.end()
        return _answered(0, (self._keep(number, results[0]),))

    def send(self, key: Key, to: int) -> None:
        self._store.send(key, to)

    def load(
        self, number: int, program: HostProgram, actors: Mapping[int, int], host_of: Sequence[int]
    ) -> None:
        """Load this process's part of a compiled function. `actors`: rank to actor, of this
        process; `host_of`: the process of each rank."""
        transport = ValueTransport(self._store, program, host_of)
        try:
            table: Table = {(rank, SELF): self._subjects[actor] for rank, actor in actors.items()}
            self._programs[number] = transport, Engine(program, table, transport)
        except BaseException as error:  # a one-way call: its runs return the error
            if interrupts(error):
                raise
            self._programs[number] = transport, _of_host(error)

    def run(
        self,
        number: int,
        run: int,
        result_keys: Sequence[tuple[int, str]],
        argument_keys: Sequence[tuple[int, str]],
        inputs: Sequence[Packed],
        dropped: Sequence[Key],
    ) -> Payload:
        """Run a compiled function, keep its results as values, and answer with their sizes.
        `result_keys`: (rank, name) of each result; `argument_keys`: (rank, name) of each argument
        in `inputs`; `dropped`: values to drop first."""
        transport, engine = self._programs[number]
        transport.start(run)
        messages: dict[tuple[int, str], Tensor] = {}
        with self._failure_as_results() as failed:
            if dropped:
                self._store.drop(dropped)
            if isinstance(engine, DaftError):
                raise engine
            inputs_by_rank: dict[int, dict[str, object]] = {
                rank: {} for rank in engine.program.ranks
            }
            for (rank, name), packed in zip(argument_keys, inputs, strict=True):
                inputs_by_rank[rank][name] = self._message(packed)
            self._counter.begin(number, run)
            results = engine.run(inputs_by_rank, self._counter.view)
            if isinstance(results, UndoneRun):
                raise results.faults[0].error
            assert not isinstance(results, DeferredRun), "tasks have no commit point"
            self._counter.end()
            for rank, value in result_keys:
                message = results[rank][value]
                assert isinstance(message, Tensor)
                messages[rank, value] = message
        if failed:
            transport.fail(failed[0])
        answers = [self._keep((run, v), messages.get((r, v), *failed)) for r, v in result_keys]
        return _answered(transport.sent_bytes, tuple(answers))

    def failures(self) -> list[Failure]:
        return [failure for subject in self._subjects.values() for failure in subject.failures]

    @contextmanager
    def _failure_as_results(self) -> Generator[list[Tensor]]:
        """Yield a list for the results; if the block raises, the list becomes the message of the
        failure."""
        results: list[Tensor] = []
        try:
            yield results
        except BaseException as error:
            if interrupts(error):
                raise
            self._counter.end()
            results[:] = [encode_failure(_of_host(error))]

    def _message(self, argument: Packed) -> Tensor:
        """Wait for an argument; return a private copy, since a method may change its arguments."""
        if isinstance(argument, bytes):
            return torch.frombuffer(bytearray(argument), dtype=torch.uint8)
        key, holder = argument
        try:  # a value from the controller is used by one call, and not kept
            return self._store.take(key, holder, keeps=holder != CONTROLLER)
        except HostGone as gone:
            return lost(gone)

    def _keep(self, key: Key, message: Tensor) -> Answer:
        """Store a result. Return its size, and its bytes if it is small."""
        self._store.put(key, message)
        nbytes = message.numel()
        return nbytes, message.numpy().tobytes() if nbytes <= SMALL_BYTES else None


def _of_host(error: BaseException) -> DaftError:
    """Return an error of daft for any error."""
    sent = error_to_send(error)
    if isinstance(sent, DaftError):
        return sent
    return HostError(Failure(rank=None, reason=reason_of(error), raised=RemoteException(error)))


def _answered(sent_bytes: int, answers: tuple[Answer, ...]) -> Payload:
    answer: Answers = sent_bytes, answers
    return Payload.plain(answer)
