"""Run a task: one call of a method of an actor, in the actor's process.

    task = Task(actor="a", name="execute", issued=("train.py:31 in main: y = a.execute(x)",))
    task.run(HostedObject(model), encode(((x,), {})).message, [])   # the message of the result

The result is a message: a value, or a failure. A task with a failed argument does not run; its
result is that failure. Arguments and results are copies. Tasks run with one kernel thread and
without the caller's autocast, so that all backends give the same bits. An `async def` method runs
to its end in the actor's event loop; a generator yields its values one by one (`streams.py`).
`OPERATIONS` are functions that run where a value is, such as the fold of an all_reduce.
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
from dtensor.daft.run.local_execution import local_execution
from dtensor.daft.tasks.values import (
    Encoded,
    MessageAllocator,
    allocate_message,
    decode,
    encode,
    encode_failure,
    is_failure,
)
from dtensor.numerics import Reduction
from dtensor.private_torch import pytree

CREATE = "__init__"
MAX_FAILURES = 100

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class HostedObject:
    """An actor's object in its process.

    `failure_message`: the failure of its `__init__`, or of the actor's end; all methods return it.
    `failures`: the first failures of methods. `allocate`: allocates the messages of results.
    `streams`: open generators, by number. `items`: the last value of each stream.
    """

    instance: object = None
    failure_message: Tensor | None = None
    failures: list[Failure] = field(default_factory=list[Failure])
    allocate: MessageAllocator = allocate_message
    streams: dict[int, Iterator[Any]] = field(default_factory=dict[int, Iterator[Any]])
    items: dict[int, Any] = field(default_factory=dict[int, Any])
    _num_streams: int = 0
    _loop: asyncio.AbstractEventLoop | None = None

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of this object, and return its result."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        # the caller's thread already runs a loop (in-process, in a notebook): use another thread
        with ThreadPoolExecutor(1) as helper:
            return helper.submit(self._run_in_loop, self._loop, coroutine).result()

    @staticmethod
    def _run_in_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with user_execution():
            return loop.run_until_complete(coroutine)

    def open(self, iterator: Any) -> int:
        """Store the generator that a method returned, and return its number in `streams`."""
        if isinstance(iterator, AsyncGenerator):
            iterator = self._iterate(iterator)  # pyright: ignore[reportUnknownArgumentType]
        if not isinstance(iterator, Iterator):
            raise TypeError(f"it yields its values, and gave a {type(iterator).__name__}")
        self._num_streams += 1
        self.streams[self._num_streams] = iterator
        return self._num_streams

    def _iterate(self, generator: AsyncGenerator[Any, None]) -> Generator[Any]:
        """Yield the values of an async generator, which runs in the event loop of this object."""
        try:
            while True:
                try:
                    yielded = self.run_coroutine(generator.__anext__())  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
                yield yielded
        finally:
            self.run_coroutine(generator.aclose())  # type: ignore[arg-type]

    def end(self, failure: Tensor) -> None:
        """End the actor: its methods return this failure from now on."""
        self.close()
        self.instance, self.failure_message, self._loop = None, failure, None

    def close(self) -> None:
        """Close the generators and the event loop."""
        for stream in self.streams.values():
            if isinstance(stream, Generator):
                stream.close()
        self.streams.clear()
        if self._loop is not None:
            self._loop.close()


def returns(*buffers: Buffer) -> Callable[[F], F]:
    """Declare by `buffers` the shapes and dtypes of the tensors in a method's result, in order.

        @daft.returns(daft.Buffer((8, 16), torch.float32))
        def execute(self, x): ...

    A call whose result differs raises TaskError. The memory of a compiled function is known only if
    all its methods declare their results.
    """

    def declare(method: F) -> F:
        vars(method)["daft_returns"] = buffers
        return method

    return declare


def declared(cls: type, name: str) -> tuple[Buffer, ...] | None:
    """Return the buffers that `returns` has declared for a method, or None."""
    for base in cls.__mro__:
        if name in vars(base):
            member = vars(base)[name]
            target = getattr(member, "__func__", member)
            return getattr(target, "__dict__", {}).get("daft_returns")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of a method of an actor.

    `name`: of the method, or of one of `OPERATIONS`. `issued`: where the controller made the call.
    `returns`: the declared result. `stream`: the method is a generator.
    """

    actor: str
    name: str
    issued: tuple[str, ...]
    operation: bool = False
    returns: tuple[Buffer, ...] | None = None
    stream: bool = False

    def plain(self) -> tuple[Any, ...]:
        """Return a plain tuple, which pickles four times as fast. `of` is the inverse."""
        return self.actor, self.name, self.issued, self.operation, self.returns, self.stream

    @staticmethod
    def of(plain: tuple[Any, ...]) -> Task:
        """Return the task of a tuple made by `plain`."""
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
        """Create the actor's object. If that fails, all its methods return the failure."""
        instances: list[object] = []

        def keep(*args: Any, **kwargs: Any) -> None:
            instances.append(get_class()(*args, **kwargs))

        message = self._run(subject, keep, arguments, inputs, (), False)
        if is_failure(message):
            subject.failure_message = message
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
        """Run the task and return the message of its result, or of its failure.

        `owned`: the inputs without a later reader, whose memory is used without a copy. `copies`:
        the arguments have other readers (in a compiled function), so they are copied.
        """
        if subject.failure_message is not None:
            return subject.failure_message
        if self.name in STREAMING and self.operation:
            method: Callable[..., object] = functools.partial(STREAMING[self.name], subject)
        elif self.operation:
            method = OPERATIONS[self.name]
        else:
            method = functools.partial(_call_method, subject.instance, self.name)
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
        """Call ``method`` with the decoded arguments. Return the message of its result or failure;
        if an input is a failure, return the input."""
        for message in inputs:
            if is_failure(message):
                return message
        # in a compiled function (`copies`) the engine has already set up the execution
        with torch.enable_grad() if copies else user_execution():
            try:
                values = [decode(m, copy=i not in owned) for i, m in enumerate(inputs)]
                args, kwargs = decode(arguments, values, copy=copies)
                del values
                result = method(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = subject.run_coroutine(result)
                if self.stream:
                    result = subject.open(result)
                encoded = encode(result, allocate=subject.allocate)
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
        """Raise if the result contains a future or a handle, or differs from its declaration."""
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
        """Return the facts about an exception of the method."""
        # skip the first frame, which is `_run`; an operation has no other frame
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


def _call_method(instance: object, name: str, *args: Any, **kwargs: Any) -> object:
    return getattr(instance, name)(*args, **kwargs)


@contextmanager
def user_execution() -> Generator[None]:
    """Set up torch for a method: one kernel thread and no autocast, but with autograd."""
    with local_execution(), torch.enable_grad():
        yield


# -- operations --------------------------------------------------------------------------------


def value(value: object) -> object:
    """Return the argument, which has been copied to the actor's process."""
    return value


def item(given: Any, key: object) -> object:
    return given[key]


def fold(op: Reduction, parts: Sequence[object]) -> object:
    """Fold the parts leaf by leaf, from left to right. Raises ValueError if the parts differ in
    structure."""
    leaves, specs = zip(*map(_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        different = "\n".join(f"  member {i}: {spec}" for i, spec in enumerate(specs))
        raise ValueError(f"The members' values differ in structure.\n{different}")
    return pytree.tree_unflatten(
        [_fold_leaf(op, column) for column in zip(*leaves, strict=True)], specs[0]
    )


def piece(op: Reduction, whole: object, index: int, num: int) -> tuple[list[Any], object]:
    """Return piece `index` of `num` of a value, and the value's form.

    A piece has a part of the elements of each tensor. Numbers are in piece 0; others have 0 there.
    A large all_reduce folds pieces, which moves 2 (n-1)/n of the value per member instead of n-1
    times the value, with the same bits.
    """
    leaves, _ = _flatten(whole)
    pieces: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _check_fold(op, leaf)
            pieces.append(leaf.detach().reshape(-1, op.unit).tensor_split(num)[index])
        else:
            pieces.append(leaf if index == 0 else 0)
    return pieces, _structure(whole)


def fold_piece(op: Reduction, parts: Sequence[tuple[list[Any], object]]) -> list[Any]:
    """Fold the pieces of all members. Raises ValueError if the forms of their values differ."""
    forms = [form for _, form in parts]
    if any(form != forms[0] for form in forms):
        different = "\n".join(f"  member {i}: {form}" for i, form in enumerate(forms))
        raise ValueError(f"The members' values differ in shape, dtype or structure.\n{different}")
    columns = zip(*(leaves for leaves, _ in parts), strict=True)
    return [_fold_leaf(op, column) for column in columns]


def join(template: object, pieces: Sequence[list[Any]]) -> object:
    """Join the folded pieces to a value with the structure of `template`."""
    leaves, spec = _flatten(template)
    joined: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            joined.append(
                torch.cat([piece_leaves[i] for piece_leaves in pieces]).reshape(leaf.shape)
            )
        else:
            joined.append(pieces[0][i])
    return pytree.tree_unflatten(joined, spec)


def advance(subject: HostedObject, number: int) -> bool:
    """Advance a stream: store its next value, and return whether there is one."""
    stream = subject.streams.pop(number)
    try:
        subject.items[number] = next(stream)
    except StopIteration:
        return False
    subject.streams[number] = stream
    return True


def taken(subject: HostedObject, number: int) -> object:
    """Return the last value of a stream, and drop it here."""
    return subject.items.pop(number)


def closed(subject: HostedObject, number: int) -> None:
    """Close a stream, and drop its last value."""
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


def _flatten(tree: object) -> tuple[list[Any], Any]:
    """Return the leaves, with tensors detached, and the structure."""
    leaves, spec = pytree.tree_flatten(tree)
    return [x.detach() if isinstance(x, Tensor) else x for x in leaves], spec


def _check_fold(op: Reduction, tensor: Tensor) -> None:
    if not op.takes(tensor.shape, tensor.dtype):
        raise ValueError(f"{op.name!r} reduces {op.wants}, got {tensor.dtype}{list(tensor.shape)}.")


def _structure(value_tree: object) -> object:
    """Return the form of a value: shapes and dtypes of its tensors, types of its numbers, its
    structure."""
    leaves, spec = _flatten(value_tree)
    return [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ], str(spec)


def _fold_leaf(op: Reduction, column: Sequence[Any]) -> object:
    """Fold tensors of one shape and dtype, or numbers. Raises for other values."""
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
