"""Address n actors of a class as one group, with collectives.

    trainers = daft.WorkerGroup(Trainer, 4, rank=daft.Scatter(range(4)))
    grads = trainers.gradients(daft.Scatter(batches))       # a GroupFuture: one future per member
    trainers.apply(daft.all_reduce(grads))                  # each member gets one result
    critic.score(trainers.sample(prompt)).get()             # one actor gets the list

A method of a group is dispatched to all members. Every member gets the same arguments, except that
a `Scatter`, or a `GroupFuture` of the same size, gives each member one item. Collectives run in the
members' processes; reductions are left folds in the order of the members.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dtensor.daft.ir.instructions import Op
from dtensor.daft.tasks.actors import (
    ActorHandle,
    ActorInfo,
    current_session,
    info_of,
    operation,
    recorder,
)
from dtensor.daft.tasks.futures import TaskFuture, user_line
from dtensor.daft.tasks.streams import TaskStream
from dtensor.numerics import REDUCTIONS


class Scatter:
    """An argument of a group's method that gives each member one of ``items``."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items: tuple[Any, ...] = tuple(items)

    def __repr__(self) -> str:
        return f"Scatter of {len(self.items)}"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Scatter is an argument of a group's method, not a part of one and not of an actor's "
            "method.\n  Fix: pass Scatter([...]) as an argument of a WorkerGroup's method."
        )


class GroupFuture:
    """The futures of a group's members, in order. As an argument of an actor's method it is the
    list of their values."""

    __slots__ = ("futures", "group")

    def __init__(self, group: Sequence[ActorInfo], futures: Sequence[TaskFuture]) -> None:
        self.group: tuple[ActorInfo, ...] = tuple(group)
        self.futures: tuple[TaskFuture, ...] = tuple(futures)

    def get(self, timeout: float | None = None) -> list[Any]:
        """Return the members' values. `timeout`: seconds for each. Raises the first failure in the
        order of the members."""
        return [future.get(timeout) for future in self.futures]

    def done(self) -> bool:
        """Return whether `get` would return without waiting."""
        return all([future.done() for future in self.futures])

    def __len__(self) -> int:
        return len(self.futures)

    def __getitem__(self, index: int) -> TaskFuture:
        return self.futures[index]

    def __iter__(self) -> Iterator[TaskFuture]:
        return iter(self.futures)

    def __repr__(self) -> str:
        return f"<GroupFuture of {list(self.futures)}>"

    def __reduce__(self) -> tuple[type[list[Any]], tuple[tuple[TaskFuture, ...]]]:
        return (list, (self.futures,))


class WorkerGroup:
    """`size` actors of class `cls`, each in its own process.

    The group has the methods of the class, which return a `GroupFuture`.

    Args:
        args, kwargs: of `cls`. A `Scatter` gives each actor one item.
        name: the actors are named "name-0", "name-1", ...
        resources: of each actor's process, as in `spawn`.

    Raises ValueError if `size` is less than 1.
    """

    __slots__ = ("_members",)

    def __init__(
        self,
        cls: type,
        size: int,
        *args: Any,
        name: str | None = None,
        resources: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if size < 1:
            raise ValueError(f"A group has at least 1 member, got {size}.\n  at {user_line()}")
        session = current_session()
        member_arguments = [_arguments_of(size, i, args, kwargs) for i in range(size)]
        infos = [
            session.spawn(
                cls,
                member_args,
                member_kwargs,
                name=None if name is None else f"{name}-{i}",
                resources=resources,
                host=None,
            )
            for i, (member_args, member_kwargs) in enumerate(member_arguments)
        ]
        self._members = tuple(map(ActorHandle, infos))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> ActorHandle:
        return self._members[index]

    def __iter__(self) -> Iterator[ActorHandle]:
        return iter(self._members)

    def __getattr__(self, name: str) -> GroupMethod:
        getattr(self._members[0], name)  # raises if it is not a public method
        return GroupMethod(self._members, name)

    def __call__(self, *args: Any, **kwargs: Any) -> GroupFuture:
        return GroupMethod(self._members, "__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<WorkerGroup of {list(self._members)}>"


@dataclass(frozen=True, slots=True)
class GroupMethod:
    """A method of a group."""

    members: tuple[ActorHandle, ...]
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method on all members. Return a `GroupFuture`; for a generator, the list of the
        members' streams."""
        size = len(self.members)
        member_arguments = [_arguments_of(size, i, args, kwargs) for i in range(size)]
        futures = [
            getattr(member, self.name)(*member_args, **member_kwargs)
            for member, (member_args, member_kwargs) in zip(
                self.members, member_arguments, strict=True
            )
        ]
        if any(isinstance(future, TaskStream) for future in futures):
            return futures
        return GroupFuture([info_of(member) for member in self.members], futures)


def all_reduce(futures: GroupFuture, op: Op = "sum") -> GroupFuture:
    """Reduce the values of all members; each member gets the result.

    Args:
        futures: the result of a method of the group. Values are pytrees of tensors and numbers.
        op: "sum", "max", "min", or "softmax" (of float tensors ``[..., 3]``).

    Values that differ in structure or shape raise when a result is read. In a compiled function
    with more than 2 members, each member reduces one piece, which moves 2 (n-1)/n of the value per
    member instead of n-1 times the value.
    """
    if op not in REDUCTIONS:
        names = tuple(REDUCTIONS)
        raise ValueError(f"A reduction is one of {names}, got {op!r}.\n  at {user_line()}")
    reduction = REDUCTIONS[op]
    group, size = futures.group, len(futures)
    if recorder.get() is None or size == 2:
        parts = list(futures)
        return GroupFuture(group, [operation(member, "fold", reduction, parts) for member in group])
    pieces = [
        [operation(member, "piece", reduction, future, i, size) for i in range(size)]
        for member, future in zip(group, futures, strict=True)
    ]
    folded = [
        operation(member, "fold_piece", reduction, [member_pieces[i] for member_pieces in pieces])
        for i, member in enumerate(group)
    ]
    return GroupFuture(
        group,
        [
            operation(member, "join", future, folded)
            for member, future in zip(group, futures, strict=True)
        ],
    )


def all_gather(futures: GroupFuture) -> GroupFuture:
    """Give each member the list of all members' values. `futures`: the result of a method of the
    group. If a member has failed, reading any of the results raises its error."""
    parts = list(futures)
    return GroupFuture(futures.group, [operation(m, "value", parts) for m in futures.group])


def broadcast(future: TaskFuture, group: WorkerGroup) -> GroupFuture:
    """Give each member of `group` the value of a future. If it has failed, reading a result raises
    its error."""
    members = [info_of(member) for member in group]
    return GroupFuture(members, [operation(member, "value", future) for member in members])


def _arguments_of(
    size: int, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of member `index` of `size`. Raises ValueError if a `Scatter` or a
    `GroupFuture` has another number of items."""

    def pick(argument: Any) -> Any:
        """Return the member's item of a `Scatter` or `GroupFuture`; any other argument as it is."""
        if isinstance(argument, Scatter | GroupFuture):
            items = argument.items if isinstance(argument, Scatter) else argument.futures
            if len(items) != size:
                raise ValueError(
                    f"A group of {size} is given {argument!r}, one item per member.\n"
                    f"  at {user_line()}\n"
                    f"  Fix: give {size} items, or list(...) to give every member all of them."
                )
            return items[index]
        return argument

    return tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()}
