"""A session of actors in Ray processes: a task is one asynchronous message.

    with daft.launch(backend="ray"):                         # about 3 s, and 1 s for each actor
        a, b = daft.spawn(Model), daft.spawn(Model)
        out = b.execute(a.execute(x))                        # 2 calls, no wait

Ray starts and ends processes. Calls use our own connection, and values are sent from process to
process (`object_store.py`). Calls to one process keep their order, and a task depends only on
earlier tasks, so no order of tasks can hang. The number of calls in flight is bounded
(`in_flight.py`). Invariant: if a process dies or is silent for `deadline_s`, every future that
depends on it names it and its task; other futures are unaffected.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor.daft.diagnosis.diagnosis import Waits
from dtensor.daft.errors import ActorLost, DaftError, Failure, TaskError
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ir.instructions import Call, Instruction
from dtensor.daft.ir.text import excerpt
from dtensor.daft.launch_options import LaunchOptions
from dtensor.daft.ray.actors.in_flight import InFlight, RemoteValue, ValueReference
from dtensor.daft.ray.actors.object_store import (
    CONTROLLER,
    HostGone,
    Key,
    ObjectStore,
    StoreMeeting,
)
from dtensor.daft.ray.actors.objects import Objects, Packed
from dtensor.daft.ray.bootstrap.machines import LOOPBACK
from dtensor.daft.ray.bootstrap.progress import Progress
from dtensor.daft.ray.channel.messages import ONE_WAY, REQUEST, Payload
from dtensor.daft.ray.channel.processes import HostProcess, LaunchProcesses
from dtensor.daft.ray.diagnosis.failure_detector import SLICE_S, AwaitedCall, FailureDetector
from dtensor.daft.ray.transports.slabs import SHARED_BYTES
from dtensor.daft.tasks.actors import ActorInfo, Session
from dtensor.daft.tasks.futures import TaskFuture, user_frames, user_line
from dtensor.daft.tasks.lower_tasks import LoweredTasks, argument
from dtensor.daft.tasks.task import Task
from dtensor.daft.tasks.values import encode_failure, failure_of, pickled
from dtensor.daft.verification.pairing import instruction_at
from dtensor.signals import defer_signals, wait

MAX_RECENT = 10_000  # how many calls of each process are remembered, to name them in errors


@dataclass(frozen=True, slots=True)
class _ProcessPart:
    """The part of one process in a run of a compiled function. `argument_indices`: the numbers of
    its arguments; `names`: (rank, name) of each; `result_keys`: (rank, name) of each result."""

    process: int
    title: str
    argument_indices: tuple[int, ...]
    names: tuple[tuple[int, str], ...]
    result_keys: tuple[tuple[int, str], ...]

    @staticmethod
    def all_of(frozen: LoweredTasks, number: int) -> list[_ProcessPart]:
        """Return the parts of all processes in compiled function `number`."""
        parts: list[_ProcessPart] = []
        for ranks, process in zip(frozen.hosts, frozen.processes, strict=True):
            argument_indices = [
                (index, rank)
                for index, users in enumerate(frozen.arguments)
                for rank in users
                if rank in ranks
            ]
            part = _ProcessPart(
                process=process,
                title=f"{frozen.program.name}, function {number}, process {process}",
                argument_indices=tuple(index for index, _ in argument_indices),
                names=tuple((rank, argument(index)) for index, rank in argument_indices),
                result_keys=tuple(sorted({r for r in frozen.results if r[0] in ranks})),
            )
            parts.append(part)
        return parts


class RaySession(Session):
    """A session whose actors are in Ray processes. `Session` describes its methods."""

    def __init__(self, options: LaunchOptions) -> None:
        """Prepare the channel, the store of values and the failure detector. No process is started
        yet."""
        super().__init__()
        self.failure: DaftError | None = None  # no failure affects all actors
        self._launch = LaunchProcesses(options.address, options.deadline_s, warm=options.warm)
        self._channel = self._launch.connect()
        several = self._launch.address != LOOPBACK
        self._meeting = StoreMeeting(
            folder=self._launch.folder.path,
            secret=self._launch.secret,
            address=self._launch.address,
            port=self._launch.store.port if several else None,
        )
        self._store = ObjectStore(self._meeting, CONTROLLER)
        self._in_flight = InFlight(self._store, self._channel)
        self.watch: FailureDetector = FailureDetector(
            self,
            self._launch,
            self._channel,
            deadline_s=options.deadline_s,
            call_deadline_s=options.call_deadline_s,
            due=None,
        )
        self._loaded: list[tuple[LoweredTasks, list[_ProcessPart]]] = []
        self._recent: dict[int, tuple[str, tuple[str, ...]]] = {}  # call number: title, lines
        self._last: dict[int, int] = {}  # by process, the number of its last call

    def allocate(self, nbytes: int) -> Tensor:
        return self._store.allocate(nbytes)

    def new_process(self, name: str, resources: Mapping[str, float]) -> int:
        """Start a process for actors with these resources, and return its number without
        waiting."""
        _check_resources(name, resources, self._launch)
        options: dict[str, object] = {
            option: resources[kind]
            for kind, option in (("CPU", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory"))
            if kind in resources
        }
        options["resources"] = {
            kind: n for kind, n in resources.items() if kind not in ("CPU", "GPU", "memory")
        }
        number = self._channel.add()
        process = self._launch.spawn(Objects, self._meeting, number, options=options)
        assert number == process.index, "a process has one number in the launch and the channel"
        process.serve(self._channel.credentials(number))
        self._store.connect(number)
        hosts = {p.counter.path.name: (p.index,) for p in self._launch.processes}
        self._launch.folder.write_facts("actors", hosts)
        return number

    # -- calls ------------------------------------------------------------------------------------

    def create(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> None:
        """Ask an actor's process to create the actor's object."""
        number = self._number(task.title, task.issued, arguments)
        values = [future.value.value for future in inputs]
        delivered = [self._deliver(value, actor.process) for value in values]
        packed = self._packed(arguments, number, "arguments", actor.process)
        cls = pickled(actor.cls)
        payload = (actor.key, number, cls, task.plain(), packed, delivered)
        self._call(actor.process, Objects.create, payload, task.title, values, arguments.numel())

    def dispatch(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> TaskFuture:
        """Send a task to its actor's process, and return the future of its result."""
        process, title = actor.process, task.title
        self._in_flight.wait_for_room((title,), self._look)
        number = self._number(title, task.issued, arguments)
        values = [future.value.value for future in inputs]
        delivered = [self._deliver(value, process) for value in values]
        packed = self._packed(arguments, number, "arguments", process)
        dropped = self._in_flight.to_drop(process)
        payload = (actor.key, number, task.plain(), packed, delivered, dropped)
        remote = RemoteValue(self._in_flight, process, number, number)
        self._call(process, Objects.call, payload, title, values, arguments.numel(), remote)
        return TaskFuture(self, actor.key, title, ValueReference(remote))

    def _call(
        self,
        process: int,
        method: Any,
        payload: tuple[Any, ...],
        title: str,
        inputs: Sequence[RemoteValue],
        nbytes: int,
        *outputs: RemoteValue,
    ) -> None:
        """Call a method of `Objects` in a process. `inputs`, `outputs`: the values that it takes
        and makes; `nbytes`: the size of its other arguments."""
        with defer_signals():  # else an interrupt could leave the call counted as in flight
            submission = self._in_flight.add((title,), inputs, nbytes)
            reply = self._channel.send(process, REQUEST, (method,), Payload.plain(payload))
            self._in_flight.record_call(process, title, submission, reply, outputs)
            self._last[process] = self.calls

    def _number(self, title: str, issued: tuple[str, ...], arguments: Tensor | None = None) -> int:
        """Return the number of a new call, and remember its title and lines."""
        self.calls += 1
        self.bytes_sent += arguments.numel() if arguments is not None else 0
        self._recent[self.calls] = (title, issued)
        if len(self._recent) > MAX_RECENT * len(self._launch.processes):
            del self._recent[next(iter(self._recent))]
        return self.calls

    def _packed(self, message: Tensor, number: int, name: str, to: int) -> Packed:
        """Return an argument as it is sent in a call: its bytes, or, if it is large, the key of a
        value that is sent to the process without a copy."""
        if message.numel() < SHARED_BYTES:
            return message.numpy().tobytes()
        self._store.send_message((number, name), message, to)
        return (number, name), CONTROLLER

    def _deliver(self, value: RemoteValue, receiver: int) -> tuple[Key, int | None]:
        """Let the holder of a value send it to process ``receiver``, once. Return the value's key
        and its holder, None if the receiver is the holder."""
        holder = value.holder
        if holder == receiver:
            return value.key, None
        if receiver not in value.receivers:
            value.receivers.add(receiver)
            if (
                self._last[holder] == value.number
            ):  # the holder's last call: a call is executed next
                payload = Payload.plain((value.key, receiver))
                self._channel.send(holder, ONE_WAY, (Objects.send,), payload)
            else:  # the store does not wait for the holder's later calls
                self._store.ask(value.key, holder, receiver)
        return value.key, holder

    def _look(self) -> None:
        """Handle signals, and check whether all processes are alive."""
        wait()
        self.watch.look((), self.watch.deadline_s)

    def wait_for(self, future: TaskFuture, timeout: float | None) -> Tensor:
        """Wait for a future's message. A failure is returned as a message too."""
        value: RemoteValue = future.value.value
        end = None if timeout is None else time.monotonic() + timeout
        host = self._launch.processes[value.holder]
        try:
            self.watch.get([AwaitedCall(host, value.reply)], timeout)
            self._in_flight.update()
            message = self._message(value, host, end)
        except DaftError as error:
            self.check_open()
            return encode_failure(error)
        self.bytes_received += message.numel()
        error = failure_of(message)
        if isinstance(error, ActorLost) and error.failure.peers:  # a needed value was lost
            return encode_failure(self.watch.root((), error.failure.peers))
        return message

    def _message(self, value: RemoteValue, host: HostProcess, end: float | None) -> Tensor:
        """Return the message of a value that was made; fetch it from its holder if it is large."""
        if value.message is not None:
            return torch.frombuffer(bytearray(value.message), dtype=torch.uint8)
        if CONTROLLER not in value.receivers:
            value.receivers.add(CONTROLLER)
            self._store.ask(value.key, value.holder)
        try:
            while True:
                left = SLICE_S if end is None else min(SLICE_S, end - time.monotonic())
                if self._store.wait(value.key, value.holder, max(0.0, left)):
                    return self._store.take(value.key, value.holder)
                self.check_open()
                self._look()
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError("The result is not there yet; ask again.")
                if value.holder in self.watch.lost:
                    raise HostGone(value.holder)
        except HostGone:
            raise self.watch.root((), (value.holder,)) from None

    def ready(self, future: TaskFuture) -> bool:
        self.check_open()
        value: RemoteValue = future.value.value
        assert value.reply is not None
        return self._channel.all_over([value.reply]) or value.holder in self.watch.lost

    # -- compiled functions -----------------------------------------------------------------------

    def load(self, frozen: LoweredTasks) -> int:
        """Send each process its part of a compiled function, and return the function's number."""
        self._check_lost(frozen)
        process_of = tuple(
            next(p for p, ranks in zip(frozen.processes, frozen.hosts) if rank in ranks)
            for rank in range(len(frozen.actors))
        )
        programs = host_programs(frozen.program, frozen.hosts, frozen.report.lists)
        with self.lock:
            number = len(self._loaded)
            self._loaded.append((frozen, _ProcessPart.all_of(frozen, number)))
            for host_program, process in zip(programs, frozen.processes, strict=True):
                actors = {rank: frozen.actors[rank] for rank in host_program.ranks}
                self.calls += 1
                self._last[process] = self.calls
                payload = (number, host_program, actors, process_of)
                self._channel.send(process, ONE_WAY, (Objects.load,), payload)
        return number

    def run(self, loaded: int, inputs: Sequence[TaskFuture | Tensor | None]) -> list[TaskFuture]:
        """Send each process its part of a compiled function, in one call. If an exception
        interrupts that, end the processes that were called."""
        frozen, parts = self._loaded[loaded]
        self._check_lost(frozen)
        issued, results = user_frames(), dict[tuple[int, str], RemoteValue]()
        values = [item.value.value for item in inputs if isinstance(item, TaskFuture)]
        nbytes = sum(item.numel() for item in inputs if isinstance(item, Tensor))
        titles = [part.title for part in parts]
        called_hosts: list[HostProcess] = []
        with self.lock:
            self._in_flight.wait_for_room(titles, self._look)
            submission = self._in_flight.add(titles, values, nbytes)
            self.bytes_sent += nbytes
            run = self.calls + 1
            try:
                with defer_signals():
                    for part in parts:
                        process = part.process
                        number = self._number(frozen.program.name, issued)
                        called_hosts.append(self._launch.processes[process])
                        part_values = [
                            RemoteValue(self._in_flight, process, number, (run, value))
                            for _, value in part.result_keys
                        ]
                        arguments = [
                            self._argument(inputs[index], run, f"{name}<{rank}", process)
                            for index, (rank, name) in zip(
                                part.argument_indices, part.names, strict=True
                            )
                        ]
                        dropped = self._in_flight.to_drop(process)
                        payload = (loaded, run, part.result_keys, part.names, arguments, dropped)
                        reply = self._channel.send(
                            process, REQUEST, (Objects.run,), Payload.plain(payload)
                        )
                        self._in_flight.record_call(
                            process, part.title, submission, reply, part_values
                        )
                        self._last[process] = number
                        results.update(zip(part.result_keys, part_values, strict=True))
            except BaseException:
                # processes that were called would wait for values of the others forever
                for host in called_hosts:
                    self.watch.end(host, "the process was ended: a step was half submitted.")
                raise
        return [
            TaskFuture(self, frozen.actors[result[0]], title, ValueReference(results[result]))
            for result, title in zip(frozen.results, frozen.titles, strict=True)
        ]

    def _argument(
        self, value: TaskFuture | Tensor | None, run: int, name: str, process: int
    ) -> Packed:
        """Return an argument of a compiled function as it is sent to a process."""
        assert value is not None, "an unused argument is not sent"
        if isinstance(value, TaskFuture):
            return self._deliver(value.value.value, process)
        return self._packed(value, run, name, process)

    def _check_lost(self, frozen: LoweredTasks) -> None:
        """Raise `ActorLost` if a process of a compiled function is lost."""
        broken = any(map(self._channel.is_broken, frozen.processes))
        if not (broken or self.watch.lost):
            return
        if (lost := self.watch.find(frozen.processes)) is not None:
            self.note_raised(lost.failure)
            raise ActorLost(lost.failure)

    def wait_for_some(self, futures: Sequence[TaskFuture], num: int, end: float | None) -> None:
        """Wait until ``num`` futures are ready or the time is ``end``, checking the processes
        meanwhile."""
        while True:
            waiting = [f for f in futures if not self.ready(f)]
            needed = num - (len(futures) - len(waiting))
            left = SLICE_S if end is None else min(SLICE_S, end - time.monotonic())
            if needed <= 0 or left <= 0.0:
                return
            self._channel.some_over([f.value.value.reply for f in waiting], needed, left)
            self._look()

    def end(self, actor: ActorInfo, failure: Failure) -> None:
        """End the process of an actor, and record it as lost by ``failure``."""
        host = self._launch.processes[actor.process]
        if host.index not in self.watch.lost:
            self.watch.lost[host.index] = ActorLost(failure)
            self.tell_of_loss(host.index)
            host.kill()
            host.end()

    def failures(self) -> list[DaftError]:
        """Ask all processes for the failures of their methods. Return these, and the lost
        processes."""
        hosts = [host for host in self._launch.processes if host.index not in self.watch.lost]
        calls = [
            AwaitedCall(host, self._channel.send(host.index, REQUEST, (Objects.failures,), ()))
            for host in hosts
        ]
        errors: list[DaftError] = []
        for each in calls:
            try:
                (failures,) = self.watch.get([each])
                errors += [TaskError(failure) for failure in failures]
            except ActorLost as lost:
                self.watch.lost.setdefault(each.host.index, lost)
        return [*errors, *(lost for _, lost in sorted(self.watch.lost.items()))]

    def stop(self) -> None:
        self._store.close()
        self._launch.close()

    # -- used by `FailureDetector`, see its `Controller` ------------------------------------------
    def describe(self, host: int, progress: Progress, reason: str) -> Failure:
        """Return the failure of a process: the actor and the method or instruction that it is
        at."""
        title, issued = "", tuple[str, ...]()
        if progress.position >= 0:
            title, issued = self._recent.get(progress.run, (title, issued))
        if title and progress.program >= 0:  # in a compiled function
            instruction, name = self._instruction_at(host, progress)
            reason = f"{reason} It was in compiled function {title!r}."
            label = instruction.label  # of a task, its title
            title = f"{name}.{excerpt(instruction)}" if label is None else label.action
            issued = (instruction.source, *issued) if instruction.source else issued
        actor, _, method = title.partition(".")
        if not title:
            actor = ", ".join(each.name for each in self.actors if each.process == host)
            reason = f"{reason} It was between tasks."
        return Failure(rank=None, actor=actor, text=method, reason=reason, issued=issued)

    def at_work(self, host: int, progress: Progress) -> bool:
        if progress.position < 0 or progress.program < 0:
            return progress.position >= 0
        return isinstance(self._instruction_at(host, progress)[0], Call)

    def waits(self, progress_by_host: Mapping[int, Progress]) -> Mapping[int, Waits]:
        return {}  # processes need not make progress, so none is ended for waiting

    def tell_of_loss(self, host: int) -> None:
        """Tell the channel, the store and all other processes that a process is lost."""
        self._channel.lose(host)
        self._store.lost(host)
        for process in self._launch.processes:
            if process.index not in self.watch.lost:
                self._store.tell_of_loss(host, process.index)

    def _instruction_at(self, host: int, progress: Progress) -> tuple[Instruction, str]:
        """Return the instruction of a compiled function that a process is at, and its actor's
        name."""
        frozen, _ = self._loaded[progress.program]
        site = frozen.report.lists[frozen.processes.index(host)][progress.position]
        return instruction_at(frozen.program, site), frozen.names[site[0]]


def _check_resources(name: str, resources: Mapping[str, float], launch: LaunchProcesses) -> None:
    """Raise ValueError for resources that Ray does not have, as Ray would wait forever."""
    total = launch.resources() if any(resources.values()) else {}
    lacking = {k: total.get(k, 0) for k, n in resources.items() if n > total.get(k, 0)}
    if lacking:
        raise ValueError(
            f"Actor {name!r} asks for {dict(resources)}, and Ray has {lacking} in all.\n"
            f"  at {user_line()}\n"
            f"  Fix: ask for less, or launch with address= on a Ray that has it."
        )
