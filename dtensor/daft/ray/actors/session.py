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

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.cloudpickle
from torch import Tensor

from dtensor.daft.diagnosis.diagnosis import Waits
from dtensor.daft.errors import ActorLost, DaftError, Failure, TaskError
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ir.instructions import Call, Instruction
from dtensor.daft.ir.text import excerpt
from dtensor.daft.ray.actors.objects import CloudPickler, Objects, message_of
from dtensor.daft.ray.bootstrap.progress import Progress
from dtensor.daft.ray.channel.processes import Home, HostProcess, RayCalls
from dtensor.daft.ray.diagnosis.watch import Asked, HostWatch
from dtensor.daft.ray.transports.joining import Join, check_routes, connect_of
from dtensor.daft.tasks.actors import ActorInfo, Session
from dtensor.daft.tasks.frozen import Frozen, argument
from dtensor.daft.tasks.futures import TaskFuture, user_frames, user_line
from dtensor.daft.tasks.task import Task
from dtensor.daft.tasks.values import encode_failure
from dtensor.daft.verification.pairing import instruction_at

SMALL_BYTES = 1 << 16  # of an argument, to go with the call
MAX_RECENT = 10_000  # calls of a process that are remembered

_ray: Any = ray  # Ray's stubs leave most of its types unknown
_cloudpickle: Any = ray.cloudpickle  # pyright: ignore[reportUnknownMemberType]


