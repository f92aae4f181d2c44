"""`compile`: record the tasks of a function once, and run them as one program.

    def fn(x, scale=True):
        return b.execute(a.execute(x))

    step = daft.compile(fn)
    step(x).get()                 # recorded, verified and loaded here, at the first call
    step(y)                       # one asynchronous call to each process that takes part

The leaves of `fn`'s arguments become arguments of the program, except None, bools and strings: they
are constants, and a new value or structure causes a new recording. Other values that `fn` reads are
frozen at that time. `fn` sees only futures; reading a value raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, cast

import numpy
from torch import Tensor

from dtensor.daft.errors import ProgramError
from dtensor.daft.tasks.actors import (
    ActorInfo,
    Session,
    current_session,
    misused_in_recording,
    operation,
    recorder,
)
from dtensor.daft.tasks.futures import FutureOwner, TaskFuture, user_line
from dtensor.daft.tasks.groups import GroupFuture
from dtensor.daft.tasks.lower_tasks import LoweredTasks, RecordedTask, lower_tasks
from dtensor.daft.tasks.task import Task
from dtensor.daft.tasks.values import encode
from dtensor.private_torch import pytree

P = ParamSpec("P")
_LEAVES = frozenset((int, float, bool, str, type(None), Tensor, numpy.ndarray, TaskFuture))


class Recording(FutureOwner):
    """Records tasks as they are called, and returns futures of their results."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tasks: list[RecordedTask] = []

    def argument(self, index: int, title: str) -> TaskFuture:
        return TaskFuture(self, -1, title, -1 - index)

    def submit(self, actor: ActorInfo, task: Task, args: object) -> TaskFuture:
        """Record a task, and return the future of its result."""
        if actor.session is not self.session:
            raise ProgramError(
                f"Actor {actor.name!r} is of another launch than the one that the function is "
                f"compiled in.\n  at {user_line()}\n  Fix: use actors of one launch."
            )
        encoded = encode(args)
        inputs: list[int] = []
        for placeholder in encoded.placeholders:
            if not isinstance(placeholder, TaskFuture) or placeholder.owner is not self:
                raise ProgramError(
                    f"A compiled function uses {placeholder!r}, which is neither one of its "
                    f"arguments nor made in it.\n  at {user_line()}\n"
                    f"  Fix: make it an argument of the function."
                )
            inputs.append(placeholder.value)
        self.tasks.append(
            RecordedTask(
                actor=actor.key, task=task, arguments=encoded.message, inputs=tuple(inputs)
            )
        )
        return TaskFuture(self, actor.key, task.title, len(self.tasks) - 1)

    def fetch(self, future: TaskFuture, timeout: float | None) -> Tensor:
        raise self.misuse(future, "its value is read")

    def ready(self, future: TaskFuture) -> bool:
        raise self.misuse(future, "its readiness is read")

    def then(self, future: TaskFuture, name: str, *args: object) -> TaskFuture:
        if future.actor < 0:
            raise self.misuse(future, "an item of it is read")
        return operation(self.session.actors[future.actor], name, future, *args)

    def misuse(self, future: TaskFuture, what: str) -> Exception:
        return misused_in_recording(future.title, what)


@dataclass(frozen=True, slots=True)
class _LoadedRecording:
    """A recording that is loaded in a session.

    `number`: the session's number of the program. `returned`: the function's result, with futures
    of the recording. `results`: the tasks that compute it.
    """

    session: Session
    lowered: LoweredTasks
    number: int
    returned: Any
    results: tuple[int, ...]


