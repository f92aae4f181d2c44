"""Actors of any class whose methods return futures, and the `Session` that they belong to.

    with daft.launch(backend="ray"):
        a, b = daft.spawn(ModelA, width=64), daft.spawn(ModelB, name="critic")
        b.execute(a.execute(x)).get()            # the tensor goes from a's process to b's process

Outside `daft.compile` a task is dispatched when its method is called: an asynchronous call on Ray;
in-process it runs at once. Every process executes its tasks in the order of the calls. Only the
controller calls actors, and actors are not restarted. `Session` is the base of `local_session.py`
and `ray/actors/session.py`.
"""

from __future__ import annotations

import difflib
import inspect
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn, Protocol

from torch import Tensor

from dtensor.daft.errors import ClusterClosed, DaftError, Failure, ProgramError
from dtensor.daft.tasks.futures import ITERATED, FutureOwner, TaskFuture, user_frames, user_line
from dtensor.daft.tasks.lower_tasks import LoweredTasks
from dtensor.daft.tasks.streams import TaskStream
from dtensor.daft.tasks.task import CREATE, Task, declared
from dtensor.daft.tasks.values import Placeholder, allocate_message, encode, failure_of, pickled


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """An actor. `key`: its number in the session. `process`: the number of its process."""

    key: int
    name: str
    cls: type
    process: int
    session: Session = field(repr=False, compare=False)


class Recorder(Protocol):
    """Receives tasks in place of the session while a function is recorded."""

    def submit(self, actor: ActorInfo, task: Task, args: object) -> TaskFuture: ...


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
sessions: list[Session | Callable[[], Session]] = []
"""The open sessions, the innermost last. A function creates a session on first use."""