class RaySession(Session):
    pickler = CloudPickler

    def __init__(
        self,
        *,
        address: str | None = None,
        deadline_s: float = 60.0,
        call_deadline_s: float = math.inf,
    ) -> None:
        super().__init__()
        self.failure: DaftError | None = None  # none is of all actors
        self._home = Home(address, deadline_s)
        self.watch: HostWatch = HostWatch(
            self,
            self._home,
            RayCalls(),
            deadline_s=deadline_s,
            call_deadline_s=call_deadline_s,
            due=None,
        )
        self._loaded: list[Frozen] = []
        self._recent: dict[int, tuple[str, tuple[str, ...]]] = {}  # number of a call: what it is

    def new_process(self, name: str, resources: Mapping[str, float]) -> int:
        _check_resources(name, resources)
        options: dict[str, object] = {
            option: resources[kind]
            for kind, option in (("CPU", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory"))
            if kind in resources
        }
        options["resources"] = {
            kind: n for kind, n in resources.items() if kind not in ("CPU", "GPU", "memory")
        }
        process = self._home.spawn(Objects, options=options)
        hosts = {p.counter.path.name: (p.index,) for p in self._home.processes}
        self._home.folder.say("actors", hosts)
        return process.index

    def create(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> None:
        host = self._home.processes[actor.process]
        number = self._number(task.title, task.issued, arguments)
        cls = _cloudpickle.dumps(actor.cls)
        refs = [future.value for future in inputs]
        host.tell(Objects.create, actor.key, number, cls, task, arguments.numpy(), values=refs)

    def dispatch(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> TaskFuture:
        host = self._home.processes[actor.process]
        number = self._number(task.title, task.issued, arguments)
        refs = [future.value for future in inputs]
        ref = host.call(Objects.call, actor.key, number, task, arguments.numpy(), values=refs)
        return TaskFuture(self, actor.key, task.title, ref)

    def _number(self, title: str, issued: tuple[str, ...], arguments: Tensor | None = None) -> int:
        """That of a new call; what it is will be remembered."""
        self.calls += 1
        self.bytes_sent += arguments.numel() if arguments is not None else 0
        self._recent[self.calls] = (title, issued)
        if len(self._recent) > MAX_RECENT * len(self._home.processes):
            del self._recent[next(iter(self._recent))]
        return self.calls

    def wait_for(self, future: TaskFuture, timeout: float | None) -> Tensor:
        host = self._home.processes[self.actors[future.actor].process]
        try:
            (kept,) = self.watch.get([Asked(host, future.value)], timeout)
        except DaftError as error:
            return encode_failure(error)
        message = message_of(kept)
        self.bytes_received += message.numel()
        return message

    def ready(self, future: TaskFuture) -> bool:
        self.check_open()
        done, _ = _ray.wait([future.value], timeout=0)
        return bool(done) or self.actors[future.actor].process in self.watch.lost

    def load(self, frozen: Frozen) -> int:
        self._check_lost(frozen)
        host_of = tuple(
            next(h for h, ranks in enumerate(frozen.hosts) if rank in ranks)
            for rank in range(len(frozen.actors))
        )
        parts = host_programs(frozen.program, frozen.hosts, frozen.report.lists)
        with self.lock:
            number = len(self._loaded)
            self._loaded.append(frozen)
            join = Join(
                address=self._home.address,
                port=self._home.store.port,
                secret=self._home.secret,
                prefix=f"program{number}",
                hosts=frozen.processes,
                host_of=host_of,
                tags={key: i for i, key in enumerate(check_routes(frozen.program, host_of))},
                connect=connect_of(frozen.processes, "cpu"),
            )
            for h, (own, process) in enumerate(zip(parts, frozen.processes, strict=True)):
                actors = {rank: frozen.actors[rank] for rank in own.ranks}
                self.calls += 1
                self._home.processes[process].tell(Objects.load, number, own, actors, join, h)
        return number

    def run(self, loaded: int, inputs: Sequence[TaskFuture | Tensor | None]) -> list[TaskFuture]:
        frozen = self._loaded[loaded]
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
        asked: list[HostProcess] = []
        with self.lock:
            try:
                for ranks, process in zip(frozen.hosts, frozen.processes, strict=True):
                    host = self._home.processes[process]
                    fed = [
                        (index, rank)
                        for index, users in enumerate(frozen.arguments)
                        for rank in users
                        if rank in ranks
                    ]
                    wanted = sorted({result for result in frozen.results if result[0] in ranks})
                    run = self._number(frozen.program.name, issued)
                    asked.append(host)
                    call = host.call(
                        Objects.run,
                        loaded,
                        run,
                        ranks,
                        [(rank, value, frozen.names[rank]) for rank, value in wanted],
                        [(rank, argument(index)) for index, rank in fed],
                        values=[refs[index] for index, _ in fed],
                        num_returns=max(1, len(wanted)),
                    )
                    made.update(zip(wanted, call if len(wanted) > 1 else [call]))
            except BaseException:
                # Hosts that were asked would wait for the others' parts, and all behind with them.
                for host in asked:
                    self.watch.end(host, "the process was ended: a step was half submitted.")
                raise
        return [
            TaskFuture(self, frozen.actors[result[0]], title, made[result])
            for result, title in zip(frozen.results, frozen.titles, strict=True)
        ]

    def _check_lost(self, frozen: Frozen) -> None:
        """A program that has lost one of its processes is not sent to the others."""
        if (lost := self.watch.find(frozen.processes)) is not None:
            self.note_raised(lost.failure)
            raise ActorLost(lost.failure)

    def failures(self) -> list[DaftError]:
        hosts = [host for host in self._home.processes if host.index not in self.watch.lost]
        asked = [Asked(host, host.call(Objects.failures)) for host in hosts]
        found: list[DaftError] = []
        for each in asked:
            try:
                (failures,) = self.watch.get([each])
                found += [TaskError(failure) for failure in failures]
            except ActorLost as lost:
                self.watch.lost.setdefault(each.host.index, lost)
        return [*found, *(lost for _, lost in sorted(self.watch.lost.items()))]

    def stop(self) -> None:
        self._home.close()

    # -- what the watch asks --------------------------------------------------------------------
    def describe(self, host: int, at: Progress, reason: str) -> Failure:
        title, issued = "", tuple[str, ...]()
        if at.position >= 0:
            title, issued = self._recent.get(at.run, (title, issued))
        if title and at.program >= 0:  # in a compiled function
            instruction, name = self._at(host, at)
            reason = f"{reason} It was in compiled function {title!r}."
            label = instruction.label  # of a task, its title
            title = f"{name}.{excerpt(instruction)}" if label is None else label.action
            issued = (instruction.source, *issued) if instruction.source else issued
        actor, _, method = title.partition(".")
        if not title:
            actor = ", ".join(each.name for each in self.actors if each.process == host)
            reason = f"{reason} It was between tasks."
        return Failure(rank=None, actor=actor, text=method, reason=reason, issued=issued)

    def at_work(self, host: int, at: Progress) -> bool:
        if at.position < 0 or at.program < 0:
            return at.position >= 0
        return isinstance(self._at(host, at)[0], Call)

    def waits(self, there: Mapping[int, Progress]) -> Mapping[int, Waits]:
        return {}  # hosts need not move: nobody is ended for standing still

    def _at(self, host: int, at: Progress) -> tuple[Instruction, str]:
        """The instruction of a compiled function that a host was last seen at, and whose it is."""
        frozen = self._loaded[at.program]
        site = frozen.report.lists[frozen.processes.index(host)][at.position]
        return instruction_at(frozen.program, site), frozen.names[site[0]]


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
