"""Actors of any class, spawned one by one, whose methods return futures.

    with daft.launch(backend="ray"):
        a, b = daft.spawn(ModelA, width=64), daft.spawn(ModelB, name="critic")
        b.execute(a.execute(x)).get()            # the tensor goes from a's process to b's

Interpreted, that is, outside `daft.compile`, a task is dispatched when Python reaches it: on Ray it
is one call to the actor's process that nobody waits for; in-process it runs at once. Futures may
stand anywhere in the arguments. Tasks of an actor run in the order of their calls.

It does not restart actors, and actors do not call actors: the controller says who does what.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import NoReturn

from dtensor.daft.tasks.actor_session import ActorInfo, recorder
from dtensor.daft.tasks.futures import TaskFuture, user_frames
from dtensor.daft.tasks.task import Task, declared
from dtensor.daft.tasks.values import Placeholder


class ActorHandle(Placeholder):
    """Its public methods are those of the actor's class; each call returns a `TaskFuture`."""

    __slots__ = ("_actor",)

    def __init__(self, actor: ActorInfo) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        actor = self._actor
        member = inspect.getattr_static(actor.cls, name, None)
        if name.startswith("_") or member is None or isinstance(member, property):
            public = [n for n in dir(actor.cls) if not n.startswith("_")]
            near = difflib.get_close_matches(name, public, n=1)
            raise AttributeError(
                f"Actor {actor.name!r} of class {actor.cls.__qualname__} has no public method "
                f"{name!r}."
                + (f"\n  Fix: did you mean {near[0]!r}?" if near else f"\n  It has: {public}.")
            )
        return Method(actor, name)

    def __call__(self, *args: object, **kwargs: object) -> TaskFuture:
        return Method(self._actor, "__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<actor {self._actor.name!r} of {self._actor.cls.__qualname__}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the controller: it does not pickle.")


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an actor, to be called."""

    actor: ActorInfo
    name: str

    def __call__(self, *args: object, **kwargs: object) -> TaskFuture:
        actor = self.actor
        task = Task(
            actor=actor.name,
            name=self.name,
            issued=user_frames(),
            returns=declared(actor.cls, self.name),
            pickler=actor.session.pickler,
        )
        arguments: tuple[object, object] = (args, kwargs)
        return (recorder.get() or actor.session).submit(actor, task, arguments)


def info_of(handle: ActorHandle) -> ActorInfo:
    return handle._actor  # pyright: ignore[reportPrivateUsage]
