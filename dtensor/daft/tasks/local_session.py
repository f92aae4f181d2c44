"""Run actors in the controller's process. A task runs when it is dispatched. Deterministic.

    with daft.launch():
        a = daft.spawn(Model)
        a.execute(x).get()         # bitwise equal to the result on Ray

Values are sent as messages, so actors share no memory with each other or the controller. `calls`
counts as if each actor were in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dtensor.daft.errors import ActorLost, DaftError, Failure, TaskError
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.run.device_commit import DeferredRun
from dtensor.daft.run.engine import Engine, Inputs, Table
from dtensor.daft.run.transport import TRANSPORTS, Meeting
from dtensor.daft.tasks.actors import ActorInfo, Session
from dtensor.daft.tasks.futures import TaskFuture
from dtensor.daft.tasks.lower_tasks import SELF, LoweredTasks, argument
from dtensor.daft.tasks.task import HostedObject, Task
from dtensor.daft.tasks.values import encode_failure
from dtensor.daft.undo.failed_run import UndoneRun
from dtensor.daft.verification.verifier import verify


class LocalSession(Session):
    """A session whose actors live in this process."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed
        self._subjects: dict[int, HostedObject] = {}
        self._num_processes = 0
        self._loaded: list[tuple[LoweredTasks, Engine]] = []

    def new_process(self, name: str, resources: Mapping[str, float]) -> int:
        self._num_processes += 1
        return self._num_processes - 1

    def create(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> None:
        """Create the actor's object in this process."""
        self._count(arguments)
        subject = self._subjects[actor.key] = HostedObject()
        task.create(subject, lambda: actor.cls, arguments, [future.value for future in inputs])

    def dispatch(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> TaskFuture:
        """Run a task at once, and return the future of its result."""
        self._count(arguments)
        subject = self._subjects[actor.key]
        message = task.run(subject, arguments, [future.value for future in inputs])
        return TaskFuture(self, actor.key, task.title, message)

    def wait_for(self, future: TaskFuture, timeout: float | None) -> Tensor:
        message: Tensor = future.value
        self.bytes_received += message.numel()
        return message

    def ready(self, future: TaskFuture) -> bool:
        return True

    def load(self, frozen: LoweredTasks) -> int:
        with self.lock:
            self.calls += len(frozen.processes)
            self._loaded.append((frozen, self._engine(frozen)))
            return len(self._loaded) - 1

    def _engine(self, frozen: LoweredTasks) -> Engine:
        """Verify a compiled function for one process, and return an engine that runs it on the
        actors."""
        everyone = (tuple(range(len(frozen.actors))),)
        sites = verify(frozen.program, everyone, self._seed).lists[0]
        table: Table = {
            (rank, SELF): self._subjects[actor] for rank, actor in enumerate(frozen.actors)
        }
        transport = TRANSPORTS["cpu", "process"](Meeting(ranks=everyone[0]))
        return Engine(HostProgram.whole(frozen.program, sites), table, transport)

    def run(self, loaded: int, inputs: Sequence[TaskFuture | Tensor | None]) -> list[TaskFuture]:
        """Run a loaded function at once, and return futures of its results."""
        frozen, engine = self._loaded[loaded]
        engine_inputs: Inputs = {rank: {} for rank in range(len(frozen.actors))}
        for index, (given, ranks) in enumerate(zip(inputs, frozen.arguments, strict=True)):
            if isinstance(given, Tensor):
                self.bytes_sent += given.numel() * len(ranks)
            for rank in ranks:
                engine_inputs[rank][argument(index)] = (
                    given.value if isinstance(given, TaskFuture) else given
                )
        with self.lock:
            self.calls += len(frozen.processes)
            try:
                results = engine.run(engine_inputs)
                if isinstance(results, UndoneRun):
                    raise results.faults[0].error
                assert not isinstance(results, DeferredRun), "its commits are read on the host"
            except BaseException:  # transfers may be half done: use a new engine from now on
                self._loaded[loaded] = (frozen, self._engine(frozen))
                raise
        return [
            TaskFuture(self, frozen.actors[rank], title, results[rank][result])
            for (rank, result), title in zip(frozen.results, frozen.titles, strict=True)
        ]

    def failures(self) -> list[DaftError]:
        return [TaskError(f) for subject in self._subjects.values() for f in subject.failures]

    def end(self, actor: ActorInfo, failure: Failure) -> None:
        for member in self.actors:
            if member.process == actor.process:
                self._subjects[member.key].end(encode_failure(ActorLost(failure)))

    def stop(self) -> None:
        for subject in self._subjects.values():
            subject.close()
        self._subjects.clear()
        self._loaded.clear()

    def _count(self, arguments: Tensor) -> None:
        self.calls += 1
        self.bytes_sent += arguments.numel()
