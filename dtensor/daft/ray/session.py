"""Actors in processes of Ray's: a task is one call that nobody waits for.

    with daft.launch(backend="ray"):                         # about 3 s, and 1 s for each actor
        a, b = daft.spawn(Model), daft.spawn(Model)
        out = b.execute(a.execute(x))                        # 2 calls, no wait

Ray places processes, notices their death and carries calls; tensors go from actor to actor through
its object store. Calls of one controller to one process keep their order, and a task depends only
on tasks before it, so that no order of tasks can hang.

Invariants: a process that dies, or whose heartbeat stops for `deadline_s`, is named, with what it
was doing, by every future that depends on it; the others go on. Leaving ends all processes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.cloudpickle
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from dtensor.daft.errors import ActorLost, DaftError, TaskError
from dtensor.daft.ray.compiled_step import Join
from dtensor.daft.ray.host import CloudPickler, Host, message_of
from dtensor.daft.ray.processes import Process, Processes
from dtensor.daft.ray.routes import check_routes
from dtensor.daft.ray.starting import START_S, Home, own_address
from dtensor.daft.tasks.actor_session import ActorInfo, Session
from dtensor.daft.tasks.frozen import Frozen, argument
from dtensor.daft.tasks.futures import TaskFuture, user_frames, user_line
from dtensor.daft.tasks.task import Task
from dtensor.daft.tasks.values import encode_failure

SMALL_BYTES = 1 << 16  # of an argument, to go with the call

_ray: Any = ray  # Ray's stubs leave most of its types unknown
_cloudpickle: Any = ray.cloudpickle  # pyright: ignore[reportUnknownMemberType]


class RaySession(Session):
    pickler = CloudPickler

    def __init__(self, *, address: str | None = None, deadline_s: float = 60.0) -> None:
        super().__init__()
        self._processes = Processes(deadline_s)
        self._home = Home(address)

    def new_process(self, name: str, resources: Mapping[str, float]) -> int:
        _check_resources(name, resources)
        asked: dict[str, object] = {
            option: resources[kind]
            for kind, option in (("CPU", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory"))
            if kind in resources
        }
        asked["resources"] = {
            kind: n for kind, n in resources.items() if kind not in ("CPU", "GPU", "memory")
        }
        made = self._home.spawn((), "cpu", Host, asked)
        self._processes.all.append(Process(made, time.monotonic()))
        return len(self._processes.all) - 1

    def create(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> None:
        self._processes.all[actor.process].actors.append(actor.name)
        cls = _cloudpickle.dumps(actor.cls)
        self._call(actor, "create", task, arguments, inputs, cls)

    def dispatch(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> TaskFuture:
        ref = self._call(actor, "call", task, arguments, inputs)
        return TaskFuture(self, actor.key, task.title, ref)

    def _call(
        self,
        actor: ActorInfo,
        method: str,
        task: Task,
        arguments: Tensor,
        inputs: Sequence[TaskFuture],
        *more: object,
    ) -> Any:
        process = self._processes.all[actor.process]
        self.calls += 1
        self.bytes_sent += arguments.numel()
        process.remember(self.calls, task.title, task.issued)
        refs = [future.value for future in inputs]
        remote = getattr(process.ray.actor, method).remote
        return remote(actor.key, self.calls, *more, task, arguments.numpy(), *refs)

    def wait_for(self, future: TaskFuture, timeout: float | None) -> Tensor:
        process = self._processes.all[self.actors[future.actor].process]
        try:
            message = message_of(self._processes.get(future.value, timeout))
        except DaftError as error:
            return encode_failure(error)
        process.ray.watch()
        self.bytes_received += message.numel()
        return message

    def ready(self, future: TaskFuture) -> bool:
        done, _ = _ray.wait([future.value], timeout=0)
        return bool(done) or self._processes.all[self.actors[future.actor].process].lost is not None

    def load(self, frozen: Frozen) -> int:
        self._check_lost(frozen)
        address = own_address()
        host_of = tuple(
            next(h for h, ranks in enumerate(frozen.hosts) if rank in ranks)
            for rank in range(len(frozen.actors))
        )
        tags = {key: i for i, key in enumerate(check_routes(frozen.program, host_of))}
        program = _ray.put(frozen.program)
        with self.lock:
            number = len(self._processes.loaded)
            store = self._processes.store
            if store is None:
                store = TCPStore(address, 0, None, True, wait_for_workers=False)
                self._processes.store = store
            self._processes.loaded.append(frozen)
            for h, (ranks, process) in enumerate(zip(frozen.hosts, frozen.processes, strict=True)):
                join = Join(
                    host=address,
                    port=store.port,
                    prefix=f"program{number}",
                    index=h,
                    processes=frozen.processes,
                    host_of=host_of,
                    tags=tags,
                    start_s=max(START_S, self._processes.deadline_s),
                )
                actors = {rank: frozen.actors[rank] for rank in ranks}
                self.calls += 1
                self._processes.all[process].ray.actor.load.remote(
                    number, program, frozen.report.lists[h], actors, join
                )
        return number

    def run(self, loaded: int, inputs: Sequence[TaskFuture | Tensor | None]) -> list[TaskFuture]:
        frozen = self._processes.loaded[loaded]
        self._check_lost(frozen)
        refs: list[Any] = []
        for given in inputs:
            if isinstance(given, Tensor):
                self.bytes_sent += given.numel()
                small = given.numel() <= SMALL_BYTES
                refs.append(given.numpy() if small else _ray.put(given.numpy()))
            else:
                refs.append(given.value if given is not None else None)
        issued, made = user_frames(), dict[tuple[int, str], Any]()
        with self.lock, self._all_or_none() as asked:
            for ranks, number in zip(frozen.hosts, frozen.processes, strict=True):
                process = self._processes.all[number]
                fed = [
                    (index, rank)
                    for index, users in enumerate(frozen.arguments)
                    for rank in users
                    if rank in ranks
                ]
                wanted = sorted({result for result in frozen.results if result[0] in ranks})
                self.calls += 1
                process.remember(self.calls, frozen.program.name, issued)
                asked.append(process)
                call = process.ray.actor.run.options(num_returns=max(1, len(wanted))).remote(
                    loaded,
                    self.calls,
                    [(rank, value, frozen.names[rank]) for rank, value in wanted],
                    [(rank, argument(index)) for index, rank in fed],
                    *[refs[index] for index, _ in fed],
                )
                made.update(zip(wanted, call if len(wanted) > 1 else [call]))
        return [
            TaskFuture(self, frozen.actors[result[0]], title, made[result])
            for result, title in zip(frozen.results, frozen.titles, strict=True)
        ]

    @contextmanager
    def _all_or_none(self) -> Generator[list[Process]]:
        """The processes asked to run their part of a step; after an interrupt they would wait for
        the others' parts, and all runs behind that with them."""
        asked: list[Process] = []
        try:
            yield asked
        except BaseException:
            for process in asked:
                self._processes.end(process, "the process was ended: a step was half submitted.")
            raise

    def _check_lost(self, frozen: Frozen) -> None:
        """A program that has lost one of its processes is not sent to the others."""
        if (lost := self._processes.lost_of(frozen)) is not None:
            self.note_raised(lost.failure)
            raise ActorLost(lost.failure)

    def failures(self) -> list[DaftError]:
        calls = [(p, p.ray.actor.failures.remote()) for p in self._processes.all if p.lost is None]
        found: list[DaftError] = []
        for process, ref in calls:
            try:
                found += [TaskError(failure) for failure in self._processes.get(ref, None)]
            except ActorLost as lost:
                if process.lost is None:
                    self._processes.lose(process, lost)
        return found + [p.lost for p in self._processes.all if p.lost is not None]

    def stop(self) -> None:
        self._processes.all.clear()
        self._processes.store = None  # and its port, though somebody may hold on to a future
        self._home.close()


def _check_resources(name: str, resources: Mapping[str, float]) -> None:
    """Ray would wait for ever for what it does not have."""
    there: dict[str, float] = _ray.cluster_resources()
    lacking = {k: there.get(k, 0) for k, n in resources.items() if n > there.get(k, 0)}
    if lacking:
        raise ValueError(
            f"Actor {name!r} asks for {dict(resources)}, and Ray has {lacking} in all.\n"
            f"  at {user_line()}\n"
            f"  Fix: ask for less, or launch with address= on a Ray that has it."
        )