class Session(FutureOwner):
    """A launch of actors. `calls`: the number of calls to actors' processes. `bytes_sent`,
    `bytes_received`: the bytes of values that the controller itself has sent and received."""

    def __init__(self) -> None:
        self.calls: int = 0
        self.bytes_sent: int = 0
        self.bytes_received: int = 0
        self.actors: list[ActorInfo] = []
        self.lock: threading.RLock = threading.RLock()  # gives tasks one order in all processes
        self.closed: bool = False
        self.opened_at: str = ""  # the user's line; "" within `dt.launch`
        self._raised: set[tuple[str, ...]] = set()
        self.abandoned: deque[TaskFuture] = deque()  # streams to close; finalizers append

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate the message of an argument."""
        return allocate_message(nbytes)

    # -- methods of a backend --------------------------------------------------------------------
    @abstractmethod
    def new_process(self, name: str, resources: Mapping[str, float]) -> int:
        """Start a process for actors, and return its number."""

    @abstractmethod
    def create(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> None: ...

    @abstractmethod
    def dispatch(
        self, actor: ActorInfo, task: Task, arguments: Tensor, inputs: Sequence[TaskFuture]
    ) -> TaskFuture: ...

    @abstractmethod
    def wait_for(self, future: TaskFuture, timeout: float | None) -> Tensor: ...

    @abstractmethod
    def load(self, frozen: LoweredTasks) -> int:
        """Send a program to the processes that take part, and return its number."""

    @abstractmethod
    def run(self, loaded: int, inputs: Sequence[TaskFuture | Tensor | None]) -> list[TaskFuture]:
        """Run a loaded program, with one call to each process. Return the futures of its results.
        ``inputs``: its arguments; None for an argument that no rank uses."""

    @abstractmethod
    def end(self, actor: ActorInfo, failure: Failure) -> None:
        """End the process of an actor. Futures of values in it fail with `failure`."""

    @abstractmethod
    def failures(self) -> list[DaftError]:
        """Wait for all tasks; return the failures of methods and of lost actors."""

    @abstractmethod
    def stop(self) -> None: ...

    # -- common to all backends ------------------------------------------------------------
    def spawn(
        self,
        cls: type,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        name: str | None,
        resources: Mapping[str, float] | None,
        host: ActorInfo | None,
    ) -> ActorInfo:
        """Create an actor in a new process, or in the process of ``host``. Raises TypeError if
        ``cls`` is not a class or cannot be pickled, ValueError if ``host`` and ``resources``
        contradict."""
        self.check_open()
        if recorder.get() is not None:
            raise ProgramError(
                f"An actor is spawned while a function is recorded.\n  at {user_line()}\n"
                f"  Fix: spawn it before, and use its handle in the function."
            )
        if not inspect.isclass(cls):
            raise TypeError(f"An actor is spawned of a class, got {cls!r}.\n  at {user_line()}")
        _check_pickles(cls)
        encoded = encode((tuple(args), dict(kwargs)), allocate=self.allocate)
        with self.lock:
            if host is not None:
                process = host.process
                if host.session is not self:
                    raise _other_launch_error(host.name)
                if resources:
                    raise ValueError(
                        f"Actors that share a process have the resources of the first one.\n"
                        f"  at {user_line()}\n  Fix: leave out resources= or host=."
                    )
            else:
                process = self.new_process(name or cls.__name__, dict(resources or {}))
            actor = ActorInfo(len(self.actors), self._name(cls, name), cls, process, self)
            self.actors.append(actor)
            task = Task(actor=actor.name, name=CREATE, issued=user_frames())
            self.create(actor, task, encoded.message, self.inputs(encoded.placeholders))
        return actor

    def submit(self, actor: ActorInfo, task: Task, args: object) -> TaskFuture:
        """Encode the arguments of a task and dispatch it. Return the future of its result."""
        self.check_open()
        self._close_abandoned()
        encoded = encode(args, allocate=self.allocate)
        inputs = self.inputs(encoded.placeholders)
        with self.lock:
            return self.dispatch(actor, task, encoded.message, inputs)

    def _close_abandoned(self) -> None:
        """Close the generators of streams that are garbage."""
        streams: list[TaskFuture] = []
        while self.abandoned:
            streams.append(self.abandoned.popleft())
        for stream in streams:
            self.then(stream, "closed")

    def inputs(self, placeholders: Sequence[Placeholder]) -> list[TaskFuture]:
        """Return the placeholders of a task's arguments, which must be futures of this session.
        Raises TypeError for an actor's handle, ValueError for a future of another launch."""
        futures: list[TaskFuture] = []
        for placeholder in placeholders:
            if not isinstance(placeholder, TaskFuture):
                raise TypeError(
                    f"{placeholder!r} is an argument of a task: actors do not call actors.\n"
                    f"  at {user_line()}\n  Fix: call it from the controller, and pass the future."
                )
            if placeholder.owner is not self:
                raise _other_launch_error(repr(placeholder))
            futures.append(placeholder)
        return futures

    def fetch(self, future: TaskFuture, timeout: float | None) -> Tensor:
        """Wait for the message of a future, which may be a failure. Note that a failure was
        read."""
        if recorder.get() is not None:
            raise self.misuse(future, "its value is read")
        self.check_open()
        message = self.wait_for(future, timeout)
        error = failure_of(message)
        if error is not None:
            self.note_raised(error.failure)
        return message

    def note_raised(self, failure: Failure) -> None:
        self._raised.add(_issue_place(failure))

    def then(self, future: TaskFuture, name: str, *args: object) -> TaskFuture:
        return operation(self.actors[future.actor], name, future, *args)

    def misuse(self, future: TaskFuture, what: str) -> Exception:
        """Return the error for using a future as a value. ``what``: how it was used."""
        if recorder.get() is not None:
            return misused_in_recording(future.title, what)
        return TypeError(
            f"A future is not a value, but {what}: {future.title}.\n  at {user_line()}\n"
            + (
                "  Fix: a, b = f.get() waits for the values; f[0] and f[1] are futures of them."
                if what == ITERATED
                else "  Fix: wait for its value with .get(), or pass the future to a method of an "
                "actor."
            )
        )

    def close(self, *, quiet: bool = False) -> None:
        """End all actors. Raises the first failure that was not read, unless ``quiet``.

        A failure counts as read if another failure issued at the same place was read, so that
        reading one failure of a group is enough.
        """
        if self.closed:
            return
        try:
            unread = (
                []
                if quiet
                else [e for e in self.failures() if _issue_place(e.failure) not in self._raised]
            )
        finally:
            self.closed = True
            sessions.remove(self)
            self.stop()
        if unread:
            unread[0].add_note(
                f"No future that depends on this was read; {len(unread)} such failures in all."
            )
            raise unread[0]

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(quiet=error is not None)

    def check_open(self) -> None:
        """Raise ClusterClosed if the session has ended."""
        if self.closed:
            raise ClusterClosed(
                f"These actors have ended with their launch.\n  at {user_line()}\n"
                f"  Fix: use them inside `with daft.launch(...)`."
            )

    def _name(self, cls: type, name: str | None) -> str:
        """Return the name of a new actor. Raises ValueError if another actor has the name."""
        used_names = {actor.name for actor in self.actors}
        if name is not None:
            if name in used_names:
                raise ValueError(
                    f"There is an actor {name!r} already.\n  at {user_line()}\n"
                    f"  Fix: give each actor a different name, or none."
                )
            return name
        number = 0
        while (numbered := f"{cls.__name__}-{number}") in used_names:
            number += 1
        return numbered