class Compiled(Generic[P]):
    """A function of futures that is recorded once for each structure of its arguments."""

    def __init__(self, fn: Callable[P, Any]) -> None:
        self.fn = fn
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self._loaded: list[tuple[object, _LoadedRecording]] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function asynchronously. Return its result, with futures."""
        if recorder.get() is not None:  # called within another compiled function: record it there
            return self.fn(*args, **kwargs)
        session = current_session()
        leaves, spec, key = _flatten(args, kwargs)
        loaded = next(
            (
                recording
                for recorded_key, recording in self._loaded
                if recording.session is session and recorded_key == key
            ),
            None,
        )
        if loaded is None:
            lowered, returned = self._record(session, leaves, spec)
            results = tuple(_results(returned))
            loaded = _LoadedRecording(session, lowered, session.load(lowered), returned, results)
            self._loaded = [
                (k, recording) for k, recording in self._loaded if not recording.session.closed
            ]
            self._loaded.append((key, loaded))
        inputs = [
            _input(session, leaf) if ranks else None
            for leaf, ranks in zip(leaves, loaded.lowered.arguments, strict=True)
        ]
        task_futures = session.run(loaded.number, inputs)
        futures = dict(zip(loaded.results, task_futures, strict=True))

        if isinstance(loaded.returned, TaskFuture):
            return _resolve(futures, leaves, loaded.returned)
        return pytree.tree_map(partial(_resolve, futures, leaves), loaded.returned)

    def program(self, *args: P.args, **kwargs: P.kwargs) -> LoweredTasks:
        """Return the program that a call with these arguments would run, without loading it."""
        leaves, spec, _ = _flatten(args, kwargs)
        return self._record(current_session(), leaves, spec)[0]

    def _record(self, session: Session, leaves: list[Any], spec: Any) -> tuple[LoweredTasks, Any]:
        """Call the function once with futures as arguments. Return its program and its result."""
        recording = Recording(session)
        symbols = [
            leaf if _is_static(leaf) else recording.argument(i, f"argument {i} of {self.name}")
            for i, leaf in enumerate(leaves)
        ]
        args: Any = symbols
        kwargs: dict[str, Any] = {}
        if spec is not None:
            args, kwargs = pytree.tree_unflatten(symbols, spec)
        token = recorder.set(recording)
        try:
            returned = cast(Callable[..., Any], self.fn)(*args, **kwargs)
        finally:
            recorder.reset(token)
        for future in _futures(returned):
            if future.owner is not recording:
                raise ProgramError(f"{self.name} returns {future!r}, which was not made in it.")
        if not recording.tasks:
            raise ProgramError(
                f"Compiled function {self.name!r} calls no method of an actor.\n"
                f"  at {user_line()}\n"
                f"  Fix: call it as it is, without daft.compile."
            )
        process_of = {actor.key: actor.process for actor in session.actors}
        results = _results(returned)
        return lower_tasks(self.name, recording.tasks, results, process_of, len(leaves)), returned


def compile(fn: Callable[P, Any]) -> Compiled[P]:
    """Compile `fn`, which calls methods of actors and returns their futures, to one program.

    If a task fails, only the values that depend on it fail; the actors continue. Raises TypeError
    if `fn` is not callable. The first call raises ProgramError if `fn` reads a value.
    """
    if not callable(fn):
        raise TypeError(f"compile takes a function of futures, not {fn!r}.\n  at {user_line()}")
    return Compiled(fn)


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, object]:
    """Return the leaves of the arguments, their pytree spec (None if the arguments are the leaves),
    and the key of a recording: the structure and the constants."""
    if not kwargs and all(type(arg) in _LEAVES for arg in args):  # common; pytree is slow
        leaves, spec, form = list(args), None, len(args)
    else:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        form = spec
    statics = tuple((i, repr(leaf)) for i, leaf in enumerate(leaves) if _is_static(leaf))
    return leaves, spec, (form, statics)


def _futures(returned: Any) -> list[TaskFuture]:
    """Return all futures in a function's result."""
    futures: list[TaskFuture] = []
    for leaf in pytree.tree_leaves(returned):
        if isinstance(leaf, TaskFuture | GroupFuture):
            futures += [leaf] if isinstance(leaf, TaskFuture) else leaf
    return futures


def _resolve(futures: Mapping[int, TaskFuture], leaves: Sequence[Any], leaf: Any) -> Any:
    """Return a leaf of a function's result in a run: futures of the run in place of recorded ones.
    Not a closure: a recursive closure would keep the arguments alive until a garbage collection."""
    match leaf:
        case TaskFuture():
            return futures[leaf.value] if leaf.value >= 0 else leaves[-1 - leaf.value]
        case GroupFuture():
            return GroupFuture(leaf.group, [_resolve(futures, leaves, future) for future in leaf])
        case _:
            return leaf


def _results(returned: Any) -> list[int]:
    """Return the distinct tasks of the returned futures."""
    return list(dict.fromkeys(f.value for f in _futures(returned) if f.value >= 0))


def _is_static(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, bool | str)


def _input(session: Session, leaf: Any) -> TaskFuture | Tensor:
    """Return a leaf as an input of a run: a future, or the message of a value."""
    if isinstance(leaf, TaskFuture):
        (placeholder,) = session.inputs([leaf])
        return placeholder
    encoded = encode(leaf, allocate=session.allocate)
    if encoded.placeholders:
        raise TypeError(
            f"An argument of a compiled function hides a future: {leaf!r}.\n  at {user_line()}\n"
            f"  Fix: pass the future itself, or a list or dict of futures."
        )
    return encoded.message
