"""Lower recorded tasks to a `Program`: one list of instructions for each actor.

    tasks        y = a.execute(x);  z = b.execute(y)
    actor a      v0 = call a.execute(self, x0); send v0 to 1; wait v0; free v0
    actor b      v0 = recv from 0; wait v0; v1 = call b.execute(self, v0); free v0

Every value is a message of unknown size (`values.py`), so buffers are `u8[*]`. A value is sent once
to each actor that uses it, as soon as it exists. All lists are parts of one order in which each
`Wait` follows the starts that it needs, so the program cannot hang.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtensor.daft.ir.instructions import Buffer, Call, Free, Instruction, Recv, Send, Wait
from dtensor.daft.ir.label import Label
from dtensor.daft.ir.program import Function, Program, RankProgram
from dtensor.daft.ir.text import columns, format_instruction
from dtensor.daft.tasks.task import HostedObject, Task
from dtensor.daft.verification.pairing import Hosts
from dtensor.daft.verification.verifier import Report, verify

MESSAGE = Buffer((), torch.uint8, variable=True)
CHANNEL = "values"
SELF = "self"
SEND_LAG = 2
"""The sender waits for a send after this many further calls. The receiver may lag by as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """A task of a recorded function. `inputs`: -1 - i is argument i, j the result of task j."""

    actor: int
    task: Task
    arguments: Tensor
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredTasks:
    """A program and where it runs: rank r is actor `actors[r]`, host h is process `processes[h]`.

    `results`: (rank, value) of each result; `titles`: the tasks that return them. `arguments`: the
    ranks that use each argument. `undeclared`: for each rank, its tasks without `daft.returns`,
    whose results have unknown sizes.
    """

    program: Program
    actors: tuple[int, ...]
    names: tuple[str, ...]
    hosts: Hosts
    processes: tuple[int, ...]
    results: tuple[tuple[int, str], ...]
    titles: tuple[str, ...]
    arguments: tuple[tuple[int, ...], ...]
    undeclared: tuple[tuple[str, ...], ...]
    report: Report

    def __str__(self) -> str:
        """Return the instruction lists of all actors side by side, and the memory bound of each
        actor."""
        lists = [
            [format_instruction(i, brief=True) for i in rank_program.instructions]
            for rank_program in self.program.ranks
        ]
        titles = [f"{rank}: {name}" for rank, name in enumerate(self.names)]
        lines = [f"program {self.program.name}    {len(self.actors)} actors"]
        lines += [columns(titles, lists, uncut=True), "", "memory of values, at most"]
        for name, rank_program, peak, unknown in zip(
            self.names, self.program.ranks, self.report.peak_bytes, self.undeclared, strict=True
        ):
            # the sizes of arguments are known only at a call
            bound = " + ".join((f"{peak} bytes", *rank_program.inputs))
            if unknown:
                bound = f"unknown: {', '.join(unknown)}"
            lines.append(f"  {name:<16} {bound}")
        if any(self.undeclared):
            lines.append("  (unknown: these tasks do not declare their tensors by daft.returns)")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Invoke:
    """The function of a `Call`: runs a task with its recorded arguments. `owned`: the inputs that
    have no later reader, see `Task.run`."""

    task: Task
    arguments: Tensor
    owned: tuple[int, ...]

    def __call__(self, subject: HostedObject, *messages: Tensor) -> tuple[Tensor]:
        return (self.task.run(subject, self.arguments, messages, self.owned, copies=True),)


