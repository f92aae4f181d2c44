"""A task: one call of a method of an actor, as the actor's process runs it.

    task = Task(actor="a", name="execute", issued=("train.py:31 in main: y = a.execute(x)",))
    task.run(HostedObject(model), encode(((x,), {})).message, [])   # the message of the result

Invariants: a task always ends in a message: its result, or a failure with the place where the
controller issued the task and the place where the method failed. A task with a failed argument does
not run: its result is that failure, so the root cause is passed on without a cascade. Arguments and
results are copies; a method may change its arguments. It runs with one kernel thread and without
the caller's autocast: the same bits in every backend and mode. An `async def` method is run to its
end, in an event loop of the actor; the values of a generator are requested one by one
(`streams.py`).

A few tasks are not methods but `OPERATIONS`, which futures and groups need at the place of values.

    OPERATIONS["fold"](REDUCTIONS["sum"], [grads0, grads1])      # leaf by leaf, in this order

Values are pytrees. `piece` and `join` cut one into pieces and put them together again, so that a
large all_reduce costs each member 2 (n-1)/n of the value instead of n-1 times; a fold acts on each
element by itself, so that cutting changes no bit. They do not know actors.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtensor.daft.errors import Failure, TaskError
from dtensor.daft.ir.instructions import Buffer
from dtensor.daft.remote_exceptions import (
    RemoteException,
    interrupts,
    reason_of,
    trace_of,
    traceback_of,
)
from dtensor.daft.run.engine import local_execution
from dtensor.daft.tasks.values import (
    Encoded,
    Room,
    decode,
    encode,
    encode_failure,
    is_failure,
    own_room,
)
from dtensor.numerics import Reduction
from dtensor.private_torch import pytree

CREATE = "__init__"
MAX_FAILURES = 100

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class HostedObject:
    """An actor's object in its process; the first failures here, until they are read. `room`: the
    allocator for the messages of its results."""

    instance: object = None
    unborn: Tensor | None = None
    failures: list[Failure] = field(default_factory=list[Failure])
    room: Room = own_room
    streams: dict[int, Iterator[Any]] = field(default_factory=dict[int, Iterator[Any]])
    items: dict[int, Any] = field(default_factory=dict[int, Any])  # by stream, its last value
    _opened: int = 0
    _loop: asyncio.AbstractEventLoop | None = None

    def awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result, run in the event loop of this object."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        # in-process, inside a loop of the caller, as in a notebook: a thread has one loop
        with ThreadPoolExecutor(1) as helper:
            return helper.submit(self._alone, self._loop, coroutine).result()

    @staticmethod
    def _alone(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with user_execution():
            return loop.run_until_complete(coroutine)

    def open(self, given: Any) -> int:
        """Open a method's generator, whose values are requested one by one; returns its number
        here."""
        if isinstance(given, AsyncGenerator):
            given = self._items(given)  # pyright: ignore[reportUnknownArgumentType]
        if not isinstance(given, Iterator):
            raise TypeError(f"it yields its values, and gave a {type(given).__name__}")
        self._opened += 1
        self.streams[self._opened] = given
        return self._opened

    def _items(self, given: AsyncGenerator[Any, None]) -> Generator[Any]:
        try:
            while True:
                try:
                    yielded = self.awaited(given.__anext__())  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
                yield yielded
        finally:
            self.awaited(given.aclose())  # type: ignore[arg-type]

    def end(self, failure: Tensor) -> None:
        """From now on the methods return this failure."""
        self.close()
        self.instance, self.unborn, self._loop = None, failure, None

    def close(self) -> None:
        """Close the generators."""
        for stream in self.streams.values():
            if isinstance(stream, Generator):
                stream.close()
        self.streams.clear()
        if self._loop is not None:
            self._loop.close()


def returns(*buffers: Buffer) -> Callable[[F], F]:
    """Declare the tensors of a method's result, in order: they are checked, and bound the memory.

        @daft.returns(daft.Buffer((8, 16), torch.float32))
        def execute(self, x): ...

    `buffers`: a shape and a dtype each. A result that differs is a TaskError of the call. A method
    without it may return anything; a compiled step's memory is then unknown.
    """

    def declare(method: F) -> F:
        vars(method)["daft_returns"] = buffers
        return method

    return declare


def declared(cls: type, name: str) -> tuple[Buffer, ...] | None:
    for base in cls.__mro__:
        if name in vars(base):
            member = vars(base)[name]
            target = getattr(member, "__func__", member)
            return getattr(target, "__dict__", {}).get("daft_returns")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`name`: of a method, or of one of our operations; `stream`: the method is a generator."""

    actor: str
    name: str
    issued: tuple[str, ...]
    operation: bool = False
    returns: tuple[Buffer, ...] | None = None
    stream: bool = False

    def plain(self) -> tuple[Any, ...]:
        """A plain tuple for another process: a pickled dataclass takes four times as long."""
        return self.actor, self.name, self.issued, self.operation, self.returns, self.stream

    @staticmethod
    def of(plain: tuple[Any, ...]) -> Task:
        actor, name, issued, operation, returns, stream = plain
        return Task(
            actor=actor,
            name=name,
            issued=issued,
            operation=operation,
            returns=returns,
            stream=stream,
        )

    @property
    def title(self) -> str:
        return f"{self.actor}.{self.name}"

    def create(
        self,
        subject: HostedObject,
        get_class: Callable[[], type],
        arguments: Tensor,
        inputs: Sequence[Tensor],
    ) -> None:
        """Make the actor's object; a failure is kept, and its methods return it."""
        instances: list[object] = []

        def keep(*args: Any, **kwargs: Any) -> None:
            instances.append(get_class()(*args, **kwargs))

        message = self._run(subject, keep, arguments, inputs, (), False)
        if is_failure(message):
            subject.unborn = message
        else:
            (subject.instance,) = instances

    def run(
        self,
        subject: HostedObject,
        arguments: Tensor,
        inputs: Sequence[Tensor],
        owned: Collection[int] = (),
        *,
        copies: bool = False,
    ) -> Tensor:
        """The message of the result. `owned`: the inputs that have no later reader; `copies`: the
        arguments have other readers."""
        if subject.unborn is not None:
            return subject.unborn
        if self.name in STREAMING and self.operation:
            method: Callable[..., object] = functools.partial(STREAMING[self.name], subject)
        elif self.operation:
            method = OPERATIONS[self.name]
        else:
            method = functools.partial(_call, subject.instance, self.name)
        return self._run(subject, method, arguments, inputs, owned, copies)

    def _run(
        self,
        subject: HostedObject,
        method: Callable[..., object],
        arguments: Tensor,
        inputs: Sequence[Tensor],
        owned: Collection[int],
        copies: bool,
    ) -> Tensor:
        for message in inputs:
            if is_failure(message):
                return message
        # in a compiled function, which `copies` its arguments, the engine has seen to the rest
        with torch.enable_grad() if copies else user_execution():
            try:
                values = [decode(m, copy=i not in owned) for i, m in enumerate(inputs)]
                args, kwargs = decode(arguments, values, copy=copies)
                del values
                result = method(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = subject.awaited(result)
                if self.stream:
                    result = subject.open(result)
                encoded = encode(result, room=subject.room)
                del result
                self._check(encoded)
            except BaseException as error:
                if interrupts(error):
                    raise
                failure = self._failure(error)
                if len(subject.failures) < MAX_FAILURES:
                    subject.failures.append(failure)
                return encode_failure(TaskError(failure))
        return encoded.message

    def _check(self, encoded: Encoded) -> None:
        if encoded.placeholders:
            raise TypeError(
                f"{self.title} returned a future or a handle, which belongs to the controller.\n"
                f"  Fix: return tensors and plain data."
            )
        if self.returns is None:
            return
        returned = tuple(Buffer(shape, dtype) for dtype, shape in encoded.tensors)
        if returned != self.returns:
            raise ValueError(
                f"{self.title} returned other tensors than it declares.\n"
                f"  declared: {', '.join(map(str, self.returns))}\n"
                f"  returned: {', '.join(map(str, returned))}"
            )

    def _failure(self, error: BaseException) -> Failure:
        # the first frame is `_run` itself; an operation has no user's line
        trace = traceback_of(error)
        if trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return Failure(
            rank=None,
            actor=self.actor,
            text=self.name,
            reason=reason_of(error),
            issued=self.issued,
            traceback=trace_of(error, trace),
            raised=RemoteException(error).detached(),
        )


def _call(instance: object, name: str, *args: Any, **kwargs: Any) -> object:
    return getattr(instance, name)(*args, **kwargs)


@contextmanager
def user_execution() -> Generator[None]:
    """One kernel thread and no autocast, as programs run; but a method may use autograd."""
    with local_execution(), torch.enable_grad():
        yield


# -- daft's operations ---------------------------------------------------------------------------


def value(given: object) -> object:
    """A copy of the argument, in the actor's process."""
    return given


def item(given: Any, key: object) -> object:
    return given[key]


def fold(op: Reduction, parts: Sequence[object]) -> object:
    """The parts' leaves, folded; tensors as `numerics.fold` does, numbers in the same order."""
    leaves, specs = zip(*map(_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        different = "\n".join(f"  member {i}: {spec}" for i, spec in enumerate(specs))
        raise ValueError(f"The members' values differ in structure.\n{different}")
    return pytree.tree_unflatten(
        [_fold_leaf(op, column) for column in zip(*leaves, strict=True)], specs[0]
    )


def piece(op: Reduction, given: object, index: int, num: int) -> tuple[list[Any], object]:
    """Piece `index` of `num`: a part of each tensor's elements; other values are all in piece 0."""
    leaves, _ = _flatten(given)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _check_fold(op, leaf)
            kept.append(leaf.detach().reshape(-1, op.unit).tensor_split(num)[index])
        else:
            kept.append(leaf if index == 0 else 0)
    return kept, _form(given)


def fold_piece(op: Reduction, parts: Sequence[tuple[list[Any], object]]) -> list[Any]:
    """The fold of all members' pieces; the forms tell whether the whole values fit together."""
    forms = [form for _, form in parts]
    if any(form != forms[0] for form in forms):
        different = "\n".join(f"  member {i}: {form}" for i, form in enumerate(forms))
        raise ValueError(f"The members' values differ in shape, dtype or structure.\n{different}")
    columns = zip(*(kept for kept, _ in parts), strict=True)
    return [_fold_leaf(op, column) for column in columns]


def join(given: object, pieces: Sequence[list[Any]]) -> object:
    """A value like `given`, from the folded pieces."""
    leaves, spec = _flatten(given)
    joined: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            joined.append(torch.cat([kept[i] for kept in pieces]).reshape(leaf.shape))
        else:
            joined.append(pieces[0][i])
    return pytree.tree_unflatten(joined, spec)


def advance(subject: HostedObject, number: int) -> bool:
    """Whether a stream has one more value, which is then stored."""
    stream = subject.streams.pop(number)
    try:
        subject.items[number] = next(stream)
    except StopIteration:
        return False
    subject.streams[number] = stream
    return True


def taken(subject: HostedObject, number: int) -> object:
    return subject.items.pop(number)


def closed(subject: HostedObject, number: int) -> None:
    stream = subject.streams.pop(number, None)
    subject.items.pop(number, None)
    if isinstance(stream, Generator):
        stream.close()


STREAMING: Mapping[str, Callable[..., object]] = {
    "advance": advance,
    "taken": taken,
    "closed": closed,
}
OPERATIONS: Mapping[str, Callable[..., object]] = {
    "value": value,
    "item": item,
    "fold": fold,
    "piece": piece,
    "fold_piece": fold_piece,
    "join": join,
}


def _flatten(given: object) -> tuple[list[Any], Any]:
    """The leaves, tensors without their gradients, and the structure."""
    leaves, spec = pytree.tree_flatten(given)
    return [x.detach() if isinstance(x, Tensor) else x for x in leaves], spec


def _check_fold(op: Reduction, tensor: Tensor) -> None:
    if not op.takes(tensor.shape, tensor.dtype):
        raise ValueError(f"{op.name!r} reduces {op.wants}, got {tensor.dtype}{list(tensor.shape)}.")


def _form(given: object) -> object:
    leaves, spec = _flatten(given)
    return [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ], str(spec)


def _fold_leaf(op: Reduction, column: Sequence[Any]) -> object:
    first = column[0]
    if all(isinstance(part, Tensor) for part in column):
        if any(part.shape != first.shape or part.dtype != first.dtype for part in column):
            raise ValueError(
                f"The members' tensors differ: "
                f"{[f'{part.dtype}{list(part.shape)}' for part in column]}."
            )
        _check_fold(op, first)
        with torch.no_grad():
            return op.of(column)
    numbers = all(isinstance(part, int | float) and not isinstance(part, bool) for part in column)
    if not numbers or op.numbers is None:
        raise TypeError(
            f"Tensors {'alone' if op.numbers is None else 'and numbers'} can be reduced by "
            f"{op.name!r}, got {[type(part).__name__ for part in column]}."
        )
    return functools.reduce(op.numbers, column)