class ActorHandle(Placeholder):
    """The controller's handle of an actor. It has the public methods of the actor's class, which
    return a `TaskFuture`."""

    __slots__ = ("_actor",)

    def __init__(self, actor: ActorInfo) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        """Return the public method with this name. Raises AttributeError if the class has none."""
        actor = self._actor
        member = inspect.getattr_static(actor.cls, name, None)
        if name.startswith("_") or not callable(getattr(member, "__func__", member)):
            raise AttributeError(
                f"Actor {actor.name!r} of class {actor.cls.__qualname__} has no public method "
                f"{name!r}{_suggestion(name, member, actor.cls)}"
            )
        return Method(actor, name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return Method(self._actor, "__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<actor {self._actor.name!r} of {self._actor.cls.__qualname__}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the controller: it does not pickle.")


@dataclass(frozen=True, slots=True)
class Method:
    """A bound method of an actor."""

    actor: ActorInfo
    name: str

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the method. Return a `TaskFuture`, or for a generator a `TaskStream`."""
        actor, stream = self.actor, _yields(self.actor.cls, self.name)
        if stream and recorder.get() is not None:
            raise misused_in_recording(f"{actor.name}.{self.name}", "its values are read")
        task = Task(
            actor=actor.name,
            name=self.name,
            issued=user_frames(),
            returns=declared(actor.cls, self.name),
            stream=stream,
        )
        arguments: tuple[object, object] = (args, kwargs)
        future = (recorder.get() or actor.session).submit(actor, task, arguments)
        return TaskStream(future, actor.session.abandoned) if stream else future


@lru_cache(maxsize=4096)
def _yields(cls: type, name: str) -> bool:
    """Return whether a method is a generator, plain or `async`."""
    member: Any = inspect.getattr_static(cls, name, None)
    method = inspect.unwrap(getattr(member, "__func__", member))
    return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)


def _suggestion(name: str, member: object, cls: type) -> str:
    """Return the end of the error for a missing method: a similar name, or all names."""
    if isinstance(member, property):
        return f": it is a property.\n  Fix: call a method that returns self.{name}."
    public = [n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n, None))]
    near = difflib.get_close_matches(name, public, n=1)
    return f".\n  Fix: did you mean {near[0]!r}?" if near else f".\n  It has: {public}."


def info_of(handle: ActorHandle) -> ActorInfo:
    return handle._actor  # pyright: ignore[reportPrivateUsage]


def operation(actor: ActorInfo, name: str, *args: object) -> TaskFuture:
    """Run one of `OPERATIONS` in the process of an actor."""
    task = Task(
        actor=actor.name,
        name=name,
        issued=user_frames(),
        operation=True,
    )
    arguments: tuple[object, object] = (args, dict[str, object]())
    return (recorder.get() or actor.session).submit(actor, task, arguments)


def current_session() -> Session:
    """Return the innermost open session, started now if it was deferred. Raises RuntimeError if no
    launch is open."""
    if not sessions:
        raise RuntimeError(
            f"Actors need a launch.\n  at {user_line()}\n"
            f"  Fix: put this inside `with daft.launch():`, or daft.launch(backend='ray')."
        )
    last = sessions[-1]
    return last if isinstance(last, Session) else last()


def check_no_open_launch() -> None:
    """Raise RuntimeError if a launch of actors is open."""
    for other in sessions:
        if isinstance(other, Session) and other.opened_at:
            raise RuntimeError(
                f"A launch is open already: the one at {other.opened_at}.\n  at {user_line()}\n"
                f"  Fix: spawn the actors in that one, or end it before, for example by close()."
            )


def _check_pickles(cls: type) -> None:
    """Raise TypeError if the class cannot be pickled."""
    try:
        pickled(cls)
    except Exception as error:  # any error of an object that the class refers to
        raise TypeError(
            f"Class {cls.__qualname__} cannot go to another process: it does not pickle "
            f"({error}).\n  at {user_line()}\n"
            f"  Fix: make the objects it refers to in __init__, or define it in a module."
        ) from error


def enter(session: Session, opened_at: str) -> Session:
    session.opened_at = opened_at
    sessions.append(session)
    return session


def end(actor: ActorHandle) -> None:
    """End an actor's process, with all actors in it (`host=`), without waiting for running methods.

    Futures of its unfinished tasks, and of tasks that depend on them, raise ActorLost. A value that
    no other process has is lost. May be called again. Raises TypeError if it is not an actor.
    """
    if not isinstance(actor, ActorHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"end takes an actor, got {actor!r}.\n  at {user_line()}")
    info = info_of(actor)
    info.session.check_open()
    if recorder.get() is not None:
        raise ProgramError(
            f"An actor is ended while a function is recorded.\n  at {user_line()}\n"
            f"  Fix: end it before or after."
        )
    reason = f"it was ended by daft.end, at {user_line()}"
    failure = Failure(rank=None, actor=info.name, reason=reason)
    info.session.note_raised(failure)
    info.session.end(info, failure)


def misused_in_recording(title: str, what: str) -> ProgramError:
    """Return the error for reading a future of a function that is being recorded."""
    return ProgramError(
        f"A compiled function is recorded once, before there are values, but {what}: {title}.\n"
        f"  at {user_line()}\n"
        f"  Fix: do this in a method of an actor, or call the function without daft.compile."
    )


def _issue_place(failure: Failure) -> tuple[str, ...]:
    """Return where the controller issued the failed call; the actor, if a process was lost between
    tasks."""
    return failure.issued or (failure.actor,)


def _other_launch_error(what: str) -> ValueError:
    return ValueError(
        f"{what} belongs to another launch than the one it is used in.\n  at {user_line()}\n"
        f"  Fix: get() its value there and pass that, or spawn the actor in this launch."
    )
