"""Groups: n actors of a class, addressed as one.

    trainers = daft.WorkerGroup(Trainer, 4, rank=daft.Scatter(range(4)))
    grads = trainers.gradients(daft.Scatter(batches))       # a GroupFuture: one future per member
    trainers.apply(daft.all_reduce(grads))                  # each member gets its own
    critic.score(trainers.sample(prompt)).get()             # one actor gets the list

A method of a group is called on every member, all dispatched before anything waits. An argument
goes to every member as it is, but a `Scatter` gives each member an item of its own, and so does the
`GroupFuture` of a group of the same size. Collectives are tasks of daft's own that run where the
members are; a reduction is a left fold in the order of the members, the same bits everywhere.
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
    """An argument of a group's method: of ``items`` one for each member."""

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
    """A future for each member, in their order. To an actor's method it is the list of values."""

    __slots__ = ("futures", "group")

    def __init__(self, group: Sequence[ActorInfo], futures: Sequence[TaskFuture]) -> None:
        self.group: tuple[ActorInfo, ...] = tuple(group)
        self.futures: tuple[TaskFuture, ...] = tuple(futures)

    def get(self, timeout: float | None = None) -> list[Any]:
        """The members' values; `timeout` is for each. Raises the first failure in their order."""
        return [future.get(timeout) for future in self.futures]

    def done(self) -> bool:
        """Whether `get` would not wait for any member."""
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
    """`size` actors of a class `cls`, on processes of their own, made of `args` and `kwargs`; a
    `Scatter` among these gives each its own. `name` becomes "name-0", "name-1", ...; `resources`
    are each one's, as of `spawn`. Its methods are the class's, and give a `GroupFuture`. ValueError
    for fewer than one."""

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
        given = [_own(size, i, args, kwargs) for i in range(size)]
        spawned = [
            session.spawn(
                cls,
                own_args,
                own_kwargs,
                name=None if name is None else f"{name}-{i}",
                resources=resources,
                host=None,
            )
            for i, (own_args, own_kwargs) in enumerate(given)
        ]
        self._members = tuple(map(ActorHandle, spawned))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> ActorHandle:
        return self._members[index]

    def __iter__(self) -> Iterator[ActorHandle]:
        return iter(self._members)

    def __getattr__(self, name: str) -> GroupMethod:
        getattr(self._members[0], name)  # raises for what is no public method
        return GroupMethod(self._members, name)

    def __call__(self, *args: Any, **kwargs: Any) -> GroupFuture:
        return GroupMethod(self._members, "__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<WorkerGroup of {list(self._members)}>"


@dataclass(frozen=True, slots=True)
class GroupMethod:
    members: tuple[ActorHandle, ...]
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A `GroupFuture`, or of a method that yields the list of the members' streams."""
        size = len(self.members)
        given = [_own(size, i, args, kwargs) for i in range(size)]
        futures = [
            getattr(member, self.name)(*own_args, **own_kwargs)
            for member, (own_args, own_kwargs) in zip(self.members, given, strict=True)
        ]
        if any(isinstance(each, TaskStream) for each in futures):
            return futures
        return GroupFuture([info_of(member) for member in self.members], futures)


def all_reduce(futures: GroupFuture, op: Op = "sum") -> GroupFuture:
    """Each member gets the fold of all members' values: pytrees of tensors and numbers ("softmax":
    of float tensors ``[..., 3]``). `futures` are what a method of the group gave, `op` is "sum",
    "max", "min" or "softmax". Values that do not fit are an error where a result is read.

    Compiled, with more than 2 members, each folds a piece and sends it on, which moves
    2 (n-1)/n of the value per member instead of n-1 times the value.
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
        operation(member, "fold_piece", reduction, [own[i] for own in pieces])
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
    """Each member gets the list of all members' values; `futures` are what a method of the group
    gave. A member that failed is an error for all, raised where one of the results is read."""
    parts = list(futures)
    return GroupFuture(futures.group, [operation(m, "value", parts) for m in futures.group])


def broadcast(future: TaskFuture, group: WorkerGroup) -> GroupFuture:
    """Each member of `group` gets the value of one future, or its failure as an error where it is
    read."""
    members = [info_of(member) for member in group]
    return GroupFuture(members, [operation(member, "value", future) for member in members])


def _own(
    size: int, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What member `index` is given."""

    def pick(given: Any) -> Any:
        if isinstance(given, Scatter | GroupFuture):
            items = given.items if isinstance(given, Scatter) else given.futures
            if len(items) != size:
                raise ValueError(
                    f"A group of {size} is given {given!r}, one item per member.\n"
                    f"  at {user_line()}\n"
                    f"  Fix: give {size} items, or list(...) to give every member all of them."
                )
            return items[index]
        return given

    return tuple(map(pick, args)), {key: pick(given) for key, given in kwargs.items()}