def lower_tasks(
    name: str,
    tasks: Sequence[RecordedTask],
    results: Sequence[int],
    process_of: dict[int, int],
    num_arguments: int,
) -> LoweredTasks:
    """Lower tasks to a verified program.

    `results`: the tasks whose values are returned to the controller. `process_of`: the process of
    each actor. Raises ProgramError if the program is not sound.
    """
    lowering = _Lowering(tasks, frozenset(results))
    actors = lowering.actors
    processes = sorted({process_of[actor] for actor in actors})
    hosts = tuple(
        tuple(rank for rank, actor in enumerate(actors) if process_of[actor] == process)
        for process in processes
    )
    program = lowering.program(name)
    names = {t.actor: t.task.actor for t in tasks}
    return LoweredTasks(
        program=program,
        actors=tuple(actors),
        names=tuple(names[actor] for actor in actors),
        hosts=hosts,
        processes=tuple(processes),
        results=tuple((lowering.rank_of[result], _name(result)) for result in results),
        titles=tuple(tasks[result].task.title for result in results),
        arguments=tuple(
            tuple(
                r
                for r, rank_program in enumerate(program.ranks)
                if argument(i) in rank_program.inputs
            )
            for i in range(num_arguments)
        ),
        undeclared=lowering.undeclared(),
        report=verify(program, hosts),
    )


def argument(index: int) -> str:
    """Return the name of argument `index` in the program."""
    return f"x{index}"


def _name(value: int) -> str:
    return f"v{value}" if value >= 0 else argument(-1 - value)


@dataclass(slots=True)
class _ActorList:
    """The list of one actor, while it is built.

    `started`: values whose receive has started and was not waited for. `sent`: value -> number of
    calls until its send is waited for. `done`: the tasks so far. `unknown`: tasks of unknown size.
    """

    instructions: list[Instruction] = field(default_factory=list[Instruction])
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])
    nbytes: dict[str, int] = field(default_factory=dict[str, int])
    started: set[int] = field(default_factory=set[int])
    sent: dict[int, int] = field(default_factory=dict[int, int])
    done: set[int] = field(default_factory=set[int])
    unknown: list[str] = field(default_factory=list[str])


class _Lowering:
    """Builds the lists of all actors, task by task."""

    def __init__(self, tasks: Sequence[RecordedTask], results: frozenset[int]) -> None:
        """Number the actors, and find the last task of each actor that reads each value."""
        self.tasks = tasks
        self.results = results
        self.actors = list(dict.fromkeys(task.actor for task in tasks))
        index = {actor: rank for rank, actor in enumerate(self.actors)}
        self.rank_of = [index[task.actor] for task in tasks]
        self.ranks = [_ActorList() for _ in self.actors]
        self.functions: dict[str, Function] = {}
        # value -> rank -> the last task of the rank that uses it
        self.last_readers: dict[int, dict[int, int]] = defaultdict(dict)
        for number, task in enumerate(tasks):
            for value in task.inputs:
                self.last_readers[value][self.rank_of[number]] = number

    def program(self, name: str) -> Program:
        """Lower all tasks, and return the program."""
        for number in range(len(self.tasks)):
            self._lower_task(number)
        for rank in range(len(self.ranks)):
            self._finish_sends(rank, everything=True)
        ranks = tuple(
            RankProgram(
                instructions=tuple(actor_list.instructions),
                inputs=tuple(actor_list.inputs),
                outputs=tuple(actor_list.outputs),
                state=(SELF,),
                nbytes=tuple(actor_list.nbytes.items()),
            )
            for actor_list in self.ranks
        )
        return Program(
            name=name,
            ranks=ranks,
            functions=tuple(self.functions.items()),
            stage_of=(0,) * len(ranks),
        )

    def undeclared(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(dict.fromkeys(actor_list.unknown)) for actor_list in self.ranks)

    def _lower_task(self, number: int) -> None:
        """Append the instructions of a task: wait for its inputs, call it, send its result."""
        recorded, rank = self.tasks[number], self.rank_of[number]
        actor_list, task, name = self.ranks[rank], recorded.task, _name(number)
        used = list(dict.fromkeys(recorded.inputs))
        for value in used:
            if value < 0 and _name(value) not in actor_list.inputs:
                actor_list.inputs.append(_name(value))
        arrived = [value for value in used if value in actor_list.started]
        if arrived:
            actor_list.started -= set(arrived)
            actor_list.instructions.append(Wait(tuple(map(_name, arrived))))
        last_uses = [v for v in used if v >= 0 and self.last_readers[v][rank] == number]
        owned = tuple(
            i
            for i, v in enumerate(recorded.inputs)
            if v in last_uses and self._has_no_other_reader(v, rank)
        )
        source = task.issued[0] if task.issued else None
        call = Call(
            self._function(recorded, owned),
            (SELF, *map(_name, recorded.inputs)),
            (name,),
            () if task.operation else (SELF,),
            label=Label(task.title),
            source=source,
        )
        actor_list.instructions.append(call)
        actor_list.done.add(number)
        self._declare_size(rank, number, name)
        self._finish_sends(rank)
        self._send_result(number, source)
        unused = number not in self.last_readers and number not in self.results
        freed = [
            v for v in last_uses if v not in actor_list.sent and self._has_no_other_reader(v, rank)
        ]
        freed += [number] if unused else []
        if freed:
            actor_list.instructions.append(Free(tuple(map(_name, freed))))
        if number in self.results:
            actor_list.outputs.append(name)

    def _send_result(self, number: int, source: str | None) -> None:
        """Send a result to each other actor that uses it, and start to receive it there."""
        rank, name = self.rank_of[number], _name(number)
        for receiver in sorted(self.last_readers.get(number, {})):
            if receiver == rank:
                continue
            self.ranks[rank].instructions.append(
                Send(name, receiver, CHANNEL, MESSAGE, source=source)
            )
            self.ranks[rank].sent[number] = SEND_LAG
            receiver_list = self.ranks[receiver]
            receiver_list.instructions.append(Recv(name, rank, CHANNEL, MESSAGE, source=source))
            receiver_list.started.add(number)
            self._declare_size(receiver, number, name)

    def _finish_sends(self, rank: int, everything: bool = False) -> None:
        """Wait for sends that started `SEND_LAG` calls ago, and free values without later uses.
        ``everything``: wait for all sends, at the end of the list."""
        actor_list = self.ranks[rank]
        for value in list(actor_list.sent):
            actor_list.sent[value] -= 1
            last_task = self.last_readers[value].get(
                rank, value
            )  # the last task of this rank that uses it
            if not everything and (actor_list.sent[value] > 0 or last_task not in actor_list.done):
                continue
            del actor_list.sent[value]
            actor_list.instructions.append(Wait((_name(value),)))
            if value not in self.results:
                actor_list.instructions.append(Free((_name(value),)))

    def _has_no_other_reader(self, value: int, rank: int) -> bool:
        """Return whether neither a send nor the controller reads the rank's copy of the value."""
        is_producer = self.rank_of[value] == rank
        sent = is_producer and any(reader != rank for reader in self.last_readers[value])
        return not sent and not (is_producer and value in self.results)

    def _declare_size(self, rank: int, number: int, name: str) -> None:
        """Record a result's bytes on a rank, or that the task does not declare them."""
        actor_list, task = self.ranks[rank], self.tasks[number].task
        if task.returns is None:
            actor_list.unknown.append(task.title)
        else:
            actor_list.nbytes[name] = sum(buffer.nbytes for buffer in task.returns)

    def _function(self, recorded: RecordedTask, owned: tuple[int, ...]) -> str:
        """Return the name of the task's function. Equal tasks share one."""
        task, count = recorded.task, 1
        name = task.title
        while name in self.functions:
            (_, invoke), *_ = self.functions[name].bindings
            assert isinstance(invoke, Invoke)
            same = (invoke.task, invoke.owned) == (task, owned)
            if same and torch.equal(invoke.arguments, recorded.arguments):
                return name
            count += 1
            name = f"{task.title}.{count}"
        invoke = Invoke(task, recorded.arguments, owned)
        self.functions[name] = Function.of(invoke, name)
        return name
